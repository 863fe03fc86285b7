"""Waits follow the pace of the environments; one that hangs is named, replaced, and does not hold up the end."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from episode_worlds import Diary

from millpond.collect import MultiCollector, RayCollector, supervision
from millpond.core.errors import Cancelled, DeadlineExceeded, InvalidArgument
from millpond.replay import ReplayBuffer

PATIENCE_S = 60.0


class Gated(Diary):
    """Waits in ``where`` for as long as the file ``gate`` exists. ``once``: the first to come there takes it along, so
    that only one process hangs, and hangs for ever."""

    def __init__(self, gate: Path, where: str = "step", *, once: bool = False) -> None:
        super().__init__(longest=4)
        self.gate, self.where, self.once = gate, where, once
        self._pass("make")

    def _pass(self, where: str) -> None:
        if where != self.where:
            return
        if self.once:
            try:
                os.unlink(self.gate)
            except FileNotFoundError:
                return
            time.sleep(600)
        while self.gate.exists():
            time.sleep(0.01)

    def reset(self, **options: Any) -> Any:
        self._pass("reset")
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        self._pass("step")
        return super().step(action)


class Slow(Diary):
    """A step takes as long as a person thinks."""

    def step(self, action: Any) -> Any:
        time.sleep(0.2)
        return super().step(action)


def until(condition: Callable[[], Any], what: str = "", *, patience_s: float = PATIENCE_S) -> None:
    end = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


@pytest.fixture
def replay() -> Iterator[ReplayBuffer]:
    made = ReplayBuffer(10_000)
    yield made
    made.close()


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    path = tmp_path / "gate"
    path.touch()
    return path


def hung(collector: Any) -> list[dict[str, Any]]:
    return [worker for worker in collector.stats()["workers"] if (worker["doing_s"] or 0) > 0.3]


def test_a_pause_in_a_hurry_comes_between_two_steps(replay: ReplayBuffer) -> None:
    """The batch of 1000 steps would take minutes. Nobody waits for it, and nothing of it is lost."""
    with MultiCollector(Slow, num_workers=2, frames_per_batch=1000, total_frames=2000, replay=replay) as collector:
        collector.start()
        until(lambda: all(worker["doing"] == "step()" for worker in collector.stats()["workers"]))
        collector.pause(kill_after=PATIENCE_S)
        stats = collector.stats()
        assert (stats["collected_frames"], stats["reserved_frames"], stats["restarts"]) == (0, 0, 0)
        assert [w["state"] for w in stats["workers"]] == ["paused"] * 2
        assert sum(len(state["env"]) for state in collector.state_dict()["workers"]) == stats["held_frames"] > 0
        collector.resume()
        until(lambda: collector.stats()["reserved_frames"] == 2000)


@pytest.mark.parametrize("where", ["step", "reset"])
def test_a_pause_waits_as_long_as_an_environment_needs_and_says_for_whom(
    replay: ReplayBuffer, gate: Path, where: str
) -> None:
    with MultiCollector(
        lambda: Gated(gate, where), num_workers=2, frames_per_batch=10, total_frames=200, replay=replay
    ) as collector:
        collector.start()
        until(lambda: len(hung(collector)) == 2)
        explained = collector.explain()
        assert "0 of 200 frames collected, 20 reserved" in explained
        assert explained.count(f"has been in {where}() of ") == 2
        with pytest.raises(
            DeadlineExceeded, match=rf"worker 0 \(collecting\), process \d+, has been in {where}\(\) of .*worker 1 "
        ):
            collector.pause(timeout=0.1)
        cancelled = threading.Event()
        cancelled.set()
        with pytest.raises(Cancelled, match=where):
            collector.pause(cancel_event=cancelled)
        opener = threading.Timer(0.3, gate.unlink)
        opener.start()
        collector.pause()  # without any limit
        opener.join()
        assert not gate.exists()
        collector.resume()
        assert collector.wait(timeout=PATIENCE_S)
    assert replay.write_count == 200


@pytest.mark.parametrize("where", ["make", "reset", "step"])
def test_a_hung_worker_is_named_and_replaced(
    replay: ReplayBuffer, gate: Path, where: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "_LONG_S", 0.2)
    with (
        caplog.at_level(logging.WARNING, "millpond.collect"),
        MultiCollector(
            lambda: Gated(gate, where, once=True),
            num_workers=2,
            frames_per_batch=10,
            total_frames=10**9,
            replay=replay,
            stall_timeout=2.0,
        ) as collector,
    ):
        collector.start()
        until(lambda: all(worker["frames"] for worker in collector.stats()["workers"]), patience_s=300)
        collector.pause()
        stats = collector.stats()
    assert replay.write_count == stats["collected_frames"]
    assert stats["reserved_frames"] == 0
    assert stats["restarts"] == 1
    (reason,) = [worker["reason"] for worker in stats["workers"] if worker["reason"]]
    call = "making the environments" if where == "make" else f"{where}()"
    assert reason.startswith(f"has been in {call} of ")
    assert "longer than stall_timeout=2" in reason
    assert f"has been in {call} of " in next(r.getMessage() for r in caplog.records)  # before it was replaced


def test_the_last_pause_ends_a_worker_that_hangs_with_exact_counts(replay: ReplayBuffer, gate: Path) -> None:
    with MultiCollector(
        lambda: Gated(gate, once=True), num_workers=2, frames_per_batch=10, replay=replay, total_frames=100_000
    ) as collector:
        collector.start()
        until(lambda: hung(collector) and replay.write_count > 50)
        (worker,) = hung(collector)
        collector.pause(kill_after=0.5)
        stats = collector.stats()
        assert stats["workers"][worker["id"]]["state"] == "dead"
        assert stats["workers"][worker["id"]]["pid"] is None
        assert stats["collected_frames"] == stats["written_frames"] == replay.write_count
        assert stats["reserved_frames"] == 0
        state = collector.state_dict()
        assert state["workers"][worker["id"]] is None
        assert state["workers"][1 - worker["id"]] is not None
        assert state["collected_frames"] == replay.write_count


@pytest.mark.timeout(
    400
)  # three actors start one after the other, each of which imports for as long as the machine takes
def test_a_hung_actor_is_named_and_replaced(cluster: Any, replay: ReplayBuffer, gate: Path) -> None:
    with RayCollector(
        lambda: Gated(gate, once=True),
        num_workers=2,
        frames_per_batch=10,
        total_frames=10**9,
        replay=replay,
        stall_timeout=3.0,
    ) as collector:
        collector.start()
        until(lambda: all(worker["frames"] for worker in collector.stats()["workers"]), patience_s=300)
        collector.pause()
        stats = collector.stats()
    assert replay.write_count == stats["collected_frames"]
    (reason,) = [worker["reason"] for worker in stats["workers"] if worker["reason"]]
    assert "has been in step() of " in reason


@pytest.mark.parametrize("value", [0, -1.0])
def test_a_stall_timeout_that_means_nothing_is_refused(value: float) -> None:
    with pytest.raises(InvalidArgument, match="timeout"):
        MultiCollector(Diary, num_workers=1, frames_per_batch=1, stall_timeout=value)
