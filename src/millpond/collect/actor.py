"""What runs in an actor of ``RayCollector``. It needs no Ray: tests drive it as they like."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

from millpond.collect.batch_writer import BatchWriter
from millpond.collect.budget import Span
from millpond.collect.packing import Format
from millpond.collect.rollout import NOTHING
from millpond.collect.supervision import Failure
from millpond.collect.worker import WorkerSpec, furnish
from millpond.collect.worker_status import COLLECTING, PAUSED, WAITING, WRITING, WorkerTable
from millpond.core.errors import BufferClosed
from millpond.remote.address import this_host
from millpond.shm import identity
from millpond.weights import Snapshot, Weights

Outcome = Literal["begun", "written", "dropped", "batch", "kept", "closed", "failed"]
Line = tuple[int, bytes]  # see WorkerLine.told


class Home(NamedTuple):
    """Where a process is. Two with the same home share memory, and know each other's processes."""

    host: str
    boot: str
    namespace: int

    @classmethod
    def here(cls) -> Home:
        """Of this process."""
        return cls(this_host(), identity.boot_id(), identity.pid_namespace())


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A batch of ``frames`` frames, reserved for this worker, of which the first is number ``first`` of all. ``number``
    is one more than that of the order before, and that of the receipt that its write leaves."""

    number: int
    frames: int
    first: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What came of a call. ``kept``: a pause, or the end, cut it off; the same order is to be given again."""

    outcome: Outcome
    line: Line
    quarantined: tuple[Any, ...] = ()
    frames: int = 0
    batch: Any = None  # of a batch: its bytes
    form: Format | None = None  # of one that has begun: how its batches are packed
    neighbour: bool = False  # of one that has begun: is it at the collector's home?
    direct: bool = False  # of one that has begun: is the memory of the replay its own, so that a kill ends its writes?
    failure: Failure | None = None


class Granted:
    """Stands for the budget where frames come reserved, and are counted by who reserved them."""

    def __init__(self) -> None:
        self.refunded = False
        self._commits = 0

    def reserve_span(self, frames: int, *, worker: int, multiple_of: int) -> Span:
        return Span(0, 0)

    def intend(self, worker: int, *, frames: int, receipt: int) -> None: ...

    def commit(self, worker: int, *, frames: int) -> None:
        self._commits += 1

    def commits_by(self, worker: int) -> int:
        return self._commits

    def refund(self, worker: int, *, frames: int | None = None) -> None:
        self.refunded = True


class Carried:
    """The weights that came with the latest order."""

    def __init__(self) -> None:
        self.latest: Snapshot | None = None
        self._held = -1

    def pull(self, module_or_tensors: Any, /) -> int:
        if self.latest is not None and self.latest.version != self._held:
            self._held = self.latest.pull(module_or_tensors)
        return max(0, self._held)


class CollectActor:
    """One worker: environments, a policy, and the frames between two batches.

    ``work`` runs for as long as a batch takes; the other methods answer at once, from another thread. It must be one
    thread at a time that calls ``begin`` and ``work``.
    """

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._stopping = False
        self._hurrying = False
        self._pausing = 0
        self._heard = 0  # of the collector's words on pausing
        self._next = 0  # the order that must come next
        self._seen = 0  # quarantined rows that were told
        self._line = WorkerTable(bytearray(WorkerTable.nbytes(1)), workers=1).lines[0]

    def begin(
        self, spec: bytes, line: Line, number: int, board: bytes | None, home: Home, owner: tuple[int, int]
    ) -> Report:
        """Make the environments. ``number`` is that of the first order, ``board`` the weights for those at ``home``."""
        self._next = number
        self._line.hear(line)
        try:
            neighbour = home == Home.here()
            if neighbour:
                # Ray notices a killed driver by who adopts its children, which not every system lets it see.
                identity.when_gone(*owner, lambda: os._exit(0))
            life = self._line.enter()
            self._furnish(spec, life, board if neighbour else None)
        except BaseException as problem:  # noqa: BLE001  # it is told to the one who can do something about it
            return self._failed(problem)
        self._line.state = WAITING
        direct = getattr(self._spec.replay, "transport", "shm") == "shm"
        line = self._line.told()
        return Report(outcome="begun", line=line, form=self._form, neighbour=neighbour, direct=neighbour and direct)

    def _furnish(self, pickled: bytes, life: int, board: bytes | None) -> None:
        import cloudpickle

        spec, total_frames = cloudpickle.loads(pickled)
        self._spec: WorkerSpec = spec
        self._env, rollout = furnish(spec, life=life, total_frames=total_frames)
        rollout.doing = self._line.doing
        self._line.doing(NOTHING)
        self._granted, self._carried = Granted(), Carried()
        weights: Weights = self._carried if board is None else pickle.loads(board)
        self._batch_writer = BatchWriter(
            rollout,
            self._granted,
            line=spec.line,
            frames_per_batch=spec.frames_per_batch,
            random_frames=spec.random_frames,
            weights=None if spec.policy is None else weights,
        )
        self._form = Format(rollout.rows.fields, spec.frames_per_batch, rollout.rows.time)

    # ------------------------------------------------------------------ one batch
    def work(self, order: Order, weights: Snapshot | None) -> Report:
        """Collect a batch, and write it or hand it over."""
        try:
            if order.number != self._next or self._pausing or self._stopping:  # the one before it was cut off
                return self._report("kept")
            if weights is not None:
                self._carried.latest = weights
            return self._carry_out(order)
        except BufferClosed:
            return self._report("closed")
        except BaseException as problem:  # noqa: BLE001  # as above
            return self._failed(problem)

    def _carry_out(self, order: Order) -> Report:
        batch_writer, me = self._batch_writer, self._line
        if not batch_writer.granted:
            batch_writer.begin(order.frames, first=order.first, receipt=order.number)
        me.state = COLLECTING
        batch = batch_writer.batch(self._stepped)
        if batch is None:
            return self._report("kept")
        if self._spec.duty != "write":
            packed = self._form.pack(batch)
            batch_writer.handed_over()
            return self._done(order, "batch", packed)
        me.state, self._granted.refunded = WRITING, False
        if batch_writer.offer(self._spec.replay, cancel_event=self, stopping=lambda: self._stopping) is None:
            return self._report("kept")
        return self._done(order, "dropped" if self._granted.refunded else "written")

    def _done(self, order: Order, outcome: Outcome, batch: Any = None) -> Report:
        self._next += 1
        return replace(self._report(outcome), frames=order.frames, batch=batch)

    def _report(self, outcome: Outcome) -> Report:
        rollout, me = self._batch_writer.rollout, self._line
        tally = rollout.tally
        me.report(tally, held=rollout.rows.held, dropped=self._batch_writer.dropped, version=rollout.version)
        me.state = PAUSED if self._pausing else WAITING
        events: tuple[Any, ...] = ()
        if tally.quarantined > self._seen:
            self._seen, events = tally.quarantined, tuple(tally.recent)
            tally.recent.clear()
        return Report(outcome=outcome, line=me.told(), quarantined=events)

    def _failed(self, problem: BaseException) -> Report:
        return Report(outcome="failed", line=self._line.told(), failure=Failure.of(problem))

    # ------------------------------------------------------------------ while a batch is in the making
    def is_set(self) -> bool:
        """As the cancel event of a write: to stop, and to pause, a blocked write is cut off."""
        return self._stopping or self._pausing != 0

    def _stepped(self) -> bool:
        self._line.touch()
        return self._stopping or self._hurrying

    def mind(self, word: int, pause: int, stop: bool, hurry: bool = False) -> None:
        """Pause from now on, where ``pause`` is not 0, or stop; ``hurry`` leaves no time to finish the batch. ``word``
        rises: an older one came too late."""
        if word > self._heard:
            self._heard, self._pausing, self._hurrying = word, pause, hurry
            self._stopping = self._stopping or stop

    def pulse(self) -> Line:
        """A sign of life."""
        return self._line.told()

    def state(self) -> dict[str, Any]:
        """The frames that are collected and not taken. While no batch is in the making only."""
        return self._batch_writer.rollout.state_dict()

    def finish(self) -> None:
        """Close the environments. After the last batch."""
        self._env.close()
