"""Forked children that say what they do, wait until they are told to go on, and can be killed. No sleeping."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

Starter = Callable[[Any], "Child"]
PATIENCE = 20.0  # seconds; far more than anything takes, and less than the test's own limit


class Child:
    """A forked child. ``say`` and ``ask`` are for the child, the rest is for the parent."""

    def __init__(self, function: Any) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._from_child, to_parent = os.pipe()
        from_parent, self._to_child = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # that other threads do not come along is meant
            self.pid = os.fork()
        if self.pid == 0:
            code = 70
            try:
                os.close(self._from_child)
                os.close(self._to_child)
                self._from_child, self._to_child = from_parent, to_parent
                function(self)
                code = 0
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(code)
        os.close(to_parent)
        os.close(from_parent)
        self._code: int | None = None

    # ---- in the child
    def say(self, text: str) -> None:
        os.write(self._to_child, text.encode() + b"\n")

    def ask(self) -> str:
        """Wait for a word from the parent. Ends the child if the parent is gone."""
        return _read_line(self._from_child)

    # ---- in the parent
    def heard(self, timeout: float = PATIENCE) -> str | None:
        """The next line that the child said; None if it said nothing in time, "" if it ended."""
        return _read_line(self._from_child) if select.select([self._from_child], [], [], timeout)[0] else None

    def tell(self, text: str = "go") -> None:
        os.write(self._to_child, text.encode() + b"\n")

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone. It stays a zombie until ``join``."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def join(self, timeout: float = PATIENCE) -> int | None:
        """The exit code (negative: the signal), or None if it still runs."""
        if self._code is None:
            watch = os.pidfd_open(self.pid)
            try:
                if not select.select([watch], [], [], timeout)[0]:
                    return None
            finally:
                os.close(watch)
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def end(self) -> None:
        """Kill it if need be, and release what belongs to it."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.join()
        for fd in (self._from_child, self._to_child):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._from_child = self._to_child = -1


def _read_line(fd: int) -> str:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(fd, 1)
        if not byte:
            return ""
        line += byte
    return line[:-1].decode()


def die() -> None:
    """As the kernel's out-of-memory killer would end this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def until(condition: Callable[[], bool]) -> None:
    """Wait for what nobody can tell: the system's own doing."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.001)


def counters(memory: mmap.mmap, at: int = 1024) -> memoryview:
    """64-bit words for the tests, beside the records."""
    return memoryview(memory)[at : at + 512].cast("Q")
