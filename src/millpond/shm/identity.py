"""Who is it, and does it still live? Processes by pid *and* start time; machines by boot and pid namespace."""

from __future__ import annotations

import functools
import os
import platform
import sys
import threading
import time
import zlib
from collections.abc import Callable

_LOOK_S = 0.5  # how often `when_gone` looks
_LINUX = sys.platform == "linux"


@functools.cache
def boot_id() -> str:
    """Changes with every boot of the machine; the same for all who run on it. Empty where the system has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def pid_namespace() -> int:
    """Differs between containers in which the same pid means different processes. 0 where the system has none."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


@functools.cache
def libc() -> str:
    """``glibc 2.36``, or ``not glibc``."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or "not glibc"
    except (ValueError, OSError, AttributeError):
        return "not glibc"


@functools.cache
def abi() -> int:
    """32 bits that differ where the layout of a mutex or the meaning of a pid may: machine, libc, container, boot."""
    name = libc().split()[0]
    return zlib.crc32(f"{platform.machine()} {name} {pid_namespace()} {boot_id()}".encode())


def start_time(pid: int) -> int:
    """When the process started, in clock ticks since boot; 0 if it is gone or a zombie. pid and this are unique.

    Where there is no ``/proc`` the answer is 1 for any pid in use: it errs towards "alive".
    """
    if pid <= 0:
        return 0
    if not _LINUX:
        return _start_time_elsewhere(pid)
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name may hold spaces and parentheses
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def _start_time_elsewhere(pid: int) -> int:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return 0
    except PermissionError:
        return 1
    return 1


def alive(pid: int, started: int) -> bool:
    """Does the process that had this pid and this start time still run? A zombie does not."""
    return started != 0 and start_time(pid) == started


def thread_alive(pid: int, tid: int) -> bool:
    """Is ``tid`` (``threading.get_native_id()``) a thread of ``pid`` now? Elsewhere than on Linux: is ``pid`` there?"""
    return os.path.exists(f"/proc/{pid}/task/{tid}") if _LINUX else start_time(pid) != 0


def when_gone(pid: int, started: int, act: Callable[[], object]) -> None:
    """Call ``act`` in a daemon thread once that process has ended, half a second later at most."""

    def watch() -> None:
        while alive(pid, started):
            time.sleep(_LOOK_S)
        act()

    threading.Thread(target=watch, name="millpond owner watch", daemon=True).start()


_me: tuple[int, int] | None = None


def me() -> tuple[int, int]:
    """(pid, start time) of this process. No system call after the first time, so it may be asked under a lock."""
    return _me if _me is not None else _find_me()


def _find_me() -> tuple[int, int]:
    global _me
    pid = os.getpid()
    _me = (pid, start_time(pid))
    return _me


def _after_fork() -> None:
    _find_me()
    abi.cache_clear()  # a child may have been born into another pid namespace


os.register_at_fork(after_in_child=_after_fork)
