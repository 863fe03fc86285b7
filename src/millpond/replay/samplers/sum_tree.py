"""Draw by priority, and change priorities, in time that grows with the logarithm of the capacity.

An 8-ary pyramid: level 0 holds the leaves, and each node above holds the sum, the least positive leaf, the largest
value and the number of positive leaves below it. A leaf's value is what it was computed from, where its maker keeps
that. The eight children of a node are one cache line. Parents are always
recomputed from all of their children and never adjusted by a difference, so nothing drifts, however long a run.

The memory is the caller's, so the same tree can lie in files that several processes map. Zeroed memory is an empty
tree.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np
from numpy.typing import NDArray

from millpond.core.errors import InvalidArgument, InvalidType

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
EngineName = Literal["numba", "numpy"]

MAX_CAPACITY = 2**31
_ENVIRONMENT = "MILLPOND_TREE"


class TreeLayout(NamedTuple):
    """Where the parts of a tree lie, counted in float64 words from the start of its memory.

    The leaves come first. Level ``l >= 1`` starts at ``offsets[l]`` and holds a record of 32 words for each group of
    eight siblings: their 8 sums, 8 minima, 8 maxima and 8 counts, so that an update touches neighbouring cache lines of
    one page. The minimum of a node without a positive leaf is stored as 0. Every level is padded with zeros to whole
    groups.
    """

    offsets: Ints  # [depth + 2]; the last entry is the size of all
    sizes: Ints  # [depth + 1]; nodes per level, without padding; sizes[0] is the capacity, sizes[depth] is 1

    @classmethod
    def of(cls, capacity: int) -> TreeLayout:
        sizes, offsets = [capacity], [0, -(-capacity // 8) * 8]
        while len(sizes) == 1 or sizes[-1] > 1:
            sizes.append(-(-sizes[-1] // 8))
            offsets.append(offsets[-1] + -(-sizes[-1] // 8) * 32)
        return cls(np.array(offsets), np.array(sizes))


class _TreeKernels(NamedTuple):
    name: EngineName
    update: Callable[..., int]
    fill_at: Callable[..., int]
    fill: Callable[..., None]
    draw: Callable[..., None]
    rebuild: Callable[..., int]


class NothingToDraw(InvalidArgument):
    """All leaves are 0."""


class SumTree:
    """A sum tree over ``capacity`` leaves in memory that the caller owns.

    A leaf of 0.0 is never drawn: it stands for a slot without a live item, or for a priority of zero. No method takes a
    lock, and none lets go of the GIL. A reader beside a writer gets slots in range, whose leaf it must look at again.

    Args:
        capacity: number of leaves, 1 … 2**31; not rounded.
        memory: a writable buffer of at least ``SumTree.nbytes(capacity)`` bytes, aligned to 8 bytes (64 are faster).
        values: memory for a number beside each leaf, at least ``values_nbytes(capacity)`` bytes, whose largest is
            `max`; by default the leaf itself.
        create: True empties the tree; False attaches to what the memory holds.
        engine: ``"numba"`` or ``"numpy"``, which give the same bits. By default the environment variable MILLPOND_TREE
            decides, else Numba is used where it can be imported.

    Raises:
        InvalidArgument, InvalidType: before the memory was touched.
    """

    def __init__(
        self, capacity: int, memory: Any, *, values: Any = None, create: bool, engine: EngineName | None = None
    ) -> None:
        tree = _words(memory, self.nbytes(capacity), capacity)
        self._layout = TreeLayout.of(capacity)
        beside = tree if values is None else _words(values, self.values_nbytes(capacity), capacity)
        self._values = beside[: int(self._layout.offsets[1])]  # with the padding of the last group
        self.arguments = (tree, self._layout.offsets, self._layout.sizes)
        self._root = int(self._layout.offsets[-2])
        self._wanted = _wanted(engine)
        self._tree = tree
        self._loaded: _TreeKernels | None = None
        #: Larger leaves are refused: the sum of ``capacity`` of them would be infinite.
        self.largest_leaf = self.largest(capacity)
        if create:
            tree.fill(0.0)
            self._values.fill(0.0)

    @staticmethod
    def largest(capacity: int) -> float:
        """The largest leaf of a tree of so many."""
        return float(np.finfo(np.float64).max) / (2 * capacity)

    @staticmethod
    def nbytes(capacity: int) -> int:
        """The bytes that a tree of ``capacity`` leaves needs, a multiple of 64 (about 12.6 per leaf)."""
        if isinstance(capacity, bool) or not isinstance(capacity, int):
            raise InvalidType(f"the capacity of a sum tree must be an int, got {capacity!r}")
        if not 1 <= capacity <= MAX_CAPACITY:
            raise InvalidArgument(f"the capacity of a sum tree must be 1 … {MAX_CAPACITY}, got {capacity}")
        return 8 * int(TreeLayout.of(capacity).offsets[-1])

    @classmethod
    def values_nbytes(cls, capacity: int) -> int:
        """The bytes that the values beside so many leaves need, a multiple of 64."""
        cls.nbytes(capacity)  # refuses what is no capacity
        return -(-capacity // 8) * 64

    @property
    def capacity(self) -> int:
        return int(self._layout.sizes[0])

    def prepare(self) -> EngineName:
        """Load the engine now and return its name. Otherwise the first call does, which takes up to seconds with Numba:
        do it before a lock is held."""
        return self._engine().name

    def update(self, slots: Ints, leaves: Floats, values: Floats | None = None) -> None:
        """Set ``leaf[slots[i]] = leaves[i]``; of duplicate slots the last wins.

        Args:
            slots: int64 ``[n]``, each in ``[0, capacity)``.
            leaves: float64 ``[n]``, each in ``[0, largest_leaf]``.
            values: float64 ``[n]``, finite and not negative: what stands beside them; the leaves by default.

        Raises:
            InvalidArgument: names the first bad entry. Nothing was changed.
        """
        slots, leaves = _vector(slots, np.int64, "slots"), _vector(leaves, np.float64, "leaves")
        if slots.size != leaves.size:
            raise InvalidArgument(f"{slots.size} slots came with {leaves.size} leaves")
        if slots.size == 0:
            return
        given = leaves if values is None else values
        bad = self._engine().update(*self.arguments, self._values, slots, leaves, given, self.largest_leaf)
        if bad >= 0:
            self._check_slot(bad, int(slots[bad]))
            self._check_leaf(float(leaves[bad]))

    def fill_at(self, slots: Ints, leaf: float, value: float | None = None) -> None:
        """Set all of ``slots`` (int64 ``[n]``) to one leaf, and one value beside it.

        Raises as `update` does, before anything was changed.
        """
        slots = _vector(slots, np.int64, "slots")
        leaf = self._check_leaf(leaf)
        if slots.size:
            bad = self._engine().fill_at(*self.arguments, self._values, slots, leaf, leaf if value is None else value)
            if bad >= 0:
                self._check_slot(bad, int(slots[bad]))

    def fill(self, first_slot: int, n: int, leaf: float) -> None:
        """Set the ``n`` slots from ``first_slot`` on to one leaf. The range must not wrap.

        Raises:
            InvalidArgument: the range leaves ``[0, capacity)``, or the leaf is out of range. Nothing was changed.
        """
        leaf = self._check_leaf(leaf)
        if first_slot < 0 or n < 0 or first_slot + n > self.capacity:
            raise InvalidArgument(f"slots {first_slot} … {first_slot + n - 1} leave the range 0 … {self.capacity - 1}")
        if n:
            self._engine().fill(*self.arguments, self._values, first_slot, n, leaf)

    def draw(self, mass: Floats) -> tuple[Ints, Floats]:
        """Map each mass to the slot in whose share of the total it lies; never to a leaf of 0, whatever the rounding.

        Shares lie in the order of the slots, with at most the usual rounding of a sum between one and the next.

        Args:
            mass: float64 ``[n]``, in ``[0, total)``; what lies outside counts as the nearest inside, and NaN as 0.

        Returns:
            Slots, int64 ``[n]``, and the leaves there, float64 ``[n]``.

        Raises:
            NothingToDraw: all leaves are 0.
        """
        mass = _vector(mass, np.float64, "mass")
        slots, leaves = np.empty(mass.size, np.int64), np.empty(mass.size)
        if mass.size:
            if not self._tree[self._root] > 0.0:
                raise NothingToDraw("nothing can be drawn: every leaf of the sum tree is 0")
            (self._loaded or self._engine()).draw(*self.arguments, mass, leaves, slots)
        return slots, leaves

    def leaf(self, slots: Ints) -> Floats:
        """The leaves at ``slots`` (int64 ``[n]``), a copy."""
        slots = _vector(slots, np.int64, "slots")
        return np.asarray(self.leaves[slots])

    def rebuild(self) -> int:
        """Recompute everything from the leaves, as after a crash in the middle of an update.

        Leaves that no update can have written (NaN, infinite, negative) become 0.0, with their values. Returns how many
        there were.
        """
        return int(self._engine().rebuild(*self.arguments, self._values, self.largest_leaf))

    @property
    def leaves(self) -> Floats:
        """A view of all leaves, float64 ``[capacity]``. After writing into it, call `rebuild`."""
        return self._tree[: self.capacity]

    @property
    def values(self) -> Floats:
        """A view of what stands beside the leaves, float64 ``[capacity]``. After writing into it, call `rebuild`."""
        return self._values[: self.capacity]

    @property
    def total(self) -> float:
        """The sum of all leaves, added eight by eight in the order of the slots."""
        return float(self._tree[self._root])

    @property
    def min_positive(self) -> float:
        """The least leaf above 0, or infinity where there is none."""
        return float(self._tree[self._root + 8]) or math.inf

    @property
    def max(self) -> float:
        """The largest value, 0.0 where all are."""
        return float(self._tree[self._root + 16])

    @property
    def count(self) -> int:
        """How many leaves are above 0."""
        return int(self._tree[self._root + 24])

    def _engine(self) -> _TreeKernels:
        if self._loaded is None:
            self._loaded = _load(self._wanted)
        return self._loaded

    def _check_slot(self, position: int, slot: int) -> None:
        if not 0 <= slot < self.capacity:
            raise InvalidArgument(f"slots[{position}] is {slot}, outside 0 … {self.capacity - 1}; no leaf was changed")

    def _check_leaf(self, leaf: float) -> float:
        if not 0.0 <= leaf <= self.largest_leaf:
            raise InvalidArgument(f"a leaf must be in 0 … {self.largest_leaf:.3g}, got {leaf}; no leaf was changed")
        return float(leaf) + 0.0  # -0.0 becomes 0.0


def _words(memory: Any, nbytes: int, capacity: int) -> Floats:
    view = memoryview(memory)
    if view.readonly or not view.c_contiguous:
        raise InvalidArgument("the memory of a sum tree must be writable and contiguous")
    if view.nbytes < nbytes:
        raise InvalidArgument(f"a sum tree of {capacity} leaves needs {nbytes} bytes, the memory has {view.nbytes}")
    words = np.frombuffer(memory, np.uint8, nbytes).view(np.float64)
    if not words.flags.aligned:
        raise InvalidArgument("the memory of a sum tree must be aligned to 8 bytes")
    return words


def _vector(values: Any, dtype: type[np.generic], name: str) -> NDArray[Any]:
    if type(values) is np.ndarray and values.dtype == dtype and values.ndim == 1 and values.flags.carray:
        return values
    array = np.asarray(values)
    if array.dtype != dtype:
        if array.size or array.dtype.kind not in "fiu":
            raise InvalidType(f"{name} must be {np.dtype(dtype).name}, got {array.dtype}")
        array = array.astype(dtype)
    if array.ndim != 1:
        raise InvalidArgument(f"{name} must be one-dimensional, got shape {array.shape}")
    return array if array.flags.carray else array.copy()  # what Numba's one signature admits: contiguous, writable


def _wanted(engine: str | None) -> EngineName | None:
    source = f"engine={engine!r}"
    if engine is None:
        engine = os.environ.get(_ENVIRONMENT) or None
        source = f"{_ENVIRONMENT}={engine}"
    if engine is None:
        return None
    for name in get_args(EngineName):
        if engine == name:
            return cast(EngineName, name)
    raise InvalidArgument(f'{source}: the engines of the sum tree are "numba" and "numpy"')


@cache
def _load(wanted: EngineName | None) -> _TreeKernels:
    from millpond.replay.samplers import tree_numpy

    kernels: Any = tree_numpy
    if wanted != "numpy":
        try:
            from millpond.replay.kernels import tree as compiled

            kernels = compiled
        except ImportError as error:
            if wanted == "numba":
                reason = f"Numba was asked for and cannot be imported ({error}): pip install numba"
                raise InvalidArgument(reason) from error
    name: EngineName = "numpy" if kernels is tree_numpy else "numba"
    engine = _TreeKernels(name, kernels.update, kernels.fill_at, kernels.fill, kernels.draw, kernels.rebuild)
    layout = TreeLayout.of(1)
    tree, slots, ones = np.zeros(int(layout.offsets[-1])), np.zeros(1, np.int64), np.ones(1)
    arguments = (tree, layout.offsets, layout.sizes)
    values = tree[:8]
    engine.fill(*arguments, values, 0, 1, 1.0)  # Numba links at the first call, and lets go of the GIL while it does
    engine.fill_at(*arguments, values, slots, 1.0, 1.0)
    engine.update(*arguments, values, slots, ones, ones, 1.0)
    engine.draw(*arguments, ones, ones.copy(), slots)
    engine.rebuild(*arguments, values, 1.0)
    return engine
