"""What a run may not leave behind: processes, and directories of shared memory. Linux tells; elsewhere nothing is seen.

Not counted: the two helpers of ``multiprocessing``, of which there is one each per program, and the dead.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from millpond.shm.directory import PREFIX, shared_root

_GRACE_S = 5.0  # what was killed may need a moment to be gone
_running: set[object] = set()
_meetings: set[object] = set()  # runs that were not alone in this process


@contextmanager
def one_run() -> Iterator[object]:
    """While it is entered, a run goes on in this process. Of runs side by side nobody can tell whose a process is."""
    token = object()
    _running.add(token)
    if len(_running) > 1:
        _meetings.update(_running)
    try:
        yield token
    finally:
        _running.discard(token)
        _meetings.discard(token)


def alone(token: object) -> bool:
    """Was this the only run in this process all the time?"""
    return token not in _meetings


def left_behind(before: frozenset[str], *, ray_stays: bool = True, grace_s: float = _GRACE_S) -> list[str]:
    """The processes and shared memory that were not there ``before``, and that are there after ``grace_s`` seconds.

    With ``ray_stays`` those of Ray itself, and its workers without work, may come and go; its actors may not stay.
    """
    end = time.monotonic() + grace_s
    while (left := {one for one in _all() - before if not (ray_stays and of_ray(one))}) and time.monotonic() < end:
        time.sleep(0.02)
    return sorted(left)


def _all() -> frozenset[str]:
    return processes() | segments()


def of_ray(words: str) -> bool:
    """Whether this is a process of Ray's own, or a worker of it that is no actor: those call themselves otherwise."""
    return words.startswith("process ") and any(
        mark in words for mark in ("(ray::IDLE", "/ray/_private/", "/ray/core/", "/ray/dashboard/")
    )


def segments() -> frozenset[str]:
    """The directories of shared memory that belong to this process, in words."""
    return frozenset(f"shared memory {path}" for path in shared_root().glob(f"{PREFIX}{os.getpid()}-*"))


def processes() -> frozenset[str]:
    """The processes that descend from this one, in words."""
    return frozenset(_processes())


def _processes() -> Iterator[str]:
    server: Any = forkserver._forkserver
    tracker: Any = resource_tracker._resource_tracker
    helpers = {getattr(server, "_forkserver_pid", None), getattr(tracker, "_pid", None)}
    parents = dict(_parents())
    family = {os.getpid()}
    while grown := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= grown
    for pid in family - helpers - {os.getpid()}:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            yield f"process {pid} ({words[:120] or '?'})"


def _parents() -> Iterator[tuple[int, int]]:
    """Of each process that is not a zombie: its pid and that of its parent."""
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                state, parent = Path(f"/proc/{entry}/stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
                if state != "Z":
                    yield int(entry), int(parent)
