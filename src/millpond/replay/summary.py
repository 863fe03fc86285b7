"""The figures of a buffer: the same keys from every kind."""

from __future__ import annotations

from typing import Any

from millpond.core.schema import Schema
from millpond.replay import state as words
from millpond.replay.drawing import State
from millpond.replay.engine import Engine


def stats(engine: Engine, schema: Schema | None) -> dict[str, Any]:
    """Counters at one moment, after whoever died was taken off the table of waiters."""
    control = engine.control
    control.bury_dead(lambda state, lines: _forget(state, lines))
    try:
        state = engine.load()
        waiting = control.waiting()
    finally:
        control.mutex.unlock()
    flow = engine.flow
    return {
        "capacity": engine.capacity,
        "size": state[words.LIVE],
        "storage_size": state[words.STORED],
        "nbytes": engine.capacity * schema.row_nbytes if schema is not None else 0,
        "write_count": state[words.WRITES],
        "sample_calls": state[words.CALLS],
        "samples_returned": state[words.RETURNED],
        "prefetched": state[words.PREFETCHED],
        "reserved": state[words.RESERVED],
        "overwritten": state[words.OVERWRITTEN],
        "consumed": state[words.CONSUMED],
        "dropped": state[words.DROPPED],
        "stale_updates": state[words.STALE],
        "producer_blocks": state[words.PRODUCER_BLOCKS],
        "consumer_blocks": state[words.CONSUMER_BLOCKS],
        "waiting_producers": sum(w.role == words.PRODUCER for w in waiting),
        "waiting_consumers": sum(w.role == words.CONSUMER for w in waiting),
        "high_watermark": flow.high_watermark if flow.high_watermark is not None else engine.capacity,
        "low_watermark": flow.low_watermark,
        "under_pressure": bool(state[words.PRESSURE]),
        "lock": control.kind,
        "recoveries": state[control.RECOVERIES],
        "discarded_writes": state[control.DISCARDED],
    }


def _forget(state: State, lines: Any) -> None:
    """Reservations of the dead return."""
    for line in lines:
        items, batches = line.reserved
        state[words.RESERVED] = max(0, state[words.RESERVED] - items)
        state[words.PREFETCHED] = max(0, state[words.PREFETCHED] - batches)
