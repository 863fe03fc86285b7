"""Loads what Numba compiles, beside the program: whoever samples or writes meanwhile goes on in the ordinary way.

Loading takes half a second; the first time on a machine, when nothing is in Numba's cache yet, some ten. No call waits
for that, so no timeout is missed by it. Only a fork in the middle of it waits, and the end of the interpreter.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

log = logging.getLogger("millpond")

_lock = threading.RLock()
_asked = False
_thread: threading.Thread | None = None
_kernels: Any = None


def request() -> Any:
    """The module `ring` where it is loaded; else None, and it is being loaded, if there is Numba at all."""
    if not _asked:
        _begin()
    return _kernels


def wait() -> Any:
    """As `request`, once the loading, if any, is over."""
    thread = _thread
    if thread is not None and thread is not threading.current_thread():
        thread.join()
    return _kernels


def _begin() -> None:
    global _asked, _thread
    with _lock:
        if _asked or not threading.main_thread().is_alive():  # the interpreter ends: what starts now has no end
            return
        _asked = True
        thread = threading.Thread(target=_load, name="millpond-kernels")
        try:
            thread.start()  # not a daemon: the interpreter does not end in the middle of an import
        except RuntimeError:
            return  # the system gives no more threads
        _thread = thread


def _load() -> None:
    global _kernels
    try:
        import numba

        if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]  # set when it is imported
            return
        from millpond.replay.kernels import ring
    except ImportError:
        return  # there is no Numba here
    except Exception as problem:  # noqa: BLE001 - a version of Numba that cannot compile this: all goes on without
        if threading.main_thread().is_alive():  # else it may be what others refuse when the interpreter ends
            log.warning("millpond goes on without compiled kernels: %s: %s", type(problem).__name__, problem)
        return
    _kernels = ring


def _before_fork() -> None:
    """A child that was forked in the middle of an import would find its locks taken for ever."""
    _lock.acquire()
    wait()


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(before=_before_fork, after_in_parent=lambda: _lock.release(), after_in_child=_after_fork)
