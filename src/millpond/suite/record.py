"""``suite.json``: what came of each run, written anew after each step, so that a kill loses no result."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from millpond.core.errors import CheckpointError, InvalidArgument
from millpond.suite.plan import Plan, Planned
from millpond.train import machine
from millpond.train.run_state import read_json, write_json

FORMAT = 1
WAITING, RUNNING, PASSED, FAILED, TIMEOUT, INTERRUPTED = (
    *("waiting", "running", "passed", "failed", "timeout", "interrupted"),
)
DONE = (PASSED, FAILED, TIMEOUT)  # what a resumed suite does not do again


@dataclass(slots=True)
class RunRecord:
    """One run. ``status`` is one of waiting, running, passed, failed, timeout, interrupted; ``summary`` is the
    ``summary.json`` of the run, where it came to that, without its checks."""

    name: str
    words: list[str]
    timeout_s: float
    status: str = WAITING
    command: str = ""
    run_dir: str = ""
    exit_code: int | None = None
    wall_s: float = 0.0
    problem: str | None = None
    checks: dict[str, dict[str, Any]] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def failed_checks(self) -> list[str]:
        return [name for name, check in self.checks.items() if not check["ok"]]


@dataclass(slots=True)
class SuiteRecord:
    """A suite and its runs. ``status`` is running, passed, failed or interrupted."""

    directory: Path
    mode: str
    command: str
    runs: list[RunRecord]
    status: str = RUNNING
    started: str = ""
    wall_s: float = 0.0
    git_commit: str | None = None
    versions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def new(cls, plan: Plan, *, command: str) -> SuiteRecord:
        """Make the directory.

        Raises:
            InvalidArgument: something is there already, or it cannot be made.
        """
        directory = plan.directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            taken = any(directory.iterdir())
        except OSError as error:
            raise InvalidArgument(f"suite_dir={directory}: {error.strerror}") from None
        if taken:
            raise InvalidArgument(
                f"suite_dir={directory} is not empty: choose another, or go on with the suite there with"
                f" resume={directory}"
            )
        runs = [RunRecord(run.name, list(run.words), run.timeout_s) for run in plan.runs]
        return cls(
            directory=directory,
            mode=plan.mode,
            command=command,
            runs=runs,
            started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            git_commit=machine.git_commit(),
            versions=machine.versions(),
        )

    @classmethod
    def open(cls, directory: Path, *, timeout_s: float | None = None) -> SuiteRecord:
        """Read one that is there; ``timeout_s`` is the new limit of the runs that are not done.

        Raises:
            InvalidArgument: there is none, or it is not one.
        """
        try:
            values = read_json(directory / "suite.json")
            if values.pop("format") != FORMAT:
                raise ValueError("another format")
            names = {each.name for each in dataclasses.fields(cls)} - {"directory", "runs"}
            runs = [RunRecord(**run) for run in values["runs"]]
            record = cls(directory=directory, runs=runs, **{name: values[name] for name in names})
        except (CheckpointError, KeyError, TypeError, ValueError) as error:
            raise InvalidArgument(f"resume={directory}: it holds no suite that can be gone on with: {error}") from None
        for run in record.open_runs:
            run.timeout_s = timeout_s or run.timeout_s
        return record

    @property
    def open_runs(self) -> list[RunRecord]:
        """Those that are not done."""
        return [run for run in self.runs if run.status not in DONE]

    @property
    def planned(self) -> list[Planned]:
        return [Planned(run.name, tuple(run.words), run.timeout_s) for run in self.open_runs]

    def counts(self) -> dict[str, int]:
        """How many runs there are of each status."""
        return {status: sum(run.status == status for run in self.runs) for status in (*DONE, INTERRUPTED, WAITING)}

    def save(self) -> None:
        """Replace ``suite.json`` in one step."""
        values = asdict(self) | {"format": FORMAT, "counts": self.counts()}
        values["directory"] = str(self.directory)
        write_json(self.directory / "suite.json", values)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While it is entered, no other process runs this suite.

        Raises:
            InvalidArgument: one does.
        """
        with open(self.directory / ".lock", "a+", encoding="ascii") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip() or "unknown"
                raise InvalidArgument(f"a suite is going on in {self.directory} (process {holder})") from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield
