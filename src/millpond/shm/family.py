"""Processes that end with the one that started them, and that take along whatever they have started."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import sys
from multiprocessing import forkserver
from typing import Any

from millpond.shm import identity

_PR_SET_PDEATHSIG = 1
_F_SETSIG = 10


def belong_to(owner: tuple[int, int], lifeline: int | None = None) -> None:
    """End when the owner does, with all processes started here, and leave Ctrl-C to it.

    The process is the leader of a group of its own: so a terminal's Ctrl-C does not reach it, and whoever must kill it
    can kill the processes that its environments started along with it.

    ``lifeline`` is the reading end of a pipe into which nobody writes, and of which the owner alone has the other end.
    When that is closed the kernel itself kills the group, whoever holds the GIL here. Linux only.
    """
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _let_go_of_the_fork_server()
    if sys.platform == "linux":
        if lifeline is not None:
            fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpid())
            fcntl.fcntl(lifeline, _F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
        # for a lifeline that somebody has inherited; the parent is the owner, or the fork server, which ends with it
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    identity.when_gone(*owner, lambda: os.killpg(0, signal.SIGKILL))


def _let_go_of_the_fork_server() -> None:
    """The fork server ends when nobody holds the pipe to it; workers hold it too, as they start, and keep it alive.

    Without them it ends with the owner, and then the kernel ends them, also one that hangs with the GIL held.
    """
    server: Any = forkserver._forkserver
    if getattr(server, "_forkserver_alive_fd", None) is not None:
        with contextlib.suppress(OSError):
            os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = server._forkserver_pid = server._forkserver_address = None


def start_family(process: Any) -> None:
    """Start a daemon of ``multiprocessing`` that may have processes of its own, which other daemons may not."""
    process._config["daemon"] = False  # as the child will see it
    process.start()
    process._config["daemon"] = True


def kill_family(process: Any) -> None:
    """Kill a ``multiprocessing`` process that belongs to this one, and those that it started; or those that it left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # it may not have come so far as to have a group of its own
