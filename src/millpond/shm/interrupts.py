"""Ctrl-C arrives before or after a call, or while it waits, but never between a change and the news of it.

Python runs signal handlers between any two steps of the main thread, so a KeyboardInterrupt may come after a batch
was counted as delivered and before its caller has it. The functions marked here are spared that: the handler looks at
the frames of the main thread. Where the innermost one that is marked is `uninterrupted`, the signal is sent again about
a millisecond later, and so on until the call has returned; where it is `interruptible`, as a sleep is, or where none
is marked, KeyboardInterrupt is raised at once. Marking costs nothing when the functions run. (Trio protects its own
code in this way.)

A call that talks with another process cannot be cut off wherever it waits: the rest of an answer would be taken for
the next one. It looks for itself, between two sleeps, whether an interrupt is `due`, ends what it is in the middle of,
and calls `interrupt`.

Only Python's own handler is replaced, when the main thread makes a buffer. Who has a handler of its own keeps it.
"""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NoReturn, TypeVar

AGAIN_S = 0.001

Function = TypeVar("Function", bound=Callable[..., Any])

_marked: dict[CodeType, bool] = {threading.Condition.wait.__code__: True}  # may it be interrupted?
_pending = False
_since = 0.0  # when the one that is pending came


def uninterrupted(function: Function) -> Function:
    """Mark it: Ctrl-C waits until it has returned, unless it calls what is interruptible."""
    _marked[function.__code__] = False
    return function


def interruptible(function: Function) -> Function:
    """Mark it: within an uninterrupted call, here Ctrl-C may come all the same. For what waits, or runs code of the
    user's."""
    _marked[function.__code__] = True
    return function


def defer_interrupts() -> None:
    """From now on marked functions are spared. Does nothing in other threads, or where there is another handler."""
    here = threading.current_thread() is threading.main_thread()
    if here and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_interrupt)


def due(seconds: float = 0.0) -> bool:
    """Has Ctrl-C been waiting for so long, for the call that this thread is in? Always False but in the main thread."""
    if not _pending or threading.current_thread() is not threading.main_thread():
        return False
    return time.monotonic() - _since >= seconds


@interruptible
def interrupt() -> NoReturn:
    """What is `due` comes now."""
    while _pending:
        time.sleep(AGAIN_S)
    raise KeyboardInterrupt  # the handler was replaced meanwhile, and what has its place raised nothing


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    global _pending, _since
    if not _may_interrupt(frame):
        if not _pending:
            _pending, _since = True, time.monotonic()
            _thread.start_new_thread(_send_again, ())  # `threading.Thread` takes locks that this thread may hold
        return
    _delivered()
    signal.default_int_handler(number, frame)


def _may_interrupt(frame: FrameType | None) -> bool:
    while frame is not None:
        found = _marked.get(frame.f_code)
        if found is not None:
            return found
        frame = frame.f_back
    return True


def _send_again() -> None:
    main = threading.main_thread().ident
    while _pending and main is not None:
        time.sleep(AGAIN_S)
        if not _pending:
            return
        ours = signal.getsignal(signal.SIGINT) is _on_interrupt
        signal.pthread_kill(main, signal.SIGINT)
        if not ours:  # somebody else's handler has it now
            _delivered()


def _delivered() -> None:
    global _pending
    _pending = False


os.register_at_fork(after_in_child=_delivered)  # the thread is the parent's
