"""How much memory, or disk, is left? Asked before anything large is allocated."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

from millpond.core.errors import OutOfDisk, OutOfMemory

_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 62


def free_bytes(directory: str | os.PathLike[str]) -> int:
    """Bytes that this user may still write under ``directory``; in a memory file system, no more than memory allows."""
    free = os.statvfs(directory)
    room = free.f_bavail * free.f_frsize
    return min(room, available_memory()) if in_memory(directory) else room


def in_memory(directory: str | os.PathLike[str]) -> bool:
    """Do files under ``directory`` live in memory (tmpfs)?"""
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text()
    except OSError:
        return False
    for line in mounts.splitlines():
        fields = line.split()
        if fields[2] == number:
            return fields[fields.index("-") + 1] in ("tmpfs", "ramfs")
    return False


def available_memory() -> int:
    """Bytes that can be allocated without swapping: of the machine, or of the tightest control group around us."""
    return max(0, min(_machine(), _control_groups()))


def _machine() -> int:
    if sys.platform == "linux":
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    names = os.sysconf_names
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in names else "SC_PHYS_PAGES"
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def _control_groups() -> int:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return _UNLIMITED
    room = _UNLIMITED
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            room = min(room, _along(_CGROUP, path, "memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            top = _CGROUP / "memory"
            room = min(room, _along(top, path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))
    return room


def _along(top: Path, path: str, limit_name: str, usage_name: str, cache_name: str) -> int:
    """The least room in the group at ``path`` and all above it. Inactive page cache counts as room: it can go."""
    room, here = _UNLIMITED, top / path.lstrip("/")
    while here.is_relative_to(top):
        try:
            limit, usage = (here / limit_name).read_text().strip(), int((here / usage_name).read_text())
            if limit != "max":
                room = min(room, int(limit) - usage + _cache(here, cache_name))
        except (OSError, ValueError):
            pass  # no such controller in this group, or a path of another cgroup namespace
        here = here.parent
    return room


def _cache(group: Path, name: str) -> int:
    for line in (group / "memory.stat").read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def readable(nbytes: int) -> str:
    """``1234567890 bytes (1.1 GiB)``: exact for the one who computes, readable for the one who reads."""
    size, unit = float(nbytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{nbytes} bytes" if unit == "bytes" else f"{nbytes} bytes ({size:.1f} {unit})"


def no_room(directory: str | os.PathLike[str], text: str) -> OutOfMemory | OutOfDisk:
    """The error for a file system that is too full, by whether it lives in memory or on a disk."""
    if in_memory(directory):
        return OutOfMemory(f"{text}, in memory: make it smaller")
    return OutOfDisk(errno.ENOSPC, f"{text}, on disk: make it smaller, or free space there")
