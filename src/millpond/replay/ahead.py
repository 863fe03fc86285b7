"""Batches drawn and gathered ahead of the call that returns them.

They are drawn at the end of a ``sample`` call, a fixed point of the program, so that the same seed gives the same
batches. Until they are handed over they are reserved against the ratio; what a process had reserved returns when it
dies.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from millpond.core.errors import BufferClosed, NotReady
from millpond.replay.taking import Taken, Taker


class Ahead:
    """The batches of one process, at most ``limit`` of them."""

    def __init__(self, taker: Taker, limit: int) -> None:
        self._taker = taker
        self.limit = limit
        self._batches: deque[Taken] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Taken]:
        return iter(self._batches)

    @property
    def items(self) -> int:
        """Items in all batches."""
        return sum(len(batch.slots) for batch in self._batches)

    def could_serve(self, n: int) -> int:
        """How many of n items `serve` would have without drawing."""
        if self._taker.deliveries is not None:
            return min(n, self.items)
        return n if self._batches and len(self._batches[0].slots) == n else 0

    def serve(self, n: int, **waiting: Any) -> Taken | None:
        """A batch of n. None: there is nothing ahead that could serve, and what was of another size is given back.

        What a consuming buffer has drawn ahead cannot be given back: there the batches are cut and joined to fit.
        """
        self._drop_emptied()
        if not self._batches:
            return None
        if self._taker.deliveries is not None:
            return self._cut(n, **waiting)
        while self._batches and len(self._batches[0].slots) != n:
            self._taker.refund([self._batches.popleft()])
        if not self._batches:
            return None
        taken = self._batches.popleft()
        return taken if self._taker.hand_over(n, 1, taken.emptied) else None

    def _cut(self, n: int, **waiting: Any) -> Taken | None:
        emptied = self._batches[0].emptied
        missing = n - self.items
        rest = self._taker.take(missing, **waiting) if missing > 0 else None  # may raise: then all stays as it is
        parts: list[Taken] = []
        left, whole = min(n, self.items), 0
        while left:
            first = self._batches.popleft()
            if len(first.slots) > left:
                self._batches.appendleft(_part(first, left, None))
                first = _part(first, 0, left)
            else:
                whole += 1
            parts.append(first)
            left -= len(first.slots)
        taken = sum(len(part.slots) for part in parts)
        if not self._taker.hand_over(taken, whole, emptied, calls=0 if rest is not None else 1):
            return rest
        return _join(parts if rest is None else [*parts, rest])

    def fill(self, n: int) -> None:
        """Draw batches of n until there are enough, or until the buffer is not ready for more."""
        with contextlib.suppress(NotReady, BufferClosed):
            while len(self._batches) < self.limit:
                self._batches.append(self._taker.take(n, wait=False, ahead=True))

    def restore(self, batches: list[Taken]) -> None:
        """Batches that another process, or an earlier life of this one, had drawn ahead. They are reserved already."""
        self._batches.extend(batches)

    def refund(self) -> None:
        """Give all reservations back. What the batches consumed stays consumed."""
        with contextlib.suppress(BufferClosed):
            self._taker.refund(list(self._batches))
        self._batches.clear()

    def forget(self) -> None:
        """In a forked child: the batches are the parent's."""
        self._batches.clear()

    def _drop_emptied(self) -> None:
        emptied = self._taker.emptied()
        gone = [batch for batch in self._batches if batch.emptied != emptied]
        if gone:
            self._taker.refund(gone)
            self._batches = deque(batch for batch in self._batches if batch.emptied == emptied)


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
