"""How good a policy is: episodes without exploration."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict
from torch import nn

from millpond.core.errors import Cancelled
from millpond.envs import Stepper, make
from millpond.train.settings import EnvSettings


@dataclass(frozen=True, slots=True)
class Episodes:
    """What was played: the sum of rewards and the number of steps of each episode, and the time that took.

    The return of an episode with a reward or an observation that is not finite is NaN. It is in no mean, and counted.
    """

    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    wall_s: float

    def row(self) -> dict[str, float]:
        """As ``eval/…`` metrics; without returns where no episode has one."""
        whole = np.isfinite(self.returns)
        row = {"eval/wall_s": self.wall_s, "eval/quarantined_episodes": float(np.count_nonzero(~whole))}
        if whole.any():
            returns, lengths = np.asarray(self.returns)[whole], np.asarray(self.lengths)[whole]
            row |= {
                "eval/return_mean": float(returns.mean()),
                "eval/return_std": float(returns.std()),
                "eval/return_min": float(returns.min()),
                "eval/return_max": float(returns.max()),
                "eval/length_mean": float(lengths.mean()),
            }
        return row


def never() -> bool:
    """Nobody cancels."""
    return False


def play(
    policy: nn.Module,
    env: EnvSettings,
    *,
    episodes: int,
    max_steps: int,
    seed: int,
    cancelled: Callable[[], bool] = never,
) -> Episodes:
    """Play one episode in each of ``episodes`` environments. The same seed and weights give the same returns.

    Each environment's *first* episode counts: counting those that end first would favour short ones. An episode that is
    longer than ``max_steps`` counts with the reward it had by then. One that meets a number that is not finite ends
    there, with NaN as its return; the policy never sees that number.

    Raises:
        Cancelled: ``cancelled()`` became true.
    """
    start = time.perf_counter()
    world = make(env.id, num_envs=episodes, kwargs=env.kwargs)
    try:
        stepper = Stepper(world)
        observation = stepper.reset(seed=seed)
        playing = np.ones(episodes, bool)
        returns, lengths = np.zeros(episodes), np.zeros(episodes, np.int64)
        for _ in range(max_steps):
            if cancelled():
                raise Cancelled("the evaluation was cancelled")
            lost = playing & ~_finite(stepper, observation)
            returns[lost] = math.nan
            playing &= ~lost
            if not playing.any():
                break
            step = stepper.step(act(policy, stepper, observation))
            returns[playing] += np.asarray(step.reward, np.float64)[playing]
            lengths[playing] += 1
            playing &= np.isfinite(returns)
            if step.ended is not None:
                playing &= ~step.ended
            observation = stepper.advance()
        returns[~np.isfinite(returns)] = math.nan
    finally:
        world.close()
    return Episodes(tuple(map(float, returns)), tuple(map(int, lengths)), time.perf_counter() - start)


def _finite(stepper: Stepper, observation: Any) -> npt.NDArray[np.bool_]:
    """Of which environments every number is finite: ``[num_envs]``."""
    whole = np.ones(stepper.num_envs, bool)
    for leaf in stepper.observation_leaves:
        if leaf.dtype.kind == "f":
            whole &= np.isfinite(np.asarray(leaf.of(observation)).reshape(stepper.num_envs, -1)).all(1)
    return whole


def act(policy: nn.Module, stepper: Stepper, observation: Any) -> Any:
    """The policy's actions for what ``stepper`` observed, as its environments take them."""
    return policy(as_tensors(stepper, observation, stepper.num_envs))["action"].numpy()


def as_tensors(stepper: Stepper, observation: Any, count: int) -> TensorDict:
    """What ``count`` environments observed, as a policy reads it."""
    data = TensorDict({}, batch_size=[count])
    for leaf in stepper.observation_leaves:
        values = np.asarray(leaf.of(observation))
        values = values.astype(np.float32) if values.dtype == np.float64 else values
        if values.dtype.kind == "f" and not np.isfinite(values).all():  # no environment must see what comes of NaN
            values = np.where(np.isfinite(values), values, 0).astype(values.dtype)
        data.set(("observation", *leaf.key) if leaf.key else "observation", torch.from_numpy(np.array(values)))
    return data
