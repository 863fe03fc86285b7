"""Prioritized replay: draw in proportion to a priority, and say what that did to the distribution.

Schaul, Quan, Antonoglou, Silver: Prioritized experience replay, ICLR 2016. Item i is drawn with probability
``(p_i + eps)^alpha / sum_k (p_k + eps)^alpha``; its importance weight is ``(N P(i))^-beta``, divided by the largest
such weight of any live item, which leaves ``(leaf_min / leaf_i)^beta``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from millpond.core.errors import InvalidArgument, InvalidType
from millpond.core.schema import Key
from millpond.replay.drawing import Draw, Floats, Ints, Items, Randomness, distinct
from millpond.replay.samplers import made
from millpond.replay.slots import successive
from millpond.replay.sum_tree import NothingToDraw, SumTree


class PrioritizedSampler:
    """Items in proportion to ``(priority + eps)^alpha``.

    New items get the largest priority in the buffer (1 in an empty one) unless the write says otherwise. Priorities
    are set with ``buffer.update_priority``. Each batch carries ``priority_weight``, float32 ``[n]``, in (0, 1].

    Args:
        alpha: 0 is uniform, 1 is proportional.
        beta: how far the weights undo the bias, 0 to 1. May be set at any time, for annealing.
        eps: added to each priority, so that none is zero.
        stratified: draw one item from each n-th of the total, which lowers the variance; False draws independently.

    Raises:
        InvalidArgument, InvalidType: a value outside these ranges.
    """

    replacement = True

    def __init__(self, *, alpha: float = 0.6, beta: float = 0.4, eps: float = 1e-6, stratified: bool = True) -> None:
        self.alpha = _number("alpha", alpha)
        self.eps = _number("eps", eps)
        self.beta = beta
        if not isinstance(stratified, bool):
            raise InvalidType(f"stratified is True or False, not {stratified!r}")
        self.stratified = stratified
        self._capacity = 0
        self._tree: SumTree | None = None

    @property
    def beta(self) -> float:
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = _number("beta", value)

    # ------------------------------------------------------------------ what the engine asks
    def memory(self, capacity: int) -> dict[str, int]:
        self._capacity = capacity
        return {"tree": SumTree.nbytes(capacity)}

    def bind(self, arrays: Callable[[str], Any]) -> None:
        self._tree = SumTree(self._capacity, arrays("tree"), create=False)
        self._tree.prepare()  # compiling must not happen under the lock

    @property
    def tree(self) -> SumTree:
        """The tree of leaves by slot."""
        assert self._tree is not None
        return self._tree

    def ready(self, items: Items, n: int) -> str | None:
        needed = n if items.distinct else 1
        if self.tree.count >= needed:
            return None
        return f"{self.tree.count} of {items.size} items have a priority above zero, {needed} are needed"

    def draw(self, items: Items, n: int, random: Randomness) -> Draw | None:
        tree = self.tree
        if tree.count < (n if items.distinct else 1):
            return None
        try:
            if items.distinct:
                found = self._draw_distinct(n, random)
                if found is None:
                    return None
                slots, leaves = found, tree.leaf(found)
            elif self.stratified:
                mass = successive(0, n) + random.uniform(n)
                mass *= tree.total / n
                slots, leaves = tree.draw(mass)
            else:
                slots, leaves = tree.draw(random.uniform(n) * tree.total)
        except NothingToDraw:  # without the lock: somebody empties the buffer, or mends the tree
            return None
        with np.errstate(divide="ignore"):  # a leaf that became 0 meanwhile: its item left, and the draw is made again
            shares = np.minimum(tree.min_positive / leaves, 1.0)
        return Draw(slots, items.number(slots), self.weights(shares))

    def weights(self, shares: Floats) -> dict[Key, torch.Tensor]:
        """What a batch carries, given the least leaf divided by each of its items'."""
        weights = np.ones(len(shares)) if self._beta == 0.0 else _power(shares, self._beta)
        return {("priority_weight",): torch.from_numpy(weights.astype(np.float32))}

    def _draw_distinct(self, n: int, random: Randomness) -> Ints | None:
        """One after the other without putting back: what was drawn already is drawn again."""
        tree, chosen = self.tree, dict[int, None]()
        for _ in range(8):
            drawn, _ = tree.draw(random.uniform(n - len(chosen)) * tree.total)
            chosen.update(dict.fromkeys(drawn.tolist()))
            if len(chosen) == n:
                return np.fromiter(chosen, np.int64, n)
        # Few items hold nearly all of the mass: the same distribution from one pass over all leaves
        # (Efraimidis, Spirakis: Weighted random sampling with a reservoir, 2006).
        leaves = tree.leaves.copy()
        slots = np.flatnonzero(leaves > 0)
        if len(slots) < n:
            return None
        keys = np.log(np.maximum(random.uniform(len(slots)), 1e-300)) / leaves[slots]
        keys[np.isin(slots, np.fromiter(chosen, np.int64, len(chosen)))] = np.inf  # these come first: they were drawn
        found = slots[np.argsort(-keys, kind="stable")[:n]]
        shuffled: Ints = found[distinct(n, n, random)]
        return shuffled

    # ------------------------------------------------------------------ priorities; under the lock, except `leaves`
    def leaves(self, priority: Any, n: int) -> Floats:
        """``(priority + eps)^alpha`` for n items, float64. A scalar counts for all.

        Raises:
            InvalidArgument: a priority that is negative or not finite, or not one for each item.
        """
        values = real_numbers(priority)
        if values.size == 1 and n != 1:
            values = np.repeat(values, n)
        if values.size != n:
            raise InvalidArgument(f"{values.size} priorities for {n} items")
        if n == 0:
            return values
        highest = float(np.maximum.reduce(values))
        if not (np.minimum.reduce(values) >= 0.0 and highest < math.inf):  # also where one of them is NaN
            bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
            raise InvalidArgument(f"a priority is finite and not negative; number {bad[0]} of {n} is {values[bad[0]]}")
        leaves = _power(values + self.eps, self.alpha)
        if (highest + self.eps) ** self.alpha > self.tree.largest_leaf:
            raise InvalidArgument(f"priority {highest:g} is too large for a tree of {self._capacity} items")
        return leaves

    def set_leaves(self, slots: Ints, leaves: Floats) -> None:
        """Give live items other priorities."""
        self.tree.update(slots, leaves)

    def wrote(self, slots: Ints, leaves: Floats | None) -> None:
        """New items stand in ``slots``; without ``leaves`` they get the maximum over those that were there before."""
        tree = self.tree
        tree.fill_at(slots, 0.0)  # what was there before counts no more
        if leaves is None:
            tree.fill_at(slots, tree.max or float(_power(np.array([1.0 + self.eps]), self.alpha)[0]))
        else:
            tree.update(slots, leaves)

    def left(self, slots: Ints) -> None:
        """The items in ``slots`` are gone."""
        self.tree.fill_at(slots, 0.0)

    def recover(self, live: Ints) -> None:
        """Make the tree right again after somebody died, or failed, while changing it, given the live slots."""
        leaves = self.tree.leaves
        kept = leaves[live].copy()
        leaves[:] = 0.0
        leaves[live] = kept
        self.tree.rebuild()

    def config(self) -> dict[str, Any]:
        return {"alpha": self.alpha, "beta": self.beta, "eps": self.eps, "stratified": self.stratified}

    def __reduce__(self) -> tuple[Any, ...]:
        return made, (type(self), self.config())

    def __repr__(self) -> str:
        return f"PrioritizedSampler(alpha={self.alpha}, beta={self.beta}, eps={self.eps}, stratified={self.stratified})"


def _power(values: Floats, exponent: float) -> Floats:
    return values if exponent == 1.0 else np.power(values, exponent)


def real_numbers(priority: Any) -> Floats:
    """A copy, ``[n]``. Raises ``InvalidType`` for what holds no real numbers."""
    try:
        if not isinstance(priority, torch.Tensor):
            values = np.asarray(priority)
        elif priority.dtype is torch.bfloat16:
            values = priority.float().numpy(force=True)
        else:
            values = priority.numpy(force=True)
    except (TypeError, ValueError, RuntimeError) as problem:
        raise InvalidType(f"a priority is a number, not {priority!r:.60}") from problem
    if values.dtype.kind not in "fiub":
        raise InvalidType(f"a priority is a number, not {values.dtype}")
    return values.astype(np.float64).reshape(-1)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating, np.integer)):
        raise InvalidType(f"{name} is a number, not {value!r}")
    if not math.isfinite(value) or value < 0:
        raise InvalidArgument(f"{name} is finite and not negative, got {value}")
    return float(value)
