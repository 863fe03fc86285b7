"""SIGKILL at random instants and at named steps. The longer runs: ``python tests/replay/stress.py METHOD MODE
KILLS``, and ``stress_owners.py``."""

from __future__ import annotations

import pytest
import stress
import stress_owners

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
    """proc-1: none torn, the counters add up, nobody is stuck, each item is delivered as often as promised."""
    result = stress.run(method, mode, kills, seed=len(mode) + kills)
    assert result["problems"] == []
    assert result["kills"] == kills


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("method", "mode", "kills"), SHORT, ids=lambda value: str(value))
def test_the_same_with_the_compiled_fast_path(method: str, mode: str, kills: int) -> None:
    """Also where some have it and some have not."""
    result = stress.run(method, mode, kills, seed=len(mode) + kills, short=True)
    assert result["problems"] == []
    assert result["kills"] == kills
    assert result["short"] > 1000


ROLES = [
    ("fork", "prioritized", "updater", False, 4),
    ("fork", "overwrite", "checkpointer", False, 4),
    ("fork", "fifo", "attacher", False, 3),
    *(
        pytest.param("fork", mode, role, disk, 10, marks=pytest.mark.exhaustive)
        for mode, role, disk in [
            ("fifo2", "updater", True),
            ("pool2", "updater", False),
            ("prioritized", "checkpointer", False),
            ("epoch", "checkpointer", True),
            ("prioritized", "attacher", True),
            ("pool", "attacher", False),
        ]
    ),
]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("method", "mode", "role", "disk", "kills"), ROLES, ids=lambda value: str(value))
def test_whoever_updates_saves_or_attaches_may_be_killed(
    method: str, mode: str, role: str, disk: bool, kills: int
) -> None:
    """The same. No update that came to its end is lost; the last good checkpoint loads, and is of one moment."""
    result = stress.run(method, mode, kills, seed=kills, role=role, disk=disk)
    assert result["problems"] == []
    assert result["kills"] == kills


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("place", "mode", "kills"),
    [
        ("memory", "prioritized", 2),
        ("disk", "fifo", 3),
        pytest.param("memory", "fifo", 20, marks=pytest.mark.exhaustive),
        pytest.param("disk", "prioritized", 20, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_the_owner_may_be_killed(place: str, mode: str, kills: int) -> None:
    """Its users are told, the next start frees its memory, and the next owner of a buffer on disk finds all there."""
    result = stress_owners.run("fork", place, kills, seed=kills, mode=mode)
    assert result["problems"] == []
    assert result["kills"] == kills
