"""Batches drawn and gathered ahead of the call that returns them.

They are drawn at the end of a ``sample`` call, a fixed point of the program, so that the same seed gives the same
batches. Until they are handed over they are reserved against the ratio; what a process had reserved returns when it
dies.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from millpond.core.errors import BufferClosed, Cancelled, NotReady
from millpond.replay.taking import Taken, Taker


class Ahead:
    """The batches of one process, at most ``limit`` of them. Any thread may use it.

    Where the sampler has epochs, ``over(n)`` says whether the one in force is drawn: no batch of the next one is drawn
    ahead.
    """

    def __init__(self, taker: Taker, limit: int, over: Callable[[int], bool] | None = None) -> None:
        self._taker = taker
        self.limit = limit
        self._over = over
        self._batches: deque[Taken] = deque()
        self._lock = threading.Lock()  # held for a moment: nobody waits, or draws, with it
        self._filling = threading.Lock()

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Taken]:
        with self._lock:
            return iter(list(self._batches))

    @property
    def items(self) -> int:
        """Items in all batches."""
        return sum(len(batch.slots) for batch in self)

    def could_serve(self, n: int) -> int:
        """How many of n items `serve` would have without drawing."""
        batches = list(self)
        if batches and self._over is not None and (batches[0].asked == n or self._over(n)):
            return n  # the last batch of an epoch may be smaller
        if self._over is not None or self._taker.deliveries is not None:
            return min(n, sum(len(batch.slots) for batch in batches))
        return n if batches and batches[0].asked == n else 0

    def serve(self, n: int, **waiting: Any) -> Taken | None:
        """A batch of n. None: there is nothing ahead that could serve, and what was of another size is given back.

        What was consumed, or taken from an epoch, cannot be given back: there the batches are cut and joined to fit.
        """
        cancel = waiting.get("cancel")
        if cancel is not None and cancel.is_set():
            raise Cancelled(f"sample({n}): the cancel event is set")
        self._drop_emptied()
        if self._taker.deliveries is not None or self._over is not None:
            return self._cut(n, **waiting)
        others = []
        with self._lock:
            while self._batches and self._batches[0].asked != n:
                others.append(self._batches.popleft())
            taken = self._batches.popleft() if self._batches else None
        self._taker.refund(others)
        if taken is None:
            return None
        return taken if self._taker.hand_over(len(taken.slots), 1, taken.emptied) else None

    def _cut(self, n: int, **waiting: Any) -> Taken | None:
        parts, whole = self._pop(n)
        if not parts:
            return None
        had = sum(len(part.slots) for part in parts)
        rest = None
        last = self._over is not None and (parts[0].asked == n or self._over(n))  # of its epoch: it may be smaller
        if had < n and not last:
            try:
                rest = self._taker.take(n - had, **waiting)
            except BaseException:
                with self._lock:
                    self._batches.extendleft(reversed(parts))  # whole ones, as they were
                raise
        if self._taker.hand_over(had, whole, parts[0].emptied, calls=0 if rest is not None else 1):
            return _join(parts if rest is None else [*parts, rest])
        return None if rest is None else _join([rest, self._taker.take(had, **waiting)])

    def _pop(self, n: int) -> tuple[list[Taken], int]:
        """Parts of n items in all, or of all that there are; and how many batches were used up."""
        parts: list[Taken] = []
        with self._lock:
            if self._over is not None and self._batches and self._batches[0].asked == n:
                return [self._batches.popleft()], 1
            while n and self._batches:
                first = self._batches.popleft()
                if len(first.slots) > n:
                    self._batches.appendleft(_part(first, n, None))
                    parts.append(_part(first, 0, n))
                    return parts, len(parts) - 1
                parts.append(first)
                n -= len(first.slots)
        return parts, len(parts)

    def fill(self, n: int) -> None:
        """Draw batches of n until there are enough, until the epoch ends, or until the buffer is not ready for more."""
        with contextlib.suppress(NotReady, BufferClosed), self._filling:
            while len(self._batches) < self.limit and not (self._over and self._over(n)):
                taken = self._taker.take(n, wait=False, ahead=True)._replace(asked=n)
                with self._lock:
                    self._batches.append(taken)

    def restore(self, batches: list[Taken]) -> None:
        """Batches that another process, or an earlier life of this one, had drawn ahead. They are reserved already."""
        with self._lock:
            self._batches.extend(batches)

    def refund(self) -> None:
        """Give all reservations back. What the batches consumed stays consumed."""
        with self._lock:
            gone, self._batches = self._batches, deque()
        with contextlib.suppress(BufferClosed):
            self._taker.refund(list(gone))

    def forget(self) -> None:
        """In a forked child: the batches are the parent's."""
        self._lock, self._filling = threading.Lock(), threading.Lock()
        self._batches.clear()

    def _drop_emptied(self) -> None:
        emptied = self._taker.emptied()
        with self._lock:
            gone = [batch for batch in self._batches if batch.emptied != emptied]
            if gone:
                self._batches = deque(batch for batch in self._batches if batch.emptied == emptied)
        self._taker.refund(gone)


def _part(taken: Taken, begin: int, end: int | None) -> Taken:
    part = slice(begin, end)
    extra = {key: value[part] for key, value in taken.extra.items()}
    return Taken(taken.rows[part], taken.slots[part], taken.numbers[part], extra, taken.emptied)


def _join(parts: list[Taken]) -> Taken:
    if len(parts) == 1:
        return parts[0]
    return Taken(
        torch.cat([part.rows.view(torch.uint8) for part in parts]),
        np.concatenate([part.slots for part in parts]),
        np.concatenate([part.numbers for part in parts]),
        {key: torch.cat([part.extra[key] for part in parts]) for key in parts[0].extra},
        parts[0].emptied,
    )
