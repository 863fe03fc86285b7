"""A batch as one block of bytes: how it lies in a mailbox, and how it travels through Ray."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict, TensorDictBase

from millpond.collect.rollout_storage import Key, RowField
from millpond.envs.spaces import nested
from millpond.shm.mapped import allocate, map_file

_ALIGNMENT = 64
Views = dict[Key, torch.Tensor]


class Format(NamedTuple):
    """What a block holds: the fields of up to ``frames`` frames. With ``time`` they are sequences."""

    fields: tuple[RowField, ...]
    frames: int
    time: int | None

    @property
    def nbytes(self) -> int:
        """Of a block."""
        return max(_ALIGNMENT, sum(self._sizes()))

    def _sizes(self) -> list[int]:
        sizes = (self.frames * math.prod(field.shape) * field.dtype.itemsize for field in self.fields)
        return [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]

    def views(self, memory: Any, at: int = 0) -> Views:
        """The fields, ``[frames, …]``, in the block that begins at byte ``at``."""
        views = {}
        for field, nbytes in zip(self.fields, self._sizes(), strict=True):
            dtype = torch.from_numpy(field.dtype.type(0).reshape(1)).dtype
            shape = (self.frames, *field.shape)
            size = math.prod(shape)
            flat = torch.empty(0, dtype=dtype)
            if size:
                flat = torch.frombuffer(memory, dtype=dtype, count=size, offset=at)
            views[field.key] = flat.view(shape)
            at += nbytes
        return views

    def put(self, views: Views, batch: TensorDictBase) -> None:
        """Copy a batch in."""
        flat = batch if self.time is None else batch.reshape(-1)
        for key, tensor in views.items():
            tensor[: flat.shape[0]] = flat.get(key)

    def get(self, views: Views, frames: int) -> TensorDict:
        """A copy of the first ``frames`` frames, in the shape in which they were put."""
        shape = (frames,) if self.time is None else (frames // self.time, self.time)
        copies: dict[Key, Any] = {key: view[:frames].clone().unflatten(0, shape) for key, view in views.items()}
        return TensorDict(nested(copies), batch_size=shape)

    def pack(self, batch: TensorDictBase) -> npt.NDArray[np.uint8]:
        """A batch as one array, of the size that its frames need."""
        form = self._replace(frames=batch.numel())
        block = np.zeros(form.nbytes, np.uint8)
        form.put(form.views(block), batch)
        return block

    def unpack(self, block: npt.NDArray[np.uint8], frames: int) -> TensorDict:
        """What ``pack`` packed, in memory of its own."""
        form, shape = self._replace(frames=frames), (frames,)
        own = block.copy()  # Ray's is read-only
        if self.time is not None:
            shape = (frames // self.time, self.time)  # type: ignore[assignment]
        views: dict[Key, Any] = {key: view.unflatten(0, shape) for key, view in form.views(own).items()}
        return TensorDict(nested(views), batch_size=shape)


SLOTS = 2


class Mailbox:
    """``SLOTS`` batches of up to ``form.frames`` frames. Who writes, and who reads, a slot is agreed by tokens."""

    def __init__(self, path: Path, form: Format, *, create: bool) -> None:
        self.form, nbytes = form, SLOTS * form.nbytes
        memory = allocate(path, nbytes) if create else map_file(path, nbytes)
        self._slots = [form.views(memory, at * form.nbytes) for at in range(SLOTS)]

    def put(self, slot: int, batch: TensorDictBase) -> None:
        """Copy a batch in."""
        self.form.put(self._slots[slot], batch)

    def get(self, slot: int, frames: int) -> TensorDict:
        """A copy of the first ``frames`` frames of a slot, in the shape in which they were put."""
        return self.form.get(self._slots[slot], frames)
