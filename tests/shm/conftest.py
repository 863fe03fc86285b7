"""Both kinds of lock, memory that processes share, and children that no test can leave behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from shm_children import Child, Starter

from millpond.shm import futex
from millpond.shm.mapped import make_directory, remove_directory


@pytest.fixture(params=["robust", "fallback"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kind of the locks that the test, and its children, make."""
    if request.param == "robust" and not futex.supported():
        pytest.skip("no robust locks on this platform")
    monkeypatch.setenv("MILLPOND_LOCK", request.param)
    return str(request.param)


@pytest.fixture
def robust(monkeypatch: pytest.MonkeyPatch) -> None:
    """Robust locks only."""
    if not futex.supported():
        pytest.skip("no robust locks on this platform")
    monkeypatch.setenv("MILLPOND_LOCK", "robust")


@pytest.fixture
def directory() -> Iterator[Path]:
    """A shared directory, removed afterwards."""
    path = make_directory("test")
    yield path
    remove_directory(path)


@pytest.fixture
def start() -> Iterator[Starter]:
    """``start(function)`` forks a child that runs ``function(child)``; what still runs at the end is killed."""
    children: list[Child] = []

    def starter(function: object) -> Child:
        children.append(Child(function))
        return children[-1]

    yield starter
    for child in children:
        child.end()


@pytest.fixture
def long_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks again by himself: a lost wake-up shows as a hang, instead of healing after half a second."""
    monkeypatch.setattr(futex, "WAIT_SLICE", 60.0)
