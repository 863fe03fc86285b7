"""The figures of a buffer: the same keys from every kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millpond.core.errors import DeadlineExceeded, PeerLost
from millpond.core.schema import Schema
from millpond.replay import state as words
from millpond.replay.engine import Engine
from millpond.replay.samplers.protocol import State
from millpond.replay.waiting import SLOWEST, bury_dead
from millpond.shm.control import Waiter
from millpond.shm.holding import stopped


def stats(engine: Engine, schema: Schema | None) -> dict[str, Any]:
    """Counters at one moment, after whoever died was taken off the table of waiters.

    While a thread holds the lock and is stopped, and where the owner died and nobody can finish what was cut off: the
    state that was committed last, and those in the table.
    """
    control, brief = engine.control, _Brief()
    try:
        bury_dead(control, held_up=brief.held_up)
        state = engine.load(brief)
        waiting = control.waiting()
    except (DeadlineExceeded, PeerLost):
        state, waiting = control.peek(), control.waiting()
    finally:
        control.mutex.unlock()
    return figures(engine, schema, state, waiting)


class _Brief:
    """The patience of a look."""

    def held_up(self, holder: int, seconds: float) -> None:
        if seconds >= SLOWEST or stopped(holder):
            raise DeadlineExceeded(f"the lock is held by thread {holder}")


def figures(engine: Engine, schema: Schema | None, state: State, waiting: Sequence[Waiter]) -> dict[str, Any]:
    """The keys of `stats`, from a state and those who wait."""
    flow, control = engine.flow, engine.control
    return {
        "capacity": engine.capacity,
        "nbytes": engine.capacity * schema.row_nbytes if schema is not None else 0,
        **counted(state),
        "waiting_producers": sum(w.role in (words.PRODUCER, words.PRESSING) for w in waiting),
        "waiting_consumers": sum(w.role == words.CONSUMER for w in waiting),
        "high_watermark": flow.high_watermark if flow.high_watermark is not None else engine.capacity,
        "low_watermark": flow.low_watermark,
        "under_pressure": engine.pressed(state),
        "lock": control.kind,
        "recoveries": state[control.RECOVERIES],
        "discarded_writes": state[control.DISCARDED],
    }


def counted(state: State) -> dict[str, int]:
    """Those that are words of the state."""
    return {name: state[word] for name, word in _WORDS.items()}


_WORDS = {
    "size": words.LIVE,
    "storage_size": words.STORED,
    "write_count": words.WRITES,
    "sample_calls": words.CALLS,
    "samples_returned": words.RETURNED,
    "prefetched": words.PREFETCHED,
    "reserved": words.RESERVED,
    "overwritten": words.OVERWRITTEN,
    "consumed": words.CONSUMED,
    "dropped": words.DROPPED,
    "stale_updates": words.STALE,
    "producer_blocks": words.PRODUCER_BLOCKS,
    "consumer_blocks": words.CONSUMER_BLOCKS,
}
