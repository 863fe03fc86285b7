"""One version of the weights as plain bytes, for those who cannot map the board: workers on other hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from millpond.weights.layout import Layout, Source


class Weights(Protocol):
    """Where a worker gets the weights to act with."""

    def pull(self, module_or_tensors: nn.Module, /) -> int:
        """Copy the version in force into a module, and return its number."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One whole version. ``block`` is one array, so Ray and pickle (protocol 5) carry it without a copy."""

    version: int
    layout: str
    block: npt.NDArray[np.uint8]

    def pull(self, module_or_tensors: Source) -> int:
        """Copy these weights into a module, or into tensors, and return their version.

        Raises:
            SchemaMismatch: a tensor is missing, or has another shape or type; nothing changed.
        """
        layout = Layout.from_json(self.layout)
        tensors = layout.match(module_or_tensors)
        block = self.block if self.block.flags.writeable else self.block.copy()  # torch warns of what it must not write
        with torch.no_grad():
            torch._foreach_copy_(tensors, layout.views(block, 0))
        return self.version
