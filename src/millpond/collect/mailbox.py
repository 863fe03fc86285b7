"""How a worker hands batches to the collector's process: two slots in a mapped file, and tokens through a pipe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase

from millpond.collect.rows import Key, RowField
from millpond.envs.spaces import nested
from millpond.shm.mapped import allocate, map_file

SLOTS = 2
_ALIGNMENT = 64


class Format(NamedTuple):
    """What a mailbox holds; enough to map it in another process."""

    fields: tuple[RowField, ...]
    frames: int
    time: int | None


class Mailbox:
    """``SLOTS`` batches of up to ``form.frames`` frames. Who writes, and who reads, a slot is agreed by tokens."""

    def __init__(self, path: Path, form: Format, *, create: bool) -> None:
        self.form = form
        places, slot_nbytes = _places(form)
        memory = allocate(path, SLOTS * slot_nbytes) if create else map_file(path, SLOTS * slot_nbytes)
        self._slots = [_views(memory, form, places, at * slot_nbytes) for at in range(SLOTS)]

    def put(self, slot: int, batch: TensorDictBase) -> None:
        """Copy a batch in."""
        flat = batch if self.form.time is None else batch.reshape(-1)
        for key, tensor in self._slots[slot].items():
            tensor[: flat.shape[0]] = flat.get(key)

    def get(self, slot: int, frames: int) -> TensorDict:
        """A copy of the first ``frames`` frames of a slot, in the shape in which they were put."""
        time = self.form.time
        shape = (frames,) if time is None else (frames // time, time)
        copies: dict[Key, Any] = {
            key: tensor[:frames].clone().unflatten(0, shape) for key, tensor in self._slots[slot].items()
        }
        return TensorDict(nested(copies), batch_size=shape)


def _places(form: Format) -> tuple[list[int], int]:
    """The offset of each field within a slot, and the bytes of a slot."""
    offsets, at = [], 0
    for field in form.fields:
        offsets.append(at)
        at += -(-form.frames * math.prod(field.shape) * field.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return offsets, max(at, _ALIGNMENT)


def _views(memory: Any, form: Format, places: Sequence[int], base: int) -> dict[Key, torch.Tensor]:
    views = {}
    for field, at in zip(form.fields, places, strict=True):
        dtype = torch.from_numpy(field.dtype.type(0).reshape(1)).dtype
        shape = (form.frames, *field.shape)
        size = math.prod(shape)
        flat = torch.empty(0, dtype=dtype)
        if size:
            flat = torch.frombuffer(memory, dtype=dtype, count=size, offset=base + at)
        views[field.key] = flat.view(shape)
    return views
