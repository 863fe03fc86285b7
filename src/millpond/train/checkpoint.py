"""What a checkpoint of a run holds, and how it is put back: networks, optimizers, generators, collector, replay."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from millpond.core.errors import CheckpointError, NonFinite
from millpond.core.spec import BoxAction, DiscreteAction, EnvSpec, ObservationField
from millpond.train.assembly import Parts
from millpond.train.run_state import read_checkpoint

ALGORITHM, COLLECTOR, METER, REPLAY = "algorithm.pt", "collector.pt", "meter.pt", "replay.millpond"


def write_parts(folder: Path, parts: Parts, collector_state: dict[str, Any], meter_state: dict[str, Any]) -> None:
    """Write the parts of a run into an empty folder. The replay, where it is wanted, comes last: it is the largest.

    Raises:
        NonFinite: a weight, or something else that updates go on from, is not finite. Nothing was written.
    """
    learned = parts.algorithm.state_dict()
    for name, value in learned.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise NonFinite(f"{name} is not finite after {parts.algorithm.steps} updates: the parameters have diverged")
    torch.save(learned, folder / ALGORITHM)
    torch.save(_to_tensors(collector_state), folder / COLLECTOR)
    torch.save(meter_state, folder / METER)
    if parts.settings.checkpoint.replay:
        parts.replay.dumps(folder / REPLAY)


def read_parts(path: Path, parts: Parts) -> tuple[dict[str, Any], dict[str, Any]]:
    """Put a checkpoint into fresh parts, and make their collector. Returns its ``run.json`` and the state of the meter.

    Raises:
        CheckpointError: it is damaged, does not fit these settings, or was saved without its replay.
    """
    state = read_checkpoint(path)
    if not (path / REPLAY).is_file():
        raise CheckpointError(
            f"{path} holds no replay (checkpoint.replay=false): it can be evaluated, but training cannot go on from it"
        )
    algorithm, collector, meter = (load_tensors(path / name) for name in (ALGORITHM, COLLECTOR, METER))
    parts.replay.loads(path / REPLAY)
    parts.algorithm.load_state_dict(algorithm)
    parts.collect(_to_arrays(collector) if state["frames"] else None)  # before the first frame nothing has begun
    parts.algorithm.load_state_dict(algorithm)  # again: a collector seeds the noise of the policy that it is given
    return state, meter


def load_tensors(path: Path) -> Any:
    """What ``torch.save`` wrote: tensors, numbers, strings, and lists and dictionaries of them. Runs no code from it.

    Raises:
        CheckpointError: the file is missing, or holds something else.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None


def _to_tensors(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.array(value, order="C"))  # copied: what Ray brings is read-only, in one block
    if isinstance(value, dict):
        return {key: _to_tensors(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_to_tensors(part) for part in value]
    return value


def _to_arrays(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.numpy()
    if isinstance(value, dict):
        return {key: _to_arrays(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_to_arrays(part) for part in value]
    return value


def spec_to_json(spec: EnvSpec) -> dict[str, Any]:
    """A specification as JSON, so that a policy can be built again where its environment is not installed."""

    def plain(part: Any) -> dict[str, Any]:
        values = {name: getattr(part, name) for name in part.__dataclass_fields__}
        return {k: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v for k, v in values.items()}

    return {"observation": [plain(field) for field in spec.observation], "action": plain(spec.action)}


def spec_from_json(values: dict[str, Any]) -> EnvSpec:
    """What ``spec_to_json`` wrote. Raises CheckpointError where it is something else."""
    try:
        fields = tuple(ObservationField(**_of_json(field)) for field in values["observation"])
        action = _of_json(values["action"])
        return EnvSpec(fields, DiscreteAction(**action) if "n" in action else BoxAction(**action))
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the checkpoint does not say what its policy observes: {error!r}") from None


def _of_json(values: dict[str, Any]) -> dict[str, Any]:
    known = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return known | ({"dtype": getattr(torch, values["dtype"])} if "dtype" in values else {})
