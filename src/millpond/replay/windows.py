"""Samplers that look along an episode: slices, n-step returns, hindsight. Where episodes end only `sequences` knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from millpond.core.errors import InvalidArgument, InvalidType, SchemaMismatch
from millpond.core.schema import Key, Schema
from millpond.replay.drawing import Draw, Ints, Items, Randomness, Sampler, distinct
from millpond.replay.samplers import Arrays, RandomSampler, made
from millpond.replay.sequences import SequenceIndex
from millpond.replay.state import EMPTIED, HEAD

EPISODE, STEP, DONE = ("episode_id",), ("step",), ("next", "done")
TERMINATED, TRUNCATED, REWARD = ("next", "terminated"), ("next", "truncated"), ("next", "reward")


class Episodes:
    """The sequence index of this process, brought up to what was written since the last look."""

    def __init__(self) -> None:
        self._index: SequenceIndex | None = None
        self._seen = self._emptied = 0

    def look(self, items: Items) -> SequenceIndex:
        """The index over all items of this moment."""
        state = items.state
        if self._index is None or state[EMPTIED] != self._emptied:
            self._index, self._seen, self._emptied = SequenceIndex(items.capacity), 0, state[EMPTIED]
        if state[HEAD] > self._seen:
            slots, numbers = items.since(self._seen)
            known = items.schema.by_key
            keys = [key for key in (EPISODE, STEP, DONE, TERMINATED, TRUNCATED) if key in known]
            found = {
                k: v.reshape(len(slots), -1)[:, 0].numpy() for k, v in zip(keys, items.read(slots, keys), strict=True)
            }
            ends = [found[key].astype(bool) for key in (DONE, TERMINATED, TRUNCATED) if key in found]
            self._index.append(
                numbers,
                slots,
                found[EPISODE].astype(np.int64) if EPISODE in found and STEP in found else None,
                found[STEP].astype(np.int64) if EPISODE in found and STEP in found else None,
                np.logical_or.reduce(ends),
            )
            self._seen = state[HEAD]
        return self._index


def check_ends(schema: Schema, who: str) -> None:
    """Raises ``SchemaMismatch`` where the items do not say where an episode ends."""
    if not any(key in schema.by_key for key in (DONE, TERMINATED, TRUNCATED)):
        raise SchemaMismatch(f"{who} needs next/done, next/terminated or next/truncated; the items have {schema!r}")


class SliceSampler:
    """Whole slices of ``slice_len`` successive steps of one episode, uniform over all places where one can begin.

    A batch of n items holds ``n / slice_len`` slices one after the other, flat. Episodes, and the stubs that eviction
    leaves of them, that are shorter than a slice are not sampled.

    Args:
        slice_len: steps of a slice.
        num_slices: slices of a batch, instead of ``slice_len``.

    Raises:
        InvalidArgument: neither or both are given, or (from ``sample``) the batch size is no multiple.
    """

    replacement = True

    def __init__(self, *, slice_len: int | None = None, num_slices: int | None = None) -> None:
        if (slice_len is None) == (num_slices is None):
            raise InvalidArgument("a SliceSampler takes slice_len or num_slices, one of the two")
        self.slice_len = _count("slice_len", slice_len)
        self.num_slices = _count("num_slices", num_slices)
        self._episodes = Episodes()
        self._known: tuple[Ints, Ints] | None = None  # a place where a slice of `_known_length` began lately
        self._known_length = 0

    def memory(self, capacity: int) -> dict[str, int]:
        return {}

    def bind(self, arrays: Arrays) -> None:
        self._episodes, self._known = Episodes(), None

    def check_schema(self, schema: Schema) -> None:
        """Raises ``SchemaMismatch`` where the items do not say where an episode ends."""
        check_ends(schema, repr(self))

    def ready(self, items: Items, n: int) -> str | None:
        length = self._length(n)
        if self._known is not None and self._known_length == length and items.alive(*self._known).all():
            return None
        index = self._episodes.look(items)
        starts, numbers, _ = index.starts(length, items.alive)
        needed = n // length if items.distinct else 1
        if len(starts) < needed:
            return f"{len(starts)} slices of {length} steps lie within an episode, {needed} are needed"
        if not items.distinct:
            slots, members, _ = index.follow(starts[:1], numbers[:1], length, items.alive)
            self._known, self._known_length = (slots[0], members[0]), length
        return None

    def draw(self, items: Items, n: int, random: Randomness) -> Draw | None:
        length = self._length(n)
        wanted = n // length
        index = self._episodes.look(items)
        if items.distinct:
            return self._draw_disjoint(items, index, wanted, length, random)
        slots, numbers = np.empty((0, length), np.int64), np.empty((0, length), np.int64)
        for _ in range(8):  # uniform over all items; those from which a slice cannot go on are drawn again
            starts = items.at(random.below(2 * (wanted - len(slots)), items.size))
            window, members, lengths = index.follow(*starts, length, items.alive)
            whole = lengths == length
            slots = np.concatenate([slots, window[whole]])[:wanted]
            numbers = np.concatenate([numbers, members[whole]])[:wanted]
            if len(slots) == wanted:
                break
        else:
            places, its_numbers, _ = index.starts(length, items.alive)
            if not len(places):
                return None
            chosen = random.below(wanted - len(slots), len(places))
            window, members, _ = index.follow(places[chosen], its_numbers[chosen], length, items.alive)
            slots, numbers = np.concatenate([slots, window]), np.concatenate([numbers, members])
        return Draw(slots.reshape(-1), numbers.reshape(-1))

    def _draw_disjoint(
        self, items: Items, index: SequenceIndex, wanted: int, length: int, random: Randomness
    ) -> Draw | None:
        """Slices that share no item, as a batch that is consumed must not hold one twice."""
        starts, numbers, _ = index.starts(length, items.alive)
        order = distinct(len(starts), len(starts), random)
        window, members, _ = index.follow(starts[order], numbers[order], length, items.alive)
        taken: set[int] = set()
        chosen = []
        for i, slots in enumerate(window.tolist()):
            if taken.isdisjoint(slots):
                taken.update(slots)
                chosen.append(i)
                if len(chosen) == wanted:
                    return Draw(window[chosen].reshape(-1), members[chosen].reshape(-1))
        return None

    def _length(self, n: int) -> int:
        length = self.slice_len if self.slice_len is not None else n // (self.num_slices or 1)
        if length == 0 or n % length or (self.num_slices is not None and n != length * self.num_slices):
            unit = f"slices of {self.slice_len}" if self.slice_len is not None else f"{self.num_slices} slices"
            raise InvalidArgument(f"a batch of {n} items cannot be cut into {unit}: batch_size counts items")
        return length

    def config(self) -> dict[str, Any]:
        return {"slice_len": self.slice_len, "num_slices": self.num_slices}

    def __reduce__(self) -> tuple[Any, ...]:
        return made, (type(self), self.config())

    def __repr__(self) -> str:
        given = f"slice_len={self.slice_len}" if self.slice_len is not None else f"num_slices={self.num_slices}"
        return f"SliceSampler({given})"


class _Around:
    """A sampler around another one, which does the choosing."""

    base: Sampler

    def __init__(self, base: Sampler | None) -> None:
        if base is not None and (isinstance(base, type) or not isinstance(base, Sampler)):
            raise InvalidType(f"base is a sampler, not {base!r}")
        self.base = RandomSampler() if base is None else base
        self._episodes = Episodes()

    @property
    def replacement(self) -> bool:
        return self.base.replacement

    def memory(self, capacity: int) -> dict[str, int]:
        return self.base.memory(capacity)

    def bind(self, arrays: Arrays) -> None:
        self._episodes = Episodes()
        self.base.bind(arrays)

    def ready(self, items: Items, n: int) -> str | None:
        return self.base.ready(items, n)

    def config(self) -> dict[str, Any]:
        return {"base": self.base}

    def __reduce__(self) -> tuple[Any, ...]:
        return made, (type(self), self.config())


class NStep(_Around):
    """n-step returns, computed when a batch is drawn: the stored transitions stay single steps.

    ``next/reward`` becomes ``sum_j gamma^j r_j`` over the steps of the window, every other ``next`` field comes from
    its last step, and ``steps_to_next_obs`` (int64 ``[n, 1]``) says how many steps were really used: the bootstrap is
    discounted by ``gamma ** steps_to_next_obs``. A window ends with its episode (of which only termination masks the
    bootstrap) and where the next step is not, or no longer, stored. Sutton, Barto: Reinforcement learning, 2nd ed.,
    section 7.1.
    """

    def __init__(self, n: int, gamma: float, *, base: Sampler | None = None) -> None:
        super().__init__(base)
        self.n = _count("n", n) or 1
        if isinstance(gamma, bool) or not isinstance(gamma, (int, float)):
            raise InvalidType(f"gamma is a number, not {gamma!r}")
        if not 0 <= gamma <= 1:
            raise InvalidArgument(f"gamma is in [0, 1], got {gamma}")
        self.gamma = float(gamma)

    def check_schema(self, schema: Schema) -> None:
        """Raises ``SchemaMismatch`` where there is no reward, or nothing says where an episode ends."""
        check_ends(schema, repr(self))
        reward = schema.by_key.get(REWARD)
        if reward is None or not reward.dtype.is_floating_point:
            raise SchemaMismatch(f"{self!r} needs next/reward, of a floating-point type")

    def draw(self, items: Items, n: int, random: Randomness) -> Draw | None:
        draw = self.base.draw(items, n, random)
        if draw is None:
            return None
        index = self._episodes.look(items)
        slots, numbers, lengths = index.follow(draw.slots, draw.numbers, self.n, items.alive)
        lengths = np.maximum(lengths, 1)  # an item that left meanwhile: the batch is drawn again
        slots[:, 0], numbers[:, 0] = draw.slots, draw.numbers
        used = np.arange(self.n) < lengths[:, None]
        draw.extra |= self._returns(items, np.where(used, slots, slots[:, :1]), used, lengths)
        draw.watch = _watch(draw.watch, slots[used], numbers[used])
        return draw

    def _returns(self, items: Items, slots: Ints, used: Any, lengths: Ints) -> dict[Key, torch.Tensor]:
        """The fields of the batch that differ from the stored ones."""
        k = len(slots)
        (rewards,) = items.read(slots.reshape(-1), [REWARD])
        shape = rewards.shape[1:]
        steps = rewards.reshape(k, self.n, -1).to(torch.float32)
        weights = torch.from_numpy(np.where(used, self.gamma ** np.arange(self.n), 0.0).astype(np.float32))
        total = torch.einsum("kn,knr->kr", weights, torch.where(weights[..., None] > 0, steps, 0.0))
        first = steps[:, 0]
        total = torch.where(torch.from_numpy(lengths == 1)[:, None], first, total)
        keys = [f.key for f in items.schema.fields if f.key[0] == "next" and f.key != REWARD]
        last = slots[np.arange(k), lengths - 1]
        found: dict[Key, torch.Tensor] = dict(zip(keys, items.read(last, keys), strict=True))
        found[REWARD] = total.reshape(k, *shape).to(rewards.dtype)
        found["steps_to_next_obs",] = torch.from_numpy(lengths[:, None].astype(np.int64))
        return found

    def config(self) -> dict[str, Any]:
        return {"n": self.n, "gamma": self.gamma, "base": self.base}

    def __repr__(self) -> str:
        return f"NStep({self.n}, {self.gamma}, base={self.base!r})"


class HindsightSampler(_Around):
    """Hindsight experience replay: part of a batch gets a goal that its episode reached later.

    Andrychowicz et al.: Hindsight experience replay, NeurIPS 2017, strategy "future": the goal is what was achieved
    by this step or a later one of the same episode. The goal is replaced in the observation and the next observation,
    the reward is computed anew, and ``relabelled`` (bool ``[n, 1]``) says where.

    Args:
        reward: ``reward(achieved, desired) -> [n]`` or ``[n, 1]``, for goals ``[n, *goal]``.
        fraction: of the batch that is relabelled, in expectation; 0.8 is four of five.
        goal, achieved: the keys below ``observation`` of the goal that is pursued and of the one that is reached.
        terminated: ``terminated(achieved, desired)``, where reaching the goal ends the episode; else it stays as
            stored.
    """

    def __init__(
        self,
        reward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        *,
        fraction: float = 0.8,
        goal: str = "desired_goal",
        achieved: str = "achieved_goal",
        terminated: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        base: Sampler | None = None,
    ) -> None:
        super().__init__(base)
        if not callable(reward) or not (terminated is None or callable(terminated)):
            raise InvalidType("reward, and terminated where given, are functions of (achieved, desired)")
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 <= fraction <= 1:
            raise InvalidArgument(f"fraction is a number in [0, 1], not {fraction!r}")
        self.reward, self.terminated, self.fraction = reward, terminated, float(fraction)
        self.goal, self.achieved = goal, achieved

    def check_schema(self, schema: Schema) -> None:
        """Raises ``SchemaMismatch`` where a goal, the reward, or the end of an episode is not among the fields."""
        check_ends(schema, repr(self))
        for key in (*self._goals(), self._reached(), REWARD):
            if key not in schema.by_key:
                raise SchemaMismatch(f"{self!r} needs {'/'.join(key)}; the items have {schema!r}")

    def _goals(self) -> tuple[Key, Key]:
        return ("observation", self.goal), ("next", "observation", self.goal)

    def _reached(self) -> Key:
        return "next", "observation", self.achieved

    def draw(self, items: Items, n: int, random: Randomness) -> Draw | None:
        draw = self.base.draw(items, n, random)
        if draw is None:
            return None
        index = self._episodes.look(items)
        chosen = random.uniform(len(draw.slots)) < self.fraction
        later, its_numbers = index.future(draw.slots[chosen], draw.numbers[chosen], items.alive, random)
        wanted, following = items.read(draw.slots, list(self._goals()))
        (reached,) = items.read(draw.slots, [self._reached()])
        mask = torch.from_numpy(chosen)
        goals = items.read(later, [self._reached()])[0].to(wanted.dtype)
        wanted[mask] = goals
        following[mask] = goals
        keys: list[Key] = [REWARD]
        if self.terminated is not None and TERMINATED in items.schema.by_key:
            keys.append(TERMINATED)
        stored: dict[Key, torch.Tensor] = dict(zip(keys, items.read(draw.slots, keys), strict=True))
        for key, values in stored.items():
            compute = self.reward if key == REWARD else self.terminated
            assert compute is not None
            fresh = torch.as_tensor(compute(reached[mask], goals)).reshape(values[mask].shape)
            values[mask] = fresh.to(values.dtype)
        draw.extra[self._goals()[0]], draw.extra[self._goals()[1]] = wanted, following
        draw.extra |= stored
        draw.extra["relabelled",] = mask[:, None]
        draw.watch = _watch(draw.watch, later, its_numbers)
        return draw

    def config(self) -> dict[str, Any]:
        return {
            "reward": self.reward,
            "fraction": self.fraction,
            "goal": self.goal,
            "achieved": self.achieved,
            "terminated": self.terminated,
            "base": self.base,
        }

    def __repr__(self) -> str:
        return f"HindsightSampler(fraction={self.fraction}, base={self.base!r})"


def _watch(before: tuple[Ints, Ints] | None, slots: Ints, numbers: Ints) -> tuple[Ints, Ints]:
    if before is None:
        return slots, numbers
    return np.concatenate([before[0], slots]), np.concatenate([before[1], numbers])


def _count(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InvalidType(f"{name} is a whole number, not {value!r}")
    if value < 1:
        raise InvalidArgument(f"{name} is at least 1, got {value}")
    return int(value)
