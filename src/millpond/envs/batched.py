"""Many environments with one ``step``: an ordinary Gymnasium vector environment around a vectorised dynamics.

Seeds, time limits and the three autoreset modes are here, once; a ``Dynamics`` knows only its physics.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from gymnasium import Space
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from millpond.core.errors import InvalidArgument, InvalidType, NotReady
from millpond.envs.streams import Ids, Seed, Streams

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]


class Dynamics(Protocol):
    """How ``num_envs`` environments move. It neither seeds, nor counts steps, nor decides when to reset."""

    num_envs: int
    observation_space: Space[Any]
    """Of one environment, as is the next."""
    action_space: Space[Any]
    render_fps: int
    can_render: bool

    def restart(self, ids: Ids, streams: Streams) -> Array:
        """Begin an episode in environments ``ids``, which ascend; their observations ``[len(ids), …]``."""

    def advance(self, actions: Array, ids: Ids | None) -> tuple[Array, Array, Mask]:
        """One step of environments ``ids``, or of all. New arrays of observations, rewards and terminations of all.

        What it returns for environments outside ``ids`` means nothing.
        """

    def render(self) -> Array:
        """A picture of environment 0, uint8 ``[height, width, 3]``."""

    def state_dict(self) -> dict[str, Array]:
        """Everything that the next steps depend on."""

    def load_state_dict(self, state: Mapping[str, Array]) -> None: ...

    def close(self) -> None: ...


def render_modes(dynamics: Dynamics) -> tuple[str | None, ...]:
    """The render modes of an environment with these dynamics; None is no pictures."""
    return (None, "rgb_array") if dynamics.can_render else (None,)


class BatchedEnv(VectorEnv[Array, Array, Array]):
    """A vector environment whose environments move together.

    Like Gymnasium's ``SyncVectorEnv`` of the same environments, with the same seeds: environment i is seeded with
    ``seed + i``, or with ``seed[i]``, and keeps its own random stream from then on. ``info`` is empty, but for
    ``final_obs`` and ``_final_obs`` in SAME_STEP mode. Arrays that are returned are never written to again.

    ``max_episode_steps=None`` sets no time limit. ``render()`` shows environment 0.

    Raises:
        InvalidArgument: no such mode, no such render mode, or a limit that is not positive.
    """

    def __init__(
        self,
        dynamics: Dynamics,
        *,
        max_episode_steps: int | None,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        render_mode: str | None = None,
    ) -> None:
        self.dynamics, self.num_envs = dynamics, dynamics.num_envs  # first, so that it is closed whatever is raised
        if max_episode_steps is not None and max_episode_steps < 1:
            raise InvalidArgument(f"max_episode_steps must be at least 1, or None, not {max_episode_steps}")
        if render_mode not in render_modes(dynamics):
            raise InvalidArgument(f"render_mode {render_mode!r}: must be one of {render_modes(dynamics)}")
        try:
            self.autoreset_mode = AutoresetMode(autoreset_mode)
        except ValueError as problem:
            choices = [mode.value for mode in AutoresetMode]
            raise InvalidArgument(f"autoreset_mode {autoreset_mode!r}: must be one of {choices}") from problem
        self.single_observation_space = dynamics.observation_space
        self.single_action_space = dynamics.action_space
        self.max_episode_steps = max_episode_steps
        self.render_mode = render_mode
        self.metadata = {
            "render_modes": [mode for mode in render_modes(dynamics) if mode],
            "render_fps": dynamics.render_fps,
            "autoreset_mode": self.autoreset_mode,
        }
        self._streams = Streams(self.num_envs)
        self._elapsed = np.zeros(self.num_envs, np.int64)
        self._ended = np.zeros(self.num_envs, np.bool_)
        self._observation: Array | None = None

    # Made when somebody asks: the bounds of 100,000 Humanoids fill half a gigabyte.
    @functools.cached_property
    def observation_space(self) -> Space[Any]:  # type: ignore[override]
        return batch_space(self.single_observation_space, self.num_envs)

    @functools.cached_property
    def action_space(self) -> Space[Any]:  # type: ignore[override]
        return batch_space(self.single_action_space, self.num_envs)

    def reset(self, *, seed: Seed = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Begin new episodes: in every environment, or where ``options["reset_mask"]`` is True.

        Raises:
            InvalidArgument, InvalidType: a seed or a mask that makes no sense, or options that are not known.
            NotReady: a mask, but the environments were never reset.
        """
        self._check_open()
        mask = self._mask(options)
        ids = np.arange(self.num_envs) if mask is None else np.flatnonzero(mask)
        self._streams.seed(seed, ids)
        first = self._begin(ids)
        if mask is None:
            self._observation = first
        else:
            self._observation = self._seen().copy()
            self._observation[ids] = first
        return self._observation, {}

    def step(self, actions: Array) -> tuple[Array, Array, Mask, Mask, dict[str, Any]]:
        """One step of every environment: observations, rewards (float64), terminated, truncated, info.

        Raises:
            InvalidArgument: actions of the wrong shape or type.
            NotReady: the environments were never reset, or, in DISABLED mode, an episode has ended in one.
        """
        self._check_open()
        actions = self._checked(actions)
        self._seen()
        resting = self._ended if self._ended.any() else None
        if resting is None:
            observation, reward, terminated = self.dynamics.advance(actions, None)
            self._elapsed += 1
        elif self.autoreset_mode is AutoresetMode.NEXT_STEP:
            observation, reward, terminated = self.dynamics.advance(actions, np.flatnonzero(~resting))
            self._elapsed += 1
            ids = np.flatnonzero(resting)
            observation[ids], reward[ids], terminated[ids] = self._begin(ids), 0, False
        else:
            raise NotReady(
                f"episodes have ended in environments {np.flatnonzero(resting)[:5].tolist()} and more: first "
                "reset(options={'reset_mask': terminated | truncated})"
            )
        truncated = np.zeros(self.num_envs, np.bool_)
        if self.max_episode_steps is not None:
            truncated = self._elapsed >= self.max_episode_steps
        self._ended = terminated | truncated
        self._observation, info = observation, {}
        if self.autoreset_mode is AutoresetMode.SAME_STEP and self._ended.any():
            info = self._same_step()
        return self._observation, reward, terminated, truncated, info

    def _same_step(self) -> dict[str, Any]:
        ended, final = self._ended.copy(), self._seen()
        ids = np.flatnonzero(ended)
        given = np.full(self.num_envs, None, object)
        for i in ids:
            given[i] = final[i]
        self._observation = final.copy()
        self._observation[ids] = self._begin(ids)
        return {"final_obs": given, "_final_obs": ended}

    def _begin(self, ids: Ids) -> Array:
        first = self.dynamics.restart(ids, self._streams)
        self._elapsed[ids] = 0
        self._ended[ids] = False
        return first

    def _seen(self) -> Array:
        if self._observation is None:
            raise NotReady("reset() first")
        return self._observation

    def _check_open(self) -> None:
        if self.closed:
            raise NotReady(f"{self} was closed")

    def _mask(self, options: dict[str, Any] | None) -> Mask | None:
        if not options:
            return None
        if unknown := sorted(set(options) - {"reset_mask"}):
            raise InvalidArgument(f"reset options {unknown} are not known; only 'reset_mask' is")
        mask = options["reset_mask"]
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
            raise InvalidType("reset_mask must be a NumPy array of booleans")
        if mask.shape != (self.num_envs,) or not mask.any():
            raise InvalidArgument(f"reset_mask must be of shape ({self.num_envs},) and True somewhere")
        self._seen()
        return mask

    def _checked(self, actions: Array) -> Array:
        actions, space = np.asarray(actions), self.single_action_space
        expected = (self.num_envs, *(space.shape or ()))
        if actions.shape != expected:
            raise InvalidArgument(f"actions of shape {actions.shape}; {expected} is expected")
        kinds = "f" if np.dtype(space.dtype).kind == "f" else "iu"
        if actions.dtype.kind not in kinds:
            raise InvalidArgument(f"actions of type {actions.dtype}; {np.dtype(space.dtype)} is expected")
        return actions

    def render(self) -> tuple[Array, ...] | None:
        """A picture of environment 0, in a tuple, as vector environments give pictures; None without a render mode."""
        self._check_open()
        self._seen()
        return None if self.render_mode is None else (self.dynamics.render(),)

    def state_dict(self) -> dict[str, Array]:
        """Everything that later steps depend on, as arrays.

        Raises:
            NotReady: the environments were never reset.
        """
        mine = {"observation": self._seen(), "elapsed": self._elapsed, "ended": self._ended}
        mine["streams"] = self._streams.state
        return {name: value.copy() for name, value in {**mine, **self.dynamics.state_dict()}.items()}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Go on where ``state_dict`` was called: later steps are the same, bit for bit.

        Raises:
            InvalidArgument: the state of other environments. Nothing was changed.
        """
        self._check_open()
        observation = (self.num_envs, *(self.single_observation_space.shape or ()))
        mine = {"elapsed": self._elapsed, "ended": self._ended, "streams": self._streams.state}
        shapes = {"observation": observation, **{k: v.shape for k, v in (mine | self.dynamics.state_dict()).items()}}
        given = {name: np.shape(value) for name, value in state.items()}
        if given != shapes:
            raise InvalidArgument(f"this state is of other environments: {given}, not {shapes}")
        for name, value in mine.items():
            value[...] = state[name]
        self._observation = np.array(state["observation"])
        self.dynamics.load_state_dict(state)

    def close_extras(self, **kwargs: Any) -> None:
        """Called by ``close()``, once."""
        self.dynamics.close()

    def __repr__(self) -> str:
        return f"BatchedEnv({self.dynamics}, num_envs={self.num_envs})"
