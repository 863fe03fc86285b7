"""What iterating a collector of many workers gives: three ways in which batches come back from its workers."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from tensordict import TensorDict

from millpond.collect.budget import FrameBudget
from millpond.collect.supervision import Delivery, Supervision
from millpond.core.errors import BufferClosed

_SLICE_S = 0.1


class DeliveryMode(Protocol):
    """One way. ``next`` raises StopIteration when everything is collected, and WorkerFailed."""

    def next(self) -> TensorDict | None: ...

    def settle(self) -> None:
        """Count what workers have handed over, without handing it out."""

    def waiting(self) -> list[TensorDict]:
        """Batches that are counted, and not handed out yet."""


class Written:
    """Workers write into replay: None for each batch."""

    def __init__(self, supervisor: Supervision, budget: FrameBudget) -> None:
        self._supervisor, self._budget = supervisor, budget
        self._seen = 0

    def next(self) -> None:
        while self._batches() <= self._seen:
            if over(self._supervisor, self._budget) and self._batches() <= self._seen:
                raise StopIteration
            self._budget.wait_until(self._ready, timeout=_SLICE_S)
        self._seen += 1

    def _ready(self) -> bool:
        return self._batches() > self._seen or over(self._supervisor, self._budget)

    def _batches(self) -> int:
        return sum(self._budget.commits_by(handle.line) for handle in self._supervisor.handles)

    def settle(self) -> None:
        return

    def waiting(self) -> list[TensorDict]:
        return []


class HandedOver:
    """Workers run ahead by two batches each: the next batch of whichever has one."""

    def __init__(self, supervisor: Supervision, budget: FrameBudget, first: Sequence[TensorDict] = ()) -> None:
        self._supervisor, self._budget = supervisor, budget
        self._first: deque[TensorDict] = deque(first)
        self._inbox: deque[Delivery] = deque()

    def next(self) -> TensorDict:
        while not self._first and not self._inbox:
            ended = over(self._supervisor, self._budget)  # looked at first: what came before the end is found after it
            if not _receive(self._supervisor, self._inbox, _SLICE_S) and ended:
                raise StopIteration
        if self._first:
            batch = self._first[0]
            del self._first[0]  # no call, so that Ctrl-C comes before, and the batch again, or later
            return batch
        batch = self._inbox[0].settle()
        del self._inbox[0]
        return batch

    def settle(self) -> None:
        while _receive(self._supervisor, self._inbox, 0.0):
            pass
        for delivery in self._inbox:
            delivery.settle()

    def waiting(self) -> list[TensorDict]:
        return [*self._first, *(delivery.settle() for delivery in self._inbox)]


class Rounds:
    """Every worker collects one batch, of the same weights; all of them together, in the order of the workers.

    After an exception such as Ctrl-C the next call goes on with the same round.
    """

    def __init__(
        self,
        supervisor: Supervision,
        budget: FrameBudget,
        *,
        frames_per_batch: int,
        multiple_of: int,
        replay: Any,
    ) -> None:
        self._supervisor, self._budget, self._replay = supervisor, budget, replay
        self._frames, self._multiple = frames_per_batch, multiple_of
        self._number = 1  # of the round
        self._orders: dict[int, tuple[int, int]] = {}  # of this round, by worker: frames, and the number of the first
        self._uncounted: dict[int, int] = {}  # of its frames, by worker
        self._inbox: deque[Delivery] = deque()
        self._batch: TensorDict | None = None  # of this round, not handed over yet
        self._reserving: int | None = None  # the worker for whom frames may be reserved that are in no order
        self._complete = self._written = False  # were all told? is it in the replay?

    def next(self) -> TensorDict | None:
        if self._batch is None:
            if not self._complete:
                self._begin()
            self._batch = self._gather()
        batch = self._batch
        if self._replay is not None and not self._written:
            self._replay.extend(batch, cancel_event=Stopped(self._supervisor))
            self._written = True
        for worker in list(self._uncounted):
            self._count(worker)
        self._number, self._orders, self._inbox = self._number + 1, {}, deque()
        self._batch, self._complete, self._written = None, False, False
        return batch if self._replay is None else None

    def _begin(self) -> None:
        refuse_ended(self._supervisor)
        for worker, handle in enumerate(self._supervisor.handles):
            if worker in self._orders:
                continue
            if self._reserving == worker:
                self._budget.refund(handle.line)
            self._reserving = worker
            span = self._budget.reserve_span(self._frames, worker=handle.line, multiple_of=self._multiple)
            if span.frames:
                self._uncounted[worker] = span.frames
                self._orders[worker] = (span.frames, span.first)
        self._reserving = None
        if not self._orders:
            raise StopIteration
        for worker, order in self._orders.items():
            self._supervisor.order(worker, *order, number=self._number)
        self._complete = True

    def _gather(self) -> TensorDict:
        while len(self._inbox) < len(self._orders):
            refuse_ended(self._supervisor)
            _receive(self._supervisor, self._inbox, _SLICE_S)
        batches = {delivery.worker: delivery.settle(count=False) for delivery in self._inbox}
        together: TensorDict = torch.cat([batches[worker] for worker in sorted(batches)])  # type: ignore[assignment]
        return together

    def _count(self, worker: int) -> None:
        line, frames = self._supervisor.handles[worker].line, self._uncounted[worker]
        before = self._budget.commits_by(line)
        try:
            self._budget.commit(line, frames=frames)
            del self._uncounted[worker]
        except BaseException:
            if self._budget.commits_by(line) != before:
                self._uncounted.pop(worker, None)
            raise

    def settle(self) -> None:
        return

    def waiting(self) -> list[TensorDict]:
        return []


def _receive(supervisor: Supervision, inbox: deque[Delivery], timeout: float) -> bool:
    """Wait for a delivery, into ``inbox``. It is one call of C all through: Ctrl-C cannot come when it has left the
    queue and is not there yet."""
    try:
        inbox.extend(map(supervisor.deliveries.get, (timeout > 0,), (timeout or None,)))
    except queue.Empty:
        return False
    return True


class Stopped:
    """Is set when the workers are told to stop, so that a write of the collector's own ends too."""

    def __init__(self, supervisor: Supervision) -> None:
        self._supervisor = supervisor

    def is_set(self) -> bool:
        """The collector is being closed, or failed."""
        return self._supervisor.stopping


def refuse_ended(supervisor: Supervision) -> None:
    """Raises WorkerFailed if a worker raised, or too many died; BufferClosed if the collector is being closed."""
    raise_failure(supervisor)
    if supervisor.stopping:
        raise BufferClosed("this collector was closed")


def raise_failure(supervisor: Supervision) -> None:
    """Raises WorkerFailed if a worker raised, or too many died."""
    if supervisor.failure is not None:
        raise supervisor.failure


def over(supervisor: Supervision, budget: FrameBudget) -> bool:
    """Everything is collected, or nobody is left to collect. Raises what ``refuse_ended`` raises."""
    refuse_ended(supervisor)
    return budget.finished or supervisor.ended
