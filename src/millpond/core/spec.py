"""What a network must know of an environment: shapes, types and bounds. No environment library is imported here."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from millpond.core.errors import InvalidArgument


@dataclass(frozen=True)
class ObservationField:
    """One observation field of one environment, without the batch dimension.

    ``key`` is its path in a transition, for example ``("observation",)`` or ``("observation", "position")``. One choice
    out of n, the numbers ``first … first + choices - 1``, says so; networks see it as n numbers, of which one is 1.
    """

    key: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    choices: int = 0
    first: int = 0

    @property
    def size(self) -> int:
        """How many numbers a network sees of it."""
        return self.choices or math.prod(self.shape)


@dataclass(frozen=True)
class BoxAction:
    """A continuous action; ``low`` and ``high`` are its inclusive, finite bounds, element by element in C order.

    ``shape`` and ``dtype`` are those that the environment takes; by default one vector of float32.

    Raises:
        InvalidArgument: the bounds are empty, of different lengths, not finite, or not ``low < high`` as numbers of
            this type; or the shape has another number of elements.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    shape: tuple[int, ...] = None  # type: ignore[assignment]  # __post_init__ fills it in
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.shape is None:
            object.__setattr__(self, "shape", (len(self.low),))
        if not self.low or len(self.low) != len(self.high):
            raise InvalidArgument(
                f"action bounds need equal lengths of at least 1, got {len(self.low)}, {len(self.high)}"
            )
        if math.prod(self.shape) != len(self.low):
            raise InvalidArgument(f"an action of shape {self.shape} does not have {len(self.low)} bounds")
        for i, (low, high) in enumerate(zip(*(bound.tolist() for bound in self.bounds()), strict=True)):
            if not (math.isfinite(low) and math.isfinite(high) and low < high):
                raise InvalidArgument(
                    f"action[{i}] has the bounds [{low}, {high}]: they must be finite and low < high; "
                    "wrap the environment so that its actions are bounded"
                )

    @property
    def size(self) -> int:
        return len(self.low)

    def bounds(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``low`` and ``high`` as vectors of the action's own type."""
        return torch.tensor(self.low, dtype=self.dtype), torch.tensor(self.high, dtype=self.dtype)


@dataclass(frozen=True)
class DiscreteAction:
    """One action out of ``n``, numbered ``start … start + n - 1``."""

    n: int
    start: int = 0

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
        """How many numbers a network sees when the fields are flattened and put end to end, in their order.

        Raises:
            InvalidArgument: a field is an image, or has no number at all; the message names it.
        """
        for field in self.observation:
            image = len(field.shape) > (1 if field.dtype is torch.uint8 else 2)
            if image or field.dtype.is_complex or not field.size:
                raise InvalidArgument(
                    f"observation field {'.'.join(field.key)!r} has shape {field.shape} and type {field.dtype}: these "
                    "networks take numbers, vectors and matrices; flatten or encode it in a wrapper of the environment"
                )
        return sum(field.size for field in self.observation)
