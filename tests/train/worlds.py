"""Small environments, some with faults, for ids such as ``worlds:Corridor-v0``."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
import types
from pathlib import Path
from typing import Any, ClassVar

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
        choices: int = 2,
    ) -> None:
        self.observation_space = spaces.Box(-1, 1, (3,), np.float32)
        self.action_space = spaces.Discrete(choices) if discrete else spaces.Box(-1, 1, (1,), np.float32)
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


class Strict(Corridor):
    """Draws its time, and refuses whatever Gymnasium calls undefined; ``simulation`` makes it look like MuJoCo's.

    With ``how`` its pictures are none: ``none``, ``text`` or ``raise``.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 25}

    def __init__(
        self,
        *,
        render_mode: str | None = None,
        simulation: bool = False,
        dt: Any = None,
        how: str = "",
        length: int = 4,
    ) -> None:
        super().__init__(length=length)
        self.render_mode, self.ready, self.total, self.resets, self.how = render_mode, False, 0, 0, how
        if simulation:
            self.model, self.data = types.SimpleNamespace(opt=None), None
        if dt is not None:
            self.dt = dt

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.ready = True
        self.resets += 1
        return super().reset(seed=seed)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not self.ready:
            raise RuntimeError("step() after the end: reset first")
        self.total += 1
        observation, reward, terminated, truncated, info = super().step(action)
        self.ready = not terminated
        return observation, reward, terminated, truncated, info

    def render(self) -> Any:
        if self.how == "raise":
            raise RuntimeError("no screen")
        if self.how:
            return {"none": None, "text": "a picture"}[self.how]
        return np.full((32, 32, 3), 8 * self.total % 256, np.uint8)


for kind in (Corridor, Strange, Unbounded, Strict):
    gymnasium.register(f"{kind.__name__}-v0", entry_point=kind)
