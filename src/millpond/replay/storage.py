"""Where the packed rows lie: private memory, a GPU, or files that any process on the host can map.

The engine needs little of a storage (see `Storage`), so users can bring their own. One that offers ``rows``, the packed
rows as one CPU tensor, is written and read without a detour; any other is asked to ``write`` and ``read``.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from millpond.core.errors import InvalidArgument, InvalidType, OutOfMemory
from millpond.core.fixed import Fixed
from millpond.core.schema import Schema
from millpond.shm import mapped
from millpond.shm.free_memory import readable


@runtime_checkable
class Storage(Protocol):
    """Rows by slot. The engine never writes a slot that a sampler may return, and calls no two writes at once.

    A storage that is used in a shared buffer is pickled with the buffer's handle: it must reach the same rows from the
    process that unpickles it.
    """

    capacity: int
    schema: Schema | None

    def bind(self, schema: Schema) -> None:
        """Take memory for ``capacity`` rows. Called once, before the first write; again for the same schema:
        nothing."""

    def write(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Put ``rows`` (uint8[n, row_nbytes]) at ``slots`` (int64[n], distinct)."""

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """A copy of the rows at ``slots`` (int64[n]): uint8[n, row_nbytes]."""

    def close(self) -> None:
        """Give the memory back."""


def check_capacity(capacity: Any) -> int:
    """``capacity`` as an int. Raises ``InvalidType`` or ``InvalidArgument`` where it is none, or below 1."""
    if isinstance(capacity, bool) or not isinstance(capacity, (int, np.integer)):
        raise InvalidType(f"capacity is a number of items, not {capacity!r}")
    if capacity < 1:
        raise InvalidArgument(f"capacity must be at least 1 item, got {capacity}")
    return int(capacity)


class TensorStorage(Fixed):
    """Rows in this process's memory, or on ``device``. The memory is taken when the schema binds, at the first write.

    Raises ``OutOfMemory``, naming the bytes needed and those free, before anything is allocated.
    """

    FIXED = ("capacity", "device")

    def __init__(self, capacity: int, *, device: torch.device | str = "cpu") -> None:
        self.capacity = check_capacity(capacity)
        self.device = torch.device(device)
        self.schema: Schema | None = None
        self.rows: torch.Tensor | None = None
        self._words: torch.Tensor | None = None
        self._memory: Any = None

    def bind(self, schema: Schema) -> None:
        if self.schema is not None:
            return
        nbytes = self.capacity * schema.row_nbytes
        if self.device.type == "cpu":
            self._memory = mapped.anonymous(nbytes)
            rows = torch.frombuffer(self._memory, dtype=torch.uint8)
        else:
            free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else nbytes
            if nbytes > free:
                raise OutOfMemory(
                    f"{self.capacity} rows need {readable(nbytes)} on {self.device}, {readable(free)} are free"
                )
            rows = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        self._use(schema, rows)

    def _use(self, schema: Schema, rows: torch.Tensor) -> None:
        self.schema = schema
        self.rows = rows.view(self.capacity, schema.row_nbytes)
        self._words = self.rows.view(torch.int64)

    def write(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        assert self.rows is not None
        self.rows.index_copy_(0, slots.to(self.device), rows.to(self.device))

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        assert self._words is not None
        return self._words.index_select(0, slots.to(self.device)).view(torch.uint8)

    def forget(self, first: int, last: int) -> None:
        """The rows of slots ``first`` to ``last - 1`` are needed no more: give back the memory of their own that they
        have."""
        if self._memory is None or self.schema is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        width, page = self.schema.row_nbytes, mmap.PAGESIZE
        begin, end = -(-first * width // page) * page, last * width // page * page
        if begin < end:
            self._memory.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def close(self) -> None:
        self.rows = self._words = self._memory = None
        self.schema = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.capacity}, device={str(self.device)!r})"


class MappedStorage(TensorStorage):
    """Rows in a file, so that any process on the host can map them: in shared memory, or on disk.

    ``path`` is a directory of the buffer's; without one the buffer makes it in shared memory and removes it when it
    closes. On disk the buffer may be larger than memory, and it survives its process.

    Raises ``OutOfDisk`` or ``OutOfMemory``, naming both numbers, before anything is allocated.
    """

    def __init__(self, capacity: int, path: str | os.PathLike[str] | None = None) -> None:
        super().__init__(capacity)
        self.path: Path | None = None if path is None else Path(path).absolute()

    def bind(self, schema: Schema) -> None:
        """Make the file. One that is there already is of somebody who was killed before the schema was bound."""
        if self.schema is not None:
            return
        file, nbytes = self._file(), self.capacity * schema.row_nbytes
        making = file.with_name(f"rows.making.{os.getpid()}")
        making.unlink(missing_ok=True)
        mapped.allocate(making, nbytes).close()
        os.rename(making, file)  # whoever finds the name finds the whole file
        self.map(schema)

    def map(self, schema: Schema) -> None:
        """Use the file that another process made. Raises ``NotShareable`` where it is not there, or is another."""
        if self.schema is None:
            memory: mmap.mmap = mapped.map_file(self._file(), self.capacity * schema.row_nbytes)
            self._use(schema, torch.frombuffer(memory, dtype=torch.uint8))

    def _file(self) -> Path:
        if self.path is None:
            raise InvalidArgument("a MappedStorage without a path gets one from the buffer that uses it")
        return self.path / "rows"

    def __getstate__(self) -> dict[str, Any]:
        return {"capacity": self.capacity, "path": self.path, "schema": self.schema}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["capacity"], state["path"])  # type: ignore[misc]
        if state["schema"] is not None:
            self.map(state["schema"])

    def __repr__(self) -> str:
        return f"MappedStorage({self.capacity}, {None if self.path is None else str(self.path)!r})"


class SeenStorage(TensorStorage):
    """The rows of a `MappedStorage` as an observer sees them: it can read, and change nothing. ``path`` is the
    buffer's directory."""

    def __init__(self, capacity: int, path: Path) -> None:
        super().__init__(capacity)
        self._path = path

    def bind(self, schema: Schema) -> None:
        """Raises ``NotShareable`` where the rows are not there, or are others."""
        memory: mmap.mmap = mapped.look_at(self._path / "rows", self.capacity * schema.row_nbytes)
        self._use(schema, torch.frombuffer(memory, dtype=torch.uint8))


LazyTensorStorage = TensorStorage
LazyMemmapStorage = MappedStorage
