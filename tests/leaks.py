"""What a test may not leave behind: threads, descendant processes, file descriptors, shared-memory segments.

Not watched, each for its reason:

- Native worker threads (OpenMP's, torch's, MuJoCo's). They belong to pools that live as long as the process and run no
  Python; what is looked at is every thread that has a Python frame, also one that `threading` does not know.
- The two helper processes of `multiprocessing`, its resource tracker and its fork server, with the descriptors that
  lead to them: one of each per process by design, and they end with it. A *worker* made by the fork server is watched.
- Zombies: they are dead, and hold nothing but a process id.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import psutil

from millpond.shm.directory import shared_root

SEGMENT_PREFIX = "millpond-"  # what follows is the owner's process id, a dash and a token
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, order=True)
class Trace:
    """One thing that exists now. Two are the same thing exactly if they are equal."""

    kind: str  # "thread", "process", "descriptor" or "segment"
    number: int  # thread ident, process id, descriptor; a segment's owner
    detail: str

    def __str__(self) -> str:
        return f"{self.kind} {self.number}: {self.detail}"


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent dies, so that they stay visible. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def look() -> frozenset[Trace]:
    """Everything of the watched kinds that belongs to this process or to its descendants."""
    family = {os.getpid(): False}
    found = set(_threads()) | set(_descriptors())
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            dead = process.status() == psutil.STATUS_ZOMBIE
            family[process.pid] = dead
            if not dead and process.pid not in _helper_processes():
                found.add(Trace("process", process.pid, _description(process)))
    return frozenset(found | set(_segments(family)))


def kill(left: frozenset[Trace]) -> None:
    """End the processes among `left`: a worker that nobody waits for would hold up the end of the session."""
    for trace in left:
        if trace.kind == "process":
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(trace.number).kill()


def _threads() -> Iterator[Trace]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident in sys._current_frames():
        yield Trace("thread", ident, names.get(ident, "started without `threading`"))


def _helper_processes() -> set[int | None]:
    return {resource_tracker._resource_tracker._pid, forkserver._forkserver._forkserver_pid}


def _helper_descriptors() -> set[int | None]:
    return {resource_tracker._resource_tracker._fd, forkserver._forkserver._forkserver_alive_fd}


def _descriptors() -> Iterator[Trace]:
    folder = Path("/proc/self/fd")
    if not folder.exists():
        return
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # the one that listed the folder is closed by now
            if int(name) not in _helper_descriptors():
                yield Trace("descriptor", int(name), os.readlink(folder / name))


def _description(process: psutil.Process) -> str:
    command = " ".join(process.cmdline())[:120] or process.name()
    return f"child of {process.ppid()}, started {process.create_time():.2f}, {command}"


def _segments(family: dict[int, bool]) -> Iterator[Trace]:
    """Segments of the family, and of owners that no longer live: a killed descendant is one of these."""
    for path in shared_root().glob(f"{SEGMENT_PREFIX}*"):
        owner = path.name.removeprefix(SEGMENT_PREFIX).partition("-")[0]
        if owner.isdigit():
            ours, dead = int(owner) in family, family.get(int(owner), not psutil.pid_exists(int(owner)))
            if ours or dead:
                yield Trace("segment", int(owner), f"{path.name}, its owner {'is dead' if dead else 'lives'}")
