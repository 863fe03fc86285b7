"""Whole slices of episodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from millpond.core.errors import InvalidArgument, InvalidType, SchemaMismatch, Unsatisfiable
from millpond.core.fixed import Fixed
from millpond.core.schema import Key, Schema
from millpond.replay import order
from millpond.replay.order import EPISODE, Episodes
from millpond.replay.samplers.episode_index import EpisodeIndex
from millpond.replay.samplers.episodes import count
from millpond.replay.samplers.prioritized import PrioritizedSampler
from millpond.replay.samplers.protocol import Bools, Draw, Floats, Ints, Items, Randomness, Sampler, distinct
from millpond.replay.samplers.uniform import Arrays, RandomSampler, made

ROUNDS = 8
MASK = ("mask",)


class SliceSampler(Fixed):
    """Whole slices of ``slice_len`` successive steps of one episode, uniform over all places where one can begin.

    A batch of n items holds ``n / slice_len`` slices one after the other, flat. Episodes, and the stubs that eviction
    leaves of them, that are shorter than a slice are not sampled, unless ``short="pad"``.

    Args:
        slice_len: steps of a slice.
        num_slices: slices of a batch, instead of ``slice_len``.
        short: what becomes of episodes that are shorter than a slice: ``"skip"``, or ``"pad"``: they are sampled whole
            from their first step on, as one more place where a slice can begin. What is missing repeats the last step,
            with a ``generation`` of -1, and ``mask`` (bool ``[n]``) is False there. (TorchRL: ``strict_length=False``
            with ``pad_output=True``.)
        base: what draws the first steps: a `RandomSampler`, or a `PrioritizedSampler`, which draws them by their
            priorities among the places where a slice can begin. ``priority_weight`` is that of the first step, for
            each step of the slice.
        episode_key: the field that tells episodes apart.

    Raises:
        InvalidArgument: neither or both of the first two are given, or the batch size is no multiple.
        Unsatisfiable: a slice is longer than the buffer (from its construction).
    """

    FIXED = ("slice_len", "num_slices", "short", "base", "episode_key")

    def __init__(
        self,
        *,
        slice_len: int | None = None,
        num_slices: int | None = None,
        short: str = "skip",
        base: Sampler | None = None,
        episode_key: str | tuple[str, ...] | None = None,
    ) -> None:
        if (slice_len is None) == (num_slices is None):
            raise InvalidArgument("a SliceSampler takes slice_len or num_slices, one of the two")
        self.slice_len = None if slice_len is None else count("slice_len", slice_len)
        self.num_slices = None if num_slices is None else count("num_slices", num_slices)
        self.short = order.chosen("short", short, ("skip", "pad"))
        if base is not None and (isinstance(base, type) or not isinstance(base, Sampler)):
            raise InvalidType(f"base is a sampler, not {base!r}")
        self.base = RandomSampler() if base is None else base
        if not isinstance(self.base, (RandomSampler, PrioritizedSampler)):
            raise InvalidArgument(
                f"the first steps of slices are drawn by a RandomSampler or a PrioritizedSampler, not by {base!r}. "
                "NStep and HindsightSampler go around the slices: NStep(n, gamma, base=SliceSampler(...))"
            )
        self.episode_key: Key = order.key_of("episode_key", episode_key or EPISODE)
        self.episodes = Episodes(self.episode_key)
        self._known: tuple[Ints, Ints] | None = None  # a place where a slice of `_known_length` began lately
        self._known_length = 0

    @property
    def replacement(self) -> bool:
        return self.base.replacement

    def memory(self, capacity: int) -> dict[str, int]:
        return {**self.base.memory(capacity), order.NAME: order.nbytes(capacity)}

    def bind(self, arrays: Arrays) -> None:
        self.base.bind(arrays)
        self.episodes, self._known = Episodes.bound(self.episode_key, arrays), None

    def check_schema(self, schema: Schema) -> None:
        """Raises ``SchemaMismatch`` where the items do not say where an episode ends."""
        order.check_ends(schema, self.episode_key, repr(self))
        if self.short == "pad" and MASK in schema.by_key:
            raise SchemaMismatch("mask: slices with short='pad' have a mask of their own, which would hide this field")

    def refusal(self, n: int, most: int) -> InvalidArgument | Unsatisfiable | None:
        """Why no batch can ever have n items, where at most so many successive steps are stored."""
        length = self.length(n)
        if not length or n != length * (self.num_slices or n // length):
            unit = f"slices of {self.slice_len}" if self.slice_len is not None else f"{self.num_slices} slices"
            return InvalidArgument(f"a batch of {n} items cannot be cut into {unit}: batch_size counts items")
        return self.too_long(length, most)

    def too_long(self, length: int | None, most: int) -> Unsatisfiable | None:
        """Why no slice can ever have this length."""
        if length is None or length <= most or self.short == "pad":
            return None
        return Unsatisfiable(f"slices of {length} steps never lie among {most} items")

    def length(self, n: int) -> int:
        """Steps of a slice in a batch of n items."""
        return self.slice_len if self.slice_len is not None else n // (self.num_slices or 1)

    def ready(self, items: Items, n: int) -> str | None:
        length = self.length(n)
        needed = n // length if items.distinct else 1
        reason = self.base.ready(items, 1)
        if reason is not None:
            return reason
        with self.episodes.lock:
            if self._known is not None and self._known_length == length and items.alive(*self._known).all():
                return None
            index = self.episodes.look(items)
            starts, numbers, _ = self._starts(items, index, length)
            if len(starts) < needed:
                return f"{len(starts)} slices of {length} steps lie within an episode, {needed} are needed"
            if not items.distinct and self.short == "skip" and isinstance(self.base, RandomSampler):
                young = np.array([np.argmax(numbers)])  # it stays longest
                slots, members, _ = index.follow(starts[young], numbers[young], length, items.alive)
                self._known, self._known_length = (slots[0], members[0]), length
        return None

    def draw(self, items: Items, n: int, random: Randomness) -> Draw | None:
        if not isinstance(self.base, PrioritizedSampler):
            return self._draw(items, n, random)
        version = self.base.settings.version
        draw = None if version & 1 else self._draw(items, n, random)
        return draw if self.base.settings.version == version else None  # the leaves were computed anew meanwhile

    def _draw(self, items: Items, n: int, random: Randomness) -> Draw | None:
        length = self.length(n)
        with self.episodes.lock:
            index = self.episodes.look(items)
            if items.distinct:
                return self._draw_disjoint(items, index, n // length, length, random)
            firsts, numbers = self._draw_firsts(items, index, n // length, length, random)
            if len(firsts) < n // length:
                return None
            return self._slices(items, *index.follow(firsts, numbers, length, items.alive))

    def _draw_firsts(
        self, items: Items, index: EpisodeIndex, wanted: int, length: int, random: Randomness
    ) -> tuple[Ints, Ints]:
        """Where ``wanted`` slices begin: what the base draws, where no slice can begin there drawn again."""
        slots, numbers = np.empty(0, np.int64), np.empty(0, np.int64)
        more = 2 if isinstance(self.base, RandomSampler) else 1  # strata must all be used
        for _ in range(ROUNDS):
            draw = self.base.draw(items, more * (wanted - len(slots)), random)
            if draw is None:
                break
            able = self._able(items, index, draw.slots, draw.numbers, length)
            slots = np.concatenate([slots, draw.slots[able]])[:wanted]
            numbers = np.concatenate([numbers, draw.numbers[able]])[:wanted]
            if len(slots) == wanted:
                return slots, numbers
        places, its_numbers, leaves = self._starts(items, index, length)
        if not len(places):
            return slots, numbers
        if leaves is None:
            chosen = random.below(wanted - len(slots), len(places))
        else:
            edges = np.cumsum(leaves)
            chosen = np.searchsorted(edges, random.uniform(wanted - len(slots)) * edges[-1], side="right")
            chosen = np.minimum(chosen, len(places) - 1)
        return np.concatenate([slots, places[chosen]]), np.concatenate([numbers, its_numbers[chosen]])

    def _able(self, items: Items, index: EpisodeIndex, slots: Ints, numbers: Ints, length: int) -> Bools:
        """Can a slice begin there?"""
        lengths = index.follow(slots, numbers, length, items.alive)[2]
        able: Bools = lengths == length
        if self.short == "pad":
            able |= (lengths > 0) & index.heads(slots, items.alive)
        return able

    def _starts(self, items: Items, index: EpisodeIndex, length: int) -> tuple[Ints, Ints, Floats | None]:
        """Slots and numbers of all places where a slice can begin; and their leaves, where they have priorities."""
        slots, numbers, _ = index.starts(length, items.alive, short=self.short == "pad")
        if not isinstance(self.base, PrioritizedSampler):
            return slots, numbers, None
        leaves = self.base.tree.leaf(slots)
        able = leaves > 0
        return slots[able], numbers[able], leaves[able]

    def _draw_disjoint(
        self, items: Items, index: EpisodeIndex, wanted: int, length: int, random: Randomness
    ) -> Draw | None:
        """Slices that share no item, as a batch that is consumed must not hold one twice."""
        starts, numbers, leaves = self._starts(items, index, length)
        if leaves is None:
            turn = distinct(len(starts), len(starts), random)
        else:  # Efraimidis, Spirakis: Weighted random sampling with a reservoir, 2006
            turn = np.argsort(-np.log(np.maximum(random.uniform(len(starts)), 1e-300)) / leaves, kind="stable")
        window, members, lengths = index.follow(starts[turn], numbers[turn], length, items.alive)
        taken: set[int] = set()
        chosen = []
        for i, slots in enumerate(window.tolist()):
            if taken.isdisjoint(slots):
                taken.update(slots)
                chosen.append(i)
                if len(chosen) == wanted:
                    return self._slices(items, window[chosen], members[chosen], lengths[chosen])
        return None

    def _slices(self, items: Items, window: Ints, members: Ints, lengths: Ints) -> Draw:
        """The batch: slices ``[k, length]``, of which so many steps are not padding."""
        k, length = window.shape
        draw = Draw(window.reshape(-1), members.reshape(-1), group=length)
        if isinstance(self.base, PrioritizedSampler):
            with np.errstate(divide="ignore"):  # a leaf that became 0 meanwhile: the draw is made again
                shares = np.minimum(self.base.tree.min_positive / self.base.tree.leaf(window[:, 0]), 1.0)
            draw.extra |= self.base.weights(np.repeat(shares, length), self.base.beta_at(items.state))
        if self.short == "pad":
            mask = np.arange(length) < np.maximum(lengths, 1)[:, None]
            draw.extra[MASK] = torch.from_numpy(mask.reshape(-1))
            draw.extra["generation",] = torch.from_numpy(np.where(mask, members, -1).reshape(k * length))
        return draw

    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = {"slice_len": self.slice_len, "num_slices": self.num_slices}
        if self.short != "skip":
            config["short"] = self.short
        if type(self.base) is not RandomSampler:
            config["base"] = self.base
        return config if self.episode_key == EPISODE else {**config, "episode_key": self.episode_key}

    def __reduce__(self) -> tuple[Any, ...]:
        return made, (type(self), self.config())

    def __repr__(self) -> str:
        given = f"slice_len={self.slice_len}" if self.slice_len is not None else f"num_slices={self.num_slices}"
        more = "" if self.short == "skip" else f", short={self.short!r}"
        return f"SliceSampler({given}{more}{'' if type(self.base) is RandomSampler else f', base={self.base!r}'})"
