"""A trained policy, read back from its run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from millpond.core.errors import InvalidArgument, InvalidType
from millpond.core.spec import EnvSpec, ObservationField
from millpond.train.checkpoint import ALGORITHM, load_tensors, spec_from_json
from millpond.train.compose import settings_from_file
from millpond.train.normalizing import algorithm_of
from millpond.train.run_state import Checkpoints, RunDirectory, read_checkpoint


class TrainedPolicy(nn.Module):
    """A policy without exploration, on the CPU: called with a TensorDict it is a module, and ``predict`` takes arrays.

    As a module it maps a TensorDict ``[batch]`` of observations, as the environment gives them, to the same TensorDict
    with ``action``, without gradients.
    """

    def __init__(self, policy: nn.Module, spec: EnvSpec) -> None:
        super().__init__()
        self.policy, self.spec = policy, spec

    def forward(self, data: TensorDictBase) -> TensorDictBase:
        """Set ``action``, and return ``data``."""
        answer: TensorDictBase = self.policy(data)
        return answer

    def predict(self, observation: Any) -> npt.NDArray[Any]:
        """The action for one observation, or one action for each of several.

        ``observation`` is what the environment gives: an array of the shape of its space, or of that shape with the
        number of observations before it; for a Dict space a mapping, nested as the space is, with such arrays.
        The action has the shape and the type that the environment takes, after the same leading number; for one
        observation of an environment with discrete actions it is one number.

        Raises:
            InvalidArgument: a part of the observation is missing or has another shape.
            InvalidType: a part is not made of numbers, or of numbers with fractions where the space has whole ones.
        """
        parts: dict[tuple[str, ...], Tensor] = {}
        counts: dict[str, int | None] = {}
        for field in self.spec.observation:
            array = _array_of(field, observation)
            name, ahead = ".".join(field.key), array.ndim - len(field.shape)
            if ahead not in (0, 1) or array.shape[ahead:] != field.shape:
                raise InvalidArgument(
                    f"{name} has shape {list(array.shape)}; that of one observation is {list(field.shape)}, and of"
                    " several their number comes before it"
                )
            parts[field.key] = torch.tensor(array if ahead else array[None], dtype=field.dtype)
            counts[name] = len(array) if ahead else None
        if len(set(counts.values())) > 1:
            raise InvalidArgument(f"the parts of the observation hold different numbers of them: {counts}")
        (count,) = set(counts.values())
        data = TensorDict({}, batch_size=[1 if count is None else count])
        for key, value in parts.items():
            data.set(key, value)
        action: npt.NDArray[Any] = self(data)["action"].numpy()
        return action[0] if count is None else action


def _array_of(field: ObservationField, observation: Any) -> npt.NDArray[Any]:
    name, value = ".".join(field.key), observation
    for word in field.key[1:]:
        if not isinstance(value, Mapping) or word not in value:
            raise InvalidArgument(f"the observation has no part {name}; the policy was trained with one")
        value = value[word]
    try:
        array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    except ValueError as problem:  # lists of different lengths
        raise InvalidArgument(f"{name} is no array: {problem}") from problem
    if array.dtype.kind not in "biuf":
        raise InvalidType(f"{name} must be an array of numbers, got {type(value).__name__} of type {array.dtype}")
    if array.dtype.kind == "f" and not field.dtype.is_floating_point:
        raise InvalidType(f"{name} must hold whole numbers, got type {array.dtype}")
    return array


def load_policy(run: str | os.PathLike[str], *, checkpoint: str | os.PathLike[str] | None = None) -> TrainedPolicy:
    """The policy of a run, without exploration: ``predict`` takes arrays, and called with a TensorDict it is a module.

    With ``normalize_observations`` it normalises observations by the statistics of the checkpoint. ``checkpoint`` is
    one of the run's checkpoint directories, by its name or its path; the newest by default. Neither the environment nor
    the replay is needed.

    Raises:
        InvalidArgument: ``run`` is no run directory.
        CheckpointError: it has no checkpoint, or that is damaged or of another version.
    """
    directory = RunDirectory.open(Path(run))
    settings = settings_from_file(directory.config)
    path = Checkpoints(directory.checkpoints).latest() if checkpoint is None else Path(checkpoint)
    if len(path.parts) == 1 and not path.exists():  # a name
        path = directory.checkpoints / path
    state = read_checkpoint(path)
    spec = spec_from_json(state["spec"])
    algorithm = algorithm_of(settings, spec, statistics=None, device="cpu")
    algorithm.load_state_dict(load_tensors(path / ALGORITHM))
    return TrainedPolicy(algorithm.evaluation_policy(), spec)
