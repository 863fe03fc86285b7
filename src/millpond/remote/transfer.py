"""Checkpoints on the wire: the tree of a state first, then its tensors, in pieces that do not grow with the buffer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from millpond.core.errors import CheckpointError
from millpond.replay.checkpoint import lift, lower

PIECE = 16 << 20  # bytes


class Outgoing:
    """A state that is being sent. ``sections`` are [type, shape] of each tensor that the ``tree`` refers to."""

    def __init__(self, state: dict[str, Any]) -> None:
        sections: list[tuple[dict[str, Any], memoryview]] = []
        self.tree = lift(state, sections)
        self.sections = [[about["dtype"], about["shape"]] for about, _ in sections]
        self._bytes = [torch.from_numpy(np.frombuffer(view, np.uint8)) for _, view in sections]

    def pieces(self) -> list[tuple[int, int]]:
        """Section and offset of every piece."""
        return pieces([flat.numel() for flat in self._bytes])

    def piece(self, section: int, at: int) -> torch.Tensor:
        """The bytes of one."""
        return self._bytes[section][at : at + PIECE]


class Incoming:
    """A state that is being received, at first with zeros in it. Raises ``CheckpointError`` where it is none."""

    def __init__(self, tree: Any, sections: list[Any]) -> None:
        self._tree = tree
        try:
            self._tensors = [torch.zeros(shape, dtype=getattr(torch, dtype)) for dtype, shape in sections]
        except (TypeError, ValueError, AttributeError, RuntimeError) as problem:
            raise CheckpointError(f"this is no state of a replay buffer: {problem}") from problem
        self._bytes = [tensor.reshape(-1).view(torch.uint8) for tensor in self._tensors]

    def pieces(self) -> list[tuple[int, int]]:
        """Section and offset of every piece."""
        return pieces([flat.numel() for flat in self._bytes])

    def put(self, section: int, at: int, piece: torch.Tensor) -> None:
        """A piece has come."""
        self._bytes[section][at : at + piece.numel()] = piece

    def state(self) -> dict[str, Any]:
        """The whole."""
        state: dict[str, Any] = lower(self._tree, self._tensors)
        return state


def pieces(sizes: list[int]) -> list[tuple[int, int]]:
    """Section and offset of every piece of sections of these sizes."""
    return [(section, at) for section, nbytes in enumerate(sizes) for at in range(0, nbytes, PIECE)]
