"""When something is due that comes again and again: every so many frames, every so many seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence


class Every:
    """Is something due that is done every ``interval`` frames? Never, with 0."""

    def __init__(self, interval: int, *, after: int = 0) -> None:
        self._interval = interval
        self._next = 0
        self.done(after)

    def ready(self, frames: int) -> bool:
        """It is due, and stays so until it is ``done``."""
        return self._interval > 0 and frames >= self._next

    def done(self, frames: int) -> None:
        """It was done at this frame."""
        self._next = (frames // self._interval + 1) * self._interval if self._interval else 0

    def due(self, frames: int) -> bool:
        """It is due, and will be done now."""
        if not self.ready(frames):
            return False
        self.done(frames)
        return True

    @property
    def state(self) -> list[int]:
        """What ``go_on`` takes."""
        return [self._interval, self._next]

    def go_on(self, state: Sequence[int]) -> None:
        """Go on where another one was, unless the interval is another one."""
        if state[0] == self._interval:
            self._next = state[1]


class EveryFewSeconds:
    """Is something due that is done every ``seconds``, and takes a twentieth of the time at most? Never, with 0."""

    _SHARE = 20

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._next = clock() + seconds

    def due(self) -> bool:
        return self._seconds > 0 and self._clock() >= self._next

    def done(self, *, since: float) -> None:
        """It was done, and began at ``since``."""
        now = self._clock()
        self._next = now + max(self._seconds, self._SHARE * (now - since))
