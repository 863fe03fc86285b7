"""Prioritized replay: draw in proportion to a priority, and say what that did to the distribution.

Schaul, Quan, Antonoglou, Silver: Prioritized experience replay, ICLR 2016. Item i is drawn with probability
``(p_i + eps)^alpha / sum_k (p_k + eps)^alpha``; its importance weight is ``(N P(i))^-beta``, divided by the largest
such weight of any live item, which leaves ``(leaf_min / leaf_i)^beta``.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from millpond.core.errors import InvalidArgument, InvalidType
from millpond.core.schema import Key
from millpond.replay.samplers.protocol import Draw, Floats, Ints, Items, Randomness, State, distinct
from millpond.replay.samplers.schedules import LinearSchedule, Setting, Settings, Values, drawn, number, setting
from millpond.replay.samplers.sum_tree import NothingToDraw, SumTree
from millpond.replay.samplers.uniform import made
from millpond.replay.slots import successive

CHUNK = 1 << 20
Change = Callable[[State | None], Values | None]


class Weighed(NamedTuple):
    """Priorities, the leaves that follow from them, and of which settings (`PrioritizedSampler.version`)."""

    priorities: Floats
    leaves: Floats
    version: int

    def part(self, which: Any) -> Weighed:
        """Some of them."""
        return Weighed(self.priorities[which], self.leaves[which], self.version)


class PrioritizedSampler:
    """Items in proportion to ``(priority + eps)^alpha``.

    New items get the largest priority in the buffer (1 in an empty one) unless the write says otherwise. Priorities
    are set with ``buffer.update_priority``. Each batch carries ``priority_weight``, float32 ``[n]``, in (0, 1].

    ``alpha``, ``beta`` and ``eps`` may be assigned at any time, and hold from the next sample on, in all processes that
    share the buffer. Assigning ``alpha`` or ``eps`` computes all leaves anew, with the buffer locked: about 50 ms for a
    million items. A checkpoint restores what was assigned, where it is loaded into a sampler that was built alike;
    else what the running code was built with holds.

    Args:
        alpha: 0 is uniform, 1 is proportional. An alpha that follows a schedule changes in a hundred equal stages.
        beta: how far the weights undo the bias, 0 to 1.
        eps: added to each priority, so that none is zero.
        stratified: draw one item from each n-th of the total, which lowers the variance; False draws independently.
            Each process has its own.

    Raises:
        InvalidArgument, InvalidType: a value outside these ranges, here and from assigning. Nothing was changed.
    """

    replacement = True

    def __init__(
        self, *, alpha: Setting = 0.6, beta: Setting = 0.4, eps: float = 1e-6, stratified: bool = True
    ) -> None:
        alpha, beta = setting("alpha", alpha), setting("beta", beta, most=1.0)
        values = Values(0.0, number("eps", eps), alpha, beta)
        self._settings = Settings(values._replace(exponent=values.exponent_at(0)))
        self.stratified = stratified
        self._capacity = 0
        self._tree: SumTree | None = None
        #: Computes values and puts them in force under the buffer's lock; set by the engine that draws from this.
        self.change_locked: Callable[[Change], None] | None = None

    # ------------------------------------------------------------------ settings
    @property
    def alpha(self) -> Setting:
        return self._settings.now().alpha

    @alpha.setter
    def alpha(self, value: Setting) -> None:
        self._assign(alpha=setting("alpha", value))

    @property
    def beta(self) -> Setting:
        return self._settings.now().beta

    @beta.setter
    def beta(self, value: Setting) -> None:
        self._assign(beta=setting("beta", value, most=1.0))

    @property
    def eps(self) -> float:
        return self._settings.now().eps

    @eps.setter
    def eps(self, value: float) -> None:
        self._assign(eps=number("eps", value))

    @property
    def stratified(self) -> bool:
        return self._stratified

    @stratified.setter
    def stratified(self, value: bool) -> None:
        if not isinstance(value, bool):
            raise InvalidType(f"stratified is True or False, not {value!r}")
        self._stratified = value

    def _assign(self, **given: Any) -> None:
        def change(state: State | None) -> Values:
            values = self._settings.now()._replace(**given)
            values = values._replace(exponent=values.exponent_at(0 if state is None else drawn(state)))
            self._refuse_extreme(values)
            return values

        if self.change_locked is not None:
            self.change_locked(change)
        else:  # of no buffer yet, or of one that was closed
            self._settings.leave()
            self._tree = None
            with self._settings.changing(change(None)):
                pass

    def _refuse_extreme(self, values: Values) -> None:
        """Raises ``InvalidArgument`` where what is there, or a new item, would have a leaf that the tree refuses."""
        highest = 1.0 if self._tree is None else max(self._tree.max, 1.0)
        if self._capacity and self._too_large(highest, values):
            raise InvalidArgument(
                f"with alpha={values.alpha} and eps={values.eps} priority {highest:g} is too large for a tree of "
                f"{self._capacity} items"
            )

    def due(self, state: Sequence[int]) -> bool:
        """Must the leaves get another alpha before the next batch?"""
        values = self._settings.now()
        return isinstance(values.alpha, LinearSchedule) and values.exponent_at(drawn(state)) != values.exponent

    def next_stage(self, state: State | None) -> Values | None:
        """The values with that alpha; None where somebody was faster."""
        assert state is not None
        values = self._settings.now()
        return values._replace(exponent=values.exponent_at(drawn(state))) if self.due(state) else None

    def beta_at(self, state: Sequence[int]) -> float:
        """The beta of a batch that is drawn in this state."""
        beta = self._settings.now().beta
        return beta.at(drawn(state)) if isinstance(beta, LinearSchedule) else beta

    @property
    def settings(self) -> Settings:
        """What all copies of this sampler share."""
        return self._settings

    # ------------------------------------------------------------------ what the engine asks
    def memory(self, capacity: int) -> dict[str, int]:
        self._capacity = capacity
        if self._tree is None:
            self._refuse_extreme(self._settings.now())
        return {
            "tree": SumTree.nbytes(capacity),
            "priorities": SumTree.values_nbytes(capacity),
            "priority_settings": Settings.NBYTES,
        }

    def bind(self, arrays: Callable[[str], Any]) -> None:
        self._tree = SumTree(self._capacity, arrays("tree"), values=arrays("priorities"), create=False)
        self._tree.prepare()  # compiling must not happen under the lock
        self._settings.bind(memoryview(arrays("priority_settings")))

    @property
    def tree(self) -> SumTree:
        """The tree of leaves by slot, with the priorities beside them."""
        assert self._tree is not None
        return self._tree

    def ready(self, items: Items, n: int) -> str | None:
        needed = n if items.distinct else 1
        if self.tree.count >= needed:
            return None
        return f"{self.tree.count} of {items.size} items have a priority above zero, {needed} are needed"

    def draw(self, items: Items, n: int, random: Randomness) -> Draw | None:
        tree, version = self.tree, self._settings.version
        if tree.count < (n if items.distinct else 1) or version & 1:
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
        beta = self.beta_at(items.state)
        if self._settings.version != version:  # without the lock: the leaves were computed anew meanwhile
            return None
        return Draw(slots, items.number(slots), self.weights(shares, beta))

    def weights(self, shares: Floats, beta: float) -> dict[Key, torch.Tensor]:
        """What a batch carries, given the least leaf divided by each of its items'."""
        weights = np.ones(len(shares)) if beta == 0.0 else _power(shares, beta)
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

    # ------------------------------------------------------------------ priorities; under the lock, except `weigh`
    def weigh(self, priority: Any, n: int) -> Weighed:
        """Priorities of n items, float64, and the leaves that follow from them. A scalar counts for all.

        Raises:
            InvalidArgument, InvalidType: a priority that is negative or not finite, or not one for each item.
        """
        values = real_numbers(priority)
        if values.size == 1 and n != 1:
            values = np.repeat(values, n)
        if values.size != n:
            raise InvalidArgument(f"{values.size} priorities for {n} items")
        version, settings = self._settings.version, self._settings.now()
        if n == 0:
            return Weighed(values, values, version)
        highest = float(np.maximum.reduce(values))
        if not (np.minimum.reduce(values) >= 0.0 and highest < math.inf):  # also where one of them is NaN
            bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
            raise InvalidArgument(f"a priority is finite and not negative; number {bad[0]} of {n} is {values[bad[0]]}")
        if self._too_large(highest, settings):
            raise InvalidArgument(f"priority {highest:g} is too large for a tree of {self._capacity} items")
        return Weighed(values, _power(values + settings.eps, settings.exponent), version)

    def _too_large(self, priority: float, settings: Values) -> bool:
        """Could its leaf, now or at a later alpha, be one that the tree refuses?"""
        most = math.log(SumTree.largest(self._capacity)) - 1e-9
        return settings.steepest * math.log(max(priority + settings.eps, 1.0)) >= most

    def _leaves(self, weighed: Weighed) -> Floats:
        if weighed.version == self._settings.version:
            return weighed.leaves
        settings = self._settings.now()  # another alpha or eps since
        return _power(weighed.priorities + settings.eps, settings.exponent)

    def set_leaves(self, slots: Ints, weighed: Weighed) -> None:
        """Give live items other priorities."""
        self.tree.update(slots, self._leaves(weighed), weighed.priorities)

    def wrote(self, slots: Ints, weighed: Weighed | None) -> None:
        """New items stand in ``slots``; without priorities they get the maximum over those that were there before."""
        tree = self.tree
        tree.fill_at(slots, 0.0)  # what was there before counts no more
        if weighed is not None:
            self.set_leaves(slots, weighed)
            return
        settings, top = self._settings.now(), tree.max if tree.count else 1.0
        tree.fill_at(slots, float(_power(np.array([top + settings.eps]), settings.exponent)[0]), top)

    def left(self, slots: Ints) -> None:
        """The items in ``slots`` are gone."""
        self.tree.fill_at(slots, 0.0)

    def recover(self, live: Ints) -> None:
        """Make the tree right again after somebody died, or failed, while changing it, given the live slots."""
        self._rebuild(live, self._settings.settle())

    def settle(self, values: Values, live: Callable[[], Ints]) -> None:
        """Put values in force that a `Change` gave."""
        before = self._settings.now()
        with self._settings.changing(values):
            if (values.exponent, values.eps) != (before.exponent, before.eps):
                self._rebuild(live(), values)

    def check_saved(self, settings: bytes | None, config: dict[str, Any], highest: float) -> None:
        """Raises ``InvalidArgument`` where `restore` could not go on with these settings and this highest priority."""
        values = self._settings.now()
        values = values._replace(beta=config["beta"]) if settings is None else self._settings.restored(settings)
        setting("alpha", values.alpha)
        setting("beta", values.beta, most=1.0)
        number("eps", values.eps)
        if self._too_large(highest, values):
            raise InvalidArgument(f"priority {highest:g} is too large for a tree of {self._capacity} items")

    def restore(self, saved: dict[str, Any], config: dict[str, Any], state: State, live: Ints) -> None:
        """A checkpoint was written into the memory, of which ``saved`` are the arrays: go on with its priorities.

        One of an earlier version has leaves alone, computed with the ``config`` of then.
        """
        words = saved.get("priority_settings")
        if words is not None:
            values = self._settings.restored(words.numpy().tobytes())
        else:
            leaves, alpha = self.tree.leaves[live], config["alpha"]
            found = np.ones(len(live)) if alpha == 0.0 else _power(leaves, 1.0 / alpha) - config["eps"]
            self.tree.values[:] = 0.0
            self.tree.values[live] = np.maximum(found, 0.0)
            values = self._settings.now()._replace(beta=config["beta"])
        values = values._replace(exponent=values.exponent_at(drawn(state)))
        with self._settings.changing(values):
            self._rebuild(live, values)

    def _rebuild(self, live: Ints, values: Values) -> None:
        """All leaves from the priorities of the live items."""
        tree, alive = self.tree, np.zeros(self._capacity, np.bool_)
        alive[live] = True
        for a in range(0, self._capacity, CHUNK):
            part = slice(a, a + CHUNK)
            priorities, leaves, here = tree.values[part], tree.leaves[part], alive[part]
            priorities[~(here & (priorities >= 0.0) & (priorities < math.inf))] = 0.0
            leaves[:] = np.where(here, _power(priorities + values.eps, values.exponent), 0.0)
        tree.rebuild()

    def config(self) -> dict[str, Any]:
        values = self._settings.now()
        return {"alpha": values.alpha, "beta": values.beta, "eps": values.eps, "stratified": self.stratified}

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
            if values.dtype.kind == "O" and all(isinstance(value, numbers.Real) for value in values.flat):
                values = values.astype(np.float64)  # integers of more than 64 bits, fractions
            if isinstance(priority, np.ma.MaskedArray) and priority.mask.any():
                raise InvalidType("some of these priorities are masked; give each item one")
        elif priority.dtype is torch.bfloat16:
            values = priority.float().numpy(force=True)
        else:
            values = priority.numpy(force=True)
    except InvalidType:
        raise
    except OverflowError as problem:
        raise InvalidArgument(f"a priority is finite, not {priority!r:.60}") from problem
    except (TypeError, ValueError, RuntimeError) as problem:
        raise InvalidType(f"a priority is a number, not {priority!r:.60}") from problem
    if values.dtype.kind not in "fiub":
        raise InvalidType(f"a priority is a number, not {values.dtype}")
    with np.errstate(over="ignore"):  # of more than 64 bits: infinite is refused by whoever asks
        return values.astype(np.float64).reshape(-1)
