"""One buffer in one process: its state under the lock, and whether a write or a sample may proceed.

`Writer` and `Reader` are the two protocols around it: how items come in, and how they go out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch

from millpond.core.errors import BufferClosed, DeadlineExceeded, Unsatisfiable
from millpond.core.schema import Schema
from millpond.flow.limiter import Block, Counts, Flow, insert_block, pressure, sample_block, unsatisfiable
from millpond.replay.config import KNOWN, layers
from millpond.replay.kernels.binding import FastPath, NoFastPath, fast_path_for
from millpond.replay.memory import Memory
from millpond.replay.order import NAME, Order
from millpond.replay.rows import Rows
from millpond.replay.samplers.prioritized import PrioritizedSampler
from millpond.replay.samplers.protocol import Generator, Sampler, State
from millpond.replay.samplers.schedules import Values
from millpond.replay.samplers.slices import SliceSampler
from millpond.replay.samplers.uniform import ConsumingSampler, RandomSampler, SamplerWithoutReplacement
from millpond.replay.slots import Pool, Queue, Ring
from millpond.replay.state import (
    BOUND,
    CLOSED,
    CONSUMERS,
    EMPTIED,
    EXEMPT_SAMPLES,
    EXEMPT_WRITES,
    HEAD,
    ITEMS,
    LAST_INSERT,
    LAST_SAMPLE,
    LIVE,
    PREFETCHED,
    PRESSING,
    PRESSURE,
    PRODUCERS,
    RECEIPT_LINE,
    RECEIPT_NUMBER,
    REDO,
    RESERVED,
    RETURNED,
    REWRITES,
    SAMPLEABLE,
    SPACE,
    STORED,
    TAIL,
    WRITABLE,
    WRITES,
)
from millpond.replay.storage import Storage
from millpond.replay.view import View
from millpond.replay.waiting import Patience, Wait, bury_dead
from millpond.shm.control import ORDERED, Intent
from millpond.shm.holding import describe, stopped
from millpond.shm.locks import Event

FORGET_EVERY = 0.5  # seconds between two looks for the dead, by those of a process that are blocked
Kind = TypeVar("Kind")
MakeMemory = Callable[[dict[str, int], Callable[[State, "Intent | None", bool], None]], Memory]


class Engine:
    """One buffer in one process. While ``unlimited`` is above 0, what this process does is left out of the ratio."""

    def __init__(
        self,
        storage: Storage,
        sampler: Sampler,
        flow: Flow,
        deliveries: int | None,
        generator: torch.Generator,
        make_memory: MakeMemory,
        num_envs: int | None = None,
    ) -> None:
        self.capacity = storage.capacity
        self.storage, self.sampler, self.flow, self.deliveries = storage, sampler, flow, deliveries
        self.num_envs = num_envs
        self.order: Order | None = None  # where it matters how rows follow one another; known with the schema
        self.unlimited = 0
        self.free_flow = replace(flow, samples_per_insert=None, max_debt=None)
        self.random = Generator(generator)
        self.priorities = find(PrioritizedSampler, sampler)
        self.slots = choose_slots(self.capacity, sampler, deliveries)
        self.rows: Rows | None = None
        self.fast_path: FastPath = NoFastPath()
        self.find_rows: Callable[[], bool] = lambda: False  # another process may have bound the schema
        self.recover_rows: Callable[[], None] | None = None
        self.memory = make_memory({**self.slots.memory(), **sampler.memory(self.capacity)}, self._recover)
        self.control = self.memory.control
        self._receipts = self.memory.array("receipts").cast("Q")
        try:
            self.slots.bind(self.memory.array, create=self.memory.fresh)
            self.bind_sampler()
        except BaseException:
            self.memory.remove()
            raise
        self.distinct = deliveries is not None
        self._exact = self.distinct or not sampler.replacement  # a batch of n needs n live items
        self._slices = find(SliceSampler, sampler)
        self._longest = self.capacity  # successive steps of one environment
        self._tickets: dict[Event, int] = {}
        self.items_event, self.space_event = self.control.events[ITEMS], self.control.events[SPACE]
        self.marked = flow.high_watermark is not None or flow.low_watermark is not None
        self.trusted = all(type(layer) in KNOWN.values() for layer in layers(sampler))
        self.always_ready = type(sampler) in (RandomSampler, SamplerWithoutReplacement, ConsumingSampler)

    def bind_sampler(self) -> None:
        """From now on the sampler draws from this engine's memory."""
        self.sampler.bind(self.memory.array)
        if self.priorities is not None:
            self.priorities.change_locked = self.reweigh

    # ------------------------------------------------------------------ the state
    def load(self, wait: Patience | None = None) -> State:
        """Take the lock and read the state, finishing what a dead predecessor had begun. ``try: … finally:
        unlock()``. The ``wait`` of the call says how long; without it, until the buffer is left or its owner dies."""
        control = self.control
        state = control.load(control.mutex.lock(None, self._held_up if wait is None else wait.held_up))
        if state[REDO]:
            self._redo(state)
        if state[RECEIPT_LINE]:
            self._receipts[state[RECEIPT_LINE] - 1] = state[RECEIPT_NUMBER]
        return state

    def _held_up(self, holder: int, seconds: float) -> None:
        self.memory.held_up("the lock", holder, seconds)

    def overdue(self) -> bool:
        """Is it time to look for the dead?"""
        return self.memory.shared and time.monotonic() - self.memory.forgot >= FORGET_EVERY

    def forget_dead(self, wait: Patience | None) -> bool:
        """For a call that is blocked. Now and then: give back what dead processes had reserved, and end the pressure
        that they began. False: not now."""
        if not self.overdue():
            return False
        self.memory.forgot = time.monotonic()
        holding = self.control.participants.holding(PRESSING)
        if holding:
            bury_dead(self.control, among=holding, held_up=self._held_up if wait is None else wait.held_up)
        return True

    def commit(self, state: State, *events: Any) -> None:
        """Commit, wake, and apply the redo log that the change left."""
        self.control.commit(state, *events)
        if state[REDO]:
            self._redo(state)

    def _redo(self, state: State) -> None:
        self.slots.apply_redo(state[REDO])
        state[REDO] = 0
        self.control.amend(REDO, 0)

    def _recover(self, state: State, intent: Intent | None, owner_died: bool) -> None:
        """Under the lock, for the next holder after a death or an exception. May be cut off and run again."""
        if state[REDO]:
            self.slots.apply_redo(state[REDO])
            state[REDO] = 0
        if state[REWRITES] % 2:
            if self.recover_rows is not None:
                self.recover_rows()
            state[REWRITES] += 1
        if not state[LIVE]:
            self.slots.reset()  # a load may have been cut off
        if self.priorities is not None:
            self.priorities.recover(self.slots.since(state, 0)[0])
        state[RESERVED], state[PREFETCHED] = self.control.participants.all_reserved()

    def bind(self, schema: Schema) -> None:
        """The rows are there: the first write may come."""
        self.rows = Rows(self.storage, schema)
        self.order = self.order_of(schema)
        self._longest = self.capacity if self.order is None else self.order.longest
        self.fast_path = fast_path_for(self)
        if self.bound():
            return
        try:
            state = self.load()
            if not state[BOUND]:
                state[BOUND] = 1
                self.commit(state)
        finally:
            self.control.mutex.unlock()

    def order_of(self, schema: Schema) -> Order | None:
        """How the rows of this schema follow one another. Raises ``SchemaMismatch`` where nobody could tell."""
        ordered = next((s for s in layers(self.sampler) if hasattr(s, "episode_key")), None)
        if ordered is None:
            return None if self.num_envs is None else Order(self.capacity, schema, None, self.num_envs, None)
        notes = np.frombuffer(self.memory.array(NAME), np.int64)
        order = Order(self.capacity, schema, ordered, self.num_envs, notes)
        if isinstance(self.slots, Pool):
            order.refuse_any_order(schema)
        refused = None if self._slices is None else self._slices.too_long(self._slices.slice_len, order.longest)
        if refused is not None:
            raise Unsatisfiable(
                f"{refused}: with num_envs={self.num_envs}, at most {order.longest} of {self.capacity} are of one"
            )
        return order

    def stopped_holder(self) -> int:
        """The thread that holds the lock and was stopped: whatever may proceed, it must wait for that. 0: none."""
        holder = self.control.mutex.holder
        return holder if holder and not self.control.mutex.held() and stopped(holder) else 0

    def bound(self) -> bool:
        """Did anybody bind the schema?"""
        return bool(self.control.peek()[BOUND])

    def view(self, state: State, *, locked: bool = False) -> View:
        """What a sampler sees."""
        assert self.rows is not None
        return View(self.slots, self.rows, state, distinct=self.distinct, locked=locked)

    def reweigh(self, change: Callable[[State | None], Values | None]) -> None:
        """Put other settings of priorities in force, in one step for all processes: those that ``change`` gives."""
        assert self.priorities is not None
        try:
            state = self.load()
            self.refuse_closed(state, "reweigh", 0)
            values = change(state)
            if values is not None:
                self.control.begin(state)  # a death, or an exception: the leaves are made anew from what is in force
                self.priorities.settle(values, lambda: self.slots.since(state, 0)[0])
                self.control.settle(state)
                self.commit(state, self.items_event)
        finally:
            self.control.mutex.unlock()

    def keep_pace(self, state: State) -> None:
        """Before a draw: give the leaves the alpha that its schedule has come to."""
        if self.priorities is not None and self.priorities.due(state):
            self.reweigh(self.priorities.next_stage)

    # ------------------------------------------------------------------ may it proceed?
    def counts(self, state: State) -> Counts:
        """What the limiter needs to know."""
        return Counts(
            capacity=self.capacity,
            live=state[LIVE],
            write_count=state[WRITES],
            exempt_writes=state[EXEMPT_WRITES],
            samples=state[RETURNED] - state[EXEMPT_SAMPLES],
            reserved=state[RESERVED],
            under_pressure=bool(state[PRESSURE]) and self.pressed(state),
            evictable=self.flow.admission == "overwrite",
            consuming=self.deliveries is not None,
        )

    def pressed(self, state: State) -> bool:
        """Do producers wait until the fill is down at the low watermark?

        Where that began with an insert that had to wait, it ends where that gives up or dies.
        """
        return state[PRESSURE] == 1 or (state[PRESSURE] == 2 and bool(self.control.waiting(PRESSING)))

    def press(self, state: State) -> None:
        """Under the lock, after a change, where there are watermarks: is there pressure still, or now?"""
        counts = self.counts(state)
        if not pressure(self.flow, counts, 0):
            state[PRESSURE] = 0
        elif not counts.under_pressure or pressure(self.flow, counts._replace(under_pressure=False), 0):
            state[PRESSURE] = 1  # the fill itself is above the high watermark

    def insert_block(self, state: State, n: int) -> Block | None:
        """Why n items cannot be written now."""
        if self.unlimited and state[LIVE] + n <= self.capacity:
            return None
        flow = self.flow
        if flow.admission == "overwrite" and flow.max_debt is None:
            return None
        counts = self.counts(state)
        if self.unlimited:
            return insert_block(self.free_flow, counts, n)
        return insert_block(flow, counts, n)

    def sample_block(self, state: State, n: int, *, locked: bool = False) -> Block | None:
        """Why n items cannot be sampled now."""
        if self._slices is not None:
            refused = self._slices.refusal(n, self._longest)
            if refused is not None:
                return Block(str(refused), "nobody")
        need = n if self._exact else 1
        flow = self.flow if not self.unlimited else self.free_flow
        if state[LIVE] < need or state[WRITES] < flow.min_size or flow.samples_per_insert is not None:
            block = sample_block(flow, self.counts(state), n, need=need)
            if block is not None:
                return block
        if self.rows is None and not self.find_rows():
            return Block("nothing was written yet", "inserts")
        if self.always_ready:
            return None
        reason = self.sampler.ready(self.view(state, locked=locked), n)
        return None if reason is None else Block(reason, "inserts")

    def refuse_impossible(self, op: str, n: int, state: State, block: Block) -> None:
        """For a call that is blocked, also one that does not wait. Raises ``Unsatisfiable`` where nothing that others
        do could ever let it proceed, or where ``max_debt`` leaves the sizes in use no choice but to come to rest."""
        if self._slices is not None and op == "sample":
            refused = self._slices.refusal(n, self._longest)
            if refused is not None:
                raise refused
        if block.waits_for == "nobody":
            raise Unsatisfiable(f"{op}({n}): {block.reason}")
        if not self.unlimited:
            if op == "sample":
                batch, insert = n, self._latest_insert(state, n) if self.flow.max_debt is not None else 0
            elif self.flow.max_debt is not None:
                batch, insert = state[LAST_SAMPLE], n
            else:
                return
            reason = unsatisfiable(self.flow, self.capacity, self._exact, batch, insert, counts=self.counts(state))
            if reason is not None:
                raise Unsatisfiable(f"{op}({n}): {reason}")

    def refuse_endless(self, op: str, n: int, state: State) -> None:
        """Before a wait. Raises ``Unsatisfiable`` where these sizes must come to rest together with those that the
        other side uses: that of its latest call, and those of its calls that wait.

        Other sizes on this call's own side may change that, so then it waits.
        """
        if self.unlimited:
            return
        sampling = op == "sample"
        latest = (state[LAST_SAMPLE], self._latest_insert(state, n if sampling else 0))
        mine, theirs = latest if sampling else latest[::-1]
        reason = self._comes_to_rest(n, theirs, state, sampling) if theirs else None
        if theirs and reason is None:
            return
        waiting = self.control.waiting()
        sizes: list[set[int]] = [set(), set()]  # of samples and of inserts
        for waiter in waiting:
            sizes[waiter.role in PRODUCERS].add(waiter.need)
        ours, others = sizes if sampling else sizes[::-1]
        for own in sorted({n, mine or n, *ours}, key=lambda size: size != n):
            for other in sorted({theirs or n, *others} if theirs else others):
                found = self._comes_to_rest(own, other, state, sampling)
                if found is None:
                    return
                reason = reason or found
        if reason is not None:
            raise Unsatisfiable(f"{op}({n}): {reason}")

    def _latest_insert(self, state: State, batch: int) -> int:
        """The size of inserts in use. 0 where it is not known: what filled up to ``min_size``, or the very first
        write where it holds a batch, may be a prefill that nobody repeats."""
        latest, written = state[LAST_INSERT], state[WRITES] - state[EXEMPT_WRITES]
        if written == self.flow.min_size or (batch and written == latest >= batch):
            return 0
        return latest

    def _comes_to_rest(self, own: int, other: int, state: State, sampling: bool) -> str | None:
        batch, insert = (own, other) if sampling else (other, own)
        return unsatisfiable(
            self.flow,
            self.capacity,
            self._exact,
            batch,
            insert,
            counts=self.counts(state),
            deliveries=self.deliveries,
        )

    # ------------------------------------------------------------------ waiting
    def count_block(self, state: State, wait: Wait, word: int, event: Event) -> int:
        """Under the lock: count this wait once, appear among the waiters, and get a ticket."""
        if not wait.counted:
            wait.counted = True
            state[word] += 1
            self.commit(state)
        return self.ticket(wait, event)

    def ticket(self, wait: Wait, event: Event) -> int:
        """Under the lock: appear among the waiters, and get a ticket."""
        wait.enlist()
        ticket = self._tickets[event] = event.prepare()
        return ticket

    def ticket_again(self, event: Event) -> int | None:
        """Without the lock: the ticket of another thread of this process, where nothing was published since.

        A publisher moves the sequence on before it looks whether anybody waits, so a ticket that is still current was
        drawn after the last one looked, and the next will see it. That needs loads in order, as `ControlBlock.peek`
        does. It spares hundreds of threads that are woken in vain the queue for the lock.
        """
        ticket = self._tickets.get(event)
        return ticket if ticket is not None and ORDERED and event.current(ticket) else None

    def wait_until(
        self, op: str, n: int, timeout: float | None, cancel: Any, blocked: Callable[[State, int], Block | None]
    ) -> bool:
        """Advisory: sleep until ``sample(n)`` or ``extend(n)`` is ``blocked`` no more. False on timeout."""
        role, event = (SAMPLEABLE, self.items_event) if op == "sample" else (WRITABLE, self.space_event)
        with Wait(self.memory, f"wait for {op}({n})", role, n, timeout, cancel) as wait:
            while True:
                try:
                    state = self.load(wait)
                    ticket = self.ticket(wait, event)
                except DeadlineExceeded:
                    return False
                finally:
                    self.control.mutex.unlock()
                self.refuse_closed(state, op, n)
                block = blocked(state, n)
                if block is None:
                    return True
                if self.forget_dead(wait):
                    continue
                self.refuse_impossible(op, n, state, block)
                if wait.timeout:
                    self.refuse_endless(op, n, state)
                try:
                    wait.sleep(event, ticket, lambda why=block: self.explain_block(op, n, why))  # type: ignore[misc]
                except DeadlineExceeded:
                    return False

    def refuse_closed(self, state: State, op: str, n: int) -> None:
        """Raises ``BufferClosed`` where it is."""
        if state[CLOSED]:
            raise BufferClosed(f"{op}({n}): the buffer was closed")

    def explain_block(self, op: str, n: int, block: Block) -> str:
        """One line: what is unmet, with numbers, and who could meet it."""
        roles = PRODUCERS if op == "sample" else CONSUMERS
        others = [waiter for waiter in self.control.waiting() if waiter.role in roles]
        who = {"inserts": "a producer that extends", "samples": "a consumer that samples", "space": "a consumer"}
        words = f"{op}({n}) cannot proceed: {block.reason}"
        if block.waits_for in who:
            words += f"; {who[block.waits_for]} could change that"
        if others:
            pids = ", ".join(str(pid) for pid in sorted({w.pid for w in others})[:8])
            words += f"; {len(others)} on that side wait too (process {pids})"
        ahead = self.control.participants.reservations()
        if ahead:
            by = ", ".join(f"{items} by process {pid}" for pid, items in ahead[:8])
            words += f"; drawn ahead and not returned yet: {by}"
        holder = self.control.mutex.holder
        return words + (f"; the lock is held by {describe(holder)}" if holder and not self.control.mutex.held() else "")

    # ------------------------------------------------------------------ the rest
    def empty(self) -> None:
        """Drop all items, for everybody. Counters of what happened stay."""
        try:
            state = self.load()
            self.refuse_closed(state, "empty", 0)
            self.drop(state)
            if self.priorities is not None:
                self.priorities.recover(self.slots.since(state, 0)[0])
            self.control.settle(state)
            self.commit(state, self.items_event, self.space_event)
        finally:
            self.control.mutex.unlock()

    def drop(self, state: State) -> None:
        """Under the lock: from now on no item is live. Begins a change that the caller must settle."""
        self.control.begin(state)
        state[EMPTIED] += 1
        state[TAIL], state[LIVE], state[STORED], state[PRESSURE] = state[HEAD], 0, 0, 0
        self.commit(state, self.items_event, self.space_event)

    def close(self, *, everybody: bool) -> None:
        """Wake all waiters of this process, or of all."""
        if everybody:
            try:
                state = self.load()
                state[CLOSED] = 1
                self.commit(state, self.items_event, self.space_event)
            finally:
                self.control.mutex.unlock()
        self.memory.left = True
        if not everybody:
            self.control.notify_all()

    def let_go(self, *, storage: bool = True) -> None:
        """Nobody new comes: break the rings of references, so that the memory goes as soon as the last call has
        left. The rows too, unless another engine goes on with this ``storage``."""
        self.find_rows, self.recover_rows, self.fast_path = lambda: False, None, NoFastPath()
        self.control.recover = None
        if self.priorities is not None and self.priorities.change_locked == self.reweigh:
            self.priorities.change_locked = None
        if storage:
            self.storage.close()

    def receipt(self, line: int) -> int:
        """The latest number that a write left on this line; 0 where none did."""
        try:
            self.load()
            return self._receipts[line]
        finally:
            self.control.mutex.unlock()


def choose_slots(capacity: int, sampler: Sampler, deliveries: int | None) -> Ring | Pool:
    """Items that leave in any order need a pool; all others keep the order of writing."""
    queue = find(ConsumingSampler, sampler)
    if queue is not None:
        queue.queue = Queue(capacity, queue.n)
        return queue.queue
    return Ring(capacity) if deliveries is None else Pool(capacity, deliveries)


def find(kind: type[Kind], sampler: Any) -> Kind | None:
    """The sampler of this kind, be it the buffer's own or one that another is built around."""
    while sampler is not None and not isinstance(sampler, kind):
        sampler = getattr(sampler, "base", None)
    return sampler
