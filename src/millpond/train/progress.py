"""What a person sees while a run goes on: one live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TextIO

PLAIN_INTERVAL_S = 10.0
_NARROWEST_BAR = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Where a run is. Rates are per second, over the last report; None is not known yet."""

    frames: int
    total_frames: int
    updates: int
    frames_per_s: float | None
    updates_per_s: float | None
    replay_size: int
    eval_return: float | None
    phase: str = "train"


class Progress(Protocol):
    """Shows moments. ``say`` prints a line of text without disturbing what is shown."""

    def show(self, moment: Moment) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...


def make_progress(stream: TextIO | None = None) -> Progress:
    """A live line where ``stream`` (standard error) is a terminal and `rich` is there, plain lines otherwise."""
    stream = stream or sys.stderr
    if stream.isatty():
        try:
            return LiveProgress(stream)
        except ImportError:
            pass
    return PlainProgress(stream)


class PlainProgress:
    """A line at the start, then at most one every ``interval_s``, and one at the end."""

    def __init__(
        self, stream: TextIO, *, interval_s: float = PLAIN_INTERVAL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream, self._interval_s, self._clock = stream, interval_s, clock
        self._next: float | None = None
        self._last: Moment | None = None
        self._shown: Moment | None = None
        self._left = TimeLeft(clock)

    def show(self, moment: Moment) -> None:
        self._last = moment
        self._left.update(moment)
        now = self._clock()
        if self._next is None or now >= self._next:
            self._next = now + self._interval_s
            self._shown = moment
            self.say(describe(moment, self._left()))

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal may be closed, and the run go on
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        if self._last is not None and self._last is not self._shown:
            self.say(describe(self._last, self._left()))


class LiveProgress:
    """One line that is redrawn, with a bar of the frames. Needs `rich`."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._left = TimeLeft(clock)
        self._column = BarColumn(bar_width=_NARROWEST_BAR)
        self._bar = Progress(
            TextColumn("{task.fields[phase]}"),
            self._column,
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[numbers]}"),
            console=Console(file=stream),
            auto_refresh=False,  # no thread of its own: it is redrawn when there is something new
            transient=False,
        )
        self._task = self._bar.add_task("", total=1, phase="", numbers="")
        self._bar.start()

    def show(self, moment: Moment) -> None:
        self._left.update(moment)
        with contextlib.suppress(OSError):  # the terminal may be closed, and the run go on
            room = self._bar.console.width - len(f"{moment.phase}  100 %  ")  # what numbers and bar share
            shown = fitting(numbers(moment, self._left()), room - _NARROWEST_BAR)
            self._column.bar_width = max(_NARROWEST_BAR, room - len(shown))
            self._bar.update(
                self._task,
                completed=moment.frames,
                total=moment.total_frames,
                phase=moment.phase,
                numbers=shown,
            )
            self._bar.refresh()

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._bar.stop()


class TimeLeft:
    """How long the rest takes if it goes on as in the last minute; None while that cannot be said."""

    _WINDOW_S = 60.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: list[tuple[float, int]] = []
        self._rest = 0

    def update(self, moment: Moment) -> None:
        now = self._clock()
        self._seen.append((now, moment.frames))
        self._rest = moment.total_frames - moment.frames
        while len(self._seen) > 2 and self._seen[0][0] < now - self._WINDOW_S:
            self._seen.pop(0)

    def __call__(self) -> float | None:
        if self._rest <= 0:
            return 0.0
        if len(self._seen) < 2:
            return None
        (start, first), (end, last) = self._seen[0], self._seen[-1]
        return self._rest * (end - start) / (last - first) if last > first else None


def describe(moment: Moment, left_s: float | None) -> str:
    """The plain line."""
    share = 100 * moment.frames / moment.total_frames
    head = f"{moment.phase}: {moment.frames:,}/{moment.total_frames:,} frames ({share:.0f} %)"
    return ", ".join([head, *numbers(moment, left_s)])


def numbers(moment: Moment, left_s: float | None) -> list[str]:
    """The parts that both kinds of progress show, what a person looks at first in front."""
    parts = ["return –" if moment.eval_return is None else f"return {moment.eval_return:,.1f}"]
    if left_s is not None:
        minutes, seconds = divmod(round(left_s), 60)
        hours, minutes = divmod(minutes, 60)
        parts.append(f"left {hours}:{minutes:02d}:{seconds:02d}" if hours else f"left {minutes}:{seconds:02d}")
    if moment.frames_per_s is not None:
        parts.append(f"{moment.frames_per_s:,.0f} frames/s")
    if moment.updates_per_s is not None:
        parts.append(f"{moment.updates_per_s:,.0f} updates/s")
    return [*parts, f"replay {moment.replay_size:,}"]


def fitting(parts: list[str], width: int) -> str:
    """As many of the first parts as a line of ``width`` characters holds."""
    while parts and len("  ".join(parts)) > width:
        parts = parts[:-1]
    return "  ".join(parts)
