"""Looking at, and changing, what a buffer holds, apart from writing and sampling."""

from __future__ import annotations

import numbers as python_numbers
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from millpond.core.errors import InvalidArgument, InvalidType, NotReady, SchemaMismatch
from millpond.core.schema import Batch, Schema, leaves_of, tensor_of
from millpond.replay.drawing import Ints, State
from millpond.replay.engine import Engine
from millpond.replay.rows import Journal
from millpond.replay.samplers import SamplerWithoutReplacement
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
from millpond.replay.taking import TRIES
from millpond.replay.view import every
from millpond.replay.waiting import bury_dead

CHUNK = 4096


class Editor:
    """What `ReplayBuffer` does besides extend and sample."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._look = np.random.default_rng()
        self._journal: Journal | None = None
        engine.recover_rows = self._finish_rewrite

    # ------------------------------------------------------------------ looking
    def peek(self, n: int) -> tuple[torch.Tensor, Ints, Ints]:
        """Rows, slots and numbers of n uniformly chosen items."""
        return self._read(lambda size: self._look.integers(0, size, n), by_age=False)

    def pick(self, which: Any) -> tuple[torch.Tensor, bool]:
        """Rows of the items that ``which`` names by age, and whether it named one alone."""
        single = isinstance(which, python_numbers.Integral) and not isinstance(which, bool)
        if not single and not isinstance(which, slice):
            which = _indices(which)
            if which.dtype is not torch.bool and (which.is_floating_point() or which.is_complex()):
                raise InvalidType(f"an index is an integer, a slice, or a mask, not {which.dtype}")
            which = which.cpu().numpy()

        def positions(size: int) -> Ints:
            if isinstance(which, slice):
                return np.arange(*which.indices(size))
            if single:
                if not -size <= int(which) < size:
                    raise IndexError(f"item {int(which)} of {size}")
                return np.array([int(which) % size], np.int64)
            if which.dtype == np.bool_:
                if which.shape != (size,):
                    raise InvalidArgument(f"a mask for {size} items has shape [{size}], not {list(which.shape)}")
                return np.flatnonzero(which)
            index = which.reshape(-1).astype(np.int64)
            if index.size and not (-size <= index.min() and index.max() < size):
                raise IndexError(f"items {index.min()} to {index.max()} of {size}")
            return np.asarray(index % size if size else index, np.int64)

        if isinstance(which, slice) and self._engine.control.peek()[LIVE] == 0 and self._engine.rows is not None:
            return self._engine.rows.read(np.empty(0, np.int64)), False
        return self._read(positions, by_age=True)[0], single

    def _read(self, choose: Callable[[int], Ints], *, by_age: bool) -> tuple[torch.Tensor, Ints, Ints]:
        """Rows of items, all live at one moment. ``choose(size)`` gives their positions: by age, or in any order."""
        engine = self._engine
        for attempt in range(TRIES + 1):
            state = engine.control.peek()
            if state[CLOSED]:
                engine.refuse_closed(state, "look", 0)
            if state[LIVE] == 0 or (engine.rows is None and not engine.find_rows()):
                raise NotReady("there is no item to look at")
            rows = engine.rows
            assert rows is not None
            if attempt == TRIES:
                try:
                    state = engine.load()
                    engine.refuse_closed(state, "look", 0)
                    if state[LIVE] == 0:
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
        slots, numbers = self._named(index_or_sample)
        leaves = priorities.leaves(priority, len(slots))
        if numbers is not None:
            done = engine.shortcut.set_leaves(slots, numbers, leaves)
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
                priorities.set_leaves(chosen, leaves[part] if every_one else leaves[part][alive])
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
        slots, numbers = self._named(index_or_sample)
        fields = self._patch(engine.rows.schema, patch, len(slots))
        if self._journal is None:
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
                    engine.control.settle(now)
                engine.commit(now)
                return int(alive.sum())
            finally:
                engine.control.mutex.unlock()

    def _finish_rewrite(self) -> None:
        """Under the lock, after a death or an exception in the middle of `update`."""
        rows, path = self._engine.rows, self._engine.memory.path
        if rows is not None and path is not None:
            Journal(path, rows.schema.row_nbytes).apply(rows)
        elif rows is not None and self._journal is not None:
            self._journal.apply(rows)

    def _patch(self, schema: Schema, patch: Batch, n: int) -> dict[Any, torch.Tensor]:
        fields = {}
        for key, value in leaves_of(patch):
            field = schema.by_key.get(key)
            if field is None:
                raise SchemaMismatch(
                    f"{'/'.join(key) or 'a value without a key'} is not among the fields of {schema!r}"
                )
            tensor = tensor_of(key, value).detach().cpu()
            if tensor.dtype is not field.dtype or tuple(tensor.shape) != (n, *field.shape):
                raise SchemaMismatch(
                    f"{field.name}: expected {field.describe()} for each of {n} items, "
                    f"got {tensor.dtype} {list(tensor.shape)}"
                )
            fields[key] = tensor
        if not fields:
            raise SchemaMismatch("the patch has no field")
        return fields

    def _named(self, index_or_sample: Any) -> tuple[Ints, Ints | None]:
        """Slots, and the numbers that they should hold where a sample is given."""
        numbers = None
        if type(index_or_sample) is TensorDict or isinstance(index_or_sample, TensorDictBase):  # the latter is slow
            index, generation = index_or_sample.get("index", None), index_or_sample.get("generation", None)
            if index is None or generation is None:
                missing = "index" if index is None else "generation"
                raise InvalidArgument(f"this batch has no '{missing}': is it one that sample() returned?")
            numbers = _int64(generation)
        else:
            index = index_or_sample
        index = _indices(index)
        if index.dtype is not torch.int64 and (
            index.dtype is torch.bool or index.is_floating_point() or index.is_complex()
        ):
            raise InvalidType(f"index is of an integer type, not {index.dtype}")
        slots = _int64(index)
        # as unsigned numbers those below 0 are the largest
        if slots.size and np.maximum.reduce(slots.view(np.uint64)) >= self._engine.capacity:
            raise InvalidArgument(f"slots {slots.min()} to {slots.max()} are outside 0 to {self._engine.capacity - 1}")
        if numbers is not None and len(numbers) != len(slots):
            raise InvalidArgument(f"{len(slots)} slots came with {len(numbers)} generations")
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


def _indices(given: Any) -> torch.Tensor:
    """Raises ``InvalidType`` for what holds no numbers. An empty list is one of integers."""
    if isinstance(given, torch.Tensor):
        return given
    try:
        index = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError, OverflowError) as problem:
        raise InvalidType(f"an index is an integer, several, a slice, or a mask, not {given!r:.60}") from problem
    return index.to(torch.int64) if isinstance(given, (list, tuple)) and not index.numel() else index


def _int64(tensor: torch.Tensor) -> Ints:
    """One-dimensional and contiguous, on the CPU; a copy only where it must be."""
    if tensor.dtype is not torch.int64 or tensor.device.type != "cpu" or tensor.dim() != 1:
        tensor = tensor.detach().to("cpu", torch.int64).reshape(-1)
    array: Ints = tensor.numpy()
    return array if array.flags.carray else array.copy()
