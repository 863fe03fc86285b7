"""One call that may have to wait: its deadline, its cancel event, its line in the table of waiters."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np

from millpond.core.errors import BufferClosed, Cancelled, DeadlineExceeded, InvalidArgument, InvalidType
from millpond.replay.memory import Memory
from millpond.replay.state import PREFETCHED, RESERVED
from millpond.shm.control import ControlBlock, Line
from millpond.shm.locks import Event

CANCEL_SLICE = 0.1  # a foreign event cannot wake us: look at it this often
OWNER_SLICE = 0.5  # nor can an owner that was killed
TURNSTILE_SLICE = 0.1
LOG_EVERY = 30.0
BURY_EVERY = 5.0

log = logging.getLogger("millpond")


_EVER = 1e300  # seconds; an integer may be larger than any float


def check_timeout(timeout: Any) -> float:
    """Seconds, infinite for None. Raises ``InvalidType`` or ``InvalidArgument`` for anything else, NaN and below 0."""
    if timeout is None:
        return math.inf
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float, np.floating, np.integer)):
        raise InvalidType(f"timeout is a number of seconds or None, not {timeout!r}")
    if not timeout >= 0:
        raise InvalidArgument(f"timeout is at least 0 seconds, got {timeout}")
    return float(timeout) if timeout < _EVER else math.inf


def check_cancel(event: Any) -> None:
    """Raises ``InvalidType`` for what is no event."""
    if event is not None and not callable(getattr(event, "is_set", None)):
        raise InvalidType(f"cancel_event has is_set(), such as a threading.Event; {type(event).__name__} has not")


def bury_dead(control: ControlBlock) -> None:
    """Take threads and processes that are gone off the table, and give back what they had reserved. Without the
    lock."""

    def forget(state: list[int], lines: list[Line]) -> None:
        for line in lines:
            items, batches = line.reserved
            state[RESERVED] = max(0, state[RESERVED] - items)
            state[PREFETCHED] = max(0, state[PREFETCHED] - batches)

    control.bury_dead(forget)


class Wait:
    """Sleeps until something changed, the deadline passed, the event was set, or the owner died.

    Use as a context manager: leaving it takes the thread off the table of waiters. ``since`` is when the call began
    (monotonic), where that was earlier.
    """

    def __init__(
        self,
        memory: Memory,
        what: str,
        role: int,
        need: int,
        timeout: float | None,
        cancel: Any,
        *,
        since: float | None = None,
    ) -> None:
        self.timeout = check_timeout(timeout)
        check_cancel(cancel)
        self._deadline = (time.monotonic() if since is None else since) + self.timeout
        self._memory, self._what, self._role, self._need, self._cancel = memory, what, role, need, cancel
        self._line: int | None = None
        self._began = time.monotonic()
        self.counted = False
        self.check()

    def check(self) -> None:
        """Raises ``Cancelled`` where the event is set, and ``BufferClosed`` where this process left the buffer."""
        if self._memory.left:
            raise BufferClosed(f"{self._what}: the buffer was closed")
        if self._cancel is not None and self._cancel.is_set():
            raise Cancelled(f"{self._what}: the cancel event is set")

    def enlist(self) -> None:
        """Under the lock: appear in the table of waiters."""
        if self._line is None:
            people = self._memory.control.participants
            self._line = people.claim()
            if self._line is not None:
                people.begin_wait(self._line, self._role, self._need)

    @property
    def listed(self) -> bool:
        """Is this wait counted, and in the table of waiters?"""
        return self.counted and self._line is not None

    def sleep(self, event: Event, ticket: int, explain: Callable[[], str]) -> None:
        """Without the lock. ``ticket`` is what ``event.prepare()`` gave under it.

        Of many threads of this process that are woken at once, one after the other comes out: they would only stand in
        each other's way, at the lock and for the GIL. That is for speed alone, so it is given up after a moment.

        Raises:
            DeadlineExceeded, Cancelled, BufferClosed, PeerLost: with the explanation.
        """
        self._let_next()
        self.check()
        now = time.monotonic()
        if now >= self._deadline:
            raise DeadlineExceeded(f"{self._what} waited {self.timeout:g} s: {self._why(explain)}")
        span = min(self._deadline - now, CANCEL_SLICE if self._cancel is not None else OWNER_SLICE)
        moved = event.wait(ticket, span)
        self._memory.turnstile.acquire(timeout=TURNSTILE_SLICE)
        self.check()
        if self._line is None and now - self._memory.buried >= BURY_EVERY:
            self._memory.buried = now
            bury_dead(self._memory.control)  # the table was full: make room, and appear next time
        self._memory.look(self._what, lambda: f"; while waiting: {self._why(explain)}")
        if moved:
            return
        now = time.monotonic()
        if self.timeout == math.inf and now - max(self._began, self._memory.logged) >= LOG_EVERY:
            self._memory.logged = now  # one line for all that wait
            log.warning("%s still waits: %s", self._what, self._why(explain))

    def __enter__(self) -> Wait:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.leave()

    def _why(self, explain: Callable[[], str]) -> str:
        return explain().removeprefix(f"{self._what} cannot proceed: ")

    def _let_next(self) -> None:
        turnstile = self._memory.turnstile
        while turnstile._is_owned():  # asked, not noted: Ctrl-C may come between having it and saying so
            turnstile.release()

    def leave(self) -> None:
        """Off the table of waiters."""
        self._let_next()
        if self._line is not None:
            self._memory.control.participants.end_wait(self._line)
            self._line = None
