"""Tells a user, in words, what is wrong with an environment, before anything starts."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from millpond.core.errors import InvalidArgument, MillpondError
from millpond.envs.autoreset import AnyWorld, Step, Stepper
from millpond.envs.make import make
from millpond.envs.spaces import Leaf, leaves


def check_env(env: Any, *, num_envs: int = 2, steps: int = 1000, seed: int = 0) -> list[str]:
    """Try an environment with random actions and say what is wrong with it: one sentence each; empty if nothing is.

    ``env`` is whatever ``make`` takes. It is stepped until an episode has ended and the next has begun, at most
    ``steps`` times. An environment made here is closed here.

    Looked at: its spaces, that it says how it resets and does so, types, shapes and finiteness of what it returns,
    that a seed decides what it does, and that final observations are true.
    """
    ours = not hasattr(env, "step")
    try:
        made = make(env, num_envs=num_envs if ours else 1)
    except MillpondError as problem:
        return [str(problem)]
    try:
        return _check_spaces(made) or _Trial(made, seed).run(steps)
    finally:
        if ours:
            made.close()


def _check_spaces(env: AnyWorld) -> list[str]:
    found = []
    for what, space in (("observation", env.single_observation_space), ("action", env.single_action_space)):
        try:
            leaves(space, what)
        except InvalidArgument as problem:
            found.append(str(problem))
    action = env.single_action_space
    if isinstance(action, spaces.Box) and not (np.isfinite(action.low).all() and np.isfinite(action.high).all()):
        found.append("action: its bounds are infinite; policies for continuous actions need finite ones")
    try:
        Stepper(env)
    except InvalidArgument as problem:
        found.append(str(problem))
    return list(dict.fromkeys(found))


class _Trial:
    """One run with random actions, and what was noticed in it."""

    def __init__(self, env: Any, seed: int) -> None:
        self.env, self.seed = env, seed
        self.stepper = Stepper(env)
        self.n = env.num_envs
        self.problems: dict[str, str] = {}  # by kind, so that each is said once

    def run(self, steps: int) -> list[str]:
        try:
            self._check_seed()
            observation = self.stepper.reset(seed=self.seed)
            self._check_observation(observation, "reset()")
            self.env.action_space.seed(self.seed)
            ended_before = None
            for at in range(steps):
                step = self.stepper.step(self.env.action_space.sample())
                self._check_step(step, ended_before)
                before = _copy(self.stepper, step.next_observation)
                after = self.stepper.advance()
                if step.ended is not None:
                    self._check_new_episode(step, before, after, at)
                if ended_before is not None or self.problems:
                    break
                ended_before = step.ended
        except MillpondError as problem:
            self._say("error", str(problem))
        except Exception as problem:  # noqa: BLE001  # whatever the environment raises is what the user wants to know
            self._say("error", f"{self.env} raised {type(problem).__name__}: {problem}")
        return list(self.problems.values())

    def _say(self, kind: str, text: str) -> None:
        self.problems.setdefault(kind, text)

    def _check_seed(self) -> None:
        first = _copy(self.stepper, self.stepper.reset(seed=self.seed))
        again = _copy(self.stepper, self.stepper.reset(seed=self.seed))
        if not all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in zip(first, again, strict=True)):
            self._say("seed", "reset(seed=…) twice gave two different observations: runs cannot be repeated")

    def _check_observation(self, observation: Any, when: str) -> None:
        for leaf in self.stepper.observation_leaves:
            name = "/".join(("observation", *leaf.key))
            try:
                value = np.asarray(leaf.of(observation))
            except (KeyError, TypeError, IndexError):
                self._say(name, f"{name}: missing from what {when} returned, though the observation space has it")
                continue
            expected = (self.n, *leaf.shape)
            if value.shape != expected:
                self._say(name, f"{name}: {when} returned shape {value.shape}, the space says {expected}")
            elif not _fits(value.dtype, leaf):
                self._say(name, f"{name}: {when} returned {value.dtype}, the space says {leaf.dtype}")
            elif value.dtype.kind == "f" and not np.isfinite(value).all():
                self._say(name, f"{name}: {when} returned NaN or infinity")

    def _check_step(self, step: Step, ended_before: Any) -> None:
        self._check_observation(step.next_observation, "step()")
        reward = np.asarray(step.reward)
        if reward.shape != (self.n,):
            self._say("reward", f"reward: shape {reward.shape}; one number per environment, ({self.n},), is expected")
        elif reward.dtype.kind not in "biuf":
            self._say("reward", f"reward: {reward.dtype} is no number")
        elif not np.isfinite(reward.astype(np.float64)).all():
            self._say("reward", "reward: NaN or infinity")
        for name, value in (("terminated", step.terminated), ("truncated", step.truncated)):
            if value.shape != (self.n,):
                self._say(name, f"{name}: shape {value.shape}; one value per environment, ({self.n},), is expected")
        if self.stepper.mode is AutoresetMode.NEXT_STEP and ended_before is not None:
            again = ended_before & (step.terminated | step.truncated)
            if again.any() or (reward[ended_before] != 0).any():
                self._say(
                    "autoreset",
                    "it declares NextStep, but the step after the end of an episode gave a reward or ended again: does "
                    "it reset in the step that ends the episode (SameStep)?",
                )

    def _check_new_episode(self, step: Step, final: list[Any], after: Any, at: int) -> None:
        ended = step.ended
        assert ended is not None
        now = _copy(self.stepper, after)
        if self.stepper.mode is AutoresetMode.DISABLED:
            if any(not np.array_equal(a[~ended], b[~ended]) for a, b in zip(final, now, strict=True)):
                self._say("mask", "reset(options={'reset_mask': …}) also changed environments outside the mask")
        elif self.stepper.mode is AutoresetMode.SAME_STEP and step.lost is None and at:
            same = all(np.array_equal(a[ended], b[ended]) for a, b in zip(final, now, strict=True))
            if same:
                self._say(
                    "final",
                    "the final observation equals the first one of the next episode: the environment seems to reuse "
                    "its array; let it return copies",
                )


def _copy(stepper: Stepper, observation: Any) -> list[Any]:
    return [np.array(leaf.of(observation)) for leaf in stepper.observation_leaves]


def _fits(dtype: np.dtype[Any], leaf: Leaf) -> bool:
    """float32 for float64, or the other way round, is common and harmless; everything else is a mistake."""
    return dtype == leaf.dtype or (dtype.kind == leaf.dtype.kind == "f")
