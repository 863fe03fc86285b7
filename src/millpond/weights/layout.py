"""Where each tensor of a module lies in one flat block of bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from millpond.core.errors import InvalidArgument, InvalidType, SchemaMismatch

Source = nn.Module | Mapping[str, Tensor] | Iterable[Tensor] | Tensor
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor: its type, its shape, and its first byte in the block."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def describe(self) -> str:
        """For messages: ``float32[256, 3]``."""
        return f"{_dtype_name(self.dtype)}{list(self.shape)}"


def named_tensors(source: Source) -> dict[str, Tensor]:
    """Parameters and buffers of a module, the entries of a mapping, or tensors numbered in their order. No copies.

    Raises:
        InvalidType: something that is none of these, by name.
    """
    if isinstance(source, nn.Module):
        found = {name: p.detach() for name, p in source.named_parameters()}
        found.update((name, b.detach()) for name, b in source.named_buffers())
        return found
    if isinstance(source, Tensor):
        return {"0": source.detach()}
    if not isinstance(source, Mapping | Iterable):
        raise InvalidType(f"expected a module or tensors, got {type(source).__name__}")
    items = source.items() if isinstance(source, Mapping) else enumerate(source)
    found = {}
    for name, tensor in items:
        if not isinstance(tensor, Tensor):
            raise InvalidType(f"{name}: expected a tensor, got {type(tensor).__name__}")
        found[str(name)] = tensor.detach()
    return found


class Layout:
    """Names, types, shapes and offsets of the tensors of one module. Two modules of one architecture share a layout."""

    def __init__(self, places: Iterable[Place]) -> None:
        self.places = tuple(places)
        ends = [p.offset + p.size * p.dtype.itemsize for p in self.places]
        self.nbytes = max(ALIGNMENT, _aligned(max(ends, default=0)))

    @classmethod
    def of(cls, source: Source) -> Layout:
        """Raises ``InvalidArgument`` where there is no tensor at all."""
        offset, places = 0, []
        for name, tensor in named_tensors(source).items():
            places.append(Place(name, tensor.dtype, tuple(tensor.shape), offset))
            offset = _aligned(offset + tensor.numel() * tensor.dtype.itemsize)
        if not places:
            raise InvalidArgument("nothing to publish: the module has neither parameters nor buffers")
        return cls(places)

    def match(self, source: Source) -> list[Tensor]:
        """The tensors of ``source`` in the order of the layout.

        Raises:
            SchemaMismatch: a tensor is missing, is too many, or has another shape or type; it is named.
        """
        found = named_tensors(source)
        for place in self.places:
            tensor = found.get(place.name)
            if tensor is None:
                raise SchemaMismatch(f"{place.name}: the board holds {place.describe()}, the module has no such tensor")
            if tensor.shape != place.shape or tensor.dtype != place.dtype:
                came = f"{_dtype_name(tensor.dtype)}{list(tensor.shape)}"
                raise SchemaMismatch(f"{place.name}: the board holds {place.describe()}, the module has {came}")
        if len(found) != len(self.places):
            extra = sorted(set(found) - {place.name for place in self.places})
            raise SchemaMismatch(f"{extra[0]}: the module has it, the board does not")
        return [found[place.name] for place in self.places]

    def views(self, memory: Any, offset: int) -> list[Tensor]:
        """The tensors of one block at ``memory[offset:]``, without a copy."""
        return [_view(place, memory, offset) for place in self.places]

    def to_json(self) -> str:
        """What ``from_json`` takes back."""
        return json.dumps([[p.name, _dtype_name(p.dtype), p.shape, p.offset] for p in self.places])

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """The layout that wrote ``text``."""
        return cls(Place(name, getattr(torch, dtype), tuple(shape), at) for name, dtype, shape, at in json.loads(text))


def _view(place: Place, memory: Any, offset: int) -> Tensor:
    if place.size == 0:
        return torch.empty(place.shape, dtype=place.dtype)
    flat = torch.frombuffer(memory, dtype=place.dtype, count=place.size, offset=offset + place.offset)
    return flat.view(place.shape)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
