"""The process that workers and evaluators are forked from: started early, and out of reach of a terminal's signals.

A terminal sends Ctrl-C, and the signal of its closing, to every process in the foreground. Workers and evaluators leave
that group when they begin. Their fork server must leave it too, or it ends with a traceback while it still imports, and
later takes them along. This module is the first that it imports, in the few milliseconds that the signals are blocked.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from typing import Any

_STARTED_BY = "MILLPOND_STARTS_FORK_SERVER"
_FROM_TERMINALS = (signal.SIGINT, signal.SIGHUP)
_PRELOAD = [__name__, "millpond.train.evaluator", "millpond.collect.worker"]


def start() -> ForkServerContext:
    """Let it import what they need, which takes seconds; returns at once. One that runs already stays as it is."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    os.environ[_STARTED_BY] = str(os.getpid())
    try:
        resource_tracker.ensure_running()  # ignores Ctrl-C by itself, and unblocks it here
        signal.pthread_sigmask(signal.SIG_BLOCK, _FROM_TERMINALS)
        forkserver.ensure_running()
    finally:
        del os.environ[_STARTED_BY]
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def end() -> None:
    """End it, if it runs: it would end by itself, but not while it still imports. For programs that end now."""
    server: Any = forkserver._forkserver
    pid = getattr(server, "_forkserver_pid", None)
    if pid is not None:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            server._stop()


if os.environ.get(_STARTED_BY) == str(os.getppid()) and "multiprocessing.forkserver" in sys.modules:
    del os.environ[_STARTED_BY]
    os.setpgid(0, 0)
    handlers = [signal.signal(number, signal.SIG_IGN) for number in _FROM_TERMINALS]  # forgets those that came
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FROM_TERMINALS)
    for number, handler in zip(_FROM_TERMINALS, handlers, strict=True):
        signal.signal(number, handler)
