"""Flat parameters: what one optimizer owns lies in one contiguous tensor, and so do its gradients.

A network's parameters are views into the flat tensor. Gradient all-reduce, fused Adam, Polyak averaging, saving and
publication then each work on one tensor, whatever the network looks like.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from millpond.algos.settings import OptimizerConfig
from millpond.core.errors import CheckpointError, InvalidArgument


class FlatParameters:
    """Moves ``parameters`` into one contiguous float32 tensor, in order; they become views of it, and so do gradients.

    ``values`` and ``gradients`` are that tensor and its gradient, both ``[n]``. Autograd accumulates into
    ``gradients``; in-place writes to ``values`` are seen by the network, and the other way round. Moving the module
    afterwards (``module.to(...)``) would cut the views: build it where it shall live.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        if not self._parameters or any(p.dtype != torch.float32 for p in self._parameters):
            raise InvalidArgument("flat parameters need at least one parameter, and all of them float32")
        self.values = torch.cat([p.detach().reshape(-1) for p in self._parameters])
        self.gradients = torch.zeros_like(self.values)
        self._gradient_views = []
        start = 0
        for parameter in self._parameters:
            part = slice(start, start + parameter.numel())
            parameter.data = self.values[part].view_as(parameter)
            self._gradient_views.append(self.gradients[part].view_as(parameter))
            start = part.stop
        self.zero_grad()

    def zero_grad(self) -> None:
        """Set all gradients to zero, and attach them again should somebody have replaced them."""
        self.gradients.zero_()
        for parameter, view in zip(self._parameters, self._gradient_views, strict=True):
            parameter.grad = view

    def freeze(self) -> FlatParameters:
        """For target networks: no parameter asks for a gradient any more."""
        for parameter in self._parameters:
            parameter.requires_grad_(False)
        return self


class FlatAdam(FlatParameters):
    """Flat parameters with their Adam: ``zero_grad()``, ``backward()``, ``step(update)``. One fused call per step.

    Adam as in Kingma and Ba, 2015 (arXiv:1412.6980), by ``torch.optim.Adam(fused=True)`` on the flat tensor. ``config``
    says how the learning rate falls and where gradients are clipped.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        eps: float = 1e-8,
        config: OptimizerConfig | None = None,
    ) -> None:
        super().__init__(parameters)
        leaf = nn.Parameter(self.values)
        leaf.grad = self.gradients
        self._leaf, self._lr, self._config = leaf, lr, config or OptimizerConfig()
        self._adam = torch.optim.Adam([leaf], lr=lr, eps=eps, fused=True)
        # Adam would make these at its first step. Made here, they can be saved and loaded at any time.
        self._state = {
            "step": torch.zeros((), device=leaf.device),
            "exp_avg": torch.zeros_like(self.values),
            "exp_avg_sq": torch.zeros_like(self.values),
        }
        self._adam.state[leaf] = self._state

    @property
    def lr(self) -> float:
        """The learning rate of the last step."""
        return float(self._adam.param_groups[0]["lr"])

    def step(self, update: int) -> None:
        """Clip the gradient and apply it. ``update`` is the number of this update, from 0: the rate follows it."""
        if self._config.max_grad_norm is not None:  # the norm of all its parameters together, after the ranks' mean
            nn.utils.clip_grad_norm_([self._leaf], self._config.max_grad_norm)
        self._adam.param_groups[0]["lr"] = self._lr * self._config.lr_share(update)
        self._adam.step()
        # An autocast context around many updates would go on using its half-precision copies of the old weights.
        torch.clear_autocast_cache()

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The live tensors that a checkpoint needs, by names that start with ``name``."""
        return {name: self.values, **{f"{name}.{key}": value for key, value in self._state.items()}}


def _no_reduction(gradients: Tensor) -> None:
    del gradients


@dataclass(frozen=True)
class Shard:
    """Which part of a data-parallel batch an algorithm sees, and how its gradients are averaged with the others'.

    Rank r of w holds rows ``r*B … (r+1)*B-1`` of a whole batch of ``w*B`` rows. ``reduce_gradients`` replaces one flat
    gradient by its mean over ranks, in place; it is called in the same order on every rank. Losses are plain means over
    rows and noise is drawn for the whole batch on every rank (all have the same seed), so that the averaged gradient is
    the whole batch's gradient.
    """

    rank: int = 0
    world_size: int = 1
    reduce_gradients: Callable[[Tensor], None] = _no_reduction

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise InvalidArgument(f"rank {self.rank} does not exist in a group of {self.world_size}")

    def randn(self, rows: int, size: int, generator: torch.Generator) -> Tensor:
        """This rank's ``[rows, size]`` of the normal noise for the whole batch."""
        noise = torch.randn(self.world_size * rows, size, generator=generator, device=generator.device)
        return noise[self.rank * rows : (self.rank + 1) * rows]


def save_state(
    tensors: Mapping[str, Tensor], generators: Mapping[str, torch.Generator], *, steps: int
) -> dict[str, Tensor]:
    """Copies of ``tensors``, the state of ``generators``, and the step count, as one flat dict of CPU tensors."""
    state = {key: value.detach().cpu().clone() for key, value in tensors.items()}
    state |= {f"generator.{key}": generator.get_state() for key, generator in generators.items()}
    return {**state, "steps": torch.tensor(steps)}


def load_state(
    state: Mapping[str, Tensor], tensors: Mapping[str, Tensor], generators: Mapping[str, torch.Generator]
) -> int:
    """Put what ``save_state`` returned back into the live objects; returns the step count.

    Raises:
        CheckpointError: a name is missing or surplus, or a shape or type differs. Nothing was loaded then.
    """
    expected = {*tensors, *(f"generator.{key}" for key in generators), "steps"}
    if expected != set(state):
        raise CheckpointError(
            f"the state of another algorithm or version: it lacks {sorted(expected - set(state))} "
            f"and has {sorted(set(state) - expected)} besides"
        )
    for key, live in tensors.items():
        if live.shape != state[key].shape or live.dtype != state[key].dtype:
            raise CheckpointError(
                f"{key} is {tuple(state[key].shape)} {state[key].dtype} in the checkpoint and "
                f"{tuple(live.shape)} {live.dtype} here: was it saved with other network sizes?"
            )
    with torch.no_grad():
        for key, live in tensors.items():
            live.copy_(state[key])
    for key, generator in generators.items():
        generator.set_state(state[f"generator.{key}"].to("cpu", torch.uint8))
    return int(state["steps"])
