"""Writing: all of a batch, or none.

Under the lock: note the intent; let what must give way cease to be live, and commit that; copy the rows; commit. The
rows of live items are never written, so whoever reads a row and afterwards finds its item still live has read it whole.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from millpond.core.errors import BufferFull, DeadlineExceeded
from millpond.flow.limiter import Block, pressure
from millpond.replay.engine import Engine
from millpond.replay.samplers.prioritized import Weighed
from millpond.replay.samplers.protocol import Ints, State
from millpond.replay.slots import Ring
from millpond.replay.state import (
    CLOSED,
    DROPPED,
    EXEMPT_WRITES,
    HEAD,
    LAST_INSERT,
    LIVE,
    PRESSING,
    PRESSURE,
    PRODUCER,
    PRODUCER_BLOCKS,
    RECEIPT_LINE,
    RECEIPT_NUMBER,
    WRITES,
)
from millpond.replay.waiting import Wait


class Writer:
    """How items come in."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def put(
        self,
        rows: torch.Tensor,
        weighed: Weighed | None,
        *,
        timeout: float | None,
        cancel: Any,
        receipt: tuple[int, int] | None = None,
        who: int | None = None,
    ) -> Ints | None:
        """Write all rows or none. Their slots; None where the admission policy dropped them. ``who`` writes, if not
        this thread.

        Of more rows than there are slots the last ones stay, and only theirs are returned.
        """
        engine, n = self._engine, rows.shape[0]
        wait = None if timeout is None and cancel is None else self._wait(n, timeout, cancel)
        try:
            while True:
                if wait is not None and self._still_blocked(n, wait):
                    continue
                if engine.priorities is None:
                    slots = engine.fast_path.put(rows, receipt, who)
                    if slots is not None:
                        return slots
                try:
                    state, ticket = engine.load(wait), None
                    engine.refuse_closed(state, "extend", n)
                    block = engine.insert_block(state, n)
                    if block is None:
                        excess = min(state[LIVE] + n - engine.capacity, state[LIVE])
                        if excess <= 0 or engine.slots.evict(state, excess):
                            return self._write(state, rows, weighed, excess, receipt, who)
                    elif not engine.overdue():
                        if self._drops(state, n, block):
                            return None
                        wait = wait or self._wait(n, timeout, cancel)
                        ticket = self._ticket(state, n, block, wait)
                finally:
                    engine.control.mutex.unlock()
                if block is None:
                    engine.slots.prepare_eviction(engine.control.peek())
                elif ticket is None or wait is None:
                    engine.forget_dead(wait)  # what these had reserved may be all that is missing
                else:
                    engine.refuse_endless("extend", n, state)
                    wait.sleep(engine.space_event, ticket, partial(engine.explain_block, "extend", n, block))
        except BaseException:
            if wait is not None and wait.role == PRESSING:  # others may wait because of this one
                wait.leave()
                engine.space_event.notify_all()
            raise
        finally:
            if wait is not None:
                try:
                    wait.leave()
                finally:  # once more: Ctrl-C may come on the way in
                    wait.leave()

    def _wait(self, n: int, timeout: float | None, cancel: Any) -> Wait:
        return Wait(self._engine.memory, f"extend({n})", PRODUCER, n, timeout, cancel)

    def _still_blocked(self, n: int, wait: Wait) -> bool:
        """After a wake-up: sleep again without queueing for the lock, where that changed nothing for this write."""
        engine = self._engine
        ticket = engine.ticket_again(engine.space_event) if wait.listed else None
        if ticket is None or engine.overdue():
            return False
        state = engine.control.peek()
        block = None if state[CLOSED] else engine.insert_block(state, n)
        if block is None:
            return False
        wait.sleep(engine.space_event, ticket, partial(engine.explain_block, "extend", n, block))
        return True

    def _drops(self, state: State, n: int, block: Block) -> bool:
        """Under the lock: what the admission policy says where there is no room. True: the items are dropped."""
        engine = self._engine
        engine.refuse_impossible("extend", n, state, block)
        if engine.flow.admission == "raise":
            raise BufferFull(f"extend({n}): {block.reason}")
        if engine.flow.admission != "drop_newest":
            return False
        state[DROPPED] += n
        engine.commit(state)
        return True

    def _ticket(self, state: State, n: int, block: Block, wait: Wait) -> int:
        """Under the lock: before this thread sleeps."""
        engine = self._engine
        if wait.timeout == 0:
            raise DeadlineExceeded(f"extend({n}): {block.reason}")
        if engine.marked and not state[PRESSURE] and pressure(engine.flow, engine.counts(state), n):
            state[PRESSURE] = 2
            engine.commit(state)
        if engine.marked and pressure(engine.flow, engine.counts(state)._replace(under_pressure=False), n):
            wait.role = PRESSING
        return engine.count_block(state, wait, PRODUCER_BLOCKS, engine.space_event)

    def _write(
        self,
        state: State,
        rows: torch.Tensor,
        weighed: Weighed | None,
        excess: int,
        receipt: tuple[int, int] | None,
        who: int | None,
    ) -> Ints:
        """Under the lock. ``state`` has the evictions, not yet committed."""
        engine, n = self._engine, rows.shape[0]
        assert engine.rows is not None
        engine.control.begin(state, n, state[HEAD])
        if excess > 0:  # what will be overwritten ceases to exist first
            engine.commit(state)
        if engine.unlimited:
            state[EXEMPT_WRITES] += max(0, state[WRITES] + n - max(engine.flow.min_size, state[WRITES]))
        passed = n - engine.capacity
        if passed > 0:  # the first ones are overwritten by the last ones of the same write
            engine.slots.skip(state, passed)
            rows, weighed = rows[passed:], None if weighed is None else weighed.part(slice(passed, None))
        slots = engine.slots.place(state, len(rows))
        if engine.order is not None:
            engine.order.note(state, slots, who)
        if isinstance(engine.slots, Ring):
            engine.rows.write_run(state[HEAD] % engine.capacity, rows)
        else:
            engine.rows.write_at(slots, rows)
        if engine.priorities is not None:
            engine.priorities.wrote(slots, weighed)
        engine.slots.add(state, slots, len(rows))
        if not engine.unlimited:
            state[LAST_INSERT] = n
        if engine.marked:
            engine.press(state)
        if receipt is not None:
            state[RECEIPT_LINE], state[RECEIPT_NUMBER] = receipt[0] + 1, receipt[1]
        engine.control.settle(state)
        engine.commit(state, engine.items_event)
        return slots
