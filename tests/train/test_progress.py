from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest

from millpond.train.progress import LiveProgress, Moment, PlainProgress, TimeLeft, make_progress

START = Moment(
    frames=0, total_frames=1000, updates=0, frames_per_s=None, updates_per_s=None, replay_size=0, eval_return=None
)
MIDDLE = replace(
    START, frames=250, updates=150, frames_per_s=25.0, updates_per_s=15.0, replay_size=250, eval_return=-7.25
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_plain_lines_come_now_and_then_and_at_the_end():
    stream, clock = io.StringIO(), Clock()
    progress = PlainProgress(stream, interval_s=10, clock=clock)
    progress.show(START)
    clock.now += 5
    progress.show(replace(MIDDLE, frames=100))
    clock.now += 5
    progress.show(MIDDLE)
    clock.now += 1
    progress.show(replace(MIDDLE, frames=1000))
    progress.close()
    lines = stream.getvalue().splitlines()
    assert lines == [
        "train: 0/1,000 frames (0 %), return –, replay 0",
        "train: 250/1,000 frames (25 %), return -7.2, left 0:30, 25 frames/s, 15 updates/s, replay 250",
        "train: 1,000/1,000 frames (100 %), return -7.2, left 0:00, 25 frames/s, 15 updates/s, replay 250",
    ]


def test_the_last_line_is_not_said_twice():
    stream = io.StringIO()
    progress = PlainProgress(stream)
    progress.show(START)
    progress.close()
    assert len(stream.getvalue().splitlines()) == 1


def test_time_left_follows_the_last_minute():
    clock = Clock()
    left = TimeLeft(clock)
    left.update(START)
    assert left() is None
    for _ in range(100):  # slow at first, then fast
        clock.now += 1
        left.update(replace(START, frames=1))
    for second in range(1, 101):
        clock.now += 1
        left.update(replace(START, frames=5 * second))
    assert left() == 500 / 5


def test_a_stream_that_is_no_terminal_gets_plain_lines():
    assert isinstance(make_progress(io.StringIO()), PlainProgress)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("width", "numbers"), [(30, 0), (60, 2), (80, 3), (120, 5), (200, 5)])
def test_every_terminal_shows_phase_bar_and_share_and_as_many_numbers_as_fit(
    monkeypatch: pytest.MonkeyPatch, width: int, numbers: int
):
    monkeypatch.setenv("COLUMNS", str(width))
    stream, clock = Terminal(), Clock()
    progress = LiveProgress(stream, clock=clock)
    progress.show(replace(START, phase="evaluate"))
    clock.now += 3600
    many = {"frames_per_s": 12345.0, "updates_per_s": 12345.0, "replay_size": 1_000_000, "eval_return": -1234.5}
    progress.show(replace(MIDDLE, phase="evaluate", **many))
    progress.close()
    line = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).replace("\r", "\n").rstrip().splitlines()[-1]
    assert len(line) <= width
    all_numbers = ["return -1,234.5", "left 3:00:00", "12,345 frames/s", "12,345 updates/s", "replay 1,000,000"]
    assert re.fullmatch("evaluate [━╺╸]{10,}  25 % ?" + "  ".join(all_numbers[:numbers]), line)


def test_the_live_line_shows_everything(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    progress = make_progress(stream)
    assert isinstance(progress, LiveProgress)
    progress.show(MIDDLE)
    progress.say("collector 1 was replaced [restart 1]")
    progress.close()
    shown = stream.getvalue()
    for part in ("25 frames/s", "15 updates/s", "replay 250", "return -7.2", "collector 1 was replaced [restart 1]"):
        assert part in shown
