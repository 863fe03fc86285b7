"""What clients and owners say to each other: a few named values, and tensors as they lie in memory. Nothing is pickled.

A message travels as a *head* and, where it is large, a *payload*. The head holds what is small::

    "MPRM"  version (u32)  number (u64)  settled (u64)  bytes of the payload (u64)  bytes of the JSON (u32)
    JSON: kind, fields, tensors      then, from the next multiple of 64 on, the bytes of the small tensors

The payload is one large tensor, sent from where it lies. Only where there are several, they are copied together first.
Each tensor begins at a multiple of 64 bytes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from millpond.core.errors import InvalidArgument

_HEAD = struct.Struct("<4sIQQQI")
_MAGIC, _VERSION = b"MPRM", 1
_ALIGNED = 64
SMALL = 1 << 16  # bytes: a head and what is in it cost one trip, a payload more

Head = bytes | bytearray


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
    """The head, and the payload: uint8 ``[n]``, or None where everything fits into the head."""
    payload = payload_of(message)
    return head_of(message, payload), payload


def payload_of(message: Message) -> torch.Tensor | None:
    """The payload alone, so that it may be underway while the head is made."""
    large = [_flat(tensor) for tensor in message.tensors.values() if not _inside(tensor)]
    return None if not large else large[0] if len(large) == 1 else _joined(large)


def head_of(message: Message, payload: torch.Tensor | None, *, direct: bool = False) -> bytes:
    """The head to this payload; ``direct`` notes that it comes from a GPU, see `is_direct`."""
    listed = [
        [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), _inside(tensor)]
        for name, tensor in message.tensors.items()
    ]
    said: dict[str, Any] = {"kind": message.kind, "fields": message.fields, "tensors": listed}
    if direct:
        said["direct"] = True
    text = json.dumps(said).encode()
    nbytes = 0 if payload is None else payload.numel()
    parts: list[Any] = [_HEAD.pack(_MAGIC, _VERSION, message.number, message.settled, nbytes, len(text)), text]
    at = _HEAD.size + len(text)
    for tensor in message.tensors.values():
        if _inside(tensor):
            flat, start = _flat(tensor), _aligned(at)
            parts += [bytes(start - at), flat.cpu().numpy()]
            at = start + flat.numel()
    return b"".join(parts)


def _inside(tensor: torch.Tensor) -> bool:
    """Does it travel in the head?"""
    return tensor.numel() * tensor.itemsize <= SMALL


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype is torch.uint8 and tensor.is_contiguous():  # rows, mostly
        return tensor.view(-1)
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8) if len(flat) else torch.empty(0, dtype=torch.uint8)  # whatever its stride


def payload_nbytes(head: Head) -> int:
    """How much follows a head.

    Raises ``InvalidArgument`` where this is none, or that of another version of millpond.
    """
    return _read_head(head)[2]


def is_direct(head: Head) -> bool:
    """Does the payload come from a GPU, past main memory? Raises ``InvalidArgument`` as `payload_nbytes` does."""
    length = _read_head(head)[3]
    return "direct" in json.loads(head[_HEAD.size : _HEAD.size + length])


def number_of(head: Head) -> int:
    """Of the request, or of the one that is answered. Raises ``InvalidArgument`` as `payload_nbytes` does."""
    return _read_head(head)[0]


def decode(head: Head, payload: torch.Tensor | Callable[[], torch.Tensor] | None) -> Message:
    """The message. Its tensors are views of the head, which is copied if it is read-only, and of the payload.

    A payload that is still on its way may be given as a function that waits for it: the head is read meanwhile.

    Raises ``InvalidArgument`` as `payload_nbytes` does.
    """
    number, settled, nbytes, length = _read_head(head)
    begin = _HEAD.size
    try:
        said = json.loads(head[begin : begin + length])
        tensors, within, behind = {}, _aligned(begin + length), 0
        own: bytearray | None = None
        for name, dtype, shape, inside in said["tensors"]:
            kind: torch.dtype = getattr(torch, dtype)
            size = math.prod(shape) * kind.itemsize
            if size == 0:
                tensors[name] = torch.empty(shape, dtype=kind)
            elif inside:
                if own is None:
                    own = head if isinstance(head, bytearray) else bytearray(head)
                flat = torch.frombuffer(own, dtype=kind, count=size // kind.itemsize, offset=within)
                tensors[name] = flat if len(shape) == 1 else flat.view(shape)
                within = _aligned(within + size)
            else:
                if payload is None:
                    raise ValueError("the payload is missing")
                if not isinstance(payload, torch.Tensor):
                    payload = payload()
                tensors[name] = _view(payload, behind, size, kind, shape)
                behind = _aligned(behind + size)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as problem:
        raise InvalidArgument(f"a message of {len(head)} + {nbytes} bytes cannot be read: {problem!r}") from problem
    return Message(said["kind"], number, said["fields"], tensors, settled)


def _read_head(head: Head) -> tuple[int, int, int, int]:
    if len(head) < _HEAD.size:
        raise InvalidArgument(f"{len(head)} bytes are no head of a message")
    magic, version, number, settled, nbytes, length = _HEAD.unpack_from(head)
    if (magic, version) != (_MAGIC, _VERSION):
        raise InvalidArgument(f"a message of format {magic!r} {version}; this millpond speaks {_MAGIC!r} {_VERSION}")
    return number, settled, nbytes, length


def _aligned(at: int) -> int:
    return -(-at // _ALIGNED) * _ALIGNED


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    ends = [_aligned(part.numel()) for part in parts[:-1]]
    joined = torch.empty(sum(ends) + parts[-1].numel(), dtype=torch.uint8, device=parts[0].device)
    at = 0
    for part, end in zip(parts, [*ends, 0], strict=True):
        joined[at : at + part.numel()] = part
        at += end
    return joined


def _view(flat: torch.Tensor, at: int, size: int, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    if dtype is torch.uint8 and size == flat.numel():  # rows, mostly
        return flat.view(shape)
    return flat[at : at + size].view(dtype).view(shape)
