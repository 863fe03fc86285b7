"""How long calls last, as it is told of workers on this machine and on others."""

from __future__ import annotations

import logging
import time

import pytest

from millpond.collect.supervision import Watch
from millpond.collect.worker_status import _DOING, _SINCE, DOING, WorkerTable


def test_a_long_call_is_told_once_though_its_beginning_trembles(caplog: pytest.LogCaptureFixture) -> None:
    """On another machine it is reckoned from each report anew."""
    line = WorkerTable(bytearray(WorkerTable.nbytes(1)), workers=1).lines[0]
    watch = Watch(stall_timeout=100.0, names=["Diary"])
    began = time.monotonic() - 12
    with caplog.at_level(logging.WARNING, logger="millpond.collect"):
        for moved in (0.0, 0.003, -0.002, 0.001, 0.0):
            line.words[_DOING], line.words[_SINCE] = DOING.index("step()"), int((began + moved) * 1e9)
            assert watch.look(0, line) is None
    assert len(caplog.records) == 1
    began -= 200
    for moved in (0.0, 0.003):
        line.words[_SINCE] = int((began + moved) * 1e9)
        hung = watch.look(0, line)
    assert hung is not None
    assert "stall_timeout=100" in hung
