"""The usual write, the usual samples and the usual change of priorities as one compiled step each.

`Writer`, `Reader` and `Updater` ask here first. What is not usual gets None for an answer, nothing was changed, and
they do it their way, as they do everything where there is no Numba. Usual is: a buffer in memory of this host that
keeps the order of writing, with robust locks and without watermarks; and a lock that is free, or soon is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from millpond.replay import state as words
from millpond.replay.batch import BatchMemory
from millpond.replay.kernels import loading as kernels
from millpond.replay.samplers.prioritized import PrioritizedSampler, Weighed
from millpond.replay.samplers.protocol import Ints
from millpond.replay.samplers.uniform import ConsumingSampler, RandomSampler
from millpond.replay.slots import Queue, Ring
from millpond.shm.control import ORDERED, OWN_WORDS
from millpond.shm.identity import me

if TYPE_CHECKING:
    from millpond.replay.engine import Engine

WORTH_CALLS = 10_000  # in the ordinary way; what they could have saved is then about what loading Numba costs
MOST_BYTES = 1 << 20  # of rows at a time, about 0.3 ms: the kernels keep the GIL
TRIES = 4
LARGEST_RATE, LARGEST_SIZE = 1 << 20, 1 << 40  # so that 64 bits are enough for 10¹² items
DONE, AGAIN, SLOW = 0, -1, -2  # answers of the kernels


class FastPath(Protocol):
    """Each method answers None where the ordinary way must be gone; then nothing was changed."""

    def sample(self, n: int, into: BatchMemory | None = None) -> BatchMemory | None:
        """n items, counted as delivered: in ``into`` if that is given, else in a new one."""

    def put(self, rows: torch.Tensor, receipt: tuple[int, int] | None, who: int | None = None) -> Ints | None:
        """Write rows, and wake whoever waits for them. Their slots. ``who`` writes, if not this thread."""

    def set_leaves(self, slots: Ints, numbers: Ints, weighed: Weighed) -> int | None:
        """Give items other leaves in the sum tree. How many."""


class NoFastPath:
    """Where there is none."""

    def sample(self, n: int, into: BatchMemory | None = None) -> BatchMemory | None:
        return None

    def put(self, rows: torch.Tensor, receipt: tuple[int, int] | None, who: int | None = None) -> Ints | None:
        return None

    def set_leaves(self, slots: Ints, numbers: Ints, weighed: Weighed) -> int | None:
        return None


class LaterFastPath:
    """None yet; after ``calls`` in the ordinary way, and after the first sample where there are many rows, the
    compiled one takes its place as soon as it is loaded."""

    def __init__(self, engine: Engine, calls: int, *, many: bool) -> None:
        self._engine, self._left, self._many = engine, calls, many

    def sample(self, n: int, into: BatchMemory | None = None) -> BatchMemory | None:
        if self._many:
            self._left = 0
        self._count()
        return None

    def put(self, rows: torch.Tensor, receipt: tuple[int, int] | None, who: int | None = None) -> Ints | None:
        self._count()
        return None

    def set_leaves(self, slots: Ints, numbers: Ints, weighed: Weighed) -> int | None:
        self._count()
        return None

    def _count(self) -> None:
        self._left -= 1
        if self._left <= 0:
            compiled = kernels.request()
            if compiled is not None:
                self._engine.fast_path = CompiledFastPath(self._engine, compiled)


def fast_path_for(engine: Engine) -> FastPath:
    """What an engine whose rows are bound begins with."""
    rows, slots, flow = engine.rows, engine.slots, engine.flow
    usual = (
        ORDERED
        and engine.control.kind == "robust"
        and (type(slots) is Ring or (type(slots) is Queue and slots.deliveries == 1))
        and max(flow.rate_above, flow.rate_below, flow.debt_limit or 0) <= LARGEST_RATE
        and flow.min_size <= LARGEST_SIZE
        and not engine.marked
    )
    if rows is None or not rows.raw or not usual:
        return NoFastPath()
    return LaterFastPath(engine, WORTH_CALLS, many=rows.vast)


class CompiledFastPath:
    """With the kernels of `ring`."""

    def __init__(self, engine: Engine, compiled: Any) -> None:
        assert engine.rows is not None
        self._engine, self._kernels = engine, compiled
        self._rows = engine.rows
        self._width = engine.rows.schema.row_nbytes // 8
        self._most = MOST_BYTES // engine.rows.schema.row_nbytes
        self._plan, self._memory = _plan(engine, compiled)
        self._limited = engine.flow.min_size > 0 or engine.flow.samples_per_insert is not None
        self._take = self._way(engine)
        self._sets = type(engine.priorities) is PrioritizedSampler  # one of the user's may do it otherwise

    def _way(self, engine: Engine) -> Callable[[int, int, BatchMemory], int] | None:
        if type(engine.sampler) is ConsumingSampler:
            return self._take_oldest
        if type(engine.sampler) is RandomSampler and not engine.distinct:
            return self._take_uniform
        if type(engine.sampler) is PrioritizedSampler and not engine.distinct:
            return self._take_prioritized
        return None

    def sample(self, n: int, into: BatchMemory | None = None) -> BatchMemory | None:
        engine, control, take = self._engine, self._engine.control, self._take
        if take is None or n > self._most or engine.unlimited or control.hook is not None:
            return None
        for _ in range(TRIES):
            state = control.glance()
            live = state[words.LIVE]
            if not live or state[words.CLOSED] or (self._limited and not self._may_sample(state, n)):
                return None  # before a random number is drawn
            if into is None:
                into = BatchMemory(n, self._width)
            into.emptied = take(n, live, into)
            if into.emptied >= 0:
                return into
            if into.emptied == SLOW:
                return None
        return None

    def _may_sample(self, state: memoryview, n: int) -> bool:
        flow = self._engine.flow
        beyond = state[words.WRITES] - flow.min_size
        if beyond < 0 or not flow.rate_above:
            return beyond >= 0
        drawn = state[words.RETURNED] + state[words.RESERVED] - state[words.EXEMPT_SAMPLES]
        allowed = flow.rate_above * (beyond - state[words.EXEMPT_WRITES])
        return (drawn + n) * flow.rate_below <= allowed

    def _take_uniform(self, n: int, live: int, into: BatchMemory) -> int:
        torch.randint(live, (n,), generator=self._engine.random.torch, out=into.generation)
        code: int = self._kernels.take_uniform(self._plan, n, live, *into.addresses())
        return code

    def _take_oldest(self, n: int, live: int, into: BatchMemory) -> int:
        code: int = self._kernels.take_oldest(self._plan, n, *into.addresses())
        return code

    def _take_prioritized(self, n: int, live: int, into: BatchMemory) -> int:
        sampler: Any = self._engine.sampler
        state = self._engine.control.glance()
        if not sampler.tree.total > 0.0 or sampler.due(state):
            return SLOW
        beta = sampler.beta_at(state)
        mass = torch.rand(n, generator=self._engine.random.torch, dtype=torch.float64)
        shares = torch.empty(n, dtype=torch.float64)
        code: int = self._kernels.take_prioritized(
            self._plan, n, sampler.stratified, mass.data_ptr(), shares.data_ptr(), *into.addresses()
        )
        if code >= 0:
            into.extra = sampler.weights(shares.numpy(), beta)
        return code

    def put(self, rows: torch.Tensor, receipt: tuple[int, int] | None, who: int | None = None) -> Ints | None:
        engine, n = self._engine, rows.shape[0]
        if n > self._most or engine.unlimited or engine.control.hook is not None or self._rows.hook is not None:
            return None
        slots = np.empty(n, np.int64)
        line, number = (0, 0) if receipt is None else (receipt[0] + 1, receipt[1])
        if number >> 63:  # the kernels' numbers have a sign
            return None
        writer = 0 if engine.order is None else engine.order.writer(who)
        code = self._kernels.put(self._plan, me()[0], rows.data_ptr(), line, number, writer, slots)
        return slots if code == DONE else None

    def set_leaves(self, slots: Ints, numbers: Ints, weighed: Weighed) -> int | None:
        if not self._sets or not 0 < len(slots) <= self._most or self._engine.control.hook is not None:
            return None
        done: int = self._kernels.set_leaves(
            self._plan, me()[0], weighed.version, slots, numbers, weighed.priorities, weighed.leaves
        )
        return done if done >= 0 else None


def _plan(engine: Engine, compiled: Any) -> tuple[Ints, tuple[Any, ...]]:
    """Where the kernels find the memory and the words of an engine; and what must live as long as that memory is
    used."""
    control, rows = engine.control, engine.rows
    assert rows is not None
    addresses, control_memory = control.addresses()
    receipts = np.frombuffer(engine.memory.array("receipts"), np.int64)
    kept: list[Any] = [control_memory, rows, receipts]
    given = {
        **dict.fromkeys(("TREE", "TREE_WORDS", "OFFSETS", "SIZES", "LEVELS", "PRIORITIES", "SETTINGS"), 0),
        **addresses,
        **{name: index for name, index in vars(words).items() if isinstance(index, int)},
        "ROWS": rows.base,
        "RECEIPTS": receipts.ctypes.data,
        "WRITER": 0 if engine.order is None else engine.order.address,
        "WIDTH": rows.schema.row_nbytes // 8,
        "CAPACITY": engine.capacity,
        "OVERWRITES": int(engine.flow.admission == "overwrite"),
        "MIN_SIZE": engine.flow.min_size,
        "RATE_ABOVE": engine.flow.rate_above,
        "RATE_BELOW": engine.flow.rate_below,
        "DEBT_LIMIT": -1 if engine.flow.debt_limit is None else engine.flow.debt_limit,
        "SETTLED": control.SETTLED,
        "RECORD_WORDS": control.words + OWN_WORDS,
    }
    if type(engine.priorities) is PrioritizedSampler:
        tree = engine.priorities.tree
        memory, offsets, sizes = tree.arguments
        settings = np.frombuffer(engine.priorities.settings.memory, np.uint8)
        kept += [memory, offsets, sizes, tree.values, settings]
        given |= {
            "TREE": memory.ctypes.data,
            "TREE_WORDS": len(memory),
            "OFFSETS": offsets.ctypes.data,
            "SIZES": sizes.ctypes.data,
            "LEVELS": len(sizes),
            "PRIORITIES": tree.values.ctypes.data,
            "SETTINGS": settings.ctypes.data,
        }
    return np.array([given[name] for name in compiled.PLAN], np.int64), tuple(kept)
