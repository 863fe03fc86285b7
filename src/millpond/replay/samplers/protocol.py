"""What a sampler sees and what it answers. A sampler chooses; the engine reads, checks, counts and consumes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from millpond.core.schema import Key, Schema

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
State = list[int]


class Randomness(Protocol):
    """Where a draw gets its random numbers."""

    def below(self, n: int, bound: int) -> Ints:
        """n integers in [0, bound)."""

    def uniform(self, n: int) -> Floats:
        """n numbers in [0, 1)."""


class Generator:
    """`Randomness` from a torch generator: the same seed gives the same batches, whatever else draws numbers."""

    __slots__ = ("torch",)

    def __init__(self, generator: torch.Generator) -> None:
        self.torch = generator

    def below(self, n: int, bound: int) -> Ints:
        return torch.randint(bound, (n,), generator=self.torch).numpy()

    def uniform(self, n: int) -> Floats:
        return torch.rand(n, generator=self.torch, dtype=torch.float64).numpy()

    def seed(self) -> int:
        """A seed for a `Stream`."""
        return int(torch.randint(2**62, (), generator=self.torch))


_STEPS = np.arange(256, dtype=np.uint64)


class Stream:
    """`Randomness` from one seed, by small NumPy steps that keep the GIL: for draws under the lock.

    SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014).
    """

    CHUNK = 256

    def __init__(self, seed: int) -> None:
        self._seed, self._drawn = seed, 0

    def _words(self, n: int) -> NDArray[np.uint64]:
        out = np.empty(n, np.uint64)
        for a in range(0, n, self.CHUNK):
            b = min(a + self.CHUNK, n)
            z = _STEPS[: b - a] + np.uint64(self._drawn + a + 1)  # not numpy.arange, which lets go of the GIL
            z = z * np.uint64(0x9E3779B97F4A7C15) + np.uint64(self._seed)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            out[a:b] = z ^ (z >> np.uint64(31))
        self._drawn += n
        return out

    def uniform(self, n: int) -> Floats:
        words, out = self._words(n), np.empty(n)
        for a in range(0, n, self.CHUNK):
            out[a : a + self.CHUNK] = (words[a : a + self.CHUNK] >> np.uint64(11)) * 2.0**-53
        return out

    def below(self, n: int, bound: int) -> Ints:
        numbers, out = self.uniform(n), np.empty(n, np.int64)
        for a in range(0, n, self.CHUNK):
            out[a : a + self.CHUNK] = numbers[a : a + self.CHUNK] * bound
        return out


def distinct(n: int, bound: int, random: Randomness) -> Ints:
    """n different integers in [0, bound), uniformly, in random order. Draws again what it has drawn already."""
    if n == bound == 1:
        return np.zeros(1, np.int64)
    if 2 * n > bound:  # leave out the few that are not wanted, then put the others in random order
        left_out = set(distinct(bound - n, bound, random).tolist()) if n < bound else set()
        kept = [i for i in range(bound) if i not in left_out]
        picks = random.uniform(len(kept)).tolist()
        for i in range(len(kept) - 1, 0, -1):  # Fisher-Yates
            j = int(picks[i] * (i + 1))
            kept[i], kept[j] = kept[j], kept[i]
        return np.array(kept, np.int64)
    chosen: dict[int, None] = {}
    while len(chosen) < n:
        chosen.update(dict.fromkeys(random.below(n - len(chosen), bound).tolist()))
    return np.fromiter(chosen, np.int64, n)


@dataclass(frozen=True, slots=True)
class Windows:
    """Successive steps that count as one: slots and numbers ``[n, steps]``, of which the first ``lengths`` count."""

    slots: Ints
    numbers: Ints
    lengths: Ints
    gamma: float


@dataclass(frozen=True, slots=True)
class Goals:
    """Other goals for the items where ``mask`` (bool ``[n]``) is set: one for each of these, the ones achieved by the
    items in ``slots``. ``sampler`` knows the keys and the reward."""

    mask: Bools
    slots: Ints
    sampler: Any


@dataclass(slots=True)
class Draw:
    """The items of one batch, in the order in which they are returned.

    ``numbers`` are the items' numbers, which tell whether a slot still holds the item that was meant. ``extra`` are
    fields that are added to the batch or stand in place of stored ones. ``watch`` are slots and numbers of further
    items that the batch was computed from: it is drawn again if one of them left meanwhile. ``apply`` changes the
    state when the batch is delivered, under the lock: it returns False where the draw does not fit the state any more.
    ``windows`` and ``goals`` say how the items differ from the stored ones (see `returns`); ``group`` successive items
    of the batch belong together, as slices do.
    """

    slots: Ints
    numbers: Ints
    extra: dict[Key, torch.Tensor] = field(default_factory=dict)
    watch: tuple[Ints, Ints] | None = None
    apply: Callable[[State], bool] | None = None
    windows: Windows | None = None
    goals: Goals | None = None
    group: int = 1


class Items(Protocol):
    """The items that a sample may return, as they were when the draw began. Positions run from 0 to ``size - 1``."""

    size: int
    capacity: int
    schema: Schema
    state: State
    distinct: bool  # a batch must not hold an item twice, as its items are consumed

    def at(self, positions: Ints) -> tuple[Ints, Ints]:
        """Slots and numbers of the items at ``positions``. Without consumption position 0 is the oldest."""

    def number(self, slots: Ints) -> Ints:
        """Numbers of the items in ``slots``; -1 where there is none."""

    def alive(self, slots: Ints, numbers: Ints) -> Bools:
        """Is the item of this number still in this slot, and live?"""

    def since(self, number: int) -> tuple[Ints, Ints]:
        """Slots and numbers of the live items numbered ``number`` and above, oldest first."""

    def read(self, slots: Ints, keys: Sequence[Key]) -> list[torch.Tensor]:
        """Copies of some fields, ``[n, *shape]``."""


@runtime_checkable
class Sampler(Protocol):
    """Chooses items. One sampler belongs to one buffer.

    A shared buffer's sampler is pickled with the handle, and each process has its own copy: what the copies must
    agree on lies in the shared words and arrays that ``bind`` is given.
    """

    @property
    def replacement(self) -> bool:
        """False: a batch of n needs n live items."""

    def bind(self, arrays: Any) -> None:
        """Called once in each process, when the buffer's memory is there. ``arrays(name)`` is what `memory` asked
        for."""

    def memory(self, capacity: int) -> dict[str, int]:
        """Names and bytes of the zeroed memory that the copies of this sampler share."""

    def ready(self, items: Items, n: int) -> str | None:
        """None, or what must happen before n items can be drawn. Called where the counts alone allow a sample."""

    def draw(self, items: Items, n: int, random: Randomness) -> Draw | None:
        """Choose n items. None: they cannot be drawn now, look again when something was written."""
