"""Our batched environments beside Gymnasium's own, step by step, in the same autoreset mode: every bit must agree."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from millpond.envs import make_batched
from millpond.envs.batched import BatchedEnv

MODES = ("NextStep", "SameStep", "Disabled")


@dataclass
class Ends:
    terminated: int = 0
    truncated: int = 0


def ours(env_id: str, num_envs: int, mode: str = "NextStep", **kwargs: Any) -> BatchedEnv:
    env = make_batched(env_id, num_envs, autoreset_mode=mode, **kwargs)
    assert env is not None, f"{env_id} with {kwargs} has no batched version"
    return env


def theirs(env_id: str, num_envs: int, mode: str = "NextStep", **kwargs: Any) -> VectorEnv[Any, Any, Any]:
    vector = {"autoreset_mode": AutoresetMode(mode)}
    return gymnasium.make_vec(env_id, num_envs, "sync", vector_kwargs=vector, disable_env_checker=True, **kwargs)


def agree(
    env_id: str,
    *,
    mode: str = "NextStep",
    steps: int,
    seed: Any = 0,
    num_envs: int = 3,
    act: Callable[[Any], Any] | None = None,
    **kwargs: Any,
) -> Ends:
    """Fail at the first bit that differs; else say how many episodes ended.

    Actions are random, a third of them beyond their bounds where they have any, or what ``act`` makes of observations.
    """
    own = {name: kwargs.pop(name) for name in ("threads",) if name in kwargs}
    with (
        contextlib.closing(ours(env_id, num_envs, mode, **kwargs, **own)) as mine,
        contextlib.closing(theirs(env_id, num_envs, mode, **kwargs)) as other,
    ):
        assert mine.single_observation_space == other.single_observation_space
        assert mine.single_action_space == other.single_action_space
        other.action_space.seed(seed if isinstance(seed, int) else 0)
        seen, expected = mine.reset(seed=seed)[0], other.reset(seed=seed)[0]
        same(seen, expected, "the first observation")
        ends = Ends()
        for at in range(steps):
            actions = other.action_space.sample() if act is None else act(expected)
            if actions.dtype.kind == "f" and at % 3 == 0:
                actions = actions * np.float32(1.5)
            expected = _step(mine, other, actions, f"step {at}", ends)
        return ends


def _step(mine: BatchedEnv, other: Any, actions: Any, when: str, ends: Ends) -> Any:
    got, wanted = mine.step(actions), other.step(actions)
    for name, a, b in zip(("observation", "reward", "terminated", "truncated"), got, wanted, strict=False):
        same(a, b, f"{name} of {when}")
    terminated, truncated = wanted[2], wanted[3]
    ends.terminated += int(terminated.sum())
    ends.truncated += int(truncated.sum())
    ended = terminated | truncated
    if not ended.any():
        assert got[4] == {}
        return wanted[0]
    if mine.autoreset_mode is AutoresetMode.SAME_STEP:
        same(got[4]["_final_obs"], wanted[4]["_final_obs"], f"_final_obs of {when}")
        for i in np.flatnonzero(ended):
            same(got[4]["final_obs"][i], wanted[4]["final_obs"][i], f"final_obs[{i}] of {when}")
    if mine.autoreset_mode is not AutoresetMode.DISABLED:
        return wanted[0]
    seen = mine.reset(options={"reset_mask": ended.copy()})[0]
    expected = other.reset(options={"reset_mask": ended.copy()})[0]
    same(seen, expected, f"the observation after the reset at {when}")
    return expected


def same(a: Any, b: Any, what: str) -> None:
    assert a.dtype == b.dtype, f"{what}: {a.dtype}, not {b.dtype}"
    np.testing.assert_array_equal(a, b, err_msg=what, strict=True)
