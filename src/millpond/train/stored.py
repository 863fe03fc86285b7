"""What replay holds when a run ends: is every frame there once, and does every field look as the environment says?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDictBase

from millpond.core.spec import BoxAction, EnvSpec
from millpond.train.replay import as_transitions

_MOST, _AT_A_TIME = 1 << 20, 1 << 14  # items that are looked at, the newest ones, and how many of them at once
_SCALARS = {"reward": torch.float32, "done": torch.bool, "terminated": torch.bool, "truncated": torch.bool}


@dataclass(frozen=True, slots=True)
class Stored:
    """Of ``frames`` that were looked at ``distinct`` are different ones: of other episodes, or steps. ``unfit`` says
    which fields are not as the environment's spaces say, and how they are."""

    frames: int = 0
    distinct: int = 0
    unfit: tuple[str, ...] = ()


def look_at_stored(replay: Any, spec: EnvSpec, *, most: int = _MOST, time: int | None = None) -> Stored:
    """Look at the ``most`` newest items of a replay into which nobody writes any more, of ``time`` frames each."""
    size = len(replay)
    marks: list[npt.NDArray[np.int64]] = []
    unfit: tuple[str, ...] = ()
    for begin in range(max(0, size - most), size, _AT_A_TIME):
        rows = as_transitions(replay[begin : min(size, begin + _AT_A_TIME)], time)
        marks.append(np.stack([rows.get(name).reshape(len(rows)).numpy() for name in ("episode_id", "step")], axis=1))
        unfit = unfit or tuple(_unfit(rows, spec))
    if not marks:
        return Stored()
    seen = np.concatenate(marks)
    return Stored(len(seen), len(np.unique(seen.view(np.dtype((np.void, 16))))), unfit)


def _unfit(rows: TensorDictBase, spec: EnvSpec) -> list[str]:
    found = []
    for key, (shape, dtype) in expected_fields(spec).items():
        value = rows.get(key, None)
        wanted = f"{'.'.join(key)} should be {dtype} of shape [B, {', '.join(map(str, shape))}]".replace(", ]", "]")
        if value is None:
            found.append(f"{wanted} and is missing")
        elif tuple(value.shape) != (len(rows), *shape) or value.dtype != dtype:
            found.append(f"{wanted} and is {value.dtype} of shape {list(value.shape)} with B={len(rows)}")
    return found


def expected_fields(spec: EnvSpec) -> dict[tuple[str, ...], tuple[tuple[int, ...], torch.dtype]]:
    """Shape, without the batch dimension, and type of each field that a transition of this environment must have."""
    fields: dict[tuple[str, ...], tuple[tuple[int, ...], torch.dtype]] = {}
    for field in spec.observation:
        fields[field.key] = fields["next", *field.key] = (field.shape, field.dtype)
    if isinstance(spec.action, BoxAction):
        fields["action",] = (spec.action.shape, spec.action.dtype)
    else:
        fields["action",] = ((), torch.int64)
    return fields | {("next", name): ((1,), dtype) for name, dtype in _SCALARS.items()}
