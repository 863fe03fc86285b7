from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from episode_worlds import Diary, DictDiary, diaries
from gymnasium.vector import AsyncVectorEnv
from policies import Constant, Waver

from millpond.collect import FrameBudget, MultiCollector
from millpond.core.errors import (
    BufferClosed,
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    InvalidType,
    Unsatisfiable,
    WorkerFailed,
)
from millpond.envs.threads import cores
from millpond.flow.limiter import Flow
from millpond.replay import ReplayBuffer
from millpond.weights import WeightBoard

PATIENCE_S = 60.0  # for what takes a moment; on a loaded machine the moment is long


def until(condition: Callable[[], Any], collector: MultiCollector) -> None:
    """Wait for something that workers will do."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        collector.check()
        assert time.monotonic() < end, collector.stats()
        time.sleep(0.002)


def pids(collector: MultiCollector) -> list[int]:
    return [worker["pid"] for worker in collector.stats()["workers"]]


def states(collector: MultiCollector) -> set[str]:
    return {worker["state"] for worker in collector.stats()["workers"]}


def versions(collector: MultiCollector) -> set[int]:
    return {worker["policy_version"] for worker in collector.stats()["workers"]}


class Shared:
    """A shared buffer that is closed at the end."""

    def __init__(self, capacity: int = 5000, **options: Any) -> None:
        self.rb = ReplayBuffer(capacity, shared=True, **options)

    def __enter__(self) -> ReplayBuffer:
        return self.rb

    def __exit__(self, *_: object) -> None:
        self.rb.close()


# ---------------------------------------------------------------------------------------------- writing into replay
@pytest.mark.parametrize("total", [1, 50, 1003])
def test_workers_write_exactly_the_total(total: int) -> None:
    """Case unit-1: never more than ``total_frames``, and the last batch shrinks."""
    options: Any = {"num_workers": 3, "frames_per_batch": 20, "num_envs": 3, "total_frames": total}
    with Shared() as rb, MultiCollector(Diary, **options, replay=rb) as collector:
        collector.start()
        while not collector.wait(timeout=0.01):
            assert rb.write_count <= total
        assert collector.collected_frames == collector.written_frames == rb.write_count == total
        stats = collector.stats()
    assert collector.stats()["collected_frames"] == collector.written_frames == total  # also when all is closed
    assert (stats["reserved_frames"], stats["restarts"]) == (0, 0)
    assert [worker["id"] for worker in stats["workers"]] == [0, 1, 2]
    assert sum(worker["frames"] for worker in stats["workers"]) == total


def test_a_buffer_that_is_not_shared_is_shared_and_never_closed() -> None:
    rb = ReplayBuffer(1000)
    with MultiCollector(Diary, num_workers=1, frames_per_batch=10, total_frames=30, replay=rb) as collector:
        collector.start()
        assert collector.wait(timeout=PATIENCE_S)
    assert len(rb) == 30
    rb.close()


def test_sequences_end_at_the_total_too() -> None:
    """Cases rem-11, unit-2: items are counted by replay, frames by the collector."""
    with (
        Shared() as rb,
        MultiCollector(
            lambda: diaries(3, "NextStep"),
            Waver(),
            num_workers=2,
            num_envs=3,
            frames_per_batch=15,
            total_frames=500,
            layout="sequences",
            replay=rb,
        ) as collector,
    ):
        collector.start()
        assert collector.wait(timeout=PATIENCE_S)
        assert (collector.collected_frames, collector.written_frames, rb.write_count) == (500, 500, 100)
        items = rb[:]
    assert items["observation"].shape == (100, 5, 4)
    assert (items["observation"][:, :, 0] == items["observation"][:, :1, 0]).all()  # of one environment each
    follows = items["step"][:, 1:] == items["step"][:, :-1] + 1
    assert torch.equal(follows | (items["step"][:, 1:] == 0), torch.ones_like(follows))


def test_iterating_tells_of_each_batch_that_was_written() -> None:
    with (
        Shared() as rb,
        MultiCollector(Diary, num_workers=2, frames_per_batch=20, num_envs=2, total_frames=95, replay=rb) as collector,
    ):
        seen = 0
        for batch in collector:
            assert batch is None
            seen += 1
            assert rb.write_count >= 20 * (seen - 1) + 15
        assert 5 <= seen <= 6
        assert rb.write_count == 95


# ---------------------------------------------------------------------------------------------------- handing over
def test_batches_come_from_whichever_worker_has_one() -> None:
    with MultiCollector(
        [Diary, lambda: Diary(5)], Waver(), num_workers=2, frames_per_batch=30, num_envs=2, total_frames=1000
    ) as collector:
        batches = [next(collector)]
        until(lambda: states(collector) == {"waiting"}, collector)  # both run ahead by a batch or two
        batches += [batch for batch in collector if batch is not None]
        assert collector.collected_frames == 1000
        assert collector.written_frames == 0
    together: Any = torch.cat(batches)  # type: ignore[arg-type]
    assert together.numel() == 1000
    assert set(together["observation"][:, 0].tolist()) == {0.0, 5.0}  # both workers had a part in it
    assert torch.equal(together["action"], torch.sin(together["observation"][:, 1:3] + together["observation"][:, :1]))
    follows = together["next", "observation"][:, 2] == together["observation"][:, 2] + 1
    assert follows.all()
    workers = {int(i) >> 48 for i in together["episode_id"]}
    assert workers == {0, 1}


def test_nobody_runs_ahead_by_more_than_two_batches() -> None:
    """Case flow-9: nobody iterates, and the workers' memory stays bounded."""
    with MultiCollector(Diary, num_workers=2, frames_per_batch=10, total_frames=-1) as collector:
        next(collector)
        until(lambda: states(collector) == {"waiting"}, collector)
        assert collector.collected_frames == 10
        assert collector.stats()["reserved_frames"] <= 40


def test_dictionaries_and_sequences_are_handed_over_whole() -> None:
    """Case type-1, across processes."""
    with MultiCollector(
        DictDiary, num_workers=1, frames_per_batch=12, num_envs=3, total_frames=60, layout="sequences"
    ) as collector:
        for batch in collector:
            assert batch is not None
            assert batch.batch_size == (3, 4)
            assert batch["observation", "image"].dtype == torch.uint8
            assert (batch["next", "observation", "id"] == 2**40).all()


# ------------------------------------------------------------------------------------------------------ in rounds
def test_in_rounds_the_same_seed_gives_the_same_batches() -> None:
    """Case seed-1, with processes."""
    found = []
    for _ in range(2):
        with MultiCollector(
            "Pendulum-v1", num_workers=2, frames_per_batch=24, num_envs=2, total_frames=110, sync=True, seed=3
        ) as collector:
            found.append([batch for batch in collector if batch is not None])
    assert [len(batch) for batch in found[0]] == [48, 48, 14]
    assert all((a == b).all() for a, b in zip(*found, strict=True))


def test_in_rounds_all_workers_use_the_same_weights() -> None:
    options: Any = {"num_workers": 2, "frames_per_batch": 6, "num_envs": 2, "total_frames": 60, "sync": True}
    with (
        WeightBoard(Constant(0.0)) as board,
        MultiCollector(Diary, Constant(9.0), **options, weights=board) as collector,
    ):
        for version, batch in enumerate(collector):
            assert batch is not None
            assert (batch["policy_version"] == version).all()
            assert (batch["action"] == version).all()
            assert {int(i) >> 48 for i in batch["episode_id"]} == {0, 1}
            board.publish(Constant(version + 1.0))
        assert version == 4


def test_in_rounds_into_replay() -> None:
    with (
        Shared() as rb,
        MultiCollector(
            Diary, num_workers=2, frames_per_batch=8, num_envs=2, total_frames=40, sync=True, replay=rb, seed=1
        ) as collector,
    ):
        for rounds, batch in enumerate(collector, 1):
            assert batch is None
            assert collector.written_frames == rb.write_count == min(16 * rounds, 40)


# --------------------------------------------------------------------------------------------------------- weights
def test_every_worker_follows_the_board() -> None:
    """Cases unit-5, rem-9: publishing waits for nobody, and each transition tells the version that made it."""
    with (
        Shared(20_000) as rb,
        WeightBoard(Constant(0.0)) as board,
        MultiCollector(
            Diary, Constant(9.0), num_workers=3, frames_per_batch=10, num_envs=2, replay=rb, weights=board
        ) as collector,
    ):
        collector.start()
        for version in range(1, 4):
            board.publish(Constant(float(version)))
            until(lambda version=version: versions(collector) == {version}, collector)
        collector.pause(timeout=PATIENCE_S)
        rows = rb[:]
    assert (rows["policy_version"].float() == rows["action"][:, :1]).all()
    assert set(rows["policy_version"].flatten().tolist()) <= {0, 1, 2, 3}


@pytest.mark.parametrize("random_frames", [0, 40, 101])
def test_random_frames_are_counted_over_all_workers(random_frames: int) -> None:
    """Case unit-6."""
    with (
        Shared() as rb,
        MultiCollector(
            Diary,
            Constant(5.0),
            num_workers=3,
            frames_per_batch=10,
            num_envs=2,
            total_frames=300,
            random_frames=random_frames,
            replay=rb,
        ) as collector,
    ):
        collector.start()
        assert collector.wait(timeout=PATIENCE_S)
        assert int((rb[:]["policy_version"] == -1).sum()) == random_frames


# --------------------------------------------------------------------------------------------------------- pausing
def test_pause_counts_what_it_drains_and_resume_goes_on() -> None:
    """Case rem-8."""
    with (
        Shared(20_000) as rb,
        MultiCollector(Diary, num_workers=2, frames_per_batch=10, num_envs=2, replay=rb) as collector,
    ):
        collector.start()
        for _ in range(5):
            before = rb.write_count
            until(lambda before=before: rb.write_count > before, collector)
            collector.pause(timeout=PATIENCE_S)
            paused = rb.write_count
            assert states(collector) == {"paused"}
            assert collector.collected_frames == collector.written_frames == paused
            assert collector.stats()["reserved_frames"] == 0
            time.sleep(0.02)  # long enough for a worker that does not pause to write
            assert rb.write_count == paused
            collector.resume()


def test_pause_counts_batches_that_nobody_has_taken_yet() -> None:
    """Case rem-8, when iterating: they are counted, and handed out later."""
    with MultiCollector(Diary, num_workers=2, frames_per_batch=10, total_frames=100) as collector:
        next(collector)
        until(lambda: collector.stats()["reserved_frames"] == 40 and states(collector) == {"waiting"}, collector)
        collector.pause(timeout=PATIENCE_S)
        assert collector.stats()["reserved_frames"] == 0
        assert collector.collected_frames == 50
        collector.resume()
        assert sum(batch.numel() for batch in collector if batch is not None) == 90


class Slow(Diary):
    """Hangs in ``step`` while a file exists, and says so by another file."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = Path(path)

    def step(self, action: Any) -> Any:
        while self.path.exists():
            self.path.with_suffix(f".{os.getpid()}").touch()
            time.sleep(0.01)
        return super().step(action)


def test_a_pause_that_times_out_can_be_resumed(tmp_path: Path) -> None:
    """Case rem-8."""
    gate = tmp_path / "gate"
    gate.touch()
    env = lambda: Slow(str(gate))  # noqa: E731
    with (
        Shared() as rb,
        MultiCollector(env, num_workers=1, frames_per_batch=5, total_frames=50, replay=rb) as collector,
    ):
        collector.start()
        until(lambda: states(collector) == {"collecting"}, collector)
        with pytest.raises(DeadlineExceeded, match=r"0 \(collecting\)"):
            collector.pause(timeout=0.05)
        gate.unlink()
        collector.resume()
        assert collector.wait(timeout=PATIENCE_S)
        assert rb.write_count == 50


def test_a_worker_that_waits_for_space_pauses_and_keeps_its_batch() -> None:
    """Case rem-8: nobody samples while the run is saved, so space will not come."""
    with (
        Shared(30, consume_after_n_samples=1, flow=Flow(admission="block")) as rb,
        MultiCollector(Diary, num_workers=2, frames_per_batch=10, replay=rb, total_frames=60) as collector,
    ):
        collector.start()
        until(lambda: rb.stats()["waiting_producers"] == 2 and len(rb) == 30, collector)
        assert states(collector) == {"writing"}
        collector.pause(timeout=PATIENCE_S)
        assert (rb.write_count, collector.collected_frames) == (30, 30)
        assert collector.stats()["reserved_frames"] == 20
        collector.resume()
        taken = 0
        while taken < 60:
            taken += rb.sample(10, wait=True, timeout=PATIENCE_S).numel()
        assert collector.wait(timeout=PATIENCE_S)
        assert rb.write_count == 60


# --------------------------------------------------------------------------------------------------------- closing
def test_closing_frees_workers_that_wait_for_space() -> None:
    """Case flow-5: none needs a kill."""
    with Shared(30, consume_after_n_samples=1, flow=Flow(admission="block")) as rb:
        collector = MultiCollector(Diary, num_workers=3, frames_per_batch=10, replay=rb)
        collector.start()
        until(lambda: rb.stats()["waiting_producers"] == 3, collector)
        began = time.monotonic()
        collector.close()
        assert time.monotonic() - began < 10
        assert states(collector) == {"finished"}
        assert collector.stats()["reserved_frames"] == 0
        assert rb.stats()["waiting_producers"] == 0
        assert rb.write_count == collector.collected_frames == 30


def test_closing_ends_workers_that_hang(tmp_path: Path) -> None:
    """Within 10 s, also where an environment never comes back; its processes go too."""
    gate = tmp_path / "gate"
    gate.touch()
    env = lambda: AsyncVectorEnv([lambda: Slow(str(gate))], context="fork")  # noqa: E731
    collector = MultiCollector([env, lambda: Slow(str(gate))], num_workers=2, frames_per_batch=5)

    def iterate() -> None:
        with pytest.raises(BufferClosed):
            list(collector)

    iterating = threading.Thread(target=iterate)
    iterating.start()
    until(lambda: len(list(tmp_path.glob("gate.*"))) == 2, collector)
    began = time.monotonic()
    collector.close()
    assert time.monotonic() - began < 10
    iterating.join(10)
    assert not iterating.is_alive()
    assert states(collector) == {"dead"}


def test_closing_with_unread_batches_of_32_workers() -> None:
    """Case proc-3."""
    collector = MultiCollector(Diary, num_workers=32, frames_per_batch=4)
    next(collector)
    until(lambda: collector.stats()["reserved_frames"] >= 4 * 33, collector)
    began = time.monotonic()
    collector.close()
    assert time.monotonic() - began < 10


def test_closed_is_closed() -> None:
    with Shared() as rb:
        collector = MultiCollector(Diary, num_workers=1, frames_per_batch=4, replay=rb)
        collector.close()
        collector.close()
        for call in (collector.start, lambda: next(collector), collector.wait):
            with pytest.raises(BufferClosed):
                call()


def test_a_buffer_that_is_closed_ends_the_collection() -> None:
    rb = ReplayBuffer(10, shared=True, consume_after_n_samples=1, flow=Flow(admission="block"))
    with MultiCollector(Diary, num_workers=2, frames_per_batch=5, replay=rb) as collector:
        collector.start()
        until(lambda: rb.stats()["waiting_producers"] == 2, collector)
        rb.close()
        assert collector.wait(timeout=PATIENCE_S)
        assert set(collector) == {None}
        assert collector.collected_frames == 10
        assert collector.stats()["reserved_frames"] == 0


def test_waits_end() -> None:
    with Shared() as rb, MultiCollector(Diary, num_workers=1, frames_per_batch=5, replay=rb) as collector:
        assert not collector.wait(timeout=0.01)
        stop = threading.Event()
        stop.set()
        with pytest.raises(Cancelled):
            collector.wait(cancel_event=stop)


# ---------------------------------------------------------------------------------------------------------- faults
def waiting_for_failure(collector: MultiCollector) -> None:
    end = time.monotonic() + PATIENCE_S
    while "failed" not in states(collector):
        assert time.monotonic() < end
        time.sleep(0.002)


class Explodes(Diary):
    def step(self, action: Any) -> Any:
        if self.episode == 2:
            raise ZeroDivisionError("the pond is dry")
        return super().step(action)


@pytest.mark.parametrize("how", ["start", "iterate", "rounds", "pause"])
def test_an_exception_in_a_worker_surfaces_with_its_traceback(how: str) -> None:
    """Case proc-5."""
    with Shared() as rb:
        collector = MultiCollector(
            Explodes,
            num_workers=2,
            frames_per_batch=10,
            sync=how == "rounds",
            replay=rb if how in ("start", "pause") else None,
        )
        with collector:
            if how in ("start", "pause"):
                collector.start()
            if how == "pause":
                waiting_for_failure(collector)
            call = {"start": lambda: collector.wait(timeout=PATIENCE_S), "pause": collector.pause}.get(how)
            with pytest.raises(WorkerFailed, match="the pond is dry") as problem:
                (call or (lambda: list(collector)))()
            assert "in step" in str(problem.value)
            assert "ZeroDivisionError" in str(problem.value)
            with pytest.raises(WorkerFailed):
                collector.check()
        assert collector.stats()["reserved_frames"] == 0 or how == "rounds"
        assert rb.write_count == collector.written_frames


class Deadly(Diary):
    """Its process dies, as many times as there are names in a directory, in the way that the name says."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        self.directory = Path(directory)

    def step(self, action: Any) -> Any:
        if self.episode == 3:
            for name in sorted(self.directory.iterdir()):
                name.unlink()
                if name.suffix == ".exit":
                    os._exit(3)
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


@pytest.mark.parametrize("how", ["write", "hand_over", "rounds"])
def test_workers_that_die_are_replaced(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Case flow-11: the dead worker's reservation is collected by somebody else; the reason is told."""
    for i, kind in enumerate(("kill", "exit")):
        (tmp_path / f"{i}.{kind}").touch()
    with Shared() as rb:
        collector = MultiCollector(
            lambda: Deadly(str(tmp_path)),
            num_workers=1,
            frames_per_batch=17,
            num_envs=2,
            total_frames=700,
            sync=how == "rounds",
            replay=rb if how == "write" else None,
        )
        with collector, caplog.at_level(logging.WARNING, "millpond.collect"):
            if how == "write":
                collector.start()
                assert collector.wait(timeout=PATIENCE_S)
                assert rb.write_count == 700
            else:
                batches: Any = torch.cat(list(collector))  # type: ignore[arg-type]
                assert batches.numel() == 700
            stats = collector.stats()
    assert stats["collected_frames"] == 700
    assert stats["restarts"] == stats["workers"][0]["restarts"] == 2
    assert stats["workers"][0]["reason"] == "ended with exit code 3"
    assert "worker 0 was killed by SIGKILL; restart 1 of 20" in caplog.text
    assert stats["reserved_frames"] == 0


def test_batches_that_a_dead_worker_had_handed_over_are_handed_out() -> None:
    with MultiCollector(Diary, num_workers=1, frames_per_batch=10, total_frames=100) as collector:
        collected = next(collector).numel()  # type: ignore[union-attr]
        until(lambda: collector.stats()["reserved_frames"] == 20 and states(collector) == {"waiting"}, collector)
        os.kill(pids(collector)[0], signal.SIGKILL)
        until(lambda: collector.stats()["restarts"] == 1, collector)
        rest: Any = torch.cat(list(collector))  # type: ignore[arg-type]
        assert collected + rest.numel() == collector.collected_frames == 100
        assert int(((rest["episode_id"] >> 36) & 4095 == 0).sum()) == 20


def test_a_worker_that_dies_too_often_ends_the_collection(tmp_path: Path) -> None:
    for i in range(3):
        (tmp_path / f"{i}.kill").touch()
    with (
        Shared() as rb,
        MultiCollector(
            lambda: Deadly(str(tmp_path)), num_workers=1, frames_per_batch=5, replay=rb, max_restarts=2
        ) as collector,
    ):
        collector.start()
        with pytest.raises(WorkerFailed, match="worker 0 was killed by SIGKILL; the 2 restarts"):
            collector.wait(timeout=PATIENCE_S)
        assert collector.stats()["restarts"] == 3
        assert collector.collected_frames == rb.write_count


def test_episode_ids_of_a_successor_are_new() -> None:
    with (
        Shared() as rb,
        MultiCollector(Diary, num_workers=1, frames_per_batch=10, replay=rb, seed=1, total_frames=400) as collector,
    ):
        collector.start()
        until(lambda: rb.write_count, collector)
        os.kill(pids(collector)[0], signal.SIGKILL)
        assert collector.wait(timeout=PATIENCE_S)
        ids = rb[:]["episode_id"].flatten()
        lives = (ids >> 36) & 4095
    assert set(lives.tolist()) == {0, 1}
    assert not set(ids[lives == 0].tolist()) & set(ids[lives == 1].tolist())


class KillsAt(Diary):
    """Its process dies at a chosen instant of a write: by an action of the collector's own code, replaced here."""

    def __init__(self, path: str, where: str) -> None:
        super().__init__()
        flag = Path(path)
        if not flag.exists():
            return
        from millpond.collect.budget import FrameBudget

        def die(*_: Any, **__: Any) -> None:
            flag.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

        if where == "before the intent":
            FrameBudget.intend = die  # type: ignore[method-assign]
        elif where == "between write and commit":
            FrameBudget.commit = die  # type: ignore[method-assign]
        else:
            ReplayBuffer.extend = die  # type: ignore[method-assign]


@pytest.mark.parametrize("where", ["before the intent", "between intent and write", "between write and commit"])
def test_killed_around_a_write_nothing_is_lost_or_counted_twice(where: str, tmp_path: Path) -> None:
    """The instant that matters: written and not counted, or counted and not written, must not be."""
    flag = tmp_path / "flag"
    flag.touch()
    with (
        Shared() as rb,
        MultiCollector(
            lambda: KillsAt(str(flag), where), num_workers=1, frames_per_batch=10, total_frames=105, replay=rb
        ) as collector,
    ):
        collector.start()
        assert collector.wait(timeout=PATIENCE_S)
        assert not flag.exists()
        assert collector.stats()["restarts"] == 1
        assert collector.collected_frames == rb.write_count == 105
        lives = (rb[:]["episode_id"] >> 36) & 4095
    assert int((lives == 0).sum()) == (10 if where == "between write and commit" else 0)


class Sick(Diary):
    def step(self, action: Any) -> Any:
        observation, *others = super().step(action)
        if self.episode == 1 and self.at == 1:
            observation[3] = float("nan")
        return observation, *others


def test_quarantined_transitions_are_told_to_the_collector(caplog: pytest.LogCaptureFixture) -> None:
    """Case nan-1, across processes."""
    with (
        Shared(check_finite=True) as rb,
        caplog.at_level(logging.WARNING, "millpond.collect"),
        MultiCollector(Sick, num_workers=1, frames_per_batch=10, total_frames=100, replay=rb) as collector,
    ):
        collector.start()
        assert collector.wait(timeout=PATIENCE_S)
        until(lambda: collector.stats()["quarantine"], collector)
        stats = collector.stats()
    assert stats["quarantined_rows"] >= 1
    assert stats["quarantine"][0][:3] == (0, "next/observation", 0)
    assert "worker 0: next/observation is not finite in environment 0, step 0" in caplog.text


def test_nothing_is_told_of_a_process_that_is_gone(tmp_path: Path) -> None:
    """While a worker is started anew it has no process, no age, no version; its counts go on."""
    gate = tmp_path / "gate"

    class Waits(Diary):
        def __init__(self) -> None:
            super().__init__()
            while gate.exists():
                time.sleep(0.01)

    with Shared() as rb, MultiCollector(Waits, num_workers=1, frames_per_batch=5, replay=rb) as collector:
        collector.start()
        until(lambda: collector.stats()["workers"][0]["frames"] > 20, collector)
        gate.touch()
        (first,) = pids(collector)
        os.kill(first, signal.SIGKILL)
        seen = set()

        def new_process() -> bool:
            (worker,) = collector.stats()["workers"]
            seen.add(worker["pid"])
            if worker["pid"] is None:
                assert worker["state"] in ("dead", "starting")
                assert [worker[name] for name in ("last_step_age_s", "doing", "policy_version")] == [None] * 3
                assert worker["frames"] > 20
            return worker["pid"] not in (first, None)

        until(new_process, collector)
        assert collector.stats()["workers"][0]["restarts"] == 1
        gate.unlink()
    assert [worker["pid"] for worker in collector.stats()["workers"]] == [None]  # and none when all is closed


# ------------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"env": "Humbug-v0"}, InvalidArgument, "cannot make"),
        ({"env": [Diary]}, InvalidArgument, "1 factories were given for 2 workers"),
        ({"env": 7}, InvalidType, "not int"),
        ({"num_workers": 0}, InvalidArgument, "at least 1"),
        ({"num_workers": 65}, Unsatisfiable, "65 workers"),
        ({"frames_per_batch": 0}, InvalidArgument, "at least 1"),
        ({"total_frames": -3}, InvalidArgument, "at least -1"),
        ({"max_restarts": -1}, InvalidArgument, "max_restarts"),
        ({"layout": "sequences", "total_frames": 7, "frames_per_batch": 2}, InvalidArgument, "not a multiple"),
        ({"start_method": "teleport"}, InvalidArgument, "start_method"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(options: Any, error: type[Exception], text: str) -> None:
    given = {"env": Diary, "num_workers": 2, "frames_per_batch": 5, **options}
    with pytest.raises(error, match=text):
        MultiCollector(**given)


def test_start_needs_a_buffer_and_something_that_travels() -> None:
    collector = MultiCollector(Diary, num_workers=1, frames_per_batch=5)
    with collector, pytest.raises(InvalidArgument, match="needs replay"):
        collector.start()
    lock = threading.Lock()
    collector = MultiCollector(lambda: lock, num_workers=1, frames_per_batch=5)
    with collector, pytest.raises(InvalidArgument, match="cannot travel"):
        next(collector)


def test_an_environment_that_cannot_be_made_is_told_with_its_reason() -> None:
    collector = MultiCollector(lambda: gymnasium.make("Pendulum-v1", colour="blue"), num_workers=1, frames_per_batch=5)
    with collector, pytest.raises(WorkerFailed, match="colour"):
        next(collector)


# ---------------------------------------------------------------------------------------------------------- sharing
def test_two_collectors_on_one_buffer_and_one_budget() -> None:
    with Shared() as rb, FrameBudget(500) as budget:
        options: Any = {"frames_per_batch": 10, "replay": rb, "budget": budget, "num_workers": 2}
        with MultiCollector(Diary, **options) as one, MultiCollector(Diary, **options) as other:
            one.start()
            other.start()
            assert one.wait(timeout=PATIENCE_S)
            assert one.written_frames + other.written_frames == one.collected_frames == rb.write_count == 500
        ids = rb[:]["episode_id"] >> 48
        assert set(ids.flatten().tolist()) <= {0, 1, 2, 3}
        assert budget.reserved == 0


# -------------------------------------------------------------------------------------------------------- saving
@pytest.mark.parametrize("iterating", [False, True])
def test_another_collector_goes_on_where_one_was_saved(iterating: bool) -> None:
    """Case end-8, across processes."""
    with Shared(50_000) as rb:
        total = 1_000 if iterating else 20_000  # writing, it is far from the end when it is saved
        options: Any = {"num_workers": 1, "frames_per_batch": 10, "num_envs": 3, "total_frames": total, "seed": 1}
        options["replay"] = None if iterating else rb
        with MultiCollector(lambda: diaries(3, "NextStep"), **options) as first:
            got = 0
            if iterating:
                got = next(first).numel()  # type: ignore[union-attr]
            else:
                first.start()
                until(lambda: rb.write_count >= 50, first)
            state = first.state_dict()
            held = sum(len(worker["env"]) for worker in state["workers"])
        written = rb.write_count
        assert written >= state["collected_frames"] or iterating
        with MultiCollector(lambda: diaries(3, "NextStep"), **options) as second:
            second.load_state_dict(state)
            assert second.collected_frames == state["collected_frames"]
            if iterating:
                rest: Any = torch.cat(list(second))  # type: ignore[arg-type]
                assert got + rest.numel() == total
            else:
                second.start()
                assert second.wait(timeout=PATIENCE_S)
                assert rb.write_count - written == total - state["collected_frames"]
                rest = rb[:][written:]
            assert second.collected_frames == total
            with pytest.raises(InvalidArgument, match="has started"):
                second.load_state_dict(state)
        assert int(((rest["episode_id"] >> 36) & 4095 == 0).sum()) >= held


def test_environments_that_can_be_saved_go_on_in_other_workers() -> None:
    """Case end-8: no episode is cut."""
    options: Any = {"num_workers": 2, "frames_per_batch": 30, "num_envs": 3, "total_frames": 3_000, "seed": 1}
    with MultiCollector("Pendulum-v1", **options) as first:
        batches = [next(first) for _ in range(5)]
        state = first.state_dict()
    with MultiCollector("Pendulum-v1", **options) as second:
        second.load_state_dict(state)
        batches += list(second)
    frames: Any = torch.cat(batches)  # type: ignore[arg-type]
    seen = {(int(e), int(s)) for e, s in zip(frames["episode_id"], frames["step"], strict=True)}
    assert len(seen) == 3_000
    assert all(step == 0 or (episode, step - 1) in seen for episode, step in seen)
    cut = frames["next", "truncated"].flatten()
    assert set(frames["step"].flatten()[cut].tolist()) == {199}


class Asks(Diary):
    """Writes down what it finds where it is made."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        from millpond.envs.threads import default_threads

        (Path(directory) / str(os.getpid())).write_text(f"{default_threads()} {torch.get_num_threads()}")


@pytest.mark.parametrize("wanted", [None, "5"])
def test_workers_share_the_cores_unless_the_user_has_said_how(
    wanted: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if wanted:
        monkeypatch.setenv("MILLPOND_ENV_THREADS", wanted)
    options: Any = {"num_workers": 2, "frames_per_batch": 5, "total_frames": 20, "start_method": "fork"}
    with MultiCollector(lambda: Asks(str(tmp_path)), **options) as collector:
        list(collector)
    share = wanted or str(max(1, cores() // 2))
    assert [path.read_text() for path in tmp_path.iterdir()] == [f"{share} 1"] * 2


# ---------------------------------------------------------------------------------------------------- start methods
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_may_start_in_any_way(method: Any) -> None:
    """Case proc-9; everything else here runs with the fork server."""
    with (
        Shared() as rb,
        MultiCollector(
            Diary, Waver(), num_workers=1, frames_per_batch=10, total_frames=35, replay=rb, start_method=method
        ) as collector,
    ):
        collector.start()
        assert collector.wait(timeout=PATIENCE_S)
        assert rb.write_count == 35
