"""Which of Gymnasium's ids have a batched version here, and how to make it."""

from __future__ import annotations

import dataclasses
from typing import Any

import gymnasium

from millpond.envs.batched import BatchedEnv, render_modes

MUJOCO_IDS = frozenset(
    f"{name}-v5"
    for name in (
        "Hopper HalfCheetah Walker2d Ant Humanoid Swimmer".split()
        + "InvertedPendulum InvertedDoublePendulum Reacher Pusher".split()
    )
)
CLASSIC_IDS = frozenset({"Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1"})
_VECTOR = ("autoreset_mode", "render_mode")
_MUJOCO = ("threads", "health_check", "width", "height")


def make_batched(env_id: str, num_envs: int, **kwargs: Any) -> BatchedEnv | None:
    """The batched version of a Gymnasium environment; None where there is none, or none that takes ``kwargs``.

    ``kwargs`` are those of ``gymnasium.make`` for this id (``frame_skip``, ``healthy_z_range``, …,
    ``max_episode_steps``), and ``autoreset_mode`` (default: NEXT_STEP). MuJoCo tasks also take ``threads``,
    ``health_check``, ``width`` and ``height``: see ``MujocoDynamics``.

    Raises:
        InvalidArgument: a value that makes no sense.
    """
    if env_id not in MUJOCO_IDS | CLASSIC_IDS:
        return None
    limit = kwargs.pop("max_episode_steps", gymnasium.spec(env_id).max_episode_steps)
    vector = {name: kwargs.pop(name) for name in _VECTOR if name in kwargs}
    dynamics = _mujoco(env_id, num_envs, kwargs) if env_id in MUJOCO_IDS else _classic(env_id, num_envs, kwargs)
    if dynamics is None or vector.get("render_mode") not in render_modes(dynamics):
        return None
    made = BatchedEnv(dynamics, max_episode_steps=limit, **vector)
    made.spec = gymnasium.spec(env_id)
    return made


def _mujoco(env_id: str, num_envs: int, kwargs: dict[str, Any]) -> Any:
    try:
        from millpond.envs.mujoco_batch import MujocoDynamics
        from millpond.envs.mujoco_tasks import TASKS
    except ImportError:  # no MuJoCo, or one without batched stepping
        return None
    own = {name: kwargs.pop(name) for name in _MUJOCO if name in kwargs}
    task = TASKS[env_id]
    return MujocoDynamics(task(**kwargs), num_envs, **own) if _takes(task, kwargs) else None


def _classic(env_id: str, num_envs: int, kwargs: dict[str, Any]) -> Any:
    from millpond.envs.classic_batch import RULES, ClassicDynamics

    rule = RULES[env_id]
    return ClassicDynamics(rule(**kwargs), num_envs) if _takes(rule, kwargs) else None


def _takes(made: Any, kwargs: dict[str, Any]) -> bool:
    return set(kwargs) <= {field.name for field in dataclasses.fields(made)}
