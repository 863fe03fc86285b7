"""Gymnasium's spaces as named arrays: what a transition stores of an observation or an action."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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


class Limits(NamedTuple):
    """The lowest and the highest number that a leaf may hold; both are included. A ``choice`` is no amount."""

    low: Any
    high: Any
    choice: bool


def limits(space: Any, leaf: Leaf) -> Limits:
    """Those of ``leaf`` in this space."""
    for name in leaf.key:
        space = space[name]
    if isinstance(space, spaces.Discrete):
        return Limits(space.start, space.start + space.n - 1, choice=True)
    if isinstance(space, spaces.MultiDiscrete):
        first = getattr(space, "start", np.zeros_like(space.nvec))
        return Limits(first, first + space.nvec - 1, choice=True)
    if isinstance(space, spaces.MultiBinary):
        return Limits(0, 1, choice=True)
    return Limits(space.low, space.high, choice=False)


def space_state(space: Any) -> list[Any]:
    """The states of the generators that ``space`` draws from, its own and those of its parts."""
    return [part.np_random.bit_generator.state for part in _parts(space)]


def load_space_state(space: Any, state: Sequence[Any]) -> None:
    """Draw what would have been drawn next when ``space_state`` was called."""
    for part, saved in zip(_parts(space), state, strict=True):
        part.np_random.bit_generator.state = saved


def _parts(space: Any) -> list[Any]:
    inner = getattr(space, "spaces", ())
    inner = inner.values() if isinstance(inner, Mapping) else inner
    return [space, *(deep for part in inner for deep in _parts(part))]


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
        InvalidArgument: a space that is not supported, or an action that is neither one bounded Box of floating numbers
            nor one choice out of n.
    """
    fields = []
    for leaf in leaves(env.single_observation_space):
        dtype = np.dtype(np.float32) if leaf.dtype == np.float64 else leaf.dtype
        field = ObservationField(("observation", *leaf.key), leaf.shape, _torch(dtype))
        space: Any = env.single_observation_space
        for name in leaf.key:
            space = space[name]
        if isinstance(space, spaces.Discrete):
            field = dataclasses.replace(field, choices=int(space.n), first=int(space.start))
        fields.append(field)
    return EnvSpec(tuple(fields), _action_spec(env.single_action_space))


def _action_spec(space: spaces.Space[Any]) -> BoxAction | DiscreteAction:
    if isinstance(space, spaces.Discrete):
        return DiscreteAction(int(space.n), int(space.start))
    if isinstance(space, spaces.Box) and np.dtype(space.dtype).kind == "f":
        low, high = (tuple(bound.astype(np.float64).ravel().tolist()) for bound in (space.low, space.high))
        return BoxAction(low, high, shape=tuple(space.shape), dtype=_torch(np.dtype(space.dtype)))
    raise InvalidArgument(
        f"action: {type(space).__name__} actions ({space}) are not supported by the algorithms here: they choose one "
        "number (Discrete) or an array of floating numbers (Box); wrap the environment so that it takes one of these"
    )


def _torch(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
