"""Small environments, some with faults, for ids such as ``worlds:Corridor-v0``."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Corridor(gymnasium.Env[Any, Any]):
    """``length`` steps of reward 1, with random observations.

    While the file ``while_there`` exists, the ``for_steps`` steps after number ``at`` commit ``fault``: ``raise``,
    ``kill`` (after removing the file, so that only one process dies), ``hang``, ``stall`` (which hangs, after removing
    the file), ``huge`` (a reward that no loss survives), ``nan_reward``, or ``nan_observation``. ``where`` restricts
    that to processes whose name begins so.
    """

    def __init__(
        self,
        *,
        fault: str = "none",
        while_there: str = "/",
        at: int = 0,
        for_steps: int = 10**9,
        where: str = "",
        length: int = 10,
        discrete: bool = False,
    ) -> None:
        self.observation_space = spaces.Box(-1, 1, (3,), np.float32)
        self.action_space = spaces.Discrete(2) if discrete else spaces.Box(-1, 1, (1,), np.float32)
        self.fault, self.while_there, self.fault_at, self.where = fault, Path(while_there), at, where
        self.for_steps, self.length, self.at, self.steps = for_steps, length, 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.at = 0
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at += 1
        self.steps += 1
        reward = 1.0
        if 0 < self.steps - self.fault_at <= self.for_steps and self._here() and self.while_there.exists():
            reward = self._commit()
        observation = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        if math.isinf(reward):
            observation[1], reward = math.nan, 1.0
        return observation, reward, self.at >= self.length, False, {}

    def _here(self) -> bool:
        return multiprocessing.current_process().name.startswith(self.where)

    def _commit(self) -> float:
        if self.fault == "raise":
            raise RuntimeError("the corridor collapsed")
        if self.fault == "kill":
            self.while_there.unlink(missing_ok=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "stall":
            self.while_there.unlink(missing_ok=True)
        if self.fault in ("hang", "stall"):
            time.sleep(600)
        return {"huge": 1e30, "nan_reward": math.nan, "nan_observation": math.inf}.get(self.fault, 1.0)


class Strange(Corridor):
    """Observes what no network here can read."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3)])


class Unbounded(Corridor):
    """Takes actions without bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)


for kind in (Corridor, Strange, Unbounded):
    gymnasium.register(f"{kind.__name__}-v0", entry_point=kind)
