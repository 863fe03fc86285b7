"""Clients behind Gloo: who waits, who dies, who comes late; and that nothing happens twice."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import pickle
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import remote_children as children
import torch
from remote_children import batch, ids_of, wait_for

from millpond import BlockingReplayBuffer, Flow, ReplayBuffer
from millpond.core.errors import BufferClosed, MillpondError, NotShareable, PeerLost, SchemaMismatch
from millpond.core.schema import Schema
from millpond.remote.address import HOST
from millpond.remote.client import ReplayClient
from millpond.remote.connection import SILENCE
from millpond.replay import ConsumingSampler, NStep, PrioritizedSampler
from millpond.shm.directory import shared_root

WITHIN_S = 5.0  # a death is told within so many seconds


class Waiting:
    """A call in a thread, and how it ended."""

    def __init__(self, function: Any, *arguments: Any, **options: Any) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended_at = 0.0
        self._call = lambda: function(*arguments, **options)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:
            self.error = error
        self.ended_at = time.monotonic()

    def join(self, timeout: float = 30) -> Any:
        self.thread.join(timeout)
        assert not self.thread.is_alive(), "it still waits"
        if self.error is not None:
            raise self.error
        return self.result


def waiters(client: Any, side: str) -> int:
    return int(client.stats()[f"waiting_{side}"])


def parked(keeper: children.Child, owner: Any, side: str) -> int:
    """How many calls wait at the owner, also those that only ask whether they may."""
    return int(keeper.ask(children.describe, owner.name)["parked"][side])


# ---------------------------------------------------------------------- choosing
def test_the_shortest_way_is_taken(pond, client, monkeypatch):
    """``auto``: shared memory on the owner's host, which is proven by reading what the owner left there; else Gloo."""
    owner = pond(10)
    assert client(owner, transport="auto").transport == "shm"
    assert client(owner, transport="auto", host="elsewhere").transport == "gloo"
    with pytest.raises(NotShareable, match="elsewhere"):
        client(owner, transport="shm", host="elsewhere").stats()
    monkeypatch.setenv(HOST, "elsewhere")
    assert client(owner, transport="auto").transport == "gloo"
    only_ray = pond(10, transport="ray")
    assert client(only_ray, transport="auto").transport == "ray"
    with pytest.raises(PeerLost, match="no payloads by the network"):
        client(only_ray, transport="gloo").stats()


@pytest.mark.parametrize("lie", ["boot", "namespace", "process", "missing"])
def test_another_machine_is_not_taken_for_this_one(pond, client, tmp_path, lie):
    """A folder that a network file system shows belongs to a process of another machine."""
    owner = pond(10)
    pid, started, namespace, boot = (Path(owner.handle.path) / "owner").read_text().split()
    swapped = {"boot": (pid, started, namespace, "x"), "namespace": (pid, started, "1", boot)}
    if lie != "missing":
        (tmp_path / "owner").write_text(" ".join(swapped.get(lie, ("1", started, namespace, boot))))
    moved = dataclasses.replace(owner, handle=dataclasses.replace(owner.handle, path=str(tmp_path)))
    assert client(moved, transport="auto").transport == "gloo"


def test_the_endpoint_is_there_before_any_client(pond, keeper, client):
    """Pre-bound: with a schema nothing is left to agree on, and the first write goes where all others go."""
    schema = Schema.from_example(batch(1))
    owner = pond(20_000, schema=schema, batch_size=4)
    found = keeper.ask(children.describe, "pond0")
    assert found["endpoints"]["extend"] == found["endpoints"]["sample"] == "gloo://127.0.0.1"
    assert found["clients"] == []
    made = client(owner)
    made.extend(batch(10_000))
    made.extend(batch(3))  # the number of rows is free
    made.sample(7000)
    traffic = keeper.ask(children.describe, "pond0")["traffic"]
    assert (traffic["gloo_rows_in"], traffic["gloo_rows_out"]) == (10_003, 7000)
    assert 0 < traffic["gloo_in"] - 10_003 * schema.row_nbytes < 10_000
    assert 0 < traffic["gloo_out"] - 7000 * schema.row_nbytes < 150_000  # slots and numbers are in it
    assert traffic["ray_in"] == traffic["ray_out"] == traffic["ray_rows_in"] == traffic["ray_rows_out"] == 0


def test_another_schema_is_refused_with_the_difference(pond, client):
    owner = pond(10, schema=Schema.from_example(batch(1)))
    other = batch(1) | {"action": torch.zeros(1, 2)}
    for transport in ("gloo", "shm"):
        with pytest.raises(SchemaMismatch, match=r"action: expected int32\[2\], got float32\[2\]"):
            client(owner, transport=transport, schema=Schema.from_example(other)).stats()
        client(owner, transport=transport, schema=Schema.from_example(batch(1))).stats()


def test_the_first_to_write_binds_for_all(pond, client):
    owner = pond(10)
    here, there = client(owner, transport="shm"), client(owner)
    assert here.schema is there.schema is None
    there.extend(batch(2))
    assert here.schema == there.schema
    with pytest.raises(SchemaMismatch, match="action"):
        here.extend(batch(2) | {"action": torch.zeros(2, 2)})


def test_the_learners_own_group_is_left_alone(pond, client):
    """No group of millpond's is the default one, nor in the way of it."""
    import torch.distributed as dist

    made = client(pond(10))
    made.extend(batch(5))
    assert not dist.is_initialized()
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        made.extend(batch(5))
        value = torch.ones(3)
        dist.all_reduce(value)
        assert value.tolist() == [1, 1, 1]
    finally:
        dist.destroy_process_group()
    assert len(made) == 10


def test_a_call_asks_once(pond, client):
    """rem-3: no call pays for a look whether the owner lives."""
    made = client(pond(10_000, batch_size=5000))
    made.extend(batch(5000))
    asked = []
    line = made._buffer._session._line
    ask, line.ask = line.ask, lambda *parts: (asked.append(parts), ask(*parts))
    made.extend(batch(5000))
    made.sample()
    made.stats()
    assert len(asked) == 3


# ---------------------------------------------------------------------- waiting
@pytest.mark.timeout(150)
def test_1100_blocked_calls_do_not_stop_the_one_that_frees_them(pond, child):
    """flow-8: blocked calls hold nothing of the owner's, and all are answered once it is possible."""
    owner = pond(5000, batch_size=1, kind=BlockingReplayBuffer)
    crowds = [child() for _ in range(2)]
    for crowd in crowds:
        crowd.ask(children.use, ReplayClient(owner, transport="gloo"))
        crowd.ask(children.crowd, 550)
    with ReplayClient(owner, transport="gloo") as one:
        wait_for(lambda: waiters(one, "consumers") == 1100, "1,100 blocked calls", 60)
        start = time.monotonic()
        one.extend(batch(1100))
        assert time.monotonic() - start < WITHIN_S
        got = [i for crowd in crowds for i in crowd.ask(children.disperse)]
        assert sorted(got) == list(range(1100))
        assert waiters(one, "consumers") == 0


def test_blocked_writers_are_freed_by_a_reader_elsewhere(pond, client):
    """flow-3, rem-4: across ways; what is written while blocked is neither lost nor doubled."""
    owner = pond(10, batch_size=5, kind=BlockingReplayBuffer)
    far, near = client(owner), client(owner, transport="shm")
    writing = Waiting(lambda: [far.extend(batch(5, start=5 * i)) for i in range(20)])
    got = [ids_of(near.sample(wait=True, timeout=30)) for _ in range(10)]
    got += [ids_of(far.sample(wait=True, timeout=30)) for _ in range(10)]
    writing.join()
    assert sorted(i for part in got for i in part) == list(range(100))
    assert far.stats()["consumed"] == 100


def test_waits_for_readiness_hold_nothing_either(pond, keeper, client):
    """Nor are they among those that wait to do something, as in a buffer in this process."""
    owner = pond(10, kind=BlockingReplayBuffer, batch_size=2)
    made = client(owner)
    full = Waiting(made.wait_until_sampleable, 10)
    wait_for(lambda: parked(keeper, owner, "sample") == 1, "the waiter")
    assert waiters(made, "consumers") == 0
    made.extend(batch(10))
    assert full.join() is True
    space = Waiting(made.wait_until_writable, 2, timeout=30)
    wait_for(lambda: parked(keeper, owner, "extend") == 1, "the waiter")
    assert waiters(made, "producers") == 0
    made.sample()
    assert space.join() is True
    assert made.stats()["producer_blocks"] == made.stats()["consumer_blocks"] == 0  # advisory


def test_emptying_and_closing_wake(pond, keeper, client):
    """flow-5: nobody needs a kill."""
    owner = pond(4, batch_size=2, kind=BlockingReplayBuffer)
    made = client(owner)
    made.extend(batch(4))
    writing = Waiting(made.extend, batch(4))
    wait_for(lambda: waiters(made, "producers") == 1, "the writer")
    made.empty()
    assert len(writing.join()) == 4
    blocked = [Waiting(made.extend, batch(1)) for _ in range(3)]
    wait_for(lambda: waiters(made, "producers") == 3, "the writers")
    keeper.ask(children.close_service, "pond0")
    for each in blocked:
        with pytest.raises(BufferClosed):
            each.join()
    with pytest.raises(BufferClosed):
        made.sample()
    assert not made.can_sample()
    assert "closed" in made.explain()


def test_a_client_that_left_says_so(pond, client):
    owner = pond(10, batch_size=1)
    made = client(owner)
    waiting = Waiting(made.sample, wait=True)
    wait_for(lambda: waiters(client(owner), "consumers") == 1, "the waiter")
    made.close()
    with pytest.raises(BufferClosed):
        waiting.join()
    with pytest.raises(BufferClosed, match="this client"):
        made.sample()
    wait_for(lambda: waiters(client(owner), "consumers") == 0, "the owner to notice")


def test_ctrl_c_takes_the_call_back(pond, child, client):
    """What was interrupted does not happen later, behind the caller's back."""
    owner = pond(4, batch_size=4, kind=BlockingReplayBuffer)
    made = client(owner)
    made.extend(batch(4))
    other = child()
    other.ask(children.use, ReplayClient(owner, transport="gloo"))
    other.begin(children.interrupted_write, 2, 50)
    wait_for(lambda: waiters(made, "producers") == 1, "the writer")
    other.signal(signal.SIGINT)
    assert other.answer() == "interrupted"
    assert waiters(made, "producers") == 0
    made.sample()
    assert made.write_count == 4
    assert other.ask(children.write_count) == 4


@pytest.mark.parametrize("waiting", [False, True])
def test_a_batch_that_comes_with_ctrl_c_goes_back(pond, client, monkeypatch, waiting):
    owner = pond(100, sampler=ConsumingSampler(1))
    reader, writer = client(owner), client(owner)
    writer.extend(batch(10))
    if waiting:
        reader.sample(10)
    wire = reader._buffer._session._wire
    exchange = wire.exchange

    def interrupted(request: Any, *rest: Any) -> Any:
        answer = exchange(request, *rest)
        if request.kind == "sample":
            if answer[0].kind == "parked":
                writer.extend(batch(10))
            raise KeyboardInterrupt
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(wire, "exchange", interrupted)
        with pytest.raises(KeyboardInterrupt):
            reader.sample(6, wait=waiting)
    assert ids_of(reader.sample(10)) == list(range(10))
    stats = reader.stats()
    assert (stats["samples_returned"], stats["reserved"]) == (20 if waiting else 10, 0)


# ---------------------------------------------------------------------- dying
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_the_death_of_the_owner_is_told(child, client, transport):
    """Every waiter gets ``PeerLost``, naming who died, within 5 s; so does who comes later."""
    owning = child()
    owner = owning.ask(children.open_service, children.plan(10, batch_size=2, kind=BlockingReplayBuffer))
    made = client(owner, transport=transport)
    waiting = [Waiting(made.sample, wait=True), Waiting(made.wait_until_sampleable, 3)]
    here = made._buffer._local.engine.control.waiting if transport == "shm" else list
    wait_for(lambda: len(here()) + parked(owning, owner, "sample") == 2, "the waiters")
    start = time.monotonic()
    owning.kill()
    for each in waiting:
        with pytest.raises(PeerLost, match=f"process {owning.pid}"):
            each.join()
        assert each.ended_at - start < WITHIN_S
    if transport == "gloo":  # one who works in shared memory, and does not wait, works on
        with pytest.raises(PeerLost, match=f"process {owning.pid}"):
            made.extend(batch(1))
    with pytest.raises(PeerLost):
        client(owner, transport=transport).stats()


@pytest.mark.exhaustive
@pytest.mark.parametrize("stopped", ["owner", "client"])
def test_who_is_stopped_within_a_transfer_is_not_taken_for_dead(child, client, stopped):
    """For longer than the silence that means a death: its kernel answers for it."""
    owning, other = child(), child()
    owner = owning.ask(children.open_service, children.plan(1_000_000, batch_size=500_000))
    other.ask(children.use, ReplayClient(owner, transport="gloo"))
    other.ask(children.write, 500_000, 0)
    (owning if stopped == "owner" else other).signal(signal.SIGSTOP)
    other.begin(children.write if stopped == "owner" else children.read, 500_000, *([7] if stopped == "owner" else []))
    time.sleep(2.5 * SILENCE)
    (owning if stopped == "owner" else other).signal(signal.SIGCONT)
    assert len(other.answer()) == 500_000
    assert client(owner).write_count == (1_000_000 if stopped == "owner" else 500_000)


@pytest.mark.parametrize("side", ["sample", "extend"])
def test_the_death_of_a_client_that_waits(pond, child, client, side):
    """flow-11: its call goes with it, the counters balance, and others are served."""
    owner = pond(4, batch_size=2, kind=BlockingReplayBuffer)
    made = client(owner)
    if side == "extend":
        made.extend(batch(4))
    dying = child()
    dying.ask(children.use, ReplayClient(owner, transport="gloo"))
    if side == "extend":
        dying.begin(children.write, 2, 70)
    else:
        dying.begin(children.read, 2)
    sort = "producers" if side == "extend" else "consumers"
    wait_for(lambda: waiters(made, sort) == 1, "the client to wait")
    dying.kill()
    wait_for(lambda: waiters(made, sort) == 0, "the owner to notice")
    if side == "extend":
        assert ids_of(made.sample()) + ids_of(made.sample()) == [0, 1, 2, 3]
    else:
        made.extend(batch(2))
        assert ids_of(made.sample()) == [0, 1]
    assert made.stats()["size"] == 0


@pytest.mark.parametrize("instant", ["before the payload", "within the payload", "before the answer's payload"])
def test_the_death_of_a_client_within_a_request(pond, keeper, child, client, instant):
    """rem-2: a write happens whole or not at all; other clients, old and new, go on; nothing is left at the owner."""
    owner = pond(20_000, batch_size=5000)
    old = client(owner)
    old.extend(batch(5000))
    kills = 2
    for i in range(kills):
        dying = child()
        dying.ask(children.use, ReplayClient(owner, transport="gloo"))
        dying.begin(children.die_within, instant)
        dying.process.join(30)
        assert dying.process.exitcode == -signal.SIGKILL
        old.extend(batch(1, start=i))
        new = client(owner)
        new.sample()
        new.close()
    wait_for(lambda: len(keeper.ask(children.describe, "pond0")["clients"]) == 1, "the owner to forget them")
    assert old.write_count == 5000 + kills
    assert ids_of(old[:]) == [*range(5000), *range(kills)]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_kills_at_random_instants(pond, keeper, child, client):
    """rem-2, proc-1: after each kill the items are whole and counted exactly; what a client wrote its receipts tell."""
    import random

    chance = random.Random(5)
    owner = pond(50_000, batch_size=1000)
    made = client(owner)
    for i in range(10):
        dying = child()
        dying.ask(children.use, ReplayClient(owner, transport="gloo"))
        dying.begin(children.write_and_sample, i, 1000)
        wait_for(lambda line=i: made.receipt(line) > 2, "it to begin")
        time.sleep(chance.random() * 0.05)
        dying.kill()
        written = sum(made.receipt(line) for line in range(i + 1))
        assert made.write_count == 1000 * written
        ids_of(made.sample())
    wait_for(lambda: len(keeper.ask(children.describe, "pond0")["clients"]) == 1, "the owner to forget them")
    ids_of(made[:])


# ---------------------------------------------------------------------- once
@pytest.mark.parametrize("lost", ["answer", "request"])
def test_a_write_that_is_repeated_happens_once(pond, client, monkeypatch, lost):
    """Exactly once: what carries a request may break at any point, and the client cannot know at which."""
    made = client(pond(100, batch_size=5, sampler=ConsumingSampler(1)))
    made.extend(batch(20))
    wire, broken = made._buffer._session._wire, []
    exchange = wire.exchange

    def breaking(request: Any, slot: Any) -> Any:
        if request.kind in ("extend", "sample") and request.number not in broken:
            broken.append(request.number)
            if lost == "answer":
                exchange(request, slot)
            raise ConnectionError("the cable was pulled")
        return exchange(request, slot)

    monkeypatch.setattr(wire, "exchange", breaking)
    made.extend(batch(5, start=20))
    assert ids_of(made.sample()) == [0, 1, 2, 3, 4]
    assert ids_of(made.sample()) == [5, 6, 7, 8, 9]
    assert made.write_count == 25
    assert made.stats()["consumed"] == 10
    assert len(broken) == 3


def test_a_parked_write_that_is_repeated_happens_once(pond, client, monkeypatch):
    made = client(pond(4, batch_size=2, kind=BlockingReplayBuffer))
    made.extend(batch(4))
    wire, broken = made._buffer._session._wire, []
    exchange = wire.exchange

    def breaking(request: Any, slot: Any) -> Any:
        answer = exchange(request, slot)
        if answer[0].kind == "parked" and request.kind == "extend" and not broken:
            broken.append(request.number)
            raise ConnectionError("the cable was pulled")
        return answer

    monkeypatch.setattr(wire, "exchange", breaking)
    writing = Waiting(made.extend, batch(2, start=4))
    wait_for(lambda: broken, "the break")
    assert ids_of(made.sample()) == [0, 1]
    writing.join()
    assert made.write_count == 6
    assert broken


def test_a_line_that_was_cut_is_dialled_again(pond, client):
    """A network that fails for a while costs the calls underway, not the client."""
    made = client(pond(10, batch_size=1))
    made.extend(batch(3))
    waiting = Waiting(made.sample, 4, wait=True, timeout=20)
    assert ids_of(waiting.join())
    session = made._buffer._session
    session._line._socket.shutdown(2)
    wait_for(lambda: session.lost, "the cut to be seen")
    assert made.write_count == 3


# ---------------------------------------------------------------------- processes
def test_clients_of_one_process_share_no_sampler(pond, client):
    """A sampler belongs to one buffer: two that attach in one process, and what they are built around, are apart."""
    owner = pond(40, sampler=NStep(2, 0.9, base=PrioritizedSampler()), batch_size=4)
    one, two = client(owner, transport="shm"), client(owner, transport="shm")
    one.extend(children.episodes(20))
    assert one._buffer.sampler is not two._buffer.sampler
    assert one._buffer.sampler.base is not two._buffer.sampler.base
    first = one.sample()
    two.close()
    one.update_priority(first, 3.0)
    assert len(one.sample()) == 4


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_clients_travel_to_processes_of_any_kind(pond, client, method):
    """proc-9: a client pickles, connects where it arrives, and a forked child has a line of its own."""
    owner = pond(100, batch_size=1)
    made = client(owner)
    made.extend(batch(3))
    context = multiprocessing.get_context(method)
    process = context.Process(target=children.extend_once, args=(made, 2, 3))
    process.start()
    made.extend(batch(1, start=5))
    process.join(60)
    assert process.exitcode == 0
    process.close()
    assert sorted(ids_of(made[:])) == [0, 1, 2, 3, 4, 5]
    copy = pickle.loads(pickle.dumps(made))
    assert len(copy) == 6
    copy.close()


def test_clients_come_and_go_without_a_trace(pond, keeper, client):
    """Neither threads nor descriptors stay behind at the owner."""
    owner = pond(10_000, batch_size=3000)
    client(owner).extend(batch(3000))
    threads, descriptors = keeper.ask(children.possessions)  # at most: what earlier clients had may still be going

    def given_back() -> bool:
        now = keeper.ask(children.possessions)
        return now[0] <= threads and now[1] <= descriptors

    for _ in range(10):
        each = ReplayClient(owner, transport="gloo")
        each.sample()
        each.close()
    wait_for(given_back, "everything to be given back")


def test_many_clients_at_once(pond, client):
    """Each has a group of its own; every item is delivered once."""
    owner = pond(60_000, batch_size=500, sampler=ConsumingSampler(1))
    everybody = [client(owner) for _ in range(6)]
    writing = [
        Waiting(lambda c=c, k=k: [c.extend(batch(2500, start=2500 * (4 * k + i))) for i in range(4)])
        for k, c in enumerate(everybody)
    ]
    reading = [Waiting(lambda c=c: [ids_of(c.sample(wait=True, timeout=60)) for _ in range(20)]) for c in everybody]
    for each in writing:
        each.join(60)
    got = [i for each in reading for part in each.join(60) for i in part]
    assert sorted(got) == list(range(60_000))


def test_threads_share_a_client(pond, client):
    made = client(pond(50_000, batch_size=10, flow=Flow(min_size=1)))
    threads = [
        Waiting(lambda k=k: [made.extend(batch(100, start=1000 * k + 100 * i)) for i in range(10)]) for k in range(8)
    ]
    for each in threads:
        each.join()
    assert sorted(ids_of(made[:])) == list(range(8000))


def test_an_owner_that_cannot_be_opened_leaves_nothing(pond):
    with pytest.raises(MillpondError):
        pond(10, batch_size=11, sampler=ConsumingSampler(1))
    with pytest.raises(TypeError, match="unknown"):
        pond(10, unknown=1)
    assert not [name for name in os.listdir(shared_root()) if name.startswith(f"millpond-{os.getpid()}-replay")]


def test_a_buffer_in_private_memory_has_no_shm(pond, client):
    from millpond.replay import TensorStorage

    owner = pond(TensorStorage(10), batch_size=2)
    assert owner.handle is None
    made = client(owner, transport="auto")
    assert made.transport == "gloo"
    made.extend(batch(4))
    assert len(ids_of(made.sample())) == 2
    with made.unlimited(), pytest.raises(NotShareable):
        made.sample()
    assert isinstance(ReplayBuffer(3), ReplayBuffer)


def test_a_client_says_what_it_is_and_which_way_it_took(pond, keeper, client, monkeypatch):
    owner = pond(10, schema=Schema.from_example(batch(1)))
    near, far = client(owner, transport="auto"), client(owner, transport="auto", host="elsewhere")
    address = ":".join(map(str, owner.line))
    by_shm, by_gloo = f"ReplayClient('pond0', shm at {owner.handle.path}", f"ReplayClient('pond0', gloo at {address}"
    assert repr(near) == f"{by_shm}, by 'auto'; 10 items at most, not connected)"
    assert repr(far) == f"{by_gloo}, by 'auto'; 10 items at most, not connected)"
    assert near._backend is far._backend is None, "to look at it must not connect it"
    far.extend(batch(3))
    near.sample(1)
    assert repr(near) == f"{by_shm}, by 'auto'; 3 of 10 items)"
    calls = far._buffer._session._next
    assert repr(far) == f"{by_gloo}, by 'auto'; 10 items at most)"
    assert f"gloo at {address}" in repr(far._buffer)
    assert far._buffer._session._next == calls, "no call over the network"
    assert owner.token.hex() not in repr(far) + repr(far._buffer)
    monkeypatch.setenv(HOST, "here")  # from now on shm could not be had
    assert repr(near).startswith(by_shm)
    lost = client(owner, transport="shm")
    assert repr(lost) == "ReplayClient('pond0', no way by 'shm'; 10 items at most, not connected)"
    keeper.ask(children.close_service, "pond0")
    for each in (near, far, lost):
        assert repr(each)
        each.close()
        assert repr(each).endswith("10 items at most, closed)")
