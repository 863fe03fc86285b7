"""Memory that is checked before it is taken: mapped files, anonymous memory, and what goes with them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path

from millpond.core.errors import InvalidArgument, NotShareable, OutOfDisk, OutOfMemory
from millpond.shm.directory import make_directory, remove_directory, shared_root
from millpond.shm.free_memory import available_memory, free_bytes, no_room, readable
from millpond.shm.identity import alive, start_time, thread_alive
from millpond.shm.record import PrivateMemory

__all__ = [
    "PrivateMemory",
    "alive",
    "allocate",
    "anonymous",
    "available_memory",
    "free_bytes",
    "look_at",
    "make_directory",
    "map_file",
    "memmove",
    "remove_directory",
    "shared_root",
    "start_time",
    "thread_alive",
]

HUGE = 8 << 20  # bytes from which on large pages are asked for: random access then spends a fifth less on addresses

# ``memmove(to_address, from_address, nbytes)``. Unlike ``ctypes.memmove`` it keeps the GIL: it may run under a lock.
memmove: Callable[[int, int, int], int | None] = ctypes.PYFUNCTYPE(
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
)(ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0)


def allocate(path: str | os.PathLike[str], nbytes: int) -> mmap.mmap:
    """Make a file of ``nbytes`` zeros that only this user may open, with all its space taken now, and map it shared.

    Space is taken at once because a file system that fills up later kills who touches the mapping (SIGBUS).

    Raises:
        OutOfMemory, OutOfDisk: there is less free (in memory, or on disk) than asked for; both numbers are named.
        InvalidArgument: ``nbytes`` is not positive, the file exists, or its directory does not. In no case is a file
            left.
    """
    path = Path(path)
    if nbytes <= 0:
        raise InvalidArgument(f"{path}: cannot allocate {nbytes} bytes")
    try:
        free = free_bytes(path.parent)
        if nbytes > free:
            raise _too_large(path, nbytes, free)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as problem:
        raise InvalidArgument(f"{path} exists already") from problem
    except FileNotFoundError as problem:
        raise InvalidArgument(f"{path.parent} is not there") from problem
    try:
        _take_space(fd, nbytes)
        return mmap.mmap(fd, nbytes)
    except BaseException as problem:
        os.unlink(path)
        if isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG):
            raise _too_large(path, nbytes, free_bytes(path.parent)) from problem
        raise
    finally:
        os.close(fd)


def _take_space(fd: int, nbytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, nbytes)
        return
    zeros = bytes(1 << 20)
    for at in range(0, nbytes, len(zeros)):
        os.pwrite(fd, zeros[: nbytes - at], at)


def _too_large(path: Path, nbytes: int, free: int) -> OutOfMemory | OutOfDisk:
    return no_room(path.parent, f"{path} needs {readable(nbytes)}, but only {readable(free)} are free")


def map_file(path: str | os.PathLike[str], nbytes: int | None = None) -> mmap.mmap:
    """Map a whole file, shared and writable. Nothing is created, and the file never grows.

    Raises:
        NotShareable: it is not there, is empty, or has another size than ``nbytes``.
    """
    return _map(path, nbytes, os.O_RDWR, mmap.ACCESS_WRITE)


def look_at(path: str | os.PathLike[str], nbytes: int | None = None) -> mmap.mmap:
    """Map a whole file to look at it, as others change it: what this process writes stays in this process.

    Needs no permission to write. Raises as `map_file` does.
    """
    return _map(path, nbytes, os.O_RDONLY, mmap.ACCESS_COPY)


def _map(path: str | os.PathLike[str], nbytes: int | None, flags: int, access: int) -> mmap.mmap:
    try:
        fd = os.open(path, flags | os.O_CLOEXEC)
    except FileNotFoundError as problem:
        raise NotShareable(f"{os.fspath(path)} is not there; has its owner removed it?") from problem
    try:
        size = os.fstat(fd).st_size
        if size == 0 or nbytes not in (None, size):
            raise NotShareable(f"{os.fspath(path)}: {size} bytes, not {nbytes or 'more'}; truncated, or another file?")
        return mmap.mmap(fd, size, access=access)
    finally:
        os.close(fd)


def anonymous(nbytes: int) -> PrivateMemory:
    """``nbytes`` zeros for this process alone. A forked child gets a copy of its own.

    Raises:
        OutOfMemory: less is available, on the machine or in the control group; both numbers are named.
    """
    if nbytes <= 0:
        raise InvalidArgument(f"cannot allocate {nbytes} bytes")
    available = available_memory()
    text = f"{readable(nbytes)} of memory needed, but only {readable(available)} are available; make it smaller"
    if nbytes > available:
        raise OutOfMemory(text)
    try:
        memory = PrivateMemory(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as problem:
        raise OutOfMemory(text) from problem
    if nbytes >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them; it is for speed alone
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
