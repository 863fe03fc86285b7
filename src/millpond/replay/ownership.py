"""A sampler, or a storage, serves one buffer at a time: it is bound to that buffer's memory."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterable
from typing import Any

from millpond.core.errors import InvalidArgument
from millpond.replay.samplers.uniform import RandomSampler

_lock = threading.Lock()
_things: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()  # by the buffer that they serve


def claim(buffer: Any, things: Iterable[Any]) -> None:
    """From now on ``things`` serve ``buffer``, until it is released, or gone.

    Raises ``InvalidArgument`` where one of them serves another buffer. A `RandomSampler` holds nothing, and may.
    """
    mine = [thing for thing in things if type(thing) is not RandomSampler]
    with _lock:
        if _taken(mine) is not None:
            gc.collect()  # a buffer that nobody closed lives on in its own references until somebody looks
        taken = _taken(mine)
        if taken is not None:
            raise InvalidArgument(
                f"{taken!r} serves another buffer already, whose items it would lose: make one for each buffer, or "
                "close the other one first"
            )
        _things[buffer] = mine


def release(buffer: Any) -> None:
    """They may serve another one."""
    with _lock:
        _things.pop(buffer, None)


def _taken(mine: list[Any]) -> Any:
    theirs = [thing for things in _things.values() for thing in things]
    return next((thing for thing in mine if any(thing is other for other in theirs)), None)


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
