"""Several buffers as one distribution: how many items each gives, and what that does to importance weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from millpond.core.errors import InvalidArgument, InvalidType
from millpond.replay.config import layers
from millpond.replay.engine import Engine
from millpond.replay.samplers.protocol import Floats, Ints, Randomness, State
from millpond.replay.samplers.slices import SliceSampler


def shares_of(weights: Any, members: int) -> Floats:
    """Expected parts of a batch, of sum 1. Raises ``InvalidArgument`` or ``InvalidType`` for what is none."""
    try:
        shares = np.ones(members) if weights is None else np.array(weights, np.float64)
    except (TypeError, ValueError) as problem:
        raise InvalidType(f"weights are {members} numbers, not {weights!r:.60}") from problem
    fine = shares.shape == (members,) and np.isfinite(shares).all() and not (shares < 0).any() and shares.max() > 0
    if not fine:
        raise InvalidArgument(f"weights are {members} numbers, not negative and not all zero; got {weights!r}")
    shares = shares / shares.max()  # the sum of huge ones would be infinite
    shares = np.asarray(shares / shares.sum())
    shares.flags.writeable = False
    return shares


def unit_of(sampler: Any) -> int:
    """Of how many items the count must be a multiple that this sampler is asked for."""
    unit = 1
    for layer in layers(sampler):
        if isinstance(layer, SliceSampler):
            if layer.slice_len is None:
                raise InvalidArgument(
                    f"{layer!r} cuts what it is asked for into so many slices, whatever their length: in an ensemble, "
                    "where the members give different counts, give slice_len instead"
                )
            unit = math.lcm(unit, layer.slice_len)
    return unit


class Mix:
    """How a batch is made up.

    It is cut into blocks of as many items as suit all members, and the member of each block is chosen by its share.
    What is left over goes to one member that can give so many; then the shares of the blocks make up for that.
    """

    def __init__(self, shares: Floats, units: Sequence[int]) -> None:
        self._shares, self._units = shares, units
        used = [unit for unit, share in zip(units, shares, strict=True) if share > 0]
        self._block = math.lcm(*used)

    def counts(self, n: int, random: Randomness) -> list[int]:
        """How many items each member gives: ``n`` in all, each by its share in expectation."""
        blocks, rest, by_block, by_rest = self._plan(n)
        chosen = _chosen(by_block, random.uniform(blocks)) if blocks else np.empty(0, np.int64)
        counts = self._block * np.bincount(chosen, minlength=len(self._shares))
        if rest:
            counts[_chosen(by_rest, random.uniform(1))] += rest
        found: list[int] = counts.tolist()
        return found

    def most(self, n: int) -> list[int]:
        """The largest count that `counts` may ask each member for."""
        blocks, rest, by_block, by_rest = self._plan(n)
        both = zip(by_block, by_rest, strict=True)
        return [int(blocks * self._block * (block > 0) + rest * (left > 0)) for block, left in both]

    def _plan(self, n: int) -> tuple[int, int, Floats, Floats]:
        """Blocks, the rest, and how likely each member is to give a block, and the rest.

        Raises ``InvalidArgument`` where no choice gives each member its share.
        """
        blocks, rest = divmod(n, self._block)
        none: Floats = np.zeros(len(self._shares))
        if not rest:
            return blocks, 0, self._shares, none
        able = np.array([rest % unit == 0 for unit in self._units]) & (self._shares > 0)
        if able.any():
            by_rest = np.where(able, self._shares, 0.0) / self._shares[able].sum()
            by_block = (n * self._shares - rest * by_rest) / (n - rest) if blocks else none
            if by_block.min() > -1e-12 and (blocks or able[self._shares > 0].all()):
                return blocks, rest, np.maximum(by_block, 0.0), by_rest
        raise InvalidArgument(
            f"a batch of {n} items cannot be made of members that give multiples of {list(self._units)} items in "
            f"shares of {self._shares.round(4).tolist()}: ask for a multiple of {self._block}"
        )


def _chosen(shares: Floats, uniform: Floats) -> Ints:
    edges = np.cumsum(shares)
    return np.searchsorted(edges / edges[-1], uniform, side="right")


class Odds(NamedTuple):
    """Of one member: its live items, the least probability with which a draw from it gives one of them, and its beta,
    where it has priorities."""

    items: int
    least: float
    beta: float | None


def odds_of(engine: Engine, state: State) -> Odds | None:
    """None where it has no item. A sampler without priorities counts as one that is uniform over its live items."""
    priorities, items = engine.priorities, engine.counts(state).live
    if not items:
        return None
    if priorities is None:
        return Odds(items, 1.0 / items, None)
    total = priorities.tree.total
    return Odds(items, priorities.tree.min_positive / total, priorities.beta_at(state)) if total > 0.0 else None


def corrections(odds: Sequence[Odds | None], shares: Floats) -> list[float]:
    """For each member, by what its own importance weights are multiplied in the mix.

    Item i of member m, whose share is s, is drawn with probability ``s P_m(i)``; of N items in all, its weight is
    ``(N s P_m(i))^-beta`` over the largest such weight of any live item of all members. The member's own weights are
    ``(least_m / P_m(i))^beta``. A member without priorities has the largest beta of the others.
    """
    beta = max((o.beta for o in odds if o is not None and o.beta is not None), default=0.0)
    n = sum(o.items for o in odds if o is not None)
    logs = [
        -math.inf if o is None or share == 0 else -(beta if o.beta is None else o.beta) * math.log(n * share * o.least)
        for o, share in zip(odds, shares.tolist(), strict=True)
    ]
    highest = max(logs)
    return [math.exp(log - highest) if log > -math.inf else 1.0 for log in logs]
