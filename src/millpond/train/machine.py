"""Where a run took place: versions, commit, command line, memory."""

from __future__ import annotations

import os
import platform
import resource
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

import millpond

_PACKAGES = ("torch", "tensordict", "numpy", "gymnasium", "mujoco", "ray")


def versions() -> dict[str, str]:
    """Of Python, millpond and the packages it stands on; those that are not installed are left out."""
    found = {"python": platform.python_version(), "millpond": millpond.__version__}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """The commit of the millpond sources in use, with ``+changes`` where they differ; None outside a checkout."""
    source = Path(millpond.__file__).parent
    if not any((parent / ".git").exists() for parent in list(source.parents)[:2]):  # src/millpond in a checkout of ours
        return None
    commit = _git(source, "rev-parse", "HEAD")
    changes = _git(source, "status", "--porcelain", "--untracked-files=no", "--", ".") if commit else None
    return f"{commit}+changes" if changes else commit


def _git(directory: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *words], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def command_line(words: Sequence[str] | None = None) -> str:
    """The command as somebody could type it again."""
    words = list(sys.argv if words is None else words)
    name = Path(words[0]).name if words else "python"
    return shlex.join(["millpond" if name in ("cli.py", "__main__.py") else name, *words[1:]])


class MemoryMeter:
    """The peak of what a run's processes hold together, in MB (10⁶ bytes), over the moments it was asked.

    Memory that processes share (mapped replay, libraries) counts once: as much as the process with the most of it has.
    """

    def __init__(self) -> None:
        self.peak_mb = 0.0

    def look(self, children: Iterable[int]) -> float:
        """Look at this process and at ``children`` (those that are gone count nothing); return the peak so far."""
        seen = [parts for pid in (os.getpid(), *children) if (parts := _resident(pid)) is not None]
        if seen:
            own, mapped, shared = (list(column) for column in zip(*seen, strict=True))
            self.peak_mb = max(self.peak_mb, (sum(own) + max(mapped) + max(shared)) / 1e6)
        else:  # no /proc here: this process alone, as the system counts it
            unit = 1 if sys.platform == "darwin" else 1024
            self.peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
        return self.peak_mb


def _resident(pid: int) -> tuple[int, int, int] | None:
    """Resident bytes of a process: its own, mapped files, shared memory."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    values = {name: value for name, _, value in (line.partition(":") for line in lines)}
    try:
        own, mapped, shared = (int(values[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile", "RssShmem"))
    except (KeyError, ValueError):  # a zombie has no memory
        return None
    return own, mapped, shared
