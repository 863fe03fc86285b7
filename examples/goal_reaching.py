"""A goal environment with a reward that random actions hardly ever find: what hindsight replay is for.

From the directory of this file, a minute or two each::

    millpond train env=goal_reaching:PointReach-v0 algorithm=td3 total_frames=8000 replay.sampler=hindsight
    millpond train env=goal_reaching:PointReach-v0 algorithm=td3 total_frames=8000

Hindsight replay (Andrychowicz et al., 2017) gives a part of the sampled transitions a goal that was reached later in
their episode, and the reward of that goal. The first run learns to reach nearly every goal, the second stays where
exploration left it. An episode that reaches its goal returns more than -40.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

Floats = npt.NDArray[np.float32]


class PointReach(gymnasium.Env[dict[str, Floats], Floats]):
    """A point in the plane that is to reach a place at least 1 away, within 40 steps of at most 0.1 along each axis.

    The methods are those of ``GoalEnv`` of Gymnasium-Robotics: the reward is 0 within 0.1 of the goal, else -1.
    """

    def __init__(self) -> None:
        place = spaces.Box(-4.0, 4.0, (2,), np.float32)
        self.observation_space = spaces.Dict({"observation": place, "achieved_goal": place, "desired_goal": place})
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self._place, self._goal, self._steps = np.zeros(2, np.float32), np.zeros(2, np.float32), 0

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return -(np.linalg.norm(achieved_goal - desired_goal, axis=-1) > 0.1).astype(np.float32)

    def compute_terminated(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return self.compute_reward(achieved_goal, desired_goal, info) == 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Floats], dict[str, Any]]:
        super().reset(seed=seed)
        self._place, self._steps = np.zeros(2, np.float32), 0
        angle, distance = self.np_random.uniform(0, 2 * np.pi), self.np_random.uniform(1.0, 2.0)
        self._goal = (distance * np.array([np.cos(angle), np.sin(angle)])).astype(np.float32)
        return self._observed(), {}

    def step(self, action: Floats) -> tuple[dict[str, Floats], float, bool, bool, dict[str, Any]]:
        self._steps += 1
        self._place = self._place + np.float32(0.1) * np.asarray(action, np.float32)
        reward = float(self.compute_reward(self._place, self._goal, {}))
        return self._observed(), reward, reward == 0, self._steps >= 40, {"is_success": reward == 0}

    def _observed(self) -> dict[str, Floats]:
        return {
            "observation": self._place.copy(),
            "achieved_goal": self._place.copy(),
            "desired_goal": self._goal.copy(),
        }


gymnasium.register("PointReach-v0", entry_point=PointReach)


def share_reached_at_random(episodes: int) -> float:
    """How many of so many episodes reach their goal by uniformly random actions."""
    env, reached = PointReach(), 0
    env.action_space.seed(0)
    for seed in range(episodes):
        env.reset(seed=seed)
        over = False
        while not over:
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            over = terminated or truncated
        reached += terminated
    return reached / episodes


if __name__ == "__main__":
    print(f"random actions reach {share_reached_at_random(1000):.1%} of the goals")
