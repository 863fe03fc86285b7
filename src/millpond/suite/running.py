"""Runs what is not done of a suite, one after the other, whatever comes of each."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millpond.core.errors import CheckpointError
from millpond.suite.page import write_page
from millpond.suite.process import RunProcess
from millpond.suite.record import FAILED, INTERRUPTED, PASSED, RUNNING, TIMEOUT, RunRecord, SuiteRecord
from millpond.suite.table import Moment, Table
from millpond.train.checkpoint import REPLAY
from millpond.train.loggers import read_metrics
from millpond.train.run_state import Checkpoints, read_json
from millpond.train.supervise import StopSignal

_LOOK_S = 0.2
_TO_STOP_S = 60.0  # for a run that was asked to stop to save what it has


@dataclass(slots=True)
class _End:
    """How a process ended: by itself, killed at its limit, or because the suite was asked to stop."""

    exit_code: int | None
    how: str
    left: list[str]


def run_suite(record: SuiteRecord, *, table: Table, stop: StopSignal) -> SuiteRecord:
    """Do the runs that are not done, and write ``suite.json`` and ``suite.html``, also where it is stopped.

    A run that fails, hangs or dies is recorded, and the next one begins. A stop ends the run that goes on, as Ctrl-C
    would; what comes behind it stays as it is, for ``resume=``.
    """
    began, before = time.monotonic(), record.wall_s
    record.status = RUNNING

    def save() -> None:
        record.wall_s = round(before + time.monotonic() - began, 3)
        record.save()
        write_page(record)

    try:
        for run in record.open_runs:
            if stop.requested:
                break
            table.begin(run)
            try:
                _run_one(run, record.directory, table, stop, save)
            finally:
                save()
            table.end(run)
    finally:
        record.status = _status(record)
        save()
        table.close(record)
    return record


def _status(record: SuiteRecord) -> str:
    if record.open_runs:
        return INTERRUPTED
    return PASSED if all(run.status == PASSED for run in record.runs) else FAILED


def _run_one(run: RunRecord, directory: Path, table: Table, stop: StopSignal, save: Any) -> None:
    words = _words(run, directory)
    run.status, run.exit_code, run.problem, run.checks, run.summary = RUNNING, None, None, {}, {}
    run.command = shlex.join(["millpond", "train", *words])
    save()
    began, log, told = time.monotonic(), directory / f"{run.name}.log", directory / run.run_dir / "summary.json"
    earlier = _written(told)
    try:
        process = RunProcess(["train", *words], log=log)
    except OSError as error:
        run.status, run.problem = FAILED, f"it could not be started: {error}"
        return
    try:
        end = _watch(process, run, began, directory / run.run_dir, table, stop)
    except BaseException:  # the second request to stop
        process.kill()
        run.status, run.problem = INTERRUPTED, "killed, as the suite was stopped at once"
        raise
    finally:
        run.wall_s = round(time.monotonic() - began, 3)
    _judge(run, end, told if _written(told) != earlier else None, log)


def _written(path: Path) -> tuple[int, int] | None:
    """Other than before once a file has been replaced."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _words(run: RunRecord, directory: Path) -> list[str]:
    """As planned; or to go on with what an interrupted run has saved, or else to begin again beside it."""
    if run.run_dir and _resumable(directory / run.run_dir):
        return [f"resume={directory / run.run_dir}"]
    number, name = 1, run.name
    while (directory / name).exists():
        number += 1
        name = f"{run.name}-{number}"
    run.run_dir = name
    return [*run.words, f"run_dir={directory / name}"]


def _resumable(path: Path) -> bool:
    try:
        return (Checkpoints(path / "checkpoints").latest() / REPLAY).is_file()
    except CheckpointError:
        return False


def _watch(process: RunProcess, run: RunRecord, began: float, path: Path, table: Table, stop: StopSignal) -> _End:
    asked: float | None = None  # when it was asked to stop
    while process.exit_code is None:
        now = time.monotonic()
        if now - began > run.timeout_s:
            process.kill()
            return _End(process.exit_code, TIMEOUT, [])
        if stop.requested and asked is None:
            process.interrupt()
            asked = now
        if asked is not None and now - asked > _TO_STOP_S:
            process.kill()
            return _End(process.exit_code, INTERRUPTED, [])
        table.show(run, _moment(path, now - began))
        time.sleep(_LOOK_S)
    return _End(process.exit_code, "ended" if asked is None else INTERRUPTED, process.leave())


def _moment(path: Path, seconds: float) -> Moment:
    """Where a run is, by what it has reported."""
    try:
        _, rows = read_metrics(path / "metrics.csv")
    except OSError:
        return Moment(seconds)

    def last(name: str) -> float | None:
        return next((float(row[name]) for row in reversed(rows) if row.get(name)), None)

    return Moment(seconds, last("collect/frames"), last("optim/steps"), last("eval/return_mean"))


def _judge(run: RunRecord, end: _End, told: Path | None, log: Path) -> None:
    """``told`` is the summary that it wrote, or None: that of an earlier part of a resumed run says nothing of this."""
    try:
        summary = {} if told is None else read_json(told)
    except CheckpointError:
        summary = {}
    run.exit_code = end.exit_code
    run.checks = summary.pop("checks", {})
    run.summary = summary
    if end.how == TIMEOUT:
        run.status, run.problem = TIMEOUT, f"not done after {run.timeout_s:g} s, and killed"
        return
    if end.how == INTERRUPTED and end.exit_code != 0 and summary.get("status") != "failed":
        run.status, run.problem = INTERRUPTED, "stopped with the suite"
        return
    checked = bool(run.checks)
    detail = "; ".join(end.left) or "no process of the run was left"
    run.checks["processes_ended"] = {"ok": not end.left, "detail": detail if not end.left else f"left: {detail}"}
    if end.exit_code == 0 and checked and not run.failed_checks:
        run.status = PASSED
        return
    run.status = FAILED
    run.problem = _problem(run, log)


def _problem(run: RunRecord, log: Path) -> str:
    """Why it failed, in one line."""
    if run.failed_checks:
        return "; ".join(f"{name}: {run.checks[name]['detail']}" for name in run.failed_checks)
    if "error" in run.summary:
        return f"{run.summary['error_type']}: {' '.join(str(run.summary['error']).split())}"[:2000]
    said = [line.strip() for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    code = run.exit_code or 0
    ending = f"killed by signal {-code}" if code < 0 else f"exit code {code}, without a summary"
    return f"{ending}: {said[-1] if said else 'it said nothing'}"
