"""How a worker process hands batches to the collector's: two slots in a mapped file, and tokens through a pipe."""

from __future__ import annotations

from pathlib import Path

from tensordict import TensorDict, TensorDictBase

from millpond.collect.parcel import Format
from millpond.shm.mapped import allocate, map_file

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
