"""Environments whose every number says where it comes from."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv, VectorEnv

MODES = ("NextStep", "SameStep", "Disabled")


class Diary(gymnasium.Env[Any, Any]):
    """Observes [name, episode, step, last action]. Lengths, and how episodes end, come from its own generator."""

    observation_space: Any = spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space: Any = spaces.Box(-100.0, 100.0, (2,), np.float32)  # room for actions that tell who chose them

    def __init__(self, name: int = 0, longest: int = 5) -> None:
        self.name, self.longest = name, longest
        self.episode, self.at, self.length, self.terminates = -1, 0, 1, True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.episode = -1
        self.episode += 1
        self.at = 0
        self.length = int(self.np_random.integers(1, self.longest + 1))
        self.terminates = bool(self.np_random.integers(2))
        return self._observe(0.0), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at += 1
        end = self.at >= self.length
        reward = 100.0 * self.episode + self.at  # also, and above all, on the last step
        return self._observe(float(np.sum(action))), reward, end and self.terminates, end and not self.terminates, {}

    def _observe(self, action: float) -> Any:
        return np.array([self.name, self.episode, self.at, action], np.float32)


class DictDiary(Diary):
    """The same in a dictionary of several types."""

    observation_space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (2, 3), np.uint8),
            "inner": spaces.Dict({"vector": spaces.Box(-np.inf, np.inf, (3,), np.float32)}),
            "id": spaces.Box(-(2**62), 2**62, (1,), np.int64),
        }
    )

    def _observe(self, action: float) -> Any:
        return {
            "image": np.full((2, 3), (17 * self.episode + self.at) % 256, np.uint8),
            "inner": {"vector": np.array([self.episode, self.at, action], np.float32)},
            "id": np.array([2**40 + self.name], np.int64),
        }


class Reusing(Diary):
    """Returns the same array each time."""

    def _observe(self, action: float) -> Any:
        if not hasattr(self, "_array"):
            self._array = np.zeros(4, np.float32)
        self._array[:] = [self.name, self.episode, self.at, action]
        return self._array


def diaries(n: int, mode: str, *, longest: int = 5, kind: type[Diary] = Diary) -> VectorEnv[Any, Any, Any]:
    """n diaries in one vector environment of the given autoreset mode."""
    return SyncVectorEnv([lambda i=i: kind(i, longest) for i in range(n)], autoreset_mode=mode)  # type: ignore[misc]
