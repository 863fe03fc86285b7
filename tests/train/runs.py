"""What the tests of whole runs share: small settings, a silent progress, and reading a run back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from millpond.train.compose import settings_from_overrides
from millpond.train.loggers import read_metrics
from millpond.train.progress import Moment
from millpond.train.run import Outcome, train
from millpond.train.run_state import Checkpoints
from millpond.train.supervise import StopSignal

SMALL = [
    "env=worlds:Corridor-v0",
    "algorithm.hidden=[8]",
    "total_frames=120",
    "replay.capacity=500",
    "replay.learning_starts=20",
    "replay.batch_size=8",
    "eval.episodes=2",
    "eval.interval_frames=0",
    "logger.tensorboard=false",
    "logger.interval_frames=10",
]
CLOCK = ("wall_s", "throughput/frames_per_s", "throughput/updates_per_s", "eval/wall_s")


class Silent:
    """Shows nothing, and remembers what was said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def show(self, moment: Moment) -> None:
        pass

    def say(self, text: str) -> None:
        self.said.append(text)

    def close(self) -> None:
        pass


def run(path: Path, *words: str) -> Outcome:
    settings = settings_from_overrides([*SMALL, f"run_dir={path}", *words])
    with StopSignal(say=lambda text: None) as stop:
        return train(settings, stop=stop, progress=Silent())


def resume(path: Path, *words: str) -> Outcome:
    settings = settings_from_overrides([f"resume={path}", *words])
    with StopSignal(say=lambda text: None) as stop:
        return train(settings, stop=stop, progress=Silent())


def summary(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "summary.json").read_text())
    return found


def rows(path: Path, *, clock: bool = False) -> list[dict[str, str]]:
    """The rows of metrics.csv, without what depends on the clock."""
    _, found = read_metrics(path / "metrics.csv")
    return [{name: cell for name, cell in row.items() if clock or name not in CLOCK} for row in found]


def reports(path: Path) -> list[dict[str, str]]:
    """The rows that come at regular frames, without those of evaluations."""
    return [row for row in rows(path) if row["optim/steps"]]


def evaluations(path: Path) -> list[tuple[int, int]]:
    """Frames and version of each evaluation, in the order of the rows that tell of them."""
    found = [row for row in rows(path) if row["eval/frames"]]
    assert all(row["frames"] == row["eval/frames"] and row["updates"] == row["eval/version"] for row in found)
    return [(int(row["eval/frames"]), int(row["eval/version"])) for row in found]


def weights(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(Checkpoints(path / "checkpoints").latest() / "algorithm.pt")
    return found


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
