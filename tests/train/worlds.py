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
    the file), ``slow`` (0.05 s), ``huge`` (a reward that no loss survives), ``nan_reward``, or ``nan_observation``.
    ``where`` restricts that to processes whose name begins so.
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
        if self.fault == "slow":
            time.sleep(0.05)
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


class Reach(gymnasium.Env[Any, Any]):
    """A point on a line that is to reach a place, as the goal environments of Gymnasium-Robotics say it."""

    def __init__(self, *, length: int = 10, one_by_one: bool = False) -> None:
        place = spaces.Box(-2, 2, (1,), np.float32)
        self.observation_space = spaces.Dict({"observation": place, "achieved_goal": place, "desired_goal": place})
        self.action_space = spaces.Box(-1, 1, (1,), np.float32)
        self.length, self.one_by_one, self.at = length, one_by_one, 0
        self.place, self.goal = np.zeros(1, np.float32), np.zeros(1, np.float32)

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        if self.one_by_one and np.ndim(achieved_goal) > 1:
            raise ValueError("one goal at a time")
        return -(np.abs(achieved_goal - desired_goal)[..., 0] > 0.1).astype(np.float32)

    def compute_terminated(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return self.compute_reward(achieved_goal, desired_goal, info) == 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.at = np.zeros(1, np.float32), 0
        self.goal = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at += 1
        self.place = np.clip(self.place + 0.2 * np.asarray(action, np.float32), -2, 2)
        reward = float(self.compute_reward(self.place, self.goal, {}))
        return self._seen(), reward, reward == 0, self.at >= self.length, {}

    def _seen(self) -> dict[str, Any]:
        return {"observation": self.place.copy(), "achieved_goal": self.place.copy(), "desired_goal": self.goal.copy()}


for kind in (Corridor, Strange, Unbounded, Strict, Reach):
    gymnasium.register(f"{kind.__name__}-v0", entry_point=kind)
