"""Synchronous runs: saving changes nothing, and one that was stopped goes on as one that never was, bit for bit."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from runs import SMALL, Silent, resume, rows, run, same, weights
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from millpond.replay import ReplayBuffer
from millpond.train.compose import settings_from_overrides
from millpond.train.run import Outcome, train
from millpond.train.run_state import Checkpoints
from millpond.train.supervise import StopSignal

WORDS = (
    *("execution.mode=sync", "collectors=1", "eval.interval_frames=30", "eval.max_steps=20"),
    *("eval.episodes=1", "total_frames=90", "logger.interval_frames=7"),
)
ALGORITHMS = {
    "sac": ("env=Pendulum-v1", "normalize_observations=true"),
    "td3": ("env=Pendulum-v1", "collect.random_frames=30", "envs_per_collector=3"),
    "ddpg": ("env=Pendulum-v1", "replay.samples_per_insert=3"),
    "dqn": ("env=CartPole-v1", "algorithm.epsilon_frames=60"),
}


class StoppedAt(StopSignal):
    """A request to stop that comes when it is looked for the ``n``-th time."""

    def __init__(self, n: int) -> None:
        super().__init__(say=lambda text: None)
        self.event, self.signal = _Countdown(n), signal.SIGINT


class _Countdown(threading.Event):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.left = n

    def is_set(self) -> bool:
        self.left -= 1
        if self.left == 0:
            self.set()
        return super().is_set()


def stopped(path: Path, at: int, *words: str) -> Outcome:
    return train(settings_from_overrides([*SMALL, f"run_dir={path}", *words]), stop=StoppedAt(at), progress=Silent())


def replayed(path: Path) -> Any:
    with ReplayBuffer(500, batch_size=8) as replay:
        replay.loads(Checkpoints(path / "checkpoints").latest() / "replay.millpond")
        return replay[:]


def events(path: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = EventAccumulator(str(path), size_guidance={"scalars": 0})
    accumulator.Reload()
    clock = ("throughput/", "eval/wall_s")
    tags = [tag for tag in accumulator.Tags()["scalars"] if not tag.startswith(clock)]
    return {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in tags}


def await_next_second() -> None:
    """TensorBoard reads files in the order of the seconds in their names; resumes by hand are not faster than that."""
    begun = int(time.time())
    while int(time.time()) == begun:
        time.sleep(0.01)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_run_that_is_stopped_and_resumed_equals_one_that_never_was(tmp_path: Path, algorithm: str):
    """ckpt-1; stopped wherever it looks: within updates, within evaluations, at its end"""
    words = (*WORDS, f"algorithm={algorithm}", *ALGORITHMS[algorithm], "logger.tensorboard=true")
    assert run(tmp_path / "whole", *words).status == "completed"
    path = tmp_path / "stopped"
    outcome, parts = stopped(path, 3, *words), 1
    while outcome.status == "interrupted":
        settings = settings_from_overrides([f"resume={path}"])
        await_next_second()
        outcome, parts = train(settings, stop=StoppedAt(70 + 31 * parts), progress=Silent()), parts + 1
        assert outcome.problem is None
    assert parts > 3
    assert outcome.status == "completed"
    assert same(weights(tmp_path / "whole"), weights(path))
    for whole, found in zip(rows(tmp_path / "whole"), rows(path), strict=True):
        assert whole == found
    assert (replayed(tmp_path / "whole") == replayed(path)).all()
    assert events(tmp_path / "whole") == events(path)


def test_saving_changes_nothing_in_a_run(tmp_path: Path):
    words = (*WORDS, *ALGORITHMS["sac"])
    assert run(tmp_path / "plain", *words).status == "completed"
    assert run(tmp_path / "saving", *words, "checkpoint.interval_frames=11", "checkpoint.keep=99").status == "completed"
    assert len(Checkpoints(tmp_path / "saving" / "checkpoints").all()) == 9
    assert same(weights(tmp_path / "plain"), weights(tmp_path / "saving"))
    assert rows(tmp_path / "plain") == rows(tmp_path / "saving")


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path: Path):
    """What a SIGKILL leaves: files that know more than the last checkpoint, and no summary."""
    words = (*WORDS, *ALGORITHMS["sac"], "checkpoint.interval_frames=20")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run(whole, *words).status == "completed"
    assert run(killed, *words, "checkpoint.keep=9").status == "completed"
    for later in Checkpoints(killed / "checkpoints").all()[2:]:  # those of frames 60, 80 and 90
        later.rename(killed / "checkpoints" / f".writing-{later.name}")
    (killed / "summary.json").unlink()
    assert resume(killed).status == "completed"
    assert same(weights(whole), weights(killed))
    assert rows(whole) == rows(killed)
    assert not list((killed / "checkpoints").glob(".writing-*"))
