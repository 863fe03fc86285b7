"""Who may stop a run, and how: one Ctrl-C asks, a second one insists.

The first SIGINT or SIGTERM sets ``stop.event``, which every wait of the run watches: the run drains its workers, saves
a checkpoint and ends. The second raises ``Interrupted`` in the main thread, wherever it is: the run gives up what it
was doing, and what was on disk before stays.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

logger = logging.getLogger("millpond.train")


class Interrupted(BaseException):
    """The second request to stop. Not an Exception, so that no handler for errors keeps the run alive."""


class StopSignal:
    """A request to stop, from a signal or from ``request()``. As a context manager it takes over Ctrl-C and SIGTERM."""

    def __init__(self, *, say: Callable[[str], None] | None = None) -> None:
        self.event = threading.Event()
        self.signal: int | None = None
        self._say = say or logger.warning
        self._previous: dict[int, Any] = {}
        self._finished = False

    def request(self) -> None:
        self.event.set()

    @property
    def requested(self) -> bool:
        return self.event.is_set()

    def shield(self) -> None:
        """From here on nothing is left to interrupt: further signals are only noted."""
        self._finished = True

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # only there may handlers be set
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        if self._finished:
            return
        if self.event.is_set():
            raise Interrupted(signal.Signals(number).name)
        self.event.set()
        self._say("stopping: saving a checkpoint (once more: stop at once)")
