"""Checkpoints on the wire: the tree of a state first, then its tensors in pieces, so that no message grows with the buffer."""

from __future__ import annotations

from typing import Any

import torch

from millpond.core.errors import CheckpointError

PIECE = 16 << 20  # bytes


class Outgoing:
    """A state that is being sent. ``sections`` are [type, shape] of each tensor that the ``tree`` refers to."""

    def __init__(self, state: dict[str, Any]) -> None:
        tensors: list[torch.Tensor] = []
        self.tree = _lift(state, tensors)
        self.sections = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
        self._bytes = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]

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
        state: dict[str, Any] = _lower(self._tree, self._tensors)
        return state


def pieces(sizes: list[int]) -> list[tuple[int, int]]:
    return [(section, at) for section, nbytes in enumerate(sizes) for at in range(0, nbytes, PIECE)]


def _lift(node: Any, tensors: list[torch.Tensor]) -> Any:
    """The state with the numbers of its tensors in their place: something that JSON can say."""
    if isinstance(node, torch.Tensor):
        tensors.append(node.detach().cpu())
        return {"tensor": len(tensors) - 1}
    if isinstance(node, dict):
        return {"dict": {key: _lift(value, tensors) for key, value in node.items()}}
    if isinstance(node, list | tuple):
        return {"list": [_lift(value, tensors) for value in node]}
    if node is None or isinstance(node, str | int | float | bool):
        return {"value": node}
    raise CheckpointError(f"a {type(node).__name__} in the state of a replay buffer")


def _lower(node: Any, tensors: list[torch.Tensor]) -> Any:
    if "tensor" in node:
        return tensors[node["tensor"]]
    if "dict" in node:
        return {key: _lower(value, tensors) for key, value in node["dict"].items()}
    if "list" in node:
        return [_lower(value, tensors) for value in node["list"]]
    return node["value"]
