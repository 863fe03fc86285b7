"""How much memory all clients together may take at an owner for what they are sending."""

from __future__ import annotations

import threading
import time

STEP = 1 << 20  # bytes that are asked for at a time


class Allowance:
    """So many bytes for all that is on its way. Whoever came first may always go on, so what is underway ends."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._changed = threading.Condition()
        self._taken: dict[object, int] = {}  # in the order in which they came

    def take(self, whose: object, nbytes: int, deadline: float) -> bool:
        """So many more; waits until they are there. False: they were not by the deadline."""
        with self._changed:
            self._taken.setdefault(whose, 0)
            while self.taken + nbytes > self.nbytes and next(iter(self._taken)) is not whose:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return False
            self._taken[whose] += nbytes
            return True

    def give_back(self, whose: object) -> None:
        """All that was taken."""
        with self._changed:
            if self._taken.pop(whose, None) is not None:
                self._changed.notify_all()

    @property
    def taken(self) -> int:
        """Bytes that are taken now."""
        return sum(self._taken.values())
