"""One door to every environment: from whatever a user has to a Gymnasium vector environment."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from millpond.core.errors import InvalidArgument, InvalidType
from millpond.envs.backends import EnvPoolEnv, backend_of, check_backend
from millpond.envs.catalogue import make_batched

World = VectorEnv[Any, Any, Any]

_SAVED = {  # what can be saved, in place of what cannot
    "gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv": "millpond.envs.cartpole:SavedCartPole"
}


def make(
    env: Any,
    *,
    num_envs: int = 1,
    seed: int | None = None,
    worker: int = 0,
    kwargs: Mapping[str, Any] | None = None,
) -> World:
    """A vector environment of ``num_envs`` environments.

    ``env`` is one of:

    * an id, such as ``"Hopper-v5"``, made with ``kwargs``; where there is a batched version (``make_batched``) it is
      that one, and where its maker has a vectorised version, and there are no ``kwargs``, that; ``"envpool:Ant-v4"`` is
      EnvPool's, with the ``kwargs`` of ``envpool.make``;
    * a vector environment, returned as it is: it brings its own ``num_envs``;
    * one environment, for ``num_envs=1``;
    * a factory without arguments that makes one environment (it is called ``num_envs`` times) or a vector environment;
    * one factory per worker, of which number ``worker`` is called.

    Environments that are stepped one after the other are reset by their user (``AutoresetMode.DISABLED``): so the
    final observation is always a true one, also from environments that reuse their arrays. With ``seed`` the
    environments and their action space are seeded, and reset once.

    Raises:
        InvalidArgument: an unknown id, arguments that the environment does not take, or a ``num_envs`` that it has not.
        InvalidType: ``env`` is none of these, or a factory made something else.
    """
    if isinstance(num_envs, bool) or not isinstance(num_envs, int) or num_envs < 1:
        raise InvalidArgument(f"num_envs must be an int of at least 1, not {num_envs!r}")
    if kwargs and not isinstance(env, str):
        raise InvalidArgument("kwargs go with an id; give a factory that passes its own arguments")
    made = _make(env, num_envs, worker, dict(kwargs or {}))
    if seed is not None:
        made.action_space.seed(seed)
        made.reset(seed=seed)
    return made


def check_portable(env: Any, *, workers: int) -> None:
    """Is ``env`` something that each of ``workers`` processes can make for itself? Nothing is made.

    Raises:
        InvalidArgument: an unknown id, or not one factory per worker.
        InvalidType: an environment that exists here already, or none at all.
    """
    if isinstance(env, str):
        if backend_of(env) is not None:
            check_backend(env)
            return
        try:
            _registered(env)
        except (gymnasium.error.Error, ImportError) as problem:
            raise InvalidArgument(f"cannot make the environment {env!r}: {problem}") from problem
    elif isinstance(env, gymnasium.Env | VectorEnv):
        raise InvalidType("an environment that exists cannot go to worker processes; give an id, or a factory")
    elif isinstance(env, Sequence):
        if len(env) != workers:
            raise InvalidArgument(f"{len(env)} factories were given for {workers} workers; give one for each, or one")
        for one in env:
            check_portable(one, workers=1)
    elif not callable(env):
        raise InvalidType(f"an environment is an id or a factory, not {type(env).__name__}")


def _make(env: Any, num_envs: int, worker: int, kwargs: dict[str, Any]) -> World:
    if isinstance(env, str):
        return _from_id(env, num_envs, kwargs)
    if isinstance(env, VectorEnv):
        return _checked_count(env, num_envs)
    if isinstance(env, gymnasium.Env):
        if num_envs != 1:
            raise InvalidArgument(f"one environment cannot be {num_envs}; give a factory that makes them")
        return _one_by_one([env])
    if isinstance(env, Sequence):
        if not 0 <= worker < len(env):
            raise InvalidArgument(f"{len(env)} factories were given; there is none for worker {worker}")
        return _make(env[worker], num_envs, worker, kwargs)
    if callable(env):
        first = env()
        if isinstance(first, VectorEnv):
            return _checked_count(first, num_envs)
        if not isinstance(first, gymnasium.Env):
            raise InvalidType(f"the factory {env!r} made a {type(first).__name__}, not an environment")
        return _one_by_one([first, *(env() for _ in range(num_envs - 1))])
    raise InvalidType(f"an environment is an id, a vector environment or a factory, not {type(env).__name__}")


def env_name(env: Any, *, worker: int = 0) -> str:
    """How a message calls what ``make`` takes, without making it."""
    if isinstance(env, list | tuple):
        env = env[worker % len(env)] if env else env
    if isinstance(env, functools.partial):
        named = [part for part in (*env.args, *env.keywords.values()) if isinstance(getattr(part, "id", part), str)]
        env = getattr(named[0], "id", named[0]) if named else env.func
    if isinstance(env, str):
        return repr(env)
    spec = getattr(env, "spec", None)
    return repr(spec.id) if spec is not None else getattr(env, "__qualname__", type(env).__name__)


def _registered(env_id: str) -> Any:
    """What is registered under an id. ``"module:Id-v0"`` imports the module first, as Gymnasium's own ``make`` does."""
    module, _, name = env_id.rpartition(":")
    if module:
        importlib.import_module(module)
    return gymnasium.spec(name)


def _from_id(env_id: str, num_envs: int, kwargs: dict[str, Any]) -> World:
    if backend_of(env_id) is not None:
        check_backend(env_id)
        return EnvPoolEnv(env_id, num_envs, **kwargs)
    try:
        spec = _registered(env_id)
        if "render_mode" not in kwargs:  # who renders wants one environment, to step as it likes
            batched = make_batched(spec.id, num_envs, autoreset_mode=AutoresetMode.DISABLED, **kwargs)
            if batched is not None:
                return batched
        if spec.vector_entry_point is not None and not kwargs:  # it may not take what one environment takes
            entry = _SAVED.get(str(spec.vector_entry_point), spec.vector_entry_point)
            return gymnasium.make_vec(dataclasses.replace(spec, vector_entry_point=entry), num_envs=num_envs)
        return _one_by_one([gymnasium.make(env_id, disable_env_checker=True, **kwargs) for _ in range(num_envs)])
    except (gymnasium.error.Error, ImportError) as problem:
        hint = "; pip install 'millpond[train]' brings MuJoCo" if "mujoco" in str(problem).lower() else ""
        raise InvalidArgument(f"cannot make the environment {env_id!r}: {problem}{hint}") from problem
    except TypeError as problem:
        raise InvalidArgument(f"cannot make the environment {env_id!r} with {kwargs}: {problem}") from problem


def _one_by_one(envs: list[Any]) -> World:
    made = [_Given(env) for env in envs]
    return SyncVectorEnv(made, autoreset_mode=AutoresetMode.DISABLED)


class _Given:
    """A factory that hands out what was made before."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def __call__(self) -> Any:
        return self.env


def _checked_count(env: World, num_envs: int) -> World:
    if num_envs not in (1, env.num_envs):
        raise InvalidArgument(f"num_envs={num_envs}, but {env} has {env.num_envs} environments")
    return env
