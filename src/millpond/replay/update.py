"""Looking at, and changing, what a buffer holds, apart from writing and sampling."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from millpond.core.errors import InvalidArgument, InvalidType, NotReady, OutOfRange
from millpond.core.intake import Batch, tensor_of
from millpond.replay.config import refuse_nonfinite
from millpond.replay.engine import Engine
from millpond.replay.rows import Journal
from millpond.replay.sample import TRIES
from millpond.replay.samplers.protocol import Ints, State
from millpond.replay.samplers.uniform import SamplerWithoutReplacement
from millpond.replay.slots import Ring
from millpond.replay.state import (
    CLOSED,
    EMPTIED,
    EPOCH_CURSOR,
    EPOCH_SIZE,
    HEAD,
    LIVE,
    OVERWRITTEN,
    REDO,
    REWRITES,
    STALE,
    TAKES,
)
from millpond.replay.view import every
from millpond.replay.waiting import bury_dead

CHUNK = 4096
_INDEX = "an index is an integer, several, a slice, or a mask"


class Updater:
    """What `ReplayBuffer` does besides extend and sample."""

    def __init__(self, engine: Engine, *, check_finite: bool) -> None:
        self._engine, self._check_finite = engine, check_finite
        self._look = np.random.default_rng()
        self._journal: Journal | None = None
        engine.recover_rows = self._finish_rewrite

    # ------------------------------------------------------------------ looking
    def peek(self, n: int) -> tuple[torch.Tensor, Ints, Ints]:
        """Rows, slots and numbers of n uniformly chosen items."""
        return self._read(lambda size: self._look.integers(0, size, n), by_age=False)

    def pick(self, which: Any) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Rows of the items that ``which`` names by age, and the shape of the index: ``()`` where it names one."""
        index = index_of(which)
        rows = self._read(partial(positions_of, index), by_age=True)[0]
        own_shape = not isinstance(index, slice) and index.dtype != np.bool_
        return rows, index.shape if own_shape else (rows.shape[0],)  # type: ignore[union-attr]  # mypy forgets which

    def _read(self, choose: Callable[[int], Ints], *, by_age: bool) -> tuple[torch.Tensor, Ints, Ints]:
        """Rows of items, all live at one moment. ``choose(size)`` gives their positions: by age, or in any order."""
        engine = self._engine
        for attempt in range(TRIES + 1):
            state = engine.control.peek()
            if state[CLOSED]:
                engine.refuse_closed(state, "look", 0)
            rows = engine.rows
            if rows is None and engine.find_rows():
                rows = engine.rows
            if by_age and not state[LIVE]:
                choose(0)  # an index into nothing is out of range
            if rows is None or not (by_age or state[LIVE]):
                raise NotReady("there is no item to look at")
            if attempt == TRIES:
                try:
                    state = engine.load()
                    engine.refuse_closed(state, "look", 0)
                    if not (by_age or state[LIVE]):
                        raise NotReady("there is no item to look at")
                    slots, numbers = self._choose(state, choose, by_age)
                    return rows.gather(slots), slots, numbers
                finally:
                    engine.control.mutex.unlock()
            if state[REDO]:
                continue  # committed, but not yet applied: the slots' arrays are older than the state
            slots, numbers = self._choose(state, choose, by_age)
            found = rows.read(slots)
            try:
                now = engine.load()
                same = now[REWRITES] == state[REWRITES] and now[EMPTIED] == state[EMPTIED]
                if same and by_age and engine.distinct:  # items change places when others leave: read at one moment?
                    same = all(now[word] == state[word] for word in (TAKES, HEAD, OVERWRITTEN))
                if same and every(engine.slots.alive(now, slots, numbers)):
                    return found, slots, numbers
            finally:
                engine.control.mutex.unlock()
        raise AssertionError("unreachable")

    def _choose(self, state: State, choose: Callable[[int], Ints], by_age: bool) -> tuple[Ints, Ints]:
        kept = self._engine.slots
        if isinstance(kept, Ring) or not by_age:  # a ring's positions are by age
            return kept.at(state, choose(state[LIVE]))
        slots, numbers = kept.since(state, 0)
        positions = choose(len(slots))
        return slots[positions], numbers[positions]

    def epoch_over(self, n: int) -> bool:
        """Was the last batch of the epoch drawn? False for samplers without epochs."""
        sampler: Any = self._engine.sampler
        while not isinstance(sampler, SamplerWithoutReplacement):
            sampler = getattr(sampler, "base", None)
            if sampler is None:
                return False
        state = self._engine.control.peek()
        left = state[EPOCH_SIZE] - state[EPOCH_CURSOR]
        return left == 0 or (sampler.drop_last and left < n)

    # ------------------------------------------------------------------ changing
    def update_priority(self, index_or_sample: Any, priority: Any) -> int:
        """See ``ReplayBuffer.update_priority``."""
        engine = self._engine
        priorities = engine.priorities
        if priorities is None:
            raise InvalidArgument(f"update_priority needs a PrioritizedSampler, this buffer has {engine.sampler!r}")
        slots, numbers = self.named(index_or_sample)
        weighed = priorities.weigh(priority, len(slots))
        if numbers is not None:
            done = engine.fast_path.set_leaves(slots, numbers, weighed)
            if done is not None:
                return done
        applied = 0
        for a in range(0, len(slots), CHUNK):
            part = slice(a, a + CHUNK)
            if engine.rows is None and not engine.find_rows():
                raise NotReady("there is no item whose priority could change")
            if numbers is None:  # whatever is there now
                expected = engine.slots.number(engine.control.peek(), slots[part])
            else:
                expected = numbers[part]
            try:
                state = engine.load()
                engine.refuse_closed(state, "update_priority", len(slots))
                alive = engine.slots.alive(state, slots[part], expected)
                every_one = every(alive)
                chosen = slots[part] if every_one else slots[part][alive]
                engine.control.begin(state, len(chosen))
                mine = weighed.part(part)
                priorities.set_leaves(chosen, mine if every_one else mine.part(alive))
                engine.control.settle(state)
                state[STALE] += len(alive) - len(chosen)
                engine.commit(state, engine.control.events[0])
                applied += len(chosen)
            finally:
                engine.control.mutex.unlock()
        return applied

    def update(self, index_or_sample: Any, patch: Batch) -> int:
        """See ``ReplayBuffer.update``."""
        engine = self._engine
        if engine.rows is None and not engine.find_rows():
            raise NotReady("there is no item to update")
        assert engine.rows is not None
        slots, numbers = self.named(index_or_sample)
        fields = engine.rows.schema.check_patch(patch, len(slots))
        if self._check_finite:
            refuse_nonfinite(fields)
        engine.refuse_closed(engine.control.peek(), "update", len(slots))  # its files are gone by then
        if self._journal is None:
            with engine.memory.files():
                self._journal = Journal(engine.memory.path, engine.rows.schema.row_nbytes)
        applied = 0
        for a in range(0, len(slots), Journal.LIMIT):
            part = slice(a, a + Journal.LIMIT)
            applied += self._update_chunk(slots[part], None if numbers is None else numbers[part], fields, part)
        return applied

    def _update_chunk(self, slots: Ints, numbers: Ints | None, fields: dict[Any, torch.Tensor], part: slice) -> int:
        engine, journal, rows = self._engine, self._journal, self._engine.rows
        assert journal is not None
        assert rows is not None
        while True:
            state = engine.control.peek()
            expected = engine.slots.number(state, slots) if numbers is None else numbers
            patched = rows.read(slots).clone()
            for key, value in fields.items():
                rows.schema.column(patched, key).copy_(value[part])
            try:
                now = engine.load()
                engine.refuse_closed(now, "update", len(slots))
                if now[REWRITES] != state[REWRITES]:
                    continue  # somebody else rewrote rows since we read ours
                alive = engine.slots.alive(now, slots, expected)
                now[STALE] += len(slots) - int(alive.sum())
                if alive.any():
                    journal.note(slots[alive], patched[torch.from_numpy(alive)])
                    engine.control.begin(now)  # whatever ends this half-way, the next holder finishes it
                    now[REWRITES] += (
                        1  # odd: whoever gathered before gathers again, whoever dies is finished by the next
                    )
                    engine.commit(now)
                    journal.apply(rows)
                    now[REWRITES] += 1
                    if engine.order is not None:
                        engine.order.edited(fields)
                    engine.control.settle(now)
                engine.commit(now)
                return int(alive.sum())
            finally:
                engine.control.mutex.unlock()

    def _finish_rewrite(self) -> None:
        """Under the lock, after a death or an exception in the middle of `update`: also in a process that never looked
        at the rows before."""
        engine, path = self._engine, self._engine.memory.path
        if engine.rows is None:
            engine.find_rows()
        assert engine.rows is not None  # they were being rewritten
        with engine.memory.files():
            journal = self._journal if path is None else Journal(path, engine.rows.schema.row_nbytes)
        if journal is not None:
            journal.apply(engine.rows)
        if engine.order is not None:  # the fields are not known any more
            engine.order.edited(engine.order.keys)

    def named(self, index_or_sample: Any) -> tuple[Ints, Ints | None]:
        """As `named`. Raises ``InvalidArgument`` where there is no such slot."""
        slots, numbers = named(index_or_sample)
        # as unsigned numbers those below 0 are the largest
        if slots.size and np.maximum.reduce(slots.view(np.uint64)) >= self._engine.capacity:
            raise InvalidArgument(f"slots {slots.min()} to {slots.max()} are outside 0 to {self._engine.capacity - 1}")
        return slots, numbers

    # ------------------------------------------------------------------ taking over
    def reopen(self) -> None:
        """This process took the buffer over: nobody waits, nobody has reserved, it is open again."""
        engine = self._engine
        bury_dead(engine.control)
        try:
            state = engine.load()
            state[CLOSED] = 0
            engine.commit(state)
        finally:
            engine.control.mutex.unlock()


def named(index_or_sample: Any) -> tuple[Ints, Ints | None]:
    """Slots, and the numbers that they should hold where a sample is given.

    Raises ``InvalidType`` or ``InvalidArgument`` for what names no items.
    """
    kind = type(index_or_sample)
    if kind is not TensorDict and not issubclass(kind, TensorDictBase):  # the latter is slow
        if isinstance(index_or_sample, slice):
            raise InvalidType(f"slots are integers, not {index_or_sample}: give torch.arange(…), or a sampled batch")
        return _int64("index", _indices(index_or_sample)), None
    index, generation = index_or_sample.get("index", None), index_or_sample.get("generation", None)
    if index is None or generation is None:
        missing = "index" if index is None else "generation"
        raise InvalidArgument(f"this batch has no '{missing}': is it one that sample() returned?")
    slots, numbers = _int64("index", _indices(index)), _int64("generation", _indices(generation))
    if len(numbers) != len(slots):
        raise InvalidArgument(f"{len(slots)} slots came with {len(numbers)} generations")
    return slots, numbers


def index_of(which: Any) -> slice | Ints:
    """What stands in ``buffer[which]``: a slice of integers, or an array of integers or of booleans.

    Raises ``InvalidType`` or ``InvalidArgument`` for what is no index.
    """
    if isinstance(which, slice):
        try:
            parts = [None if part is None else operator.index(part) for part in (which.start, which.stop, which.step)]
        except TypeError as problem:
            raise InvalidType(f"a slice is of integers, not {which!r:.60}") from problem
        if parts[2] == 0:
            raise InvalidArgument("the step of a slice is not 0")
        return slice(*parts)
    if isinstance(which, (bool, tuple)):  # to torch these are other dimensions
        raise InvalidType(f"{_INDEX}, not {which!r:.60}")
    if isinstance(which, int) and not -(1 << 63) <= which < 1 << 63:
        raise OutOfRange(f"there is no item {which}")
    index = _indices(which)
    if (index.dtype is torch.uint8 and index.dim()) or index.is_floating_point() or index.is_complex():
        advice = ": say .bool() for a mask, .long() for indices" if index.dtype is torch.uint8 else ""
        raise InvalidType(f"{_INDEX}, not {index.dtype}{advice}")
    return index.numpy(force=True)


def positions_of(index: slice | Ints, size: int) -> Ints:
    """The positions that an index names among ``size`` items."""
    if isinstance(index, slice):
        return np.arange(*index.indices(size))
    if index.dtype == np.bool_:
        if index.shape != (size,):
            raise OutOfRange(f"a mask for {size} items has shape [{size}], not {list(index.shape)}")
        return np.flatnonzero(index)
    flat = index.reshape(-1)
    if flat.size and not (-size <= int(flat.min()) and int(flat.max()) < size):
        what = f"items {flat.min()} to {flat.max()}" if flat.size > 1 else f"item {flat[0]}"
        raise OutOfRange(f"{what} of {size}")
    flat = flat.astype(np.int64)
    return np.asarray(flat % size if size else flat, np.int64)


def _indices(given: Any) -> torch.Tensor:
    """Raises ``InvalidType`` for what holds no numbers. An empty list is one of integers."""
    if type(given) is torch.Tensor and given.layout is torch.strided:
        return given
    if isinstance(given, range) or (isinstance(given, (list, tuple)) and not given):
        return torch.tensor(list(given), dtype=torch.int64)
    try:
        return tensor_of(("index",), given)
    except InvalidArgument as problem:
        raise InvalidType(f"{_INDEX}, not {given!r:.60}") from problem


def _int64(name: str, tensor: torch.Tensor) -> Ints:
    """One-dimensional and contiguous, on the CPU; a copy only where it must be."""
    if tensor.dtype is not torch.int64 or tensor.device.type != "cpu" or tensor.dim() != 1:
        if tensor.dtype is torch.bool or tensor.is_floating_point() or tensor.is_complex():
            raise InvalidType(f"{name} is of an integer type, not {tensor.dtype}")
        tensor = tensor.detach().to("cpu", torch.int64).reshape(-1)
    array: Ints = tensor.numpy()
    return array if array.flags.carray else array.copy()
