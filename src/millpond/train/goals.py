"""What an environment says of goals: the reward of one that was reached while another was pursued."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from millpond.core.errors import InvalidArgument
from millpond.envs import make

GOALS = ("observation", "achieved_goal", "desired_goal")


class GoalFunction:
    """``compute_reward(achieved, desired, info)`` of an environment, or another method alike, for batches of goals.

    The methods are those of ``GoalEnv`` of Gymnasium-Robotics, without information of a step: ``info`` is an empty
    dictionary. One that takes a single goal at a time is called once for each. The environment is made when it is first
    needed, in each process, and ends with it. Pickles by its settings.

    Raises:
        InvalidArgument: the environment has no such method.
    """

    def __init__(self, env: str, kwargs: dict[str, Any], method: str) -> None:
        self.env, self.kwargs, self.method = env, dict(kwargs), method
        self._world: Any = None
        self._alone = False  # it takes one goal at a time
        self._function()

    def __call__(self, achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
        """Goals ``[n, *goal]`` each. Returns ``[n]``, float32 or bool."""
        function, reached, pursued = self._function(), achieved.cpu().numpy(), desired.cpu().numpy()
        if not self._alone:
            try:
                values = np.asarray(function(reached, pursued, {}))
            except (TypeError, ValueError, IndexError):
                values = np.empty(())
            self._alone = values.shape not in ((len(reached),), (len(reached), 1))
        if self._alone:
            values = np.array([function(one, other, {}) for one, other in zip(reached, pursued, strict=True)])
        values = values.reshape(len(reached))
        return torch.from_numpy(values.astype(bool if values.dtype == bool else np.float32))

    def _function(self) -> Any:
        if self._world is None:
            self._world = make(self.env, kwargs=self.kwargs)
        function = _inside(self._world, self.method)
        if function is None:
            raise InvalidArgument(
                f"replay.sampler=hindsight: {self.env} has no {self.method}(achieved_goal, desired_goal, info); it"
                " needs an environment with goals, as those of Gymnasium-Robotics are"
            )
        return function

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_world": None}

    def __repr__(self) -> str:
        return f"{self.env}.{self.method}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GoalFunction) and repr(self) == repr(other) and self.kwargs == other.kwargs

    def __hash__(self) -> int:
        return hash(repr(self))


def goal_function(env: str, kwargs: dict[str, Any], method: str) -> GoalFunction | None:
    """The same; None where the environment has no such method."""
    try:
        return GoalFunction(env, kwargs, method)
    except InvalidArgument:
        return None


def _inside(world: Any, method: str) -> Any:
    """The method of the environment inside all wrappers; of the first one, where there are several."""
    first = (getattr(world, "envs", None) or [world])[0]
    return getattr(getattr(first, "unwrapped", first), method, None)
