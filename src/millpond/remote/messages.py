"""What clients and owners say to each other: a few named values, and tensors as one run of bytes. Nothing is pickled.

A message travels as a *head* and a *payload*. The head is small::

    "MPRM"  version (u32)  number (u64)  settled (u64)  bytes of the payload (u64)  then JSON: kind, fields, tensors

The payload is the tensors' bytes, one behind the other, each at a multiple of 64 bytes. One tensor alone is sent as
it lies in memory; several are copied together first.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from millpond.core.errors import InvalidArgument

_HEAD = struct.Struct("<4sIQQQ")
_MAGIC, _VERSION = b"MPRM", 1
_ALIGNED = 64


@dataclass(frozen=True, slots=True)
class Message:
    """A request, or an answer to the request of the same number.

    ``kind`` says what is asked, or how it went: "done", "parked", "withdrawn" or "error". ``settled`` stands in
    requests: the client will never again ask about a request with a smaller number.
    """

    kind: str
    number: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    settled: int = 0


def encode(message: Message) -> tuple[bytes, torch.Tensor | None]:
    """The head, and the payload: uint8 ``[n]``, or None where there is none."""
    flat = [_flat(tensor) for tensor in message.tensors.values()]
    payload = _joined(flat)
    text = json.dumps(
        {
            "kind": message.kind,
            "fields": message.fields,
            "tensors": [[name, _spell(tensor.dtype), list(tensor.shape)] for name, tensor in message.tensors.items()],
        }
    ).encode()
    nbytes = 0 if payload is None else payload.numel()
    return _HEAD.pack(_MAGIC, _VERSION, message.number, message.settled, nbytes) + text, payload


def payload_nbytes(head: bytes) -> int:
    """How much follows a head.

    Raises ``InvalidArgument`` where this is none, or that of another version of millpond.
    """
    return _read_head(head)[2]


def number_of(head: bytes) -> int:
    """Of the request, or of the one that is answered. Raises ``InvalidArgument`` as `payload_nbytes` does."""
    return _read_head(head)[0]


def decode(head: bytes, payload: torch.Tensor | None) -> Message:
    """The message. Its tensors are views of the payload. Raises ``InvalidArgument`` as `payload_nbytes` does."""
    number, settled, nbytes = _read_head(head)
    try:
        said = json.loads(head[_HEAD.size :])
        tensors, at = {}, 0
        for name, dtype, shape in said["tensors"]:
            tensors[name], at = _view(payload, at, getattr(torch, dtype), shape)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as problem:
        raise InvalidArgument(f"a message of {nbytes} bytes cannot be read: {problem!r}") from problem
    return Message(said["kind"], number, said["fields"], tensors, settled)


def _read_head(head: bytes) -> tuple[int, int, int]:
    if len(head) < _HEAD.size:
        raise InvalidArgument(f"{len(head)} bytes are no head of a message")
    magic, version, number, settled, nbytes = _HEAD.unpack_from(head)
    if (magic, version) != (_MAGIC, _VERSION):
        raise InvalidArgument(f"a message of format {magic!r} {version}; this millpond speaks {_MAGIC!r} {_VERSION}")
    return number, settled, nbytes


def _spell(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor; a copy only where it is not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _joined(flat: list[torch.Tensor]) -> torch.Tensor | None:
    filled = [part for part in flat if part.numel()]
    if not filled:
        return None
    if len(filled) == 1:
        return filled[0]
    ends = [-(-part.numel() // _ALIGNED) * _ALIGNED for part in filled[:-1]]
    joined = torch.empty(sum(ends) + filled[-1].numel(), dtype=torch.uint8, device=filled[0].device)
    at = 0
    for part, end in zip(filled, [*ends, 0], strict=True):
        joined[at : at + part.numel()] = part
        at += end
    return joined


def _view(
    payload: torch.Tensor | None, at: int, dtype: torch.dtype, shape: list[int]
) -> tuple[torch.Tensor, int]:
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes == 0 or payload is None:
        return torch.empty(shape, dtype=dtype), at
    part = payload[at : at + nbytes]
    return part.view(dtype).view(shape), at + -(-nbytes // _ALIGNED) * _ALIGNED
