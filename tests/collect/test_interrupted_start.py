"""Ctrl-C while the workers are started, and the call again: one worker pool, and every frame once."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from episode_worlds import Diary
from policies import Waver

from millpond.collect import Collector, MultiCollector
from millpond.replay import ReplayBuffer
from tests.alike import usually
from tests.replay.interrupts import Interrupt, interrupted

TOTAL = 60


def crews() -> int:
    return sum(thread.name == "millpond collector" for thread in threading.enumerate())


@pytest.fixture
def replay() -> Iterator[ReplayBuffer]:
    made = ReplayBuffer(10_000)
    yield made
    made.close()


def finish(collector: MultiCollector, replay: ReplayBuffer, *, before: int) -> None:
    """Start again, and look at what comes of it."""
    collector.start()
    assert crews() <= 1
    assert collector.wait(timeout=60)
    stats = collector.stats()
    assert stats["restarts"] == 0
    assert max(line.lives for line in collector._pool.worker_table.lines) == 1
    assert replay.write_count - before == stats["written_frames"] == stats["collected_frames"] == TOTAL


@pytest.mark.parametrize("first", ["start", "next"])
@pytest.mark.parametrize("part", usually([0, 1, 2, 3, 4, 5], 0))
def test_interrupted_at_any_call_of_a_start(replay: ReplayBuffer, first: str, part: int) -> None:
    place, cut_off = 7 * part, True
    while cut_off:
        before, cut_off = replay.write_count, False
        with MultiCollector(
            Diary, Waver(), num_workers=2, frames_per_batch=10, total_frames=TOTAL, replay=replay
        ) as collector:
            try:
                with interrupted(
                    place, "collect/parallel.py", "collect/worker_pool.py", "collect/super", "collect/thread.py"
                ):
                    if first == "start":
                        collector.start()
                    else:
                        next(collector)
            except Interrupt:
                cut_off = place < 10_000
            finish(collector, replay, before=before)
        place = 2 * place + 13
    assert place > 100


@pytest.mark.leaks(reason="what strikes between the lines of multiprocessing leaves the two ends of its pipe open")
@pytest.mark.parametrize("seed", usually(range(8), 0))
def test_a_signal_at_any_instant_of_a_start(replay: ReplayBuffer, seed: int) -> None:
    def interrupt(number: int, frame: Any) -> None:
        raise Interrupt

    dice, struck = random.Random(seed), 0
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(6):
            before = replay.write_count
            with MultiCollector(
                Diary, Waver(), num_workers=2, frames_per_batch=10, total_frames=TOTAL, replay=replay
            ) as collector:
                try:
                    signal.setitimer(signal.ITIMER_REAL, dice.uniform(1e-5, 0.005))
                    for _ in range(2000):
                        collector.start()
                    collector.wait(timeout=10)
                except Interrupt:
                    struck += 1
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                finish(collector, replay, before=before)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert struck


def test_written_frames_are_exact_whatever_was_interrupted(replay: ReplayBuffer) -> None:
    """The count is that of the frames that the budget has seen written, not one of calls that returned."""
    struck = 0
    with Collector(Diary, Waver(), frames_per_batch=5, num_envs=2, total_frames=2000, replay=replay) as collector:
        for place in range(100_000):
            try:
                with interrupted(
                    place // 2 if place % 2 == 0 else -1, "collect/collector.py", "collect/batch_writer.py"
                ):
                    next(collector)
            except Interrupt:
                struck += 1
            except StopIteration:
                break
            assert collector.written_frames == collector.collected_frames == replay.write_count
    assert struck > 10
    assert collector.written_frames == replay.write_count == 2000
