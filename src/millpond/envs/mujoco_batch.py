"""MuJoCo tasks for many environments at once: one shared model, bytes for each environment, a few threads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import mujoco
import numpy as np
from gymnasium.spaces import Box

from millpond.core.errors import InvalidArgument
from millpond.envs.batched import Array, Mask
from millpond.envs.mujoco_tasks import Floats, Task
from millpond.envs.physics import BatchPhysics, ContactPhysics, Ids, Physics, load_model
from millpond.envs.streams import Streams
from millpond.envs.threads import default_threads

HealthCheck = Literal["env_step", "physics_step"]


class MujocoDynamics:
    """``num_envs`` simulations of one task's model, stepped together on ``threads`` threads.

    By default these are as many as there are cores for this process, or ``$MILLPOND_ENV_THREADS``.

    ``health_check`` says when an environment is looked at. ``"env_step"`` is Gymnasium's way: after ``frame_skip``
    physics steps. ``"physics_step"``: after each of them, and one that is unhealthy stops there, so that a fall within
    the step ends the episode in the state of the fall.

    Raises:
        InvalidArgument: a number that is not positive, no such check, or no such model.
    """

    can_render = True

    def __init__(
        self,
        task: Task,
        num_envs: int,
        *,
        threads: int | None = None,
        health_check: HealthCheck = "env_step",
        width: int = 480,
        height: int = 480,
    ) -> None:
        threads = default_threads() if threads is None else threads
        sizes = {"num_envs": num_envs, "threads": threads, "frame_skip": task.frame_skip, "width": width}
        for name, value in {**sizes, "height": height}.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidArgument(f"{name} must be an int of at least 1, not {value!r}")
        if health_check not in ("env_step", "physics_step"):
            raise InvalidArgument(f"health_check {health_check!r}: must be 'env_step' or 'physics_step'")
        self.task, self.num_envs = task, num_envs
        model = load_model(task.xml_file, width=width, height=height)
        made: type[ContactPhysics] | type[BatchPhysics] = ContactPhysics if task.contacts else BatchPhysics
        self.physics: Physics = made(model, num_envs, threads=min(threads, num_envs), results=task.results)
        self._dt = model.opt.timestep * task.frame_skip
        self._every_substep = health_check == "physics_step" and task.healthy(self.physics, slice(0, 1)) is not None
        self._place = np.zeros(num_envs)  # where each was before the step
        self._size = (width, height)
        self._renderer: Any = None
        bounds = model.actuator_ctrlrange.astype(np.float32)
        self.action_space = Box(bounds[:, 0], bounds[:, 1], dtype=np.float32)
        size = task.observe(self.physics, slice(0, 1)).shape[1]
        self.observation_space = Box(-np.inf, np.inf, (size,), np.float64)
        self.render_fps = round(1 / self._dt)

    def restart(self, ids: Ids, streams: Streams) -> Floats:
        qpos, qvel = self.task.start(self.physics.model, streams, ids)
        self.physics.restart(ids, qpos, qvel)
        self._place[ids] = self.task.place(self.physics, ids)
        return self.task.observe(self.physics, ids)

    def advance(self, actions: Array, ids: Ids | None) -> tuple[Floats, Floats, Mask]:
        task, physics, everything = self.task, self.physics, slice(None)
        physics.ctrl[...] = actions
        if self._every_substep:
            self._step_while_healthy(ids)
        else:
            physics.step(task.frame_skip, ids)
        place = task.place(physics, everything)
        healthy = task.healthy(physics, everything)
        reward = task.reward(physics, (place - self._place) / self._dt, actions, healthy)
        self._place = place
        observation = task.observe(physics, everything)
        if healthy is None or not getattr(task, "terminate_when_unhealthy", True):
            return observation, reward, np.zeros(self.num_envs, np.bool_)
        return observation, reward, ~healthy

    def _step_while_healthy(self, ids: Ids | None) -> None:
        going = np.arange(self.num_envs) if ids is None else ids
        for _ in range(self.task.frame_skip):
            self.physics.step(1, going)
            going = going[self.task.healthy(self.physics, going)]
            if not len(going):
                return

    def render(self) -> Array:
        model = self.physics.model
        if self._renderer is None:
            width, height = self._size
            self._renderer = mujoco.Renderer(model, height, width)
        data = mujoco.MjData(model)
        mujoco.mj_setState(model, data, self.physics.rows[0], int(mujoco.mjtState.mjSTATE_INTEGRATION))
        mujoco.mj_forward(model, data)
        has_track = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, "track") >= 0
        self._renderer.update_scene(data, "track" if has_track else -1)
        return np.array(self._renderer.render())

    def state_dict(self) -> dict[str, Array]:
        return {"physics": self.physics.rows, "place": self._place}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        self.physics.rows[...] = state["physics"]
        self._place[...] = state["place"]

    def close(self) -> None:
        self.physics.close()
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None

    def __repr__(self) -> str:
        return type(self.task).__name__
