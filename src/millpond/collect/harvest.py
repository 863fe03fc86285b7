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


class Harvest(Protocol):
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
        return sum(self._budget.commits_by(seat.line) for seat in self._supervisor.seats)

    def settle(self) -> None:
        return

    def waiting(self) -> list[TensorDict]:
        return []


class HandedOver:
    """Workers run ahead by two batches each: the next batch of whichever has one."""

    def __init__(self, supervisor: Supervision, budget: FrameBudget, first: Sequence[TensorDict] = ()) -> None:
        self._supervisor, self._budget = supervisor, budget
        self._settled: deque[TensorDict] = deque(first)

    def next(self) -> TensorDict:
        while not self._settled:
            ended = over(self._supervisor, self._budget)  # looked at first: what came before the end is found after it
            if (delivery := self._next_delivery()) is not None:
                return delivery.settle()
            if ended:
                raise StopIteration
        return self._settled.popleft()

    def _next_delivery(self) -> Delivery | None:
        try:
            delivery: Delivery = self._supervisor.deliveries.get(timeout=_SLICE_S)
            return delivery
        except queue.Empty:
            return None

    def settle(self) -> None:
        while not self._supervisor.deliveries.empty():
            self._settled.append(self._supervisor.deliveries.get().settle())

    def waiting(self) -> list[TensorDict]:
        return list(self._settled)


class Rounds:
    """Every worker collects one batch, of the same weights; all of them together, in the order of the workers."""

    def __init__(
        self,
        supervisor: Supervision,
        budget: FrameBudget,
        *,
        frames_per_batch: int,
        multiple_of: int,
        random_frames: int,
        replay: Any,
    ) -> None:
        self._supervisor, self._budget, self._replay = supervisor, budget, replay
        self._frames, self._multiple, self._random = frames_per_batch, multiple_of, random_frames
        self._reserved: dict[int, int] = {}  # frames of this round, by worker
        self._batch: TensorDict | None = None  # of this round, not handed over yet

    def next(self) -> TensorDict | None:
        if self._batch is None:
            if not self._reserved:
                self._begin()
            self._batch = self._gather()
        batch = self._batch
        if self._replay is not None:
            self._replay.extend(batch, cancel_event=Stopped(self._supervisor))
        for worker, frames in self._reserved.items():
            self._budget.commit(self._supervisor.seats[worker].line, frames=frames)
        self._reserved, self._batch = {}, None
        return batch if self._replay is None else None

    def _begin(self) -> None:
        refuse_ended(self._supervisor)
        for worker, seat in enumerate(self._supervisor.seats):
            span = self._budget.reserve_span(self._frames, worker=seat.line, multiple_of=self._multiple)
            if span.frames:
                self._reserved[worker] = span.frames
                self._supervisor.order(worker, span.frames, max(0, self._random - span.first))
        if not self._reserved:
            raise StopIteration

    def _gather(self) -> TensorDict:
        batches: dict[int, TensorDict] = {}
        while len(batches) < len(self._reserved):
            refuse_ended(self._supervisor)
            try:
                delivery = self._supervisor.deliveries.get(timeout=_SLICE_S)
            except queue.Empty:
                continue
            batches[delivery.worker] = delivery.settle(count=False)
        together: TensorDict = torch.cat([batches[worker] for worker in sorted(batches)])  # type: ignore[assignment]
        return together

    def settle(self) -> None:
        return

    def waiting(self) -> list[TensorDict]:
        return []


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
