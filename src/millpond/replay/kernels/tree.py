# ruff: noqa: FURB136  (a conditional expression is one instruction without a branch; min() and max() are several)
"""The sum tree's kernels for Numba. Imported at the first use of a tree only, so that millpond runs without Numba.

Each kernel keeps the GIL, as a lock may be held around it. The order of every addition is fixed: `tree_numpy` gives
the same bits.

The arguments `tree, offsets, sizes` are the memory of a tree and its `sum_tree.Layout`; `values` are the numbers whose
largest the nodes keep, one for each leaf.
"""

from __future__ import annotations

from math import inf

import numpy as np
from numpy.typing import NDArray

from millpond.replay.kernels.compile import announce, compiled, inlined

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
#: What this is compiled together with (`tests/replay/test_kernels.py` knows): Numba's cache looks at this file alone.
SOURCES = "a18e814740f7a3db"
_TREE = "float64[::1], int64[::1], int64[::1]"


@inlined
def _lower(a: float, b: float) -> float:
    return a if a < b else b


@inlined
def _higher(a: float, b: float) -> float:
    return a if a > b else b


@inlined
def _or_inf(a: float) -> float:
    return a if a > 0.0 else inf


@inlined
def _sum_leaves(tree: Floats, values: Floats, child: int, node: int) -> None:
    total, low, high, count = 0.0, inf, 0.0, 0
    for k in range(8):
        leaf = tree[child + k]
        total += leaf
        low = _lower(low, _or_inf(leaf))
        high = _higher(high, values[child + k])
        count += int(leaf > 0.0)
    tree[node] = total
    tree[node + 8] = low if low < inf else 0.0
    tree[node + 16] = high
    tree[node + 24] = count


@inlined
def _sum_nodes(tree: Floats, child: int, node: int) -> None:
    total, low, high, count = 0.0, inf, 0.0, 0.0
    for k in range(8):
        total += tree[child + k]
        low = _lower(low, _or_inf(tree[child + 8 + k]))
        high = _higher(high, tree[child + 16 + k])
        count += tree[child + 24 + k]
    tree[node] = total
    tree[node + 8] = low if low < inf else 0.0
    tree[node + 16] = high
    tree[node + 24] = count


@inlined
def _sum_range(tree: Floats, values: Floats, offsets: Ints, level: int, first: int, last: int) -> None:
    below, here = offsets[level - 1], offsets[level]
    if level == 1:
        for node in range(first, last + 1):
            _sum_leaves(tree, values, below + 8 * node, here + 32 * (node >> 3) + (node & 7))
    else:
        for node in range(first, last + 1):
            _sum_nodes(tree, below + 32 * node, here + 32 * (node >> 3) + (node & 7))


@inlined
def sum_above(tree: Floats, values: Floats, offsets: Ints, sizes: Ints, slots: Ints) -> None:
    """Recompute every ancestor of `slots`, a level at a time, so that repeated nodes cost time and nothing else."""
    n = slots.size
    for level in range(1, sizes.size):
        if sizes[level] <= n:
            _sum_range(tree, values, offsets, level, 0, sizes[level] - 1)
            continue
        below, here, shift, previous = offsets[level - 1], offsets[level], 3 * level, -1
        for i in range(n):
            node = slots[i] >> shift
            if node != previous:
                if level == 1:
                    _sum_leaves(tree, values, below + 8 * node, here + 32 * (node >> 3) + (node & 7))
                else:
                    _sum_nodes(tree, below + 32 * node, here + 32 * (node >> 3) + (node & 7))
                previous = node


@compiled(f"int64({_TREE}, float64[::1], int64[::1], float64[::1], float64[::1], float64)")
def update(
    tree: Floats, offsets: Ints, sizes: Ints, values: Floats, slots: Ints, leaves: Floats, given: Floats, largest: float
) -> int:
    """Write `leaves`, and beside them what is `given`.

    Return -1, or the position of the first bad entry, and then nothing was written.
    """
    n, capacity = slots.size, sizes[0]
    for i in range(n):
        leaf = leaves[i]
        if slots[i] < 0 or slots[i] >= capacity or not (leaf >= 0.0 and leaf <= largest):
            return i
    for i in range(n):
        values[slots[i]] = given[i] + 0.0  # -0.0 becomes 0.0
        tree[slots[i]] = leaves[i] + 0.0
    sum_above(tree, values, offsets, sizes, slots)
    return -1


@compiled(f"int64({_TREE}, float64[::1], int64[::1], float64, float64)")
def fill_at(tree: Floats, offsets: Ints, sizes: Ints, values: Floats, slots: Ints, leaf: float, given: float) -> int:
    """Write one leaf, and beside it what is `given`.

    Return -1, or the position of the first bad slot, and then nothing was written.
    """
    n, capacity = slots.size, sizes[0]
    for i in range(n):
        if slots[i] < 0 or slots[i] >= capacity:
            return i
    for i in range(n):
        values[slots[i]] = given
        tree[slots[i]] = leaf
    sum_above(tree, values, offsets, sizes, slots)
    return -1


@compiled(f"void({_TREE}, float64[::1], int64, int64, float64)")
def fill(tree: Floats, offsets: Ints, sizes: Ints, values: Floats, first: int, n: int, leaf: float) -> None:
    """Write one leaf into a range that the caller has checked."""
    for slot in range(first, first + n):
        values[slot] = leaf
        tree[slot] = leaf
    for level in range(1, sizes.size):
        _sum_range(tree, values, offsets, level, first >> 3 * level, (first + n - 1) >> 3 * level)


@inlined
def walk(tree: Floats, offsets: Ints, sizes: Ints, mass: Floats, left: Floats, slots: Ints) -> None:
    """Walk all of `mass` down a level at a time, so that their cache misses overlap; `left` becomes the leaves."""
    for i in range(mass.size):
        slots[i] = 0
        left[i] = mass[i] if mass[i] > 0.0 else 0.0
    for level in range(sizes.size - 2, -1, -1):
        below, group = offsets[level], 32 if level else 8
        next_below, next_group = offsets[max(level - 1, 0)], 32 if level > 1 else 8
        for i in range(mass.size):
            child, rest = below + group * slots[i], left[i]
            sum_0 = tree[child]
            sum_1 = sum_0 + tree[child + 1]
            sum_2 = sum_1 + tree[child + 2]
            sum_3 = sum_2 + tree[child + 3]
            sum_4 = sum_3 + tree[child + 4]
            sum_5 = sum_4 + tree[child + 5]
            sum_6 = sum_5 + tree[child + 6]
            sum_7 = sum_6 + tree[child + 7]
            k = int(sum_0 <= rest) + int(sum_1 <= rest) + int(sum_2 <= rest) + int(sum_3 <= rest)
            k += int(sum_4 <= rest) + int(sum_5 <= rest) + int(sum_6 <= rest) + int(sum_7 <= rest)
            passed = 0.0
            passed = sum_0 if sum_0 <= rest else passed
            passed = sum_1 if sum_1 <= rest else passed
            passed = sum_2 if sum_2 <= rest else passed
            passed = sum_3 if sum_3 <= rest else passed
            passed = sum_4 if sum_4 <= rest else passed
            passed = sum_5 if sum_5 <= rest else passed
            passed = sum_6 if sum_6 <= rest else passed
            if k == 8:  # rounding above: the mass lies behind the last child; take the last that is not empty
                k = 7
                while k > 0 and not tree[child + k] > 0.0:
                    k -= 1
            slots[i] = 8 * slots[i] + k
            if level:
                left[i] = rest - passed
                announce(tree, next_below + next_group * slots[i])
            else:
                left[i] = tree[child + k]


@compiled(f"void({_TREE}, float64[::1], float64[::1], int64[::1])")
def draw(tree: Floats, offsets: Ints, sizes: Ints, mass: Floats, left: Floats, slots: Ints) -> None:
    """The slots in whose shares each `mass` lies; `left` becomes their leaves."""
    walk(tree, offsets, sizes, mass, left, slots)


@compiled(f"int64({_TREE}, float64[::1], float64)")
def rebuild(tree: Floats, offsets: Ints, sizes: Ints, values: Floats, largest: float) -> int:
    """Zero impossible leaves and all padding, recompute the rest; return how many leaves that were."""
    dropped = 0
    for slot in range(offsets[1]):
        leaf = tree[slot]
        fine = slot < sizes[0] and leaf >= 0.0 and leaf <= largest
        dropped += int(slot < sizes[0] and not fine)
        tree[slot] = leaf + 0.0 if fine else 0.0  # -0.0 becomes 0.0
        if slot < sizes[0]:
            values[slot] = values[slot] if fine and 0.0 <= values[slot] < inf else 0.0
    for level in range(1, sizes.size):
        for word in range(offsets[level + 1] - 32, offsets[level + 1]):
            tree[word] = 0.0
        _sum_range(tree, values, offsets, level, 0, sizes[level] - 1)
    return dropped
