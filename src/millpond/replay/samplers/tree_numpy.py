"""The sum tree's kernels in plain NumPy: the same results as `kernels.tree`, bit for bit.

None of them lets go of the GIL, because a lock may be held around it. NumPy keeps the GIL in calls of at most 500
elements, except in `arange`, `zeros`, `take`, `argmin`, sorting, and indexing with, or of, more than one dimension: so
everything goes in chunks, and those are not used.

The arguments `tree, offsets, sizes` are the memory of a tree and its `sum_tree.Layout`; `values` are the numbers whose
largest the nodes keep, one for each leaf and then zeros to a whole group of eight.
"""

from __future__ import annotations

from math import inf

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CHUNK = 500
_RAMP = np.arange(CHUNK)
_GROUP = np.arange(8)
_FEW = CHUNK // 8  # so many groups of eight fit in one call


def _filled(n: int, value: float) -> Floats:
    array = np.empty(n)
    array.fill(value)
    return array


def _sum_nodes(tree: Floats, values: Floats, offsets: Ints, level: int, nodes: Ints) -> None:
    # For children that are leaves, the minimum and the count come from the leaf itself, the maximum from its value.
    size, *parts = (8, 0, 0, 0) if level == 1 else (32, 8, 16, 24)
    child = offsets[level - 1] + size * nodes
    summarise = _by_group if nodes.size <= _FEW else _by_column
    node = offsets[level] + 32 * (nodes >> 3) + (nodes & 7)
    for part, found in enumerate(summarise(tree, values if level == 1 else None, child, parts)):
        tree[node + 8 * part] = found


def _by_group(tree: Floats, values: Floats | None, child: Ints, parts: list[int]) -> tuple[Floats, ...]:
    index = (child[:, None] + _GROUP).ravel()
    value, least, most, count = (tree[index + part].reshape(-1, 8) for part in (0, *parts))
    if values is not None:
        most = values[index].reshape(-1, 8)
    total = np.add.accumulate(value, axis=1)[:, 7].copy()
    low = np.minimum.reduce(least, axis=1, where=least > 0.0, initial=inf)
    low[low == inf] = 0.0
    positive = count if values is None else (count > 0.0).astype(np.float64)
    return total, low, np.maximum.reduce(most, axis=1), np.add.reduce(positive, axis=1)


def _by_column(tree: Floats, values: Floats | None, child: Ints, parts: list[int]) -> tuple[Floats, ...]:
    n = child.size
    total, low, high, count = _filled(n, 0.0), _filled(n, inf), _filled(n, 0.0), _filled(n, 0.0)
    for k in range(8):
        if k:
            child += 1
        value = tree[child]
        total += value
        least = tree[child + parts[0]]
        positive = least > 0.0
        np.minimum(low, least, out=low, where=positive)
        np.maximum(high, tree[child + parts[1]] if values is None else values[child], out=high)
        count += tree[child + parts[2]] if values is None else positive
    low[low == inf] = 0.0
    return total, low, high, count


def _sum_range(tree: Floats, values: Floats, offsets: Ints, level: int, first: int, last: int) -> None:
    for start in range(first, last + 1, CHUNK):
        _sum_nodes(tree, values, offsets, level, _RAMP[: last + 1 - start] + start)


def _sum_above(tree: Floats, values: Floats, offsets: Ints, sizes: Ints, slots: Ints) -> None:
    for level in range(1, sizes.size):
        if sizes[level] <= slots.size:
            _sum_range(tree, values, offsets, level, 0, int(sizes[level]) - 1)
            continue
        for start in range(0, slots.size, CHUNK):
            _sum_nodes(tree, values, offsets, level, slots[start : start + CHUNK] >> (3 * level))


def update(
    tree: Floats, offsets: Ints, sizes: Ints, values: Floats, slots: Ints, leaves: Floats, given: Floats, largest: float
) -> int:
    """Write `leaves`, and beside them what is `given`.

    Return -1, or the position of the first bad entry, and then nothing was written.
    """
    n = slots.size
    for start in range(0, n, CHUNK):
        slot, leaf = slots[start : start + CHUNK], leaves[start : start + CHUNK]
        fine = (slot >= 0) & (slot < sizes[0]) & (leaf >= 0.0) & (leaf <= largest)
        if not fine.all():
            return start + int((~fine).nonzero()[0][0])
    for start in range(0, n, CHUNK):
        values[slots[start : start + CHUNK]] = given[start : start + CHUNK] + 0.0  # -0.0 becomes 0.0
        tree[slots[start : start + CHUNK]] = leaves[start : start + CHUNK] + 0.0
    _sum_above(tree, values, offsets, sizes, slots)
    return -1


def fill_at(tree: Floats, offsets: Ints, sizes: Ints, values: Floats, slots: Ints, leaf: float, given: float) -> int:
    """Write one leaf, and beside it what is `given`.

    Return -1, or the position of the first bad slot, and then nothing was written.
    """
    n = slots.size
    for start in range(0, n, CHUNK):
        slot = slots[start : start + CHUNK]
        fine = (slot >= 0) & (slot < sizes[0])
        if not fine.all():
            return start + int((~fine).nonzero()[0][0])
    for start in range(0, n, CHUNK):
        values[slots[start : start + CHUNK]] = given
        tree[slots[start : start + CHUNK]] = leaf
    _sum_above(tree, values, offsets, sizes, slots)
    return -1


def fill(tree: Floats, offsets: Ints, sizes: Ints, values: Floats, first: int, n: int, leaf: float) -> None:
    """Write one leaf into a range that the caller has checked."""
    for start in range(first, first + n, CHUNK):
        values[start : min(start + CHUNK, first + n)] = leaf
        tree[start : min(start + CHUNK, first + n)] = leaf
    for level in range(1, sizes.size):
        _sum_range(tree, values, offsets, level, first >> 3 * level, (first + n - 1) >> 3 * level)


def draw(tree: Floats, offsets: Ints, sizes: Ints, mass: Floats, left: Floats, slots: Ints) -> None:
    """Walk all of `mass` down, one level at a time; `left` becomes the leaves."""
    for start in range(0, mass.size, CHUNK):
        stop = min(start + CHUNK, mass.size)
        part = mass[start:stop]
        left[start:stop] = np.where(part > 0.0, part, 0.0)
        _walk(tree, offsets, sizes, left[start:stop], slots[start:stop])
        left[start:stop] = tree[slots[start:stop]]


def _walk(tree: Floats, offsets: Ints, sizes: Ints, left: Floats, node: Ints) -> None:
    node.fill(0)
    for level in range(sizes.size - 2, -1, -1):
        child = offsets[level] + (32 if level else 8) * node
        node *= 8
        running, passed = _filled(left.size, 0.0), _filled(left.size, 0.0)
        for k in range(8):
            if k:
                child += 1
            running += tree[child]
            behind = running <= left
            node += behind
            if k < 7:
                np.copyto(passed, running, where=behind)
        if behind.any():  # rounding above: the mass lies behind the last child; take the last that is not empty
            for i in behind.nonzero()[0]:
                first = int(child[i]) - 7
                node[i] += -8 + int((tree[first : first + 8] > 0.0).nonzero()[0].max(initial=0))
        left -= passed


def rebuild(tree: Floats, offsets: Ints, sizes: Ints, values: Floats, largest: float) -> int:
    """Zero impossible leaves and all padding, recompute the rest; return how many leaves that were."""
    dropped, capacity = 0, int(sizes[0])
    for start in range(0, capacity, CHUNK):
        leaves = tree[start : min(start + CHUNK, capacity)]
        leaves += 0.0  # -0.0 becomes 0.0
        wrong = ~((leaves >= 0.0) & (leaves <= largest))
        beside = values[start : min(start + CHUNK, capacity)]
        beside[wrong | ~((beside >= 0.0) & (beside < inf))] = 0.0
        if wrong.any():
            dropped += int(wrong.sum())
            leaves[wrong] = 0.0
    tree[capacity : offsets[1]] = 0.0
    for level in range(1, sizes.size):
        tree[offsets[level + 1] - 32 : offsets[level + 1]] = 0.0  # the last group, for its padding
        _sum_range(tree, values, offsets, level, 0, int(sizes[level]) - 1)
    return dropped
