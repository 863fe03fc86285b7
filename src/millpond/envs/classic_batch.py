"""Classic control for many environments at once: what Gymnasium has no vectorised version of (it has one of CartPole).

The rules are those of Gymnasium's documentation, in the same order of operations and the same mixture of float32 and
float64, so that every bit of the results is the same, for actions in the type of the action space.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box, Discrete, Space

from millpond.core.errors import InvalidArgument
from millpond.envs.batched import Array, Mask
from millpond.envs.exact import square
from millpond.envs.streams import Ids, Streams

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]


class Rule(Protocol):
    """One system. A state is a row of ``state_size`` float64."""

    state_size: ClassVar[int]
    render_fps: ClassVar[int]

    def spaces(self) -> tuple[Space[Any], Space[Any]]:
        """Of observations and of actions."""

    def start(self, streams: Streams, ids: Ids) -> tuple[Floats, Singles]:
        """The first states of episodes, and what is observed of them."""

    def step(self, state: Floats, actions: Array) -> tuple[Floats, Array, Mask]:
        """The next states, the rewards, and whether it terminated."""

    def observe(self, state: Floats) -> Singles: ...


class ClassicDynamics:
    """``num_envs`` systems that follow one rule.

    Raises:
        InvalidArgument: ``num_envs`` is not positive.
    """

    can_render = False

    def __init__(self, rule: Rule, num_envs: int) -> None:
        if isinstance(num_envs, bool) or not isinstance(num_envs, int) or num_envs < 1:
            raise InvalidArgument(f"num_envs must be an int of at least 1, not {num_envs!r}")
        self.rule, self.num_envs = rule, num_envs
        self.observation_space, self.action_space = rule.spaces()
        self.render_fps = rule.render_fps
        self._state = np.zeros((num_envs, rule.state_size))

    def restart(self, ids: Ids, streams: Streams) -> Singles:
        self._state[ids], first = self.rule.start(streams, ids)
        return first

    def advance(self, actions: Array, ids: Ids | None) -> tuple[Singles, Array, Mask]:
        self._state, reward, terminated = self.rule.step(self._state, actions)  # of all: cheaper than to choose
        return self.rule.observe(self._state), reward, terminated

    def render(self) -> Array:
        raise InvalidArgument(f"{self} cannot be rendered; Gymnasium's own environment can")

    def state_dict(self) -> dict[str, Array]:
        return {"state": self._state}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        self._state = np.array(state["state"])

    def close(self) -> None:
        """There is nothing to release."""

    def __repr__(self) -> str:
        return type(self.rule).__name__


def _never(state: Floats) -> Mask:
    return np.zeros(len(state), np.bool_)


@dataclass(frozen=True, slots=True)
class Pendulum:
    """Swing a pendulum up and hold it. State: angle (0 is up), angular velocity. Never terminates."""

    state_size: ClassVar[int] = 2
    render_fps: ClassVar[int] = 30

    g: float = 10.0

    def spaces(self) -> tuple[Space[Any], Space[Any]]:
        high = np.array([1, 1, 8], np.float32)
        return Box(-high, high, dtype=np.float32), Box(-2.0, 2.0, (1,), np.float32)

    def start(self, streams: Streams, ids: Ids) -> tuple[Floats, Singles]:
        high = np.array([math.pi, 1.0])
        state = streams.uniform(ids, -high, high, 2)
        return state, self.observe(state)

    def step(self, state: Floats, actions: Array) -> tuple[Floats, Array, Mask]:
        angle, speed = state[:, 0], state[:, 1]
        torque = np.clip(actions, -2.0, 2.0)[:, 0]
        from_top = (angle + math.pi) % (2 * math.pi) - math.pi
        cost = square(from_top) + 0.1 * square(speed) + 0.001 * square(torque)
        speed = speed + (3 * self.g / 2.0 * np.sin(angle) + 3.0 * torque) * 0.05
        speed = np.clip(speed, -8, 8)
        return np.stack((angle + speed * 0.05, speed), axis=1), -cost, _never(state)

    def observe(self, state: Floats) -> Singles:
        angle, speed = state[:, 0], state[:, 1]
        return np.stack((np.cos(angle), np.sin(angle), speed), axis=1).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Acrobot:
    """Swing the free end of two links above a height. State: both angles (0 is down), both angular velocities."""

    state_size: ClassVar[int] = 4
    render_fps: ClassVar[int] = 15

    def spaces(self) -> tuple[Space[Any], Space[Any]]:
        high = np.array([1, 1, 1, 1, 4 * math.pi, 9 * math.pi], np.float32)
        return Box(-high, high, dtype=np.float32), Discrete(3)

    def start(self, streams: Streams, ids: Ids) -> tuple[Floats, Singles]:
        state = streams.uniform(ids, -0.1, 0.1, 4).astype(np.float32)
        return state.astype(np.float64), self._observed(state)  # Gymnasium takes float32 sines of the first state

    def step(self, state: Floats, actions: Array) -> tuple[Floats, Array, Mask]:
        torque = actions - 1.0
        dt, half = 0.2, 0.1
        k1 = self._slope(state, torque)
        k2 = self._slope(state + half * k1, torque)
        k3 = self._slope(state + half * k2, torque)
        k4 = self._slope(state + dt * k3, torque)
        state = state + dt / 6.0 * (k1 + 2 * k2 + 2 * k3 + k4)
        angles = _wrapped(state[:, :2])
        state = np.concatenate((angles, np.clip(state[:, 2:], *self._speed_limits())), axis=1)
        terminated = -np.cos(state[:, 0]) - np.cos(state[:, 1] + state[:, 0]) > 1.0
        return state, np.where(terminated, 0.0, -1.0), terminated

    @staticmethod
    def _speed_limits() -> tuple[Floats, Floats]:
        limits = np.array([4 * math.pi, 9 * math.pi])
        return -limits, limits

    @staticmethod
    def _slope(state: Floats, torque: Floats) -> Floats:
        """Sutton and Barto, "Reinforcement Learning", first edition, section 11.3; links of 1 m, 1 kg, 1 kg m²."""
        angle1, angle2, speed1, speed2 = state.T
        sine2, cosine2 = np.sin(angle2), np.cos(angle2)
        d1 = 0.25 + (1.25 + cosine2) + 1.0 + 1.0
        d2 = (0.25 + 0.5 * cosine2) + 1.0
        phi2 = 0.5 * 9.8 * np.cos(angle1 + angle2 - math.pi / 2.0)
        phi1 = -0.5 * square(speed2) * sine2 - 1.0 * speed2 * speed1 * sine2
        phi1 = phi1 + 1.5 * 9.8 * np.cos(angle1 - math.pi / 2) + phi2
        force = torque + d2 / d1 * phi1 - 0.5 * square(speed1) * sine2 - phi2
        change2 = force / (1.25 - square(d2) / d1)
        change1 = -(d2 * change2 + phi1) / d1
        return np.stack((speed1, speed2, change1, change2), axis=1)

    def observe(self, state: Floats) -> Singles:
        return self._observed(state)

    @staticmethod
    def _observed(state: npt.NDArray[Any]) -> Singles:
        sines = (np.cos(state[:, 0]), np.sin(state[:, 0]), np.cos(state[:, 1]), np.sin(state[:, 1]))
        return np.stack((*sines, state[:, 2], state[:, 3]), axis=1).astype(np.float32)


def _wrapped(angles: Floats) -> Floats:
    while (above := angles > math.pi).any():
        angles = np.where(above, angles - 2 * math.pi, angles)
    while (below := angles < -math.pi).any():
        angles = np.where(below, angles + 2 * math.pi, angles)
    return angles


@dataclass(frozen=True, slots=True)
class MountainCar:
    """Drive an underpowered car up a hill, with three actions. State: position, velocity."""

    state_size: ClassVar[int] = 2
    render_fps: ClassVar[int] = 30

    goal_velocity: float = 0

    def spaces(self) -> tuple[Space[Any], Space[Any]]:
        return _car_space(), Discrete(3)

    def start(self, streams: Streams, ids: Ids) -> tuple[Floats, Singles]:
        state = _car_start(streams, ids)
        return state, self.observe(state)

    def step(self, state: Floats, actions: Array) -> tuple[Floats, Array, Mask]:
        position, velocity = state[:, 0], state[:, 1]
        velocity = velocity + ((actions - 1) * 0.001 + np.cos(3 * position) * -0.0025)
        position, velocity = _rolled(position, velocity)
        terminated = (position >= 0.5) & (velocity >= self.goal_velocity)
        return np.stack((position, velocity), axis=1), np.full(len(state), -1.0), terminated

    def observe(self, state: Floats) -> Singles:
        return state.astype(np.float32)


@dataclass(frozen=True, slots=True)
class MountainCarContinuous:
    """Drive an underpowered car up a hill, with a force. State: position, velocity, and whether it was ever stepped.

    Gymnasium keeps the first state of an episode in float64 and all others in float32.
    """

    state_size: ClassVar[int] = 3
    render_fps: ClassVar[int] = 30

    goal_velocity: float = 0

    def spaces(self) -> tuple[Space[Any], Space[Any]]:
        return _car_space(), Box(-1.0, 1.0, (1,), np.float32)

    def start(self, streams: Streams, ids: Ids) -> tuple[Floats, Singles]:
        state = np.concatenate((_car_start(streams, ids), np.zeros((len(ids), 1))), axis=1)
        return state, self.observe(state)

    def step(self, state: Floats, actions: Array) -> tuple[Floats, Array, Mask]:
        after, terminated = self._rolled(state[:, :2].astype(np.float32), actions)
        new = np.flatnonzero(state[:, 2] == 0)
        if len(new):
            after[new], terminated[new] = self._rolled(state[new, :2], actions[new])
        reward = np.where(terminated, 100.0, 0.0) - square(actions[:, 0].astype(np.float64)) * 0.1
        stepped = np.ones((len(state), 1))
        return np.concatenate((after.astype(np.float64), stepped), axis=1), reward, terminated

    def _rolled(self, state: npt.NDArray[Any], actions: Array) -> tuple[Singles, Mask]:
        """In the precision of ``state``."""
        position, velocity, force = state[:, 0], state[:, 1], actions[:, 0]
        slope = 0.0025 * np.cos((3 * position).astype(np.float64))
        gain = force * 0.0015 - slope.astype(force.dtype)
        limited = np.clip(force, -1.0, 1.0)
        # a force at its limit is a float64 in Gymnasium
        gain = np.where(limited == force, gain, limited.astype(np.float64) * 0.0015 - slope)
        position, velocity = _rolled(position, velocity + gain.astype(state.dtype))
        terminated = (position >= state.dtype.type(0.45)) & (velocity >= self.goal_velocity)
        return np.stack((position, velocity), axis=1).astype(np.float32), terminated

    def observe(self, state: Floats) -> Singles:
        return state[:, :2].astype(np.float32)


def _car_space() -> Box:
    high = np.array([0.6, 0.07], np.float32)
    return Box(np.array([-1.2, -0.07], np.float32), high, dtype=np.float32)


def _car_start(streams: Streams, ids: Ids) -> Floats:
    return np.concatenate((streams.uniform(ids, -0.6, -0.4, 1), np.zeros((len(ids), 1))), axis=1)


def _rolled(position: npt.NDArray[Any], velocity: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Where cars of this velocity are after a step; the wall on the left stops them."""
    velocity = np.clip(velocity, -0.07, 0.07)
    position = np.clip(position + velocity, -1.2, 0.6)
    stopped = (position == position.dtype.type(-1.2)) & (velocity < 0)
    return position, np.where(stopped, velocity.dtype.type(0), velocity)


RULES: dict[str, Any] = {
    "Pendulum-v1": Pendulum,
    "Acrobot-v1": Acrobot,
    "MountainCar-v0": MountainCar,
    "MountainCarContinuous-v0": MountainCarContinuous,
}
"""The rules by Gymnasium's ids."""
