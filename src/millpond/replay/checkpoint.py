"""Saving a buffer and reading it back: contents, counters, sampler, generator, and the batches drawn ahead.

Rows go from the storage into the file, and back, in pieces (see `container`): there is never a second copy of them in
memory. While it is saved or loaded a buffer is locked, so that all is of one moment.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np
import torch

from millpond.core.errors import CheckpointError, NotShareable
from millpond.flow.limiter import pressure
from millpond.replay import container
from millpond.replay import state as words
from millpond.replay.batch import SampledBatch
from millpond.replay.config import spell
from millpond.replay.container import VERSION, Column
from millpond.replay.engine import Engine, find
from millpond.replay.local import LocalReplay
from millpond.replay.samplers.protocol import State
from millpond.replay.samplers.uniform import ConsumingSampler
from millpond.replay.slots import Queue, Ring
from millpond.replay.soundness import KEPT, MADE_ANEW, Sound, checked
from millpond.replay.storage import MappedStorage, TensorStorage


@contextlib.contextmanager
def frozen(local: LocalReplay) -> Iterator[dict[str, Any]]:
    """Everything that a buffer needs to go on, with a `Column` for what is large. Nothing changes inside the block."""
    engine = local.engine
    schema = local.known()
    names = [*engine.slots.memory(), *engine.sampler.memory(engine.capacity)]
    try:
        state = engine.load()
        engine.refuse_closed(state, "state_dict", 0)
        live, width = state[words.LIVE], 0 if schema is None else schema.row_nbytes
        yield {
            "format": VERSION,
            "capacity": engine.capacity,
            "schema": None if schema is None else schema.to_json(),
            "sampler": json.dumps(spell(engine.sampler)),
            "deliveries": engine.deliveries or 0,
            "num_envs": engine.num_envs or 0,
            "state": dict(zip(words.NAMES, state, strict=False)),
            "slots": Column(
                torch.int64, (live,), lambda at, n: _slots(engine, state, at // 8, n // 8).view(torch.uint8)
            ),
            "rows": Column(
                torch.uint8, (live, width), lambda at, n: _rows(engine, state, at // width, n // width).reshape(-1)
            ),
            "arrays": {name: _array(engine, name) for name in names if not name.startswith(MADE_ANEW)},
            "generator": engine.random.torch.get_state(),
            "ahead": [_spell_taken(taken) for taken in local.ahead],
        }
    finally:
        engine.control.mutex.unlock()


def _slots(engine: Engine, state: State, first: int, n: int) -> torch.Tensor:
    """Of n live items. Those of a ring are named in the order of their age."""
    return torch.from_numpy(engine.slots.at(state, np.arange(first, first + n))[0])


def _rows(engine: Engine, state: State, first: int, n: int) -> torch.Tensor:
    """Of the same items: a view of the storage where they are neighbours in it, else a copy."""
    assert engine.rows is not None
    slots = engine.slots.at(state, np.arange(first, first + n))[0]
    if engine.rows.raw and isinstance(engine.slots, Ring) and slots[-1] - slots[0] == n - 1:
        rows: torch.Tensor = engine.storage.rows[int(slots[0]) : int(slots[-1]) + 1]  # type: ignore[attr-defined]
        return rows
    return engine.storage.read(torch.from_numpy(slots)).view(torch.uint8).cpu()


def _array(engine: Engine, name: str) -> Column:
    memory = torch.frombuffer(engine.memory.array(name), dtype=torch.uint8)
    return Column(torch.uint8, (len(memory),), lambda at, n: memory[at : at + n])


def state_dict(local: LocalReplay) -> dict[str, Any]:
    """The same as tensors: a copy, for one moment's sake."""
    with frozen(local) as state:
        copied: dict[str, Any] = whole(state)
    return copied


def whole(node: Any) -> Any:
    """A tree with tensors in the place of its columns."""
    if isinstance(node, Column):
        return node.whole()
    if isinstance(node, list):
        return [whole(value) for value in node]
    return {key: whole(value) for key, value in node.items()} if isinstance(node, dict) else node


def load_state_dict(local: LocalReplay, saved: Any) -> None:
    """Replace what the buffer holds by ``saved``, of tensors or of columns. Its limits, batch size and the like stay
    those of the running code.

    Raises:
        CheckpointError: another version, capacity, schema or sampler, or what no buffer can have been in. Nothing was
            changed.
    """
    sound = checked(local.engine, local.known(), saved)
    if sound.schema is not None:
        local.bind(sound.schema)
    local.ahead.refund()
    _put(local, sound, rows=True)


def _put(local: LocalReplay, sound: Sound, *, rows: bool) -> None:
    """Put a state into a buffer whose schema is bound; ``rows``: not where they are in its storage already."""
    engine = local.engine
    try:
        state = engine.load()
        engine.refuse_closed(state, "load_state_dict", 0)
        engine.drop(state)  # a death from here to the end leaves an empty buffer
        if engine.rows is not None and rows:
            _put_rows(engine, sound)
        for name, column in sound.arrays.items():
            if name == "priority_settings":  # of the running sampler, as far as it says
                continue
            memory, at = torch.frombuffer(engine.memory.array(name), dtype=torch.uint8), 0
            for piece in column.pieces():
                memory[at : at + len(piece)] = piece
                at += len(piece)
        for i, name in enumerate(words.NAMES):
            if i not in KEPT:
                state[i] = sound.state[name]
        if engine.priorities is not None:
            words_of = {name: held.whole() for name, held in sound.arrays.items() if name == "priority_settings"}
            engine.priorities.restore(words_of, sound.priorities, state, sound.slots.whole().numpy())
        state[words.PRESSURE] = pressure(engine.flow, engine.counts(state), 0) if engine.marked else 0
        if engine.order is not None:
            engine.order.loaded()
        engine.control.settle(state)
        engine.commit(state, *engine.control.events)
    finally:
        engine.control.mutex.unlock()
    engine.random.torch.set_state(sound.generator)
    if sound.ahead:
        local.ahead.restore(sound.ahead)


def _put_rows(engine: Engine, sound: Sound) -> None:
    assert engine.rows is not None
    for a, b in sound.rows.spans():
        rows, slots = sound.rows.read(a, b), sound.slots.read(a, b).numpy()
        if isinstance(engine.slots, Ring):
            engine.rows.write_run(int(slots[0]), rows)
        else:
            engine.rows.write_at(slots, rows)


def _spell_taken(taken: SampledBatch) -> dict[str, Any]:
    return {
        "rows": taken.rows.view(torch.uint8).clone(),  # the batch itself goes to whoever samples next
        "slots": torch.from_numpy(taken.slots.copy()),
        "numbers": torch.from_numpy(taken.numbers.copy()),
        "extra": {"/".join(key): value.clone() for key, value in taken.extra.items()},
        "asked": taken.asked,
    }


# ---------------------------------------------------------------------- files
def dumps(local: LocalReplay, path: str | os.PathLike[str]) -> None:
    """Write a checkpoint: whole, or not at all. Raises ``OSError`` where the disk does not take it."""
    with container.replacing(path) as file:
        write(local, file)


def write(local: LocalReplay, file: BinaryIO) -> None:
    """The same into a file that is open. The buffer is locked until the bytes are written, not until a disk has
    them."""
    with frozen(local) as state:
        container.write(file, state)


def loads(local: LocalReplay, path: str | os.PathLike[str]) -> None:
    """Read a checkpoint into a buffer. Raises ``CheckpointError``, naming what is wrong, before anything was
    changed."""
    with container.opened(path) as saved:
        load_state_dict(local, saved)


def refuse_damaged(local: LocalReplay) -> None:
    """Of a buffer on disk that was taken over: what its files say is used without another look.

    Raises:
        NotShareable: no buffer can have been in this state. What is in the rows themselves is not looked at.
    """
    try:
        with frozen(local) as saved:
            checked(local.engine, local.known(), saved)
    except CheckpointError as problem:
        raise NotShareable(f"{local.engine.memory.path} is damaged: {problem}") from problem


# ---------------------------------------------------------------------- sharing
def moved_to_shared(old: LocalReplay) -> LocalReplay:
    """The same in shared memory, with all that it holds. No other thread may use it meanwhile. Whatever is raised, the
    old works stay as they are."""
    engine = old.engine
    if isinstance(engine.storage, TensorStorage) and engine.storage.device.type != "cpu":
        raise NotShareable(
            f"rows on {engine.storage.device} cannot be shared between processes; keep the storage on the CPU"
        )
    own, new, moved = old.rules.storage, None, Moved(engine.storage)
    storage = MappedStorage(engine.capacity) if own is None else own
    try:
        new = LocalReplay.made(old.rules, storage, engine.random.torch, shared=True)
        schema = old.known()
        if schema is not None:
            new.bind(schema)
        with frozen(old) as saved:
            large = saved["slots"], saved["rows"], saved["arrays"]
            sound = Sound(schema, saved["state"], *large, saved["generator"], list(old.ahead), {})
            if storage is not engine.storage and schema is not None:
                state = engine.control.peek()
                moved.to(storage, lambda a, b: bool((engine.slots.number(state, np.arange(a, b)) >= 0).any()))
            _put(new, sound, rows=False)
    except BaseException:
        moved.back()
        if new is not None:
            new.give_up()
            new.engine.let_go(storage=storage is not engine.storage)
        engine.slots.bind(engine.memory.array, create=False)
        engine.bind_sampler()
        queue = find(ConsumingSampler, engine.sampler)
        if isinstance(engine.slots, Queue) and queue is not None:
            queue.queue = engine.slots
        raise
    new.engine.unlimited = engine.unlimited
    if engine.order is not None and new.engine.order is not None:
        new.engine.order.loaded(continued=engine.order.last_writer)
    engine.let_go(storage=engine.storage is not storage)  # else the buffer would take twice its memory
    return new


class Moved:
    """Rows that go from one storage to another, each to the slot that it had, piece by piece: what was copied is given
    back at once, so that both together take the memory of one."""

    def __init__(self, source: Any) -> None:
        self._source, self._target = source, source
        self._done: list[slice] = []

    def to(self, target: Any, wanted: Callable[[int, int], bool]) -> None:
        """Move all pieces of which a slot is ``wanted``."""
        self._target = target
        capacity, width = target.rows.shape
        step = max(1, container.PIECE // width)
        for a in range(0, capacity, step):
            b = min(a + step, capacity)
            if wanted(a, b):
                target.rows[a:b] = self._source.rows[a:b]
                self._done.append(slice(a, b))
                self._source.forget(a, b)

    def back(self) -> None:
        """As it was before."""
        for part in self._done:
            self._source.rows[part] = self._target.rows[part]
