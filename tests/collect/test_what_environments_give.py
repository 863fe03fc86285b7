"""What an environment returns is stored as it is, or refused by the name of its field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from millpond.collect import Collector
from millpond.core.errors import SchemaMismatch

LOW, HIGH = -(2**62), 2**62


class Still(gymnasium.Env[Any, Any]):
    observation_space: Any = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (2,), np.uint8),
            "number": spaces.Box(LOW, HIGH, (1,), np.int64),
            "small": spaces.Box(-9, 9, (1,), np.int32),
            "real": spaces.Box(-np.inf, np.inf, (3,), np.float32),
        }
    )
    action_space: Any = spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return {name: np.zeros(x.shape, x.dtype) for name, x in self.observation_space.items()}, {}

    def step(self, action: Any) -> Any:
        return self.reset()[0], 0.0, False, False, {}


class Changed(SyncVectorEnv):
    """Two of these, whose third step returns something else."""

    def __init__(self, change: dict[str, Any]) -> None:
        super().__init__([Still, Still])
        self.change, self.at = change, 0

    def step(self, actions: Any) -> Any:
        observation, *rest = super().step(actions)
        self.at += 1
        return ({**observation, **self.change} if self.at == 3 else observation), *rest


def collected(change: dict[str, Any]) -> Any:
    with Collector(Changed(change), frames_per_batch=8, total_frames=8) as collector:
        return next(iter(collector))["next", "observation"]


UNFIT: dict[str, Callable[[], Any]] = {
    "image: fractions": lambda: np.full((2, 2), 0.5),
    "image: too large": lambda: np.full((2, 2), 256),
    "image: negative": lambda: np.full((2, 2), -1, np.int8),
    "image: would be repeated": lambda: np.ones((2, 1), np.uint8),
    "number: fractions": lambda: np.zeros((2, 1), np.float32),
    "number: of 64 bits without a sign": lambda: np.full((2, 1), 2**64 - 1, np.uint64),
    "small: wider": lambda: np.full((2, 1), 2**31),
    "real: integers that would be rounded": lambda: np.full((2, 3), 2**24 + 1),
    "real: one environment's": lambda: np.ones((1, 3), np.float32),
    "real: complex": lambda: np.ones((2, 3), np.complex64),
    "real: text": lambda: np.full((2, 3), "x"),
    "real: objects": lambda: np.full((2, 3), None),
}


@pytest.mark.parametrize("unfit", UNFIT)
def test_what_the_space_cannot_hold_is_refused_by_name(unfit: str) -> None:
    name = unfit.split(":")[0]
    with pytest.raises(SchemaMismatch, match=f"next/observation/{name}: the environment returned"):
        collected({name: UNFIT[unfit]()})


def test_what_the_space_can_hold_is_stored() -> None:
    fits: dict[str, Any] = {
        "image": np.full((2, 2), 255),
        "number": np.full((2, 1), 7, np.uint64),
        "small": np.full((2, 1), -5),
        "real": np.full((2, 3), 0.25),
    }
    found = collected(fits)
    for name, value in fits.items():
        assert found[name][4].tolist() == value[0].tolist()
        assert found[name][0].abs().max() == 0
    assert (collected({"real": np.full((2, 3), 2**24)})["real"][4] == 2**24).all()


def test_a_field_that_the_space_does_not_know_is_refused_by_name() -> None:
    class Talking(Changed):
        def reset(self, **options: Any) -> Any:
            observation, info = super().reset(**options)
            return {**observation, "more": np.zeros(2)}, info

    collector = Collector(Talking({}), frames_per_batch=8, total_frames=8)
    with collector, pytest.raises(SchemaMismatch, match="observation/more"):
        next(iter(collector))
