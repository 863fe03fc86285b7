"""A sampler and a storage as users would write them: only the Protocols, nothing of millpond's own classes."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from millpond.core.schema import Schema
from millpond.replay.samplers.protocol import Draw, Items, Randomness
from millpond.replay.state import USER


class NewestFirst:
    """The n youngest items, youngest first. Counts its draws in a word, and in memory, that all processes share."""

    replacement = False

    def memory(self, capacity: int) -> dict[str, int]:
        return {"draws": 8}

    def bind(self, arrays: Any) -> None:
        self._draws = arrays("draws").cast("Q")

    @property
    def draws(self) -> int:
        return int(self._draws[0])

    def ready(self, items: Items, n: int) -> str | None:
        return None

    def draw(self, items: Items, n: int, random: Randomness) -> Draw | None:
        slots, numbers = items.since(0)
        age = torch.arange(n, dtype=torch.float32)
        draws = items.state[USER] + 1

        def apply(state: list[int]) -> bool:
            if state[USER] + 1 != draws:
                return False
            self._draws[0] = state[USER] = draws
            return True

        return Draw(slots[::-1][:n].copy(), numbers[::-1][:n].copy(), {("age",): age}, apply=apply)

    def __getstate__(self) -> dict[str, Any]:
        return {}  # the memory comes back when it is bound


class CompressedStorage:
    """Rows packed by zlib, each into its place in a file: the length, then the bytes."""

    def __init__(self, capacity: int, file: str) -> None:
        self.capacity = capacity
        self.schema: Schema | None = None
        self._file = file
        self._places: Any = None

    def bind(self, schema: Schema) -> None:
        if self.schema is not None:
            return
        width = 4 + schema.row_nbytes + schema.row_nbytes // 1000 + 64  # zlib's worst case is below that
        if not Path(self._file).exists():
            making = f"{self._file}.{os.getpid()}"
            np.zeros((self.capacity, width), np.uint8).tofile(making)
            os.rename(making, self._file)
        self._places = np.memmap(self._file, np.uint8, "r+", shape=(self.capacity, width))
        self.schema = schema

    def write(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        for slot, row in zip(slots.tolist(), rows.view(torch.uint8).numpy(), strict=True):
            packed = zlib.compress(row.tobytes(), 1)
            self._places[slot, :4].view(np.uint32)[0] = len(packed)
            self._places[slot, 4 : 4 + len(packed)] = np.frombuffer(packed, np.uint8)

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        assert self.schema is not None
        rows = torch.empty(len(slots), self.schema.row_nbytes, dtype=torch.uint8)
        for row, slot in zip(rows.numpy(), slots.tolist(), strict=True):
            length = int(self._places[slot, :4].view(np.uint32)[0])
            row[:] = np.frombuffer(zlib.decompress(self._places[slot, 4 : 4 + length].tobytes()), np.uint8)
        return rows

    def close(self) -> None:
        self._places = self.schema = None

    def __getstate__(self) -> dict[str, Any]:
        return {"capacity": self.capacity, "_file": self._file, "schema": None, "_places": None}
