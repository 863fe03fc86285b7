"""Reading and writing packed rows, with the lock held or without."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from millpond.core.schema import FEW, Key, Schema
from millpond.replay.kernels import loading as kernels
from millpond.replay.samplers.protocol import Ints
from millpond.replay.storage import Storage
from millpond.shm import mapped

RUNS = 8  # rows up to which moving one after the other is quicker than an index of NumPy's
CHUNK = 256  # NumPy keeps the GIL for 1-D indexing of up to 500 elements
VAST = 16 << 20  # bytes of rows from which on they do not fit into the caches, so that a gather waits for memory
MANY = 1024  # rows from which on a gather lets go of the GIL


class Rows:
    """The rows of a bound storage.

    Under the lock nothing may let go of the GIL: there whole runs are moved by ``memmove``, and scattered rows by
    indexing an array of opaque records in chunks. A storage of the user's does as it likes, at the price of longer
    locks.
    """

    def __init__(self, storage: Storage, schema: Schema) -> None:
        self.storage = storage
        self.schema = schema
        rows: torch.Tensor | None = getattr(storage, "rows", None)
        self.raw = rows is not None and rows.device.type == "cpu"
        if self.raw and rows is not None:
            self.base = rows.data_ptr()
            self._words = rows.view(torch.int64)
            self._numbers = self._words.numpy()
            self._flat = self._numbers.reshape(-1)
            self._records = rows.numpy().reshape(-1).view(np.dtype(f"V{schema.row_nbytes}"))
            self.vast = rows.nbytes >= VAST
            self._width = schema.row_nbytes // 8
        self.hook: Any = None  # tests stop here in the middle of a row

    # ------------------------------------------------------------------ without the lock
    def read(self, slots: Ints, into: torch.Tensor | None = None) -> torch.Tensor:
        """Copies of rows, as 64-bit words where they can be had so, else as bytes; `Schema` takes both.

        ``into``: memory of the caller's for them, int64 ``[n, row_nbytes / 8]``; only where the storage is `raw`.
        """
        if not self.raw:
            return self.storage.read(torch.from_numpy(slots))
        n = len(slots)
        if 0 < n <= FEW:
            if into is None:
                return torch.from_numpy(self._numbers[slots])
            into.numpy()[...] = self._numbers[slots]
            return into
        if not slots.flags.carray:  # reversed, or read-only, as a sampler of the user's may answer
            slots = slots.copy()
        compiled = kernels.request() if self.vast else None
        if compiled is None:
            return torch.index_select(self._words, 0, torch.from_numpy(slots), out=into)
        out = torch.empty((n, self._width), dtype=torch.int64) if into is None else into
        gather = compiled.gather_released if n >= MANY else compiled.gather
        gather(self._flat, slots, out.numpy())
        return out

    def columns(self, slots: Ints, keys: Sequence[Key], *, locked: bool = False) -> list[torch.Tensor]:
        """Copies of some fields, ``[n, *shape]``."""
        if self.raw and not locked and len(slots) * self.schema.row_nbytes > 1 << 16:
            rows = self.storage.rows  # type: ignore[attr-defined]
            index = torch.from_numpy(slots)
            return [self.schema.column(rows, key).index_select(0, index) for key in keys]
        found = self.gather(slots) if locked else self.read(slots)
        return [self.schema.column(found, key) for key in keys]

    # ------------------------------------------------------------------ under the lock
    def gather(self, slots: Ints) -> torch.Tensor:
        """As `read`."""
        if not self.raw:
            return self.storage.read(torch.from_numpy(slots))
        out = np.empty(len(slots), self._records.dtype)
        for a in range(0, len(slots), CHUNK):
            out[a : a + CHUNK] = self._records[slots[a : a + CHUNK]]
        return torch.from_numpy(out.view(np.uint8)).view(len(slots), self.schema.row_nbytes)

    def write_run(self, start: int, rows: torch.Tensor) -> None:
        """Rows into neighbouring slots from ``start`` on, going on at slot 0 behind the last."""
        n, capacity = rows.shape[0], self.storage.capacity
        before = min(n, capacity - start)
        if not self.raw:
            slots = torch.arange(start, start + n) % capacity
            self.storage.write(slots, rows)
            return
        width, source = self.schema.row_nbytes, rows.data_ptr()
        self._move(self.base + start * width, source, before * width)
        if before < n:
            self._move(self.base, source + before * width, (n - before) * width)

    def _move(self, to: int, source: int, nbytes: int) -> None:
        if self.hook is None:
            mapped.memmove(to, source, nbytes)
            return
        half = nbytes // 2 + self.schema.row_nbytes // 3
        half = min(half, nbytes)
        mapped.memmove(to, source, half)
        self.hook("half copied")
        mapped.memmove(to + half, source + half, nbytes - half)

    def write_at(self, slots: Ints, rows: torch.Tensor) -> None:
        """Rows into scattered slots."""
        if not self.raw:
            self.storage.write(torch.from_numpy(slots), rows)
            return
        if len(slots) <= RUNS:
            width, source = self.schema.row_nbytes, rows.data_ptr()
            for i, slot in enumerate(slots.tolist()):
                self._move(self.base + slot * width, source + i * width, width)
            return
        records = rows.numpy().reshape(-1).view(self._records.dtype)
        for a in range(0, len(slots), CHUNK):
            self._records[slots[a : a + CHUNK]] = records[a : a + CHUNK]
            if self.hook is not None:
                self.hook("half copied")


class Journal:
    """Rows that are being changed in place, noted before they are: whoever finds the change unfinished finishes it."""

    LIMIT = 64  # rows at a time

    def __init__(self, directory: Path | None, row_nbytes: int) -> None:
        self._width = row_nbytes
        nbytes = 8 + self.LIMIT * (8 + row_nbytes)
        memory: Any
        if directory is None:
            memory = bytearray(nbytes)
        else:
            if not (directory / "journal").exists():
                self._make(directory / "journal", nbytes)
            memory = mapped.map_file(directory / "journal", nbytes)
        self._count = np.frombuffer(memory, np.int64, 1)
        self._slots = np.frombuffer(memory, np.int64, self.LIMIT, 8)
        self._rows = np.frombuffer(memory, np.dtype(f"V{row_nbytes}"), self.LIMIT, 8 + 8 * self.LIMIT)

    @staticmethod
    def _make(file: Path, nbytes: int) -> None:
        """Whoever finds the name finds the whole file; of several makers the first one counts."""
        making = file.with_name(f"journal.making.{os.getpid()}.{threading.get_native_id()}")
        making.unlink(missing_ok=True)
        mapped.allocate(making, nbytes).close()
        with contextlib.suppress(FileExistsError):
            os.link(making, file)
        making.unlink()

    def note(self, slots: Ints, rows: torch.Tensor) -> None:
        n = len(slots)
        self._slots[:n] = slots
        self._rows[:n] = rows.contiguous().numpy().reshape(-1).view(self._rows.dtype)
        self._count[0] = n

    def apply(self, rows: Rows) -> None:
        n = int(self._count[0])
        noted = torch.from_numpy(self._rows[:n].copy().view(np.uint8)).view(n, self._width)
        rows.write_at(self._slots[:n].copy(), noted)
