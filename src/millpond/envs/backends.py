"""Ids with a prefix, for environments of other makers: ``"envpool:Ant-v4"``."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from millpond.core.errors import InvalidArgument, NotReady
from millpond.envs.threads import default_threads

ENVPOOL = "envpool"
_ON_A_GPU = {  # what is known of, and what it takes
    "mjx": "pip install mujoco-mjx 'jax[cuda12]'",
    "mujoco_warp": "pip install mujoco-warp",
    "mujoco_torch": "pip install mujoco-torch",
}


def backend_of(env_id: str) -> str | None:
    """The maker that an id names; None where it names none that is known here."""
    prefix = env_id.partition(":")[0] if ":" in env_id else ""
    return prefix if prefix == ENVPOOL or prefix in _ON_A_GPU else None


def check_backend(env_id: str) -> None:
    """Raises InvalidArgument, with what to install, where an id with a prefix cannot be made in this process."""
    prefix, _, task = env_id.partition(":")
    if prefix in _ON_A_GPU:
        raise InvalidArgument(
            f"{env_id!r}: millpond steps no physics on a GPU by itself. {_ON_A_GPU[prefix]}, and give a factory that "
            "makes a gymnasium.vector.VectorEnv of it, with NumPy arrays and a declared autoreset mode"
        )
    if task not in _envpool(env_id).list_all_envs():
        raise InvalidArgument(f"cannot make the environment {env_id!r}: EnvPool has no {task!r}")


def _envpool(env_id: str) -> Any:
    try:
        import envpool
    except ImportError as problem:
        raise InvalidArgument(f"{env_id!r} needs EnvPool: pip install 'millpond[envpool]' brings it") from problem
    return envpool


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Gymnasium warns of the types of EnvPool's bounds, which no user can change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class EnvPoolEnv(VectorEnv[Any, Any, Any]):
    """``num_envs`` environments of EnvPool, as the ordinary vector environment that EnvPool's own is not quite.

    NEXT_STEP. ``kwargs`` are those of ``envpool.make``; it takes as many threads as ``MILLPOND_ENV_THREADS`` says,
    without that one for each core. EnvPool seeds where it makes: so a ``reset`` with a seed makes the pool anew.

    Raises:
        InvalidArgument: EnvPool is not installed, has no such task, or does not take ``kwargs``.
    """

    def __init__(self, env_id: str, num_envs: int, **kwargs: Any) -> None:
        check_backend(env_id)
        self.num_envs, self._task = num_envs, env_id.partition(":")[2]
        self._kwargs = {"num_threads": min(default_threads(), num_envs), **kwargs}
        self._pool = self._made(int(np.random.SeedSequence().generate_state(1)[0]) >> 1)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.single_observation_space = self._pool.observation_space
        self.single_action_space = self._pool.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def _made(self, seed: int) -> Any:
        make = _envpool(self._task).make
        try:
            with _quietly():
                pool = make(self._task, env_type="gymnasium", num_envs=self.num_envs, seed=seed, **self._kwargs)
                _ = pool.observation_space, pool.action_space  # it makes them when they are first asked for
                return pool
        except (TypeError, ValueError, AssertionError) as problem:
            raise InvalidArgument(f"EnvPool cannot make {self._task!r} with {self._kwargs}: {problem}") from problem

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in every environment.

        Raises:
            InvalidArgument: options, or a list of seeds; EnvPool takes one.
        """
        if options:
            raise InvalidArgument(f"EnvPool takes no options, got {sorted(options)}")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int | np.integer)):
            raise InvalidArgument(f"EnvPool takes one seed, an int, not {seed!r}")
        if self.closed:
            raise NotReady(f"{self} was closed")
        if seed is not None:
            self._pool.close()
            self._pool = self._made(int(seed) % 2**31)
        observation, _ = self._pool.reset()
        return observation, {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """One step of every environment; where an episode ended in the one before, its reset."""
        observation, reward, terminated, truncated, _ = self._pool.step(np.asarray(actions))
        return observation, reward, terminated, truncated, {}

    def close_extras(self, **kwargs: Any) -> None:
        """Called by ``close()``, once."""
        self._pool.close()

    def __repr__(self) -> str:
        return f"EnvPoolEnv({self._task!r}, num_envs={self.num_envs})"
