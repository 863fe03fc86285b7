"""SIGKILL at random instants and at named steps. The longer runs: ``python tests/replay/stress.py METHOD MODE
KILLS``."""

from __future__ import annotations

import pytest
import stress

KILLS = [
    ("fork", "overwrite", 10),
    ("fork", "prioritized", 8),
    ("fork", "fifo", 8),
    pytest.param("fork", "fifo2", 6, marks=pytest.mark.exhaustive),
    pytest.param("fork", "pool", 8, marks=pytest.mark.exhaustive),
    pytest.param("fork", "pool2", 6, marks=pytest.mark.exhaustive),
    ("fork", "epoch", 6),
    ("forkserver", "pool", 3),
    pytest.param("spawn", "overwrite", 2, marks=pytest.mark.exhaustive),
]


SHORT = [
    ("fork", "overwrite", 10),
    ("fork", "prioritized", 8),
    ("fork", "fifo", 8),
    pytest.param("spawn", "overwrite", 2, marks=pytest.mark.exhaustive),
]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("method", "mode", "kills"), KILLS, ids=lambda value: str(value))
def test_the_others_go_on_with_whole_rows_and_exact_counters(method: str, mode: str, kills: int) -> None:
    """proc-1: none torn, the counters add up, nobody waits longer than 1 s, each item is delivered as often as
    promised."""
    result = stress.run(method, mode, kills, seed=len(mode) + kills)
    assert result["problems"] == []
    assert result["kills"] == kills


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("method", "mode", "kills"), SHORT, ids=lambda value: str(value))
def test_the_same_with_the_compiled_shortcut(method: str, mode: str, kills: int) -> None:
    """Also where some have it and some have not."""
    result = stress.run(method, mode, kills, seed=len(mode) + kills, short=True)
    assert result["problems"] == []
    assert result["kills"] == kills
    assert result["short"] > 1000
