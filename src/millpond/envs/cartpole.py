"""Gymnasium's vectorised CartPole, which can be saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

_PARTS = ("state", "steps", "prev_done", "low", "high")


class SavedCartPole(CartPoleVectorEnv):
    """The same steps as Gymnasium's, which can go on in another object: so a run on it can be resumed exactly."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that later steps depend on, between a reset and the next."""
        generator = self.np_random.bit_generator.state
        return {**{name: np.array(getattr(self, name)) for name in _PARTS}, "generator": _words(generator)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was called: later steps are the same, bit for bit."""
        for name in _PARTS:
            setattr(self, name, np.array(state[name]))
        self.np_random.bit_generator.state = _generator(state["generator"])


def _words(state: Any) -> dict[str, Any]:
    """The state of a PCG64, with its numbers of 128 bits as text."""
    return {**state, "state": {name: str(number) for name, number in state["state"].items()}}


def _generator(words: Any) -> dict[str, Any]:
    return {**words, "state": {name: int(number) for name, number in words["state"].items()}}
