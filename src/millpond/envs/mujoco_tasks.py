"""Gymnasium's ten MuJoCo tasks (v5): where episodes start, what is observed, what is rewarded, when they end.

Each task is the set of its arguments, under Gymnasium's names and with Gymnasium's defaults. The formulae are those of
Gymnasium's documentation, written for many environments at once and in the same order of operations, so that every bit
of the results is the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from millpond.envs.exact import norm, square
from millpond.envs.physics import Ids, Physics
from millpond.envs.streams import Streams

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Array = npt.NDArray[Any]
Rows = Ids | slice
Range = tuple[float, float]
_INFINITE = math.inf


class Task(Protocol):
    """What makes an environment of a physical model. All methods are about the rows of ``sim`` that are asked for."""

    xml_file: ClassVar[str]
    frame_skip: int

    @property
    def results(self) -> tuple[str, ...]:
        """The fields of ``MjData`` that the task reads, beyond positions and velocities."""

    @property
    def contacts(self) -> bool:
        """Does it read ``cfrc_ext``?"""

    def start(self, model: Any, streams: Streams, ids: Ids) -> tuple[Floats, Floats]:
        """Positions and velocities that episodes of environments ``ids`` start with."""

    def place(self, sim: Physics, rows: Rows) -> Floats:
        """``[n]``: the position whose change in a step, over time, is the forward velocity."""

    def observe(self, sim: Physics, rows: Rows) -> Floats:
        """``[n, size]``."""

    def healthy(self, sim: Physics, rows: Rows) -> Mask | None:
        """Which go on; None where the task never terminates."""

    def reward(self, sim: Physics, velocity: Floats, actions: Array, healthy: Mask | None) -> Array:
        """``[n]``, of all rows. ``healthy`` is what ``healthy`` said of them."""


def _effort(weight: float, actions: Array) -> Array:
    """Like Gymnasium's, in the type of the actions: float32 actions cost a float32."""
    return np.asarray(weight * np.square(actions).sum(axis=1))


def _uniform_start(model: Any, streams: Streams, ids: Ids, scale: float) -> tuple[Floats, Floats]:
    noise = streams.uniform(ids, -scale, scale, model.nq + model.nv)
    return model.qpos0 + noise[:, : model.nq], noise[:, model.nq :]


def _normal_start(model: Any, streams: Streams, ids: Ids, scale: float) -> tuple[Floats, Floats]:
    """Uniform noise on positions, normal noise on velocities."""
    qpos = model.qpos0 + streams.uniform(ids, -scale, scale, model.nq)
    return qpos, scale * streams.normal(ids, model.nv)


def _still(sim: Physics, rows: Rows) -> Floats:
    return np.zeros(len(sim.qpos[rows]))


def _positions_and_speeds(sim: Physics, rows: Rows, skip: int, limit: float = _INFINITE) -> Floats:
    qvel = sim.qvel[rows]
    return np.concatenate((sim.qpos[rows, skip:], qvel if limit == _INFINITE else np.clip(qvel, -limit, limit)), axis=1)


def _inside(values: Array, bounds: Range) -> Mask:
    return (bounds[0] < values) & (values < bounds[1])


@dataclass(frozen=True, slots=True)
class Hopper:
    """Hop forward on one leg."""

    xml_file: ClassVar[str] = "hopper.xml"
    results: ClassVar[tuple[str, ...]] = ()
    contacts: ClassVar[bool] = False

    frame_skip: int = 4
    forward_reward_weight: float = 1.0
    ctrl_cost_weight: float = 1e-3
    healthy_reward: float = 1.0
    terminate_when_unhealthy: bool = True
    healthy_state_range: Range = (-100.0, 100.0)
    healthy_z_range: Range = (0.7, _INFINITE)
    healthy_angle_range: Range = (-0.2, 0.2)
    reset_noise_scale: float = 5e-3
    exclude_current_positions_from_observation: bool = True

    def start(self, model: Any, streams: Streams, ids: Ids) -> tuple[Floats, Floats]:
        return _uniform_start(model, streams, ids, self.reset_noise_scale)

    def place(self, sim: Physics, rows: Rows) -> Floats:
        return sim.qpos[rows, 0].copy()

    def observe(self, sim: Physics, rows: Rows) -> Floats:
        return _positions_and_speeds(sim, rows, int(self.exclude_current_positions_from_observation), limit=10)

    def healthy(self, sim: Physics, rows: Rows) -> Mask:
        qpos, qvel = sim.qpos[rows], sim.qvel[rows]
        bounded = _inside(qpos[:, 2:], self.healthy_state_range).all(axis=1)
        bounded &= _inside(qvel, self.healthy_state_range).all(axis=1)
        return bounded & _inside(qpos[:, 1], self.healthy_z_range) & _inside(qpos[:, 2], self.healthy_angle_range)

    def reward(self, sim: Physics, velocity: Floats, actions: Array, healthy: Mask) -> Array:
        gain = self.forward_reward_weight * velocity + healthy * self.healthy_reward
        return np.asarray(gain - _effort(self.ctrl_cost_weight, actions))


@dataclass(frozen=True, slots=True)
class Walker2d:
    """Walk forward on two legs, in a plane."""

    xml_file: ClassVar[str] = "walker2d_v5.xml"
    results: ClassVar[tuple[str, ...]] = ()
    contacts: ClassVar[bool] = False

    frame_skip: int = 4
    forward_reward_weight: float = 1.0
    ctrl_cost_weight: float = 1e-3
    healthy_reward: float = 1.0
    terminate_when_unhealthy: bool = True
    healthy_z_range: Range = (0.8, 2.0)
    healthy_angle_range: Range = (-1.0, 1.0)
    reset_noise_scale: float = 5e-3
    exclude_current_positions_from_observation: bool = True

    def start(self, model: Any, streams: Streams, ids: Ids) -> tuple[Floats, Floats]:
        return _uniform_start(model, streams, ids, self.reset_noise_scale)

    def place(self, sim: Physics, rows: Rows) -> Floats:
        return sim.qpos[rows, 0].copy()

    def observe(self, sim: Physics, rows: Rows) -> Floats:
        return _positions_and_speeds(sim, rows, int(self.exclude_current_positions_from_observation), limit=10)

    def healthy(self, sim: Physics, rows: Rows) -> Mask:
        z, angle = sim.qpos[rows, 1], sim.qpos[rows, 2]
        return _inside(z, self.healthy_z_range) & _inside(angle, self.healthy_angle_range)

    def reward(self, sim: Physics, velocity: Floats, actions: Array, healthy: Mask) -> Array:
        gain = self.forward_reward_weight * velocity + healthy * self.healthy_reward
        return np.asarray(gain - _effort(self.ctrl_cost_weight, actions))


@dataclass(frozen=True, slots=True)
class HalfCheetah:
    """Run forward, in a plane. Never terminates."""

    xml_file: ClassVar[str] = "half_cheetah.xml"
    results: ClassVar[tuple[str, ...]] = ()
    contacts: ClassVar[bool] = False

    frame_skip: int = 5
    forward_reward_weight: float = 1.0
    ctrl_cost_weight: float = 0.1
    reset_noise_scale: float = 0.1
    exclude_current_positions_from_observation: bool = True

    def start(self, model: Any, streams: Streams, ids: Ids) -> tuple[Floats, Floats]:
        return _normal_start(model, streams, ids, self.reset_noise_scale)

    def place(self, sim: Physics, rows: Rows) -> Floats:
        return sim.qpos[rows, 0].copy()

    def observe(self, sim: Physics, rows: Rows) -> Floats:
        return _positions_and_speeds(sim, rows, int(self.exclude_current_positions_from_observation))

    def healthy(self, sim: Physics, rows: Rows) -> None:
        return None

    def reward(self, sim: Physics, velocity: Floats, actions: Array, healthy: None) -> Array:
        return np.asarray(self.forward_reward_weight * velocity - _effort(self.ctrl_cost_weight, actions))


@dataclass(frozen=True, slots=True)
class Swimmer:
    """Swim forward with three links in a viscous fluid. Never terminates."""

    xml_file: ClassVar[str] = "swimmer.xml"
    results: ClassVar[tuple[str, ...]] = ()
    contacts: ClassVar[bool] = False

    frame_skip: int = 4
    forward_reward_weight: float = 1.0
    ctrl_cost_weight: float = 1e-4
    reset_noise_scale: float = 0.1
    exclude_current_positions_from_observation: bool = True

    def start(self, model: Any, streams: Streams, ids: Ids) -> tuple[Floats, Floats]:
        return _uniform_start(model, streams, ids, self.reset_noise_scale)

    def place(self, sim: Physics, rows: Rows) -> Floats:
        return sim.qpos[rows, 0].copy()

    def observe(self, sim: Physics, rows: Rows) -> Floats:
        return _positions_and_speeds(sim, rows, 2 * int(self.exclude_current_positions_from_observation))

    def healthy(self, sim: Physics, rows: Rows) -> None:
        return None

    def reward(self, sim: Physics, velocity: Floats, actions: Array, healthy: None) -> Array:
        return np.asarray(self.forward_reward_weight * velocity - _effort(self.ctrl_cost_weight, actions))


@dataclass(frozen=True, slots=True)
class Ant:
    """Walk forward on four legs. Contact forces are observed, and cost."""

    xml_file: ClassVar[str] = "ant.xml"

    frame_skip: int = 5
    forward_reward_weight: float = 1.0
    ctrl_cost_weight: float = 0.5
    contact_cost_weight: float = 5e-4
    healthy_reward: float = 1.0
    main_body: int | str = 1
    terminate_when_unhealthy: bool = True
    healthy_z_range: Range = (0.2, 1.0)
    contact_force_range: Range = (-1.0, 1.0)
    reset_noise_scale: float = 0.1
    exclude_current_positions_from_observation: bool = True
    include_cfrc_ext_in_observation: bool = True

    @property
    def contacts(self) -> bool:
        return self.include_cfrc_ext_in_observation or self.contact_cost_weight != 0

    @property
    def results(self) -> tuple[str, ...]:
        return ("xpos", "cfrc_ext") if self.contacts else ("xpos",)

    def start(self, model: Any, streams: Streams, ids: Ids) -> tuple[Floats, Floats]:
        return _normal_start(model, streams, ids, self.reset_noise_scale)

    def place(self, sim: Physics, rows: Rows) -> Floats:
        return sim.results["xpos"][rows, sim.model.body(self.main_body).id, 0].copy()

    def observe(self, sim: Physics, rows: Rows) -> Floats:
        seen = _positions_and_speeds(sim, rows, 2 * int(self.exclude_current_positions_from_observation))
        if not self.include_cfrc_ext_in_observation:
            return seen
        return np.concatenate((seen, self._forces(sim, rows)[:, 1:].reshape(len(seen), -1)), axis=1)

    def _forces(self, sim: Physics, rows: Rows) -> Floats:
        return np.clip(sim.results["cfrc_ext"][rows], *self.contact_force_range)

    def healthy(self, sim: Physics, rows: Rows) -> Mask:
        qpos, (low, high) = sim.qpos[rows], self.healthy_z_range
        finite = np.isfinite(qpos).all(axis=1) & np.isfinite(sim.qvel[rows]).all(axis=1)
        return np.asarray(finite & (low <= qpos[:, 2]) & (qpos[:, 2] <= high))

    def reward(self, sim: Physics, velocity: Floats, actions: Array, healthy: Mask) -> Array:
        gain = velocity * self.forward_reward_weight + healthy * self.healthy_reward
        cost = _effort(self.ctrl_cost_weight, actions)
        if self.contacts:
            forces = self._forces(sim, slice(None))
            cost = cost + self.contact_cost_weight * np.square(forces).reshape(len(forces), -1).sum(axis=1)
        return np.asarray(gain - cost)


@dataclass(frozen=True, slots=True)
class Humanoid:
    """Walk forward on two legs without falling. Inertias, velocities and forces of the bodies are observed."""

    xml_file: ClassVar[str] = "humanoid.xml"

    frame_skip: int = 5
    forward_reward_weight: float = 1.25
    ctrl_cost_weight: float = 0.1
    contact_cost_weight: float = 5e-7
    contact_cost_range: Range = (-_INFINITE, 10.0)
    healthy_reward: float = 5.0
    terminate_when_unhealthy: bool = True
    healthy_z_range: Range = (1.0, 2.0)
    reset_noise_scale: float = 1e-2
    exclude_current_positions_from_observation: bool = True
    include_cinert_in_observation: bool = True
    include_cvel_in_observation: bool = True
    include_qfrc_actuator_in_observation: bool = True
    include_cfrc_ext_in_observation: bool = True

    @property
    def contacts(self) -> bool:
        return self.include_cfrc_ext_in_observation or self.contact_cost_weight != 0

    @property
    def results(self) -> tuple[str, ...]:
        wanted = {
            "xipos": True,
            "cinert": self.include_cinert_in_observation,
            "cvel": self.include_cvel_in_observation,
            "qfrc_actuator": self.include_qfrc_actuator_in_observation,
            "cfrc_ext": self.contacts,
        }
        return tuple(name for name, needed in wanted.items() if needed)

    def start(self, model: Any, streams: Streams, ids: Ids) -> tuple[Floats, Floats]:
        return _uniform_start(model, streams, ids, self.reset_noise_scale)

    def place(self, sim: Physics, rows: Rows) -> Floats:
        """The centre of mass."""
        mass = sim.model.body_mass
        return np.asarray((np.einsum("b,nbj->nj", mass, sim.results["xipos"][rows]) / mass.sum())[:, 0])

    def observe(self, sim: Physics, rows: Rows) -> Floats:
        seen = [_positions_and_speeds(sim, rows, 2 * int(self.exclude_current_positions_from_observation))]
        results, n = sim.results, len(seen[0])
        if self.include_cinert_in_observation:
            seen.append(results["cinert"][rows, 1:].reshape(n, -1))
        if self.include_cvel_in_observation:
            seen.append(results["cvel"][rows, 1:].reshape(n, -1))
        if self.include_qfrc_actuator_in_observation:
            seen.append(results["qfrc_actuator"][rows, 6:])
        if self.include_cfrc_ext_in_observation:
            seen.append(results["cfrc_ext"][rows, 1:].reshape(n, -1))
        return np.concatenate(seen, axis=1)

    def healthy(self, sim: Physics, rows: Rows) -> Mask:
        return _inside(sim.qpos[rows, 2], self.healthy_z_range)

    def reward(self, sim: Physics, velocity: Floats, actions: Array, healthy: Mask) -> Array:
        gain = self.forward_reward_weight * velocity + healthy * self.healthy_reward
        cost = _effort(self.ctrl_cost_weight, sim.ctrl)
        squares = 0.0
        if self.contacts:
            forces = sim.results["cfrc_ext"]
            squares = np.square(forces).reshape(len(forces), -1).sum(axis=1)
        return np.asarray(gain - (cost + np.clip(self.contact_cost_weight * squares, *self.contact_cost_range)))


@dataclass(frozen=True, slots=True)
class InvertedPendulum:
    """Balance a pole on a cart."""

    xml_file: ClassVar[str] = "inverted_pendulum.xml"
    results: ClassVar[tuple[str, ...]] = ()
    contacts: ClassVar[bool] = False
    terminate_when_unhealthy: ClassVar[bool] = True

    frame_skip: int = 2
    reset_noise_scale: float = 0.01

    def start(self, model: Any, streams: Streams, ids: Ids) -> tuple[Floats, Floats]:
        return _uniform_start(model, streams, ids, self.reset_noise_scale)

    def place(self, sim: Physics, rows: Rows) -> Floats:
        return _still(sim, rows)

    def observe(self, sim: Physics, rows: Rows) -> Floats:
        return _positions_and_speeds(sim, rows, 0)

    def healthy(self, sim: Physics, rows: Rows) -> Mask:
        seen = self.observe(sim, rows)
        return np.asarray(np.isfinite(seen).all(axis=1) & ~(np.abs(seen[:, 1]) > 0.2))

    def reward(self, sim: Physics, velocity: Floats, actions: Array, healthy: Mask) -> Array:
        return healthy.astype(np.float64)


@dataclass(frozen=True, slots=True)
class InvertedDoublePendulum:
    """Balance a pole on a pole on a cart."""

    xml_file: ClassVar[str] = "inverted_double_pendulum.xml"
    results: ClassVar[tuple[str, ...]] = ("site_xpos", "qfrc_constraint")
    contacts: ClassVar[bool] = False
    terminate_when_unhealthy: ClassVar[bool] = True

    frame_skip: int = 5
    healthy_reward: float = 10.0
    reset_noise_scale: float = 0.1

    def start(self, model: Any, streams: Streams, ids: Ids) -> tuple[Floats, Floats]:
        return _normal_start(model, streams, ids, self.reset_noise_scale)

    def place(self, sim: Physics, rows: Rows) -> Floats:
        return _still(sim, rows)

    def observe(self, sim: Physics, rows: Rows) -> Floats:
        qpos, force = sim.qpos[rows], sim.results["qfrc_constraint"][rows, :1]
        speeds = np.clip(sim.qvel[rows], -10, 10)
        angles = qpos[:, 1:]
        return np.concatenate((qpos[:, :1], np.sin(angles), np.cos(angles), speeds, np.clip(force, -10, 10)), axis=1)

    def healthy(self, sim: Physics, rows: Rows) -> Mask:
        return ~(sim.results["site_xpos"][rows, 0, 2] <= 1)

    def reward(self, sim: Physics, velocity: Floats, actions: Array, healthy: Mask) -> Array:
        x, y = sim.results["site_xpos"][:, 0, 0], sim.results["site_xpos"][:, 0, 2]
        distance = 0.01 * square(x) + square(y - 2)
        speed = 1e-3 * square(sim.qvel[:, 1]) + 5e-3 * square(sim.qvel[:, 2])
        return np.asarray(self.healthy_reward * healthy - distance - speed)


@dataclass(frozen=True, slots=True)
class Reacher:
    """Bring the tip of an arm to a target. Never terminates."""

    xml_file: ClassVar[str] = "reacher.xml"
    results: ClassVar[tuple[str, ...]] = ("xpos",)
    contacts: ClassVar[bool] = False

    frame_skip: int = 2
    reward_dist_weight: float = 1.0
    reward_control_weight: float = 1.0

    def start(self, model: Any, streams: Streams, ids: Ids) -> tuple[Floats, Floats]:
        qpos = streams.uniform(ids, -0.1, 0.1, model.nq) + model.qpos0
        outside = np.arange(len(ids))
        while len(outside):  # targets are uniform in a disc: those outside it are drawn again
            qpos[outside, -2:] = streams.uniform(ids[outside], -0.2, 0.2, 2)
            outside = outside[~(norm(qpos[outside, -2:]) < 0.2)]
        qvel = streams.uniform(ids, -0.005, 0.005, model.nv)
        qvel[:, -2:] = 0
        return qpos, qvel

    def place(self, sim: Physics, rows: Rows) -> Floats:
        return _still(sim, rows)

    def observe(self, sim: Physics, rows: Rows) -> Floats:
        qpos, theta = sim.qpos[rows], sim.qpos[rows, :2]
        parts = (np.cos(theta), np.sin(theta), qpos[:, 2:], sim.qvel[rows, :2], self._gap(sim, rows)[:, :2])
        return np.concatenate(parts, axis=1)

    def _gap(self, sim: Physics, rows: Rows) -> Floats:
        places, body = sim.results["xpos"][rows], sim.model.body
        return np.asarray(places[:, body("fingertip").id] - places[:, body("target").id])

    def healthy(self, sim: Physics, rows: Rows) -> None:
        return None

    def reward(self, sim: Physics, velocity: Floats, actions: Array, healthy: None) -> Array:
        distance = -norm(self._gap(sim, slice(None))) * self.reward_dist_weight
        return np.asarray(distance - np.square(actions).sum(axis=1) * self.reward_control_weight)


@dataclass(frozen=True, slots=True)
class Pusher:
    """Push a cylinder to a goal with an arm. Never terminates."""

    xml_file: ClassVar[str] = "pusher_v5.xml"
    results: ClassVar[tuple[str, ...]] = ("xpos",)
    contacts: ClassVar[bool] = False

    frame_skip: int = 5
    reward_near_weight: float = 0.5
    reward_dist_weight: float = 1.0
    reward_control_weight: float = 0.1

    def start(self, model: Any, streams: Streams, ids: Ids) -> tuple[Floats, Floats]:
        qpos = np.tile(model.qpos0, (len(ids), 1))
        low, high = np.array([-0.3, -0.2]), np.array([0.0, 0.2])
        near = np.arange(len(ids))
        while len(near):  # cylinders that would stand on the goal are drawn again
            qpos[near, -4:-2] = streams.uniform(ids[near], low, high, 2)
            near = near[~(norm(qpos[near, -4:-2]) > 0.17)]
        qpos[:, -2:] = 0
        qvel = streams.uniform(ids, -0.005, 0.005, model.nv)
        qvel[:, -4:] = 0
        return qpos, qvel

    def place(self, sim: Physics, rows: Rows) -> Floats:
        return _still(sim, rows)

    def observe(self, sim: Physics, rows: Rows) -> Floats:
        places = self._places(sim, rows)
        return np.concatenate((sim.qpos[rows, :7], sim.qvel[rows, :7], *places), axis=1)

    def _places(self, sim: Physics, rows: Rows) -> tuple[Floats, Floats, Floats]:
        places, body = sim.results["xpos"][rows], sim.model.body
        return places[:, body("tips_arm").id], places[:, body("object").id], places[:, body("goal").id]

    def healthy(self, sim: Physics, rows: Rows) -> None:
        return None

    def reward(self, sim: Physics, velocity: Floats, actions: Array, healthy: None) -> Array:
        tip, cylinder, goal = self._places(sim, slice(None))
        near = -norm(cylinder - tip) * self.reward_near_weight
        distance = -norm(cylinder - goal) * self.reward_dist_weight
        effort = -np.square(actions).sum(axis=1) * self.reward_control_weight
        return np.asarray(distance + effort + near)


TASKS: dict[str, Any] = {
    f"{task.__name__}-v5": task
    for task in (
        Hopper,
        HalfCheetah,
        Walker2d,
        Ant,
        Humanoid,
        InvertedPendulum,
        InvertedDoublePendulum,
        Swimmer,
        Reacher,
        Pusher,
    )
}
"""The tasks by Gymnasium's ids."""
