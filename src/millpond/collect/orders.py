"""The orders of one actor of a ``RayCollector``: what was reserved for it, is under way, was written, or is in doubt.

No Ray here, and no waiting: who drives it says what happened, and what time it is.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from tensordict import TensorDict

from millpond.collect.actor import Order, Report
from millpond.collect.budget import FrameBudget
from millpond.collect.packing import Format
from millpond.collect.worker import WorkerSpec
from millpond.core.errors import InvalidArgument


class Parcel:
    """A batch that an actor has answered with. ``settle`` unpacks it and counts it, once, whoever calls, and whatever
    exception cuts a call off."""

    def __init__(self, order_book: OrderBook, form: Format, answer: Report, *, settled: Callable[[], None]) -> None:
        self.worker, self._order_book, self._form, self._settled = order_book.worker, order_book, form, settled
        self._packed, self._frames = answer.batch, answer.frames
        self._lock = threading.Lock()
        self._batch: TensorDict | None = None
        self._counted = self._done = False

    def settle(self, *, count: bool = True) -> TensorDict:
        """The batch, in memory of its own. ``count=False``: somebody else counts it."""
        with self._lock:
            if self._batch is None:
                self._batch = self._form.unpack(self._packed, self._frames)
            if count and not self._counted:
                self._count()
            if not self._done:
                self._settled()
                self._done, self._packed = True, None
            return self._batch

    def _count(self) -> None:
        budget, line = self._order_book.budget, self._order_book.line
        with self._order_book.counting:
            before = budget.commits_by(line)
            try:
                budget.commit(line, frames=self._frames)
                self._counted = True
            except BaseException:
                self._counted = budget.commits_by(line) != before
                raise


class OrderBook:
    """The place of one worker, filled by one actor after another, and its account.

    ``receipt(line)`` is the last number that the replay holds for a line; None where it cannot tell.
    """

    def __init__(
        self, worker: int, spec: WorkerSpec, *, line: int, budget: FrameBudget, receipt: Callable[[int], int | None]
    ) -> None:
        self.worker, self.line, self.budget = worker, line, budget
        self.deaths: list[str] = []  # why each actor that died was replaced, or was not
        self.ended = False  # nobody is here, and nobody will be
        self.handed = 0  # batches that are answered, and not settled
        self.counting = threading.Lock()
        self._spec, self._receipt = spec, receipt
        self._under_way: deque[Order] = deque()
        self._again: deque[Order] = deque()  # that a pause cut off
        self._wanted: deque[tuple[int, int]] = deque()  # frames, first: ordered, in rounds, by the collector
        self._number = self._confirmed = 0  # of the last order, and of the last that is known to be written
        self._ordered = 0  # the number of the collector's last order
        self._lost: list[Order] = []  # of an actor that died: nobody knows yet whether they were written
        self._doubt_ends = 0.0

    @property
    def busy(self) -> int:
        """Orders under way."""
        return len(self._under_way)

    @property
    def in_doubt(self) -> bool:
        """Is it not certain yet what an actor that died has written?"""
        return bool(self._lost)

    def begin(self) -> int:
        """An actor begins: the number of its first order."""
        self._number = self._confirmed = max(self._number, self._receipt(self.line) or 0)
        return self._number + 1

    def want(self, frames: int, first: int, *, number: int) -> None:
        """The collector orders, and has reserved, a batch. Twice under one number is once."""
        if number > self._ordered:
            self._ordered = number
            self._wanted.append((frames, first))

    def next_order(self, *, time: int | None) -> Order | None:
        """What the actor is to do next, which is under way from now on; None: there is nothing."""
        if self._again:
            order = self._again.popleft()
        else:
            frames, first = self._wanted.popleft() if self._wanted else self._reserve(time)
            if not frames:
                return None
            self._number += 1
            order = Order(number=self._number, frames=frames, first=first)
        self._under_way.append(order)
        return order

    def _reserve(self, time: int | None) -> tuple[int, int]:
        spec = self._spec
        if spec.duty == "obey":
            return 0, 0
        span = self.budget.reserve_span(spec.frames_per_batch, worker=self.line, multiple_of=time or 1)
        return span.frames, span.first

    def answered(self, answer: Report, *, again: bool) -> None:
        """The first order under way was answered; one that was kept comes ``again``, or is given back."""
        order = self._under_way.popleft()  # they are answered in their order
        if answer.outcome == "kept" and again:
            self._again.append(order)
        elif answer.outcome == "written":
            self._confirmed = order.number
            self.budget.commit(self.line, frames=order.frames)
        elif answer.outcome == "batch":
            self.handed += 1
        else:
            self._refund(order)

    def settled(self) -> None:
        """Somebody has taken a batch."""
        self.handed -= 1

    def _refund(self, order: Order) -> None:
        if self._spec.duty != "obey":  # there the collector has reserved, and gives back
            self.budget.refund(self.line, frames=order.frames)

    # ------------------------------------------------------------------ death
    def died(self, *, doubt_ends: float) -> None:
        """The actor is dead. What it wrote until ``doubt_ends`` may still appear; see ``settle``."""
        orders = [*self._again, *self._under_way] if self._spec.duty != "write" else [*self._under_way]
        if self._spec.duty == "obey":
            self._wanted.extendleft((order.frames, order.first) for order in reversed(orders))
        elif self._spec.duty == "write":
            for order in self._again:
                self._refund(order)
            self._lost += orders
        else:
            for order in orders:
                self._refund(order)
        self._under_way.clear()
        self._again.clear()
        self._doubt_ends = doubt_ends

    def settle(self, now: float) -> None:
        """Count the orders of a dead actor that were written; give back the others when that is certain.

        Raises:
            InvalidArgument: somebody else writes to the replay on this line.
        """
        if not self._lost:
            return
        receipt = self._receipt(self.line)
        if receipt is not None and not self._confirmed <= receipt <= self._number:
            raise InvalidArgument(f"another collector writes to this buffer on line {self.line}; share one FrameBudget")
        while self._lost and receipt is not None and self._lost[0].number <= receipt:
            self.budget.commit(self.line, frames=self._lost.pop(0).frames)
        if now >= self._doubt_ends:
            for order in self._lost:
                self._refund(order)
            self._lost = []

    def give_back(self) -> None:
        """Nobody will collect here any more: what is reserved goes back."""
        if self._spec.duty != "obey":
            self.budget.reclaim(self.line)
