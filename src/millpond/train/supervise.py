"""Who may stop a run, and how: one Ctrl-C asks, a second one insists.

The first SIGINT, SIGTERM or SIGHUP sets ``stop.event``, which every wait of the run watches: the run drains its
workers, saves a checkpoint and ends. The second raises ``Interrupted`` in the main thread, wherever it is:
the run gives up what it was doing, and what was on disk before stays. SIGHUP never insists: a terminal that closes may
send it twice.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

logger = logging.getLogger("millpond.train")
_AGAIN_S = 1.0  # an `Interrupted` that something has swallowed may be raised again after so long


class Interrupted(BaseException):
    """The second request to stop. Not an Exception, so that no handler for errors keeps the run alive."""


class StopSignal:
    """A request to stop, from a signal or from ``request()``.

    As a context manager it takes over Ctrl-C, SIGTERM and, unless it is ignored as ``nohup`` does, SIGHUP.
    """

    def __init__(self, *, say: Callable[[str], None] | None = None) -> None:
        self.event = threading.Event()
        self.signal: int | None = None
        """The first one that came."""
        self._say = say or logger.warning
        self._previous: dict[int, Any] = {}
        self._finished = False
        self._raised = -_AGAIN_S

    def request(self) -> None:
        self.event.set()

    @property
    def requested(self) -> bool:
        return self.event.is_set()

    def shield(self) -> None:
        """From here on nothing is left to interrupt: further signals do nothing."""
        self._finished = True

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # only there may handlers be set
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = number
        if self._finished:
            return
        if not self.event.is_set():
            self.event.set()
            with contextlib.suppress(OSError, RuntimeError):  # no terminal any more, or it is just being written to
                self._say("stopping: saving a checkpoint (once more: stop at once)")
        elif number != signal.SIGHUP and time.monotonic() - self._raised > _AGAIN_S:
            self._raised = time.monotonic()
            raise Interrupted(signal.Signals(number).name)
