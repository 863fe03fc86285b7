"""Environments that refuse every action that is not in their space; the reward tells which one they were given."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

ACTIONS: dict[str, Any] = {
    "vector": spaces.Box(np.float32([-2.3, -1e-30, 7.0]), np.float32([1.1, 1e-30, 7.25]), dtype=np.float32),
    "matrix": spaces.Box(np.float32(-0.7), np.float32(1.3), (2, 3), np.float32),
    "scalar": spaces.Box(np.float32(-0.1), np.float32(0.3), (), np.float32),
    "double": spaces.Box(-0.1, 0.3, (2,), np.float64),
    "choice": spaces.Discrete(3, start=-2),
    "late": spaces.Discrete(4, start=7),
}
OBSERVATIONS: dict[str, Any] = {
    "vector": spaces.Box(-1, 1, (3,), np.float32),
    "matrix": spaces.Box(-1, 1, (2, 3), np.float64),
    "scalar": spaces.Box(-1, 1, (), np.float32),
    "choice": spaces.Discrete(5, start=3),
    "several": spaces.Dict({"room": spaces.Discrete(4), "heat": spaces.Box(-1, 1, (), np.float32)}),
}


class Picky(gymnasium.Env[Any, Any]):
    """Episodes of ten random observations; the reward is the sum of the action."""

    def __init__(self, *, action: Any = "vector", observation: str = "vector") -> None:
        self.action_space = ACTIONS[action] if isinstance(action, str) else action
        self.observation_space = OBSERVATIONS[observation]
        self.at = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.at = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        space = self.action_space
        if isinstance(space, spaces.Box) and np.asarray(action).dtype != space.dtype:
            raise ValueError(f"{np.asarray(action).dtype} is not the type of {space}")
        if not space.contains(np.asarray(action) if isinstance(space, spaces.Box) else action):
            raise ValueError(f"{action!r} is not in {space}")
        self.at += 1
        reward = float(np.sum(np.asarray(action, np.float64)))
        return self.observation_space.sample(), reward, False, self.at == 10, {}


gymnasium.register("Picky-v0", entry_point=Picky)
