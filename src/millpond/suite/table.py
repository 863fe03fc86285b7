"""What a person sees while a suite goes on: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

from millpond.suite.record import FAILED, PASSED, RUNNING, TIMEOUT, RunRecord, SuiteRecord
from millpond.train.report import duration, number

_COLUMNS = ("run", "status", "time", "frames", "updates", "return", "checks")
_STYLES = {PASSED: "green", FAILED: "red", TIMEOUT: "red", RUNNING: "bold"}


@dataclass(frozen=True, slots=True)
class Moment:
    """Where a run is: for how many seconds it goes on, frames, updates and the last evaluation's return."""

    seconds: float
    frames: float | None = None
    updates: float | None = None
    eval_return: float | None = None


class Table(Protocol):
    """Shows a suite. ``say`` prints a line of text without disturbing what is shown."""

    def begin(self, run: RunRecord) -> None: ...

    def show(self, run: RunRecord, moment: Moment) -> None: ...

    def end(self, run: RunRecord) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self, record: SuiteRecord) -> None: ...


def make_table(record: SuiteRecord, stream: TextIO | None = None) -> Table:
    """A live table where ``stream`` (standard error) is a terminal and `rich` is there, plain lines otherwise."""
    stream = stream or sys.stderr
    if stream.isatty():
        with contextlib.suppress(ImportError):
            return LiveTable(record, stream)
    return PlainTable(stream)


class PlainTable:
    """A line as each run begins, and one as it ends."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def begin(self, run: RunRecord) -> None:
        self.say(f"{run.name}: begins; it may take {duration(run.timeout_s)}")

    def show(self, run: RunRecord, moment: Moment) -> None:
        pass

    def end(self, run: RunRecord) -> None:
        cells = cells_of(run)
        said = (
            f"{run.name}: {cells['status']} after {cells['time']}, {cells['frames']} frames, {cells['updates']} updates"
        )
        self.say(f"{said}, checks {cells['checks']}" + (f": {run.problem}" if run.problem else ""))

    def say(self, text: str) -> None:
        try:
            print(text, file=self._stream, flush=True)
        except OSError:  # the terminal may be closed, and the suite go on
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def close(self, record: SuiteRecord) -> None:
        pass


class LiveTable:
    """All runs in one table that is redrawn. Needs `rich`."""

    def __init__(self, record: SuiteRecord, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._record = record
        self._console = Console(file=stream)
        self._moments: dict[str, Moment] = {}
        self._live = Live(self._draw(), console=self._console, auto_refresh=False)  # no thread of its own
        self._live.start()

    def begin(self, run: RunRecord) -> None:
        self._refresh()

    def show(self, run: RunRecord, moment: Moment) -> None:
        self._moments[run.name] = moment
        self._refresh()

    def end(self, run: RunRecord) -> None:
        self._moments.pop(run.name, None)
        self._refresh()

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self, record: SuiteRecord) -> None:
        self._refresh()
        with contextlib.suppress(OSError):
            self._live.stop()

    def _refresh(self) -> None:
        with contextlib.suppress(OSError):  # the terminal may be closed, and the suite go on
            self._live.update(self._draw(), refresh=True)

    def _draw(self) -> Any:
        from rich.table import Table as RichTable

        table = RichTable(box=None, pad_edge=False)
        for name in _COLUMNS:
            table.add_column(name, justify="left" if name in ("run", "status", "checks") else "right", no_wrap=True)
        for run in self._record.runs:
            cells = cells_of(run, self._moments.get(run.name))
            table.add_row(*(cells[name] for name in _COLUMNS), style=_STYLES.get(run.status))
        return table


def cells_of(run: RunRecord, moment: Moment | None = None) -> dict[str, str]:
    """What is shown of a run; of one that goes on, where it is."""
    told = run.summary
    moment = moment or Moment(
        *(run.wall_s, told.get("collected_frames"), told.get("optimizer_steps"), told.get("eval_return_last"))
    )
    broken = len(run.failed_checks)
    return {
        "run": run.name,
        "status": run.status,
        "time": duration(moment.seconds) if moment.seconds else "–",
        "frames": number(moment.frames),
        "updates": number(moment.updates),
        "return": number(moment.eval_return),
        "checks": f"{len(run.checks) - broken} of {len(run.checks)} ok" if run.checks else "–",
    }
