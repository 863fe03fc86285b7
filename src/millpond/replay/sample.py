"""Sampling: draw, gather, count and consume as one step, the same for every sampler, storage and flow rule.

Read the state, draw and gather *without* the lock, then take it and look: if an item left meanwhile, draw again;
otherwise count, consume and commit. After a few tries in vain the draw is made under the lock, where nothing can leave.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from millpond.core.errors import DeadlineExceeded, InvalidArgument, NotReady
from millpond.flow.limiter import Block, sample_block
from millpond.replay.batch import BatchMemory, SampledBatch
from millpond.replay.engine import Engine
from millpond.replay.samplers.protocol import Draw, Ints, State, Stream
from millpond.replay.state import (
    CALLS,
    CLOSED,
    CONSUMER,
    CONSUMER_BLOCKS,
    EMPTIED,
    EXEMPT_SAMPLES,
    HEAD,
    LAST_SAMPLE,
    OVERWRITTEN,
    PREFETCHED,
    REDO,
    RESERVED,
    RETURNED,
    REWRITES,
    TAIL,
    TAKES,
)
from millpond.replay.view import every, repeated
from millpond.replay.waiting import Patience, Wait

TRIES = 4


class Reader:
    """How items go out."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.deliveries = engine.deliveries
        self._limited = engine.distinct or engine.flow.samples_per_insert is not None

    def take(
        self,
        n: int,
        *,
        wait: bool,
        timeout: float | None = None,
        cancel: Any = None,
        ahead: bool = False,
        prepare: Callable[[int], BatchMemory | None] | None = None,
        asked: bool = False,
        patience: Patience | None = None,
    ) -> SampledBatch:
        """Draw, gather, count and consume n items as one step. ``ahead`` reserves them for later delivery.

        Whoever must wait calls ``prepare`` before sleeping: what can be made then delays nobody after the wake-up,
        when the processor's caches are cold and every step takes several times as long. ``asked``: the caller has just
        asked the fast path in vain. ``patience`` with the lock, where it is not that of this call's own limits.

        Raises:
            NotReady: they cannot be had now, and ``wait`` is False.
            DeadlineExceeded, Cancelled, BufferClosed, PeerLost: with the explanation.
            Unsatisfiable: they can never be had.
        """
        engine = self._engine
        waiting = None if timeout is None and cancel is None else self.waiting(n, timeout, cancel)
        patience = patience or waiting
        tries, into = 0, None
        try:
            while True:
                picked = None if ahead or asked else engine.fast_path.sample(n, into)
                if picked is not None:
                    return picked.taken()
                state = engine.control.peek()
                if state[CLOSED]:
                    engine.refuse_closed(state, "sample", n)
                block = engine.sample_block(state, n)
                if block is None:
                    engine.keep_pace(state)
                    taken = (
                        self._try(state, n, ahead, into, patience)
                        if tries < TRIES
                        else self._take_locked(n, ahead, patience)
                    )
                    if taken is not None:
                        return taken
                    tries += 1
                    if tries <= TRIES:
                        continue
                    block = Block(f"{engine.sampler!r} cannot draw {n} items now", "inserts")
                if tries <= TRIES and engine.forget_dead(patience):
                    continue  # not after draws: that it is time to look must not decide how many are made
                engine.refuse_impossible("sample", n, state, block)
                if not wait:
                    if (
                        tries < TRIES
                        and engine.rows is not None
                        and not engine.always_ready
                        and not self._blocked(n, patience)
                    ):
                        tries += 1  # the sampler was asked while somebody changed what it goes by
                        continue
                    raise NotReady(engine.explain_block("sample", n, block))
                waiting = waiting or self.waiting(n, timeout, cancel)
                if waiting.timeout == 0:
                    raise DeadlineExceeded(engine.explain_block("sample", n, block))
                ticket = engine.ticket_again(engine.items_event) if waiting.listed else None
                if ticket is not None:
                    state = engine.control.peek()
                else:
                    try:
                        state = engine.load(waiting)
                        ticket = engine.count_block(state, waiting, CONSUMER_BLOCKS, engine.items_event)
                    finally:
                        engine.control.mutex.unlock()
                if state[CLOSED] or (tries <= TRIES and engine.sample_block(state, n) is None):
                    continue  # it changed between the look and the ticket
                engine.refuse_endless("sample", n, state)
                if into is None and prepare is not None:
                    into = prepare(n)
                waiting.sleep(engine.items_event, ticket, partial(engine.explain_block, "sample", n, block))
                tries, asked = 0, False
        finally:
            if waiting is not None:
                try:
                    waiting.leave()
                finally:  # once more: Ctrl-C may come on the way in
                    waiting.leave()

    def _blocked(self, n: int, wait: Patience | None) -> bool:
        """The same once more, where nobody changes anything."""
        try:
            return self._engine.sample_block(self._engine.load(wait), n, locked=True) is not None
        finally:
            self._engine.control.mutex.unlock()

    def waiting(self, n: int, timeout: float | None, cancel: Any) -> Wait:
        """The wait of a call with these limits."""
        return Wait(self._engine.memory, f"sample({n})", CONSUMER, n, timeout, cancel)

    def _try(
        self, state: State, n: int, ahead: bool, into: BatchMemory | None, wait: Patience | None
    ) -> SampledBatch | None:
        """Optimistic: draw and gather without the lock, then look whether that still holds."""
        engine = self._engine
        stored = engine.rows
        assert stored is not None
        if state[REDO]:
            return None  # committed, but not yet applied: the slots' arrays are older than the state
        try:
            draw = engine.sampler.draw(engine.view(state), n, engine.random)
        except Exception:
            if engine.control.peek() != state:
                return None  # what it read was changed meanwhile
            raise
        if draw is None or not self._sound(draw):
            return None
        if into is not None and (draw.extra or len(draw.slots) != n or not stored.raw):
            into = None
        rows = stored.read(draw.slots, None if into is None else into.rows)
        mutex = engine.control.mutex
        try:
            now = engine.load(wait)
            if now[CLOSED]:
                engine.refuse_closed(now, "sample", n)
            if not self._holds(draw, state, now) or (self._limited and self._limits(now, n) is not None):
                return None
            taken = self._deliver(now, draw, rows, ahead)
        finally:
            mutex.unlock()
        if into is None or taken is None:
            return taken
        into.index.numpy()[:], into.generation.numpy()[:] = draw.slots, draw.numbers
        into.emptied = taken.emptied
        return into.taken()

    def _take_locked(self, n: int, ahead: bool, wait: Patience | None) -> SampledBatch | None:
        """Others were faster several times: draw where nobody can be."""
        engine = self._engine
        assert engine.rows is not None
        random = Stream(engine.random.seed())
        try:
            now = engine.load(wait)
            engine.refuse_closed(now, "sample", n)
            if engine.sample_block(now, n, locked=True) is not None:
                return None
            draw = self.draw_locked(now, n, random)
            if draw is None or not self._sound(draw):
                return None
            return self.deliver_locked(now, draw, ahead=ahead)
        finally:
            engine.control.mutex.unlock()

    def _sound(self, draw: Draw) -> bool:
        """Does each slot of the draw hold a live item? Priorities are changed a moment before, or after, the state is.

        Raises ``InvalidArgument`` where a user's sampler answered what cannot be slots and numbers at all.
        """
        engine = self._engine
        if engine.always_ready:  # it drew from the live items themselves
            return True
        if not engine.trusted:
            refuse_nonsense(draw, engine.capacity, repr(engine.sampler))
        return bool(np.minimum.reduce(draw.numbers, initial=0) >= 0)

    def draw_locked(self, state: State, n: int, random: Stream) -> Draw | None:
        """Under the lock: choose n items."""
        return self._engine.sampler.draw(self._engine.view(state, locked=True), n, random)

    def deliver_locked(self, state: State, draw: Draw, *, ahead: bool = False) -> SampledBatch | None:
        """Under the lock: gather, count and consume what `draw_locked` chose in this state."""
        assert self._engine.rows is not None
        return self._deliver(state, draw, self._engine.rows.gather(draw.slots), ahead)

    def _limits(self, state: State, n: int) -> Block | None:
        """`sample_block` again, without asking the sampler, and only what may have changed."""
        engine = self._engine
        flow = engine.flow if not engine.unlimited else engine.free_flow
        return sample_block(flow, engine.counts(state), n, need=n if engine.distinct else 1)

    def _holds(self, draw: Draw, before: State, now: State) -> bool:
        """Are all items of the draw still what they were when it was gathered?"""
        engine = self._engine
        if now[REWRITES] != before[REWRITES] or now[REWRITES] % 2 or now[EMPTIED] != before[EMPTIED]:
            return False
        if now[TAIL] == before[TAIL] and (
            not engine.distinct
            or (now[TAKES] == before[TAKES] and now[HEAD] == before[HEAD] and now[OVERWRITTEN] == before[OVERWRITTEN])
        ):
            return True  # nothing left meanwhile
        if not every(engine.slots.alive(now, draw.slots, draw.numbers)):
            return False
        if draw.watch is not None and not every(engine.slots.alive(now, *draw.watch)):
            return False
        return not (engine.distinct and repeated(draw.slots))

    def _deliver(self, state: State, draw: Draw, rows: torch.Tensor, ahead: bool) -> SampledBatch | None:
        """Under the lock: count and consume, and commit that."""
        engine = self._engine
        if draw.apply is not None and not draw.apply(state):
            return None
        n = len(draw.slots)
        if not engine.unlimited:
            state[LAST_SAMPLE] = n
        state[TAKES] += 1
        if ahead:
            if not self.reserve(state, n, 1):
                return None
        else:
            state[CALLS] += 1
            state[RETURNED] += n
            if engine.unlimited:
                state[EXEMPT_SAMPLES] += n
        if engine.distinct:
            self._consume(state, draw.slots)
        elif engine.flow.max_debt is not None:
            engine.commit(state, engine.space_event)
        else:
            engine.commit(state)
        return SampledBatch(rows, draw.slots, draw.numbers, draw.extra, state[EMPTIED])

    def _consume(self, state: State, slots: Ints) -> None:
        leaving = self._engine.slots.consume(state, slots)
        if self._engine.marked:
            self._engine.press(state)
        if self._engine.priorities is None or not len(leaving):
            self._engine.commit(state, self._engine.space_event)
            return
        self._engine.control.begin(state, len(leaving))  # a death before the end: the tree is mended from what is live
        self._engine.commit(state, self._engine.space_event)
        self._engine.priorities.left(leaving)
        self._engine.control.settle(state)
        self._engine.commit(state)

    # ------------------------------------------------------------------ batches drawn ahead
    def reserve(self, state: State, items: int, batches: int) -> bool:
        """Under the lock: note, for this process, so many more items and batches that wait for delivery."""
        people = self._engine.control.participants
        line = people.claim_process()
        if line is None:
            return False
        old_items, old_batches = people.reserved(line)
        items, batches = max(items, -old_items), max(batches, -old_batches)
        people.reserve(line, old_items + items, old_batches + batches)
        state[RESERVED] = max(0, state[RESERVED] + items)
        state[PREFETCHED] = max(0, state[PREFETCHED] + batches)
        return True

    def emptied(self) -> int:
        """How often everything was dropped: batches drawn ahead before that count no more."""
        return self._engine.control.peek()[EMPTIED]


def refuse_nonsense(draw: Draw, capacity: int, who: str) -> None:
    """Raises ``InvalidArgument`` where the draw cannot be what a sampler must answer: rows are gathered unchecked."""
    for name, values in (("slots", draw.slots), ("numbers", draw.numbers)):
        if not isinstance(values, np.ndarray) or values.dtype != np.int64 or values.ndim != 1:
            kind = f"{values.dtype}{list(values.shape)}" if hasattr(values, "dtype") else type(values).__name__
            raise InvalidArgument(f"{who} must draw {name} as a one-dimensional int64 array, not {kind}")
    if len(draw.slots) != len(draw.numbers) or not len(draw.slots):
        raise InvalidArgument(f"{who} drew {len(draw.slots)} slots with {len(draw.numbers)} numbers")
    low, high = int(np.minimum.reduce(draw.slots)), int(np.maximum.reduce(draw.slots))
    if low < 0 or high >= capacity:
        raise InvalidArgument(f"{who} drew slots {low} to {high}, outside 0 to {capacity - 1}")
