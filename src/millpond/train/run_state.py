"""What a run leaves on disk: its directory, its checkpoints, its summary.

    config.yaml  metrics.csv  events.out.tfevents.*  run.log  summary.json  report.html  checkpoints/  videos/

Every file that is written more than once is written beside itself and renamed, and a checkpoint is a directory that
gets its name only when it is complete: whatever kills a run, what is there can be read.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millpond.core.errors import CheckpointError, InvalidArgument

CHECKPOINT_FORMAT = 2
_LOCK = ".lock"
_NAME = re.compile(r"\d{12}-\d{12}(-\d{3})?")


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The paths of one run. ``create`` makes the directory, ``open`` finds one that is there."""

    path: Path

    @classmethod
    def create(cls, path: Path) -> RunDirectory:
        """Make a new directory.

        Raises:
            InvalidArgument: something is there already, or the directory cannot be made.
        """
        try:
            cls.check_free(path)
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgument(f"run_dir={path}: {error.strerror}") from None
        return cls(path)

    @staticmethod
    def check_free(path: Path) -> None:
        """Raises InvalidArgument where something is there already."""
        if path.exists() and any(there.name != _LOCK for there in path.iterdir()):
            raise InvalidArgument(
                f"run_dir={path} exists and is not empty: choose another, or continue that run with resume={path}"
            )

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Find an existing run.

        Raises:
            InvalidArgument: there is no run in that directory.
        """
        if not (path / "config.yaml").is_file():
            raise InvalidArgument(f"{path} is no run: it holds no config.yaml")
        return cls(path)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While it is entered, nobody else runs in this directory. The system lets go of it when this process ends.

        Raises:
            InvalidArgument: somebody does; the message names the process.
            OSError: the file system takes no lock file.
        """
        with open(self.path / _LOCK, "a+", encoding="ascii") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise InvalidArgument(
                    f"a run is going on in {self.path} (process {file.read().strip() or 'unknown'}): wait for its end,"
                    " or stop it with Ctrl-C"
                ) from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.csv"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def log(self) -> Path:
        return self.path / "run.log"

    @property
    def videos(self) -> Path:
        return self.path / "videos"

    @property
    def live_replay(self) -> Path:
        """Holds where the buffer of a run that goes on is, for those who look at it."""
        return self.path / ".replay"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"


def default_run_directory(algorithm: str, env: str, seed: int) -> Path:
    """``runs/ALGORITHM-ENV-sSEED-TIME`` under the working directory, with a number where the second is taken."""
    name = f"{algorithm}-{re.sub(r'[^A-Za-z0-9._-]+', '_', env)}-s{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = Path("runs") / name, 1
    while path.exists():
        number += 1
        path = Path("runs") / f"{name}-{number}"
    return path


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step: a reader, or a kill, sees the old or the new one."""
    beside = path.with_name(f".{path.name}.new")
    with open(beside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Replace a JSON file in one step. JSON has neither NaN nor infinities: they become null."""
    write_text(path, json.dumps(_strict(values), indent=2, allow_nan=False) + "\n")


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: _strict(part) for name, part in value.items()}
    return [_strict(part) for part in value] if isinstance(value, list | tuple) else value


def read_json(path: Path) -> dict[str, Any]:
    """Raises CheckpointError where the file is missing or holds no JSON object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return values


class Checkpoints:
    """The checkpoints of one run, named by frames and updates; the newest ``keep`` stay."""

    def __init__(self, directory: Path, *, keep: int = 1) -> None:
        self._directory = directory
        self._keep = keep

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        if not self._directory.is_dir():
            return []
        return sorted(path for path in self._directory.iterdir() if _NAME.fullmatch(path.name))

    def latest(self) -> Path:
        """The newest complete checkpoint.

        Raises:
            CheckpointError: there is none.
        """
        found = self.all()
        if not found:
            raise CheckpointError(
                f"{self._directory.parent} holds no checkpoint: the run ended before its first one was saved, so there"
                " is nothing to go on from"
            )
        return found[-1]

    def save(self, *, frames: int, updates: int, state: Mapping[str, Any], write: Callable[[Path], None]) -> Path:
        """Store a checkpoint: ``write`` puts files into the directory it is given, ``state`` becomes ``run.json``.

        All or nothing: until everything is on disk the previous checkpoints are untouched and nothing new has a name.
        """
        target = self._free(f"{frames:012d}-{updates:012d}")
        self.clean()
        beside = self._directory / f".writing-{os.getpid()}"
        beside.mkdir(parents=True)
        try:
            write(beside)
            sums = {path.name: _digest(path) for path in sorted(beside.iterdir()) if path.is_file()}
            told = _strict({"format": CHECKPOINT_FORMAT, "sha256": sums, **state})
            write_json(beside / "run.json", {**told, "digest": _digest_of(told)})
            _sync(beside)
            os.rename(beside, target)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        for old in self.all()[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)
        return target

    def _free(self, name: str) -> Path:
        """The same frames and updates may be saved again: when what is known of them has changed."""
        taken = [path.name for path in self.all() if path.name.startswith(name)]
        return self._directory / (f"{name}-{int(taken[-1][len(name) + 1 :] or 0) + 1:03d}" if taken else name)

    def clean(self) -> None:
        """Remove what a killed run left half-written."""
        for path in self._directory.glob(".writing-*"):
            shutil.rmtree(path, ignore_errors=True)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The ``state`` of a checkpoint, after every file in it was found whole.

    Raises:
        CheckpointError: a file is missing or damaged, or the format is not known here. Nothing was loaded.
    """
    state = read_json(path / "run.json")
    if state.get("format") != CHECKPOINT_FORMAT:
        raise CheckpointError(f"{path} has format {state.get('format')!r}; this version reads {CHECKPOINT_FORMAT}")
    if state.pop("digest", None) != _digest_of(state):
        raise CheckpointError(f"{path / 'run.json'} is damaged: its checksum is not the one it was written with")
    for name, digest in state["sha256"].items():
        if not (path / name).is_file():
            raise CheckpointError(f"{path / name} is missing")
        if _digest(path / name) != digest:
            raise CheckpointError(f"{path / name} is damaged: its checksum is not the one it was written with")
    return state


def _digest_of(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
