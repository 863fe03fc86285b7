"""Which rows of a buffer follow one another: what its fields say, and where they say nothing, what its writers did.

Without ids nobody can tell afterwards whether two neighbouring items are successive steps: another thread or process
may have written in between, a batch may have been dropped, or a checkpoint was loaded. So the writer tells. It notes
the number of an item that does not follow the one before it in an array beside the rows, under the lock and before the
item exists. Where the same writer goes on, there is nothing to note.
"""

from __future__ import annotations

import difflib
import os
import secrets
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from millpond.core.errors import InvalidArgument, InvalidType, SchemaMismatch
from millpond.core.schema import Key, Schema
from millpond.replay.samplers.episode_index import EpisodeIndex
from millpond.replay.samplers.protocol import Ints, Items, State
from millpond.replay.state import EMPTIED, HEAD

EPISODE, STEP, DONE = ("episode_id",), ("step",), ("next", "done")
TERMINATED, TRUNCATED, REWARD = ("next", "terminated"), ("next", "truncated"), ("next", "reward")
NAME = "order"  # of the shared array: a word for each slot, and then these
WRITER, EDITS, ENVS, EXTRA = 0, 1, 2, 3
ANYBODY, LOST = 1, -1

TWO_WAYS = (
    "give the buffer num_envs=n, where each write holds one step of each of n environments, in the same order "
    "(num_envs=1 for one environment, in the order of time), or give the items the fields episode_id and step"
)


def nbytes(capacity: int) -> int:
    """Of the shared array."""
    return 8 * (capacity + EXTRA)


class Order:
    """What one buffer's writers note, in one process, from the moment its schema is known."""

    def __init__(self, capacity: int, schema: Schema, sampler: Any, num_envs: int | None, notes: Ints | None) -> None:
        episode_key = getattr(sampler, "episode_key", EPISODE)
        self.num_envs, self._capacity, self._notes = num_envs, capacity, notes
        self._sampler = sampler
        self.keys = [key for key in (episode_key, STEP, DONE, TERMINATED, TRUNCATED) if key in schema.by_key]
        self.ids, self.steps = episode_key in schema.by_key, STEP in schema.by_key
        self.by_writing = not self.ids
        self._wrote: set[int] = set()
        self._lost: set[int] = set()
        self._mixed = self._warned = False

    @property
    def address(self) -> int:
        """Of the word that names the last writer; 0 where nobody needs it."""
        return 0 if self._notes is None else int(self._notes[self._capacity + WRITER :].ctypes.data)

    @property
    def longest(self) -> int:
        """The most successive steps of one environment that can be stored."""
        return -(-self._capacity // self.num_envs) if self.by_writing and self.num_envs else self._capacity

    def admit(self, n: int) -> None:
        """Raises ``InvalidArgument`` for a write of n rows of which nobody could tell how they follow one another."""
        if not self.by_writing or n == 1 == (self.num_envs or 1):
            return
        if self.num_envs is None:
            if self._notes is not None:
                raise InvalidArgument(
                    f"{n} rows in one write, without ids: are they successive steps of one environment, or one step of "
                    f"{n}? The sampler needs to know: {TWO_WAYS}"
                )
        elif n % self.num_envs:
            raise InvalidArgument(
                f"{n} rows are no whole number of steps of num_envs={self.num_envs} environments: a write holds one "
                "row of each, step by step, with extend()"
            )

    def refuse_any_order(self, schema: Schema) -> None:
        """Raises ``SchemaMismatch`` where items that leave in any order would have to be told apart by their order."""
        if self.ids and self.steps:
            return
        layer = self._sampler
        while layer is not None and getattr(layer, "strategy", "random") == "random":
            layer = getattr(layer, "base", None)
        if self.ids or layer is not None:
            missing = "step" if self.ids else "episode_id and step"
            raise SchemaMismatch(
                f"{self._sampler!r} with consume_after_n_samples needs {missing} among the fields: items leave in any "
                f"order, so the rest does not tell what is missing. The items have {schema!r}"
            )

    def fits(self, num_envs: int) -> bool:
        """May items come here that were written with so many environments?"""
        return self.ids or self._notes is None or (num_envs or 1) == (self.num_envs or 1)

    # ------------------------------------------------------------------ what the writer notes
    def writer(self, who: int | None) -> int:
        """What stands in the word of the last writer as long as this thread, or the client ``who``, goes on."""
        one = (who or this_thread()) if self.by_writing else ANYBODY
        return LOST if self._lost and one in self._lost else one

    def note(self, state: State, slots: Ints, who: int | None) -> None:
        """Under the lock, before new items in ``slots`` exist: do they follow what was written before?"""
        notes, one = self._notes, (who or this_thread()) if self.by_writing else ANYBODY
        if notes is None:
            return
        last = int(notes[self._capacity + WRITER])
        head, lost = state[HEAD], one in self._lost
        if head and (last == 0 or (lost and self.ids)):
            notes[int(slots[0])] = -(head + 1)
        elif head and (last != one or lost):
            for i, slot in enumerate(slots[: self.num_envs or 1].tolist()):
                notes[slot] = head + i + 1
        self._mixed = self._mixed or (last not in (0, one) and one in self._wrote)
        self._lost.discard(one)
        if len(self._wrote) > 1024:
            self._wrote.clear()
        self._wrote.add(one)
        notes[self._capacity + WRITER] = one

    def missed(self, who: int | None) -> None:
        """What this writer wanted to write did not come in: its next items do not follow its last ones."""
        if self._notes is not None and not (self.ids and self.steps):
            self._lost.add((who or this_thread()) if self.by_writing else ANYBODY)

    def warn(self) -> None:
        """Once, where several writers take turns."""
        if self._mixed and not self._warned:
            self._warned = True
            warnings.warn(
                "several threads or processes write in turns, and the items have no ids: a window of successive steps "
                "ends wherever another writer came between. Give the items the fields episode_id and step",
                RuntimeWarning,
                stacklevel=4,
            )

    def loaded(self, *, continued: int = 0) -> None:
        """Under the lock, or before anybody else comes: the items are others now. Nothing that is written from now on
        follows them, unless ``continued``, the last writer, goes on."""
        if self._notes is not None:
            self._notes[self._capacity + WRITER] = continued
            self._notes[self._capacity + ENVS] = self.num_envs or 1

    @property
    def last_writer(self) -> int:
        return 0 if self._notes is None else int(self._notes[self._capacity + WRITER])

    def edited(self, keys: Iterable[Key]) -> None:
        """Under the lock: these fields of stored items were changed."""
        if self._notes is not None and not set(self.keys).isdisjoint(keys):
            self._notes[self._capacity + EDITS] += 1


_local = threading.local()


def this_thread() -> int:
    """A number that no other thread of any process has."""
    try:
        one: int = _local.number
    except AttributeError:
        one = _local.number = secrets.randbits(62) + 2
    return one


class Episodes:
    """The sequence index of this process, brought up to what was written since the last look. One thread at a time:
    hold the ``lock``, from before the look to the last question."""

    def __init__(self, key: Key = EPISODE, notes: Ints | None = None, *, num_envs: int = 1) -> None:
        self.key, self._notes, self._num_envs = key, notes, num_envs
        self._index: EpisodeIndex | None = None
        self._seen = self._emptied = self._edits = 0
        self.lock = threading.RLock()
        _all.add(self)

    @classmethod
    def bound(cls, key: Key, arrays: Callable[[str], Any]) -> Episodes:
        """With what the writers note in the shared array."""
        return cls(key, np.frombuffer(arrays(NAME), np.int64))

    def look(self, items: Items) -> EpisodeIndex:
        """The index over all items of this moment."""
        state, capacity, notes = items.state, items.capacity, self._notes
        edits = 0 if notes is None else int(notes[capacity + EDITS])
        if self._index is None or state[EMPTIED] != self._emptied or edits != self._edits:
            num_envs = self._num_envs if notes is None else max(1, int(notes[capacity + ENVS]))
            self._index = EpisodeIndex(capacity, num_envs=num_envs, any_order=items.distinct)
            self._seen, self._emptied, self._edits = 0, state[EMPTIED], edits
        if state[HEAD] > self._seen:
            slots, numbers = items.since(self._seen)
            known = items.schema.by_key
            keys = [key for key in (self.key, STEP, DONE, TERMINATED, TRUNCATED) if key in known]
            found = {
                k: v.reshape(len(slots), -1)[:, 0].numpy() for k, v in zip(keys, items.read(slots, keys), strict=True)
            }
            ends = [found[key].astype(bool) for key in (DONE, TERMINATED, TRUNCATED) if key in found]
            noted = np.zeros(len(slots), np.int64) if notes is None else notes[slots]
            ids = found[self.key].astype(np.int64) if self.key in found else None
            self._index.append(
                numbers,
                slots,
                ids,
                found[STEP].astype(np.int64) if ids is not None and STEP in found else None,
                np.logical_or.reduce(ends),
                cut=noted == numbers + 1,
                new_era=noted == -(numbers + 1),
            )
            self._seen = state[HEAD]
        return self._index


_all: weakref.WeakSet[Episodes] = weakref.WeakSet()


def _after_fork() -> None:
    """A child is another writer, and the thread that held a lock is not there."""
    global _local
    _local = threading.local()
    for episodes in list(_all):
        episodes.lock = threading.RLock()
        episodes._index = None


os.register_at_fork(after_in_child=_after_fork)


# ---------------------------------------------------------------------- what samplers ask of the fields
def check_ends(schema: Schema, episode_key: Key, who: str) -> None:
    """Raises ``SchemaMismatch`` where the items do not say where an episode ends, or hold several steps each."""
    if not any(key in schema.by_key for key in (DONE, TERMINATED, TRUNCATED)):
        raise SchemaMismatch(f"{who} needs next/done, next/terminated or next/truncated; the items have {schema!r}")
    for key in (DONE, TERMINATED, TRUNCATED, episode_key, STEP):
        field = schema.by_key.get(key)
        if field is None:
            continue
        if field.size != 1:
            raise SchemaMismatch(
                f"{who} looks along episodes of single steps, and {field.name} has shape {list(field.shape)}: these "
                "items are sequences. Store transitions (layout='transitions'), or sample the sequences as they are, "
                "with a sampler that looks at whole items"
            )
        if key in (episode_key, STEP) and (field.dtype.is_floating_point or field.dtype.is_complex):
            raise SchemaMismatch(f"{who} needs whole numbers in {field.name}, not {field.describe()}")
    if episode_key != EPISODE and episode_key not in schema.by_key:
        raise SchemaMismatch(f"{who} needs {'/'.join(episode_key)}{_nearest(episode_key, schema)}")


def require(schema: Schema, keys: Iterable[Key], who: str) -> None:
    """Raises ``SchemaMismatch`` for a key that is not among the fields, with the nearest that is."""
    for key in keys:
        if key not in schema.by_key:
            raise SchemaMismatch(f"{who} needs {'/'.join(key)}{_nearest(key, schema)}; the items have {schema!r}")


def _nearest(key: Key, schema: Schema) -> str:
    names = ["/".join(one) for one in schema.by_key]
    close = difflib.get_close_matches("/".join(key), names, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def key_of(name: str, value: Any) -> Key:
    """A key as a tuple. Raises ``InvalidType`` for what is none."""
    parts = (value,) if isinstance(value, str) else value
    if not isinstance(parts, (tuple, list)) or not parts or not all(isinstance(p, str) and p for p in parts):
        raise InvalidType(f"{name} is a string or a tuple of strings, not {value!r}")
    return tuple(parts)


def chosen(name: str, value: Any, known: Iterable[str]) -> str:
    """One of the known words. Raises ``InvalidArgument`` for any other, with the nearest."""
    words = list(known)
    if value not in words:
        close = difflib.get_close_matches(str(value), words, n=1, cutoff=0.4)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise InvalidArgument(f"{name} is one of {', '.join(map(repr, words))}, not {value!r}{hint}")
    return str(value)
