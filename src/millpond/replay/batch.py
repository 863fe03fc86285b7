"""A batch on its way out: what was taken, and the memory that it is gathered into."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from millpond.core.schema import Key, Schema
from millpond.replay.samplers.protocol import Ints


class SampledBatch(NamedTuple):
    """A batch: packed rows, where they came from, and what the sampler added."""

    rows: torch.Tensor
    slots: Ints
    numbers: Ints
    extra: dict[Key, torch.Tensor]
    emptied: int
    data: Any = None  # what `sample` returns, where it was made ready before
    asked: int = 0  # of a batch drawn ahead: for how many items; the last batch of an epoch may hold fewer. 0: a rest


class BatchMemory:
    """Memory for a batch of ``n`` items: their rows as int64 ``[n, width]``, and where they came from, int64 ``[n]``.

    ``data`` may be set to what ``sample`` will return where the sampler adds nothing, made of these tensors before the
    items are known: whoever waits does that before it sleeps, as all that takes time to make takes several times as
    long after the wake-up.
    """

    __slots__ = ("data", "emptied", "extra", "generation", "index", "rows")

    def __init__(self, n: int, width: int) -> None:
        self.rows = torch.empty((n, width), dtype=torch.int64)
        self.index, self.generation = torch.empty(n, dtype=torch.int64), torch.empty(n, dtype=torch.int64)
        self.extra: dict[Key, torch.Tensor] | None = None
        self.data: Any = None
        self.emptied = 0  # how often the buffer was emptied before the batch was taken

    def addresses(self) -> tuple[int, int, int]:
        """Of ``generation``, ``index`` and ``rows``."""
        return self.generation.data_ptr(), self.index.data_ptr(), self.rows.data_ptr()

    def unpacked(self, schema: Schema) -> Any:
        """What ``sample`` returns, as views."""
        if self.data is not None and not self.extra:
            return self.data
        return schema.unpack(self.rows, self.extra, {"index": self.index, "generation": self.generation})

    def taken(self) -> SampledBatch:
        """The same as a `SampledBatch`."""
        data = None if self.extra else self.data
        return SampledBatch(
            self.rows, self.index.numpy(), self.generation.numpy(), self.extra or {}, self.emptied, data
        )
