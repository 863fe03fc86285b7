"""Multi-layer perceptrons, alone or several side by side, and the scaling of actions.

Weights are stored ``[in, out]`` and networks that always run together are stacked ``[copies, in, out]``, so that one
``baddbmm`` evaluates both critics. Initial numbers come from a generator that the caller owns, never from the global
one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn.functional import one_hot

from millpond.core.errors import InvalidArgument
from millpond.core.spec import BoxAction, EnvSpec, ObservationField


class MLP(nn.Module):
    """ReLU layers and a linear last one, on ``[B, in]``: to ``[B, out]``, or to ``[copies, B, out]`` with ``copies``.

    The answer is float32 also under autocast, so that arithmetic on it (discounts, log-probabilities) stays precise.
    Weights and biases start uniform in ±1/√in, PyTorch's own default for linear layers.
    """

    def __init__(
        self, sizes: Sequence[int], *, generator: torch.Generator, copies: int | None = None, tanh_output: bool = False
    ) -> None:
        super().__init__()
        self.copies = copies
        self.tanh_output = tanh_output
        self._layers: list[tuple[nn.Parameter, nn.Parameter]] = []
        for number, (fan_in, fan_out) in enumerate(pairwise(sizes)):
            weight_shape = (fan_in, fan_out) if copies is None else (copies, fan_in, fan_out)
            bias_shape = (fan_out,) if copies is None else (copies, 1, fan_out)
            weight = _uniform(weight_shape, 1 / math.sqrt(fan_in), generator)
            bias = _uniform(bias_shape, 1 / math.sqrt(fan_in), generator)
            self.register_parameter(f"weight_{number}", weight)
            self.register_parameter(f"bias_{number}", bias)
            self._layers.append((weight, bias))

    def forward(self, x: Tensor, *, frozen: bool = False) -> Tensor:
        """With ``frozen``, gradients flow to ``x`` and none is computed for the parameters."""
        if self.copies is not None:
            x = x.expand(self.copies, *x.shape)
        last = len(self._layers) - 1
        for number, (weight, bias) in enumerate(self._layers):
            if frozen:
                weight, bias = weight.detach(), bias.detach()  # type: ignore[assignment]  # plain tensors do here
            x = self._affine(x, weight, bias)
            if number < last:
                x = x.relu_()
        x = x.float()
        return x.tanh() if self.tanh_output else x

    def _affine(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if self.copies is None:
            return torch.addmm(bias, x, weight)
        if weight.shape[-1] == 1:
            # A batched product with one output column is six times slower than the same sum written out.
            return (x * weight.transpose(1, 2)).sum(-1, keepdim=True) + bias
        return torch.baddbmm(bias, x, weight)


def _uniform(shape: tuple[int, ...], bound: float, generator: torch.Generator) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device=generator.device).uniform_(-bound, bound, generator=generator))


class ActionScale(nn.Module):
    """Maps flat actions ``[B, size]`` between the environment, its units and its type, and ``[-1, 1]`` in float32.

    Networks and noise live in ``[-1, 1]``; -1 and 1 are exactly the bounds, and nothing maps outside of them.
    """

    low: Tensor
    high: Tensor
    center: Tensor
    half_range: Tensor

    def __init__(self, action: BoxAction) -> None:
        super().__init__()
        low, high = (bound.numpy() for bound in action.bounds())
        center = low / 2 + high / 2  # the sum of both may be infinite
        half = np.maximum(high - center, center - low)
        while (short := (center + half < high) | (center - half > low)).any():  # rounding must not fall short
            half[short] = np.nextafter(half[short], half.dtype.type(np.inf))
        for name, value in (("low", low), ("high", high), ("center", center), ("half_range", half)):
            self.register_buffer(name, torch.from_numpy(value))

    def to_env(self, unit: Tensor) -> Tensor:
        action = torch.addcmul(self.center, unit.to(self.center.dtype), self.half_range)
        return action.clamp_(self.low, self.high)

    def to_unit(self, action: Tensor) -> Tensor:
        return ((action - self.center) / self.half_range).float()

    def log_volume(self) -> float:
        """Σ log(half range): what a log-density over ``[-1, 1]`` loses in the units of the environment."""
        return float(self.half_range.log().sum())


def box_action(spec: EnvSpec, algorithm: str) -> BoxAction:
    """The continuous action of ``spec``, or an error that says which algorithm wanted one."""
    if not isinstance(spec.action, BoxAction):
        raise InvalidArgument(f"{algorithm} needs a continuous action, and this environment has {spec.action}; try dqn")
    return spec.action


def flat_observation(spec: EnvSpec, data: TensorDictBase, *, prefix: tuple[str, ...] = ()) -> Tensor:
    """The observation of ``data`` as float32 ``[B, size]``; leading dimensions become one. Strided views stay views.

    A choice out of n becomes n numbers, of which one is 1.

    Raises:
        InvalidArgument: a field is missing, or has another shape than ``spec`` says, or a choice that there is not.
    """
    parts = []
    for field in spec.observation:
        value = data.get((*prefix, *field.key), None)
        if value is None:
            raise InvalidArgument(f"the batch has no field {(*prefix, *field.key)}, only {_keys(data)}")
        own = tuple(value.shape[value.ndim - len(field.shape) :])
        if own != field.shape:
            raise InvalidArgument(f"field {(*prefix, *field.key)} ends in {own}, not in {field.shape}")
        if field.choices:
            parts.append(_chosen(value.reshape(-1), field))
        else:
            parts.append(value.float() if value.ndim == 2 and len(own) == 1 else value.float().reshape(-1, field.size))
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _chosen(value: Tensor, field: ObservationField) -> Tensor:
    try:
        return one_hot(value.long() - field.first, field.choices).float()
    except RuntimeError as problem:
        last = field.first + field.choices - 1
        raise InvalidArgument(f"field {field.key} holds a number outside of {field.first} … {last}") from problem


def _keys(data: TensorDictBase) -> list[str]:
    return sorted(str(key) for key in data.keys(include_nested=True, leaves_only=True))
