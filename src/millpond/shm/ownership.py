"""Whose is it, and does that process live? The kernel says so: an owner holds a file locked as long as it lives.

A lock goes with its holder, however that dies, and is seen from every container that sees the file. Pids and start
times mean nothing in another pid or time namespace, and a pid may be another process's by now.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from pathlib import Path
from typing import NamedTuple

from millpond.core.errors import NotShareable
from millpond.shm import identity

ALIVE = "alive"  # the file that the owner of a directory holds locked
_PATIENCE_S = 2.0  # others hold the lock for microseconds, while they look

_held: dict[Path, int] = {}  # descriptors of this process, by directory


class Owner(NamedTuple):
    """To whom a directory belongs, in words. Whether that process lives says `lives`."""

    pid: int
    started: int
    namespace: int
    boot: str

    @classmethod
    def me(cls) -> Owner:
        return cls(*identity.me(), identity.pid_namespace(), identity.boot_id())

    @classmethod
    def read(cls, directory: Path) -> Owner | None:
        """None where the file is missing, or is none of ours."""
        try:
            pid, started, namespace, *boot = (directory / "owner").read_text().split()
            return cls(int(pid), int(started), int(namespace), "".join(boot))
        except (OSError, ValueError):
            return None

    def write(self, directory: Path) -> None:
        replace_text(directory / "owner", f"{self.pid} {self.started} {self.namespace} {self.boot}\n")

    def gone(self) -> bool:
        """Has the owner certainly ended, as far as its pid tells? For what an earlier version made, without a lock."""
        if self.boot != identity.boot_id():
            return True
        return self.namespace == identity.pid_namespace() and not identity.alive(self.pid, self.started)


def replace_text(path: Path, text: str) -> None:
    """Write a small file beside itself and rename it: whoever reads it, or is killed here, has the old or the new."""
    making = path.with_name(f"{path.name}.making.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        fd = os.open(making, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text)
        os.rename(making, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(making)
        raise


def hold(directory: Path, *, name: Path | None = None) -> None:
    """This process owns the directory, until `let_go` or its end. ``name`` is the one that it will have.

    Raises ``NotShareable`` where another living process does.
    """
    fd = os.open(directory / ALIVE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + _PATIENCE_S
        while not _lock(fd, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise NotShareable(f"{directory} belongs to another process, which lives")
            time.sleep(0.001)
        before = _held.pop(directory if name is None else name, None)
        _held[directory if name is None else name] = fd
    except BaseException:
        os.close(fd)
        raise
    if before is not None:
        os.close(before)


def let_go(directory: Path) -> None:
    """It is not this process's any more."""
    fd = _held.pop(directory, None)
    if fd is not None:
        os.close(fd)


def lives(directory: Path) -> bool | None:
    """Does the process that owns this directory live? None where nothing there says so."""
    try:
        fd = os.open(directory / ALIVE, os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:
        return True  # another user's: it is not for us to say
    except OSError:
        owner = Owner.read(directory)
        return None if owner is None else not owner.gone()
    try:
        return not _lock(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _after_fork() -> None:
    """What its parent owns a child does not, so it must not keep the locks alive."""
    while _held:
        os.close(_held.popitem()[1])


os.register_at_fork(after_in_child=_after_fork)
