"""Samplers around another one that look along an episode: n-step returns and hindsight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch

from millpond.core.errors import InvalidArgument, InvalidType, SchemaMismatch
from millpond.core.fixed import Fixed
from millpond.core.schema import Key, Schema
from millpond.replay import order
from millpond.replay.order import EPISODE, REWARD, Episodes
from millpond.replay.samplers.protocol import Draw, Goals, Ints, Items, Randomness, Sampler, Windows
from millpond.replay.samplers.returns import can_tell_ends, compute
from millpond.replay.samplers.uniform import Arrays, RandomSampler, made
from millpond.replay.state import TAIL

STRATEGIES = ("future", "final", "episode", "random")


class EpisodeWrapper(Fixed):
    """A sampler around another one, which does the choosing."""

    FIXED: ClassVar[tuple[str, ...]] = ("base", "episode_key")
    base: Sampler

    def __init__(self, base: Sampler | None, episode_key: str | tuple[str, ...] | None) -> None:
        if base is not None and (isinstance(base, type) or not isinstance(base, Sampler)):
            raise InvalidType(f"base is a sampler, not {base!r}")
        self.base = RandomSampler() if base is None else base
        inner: Any = self.base
        while inner is not None:
            if type(inner) is type(self):
                name = type(self).__name__
                raise InvalidArgument(f"{name} around another {name}: which of the two is meant? Give one of them")
            theirs = getattr(inner, "episode_key", None)
            if episode_key is not None and theirs not in (None, EPISODE, order.key_of("episode_key", episode_key)):
                raise InvalidArgument(f"episode_key={episode_key!r} here, {theirs!r} in {inner!r}: give it once")
            episode_key = episode_key if theirs in (None, EPISODE) else theirs
            inner = getattr(inner, "base", None)
        self.episode_key: Key = order.key_of("episode_key", episode_key or EPISODE)
        self.episodes = Episodes(self.episode_key)

    @property
    def replacement(self) -> bool:
        return self.base.replacement

    def memory(self, capacity: int) -> dict[str, int]:
        return {**self.base.memory(capacity), order.NAME: order.nbytes(capacity)}

    def bind(self, arrays: Arrays) -> None:
        self.base.bind(arrays)
        theirs = getattr(self.base, "episodes", None)  # one index serves all
        self.episodes = Episodes.bound(self.episode_key, arrays)
        if isinstance(theirs, Episodes) and theirs.key == self.episode_key:
            self.episodes = theirs

    def ready(self, items: Items, n: int) -> str | None:
        return self.base.ready(items, n)

    def check_schema(self, schema: Schema) -> None:
        """Raises ``SchemaMismatch`` where the items lack what this sampler, or the one it is around, needs."""
        order.check_ends(schema, self.episode_key, repr(self))
        check = getattr(self.base, "check_schema", None)
        if check is not None:
            check(schema)

    def draw(self, items: Items, n: int, random: Randomness) -> Draw | None:
        with self.episodes.lock:
            draw = self.plan(items, n, random)
            if draw is not None:
                compute(items, draw)
            return draw

    def plan(self, items: Items, n: int, random: Randomness) -> Draw | None:
        """Choose, and say what the items stand for; `draw` computes their fields from it."""
        return (
            self.base.plan(items, n, random)
            if isinstance(self.base, EpisodeWrapper)
            else self.base.draw(items, n, random)
        )

    def config(self) -> dict[str, Any]:
        return {"base": self.base, **({} if self.episode_key == EPISODE else {"episode_key": self.episode_key})}

    def __reduce__(self) -> tuple[Any, ...]:
        return made, (type(self), self.config())


class NStep(EpisodeWrapper):
    """n-step returns, computed when a batch is drawn: the stored transitions stay single steps.

    ``next/reward`` becomes ``sum_j gamma^j r_j`` over the steps of the window, every other ``next`` field comes from
    its last step, and ``steps_to_next_obs`` (int64 ``[n, 1]``) says how many steps were really used: the bootstrap is
    discounted by ``gamma ** steps_to_next_obs``. A window ends with its episode (of which only termination masks the
    bootstrap) and where the next step is not, or no longer, stored. Around a `HindsightSampler`, or inside one, a
    window has one goal, by which each of its rewards is computed.
    Sutton, Barto: Reinforcement learning, 2nd ed., section 7.1.

    Args:
        n: steps of a window, at most.
        gamma: discount of a step, 0 to 1.
        base: what chooses the first steps; uniform by default.
        episode_key: the field that tells episodes apart.
    """

    FIXED = ("n", "gamma", *EpisodeWrapper.FIXED)

    def __init__(
        self, n: int, gamma: float, *, base: Sampler | None = None, episode_key: str | tuple[str, ...] | None = None
    ) -> None:
        super().__init__(base, episode_key)
        self.n = count("n", n)
        if isinstance(gamma, bool) or not isinstance(gamma, (int, float)):
            raise InvalidType(f"gamma is a number, not {gamma!r}")
        if not 0 <= gamma <= 1:
            raise InvalidArgument(f"gamma is in [0, 1], got {gamma}")
        self.gamma = float(gamma)

    def check_schema(self, schema: Schema) -> None:
        """Raises ``SchemaMismatch`` where there is no reward, or nothing says where an episode ends."""
        super().check_schema(schema)
        reward = schema.by_key.get(REWARD)
        if reward is None or not reward.dtype.is_floating_point:
            raise SchemaMismatch(f"{self!r} needs next/reward, of a floating-point type")

    def plan(self, items: Items, n: int, random: Randomness) -> Draw | None:
        draw = super().plan(items, n, random)
        if draw is None:
            return None
        index = self.episodes.look(items)
        slots, numbers, lengths = index.follow(draw.slots, draw.numbers, self.n, items.alive)
        lengths = np.maximum(lengths, 1)  # an item that left meanwhile: the batch is drawn again
        slots[:, 0], numbers[:, 0] = draw.slots, draw.numbers
        used = np.arange(self.n) < lengths[:, None]
        draw.windows = Windows(slots, numbers, lengths, self.gamma)
        draw.watch = _watch(draw.watch, slots[used], numbers[used])
        return draw

    def config(self) -> dict[str, Any]:
        return {"n": self.n, "gamma": self.gamma, **super().config()}

    def __repr__(self) -> str:
        return f"NStep({self.n}, {self.gamma}, base={self.base!r})"


class HindsightSampler(EpisodeWrapper):
    """Hindsight experience replay: part of a batch gets a goal that was achieved, instead of the one pursued.

    The goal is replaced in the observation and the next observation, the reward is computed anew, and ``relabelled``
    (bool ``[n, 1]``) says where. With ``terminated`` also ``next/terminated`` is, and ``next/done`` with it. A slice
    has one goal, found from its first step; so has the window of an `NStep`, inside or around.
    Andrychowicz et al.: Hindsight experience replay, NeurIPS 2017.

    Args:
        reward: ``reward(achieved, desired) -> [n]`` or ``[n, 1]``, for goals ``[n, *goal]``.
        fraction: of the batch that is relabelled, in expectation; 0.8 is four of five.
        strategy: whose achieved goal: of this step or a ``"future"`` one of its episode, of the ``"final"`` one, of any
            of the ``"episode"``, or of a ``"random"`` item of the buffer. Of an episode that goes on, the final step is
            the latest that is stored.
        goal, achieved: keys of the goal that is pursued and of the one that is reached. A string is a key below
            ``observation``, a tuple a key of the item; what was reached stands at the same key below ``next``.
        terminated: ``terminated(achieved, desired)``, where reaching the goal ends the episode; else it stays as
            stored.
        base: what chooses the items; uniform by default.
        episode_key: the field that tells episodes apart.
    """

    FIXED = ("reward", "fraction", "strategy", "goal", "achieved", "terminated", *EpisodeWrapper.FIXED)

    def __init__(
        self,
        reward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        *,
        fraction: float = 0.8,
        strategy: str = "future",
        goal: str | tuple[str, ...] = "desired_goal",
        achieved: str | tuple[str, ...] = "achieved_goal",
        terminated: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        base: Sampler | None = None,
        episode_key: str | tuple[str, ...] | None = None,
    ) -> None:
        super().__init__(base, episode_key)
        if not callable(reward) or not (terminated is None or callable(terminated)):
            raise InvalidType("reward, and terminated where given, are functions of (achieved, desired)")
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 <= fraction <= 1:
            raise InvalidArgument(f"fraction is a number in [0, 1], not {fraction!r}")
        self.reward, self.terminated, self.fraction = reward, terminated, float(fraction)
        self.strategy = order.chosen("strategy", strategy, STRATEGIES)
        self.goal, self.achieved = goal, achieved
        self.goal_key = _below_observation("goal", goal)
        self.achieved_key = ("next", *_below_observation("achieved", achieved))

    def check_schema(self, schema: Schema) -> None:
        """Raises ``SchemaMismatch`` where a goal, the reward, or the end of an episode is not among the fields."""
        super().check_schema(schema)
        following = ("next", *self.goal_key)
        needed = (self.goal_key, following, self.achieved_key, REWARD)
        order.require(schema, needed if self.goal_key[0] == "observation" else (needed[0], *needed[2:]), repr(self))
        goal, achieved = schema.by_key[self.goal_key], schema.by_key[self.achieved_key]
        if goal.size != achieved.size:
            raise SchemaMismatch(f"{goal.name} is {goal.describe()}, {achieved.name} {achieved.describe()}")
        if self.terminated is not None and not can_tell_ends(schema.by_key):
            raise SchemaMismatch(f"{self!r} with terminated= needs next/terminated; the items have {schema!r}")

    def plan(self, items: Items, n: int, random: Randomness) -> Draw | None:
        draw = super().plan(items, n, random)
        if draw is None:
            return None
        firsts = np.arange(0, len(draw.slots), draw.group)
        chosen = np.repeat(random.uniform(len(firsts)) < self.fraction, draw.group)
        leaders = firsts[chosen[firsts]]
        slots, numbers = self._choose(items, draw.slots[leaders], draw.numbers[leaders], random)
        draw.goals = Goals(chosen, np.repeat(slots, draw.group), self)
        draw.watch = _watch(draw.watch, slots, numbers)
        return draw

    def _choose(self, items: Items, slots: Ints, numbers: Ints, random: Randomness) -> tuple[Ints, Ints]:
        """The items whose achieved goals are pursued."""
        if self.strategy == "random":
            return items.at(random.below(len(slots), items.size))
        index = self.episodes.look(items)
        if self.strategy == "final":
            return index.last(slots, numbers, items.alive)
        if self.strategy == "episode":
            return index.any_of(slots, numbers, items.alive, random, items.state[TAIL])
        return index.later(slots, numbers, items.alive, random)

    def config(self) -> dict[str, Any]:
        return {
            "reward": self.reward,
            "fraction": self.fraction,
            "strategy": self.strategy,
            "goal": self.goal,
            "achieved": self.achieved,
            "terminated": self.terminated,
            **super().config(),
        }

    def __repr__(self) -> str:
        return f"HindsightSampler(fraction={self.fraction}, strategy={self.strategy!r}, base={self.base!r})"


def _below_observation(name: str, value: Any) -> Key:
    return ("observation", value) if isinstance(value, str) and value else order.key_of(name, value)


def _watch(before: tuple[Ints, Ints] | None, slots: Ints, numbers: Ints) -> tuple[Ints, Ints]:
    if before is None:
        return slots, numbers
    return np.concatenate([before[0], slots]), np.concatenate([before[1], numbers])


def count(name: str, value: Any) -> int:
    """Raises ``InvalidType`` or ``InvalidArgument`` for what is no number of steps."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InvalidType(f"{name} is a whole number, not {value!r}")
    if value < 1:
        raise InvalidArgument(f"{name} is at least 1, got {value}")
    return int(value)
