"""One call that may have to wait: its deadline, its cancel event, its line in the table of waiters."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from millpond.core.errors import BufferClosed, Cancelled, DeadlineExceeded, InvalidArgument, InvalidType
from millpond.replay.memory import Memory
from millpond.replay.state import PREFETCHED, RESERVED
from millpond.shm.control import ControlBlock, Line
from millpond.shm.holding import HeldUp, describe, stopped
from millpond.shm.interrupts import interruptible
from millpond.shm.locks import Event

CANCEL_SLICE = 0.1  # a foreign event cannot wake us: look at it this often
OWNER_SLICE = 0.5  # nor can an owner that was killed
TURNSTILE_SLICE = 0.1
LOG_EVERY = 30.0
BURY_EVERY = 5.0
SLOWEST = 2.0  # seconds; whoever holds the lock longer is taken for stopped by a call that has no time left

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


def bury_dead(control: ControlBlock, *, among: list[int] | None = None, held_up: HeldUp | None = None) -> None:
    """Take threads and processes that are gone off the table (all, or those ``among`` these lines), and give back what
    they had reserved. Without the lock."""

    def forget(state: list[int], lines: list[Line]) -> None:
        for line in lines:
            items, batches = line.reserved
            state[RESERVED] = max(0, state[RESERVED] - items)
            state[PREFETCHED] = max(0, state[PREFETCHED] - batches)

    control.bury_dead(forget, among=among, held_up=held_up)


class Patience(Protocol):
    """How long a call waits for the lock."""

    def held_up(self, holder: int, seconds: float) -> None:
        """Called now and then with the thread that holds it, and for how long that has been so; raises to end."""


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
        self._memory, self._what, self.role, self._need, self._cancel = memory, what, role, need, cancel
        self._line: int | None = None
        self._listed_as = 0
        self._began = time.monotonic()
        self.counted = False
        self.check()

    def check(self) -> None:
        """Raises ``Cancelled`` where the event is set, and ``BufferClosed`` where this process left the buffer."""
        if self._memory.left:
            raise BufferClosed(f"{self._what}: the buffer was closed")
        if self._cancel is not None and self._cancel.is_set():
            raise Cancelled(f"{self._what}: the cancel event is set")

    def held_up(self, holder: int, seconds: float) -> None:
        """The lock is taken for so long: may this call go on waiting for it?

        A single try does not give up for a holder that is only slow, unless it is slower than any is.

        Raises as `sleep` does.
        """
        self.check()
        if time.monotonic() >= self._deadline and (seconds >= SLOWEST or stopped(holder)):
            raise DeadlineExceeded(f"{self._what} waited {self.timeout:g} s: the lock is held by {describe(holder)}")
        self._memory.held_up(self._what, holder, seconds)

    def enlist(self) -> None:
        """Under the lock: appear in the table of waiters."""
        people = self._memory.control.participants
        if self._line is None:
            self._line, self._listed_as = people.claim(), 0
        if self._line is not None and self._listed_as != self.role:
            people.begin_wait(self._line, self.role, self._need)
            self._listed_as = self.role

    @property
    def listed(self) -> bool:
        """Is this wait counted, and in the table of waiters?"""
        return self.counted and self._line is not None

    @interruptible
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
            bury_dead(self._memory.control, held_up=self.held_up)  # the table was full: make room for the next time
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
