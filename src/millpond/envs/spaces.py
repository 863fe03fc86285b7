"""Gymnasium's spaces as named arrays: what a transition stores of an observation or an action."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import VectorEnv

from millpond.core.errors import InvalidArgument
from millpond.core.spec import BoxAction, DiscreteAction, EnvSpec, ObservationField

Key = tuple[str, ...]
SUPPORTED = "Box, Discrete, MultiDiscrete, MultiBinary and Dict of these"


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of an observation or an action, without the dimension of the environments.

    ``key`` is its place in nested dictionaries, ``()`` where the space is no Dict.
    """

    key: Key
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def of(self, values: Any) -> Any:
        """This leaf's array in ``values``, which has the structure of the space."""
        for name in self.key:
            values = values[name]
        return values


def leaves(space: spaces.Space[Any], what: str = "observation") -> tuple[Leaf, ...]:
    """The arrays that make up one element of ``space``, in the order of the space.

    Raises:
        InvalidArgument: a space that is not supported, by name (``what`` begins the name).
    """
    found = tuple(_leaves(space, (), what))
    if not found:
        raise InvalidArgument(f"{what}: the space {space} is empty")
    return found


def _leaves(space: spaces.Space[Any], key: Key, what: str) -> list[Leaf]:
    if isinstance(space, spaces.Dict):
        return [leaf for name, part in space.spaces.items() for leaf in _leaves(part, (*key, name), what)]
    name = "/".join((what, *key))
    if not isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        raise InvalidArgument(f"{name}: {type(space).__name__} spaces are not supported; {SUPPORTED} are")
    dtype = np.dtype(space.dtype)
    if dtype.kind not in "biuf":
        raise InvalidArgument(f"{name}: elements of type {dtype} are not supported; numbers and booleans are")
    return [Leaf(key, tuple(space.shape or ()), dtype)]


def choices(space: Any, leaf: Leaf) -> tuple[Any, Any] | None:
    """The lowest and the highest number of a choice, where ``leaf`` of this space is one, or several; else None."""
    for name in leaf.key:
        space = space[name]
    if isinstance(space, spaces.Discrete):
        return space.start, space.start + space.n - 1
    if isinstance(space, spaces.MultiDiscrete):
        first = getattr(space, "start", np.zeros_like(space.nvec))
        return first, first + space.nvec - 1
    return (0, 1) if isinstance(space, spaces.MultiBinary) else None


def nested(values: Mapping[Key, Any]) -> Any:
    """Nested dictionaries of ``values`` by key; the value itself where the key is ``()``."""
    if () in values:
        return values[()]
    tree: dict[str, Any] = {}
    for key, value in values.items():
        at = tree
        for name in key[:-1]:
            at = at.setdefault(name, {})
        at[key[-1]] = value
    return tree


def env_spec(env: VectorEnv[Any, Any, Any]) -> EnvSpec:
    """What a network must know of ``env``. float64 observations appear as the float32 that collectors deliver.

    Raises:
        InvalidArgument: a space that is not supported, or an action that is neither one bounded vector nor one
            choice out of n numbered from 0.
    """
    fields = []
    for leaf in leaves(env.single_observation_space):
        dtype = np.dtype(np.float32) if leaf.dtype == np.float64 else leaf.dtype
        tensor = torch.from_numpy(np.empty(0, dtype))
        fields.append(ObservationField(("observation", *leaf.key), leaf.shape, tensor.dtype))
    return EnvSpec(tuple(fields), _action_spec(env.single_action_space))


def _action_spec(space: spaces.Space[Any]) -> BoxAction | DiscreteAction:
    if isinstance(space, spaces.Discrete):
        if space.start != 0:
            raise InvalidArgument(f"action: {space} starts at {space.start}; wrap it so that actions start at 0")
        return DiscreteAction(int(space.n))
    if isinstance(space, spaces.Box) and len(space.shape) == 1:
        return BoxAction(tuple(map(float, space.low)), tuple(map(float, space.high)))
    raise InvalidArgument(f"action: {space} is neither one vector (a Box of one dimension) nor one choice (Discrete)")
