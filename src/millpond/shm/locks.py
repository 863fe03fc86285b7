"""Robust locks where the system has them, a file lock and polling elsewhere, behind one interface."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any, Literal, Protocol

from millpond.core.errors import InvalidArgument
from millpond.shm import futex
from millpond.shm.fallback import FileMutex, PolledEvent
from millpond.shm.futex import EventCount, RobustMutex
from millpond.shm.holding import HeldUp
from millpond.shm.record import PrivateMemory, magic_at

Kind = Literal["robust", "fallback"]
VARIABLE = "MILLPOND_LOCK"


class Mutex(Protocol):
    """Excludes threads and processes, and survives its holder. Use: ``try: lock(); ... finally: unlock()``."""

    sticky: bool

    def lock(self, timeout: float | None = None, held_up: HeldUp | None = None) -> bool: ...
    def forgive(self) -> None: ...
    @property
    def unlock(self) -> Callable[[], int]: ...
    @property
    def holder(self) -> int: ...
    def held(self) -> bool: ...
    def orphan(self) -> None: ...


class Event(Protocol):
    """Waits for "it changed since I looked". See ``futex.EventCount``."""

    def prepare(self) -> int: ...
    def current(self, ticket: int) -> bool: ...
    def wait(self, ticket: int, timeout: float | None = None) -> bool: ...
    def publish(self, commit: memoryview, commit_at: ctypes.c_void_p) -> None: ...
    def signal(self) -> None: ...
    def notify_all(self) -> None: ...


def preferred() -> Kind:
    """The kind that new locks get here. ``MILLPOND_LOCK=fallback`` forces the portable one."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", "robust", "fallback"):
        raise InvalidArgument(f"{VARIABLE}={wanted!r}: must be 'robust' or 'fallback'")
    return "robust" if wanted != "fallback" and (wanted or futex.supported()) else "fallback"


def _kind(memory: Any, offset: int, create: bool) -> Kind:
    """Of a lock that exists, what it is; of a new one, what is preferred."""
    if create:
        return preferred()
    return "fallback" if magic_at(memory, offset) in (FileMutex.MAGIC, PolledEvent.MAGIC) else "robust"


def make_lock(
    memory: Any, offset: int = 0, *, create: bool, path: str | os.PathLike[str] | None = None
) -> tuple[Mutex, Kind]:
    """Make, or attach to, the lock in the 128 bytes at ``memory[offset:]``. An existing one decides its kind itself.

    ``path`` names the lock file of a fallback lock; it may be absent only for ``PrivateMemory``.

    Raises:
        NotShareable: there is no lock in these bytes that this process may use.
        InvalidArgument: a fallback lock in shared memory without a ``path``.
    """
    kind = _kind(memory, offset, create)
    if kind == "robust":
        return RobustMutex(memory, offset, create=create), kind
    if path is None and not isinstance(memory, PrivateMemory):
        raise InvalidArgument("a fallback lock in shared memory needs the path of a lock file")
    return FileMutex(memory, offset, create=create, path=path), kind


def make_event(memory: Any, offset: int = 0, *, create: bool) -> Event:
    """Make, or attach to, the event count in the 64 bytes at ``memory[offset:]``. Raises ``NotShareable``."""
    made = EventCount if _kind(memory, offset, create) == "robust" else PolledEvent
    return made(memory, offset, create=create)
