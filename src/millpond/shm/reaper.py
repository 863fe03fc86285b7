"""Removes the shared directories whose owner was killed before it could. Anybody may call it at any time; each new
shared directory does."""

from __future__ import annotations

import os
import re
from pathlib import Path

from millpond.shm import identity
from millpond.shm.directory import PREFIX, remove_directory, shared_root
from millpond.shm.ownership import lives

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
