"""Where the numbers of a run go: ``metrics.csv``, TensorBoard events, optionally Weights & Biases.

A row belongs to a moment of the run: ``frames`` collected, ``updates`` done, ``wall_s`` since the start. The other
columns are namespaced (``loss/…``, ``eval/…``); a value that is not known at that moment is an empty cell, never NaN.
Reports come at regular frames; each evaluation has a row of its own, at the frame of the weights that it is of. Where
evaluations run beside training, that row comes when they are done, behind rows of later frames.
"""

from __future__ import annotations

import csv
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, TextIO

logger = logging.getLogger("millpond.train")
INDEX_COLUMNS = ("frames", "updates", "wall_s")

# What environments are the source of may be anything, and is told in other ways than by failing the run.
_MAY_BE_ANYTHING = ("eval/", "collect/")

# Known from the start, so that the order of columns does not depend on what happens first. An algorithm's own
# metrics follow in the order of their first appearance.
METRIC_COLUMNS = (
    "eval/return_mean",
    "eval/return_std",
    "eval/return_min",
    "eval/return_max",
    "eval/length_mean",
    "eval/frames",
    "eval/version",
    "eval/wall_s",
    "eval/quarantined_episodes",
    "eval/skipped",
    "eval/failed",
    "collect/frames",
    "collect/episodes",
    "collect/episode_return",
    "collect/episode_length",
    "collect/restarts",
    "collect/quarantined_rows",
    "replay/size",
    "replay/write_count",
    "replay/samples_returned",
    "replay/samples_per_insert",
    "replay/producer_blocks",
    "replay/consumer_blocks",
    "replay/priority_mean",
    "replay/priority_max",
    "replay/priority_weight_mean",
    "replay/priority_weight_min",
    "replay/action_std",
    "replay/action_absmax",
    "replay/action_saturation",
    "throughput/frames_per_s",
    "throughput/updates_per_s",
    "lag/policy_version",
    "optim/steps",
)


class Logger(Protocol):
    """One destination. ``write`` is called once per report, with finite numbers only; ``film`` once per video."""

    def write(self, frames: int, row: Mapping[str, float]) -> None: ...

    def film(self, frames: int, path: Path) -> None: ...

    def close(self) -> None: ...


class MetricsFile:
    """``metrics.csv``: one row per report, flushed at once, so that a killed run keeps all of them.

    An existing file is continued: its columns stay, and rows later than ``after_frames`` are dropped, since a resumed
    run reports them again. A metric that was not seen before becomes a new last column.
    """

    def __init__(self, path: Path, columns: Sequence[str] = METRIC_COLUMNS, *, after_frames: int | None = None) -> None:
        self._path = path
        self._columns = [*INDEX_COLUMNS, *columns]
        rows: list[dict[str, str]] = []
        if after_frames is not None and path.exists():
            header, rows = read_metrics(path)
            self._columns = header + [name for name in self._columns if name not in header]
            rows = [row for row in rows if int(row["frames"]) <= after_frames]
        self._file = self._rewrite(rows)

    def write(self, frames: int, row: Mapping[str, float]) -> None:
        new = [name for name in row if name not in self._columns]
        if new:
            self._file.close()
            _, rows = read_metrics(self._path)
            self._columns += new
            self._file = self._rewrite(rows)
        cells = {name: format_number(value) for name, value in row.items()} | {"frames": str(frames)}
        self._writer().writerow(cells)
        self._file.flush()

    def film(self, frames: int, path: Path) -> None:
        """A video is a file of its own."""

    def close(self) -> None:
        self._file.close()

    def _writer(self) -> csv.DictWriter[str]:
        return csv.DictWriter(self._file, self._columns, restval="", lineterminator="\n")

    def _rewrite(self, rows: Sequence[Mapping[str, str]]) -> TextIO:
        """Write header and rows beside the file and put it in its place: a reader sees the old or the new one."""
        beside = self._path.with_name(self._path.name + ".new")
        with open(beside, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self._columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(beside, self._path)
        return open(self._path, "a", encoding="utf-8", newline="")


def read_metrics(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Columns and rows of a ``metrics.csv``, as written; a last row that a kill cut short is left out."""
    with open(path, encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        columns = list(reader.fieldnames or ())
        rows = [row for row in reader if None not in row and None not in row.values()]
    return columns, rows


def format_number(value: float) -> str:
    """Digits that read back as exactly the same number; whole numbers without a point."""
    number = float(value)
    return str(int(number)) if number.is_integer() and abs(number) < 2**53 else repr(number)


class EventsFile:
    """TensorBoard events in the run directory itself. A resumed run's events replace those after ``after_frames``."""

    def __init__(self, directory: Path, *, after_frames: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        self._writer = SummaryWriter(str(directory), purge_step=None if after_frames is None else after_frames + 1)

    def write(self, frames: int, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            if name not in INDEX_COLUMNS:
                self._writer.add_scalar(name, value, frames)
        self._writer.flush()

    def film(self, frames: int, path: Path) -> None:
        """A video is a file of its own."""

    def close(self) -> None:
        self._writer.close()


class Loggers:
    """All destinations of one run. Numbers that are not finite are not passed on.

    ``not_finite`` has those of them that millpond itself has computed: the name, and the frame of the first.
    """

    def __init__(self, destinations: Sequence[Logger]) -> None:
        self._destinations = list(destinations)
        self.not_finite: dict[str, int] = {}

    def write(self, frames: int, row: Mapping[str, float]) -> None:
        finite: dict[str, float] = {}
        for name, value in row.items():
            if math.isfinite(value):
                finite[name] = value
            elif not name.startswith(_MAY_BE_ANYTHING):
                self.not_finite.setdefault(name, frames)
        for destination in self._destinations:
            destination.write(frames, finite)

    def film(self, frames: int, path: Path) -> None:
        """The video at ``path`` was made of the weights at ``frames``."""
        for destination in self._destinations:
            destination.film(frames, path)

    def close(self) -> None:
        for destination in self._destinations:  # one that fails does not keep the others open
            try:
                destination.close()
            except OSError as error:
                logger.warning("the last numbers may be missing in %s: %s", type(destination).__name__, error)
