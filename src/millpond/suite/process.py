"""A command in a fresh process, with everything it starts: found by a mark in the environment, and ended with it."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from millpond.shm import identity
from millpond.shm.directory import reap

MARK = "MILLPOND_SUITE_RUN"
_END_S = 10.0  # for processes that were killed to be gone


class RunProcess:
    """``millpond WORDS…`` with its output in the file ``log``. End it with ``kill`` or wait until it has ended; then
    ``leave`` tells, and ends, what it has left."""

    def __init__(self, words: Sequence[str], *, log: Path) -> None:
        self._mark = secrets.token_hex(16)
        owner, started = identity.me()
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "millpond.suite.child", str(owner), str(started), *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, MARK: self._mark},
            )

    @property
    def exit_code(self) -> int | None:
        """None while it goes on."""
        return self._process.poll()

    def interrupt(self) -> None:
        """As Ctrl-C would: it saves what it has and ends."""
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """End it and all that it has started, at once."""
        self._process.kill()
        self._process.wait()  # only then has the kernel closed its files, by which its shared memory is known as dead
        self.leave(grace_s=0.0)

    def leave(self, *, grace_s: float = 5.0) -> list[str]:
        """What there is of it after its end, once ``grace_s`` seconds have passed, in words. It is ended, too."""
        end = time.monotonic() + grace_s
        while (left := self._family()) and time.monotonic() < end:
            time.sleep(0.05)
        told = [f"process {pid} ({_command(pid)})" for pid in left]
        end = time.monotonic() + _END_S
        killed: set[tuple[int, int]] = set()  # one that is ending has no environment any more
        while (left or any(identity.alive(*each) for each in killed)) and time.monotonic() < end:
            killed |= {(pid, identity.start_time(pid)) for pid in left}
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
            left = self._family()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # where there is no /proc: its group
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            reap()  # the shared memory of what was killed
        return told

    def _family(self) -> list[int]:
        """The processes that carry the mark and live."""
        mark, found = f"{MARK}={self._mark}".encode(), []
        for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
            if entry.isdigit():
                with contextlib.suppress(OSError):  # of somebody else, or gone
                    if mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                        found.append(int(entry))
        return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:120]
    except OSError:
        return "gone"
