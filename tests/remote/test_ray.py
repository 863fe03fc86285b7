"""`RayReplayBuffer` on a real cluster: starting, finding, sharing, ending; who dies; what passes through Ray."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import remote_children as children
import torch
from remote_children import batch, ids_of, wait_for
from tensordict import TensorDict
from test_gloo import WITHIN_S, Waiting, waiters

from millpond import BlockingReplayBuffer, ReplayBuffer
from millpond.cli import main
from millpond.core.errors import (
    BufferClosed,
    DeadlineExceeded,
    InvalidArgument,
    InvalidType,
    NotShareable,
    OutOfMemory,
    PeerLost,
)
from millpond.core.schema import Schema
from millpond.remote import RayReplayBuffer, ReplayClient, connect
from millpond.remote.cluster import NAMESPACE
from millpond.replay import ConsumingSampler
from millpond.shm.directory import reap

ray = pytest.importorskip("ray")
ROW_NBYTES = Schema.from_example(batch(1)).row_nbytes


@pytest.fixture(scope="module")
def shared(cluster: str) -> Iterator[RayReplayBuffer]:
    """One buffer for the tests that leave it as it is: a name, and a schema."""
    rb = RayReplayBuffer(
        5000,
        batch_size=100,
        schema=Schema.from_example(batch(1)),
        ray_options={"name": "shared"},
        sampler=ConsumingSampler(1),
        flow=children.BLOCK,
    )
    yield rb
    rb.close()


@pytest.fixture
def rb(shared: RayReplayBuffer, cluster: str) -> RayReplayBuffer:
    shared.empty()
    return shared


@pytest.fixture
def far(rb: RayReplayBuffer) -> Iterator[ReplayClient]:
    """A client whose batches pass through Ray."""
    with rb.client(transport="ray") as made:
        yield made


# ---------------------------------------------------------------------- starting and finding
def test_the_program_s_own_ray_is_left_alone(rb):
    assert ray.get_runtime_context().namespace == "tests"
    assert rb.transport == "shm"
    assert rb.client(host="elsewhere").transport == "gloo"
    assert rb.describe()["node"] == ray.util.get_node_ip_address()
    assert "shared" in repr(rb)
    assert "token" not in repr(rb._owner)


def test_a_client_travels_in_tasks(rb, far):
    """Collectors and learners get it as an argument, and connect where they are."""

    @ray.remote(num_cpus=0)
    def write(client: ReplayClient, start: int) -> tuple[str, int]:
        torch.set_num_threads(1)
        return client.transport, len(client.extend(batch(50, start=start)))

    assert ray.get(write.remote(far, 0)) == (far.transport, 50)
    assert ray.get(write.remote(rb, 50)) == ("shm", 50)  # the buffer itself travels as a client
    assert type(pickle.loads(pickle.dumps(rb))) is ReplayClient
    assert ids_of(far.sample()) == list(range(100))


def test_a_live_owner_is_found_by_its_name(rb, capsys):
    rb.extend(batch(7))
    with connect("shared") as found:
        assert (len(found), found.transport) == (7, "shm")
    with pytest.raises(PeerLost, match="nobody"):
        connect("nobody")
    found = subprocess.run(
        [sys.executable, "-m", "millpond.cli", "inspect", "ray://shared", "--rows", "1"],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address},
    )
    assert main(["inspect", "ray://nobody"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "millpond inspect: ray://nobody: there is no replay 'nobody' in namespace 'millpond' of this Ray cluster"
    ]
    assert found.returncode == 0, found.stderr
    for words in ("shared", f"process {rb._owner.pid}", "7 of 5,000 items", "gloo://", "write_count", "[6, 6, 6]"):
        assert words in found.stdout


def test_what_cannot_be_is_refused_before_anything_starts(cluster):
    for error, options in (
        (InvalidArgument, {"transport": "tcp"}),
        (InvalidType, {"kind": dict}),
        (InvalidArgument, {"shared": True}),
        (InvalidType, {"connect_timeout": "long"}),
    ):
        with pytest.raises(error):
            RayReplayBuffer(10, **options)


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (OutOfMemory, {"storage": 10**15, "schema": Schema.from_example(batch(1))}),
        (InvalidArgument, {"storage": 10, "ray_options": {"name": "shared"}}),
        (InvalidArgument, {"storage": 10, "ray_options": {"no such option": 1}}),
        (DeadlineExceeded, {"storage": 10, "ray_options": {"resources": {"moon": 1}}, "connect_timeout": 1.0}),
    ],
    ids=["too large", "name taken", "no option", "no node"],
)
def test_an_owner_that_cannot_be_says_why(rb, error, options):
    with pytest.raises(error):
        RayReplayBuffer(**options)


# ---------------------------------------------------------------------- what passes through Ray
def count_serialized(actor: Any) -> None:
    """In the owner: note the bytes of everything that Ray brings to, and takes from, its methods."""
    context = ray._private.worker.global_worker.get_serialization_context()
    actor.counted = 0
    serialize, deserialize = context.serialize, context.deserialize_objects

    def out(value: Any) -> Any:
        made = serialize(value)
        actor.counted += made.total_bytes
        return made

    def into(objects: Any, *more: Any, **options: Any) -> Any:
        actor.counted += sum(len(data) for data, *_ in objects if data is not None)
        return deserialize(objects, *more, **options)

    context.serialize, context.deserialize_objects = out, into


def test_no_payload_goes_through_ray_s_serializer(rb):
    """Pre-bound endpoints: not even the first payload. The same count sees what goes by Ray, so it can fail."""
    ray.get(rb._actor.__ray_call__.remote(count_serialized))

    def passed() -> int:
        return ray.get(rb._actor.__ray_call__.remote(lambda actor: actor.counted))

    payload, traffic = 5000 * rb.schema.row_nbytes, rb.describe()["traffic"]
    before = passed()
    with rb.client(transport="gloo") as client:
        client.extend(batch(5000))
        client.sample(2500)
        ids_of(client[:])
    assert passed() - before < 4096
    gone = rb.describe()["traffic"]
    for way, rows, nbytes in (("in", 5000, 5000 * ROW_NBYTES), ("out", 5000, 5000 * ROW_NBYTES)):
        assert gone[f"gloo_rows_{way}"] - traffic[f"gloo_rows_{way}"] == rows
        assert gone[f"gloo_{way}"] - traffic[f"gloo_{way}"] > nbytes
    assert gone["ray_in"] == traffic["ray_in"]
    rb.empty()
    with rb.client(transport="ray") as client:
        client.extend(batch(5000))
        assert passed() - before > payload
        client.sample(5000)
    assert passed() - before > 2 * payload
    assert rb.describe()["traffic"]["ray_in"] - gone["ray_in"] > payload


def test_without_a_schema_the_first_write_binds_it_and_goes_where_all_others_go(ray_keeper):
    """What is agreed on is the schema alone, by the line: not even the first payload passes through Ray."""
    owner = ray_keeper(children.plan(6000))
    actor = ray.get_actor("pond", namespace="tests")
    ray.get(actor.__ray_call__.remote(count_serialized))
    before = ray.get(actor.__ray_call__.remote(lambda actor: actor.counted))
    with ReplayClient(owner, transport="gloo") as client:
        assert client.schema is None
        client.extend(batch(5000))
        client.sample(5000)
    assert ray.get(actor.__ray_call__.remote(lambda actor: actor.counted)) - before < 4096
    traffic = ray.get(actor.describe.remote())["traffic"]
    ray.get(actor.close.remote())
    assert traffic["gloo_rows_in"] == traffic["gloo_rows_out"] == 5000
    assert min(traffic["gloo_in"], traffic["gloo_out"]) > 5000 * ROW_NBYTES
    assert traffic["ray_in"] == traffic["ray_out"] == 0


# ---------------------------------------------------------------------- waiting
def test_1100_blocked_calls_through_ray(rb):
    """flow-8: they hold none of the actor's slots, and all are answered once it is possible."""
    got: list[int] = []
    with rb.client(transport="ray") as client:
        threads = [
            threading.Thread(target=lambda: got.extend(ids_of(client.sample(1, wait=True)))) for _ in range(1100)
        ]
        for thread in threads:
            thread.start()
        wait_for(lambda: waiters(client, "consumers") == 1100, "1,100 blocked calls", 60)
        start = time.monotonic()
        client.extend(batch(1100))
        assert time.monotonic() - start < WITHIN_S
        for thread in threads:
            thread.join(60)
        assert sorted(got) == list(range(1100))


def test_calls_are_freed_across_ways(rb, far):
    """flow-3, flow-5."""
    waiting = Waiting(far.sample, wait=True)
    wait_for(lambda: waiters(far, "consumers") == 1, "the reader")
    rb.extend(batch(100))
    assert ids_of(waiting.join()) == list(range(100))
    far.extend(batch(5000))
    writing = Waiting(far.extend, batch(10, start=5000))
    wait_for(lambda: waiters(far, "producers") == 1, "the writer")
    rb.sample()
    writing.join()
    assert len(rb) == 4910


def test_an_owner_that_is_busy_is_not_taken_for_dead(rb, far):
    """rem-3: stopped for longer than the network may be silent; everybody waits, and then goes on."""
    with rb.client(transport="gloo") as gloo:
        waiting = [Waiting(each.sample, 20, wait=True) for each in (rb, gloo, far)]
        wait_for(lambda: waiters(far, "consumers") == 3, "the waiters")
        os.kill(rb._owner.pid, signal.SIGSTOP)
        try:
            writing = [Waiting(each.extend, batch(50, start=50 * k)) for k, each in enumerate((gloo, far))]
            writing[0].thread.join(5.5)
            assert all(each.thread.is_alive() for each in (*writing, *waiting))
        finally:
            os.kill(rb._owner.pid, signal.SIGCONT)
        for each in writing:
            assert len(each.join(60)) == 50
        got = [i for each in waiting for i in ids_of(each.join(60))]
        assert sorted(got + ids_of(rb.sample(40))) == list(range(100))


# ---------------------------------------------------------------------- dying
@ray.remote(num_cpus=0)
class Far:
    """A client in a process of Ray's."""

    def __init__(self, client: ReplayClient) -> None:
        torch.set_num_threads(1)
        self.client = client

    def pid(self) -> int:
        return os.getpid()

    def write_for_ever(self) -> None:
        number = 0
        while True:
            number += 1
            self.client.extend(batch(1000, start=1000 * number), receipt=(1, number))
            self.client.sample(1000)

    def wait(self) -> None:
        self.client.sample(5000, wait=True)


def test_the_death_of_clients(rb, far):
    """rem-2, flow-11: one that writes and one that waits; counts stay exact, others go on."""
    receipt, count = rb.receipt(1), rb.write_count
    writer, waiter = Far.remote(far), Far.remote(far)
    pids = ray.get([writer.pid.remote(), waiter.pid.remote()])
    waiter.wait.remote()
    wait_for(lambda: waiters(far, "consumers") == 1, "the one that waits")
    writer.write_for_ever.remote()
    wait_for(lambda: rb.receipt(1) > receipt + 2 or rb.receipt(1) in (3, 4), "the one that writes")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: waiters(far, "consumers") == 0, "the owner to notice")
    wait_for(lambda: len(rb.describe()["clients"]) == 1, "the owner to forget them")
    assert (rb.write_count - count) % 1000 == 0
    ids_of(rb[:])
    rb.empty()
    far.extend(batch(100))
    assert ids_of(far.sample()) == list(range(100))


def test_the_death_of_the_owner(cluster):
    """Every waiter gets ``PeerLost``, naming who died, within 5 s; nothing stays in shared memory."""
    rb = RayReplayBuffer(10, batch_size=2, kind=BlockingReplayBuffer)
    everybody = [rb, rb.client(transport="gloo"), rb.client(transport="ray")]
    pid = rb._owner.pid
    waiting = [Waiting(each.sample, wait=True) for each in everybody]
    wait_for(lambda: waiters(everybody[1], "consumers") == 3, "the waiters")
    start = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    for each in waiting:
        with pytest.raises(PeerLost, match=f"process {pid}"):
            each.join()
        assert each.ended_at - start < WITHIN_S
    for each in everybody[1:]:
        with pytest.raises(PeerLost):
            each.extend(batch(1))
        each.close()
    rb.close()
    with pytest.raises(BufferClosed):
        rb.sample()


# ---------------------------------------------------------------------- ending
def test_the_buffer_ends_with_its_object(cluster):
    rb = RayReplayBuffer(10, batch_size=1)
    pid, client = rb._owner.pid, rb.client(transport="gloo")
    client.extend(batch(2))
    del rb
    gc.collect()
    wait_for(lambda: not psutil.pid_exists(pid), "the owner to end")
    with pytest.raises(BufferClosed):
        client.sample()
    client.close()


CALLS: dict[str, Any] = {
    "extend": lambda each: each.extend(batch(2)),
    "extend with a receipt": lambda each: each.extend(batch(2), receipt=(1, 1)),
    "add": lambda each: each.add(TensorDict(batch(1), [1])[0]),
    "sample": lambda each: each.sample(2),
    "waiting sample": lambda each: each.sample(2, wait=True, timeout=20),
    "peek": lambda each: each.peek(2),
    "wait_until_sampleable": lambda each: each.wait_until_sampleable(2, timeout=20),
    "wait_until_writable": lambda each: each.wait_until_writable(2, timeout=20),
    "update": lambda each: each.update(torch.tensor([0]), {"observation": torch.zeros(1, 3)}),
    "empty": lambda each: each.empty(),
    "item": lambda each: each[0],
    "state_dict": lambda each: each.state_dict(),
}


def told(clients: dict[str, ReplayClient], calls: list[str]) -> dict[str, str]:
    """By what each call ends."""
    ends = {}
    for name, each in clients.items():
        for call in calls:
            try:
                ends[f"{name}: {call}"] = f"returned {CALLS[call](each)!r}"
            except Exception as error:
                ends[f"{name}: {call}"] = f"{type(error).__name__}: {error}"
    return ends


def told_elsewhere(state: dict[str, Any], clients: dict[str, ReplayClient], calls: list[str]) -> dict[str, str]:
    ends = told(clients, calls)
    assert not ray.is_initialized(), "nobody asked this process to connect"
    return ends


def test_whoever_comes_after_the_close_hears_that_it_was_closed(cluster, child):
    """By every way and every call, connected before or not, also in processes that know nothing of Ray, and by name."""
    schema = Schema.from_example(batch(1))
    rb = RayReplayBuffer(10, batch_size=2, schema=schema, ray_options={"name": "shuts"})
    ways = ("auto", "shm", "gloo", "ray")
    here = {f"{way}, there before": rb.client(transport=way) for way in ways}
    here |= {f"{way}, late": rb.client(transport=way) for way in ways}
    there = {f"{way}, elsewhere": rb.client(transport=way) for way in ways[:3]}
    there["auto on another host, elsewhere"] = rb.client(host="elsewhere")
    for way in ways:
        here[f"{way}, there before"].extend(batch(4))
    other = child()
    rb.close()
    ends = told(here, list(CALLS))
    ends |= told({"itself": rb}, ["extend", "sample", "peek"])
    ends |= other.ask(told_elsewhere, there, ["extend", "sample", "waiting sample"])
    wrong = {name: end for name, end in ends.items() if not end.startswith("BufferClosed")}
    assert not wrong
    with pytest.raises(BufferClosed, match="shuts"):
        connect("shuts")
    for each in here.values():
        assert each.can_sample(1) is False
        assert "closed" in each.explain("sample", 1)
        assert not [found for found in each]  # noqa: C416  # list() would ask for the size too
        each.close()
    with RayReplayBuffer(10, schema=schema, ray_options={"name": "shuts"}) as again, connect("shuts") as found:
        again.extend(batch(3))
        assert len(found) == 3


def test_whoever_comes_after_the_death_of_the_owner_hears_of_that(cluster, child):
    rb = RayReplayBuffer(10, batch_size=2, ray_options={"name": "dies"})
    rb.extend(batch(4))
    everybody = {way: rb.client(transport=way) for way in ("auto", "shm", "gloo", "ray")}
    everybody["gloo"].extend(batch(1))
    pid = rb._owner.pid
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not psutil.pid_exists(pid), "the owner to end")
    reap()
    start = time.monotonic()
    ends = told(everybody, ["extend", "sample", "waiting sample"])
    assert time.monotonic() - start < WITHIN_S * len(everybody)
    wrong = {name: end for name, end in ends.items() if not (end.startswith("PeerLost") and f"process {pid}" in end)}
    assert not wrong
    rb.close()
    for each in everybody.values():
        each.close()


def test_nothing_listens_where_all_clients_are_on_the_owner_s_host(cluster):
    """Not before a client elsewhere asks for it, and then at one port."""
    with RayReplayBuffer(10, batch_size=2, schema=Schema.from_example(batch(1))) as rb:
        ours = psutil.Process(rb._owner.pid)

        def listening() -> set[int]:
            return {c.laddr.port for c in ours.net_connections("inet") if c.status == psutil.CONN_LISTEN}

        before = listening()  # Ray's own
        with rb.client() as near:
            near.extend(batch(3))
        assert listening() == before
        assert rb.describe()["listens"] is None
        with rb.client(host="elsewhere") as far:
            assert len(far) == 3
        assert len(listening() - before) == 1
        assert rb.describe()["listens"].endswith(str(*(listening() - before)))


def test_a_detached_buffer_outlives_its_object(cluster):
    rb = RayReplayBuffer(10, batch_size=1, ray_options={"name": "stays", "lifetime": "detached"})
    rb.extend(batch(3))
    pid = rb._owner.pid
    del rb
    gc.collect()
    again = connect("stays")
    assert len(again) == 3
    again.close()
    ray.kill(ray.get_actor("stays", namespace=NAMESPACE))
    wait_for(lambda: not psutil.pid_exists(pid), "the owner to end")
    reap()


def lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """Ray makes sockets in it, and their names must be short."""
    with tempfile.TemporaryDirectory(prefix="mp-ray-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


@pytest.mark.slow
@pytest.mark.leaks(reason="the clusters of the child processes end with them, not with the test")
@pytest.mark.ray
@pytest.mark.exhaustive
def test_a_cluster_of_one_s_own_is_quiet_and_leaves_nothing(tmp_path, short_directory):
    """Dashboard, usage statistics and log noise are off; at the end of the program everything is gone."""
    script = tmp_path / "program.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys, torch, psutil
        from millpond.remote import RayReplayBuffer
        rb = RayReplayBuffer(10, batch_size=2)
        rb.extend({"x": torch.arange(4)})
        print(sorted(rb[:]["x"].tolist()), os.environ["RAY_USAGE_STATS_ENABLED"])
        names = [" ".join(p.cmdline()) for p in psutil.Process().children(recursive=True)]
        print([name for name in names if "dashboard.py" in name and "--disable-frontend" not in name])
        print(rb._owner.handle.path, flush=True)
        if "killed" in sys.argv:
            os.kill(os.getpid(), 9)
        """)
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    started = {}
    for how in ("ended", "killed"):
        (short_directory / how[0]).mkdir()
        alone = clean | {"RAY_TMPDIR": str(short_directory / how[0])}  # where no other cluster is found
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started[how] = subprocess.Popen([sys.executable, script, how], env=alone, **pipes)
    for how, process in started.items():
        out, err = process.communicate(timeout=100)
        assert process.returncode == (0 if how == "ended" else -signal.SIGKILL), err
        assert err == ""
        *said, path = out.splitlines()
        assert said == ["[0, 1, 2, 3] 0", "[]"]
        owner = int(Path(path).name.split("-")[1])
        wait_for(lambda pid=owner: not lives(pid), "the owner to end", 10)  # proc-4
        if how == "killed":
            reap()  # whether Ray or the owner itself was faster
        assert not Path(path).exists()


# ---------------------------------------------------------------------- many writes
def test_exact_writes_from_four_producers(cluster):
    """The checksum of everything written is that of everything stored. `benchmarks/ray_writes.py` is the million."""
    with RayReplayBuffer(100_000, batch_size=1) as rb:
        ways = [rb.client(), rb.client(transport="gloo"), rb.client(transport="gloo"), rb.client(transport="ray")]
        sums = ray.get([children.produce.remote(way, k, 25) for k, way in enumerate(ways)])
        assert rb.write_count == len(rb) == 100_000
        assert sum(sums) % 2**64 == children.checksum(rb[:])
    assert (rb.stats()["write_count"], rb.write_count, len(rb), rb.storage_size) == (100_000,) * 4  # also afterwards
    with pytest.raises(BufferClosed):
        rb.extend(batch(1))
    rb.close()


def test_it_can_be_shared_shut_and_shown(rb):
    """What collectors ask of any buffer."""
    assert rb.share() is rb
    assert ReplayBuffer.attach(rb.handle()).capacity == 5000
    with pytest.raises(NotShareable):
        rb.client(host="elsewhere").handle()


# ---------------------------------------------------------------------- last of its file: it takes half a minute
def test_the_death_of_the_node(cluster, node):
    """The machine of the owner goes, with everything on it."""
    machine = node()
    rb = RayReplayBuffer(10, batch_size=2, ray_options={"resources": {"far": 0.1}}, transport="gloo")
    everybody = [rb, rb.client(transport="ray")]
    waiting = [Waiting(each.sample, wait=True) for each in everybody]
    wait_for(lambda: waiters(rb, "consumers") == 2, "the waiters")
    start = time.monotonic()
    children.kill_tree(machine)
    for each in waiting:
        with pytest.raises(PeerLost, match=f"process {rb._owner.pid}"):
            each.join()
        assert each.ended_at - start < WITHIN_S
    for each in everybody:
        each.close()
    # Ray takes the node for alive for some 20 s, and until then would start actors of the tests to come there.
    wait_for(lambda: sum(known["Alive"] for known in ray.nodes()) == 1, "Ray to know that the node is dead", 60)
