"""What runs in a worker process of ``MultiCollector``."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch

from millpond.collect.batch_writer import BatchWriter
from millpond.collect.budget import FrameBudget
from millpond.collect.collector import check_layout
from millpond.collect.packing import SLOTS, Format, Mailbox
from millpond.collect.rollout import NOTHING, Rollout
from millpond.collect.supervision import Failure
from millpond.collect.worker_status import COLLECTING, FINISHED, PAUSED, WAITING, WRITING, WorkerTable
from millpond.core.errors import BufferClosed
from millpond.envs.autoreset import Stepper
from millpond.envs.make import World, make
from millpond.envs.threads import share_cores
from millpond.shm.family import belong_to
from millpond.shm.mapped import map_file
from millpond.weights import WeightBoard

Duty = Literal["write", "hand_over", "obey"]  # into replay; to the collector, ahead of it; to the collector, when told
_IDLE_SLICE_S, _BUDGET_SLICE_S = 0.1, 0.02


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """All that a worker must know. It travels by cloudpickle. What has a default is filled in for each worker."""

    workers: int
    duty: Duty
    env: Any
    policy: Any
    num_envs: int
    frames_per_batch: int
    layout: str
    random_frames: int
    keep_float64: bool
    seed: int | None
    budget: FrameBudget
    weights: WeightBoard | None
    replay: Any
    worker: int = 0
    line: int = 0
    directory: Path = Path()
    first_life: int = 0
    rows: dict[str, Any] | None = None  # what an earlier run had collected and not handed over, for the first life


def furnish(spec: WorkerSpec, *, life: int, total_frames: int) -> tuple[World, Rollout]:
    """The environments of a worker in its ``life``, and the rollout in them.

    The workers of a collector share the cores of their host: each takes its part of them for batched environments,
    unless the user has set ``MILLPOND_ENV_THREADS``.
    """
    share_cores(spec.workers)
    env = make(spec.env, num_envs=spec.num_envs, worker=spec.worker)
    time_ = check_layout(spec.layout, spec.frames_per_batch, env.num_envs, total_frames)
    rollout = Rollout(
        Stepper(env),
        spec.policy,
        frames=spec.frames_per_batch,
        time=time_,
        origin=spec.line,
        incarnation=life,
        seed=spec.seed,
        keep_float64=spec.keep_float64,
    )
    if spec.rows is not None and life == spec.first_life:
        rollout.load_state_dict(spec.rows, incarnation=life)
    return env, rollout


class CollectorGone(Exception):
    """The collector hung up, so there is nobody to collect for, or to be told."""


def run(spec: bytes, owner: tuple[int, int], connection: Connection, lifeline: Connection) -> None:
    """The body of a worker process. Whatever ends it badly is told through ``connection`` first."""
    belong_to(owner, lifeline.fileno())
    torch.set_num_threads(1)
    try:
        import cloudpickle

        Worker(cloudpickle.loads(spec), connection).run()
    except CollectorGone:
        sys.exit(0)
    except BaseException as problem:  # noqa: BLE001  # it is told to the one who can do something about it
        with contextlib.suppress(OSError):
            connection.send(("failed", Failure.of(problem)))
        sys.exit(1)


class Worker:
    """Collects until it is told to stop, or nothing is left to collect."""

    def __init__(self, spec: WorkerSpec, connection: Connection) -> None:
        self.spec, self.connection, self.budget = spec, connection, spec.budget
        self.worker_table = WorkerTable(map_file(spec.directory / "roster"), workers=spec.workers)
        self.me = self.worker_table.lines[spec.worker]
        life = self.me.enter()
        self._env, self.rollout = furnish(spec, life=life, total_frames=self.budget.total)
        self.rollout.doing = self.me.doing
        self.me.doing(NOTHING)
        self.batch_writer = BatchWriter(
            self.rollout,
            spec.budget,
            line=spec.line,
            frames_per_batch=spec.frames_per_batch,
            random_frames=spec.random_frames,
            weights=spec.weights,
        )
        self._free = list(range(SLOTS))
        self._posted: dict[int, int] = {}  # by slot: the number of the batch that was put there last
        self._ordered = 0  # the number of the last order
        self._seen = 0  # quarantined rows that were told
        if spec.duty != "write":
            form = Format(self.rollout.rows.fields, spec.frames_per_batch, self.rollout.rows.time)
            path = spec.directory / f"mailbox-{spec.worker}-{life}"
            self._mailbox = Mailbox(path, form, create=True)
            connection.send(("mailbox", path, form))

    def run(self) -> None:
        """Until the end."""
        step = {"write": self._write, "hand_over": self._hand_over, "obey": self._obey_order}[self.spec.duty]
        try:
            while not self.worker_table.stopping and not self._finished():
                self._listen()
                pause = self.worker_table.pausing
                if pause:
                    if self.worker_table.hurrying and self.spec.duty != "obey":
                        self.batch_writer.rest()
                    self.me.state, self.me.paused = PAUSED, pause
                    self.connection.poll(_IDLE_SLICE_S)
                else:
                    step()
                    self._report()
            self.me.state = FINISHED
        except BufferClosed:
            self.connection.send(("closed",))
            self.me.state = FINISHED
        finally:
            if self.spec.duty != "obey":  # there the collector has reserved, and gives back
                self.batch_writer.abandon()
            self._report()
            self._env.close()

    def _finished(self) -> bool:
        return not self.batch_writer.granted and self.budget.finished

    def _listen(self) -> None:
        while self.connection.poll(0):
            try:
                message = self.connection.recv()
            except (EOFError, ConnectionError) as problem:
                raise CollectorGone from problem
            self._answer(*message)

    def _answer(self, what: str, *details: Any) -> None:
        if what == "credit":
            slot, number = details
            if self._posted.get(slot) == number and slot not in self._free:
                self._free.append(slot)
        elif what == "collect":
            frames, first, number = details
            if number > self._ordered:
                self._ordered = number
                self.batch_writer.begin(frames, first=first)
        elif what == "state":
            self.connection.send(("state", self.rollout.state_dict()))

    # ------------------------------------------------------------------ the three duties
    def _batch(self) -> Any:
        self.me.state = COLLECTING
        batch = self.batch_writer.batch(self._step_made)
        if batch is None and not self.batch_writer.granted:  # all is reserved, but a reservation may come back
            self.me.state = WAITING
            self.connection.poll(_BUDGET_SLICE_S)
        return batch

    def _write(self) -> None:
        if self._batch() is None:
            return
        self.me.state = WRITING
        self.batch_writer.offer(self.spec.replay, cancel_event=self, stopping=lambda: self.worker_table.stopping)

    def _hand_over(self) -> None:
        if not self._free:
            self.me.state = WAITING
            self.connection.poll(_IDLE_SLICE_S)
            return
        batch = self._batch()
        if batch is not None:
            self._link(batch, self._free.pop())

    def _obey_order(self) -> None:
        if not self.batch_writer.granted:
            self.me.state = WAITING
            self.connection.poll(_IDLE_SLICE_S)
            return
        batch = self._batch()
        if batch is not None:
            self._link(batch, 0)

    def _link(self, batch: Any, slot: int) -> None:
        frames = self.batch_writer.granted
        self._mailbox.put(slot, batch)
        number = self._posted[slot] = max(self._posted.values(), default=0) + 1
        self.connection.send(("batch", slot, frames, number))
        self.batch_writer.handed_over()

    # ------------------------------------------------------------------ while others' code runs
    def is_set(self) -> bool:
        """As the cancel event of a write: to stop, and to pause, a blocked write is cut off."""
        return self.worker_table.stopping or self.worker_table.pausing != 0

    def _step_made(self) -> bool:
        self.me.touch()
        return self.worker_table.hurrying

    def _report(self) -> None:
        tally, rows = self.rollout.tally, self.rollout.rows
        self.me.report(tally, held=rows.held, dropped=self.batch_writer.dropped, version=self.rollout.version)
        if tally.quarantined > self._seen:
            self._seen = tally.quarantined
            self.connection.send(("quarantined", list(tally.recent)))
            tally.recent.clear()
