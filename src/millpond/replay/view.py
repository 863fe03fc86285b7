"""The live items as a sampler sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from millpond.core.schema import Key, Schema
from millpond.replay.samplers.protocol import Bools, Ints, State
from millpond.replay.slots import Pool, Ring
from millpond.replay.state import LIVE

if TYPE_CHECKING:
    from millpond.replay.rows import Rows


class View:
    """`Items` of one buffer in one state. Under the lock it is exact; without, what it says is checked afterwards."""

    __slots__ = ("_locked", "_rows", "_slots", "capacity", "distinct", "schema", "size", "state")

    def __init__(self, slots: Ring | Pool, rows: Rows, state: State, *, distinct: bool, locked: bool = False) -> None:
        self.state = state
        self.size = state[LIVE]
        self.capacity = slots.capacity
        self.distinct = distinct
        self.schema: Schema = rows.schema
        self._slots, self._rows, self._locked = slots, rows, locked

    def at(self, positions: Ints) -> tuple[Ints, Ints]:
        return self._slots.at(self.state, positions)

    def number(self, slots: Ints) -> Ints:
        return self._slots.number(self.state, slots)

    def alive(self, slots: Ints, numbers: Ints) -> Bools:
        return self._slots.alive(self.state, slots, numbers)

    def since(self, number: int) -> tuple[Ints, Ints]:
        return self._slots.since(self.state, number)

    def all(self) -> tuple[Ints, Ints]:
        """Slots and numbers of all live items, oldest first."""
        return self._slots.since(self.state, 0)

    def read(self, slots: Ints, keys: Sequence[Key]) -> list[torch.Tensor]:
        return self._rows.columns(slots, keys, locked=self._locked)


def repeated(slots: Ints) -> bool:
    """Is a slot named twice? Keeps the GIL."""
    return len(set(slots.tolist())) < len(slots)


def every(mask: Bools) -> bool:
    """``mask.all()``, keeping the GIL."""
    return all(bool(mask[a : a + 256].all()) for a in range(0, len(mask), 256))
