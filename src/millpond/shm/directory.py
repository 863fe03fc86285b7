"""Directories of shared files. Each belongs to one process, and says to which, so that a kill leaves no riddle.

The name is ``millpond-<pid>-<kind>-<token>``. In it the file ``alive`` is locked as long as the owner lives, and
``owner`` holds its pid, start time, pid namespace and boot id. Two suffixes mark what is not, or no longer, a finished
directory: ``.making-<start time>-<pid namespace>`` and ``.removing-<token>``. Only their user may open them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import tempfile
from pathlib import Path

from millpond.core.errors import InvalidArgument
from millpond.shm import identity
from millpond.shm.free_memory import no_room
from millpond.shm.ownership import Owner, hold, let_go, lives

PREFIX = "millpond-"
VARIABLE = "MILLPOND_SHM"
_KIND = re.compile(r"[a-z][a-z0-9_]*")
_MADE = re.compile(rf"{PREFIX}\d+-[a-z][a-z0-9_]*-[0-9a-f]{{16}}")


def shared_root() -> Path:
    """Where shared directories are made: ``$MILLPOND_SHM``, or ``/dev/shm``, or the directory for temporary files.

    Raises:
        InvalidArgument: ``$MILLPOND_SHM`` is not a directory that this process may write into.
    """
    wanted = os.environ.get(VARIABLE)
    if wanted:
        if not _writable(wanted):
            raise InvalidArgument(f"{VARIABLE}={wanted}: not a directory that this user may write into")
        return Path(wanted)
    return Path("/dev/shm" if _writable("/dev/shm") else tempfile.gettempdir())


def _writable(path: str) -> bool:
    return os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)


def make_directory(kind: str) -> Path:
    """Make an empty directory that belongs to this process, readable by this user only. The caller removes it.

    What owners that were killed left beside it is removed first.

    ``kind`` is a lower-case word, such as ``replay``; it tells a reader of the file system what this is.

    Raises:
        InvalidArgument: ``kind`` is no such word, or ``$MILLPOND_SHM`` is no such directory.
        OutOfMemory, OutOfDisk: the file system is full. Whatever is raised, nothing is left.
    """
    if not _KIND.fullmatch(kind):
        raise InvalidArgument(f"kind {kind!r} must be a lower-case word of letters, digits and underscores")
    from millpond.shm.directory import reap  # which is built on this module

    owner, root = Owner.me(), shared_root()
    with contextlib.suppress(OSError):  # it will be tried again
        reap(root)
    path = root / f"{PREFIX}{owner.pid}-{kind}-{secrets.token_hex(8)}"
    making = path.with_name(f"{path.name}.making-{owner.started}-{owner.namespace}")
    making.mkdir(0o700)
    try:
        hold(making, name=path)
        owner.write(making)
        making.rename(path)  # whoever finds the name finds the owner in it
    except BaseException as problem:
        let_go(path)
        shutil.rmtree(making, ignore_errors=True)
        shutil.rmtree(path, ignore_errors=True)
        if isinstance(problem, OSError) and problem.errno == errno.ENOSPC:
            raise no_room(path.parent, f"there is no room for {path}") from problem
        raise
    return path


def is_temporary(path: str | os.PathLike[str]) -> bool:
    """Is this a directory of `make_directory`, which goes with its owner? By its whole name: people too call
    directories of theirs ``millpond-something``."""
    return _MADE.fullmatch(Path(path).name) is not None


def remove_directory(path: str | os.PathLike[str]) -> bool:
    """Remove a shared directory and its files, whoever maps them still. False: it was gone, or another one removes it.

    Nobody can find it half removed: it loses its name first.

    Raises:
        InvalidArgument: the name is not that of a shared directory; nothing was removed.
    """
    path = Path(path)
    if not path.name.startswith(PREFIX):
        raise InvalidArgument(f"{path}: not a directory made by make_directory()")
    going = path.with_name(f"{path.name.partition('.removing-')[0]}.removing-{secrets.token_hex(4)}")
    try:
        path.rename(going)
    except FileNotFoundError:
        return False
    finally:
        let_go(path)
    with contextlib.suppress(FileNotFoundError):  # another one may reap it at the same time
        shutil.rmtree(going)
    return True


_NAME = re.compile(rf"{PREFIX}(?P<pid>\d+)-[a-z0-9_]+-[0-9a-f]+(?P<rest>\..*)?")
_MAKING = re.compile(r"\.making-(?P<started>\d+)-(?P<namespace>\d+)")


def leftovers(root: str | os.PathLike[str] | None = None) -> list[Path]:
    """The shared directories under ``root`` (``shared_root()``) of this user whose owner has ended. Removes nothing."""
    root = shared_root() if root is None else Path(root)
    found = []
    with os.scandir(root) as entries:
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            if match and _mine(entry) and _abandoned(Path(entry.path), int(match["pid"]), match["rest"] or ""):
                found.append(Path(entry.path))
    return sorted(found)


def reap(root: str | os.PathLike[str] | None = None) -> list[Path]:
    """Remove them. Returns those that this call removed; several reapers at once share the work.

    A directory whose owner lives is never touched, in whichever container that runs: see `ownership`.
    """
    return [path for path in leftovers(root) if remove_directory(path)]


def _mine(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
    except FileNotFoundError:
        return False  # gone since it was listed


def _abandoned(path: Path, pid: int, rest: str) -> bool:
    if rest.startswith(".removing-"):
        return True  # whoever wanted it removed was killed half-way
    making = _MAKING.fullmatch(rest)
    if rest and not making:
        return False
    alive = lives(path)
    if alive is None and making:  # killed, or still at work, before it had its lock
        return int(making["namespace"]) == identity.pid_namespace() and identity.start_time(pid) == 0
    return alive is False
