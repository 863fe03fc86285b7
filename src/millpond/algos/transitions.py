"""A sampled batch as an algorithm reads it, and what is said when a loss is not finite.

Everything here is float32, also under autocast: a discount of 0.99 in bfloat16 would be 0.988.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from millpond.algos.nets import flat_observation
from millpond.core.errors import InvalidArgument, NonFinite
from millpond.core.spec import DiscreteAction, EnvSpec


class Transitions(NamedTuple):
    """``B`` transitions. Items that are sequences of T frames count as B·T transitions here."""

    observation: Tensor
    """``[B, size]``."""
    action: Tensor
    """``[B, size]`` in the units and the type of the environment; of a choice ``[B]``, int64, numbered from 0."""
    reward: Tensor
    """``[B]``; over n steps it is the discounted sum of their rewards."""
    discount: Tensor
    """``[B]``: γ to the number of steps that the reward covers, and 0 where the episode *terminated*."""
    next_observation: Tensor
    """``[B, size]``."""
    weight: Tensor | None
    """``[B]`` importance weights of a prioritized sampler."""


def read_transitions(batch: TensorDictBase, *, spec: EnvSpec, gamma: float) -> Transitions:
    """Cut ``batch`` into the tensors of an update. Fields stay views of the batch where their type allows it.

    Only ``terminated`` masks the bootstrap: an episode cut by its time limit goes on as far as values are concerned.
    With a field ``steps_to_next_obs`` (n-step returns) the exponent of γ is the number of steps really used.

    Raises:
        InvalidArgument: a field is missing or has a shape that ``spec`` does not admit.
    """
    alive = ~field(batch, ("next", "terminated")).reshape(-1)
    steps = batch.get("steps_to_next_obs", None)
    discount = alive.float() * (gamma if steps is None else gamma ** steps.reshape(-1).float())
    weight = batch.get("priority_weight", None)
    action, frames = field(batch, "action"), alive.numel()
    if weight is not None:
        weight = weight.reshape(-1).float()
        weight = weight.repeat_interleave(frames // weight.numel()) if weight.numel() != frames else weight
    return Transitions(
        observation=flat_observation(spec, batch),
        action=_flat_action(action, frames, spec),
        reward=field(batch, ("next", "reward")).reshape(-1).float(),
        discount=discount,
        next_observation=flat_observation(spec, batch, prefix=("next",)),
        weight=weight,
    )


def _flat_action(action: Tensor, frames: int, spec: EnvSpec) -> Tensor:
    if isinstance(spec.action, DiscreteAction):
        return action.reshape(frames).long() - spec.action.start
    return action.reshape(frames, spec.action.size)


def field(batch: TensorDictBase, key: str | tuple[str, ...]) -> Tensor:
    """``batch[key]``, or an InvalidArgument that lists what is there."""
    value: Tensor | None = batch.get(key, None)
    if value is None:
        there = sorted(str(name) for name in batch.keys(include_nested=True, leaves_only=True))
        raise InvalidArgument(f"the batch has no field {key!r}, only {there}")
    return value


def weighted_mean(loss: Tensor, weight: Tensor | None) -> Tensor:
    """The plain mean over rows of ``loss [..., B]``, each row times its weight. Never divided by the sum of weights:
    so the mean over the halves of a batch is the mean over the batch."""
    return loss.mean(-1) if weight is None else (loss * weight).mean(-1)


def per_item(values: Tensor, batch: TensorDictBase) -> Tensor:
    """``values``, one per transition, as one per item of ``batch``: the mean over a sequence."""
    items = batch.batch_size[0] if batch.batch_size else 1
    return values if values.numel() == items else values.reshape(items, -1).mean(-1)


def refuse_non_finite(loss: Tensor, parts: dict[str, Tensor], batch: TensorDictBase, *, step: int) -> None:
    """Return if ``loss`` is finite. Call it before the parameters change.

    Raises:
        NonFinite: it is not; the message names the loss and the first field and row of the batch that is not finite.
    """
    if math.isfinite(loss.item()):
        return
    bad = ", ".join(f"{name}={value.item():g}" for name, value in parts.items() if not math.isfinite(value.item()))
    raise NonFinite(
        f"update {step}: {bad or f'loss={loss.item():g}'}; parameters were left as they are. {_blame(batch)}"
    )


def _blame(batch: TensorDictBase) -> str:
    for key in batch.keys(include_nested=True, leaves_only=True):
        value = batch.get(key)
        if value.is_floating_point() and not bool((finite := torch.isfinite(value)).all()):
            where = (~finite).nonzero()[0].tolist()
            index = batch.get("index", None)
            slot = "" if index is None or not where else f" (slot {int(index.reshape(-1)[where[0]])})"
            name = key if isinstance(key, str) else ".".join(key)
            return f"In the batch, {name} at {where} is {value[tuple(where)].item():g}: row {where[0]}{slot}."
    return "Every field of the batch is finite: the parameters have diverged; try a smaller learning rate."


def refuse_huge_gradients(gradients: Sequence[Tensor], batch: TensorDictBase, *, step: int) -> None:
    """Return if Adam can take these flat gradients: their squares must be finite. Call it before the parameters change.

    Raises:
        NonFinite: it cannot; the message names the largest number of the batch.
    """
    if math.isfinite(sum(torch.dot(each, each) for each in gradients).item()):  # type: ignore[union-attr]
        return
    raise NonFinite(
        f"update {step}: the gradients are not finite, or too large for float32; parameters were left as they are."
        f" {_largest(batch)}"
    )


def _largest(batch: TensorDictBase) -> str:
    largest, told = -1.0, "The batch has no numbers."
    for key in batch.keys(include_nested=True, leaves_only=True):
        value = batch.get(key)
        if value.is_floating_point() and value.numel() and (most := value.abs().amax().item()) > largest:
            row = int(value.abs().reshape(len(value), -1).amax(1).argmax())
            name = key if isinstance(key, str) else ".".join(key)
            largest, told = most, f"The largest number in the batch is {most:g}, in {name} of row {row}."
    return told
