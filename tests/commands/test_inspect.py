"""``millpond inspect`` of buffers that others use, that were left behind, and that were saved. It changes nothing."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from millpond import BlockingReplayBuffer, Flow, ReplayBuffer
from millpond.cli import main
from millpond.commands import inspect as inspect_command
from millpond.core.errors import BufferClosed
from millpond.replay import (
    ConsumingSampler,
    MappedStorage,
    PrioritizedSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
)
from millpond.replay.inspection import inspect
from millpond.shm.ownership import Owner
from millpond.train.checkpoint import REPLAY

FORK: Any = mp.get_context("fork")


def steps(n: int, start: int = 0) -> dict[str, Any]:
    """Items whose two numbers are equal; every fifth ends an episode."""
    x = torch.arange(start, start + n)
    return {"x": x, "y": x.clone(), "next": {"done": (x % 5 == 4).reshape(n, 1)}}


@pytest.fixture
def processes() -> Iterator[Callable[..., Any]]:
    """Starts forked processes, and kills those that are still there at the end."""
    made: list[Any] = []

    def start(target: Callable[..., Any], *arguments: Any) -> Any:
        made.append(FORK.Process(target=target, args=arguments, daemon=True))
        made[-1].start()
        return made[-1]

    yield start
    for process in made:
        process.kill()
        process.join()
        process.close()


@pytest.fixture
def shared_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MILLPOND_SHM", str(tmp_path))
    return tmp_path


def killed(process: Any) -> None:
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def told(capsys: Any, *words: Any) -> Any:
    capsys.readouterr()
    assert main(["inspect", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def waits(call: Callable[[], Any]) -> None:
    try:
        call()
    except BufferClosed:
        os._exit(0)
    os._exit(1)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "this never came true"
        time.sleep(0.002)


def place_of(rb: ReplayBuffer) -> Path:
    return Path(rb.handle().path)


def test_it_names_the_processes_that_wait(processes: Any, capsys: Any) -> None:
    rb = BlockingReplayBuffer(10, batch_size=9, shared=True)
    rb.extend(steps(7))
    rb.extend(steps(1))  # a third one that writes single items could help both
    producer = processes(waits, lambda: rb.extend(steps(5), timeout=90))
    until(lambda: rb.stats()["waiting_producers"] == 1)
    consumer = processes(waits, lambda: rb.sample(9, wait=True, timeout=90))
    until(lambda: rb.stats()["waiting_consumers"] == 1)
    before = rb.stats()
    report = told(capsys, rb.handle().path)
    assert {(w["pid"], w["role"], w["need"], w["alive"]) for w in report["waiting"]} == {
        (consumer.pid, "consumer", 9, True),
        (producer.pid, "producer", 5, True),
    }
    assert all(w["thread"] == w["pid"] and 0 < w["since_s"] < 90 for w in report["waiting"])
    assert report["counters"] == before == rb.stats()
    assert report["owner"] == {"pid": os.getpid(), "alive": True}
    assert report["lock"]["holder"] is None
    assert report["explain"]["extend"] == "extend(1) can proceed"
    assert str(producer.pid) in report["explain"]["sample"]
    assert main(["inspect", rb.handle().path]) == 0
    shown = capsys.readouterr().out
    assert "consumer waits to sample 9 for" in shown
    assert f"process {producer.pid}, thread {producer.pid}" in shown
    rb.close()
    for process in (consumer, producer):
        process.join(60)
        assert process.exitcode == 0


def test_a_waiter_that_was_killed_is_shown_as_dead(processes: Any) -> None:
    with ReplayBuffer(10, shared=True) as rb:
        rb.schema  # noqa: B018
        consumer = processes(waits, lambda: rb.sample(1, wait=True, timeout=90))
        until(lambda: rb.stats()["waiting_consumers"] == 1)
        consumer.kill()
        killed(consumer)
        report = inspect(rb.handle().path)
        assert [(w["pid"], w["alive"]) for w in report["waiting"]] == [(consumer.pid, False)]
        assert report["counters"]["waiting_consumers"] == 0


def test_a_holder_that_is_stopped_does_not_stop_the_onlooker(processes: Any, capsys: Any) -> None:
    with ReplayBuffer(10, shared=True) as rb:
        rb.extend(steps(3))
        mutex = rb._local.engine.control.mutex

        def hold() -> None:
            mutex.lock()
            os.kill(os.getpid(), signal.SIGSTOP)

        holder = processes(hold)
        until(lambda: mutex.holder == holder.pid)
        report = told(capsys, rb.handle().path)
        assert report["lock"]["holder"] == {"thread": holder.pid, "pid": holder.pid}
        assert [row["values"]["x"] for row in report["rows"]] == [0, 1, 2]
        assert main(["inspect", rb.handle().path]) == 0
        assert f"held by thread {holder.pid} of process {holder.pid}" in capsys.readouterr().out
        holder.kill()
        killed(holder)
        assert rb.stats()["recoveries"] == 1


def bytes_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_what_a_killed_owner_left_stays_as_it_is(processes: Any, tmp_path: Path) -> None:
    """A buffer on disk, whose owner was killed in the middle of a write: `attach` would take it over and mend it."""
    path = tmp_path / "buffer"

    def work() -> None:
        rb = ReplayBuffer(MappedStorage(10, path), sampler=PrioritizedSampler(), consume_after_n_samples=1)
        rb.extend(steps(6))
        rb.sample(2)
        assert rb._local.engine.rows is not None
        rb._local.engine.rows.hook = lambda step: os.kill(os.getpid(), signal.SIGKILL)
        rb.extend(steps(3, 6))

    killed(process := processes(work))
    before = bytes_of(path)
    report = inspect(path)
    assert bytes_of(path) == before
    assert report["kind"] == "disk"
    assert report["owner"] == {"pid": process.pid, "alive": False}
    assert report["lock"]["writing"] == {"pid": process.pid, "items": 3, "first": 6}
    assert (report["counters"]["size"], report["counters"]["write_count"], report["counters"]["recoveries"]) == (
        4,
        6,
        0,
    )
    assert len(report["rows"]) == 3
    with ReplayBuffer.attach(path) as rb:
        assert rb.stats()["discarded_writes"] == 1
    assert inspect(path)["owner"] is None
    assert inspect(path)["closed"]


def test_a_buffer_from_before_a_reboot(tmp_path: Path) -> None:
    path = tmp_path / "buffer"
    with ReplayBuffer(MappedStorage(10, path)) as rb:
        rb.extend(steps(4))
    with open(path / "control", "r+b") as control:
        control.seek(16)
        control.write(b"\1\2\3\4")  # the ABI word, which differs after a reboot
    Owner.me()._replace(pid=1, boot="another").write(path)
    before = bytes_of(path)
    report = inspect(path)
    assert (report["counters"]["size"], report["owner"]["alive"]) == (4, False)
    assert bytes_of(path) == before


@pytest.mark.parametrize(
    ("sampler", "deliveries"),
    [
        (RandomSampler, None),
        (PrioritizedSampler, 1),
        (SamplerWithoutReplacement, 2),
        (partial(ConsumingSampler, 2), None),
        (partial(SliceSampler, slice_len=2), None),
    ],
    ids=["ring", "pool", "pool of two deliveries", "queue", "slices"],
)
def test_the_youngest_items_episodes_and_counters(sampler: Any, deliveries: Any, tmp_path: Path) -> None:
    """Live and saved, whichever way the slots are kept."""
    with ReplayBuffer(
        12, sampler=sampler(), consume_after_n_samples=deliveries, shared=True, batch_size=4, num_envs=1
    ) as rb:
        rb.extend(steps(10))
        rb.sample(4)
        rb.extend(steps(5, 10))
        live = inspect(rb.handle().path, rows=2)
        rb.dumps(tmp_path / "saved.millpond")
        saved = inspect(tmp_path / "saved.millpond", rows=2)
        for report in (live, saved):
            assert [(r["number"], r["values"]["x"], r["values"]["next/done"]) for r in report["rows"]] == [
                (13, 13, [False]),
                (14, 14, [True]),
            ]
            assert report["schema"]["fields"] == {"x": "int64[]", "y": "int64[]", "next/done": "bool[1]"}
            assert report["episodes"]["longest"] == 5
        assert live["counters"] == rb.stats()
        assert saved["counters"].items() <= rb.stats().items()
        assert live["episodes"] == saved["episodes"]
        assert live["sampler"] == saved["sampler"]


def test_a_buffer_that_is_written_meanwhile() -> None:
    """No report holds a torn item, and the counters of each belong to one moment."""
    with ReplayBuffer(16, shared=True) as rb:
        rb.extend(steps(7))
        done = threading.Event()

        def write() -> None:
            at = 7
            while not done.is_set():
                rb.extend(steps(7, at))
                at += 7

        writer = threading.Thread(target=write)
        writer.start()
        try:
            for _ in range(100):
                report = inspect(rb.handle().path, rows=5)
                assert all(r["number"] == r["values"]["x"] == r["values"]["y"] for r in report["rows"])
                figures = report["counters"]
                assert figures["write_count"] % 7 == 0
                assert figures["write_count"] == figures["size"] + figures["overwritten"]
        finally:
            done.set()
            writer.join()


class Odd(RandomSampler):
    """A user's, which the file of rules cannot name."""

    def memory(self, capacity: int) -> dict[str, int]:
        return {"odd": 64}


def test_a_sampler_of_the_users() -> None:
    with ReplayBuffer(10, sampler=Odd(), shared=True) as rb:
        rb.extend(steps(4))
        report = inspect(rb.handle().path)
        assert report["sampler"] is None
        assert "one of the user's" in report["explain"]["sample"]
        assert len(report["rows"]) == 3


def test_nothing_was_written_yet(capsys: Any) -> None:
    with ReplayBuffer(10, shared=True, flow=Flow(min_size=3), batch_size=2) as rb:
        report = told(capsys, rb.handle().path)
        assert (report["schema"], report["rows"], report["episodes"]) == (None, [], None)
        assert "0 of 3 items written" in report["explain"]["sample"]
        assert main(["inspect", rb.handle().path]) == 0
        assert "nothing was written yet" in capsys.readouterr().out


def test_numbers_that_json_does_not_know_and_large_fields() -> None:
    with ReplayBuffer(4, shared=True) as rb:
        rb.extend({"r": torch.tensor([float("nan")]), "image": torch.ones(1, 9, 9, dtype=torch.uint8)})
        values = inspect(rb.handle().path)["rows"][0]["values"]
        assert values["r"] == "nan"
        assert values["image"] == {"shape": [9, 9], "min": 1.0, "max": 1.0, "mean": 1.0}
        json.dumps(values, allow_nan=False)


def test_watching_ends_after_so_many_looks_and_with_the_buffer(capsys: Any) -> None:
    rb = ReplayBuffer(4, shared=True)
    path = rb.handle().path
    assert main(["inspect", path, "--watch", "0", "--count", "3", "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert main(["inspect", path, "--watch", "0", "--count", "2"]) == 0
    assert "fill" in capsys.readouterr().out
    closing = threading.Timer(0.1, rb.close)
    closing.start()
    assert main(["inspect", path, "--watch", "0.01"]) == 0
    closing.join()


def test_reaping_lists_and_removes_what_the_dead_left(processes: Any, shared_root: Path, capsys: Any) -> None:
    def work(pipe: Any) -> None:
        pipe.recv()
        rb = ReplayBuffer(10, shared=True)
        rb.extend(steps(3))
        pipe.send(rb.handle().path)
        os.kill(os.getpid(), signal.SIGKILL)

    mine, theirs = FORK.Pipe()
    process = processes(work, theirs)
    theirs.close()
    with ReplayBuffer(4, shared=True) as rb:  # made before the other dies: each new one removes what the dead left
        mine.send("go on")
        path = mine.recv()
        mine.close()
        killed(process)
        assert main(["inspect", path]) == 0
        assert f"process {process.pid}, which is gone" in capsys.readouterr().out
        assert {b["path"] for b in told(capsys)["buffers"]} == {path, rb.handle().path}
        assert told(capsys, "--reap") == {"removed": [path]}
        assert main(["inspect", "--reap"]) == 0
        assert capsys.readouterr().out == "nothing to remove\n"
        assert main(["inspect"]) == 0
        assert capsys.readouterr().out == f"{rb.handle().path}   0 of 4 items   process {os.getpid()}\n"
    assert main(["inspect"]) == 0
    assert capsys.readouterr().out == "no buffer in shared memory\n"


def test_what_is_no_buffer_is_one_line_and_exit_code_2(tmp_path: Path, capsys: Any) -> None:
    with ReplayBuffer(4) as rb:
        rb.extend(steps(4))
        rb.dumps(tmp_path / "damaged")
    content = bytearray((tmp_path / "damaged").read_bytes())
    content[-1] ^= 1
    (tmp_path / "damaged").write_bytes(content)
    (tmp_path / "text").write_text("hello")
    (tmp_path / "directory").mkdir()
    with ReplayBuffer(MappedStorage(4, tmp_path / "cut")) as rb:
        rb.extend(steps(4))
    os.truncate(tmp_path / "cut" / "control", 100)
    for words, said in (
        ([tmp_path / "missing"], "is not there"),
        ([tmp_path / "directory"], "holds no buffer"),
        ([tmp_path / "text"], "is no checkpoint of a replay buffer"),
        ([tmp_path / "damaged"], "is damaged"),
        ([tmp_path / "cut"], "too few for a control block"),
        ([tmp_path, "--rows", "-1"], "rows is a number"),
        ([tmp_path, "--watch", "-1"], "--watch takes"),
        ([tmp_path, "--count", "1"], "--count"),
        (["--watch"], "--watch needs the PATH"),
    ):
        assert main(["inspect", *map(str, words)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert said in err
        assert err.count("\n") == 1
        assert "Traceback" not in err


def test_a_run_and_its_checkpoints_are_known_by_what_they_hold(tmp_path, capsys):
    """Of a run the newest checkpoint's buffer."""
    assert inspect_command.REPLAY == REPLAY
    for frames in (100, 200):
        folder = tmp_path / "run" / "checkpoints" / f"{frames:012d}"
        folder.mkdir(parents=True)
        with ReplayBuffer(frames) as rb:
            rb.extend({"x": torch.arange(frames)})
            rb.dumps(folder / REPLAY)
    for path, frames in (("run", 200), ("run/checkpoints/000000000100", 100)):
        assert main(["inspect", str(tmp_path / path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["counters"]["write_count"] == frames
    (tmp_path / "run" / inspect_command.LIVE).write_text("")
    with ReplayBuffer(7, shared=True) as live:
        live.extend({"x": torch.arange(3)})
        for place, shown in ((live.handle().path, 3), (str(tmp_path / "gone"), 200), ("", 200)):
            (tmp_path / "run" / inspect_command.LIVE).write_text(place)
            assert main(["inspect", str(tmp_path / "run")]) == 0
            out = capsys.readouterr().out
            assert ("shows      the buffer that this run uses now" in out) == (shown == 3)
            assert ("shows      the newest checkpoint of this run, since no buffer" in out) == (shown == 200)
            assert f"fill       {shown} of " in out
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.yaml").write_text("")
    assert main(["inspect", str(tmp_path / "new")]) == 2
    assert "no live buffer" in capsys.readouterr().err
