"""What a network must know of an environment: shapes, types and bounds. No environment library is imported here."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from millpond.core.errors import InvalidArgument


@dataclass(frozen=True)
class ObservationField:
    """One observation field of one environment, without the batch dimension.

    ``key`` is its path in a transition, for example ``("observation",)`` or ``("observation", "position")``.
    """

    key: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class BoxAction:
    """A continuous action vector; ``low`` and ``high`` are its inclusive, finite bounds, element by element.

    Raises:
        InvalidArgument: the bounds are empty, of different lengths, not finite, or not ``low < high``.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.low or len(self.low) != len(self.high):
            raise InvalidArgument(
                f"action bounds need equal lengths of at least 1, got {len(self.low)}, {len(self.high)}"
            )
        for i, (low, high) in enumerate(zip(self.low, self.high, strict=True)):
            if not (math.isfinite(low) and math.isfinite(high) and low < high):
                raise InvalidArgument(
                    f"action[{i}] has the bounds [{low}, {high}]: they must be finite and low < high; "
                    "wrap the environment so that its actions are bounded"
                )

    @property
    def size(self) -> int:
        return len(self.low)


@dataclass(frozen=True)
class DiscreteAction:
    """One action out of ``n``, numbered ``0 … n-1``."""

    n: int

    def __post_init__(self) -> None:
        if self.n < 1:
            raise InvalidArgument(f"a discrete action needs n >= 1, got {self.n}")


@dataclass(frozen=True)
class EnvSpec:
    """The observation fields and the action of one environment."""

    observation: tuple[ObservationField, ...]
    action: BoxAction | DiscreteAction

    def __post_init__(self) -> None:
        keys = [field.key for field in self.observation]
        if not keys or len(set(keys)) != len(keys):
            raise InvalidArgument(f"observation keys must exist and differ, got {keys}")

    @classmethod
    def vector(cls, size: int, *, action: BoxAction | DiscreteAction) -> EnvSpec:
        """The common case: one float32 observation vector of ``size`` numbers."""
        return cls((ObservationField(("observation",), (size,)),), action)

    @property
    def observation_size(self) -> int:
        """How many numbers the observation has when its vectors are put end to end, in the order of the fields.

        Raises:
            InvalidArgument: a field is not a vector of numbers; the message names it.
        """
        for field in self.observation:
            if len(field.shape) != 1 or field.dtype.is_complex:
                raise InvalidArgument(
                    f"observation field {'.'.join(field.key)!r} has shape {field.shape} and type {field.dtype}: "
                    "these networks take one-dimensional vectors; flatten or encode it in a wrapper of the environment"
                )
        return sum(field.shape[0] for field in self.observation)
