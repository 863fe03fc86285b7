"""What clients and owners say to each other: a few named values, and tensors as they lie in memory. Nothing is pickled.

A message travels as a *head* and, where it is large, a *payload*. The head holds what is small::

    "MPRM"  version (u32)  number (u64)  settled (u64)  bytes of the payload (u64)  bytes of the JSON (u32)
    JSON: kind, fields, tensors      then, from the next multiple of 64 on, the bytes of the small tensors

The payload is one large tensor, sent from where it lies. Only where there are several, they are copied together first.
Each tensor begins at a multiple of 64 bytes.

Whoever reads one trusts nothing in it: types, shapes and sizes are looked at before any tensor is made.
"""

from __future__ import annotations

import json
import math
import struct
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from millpond.core import errors
from millpond.core.errors import InvalidArgument, MillpondError, OutOfMemory, WorkerFailed

HEAD = struct.Struct("<4sIQQQI")
_MAGIC, _VERSION = b"MPRM", 2
_ALIGNED = 64
SMALL = 1 << 16  # bytes: what is larger is sent from where it lies, not copied into the head
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32),
        *(torch.uint64, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
        *(torch.complex32, torch.complex64, torch.complex128),
    )
}
_LARGEST = 1 << 62  # bytes of one tensor: what is beyond that overflows before it is refused
_MOST_DIMS = 64  # of a tensor, as PyTorch has it

Head = bytes | bytearray


@dataclass(frozen=True, slots=True)
class Message:
    """A request, or an answer to the request of the same number.

    ``kind`` says what is asked, or how it went: "done", "pending", "withdrawn" or "error". ``settled`` stands in
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
    """The payload alone."""
    large = [_flat(tensor) for tensor in message.tensors.values() if not _inside(tensor)]
    return None if not large else large[0] if len(large) == 1 else _joined(large)


def head_of(message: Message, payload: torch.Tensor | None, *, direct: bool = False) -> bytes:
    """The head to this payload; ``direct`` notes that it does not follow, but goes from GPU to GPU: `direct_nbytes`."""
    listed = [
        [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), _inside(tensor)]
        for name, tensor in message.tensors.items()
    ]
    said: dict[str, Any] = {"kind": message.kind, "fields": message.fields, "tensors": listed}
    nbytes = 0 if payload is None else payload.numel()
    if direct:
        said["direct"], nbytes = nbytes, 0
    text = json.dumps(said).encode()
    parts: list[Any] = [HEAD.pack(_MAGIC, _VERSION, message.number, message.settled, nbytes, len(text)), text]
    at = HEAD.size + len(text)
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
    if not len(flat):
        return torch.empty(0, dtype=torch.uint8)
    if flat.stride(0) != 1:  # of one element any stride counts as contiguous
        flat = torch.empty(flat.shape, dtype=flat.dtype, device=flat.device).copy_(flat)
    return flat.view(torch.uint8)


def payload_nbytes(head: Head) -> int:
    """How much follows a head.

    Raises ``InvalidArgument`` where this is none, or that of another version of millpond.
    """
    return _read_head(head)[2]


def direct_nbytes(head: Head) -> int:
    """How much comes from a GPU, past main memory. Raises ``InvalidArgument`` as `payload_nbytes` does."""
    length = _read_head(head)[3]
    return int(json.loads(head[HEAD.size : HEAD.size + length]).get("direct", 0))


def number_of(head: Head) -> int:
    """Of the request, or of the one that is answered. Raises ``InvalidArgument`` as `payload_nbytes` does."""
    return _read_head(head)[0]


def decode(head: Head, payload: torch.Tensor | Callable[[], torch.Tensor] | None) -> Message:
    """The message. Its tensors are views of the head, which is copied if it is read-only, and of the payload.

    A payload that is still on its way may be given as a function that waits for it.

    Raises ``InvalidArgument`` as `payload_nbytes` does, and for whatever is no message in any other way.
    """
    number, settled, nbytes, length = _read_head(head)
    begin = HEAD.size
    try:
        said = json.loads(head[begin : begin + length], parse_constant=_no_number)
        kind, fields, listed = said["kind"], said["fields"], said["tensors"]
        if not (isinstance(kind, str) and isinstance(fields, dict) and isinstance(listed, list)):
            raise ValueError("kind, fields and tensors are a text, a table and a list")
        tensors, within, behind = {}, _aligned(begin + length), 0
        own: bytearray | None = None
        for name, dtype, shape, inside in listed:
            size = _size_of(name, dtype, shape)
            if size == 0:
                tensors[name] = torch.empty(shape, dtype=_DTYPES[dtype])
            elif inside:
                if own is None:
                    own = head if isinstance(head, bytearray) else bytearray(head)
                tensors[name] = _within(own, within, size, _DTYPES[dtype], shape)
                within = _aligned(within + size)
            else:
                if payload is None:
                    raise ValueError("the payload is missing")
                if not isinstance(payload, torch.Tensor):
                    payload = payload()
                tensors[name] = _view(payload, behind, size, _DTYPES[dtype], shape)
                behind = _aligned(behind + size)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, IndexError) as problem:
        words = f"{type(problem).__name__}: {problem}"[:300]
        raise InvalidArgument(f"a message of {len(head)} + {nbytes} bytes cannot be read: {words}") from problem
    return Message(kind, number, fields, tensors, settled)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} stands for no number in JSON")


def _size_of(name: Any, dtype: Any, shape: Any) -> int:
    """Bytes of a tensor that a head lists. Raises ``ValueError`` or ``KeyError`` where it could be none."""
    if not isinstance(name, str) or not isinstance(shape, list) or len(shape) > _MOST_DIMS:
        raise ValueError(f"{name!r} of shape {shape!r} is no tensor")
    for length in shape:
        if type(length) is not int or not 0 <= length < _LARGEST:
            raise ValueError(f"{name!r} of shape {shape!r} is no tensor")
    size = math.prod(shape) * _DTYPES[dtype].itemsize
    if size >= _LARGEST or (size == 0 and math.prod(max(length, 1) for length in shape) >= _LARGEST):
        raise ValueError(f"{name!r} of shape {shape!r} fits no memory")
    return size


def _within(own: bytearray, at: int, size: int, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    if at + size > len(own):
        raise ValueError(f"{at + size} bytes are spoken of, {len(own)} are there")
    if dtype is torch.bool:
        _check_bools(torch.frombuffer(own, dtype=torch.uint8, count=size, offset=at))
    flat = torch.frombuffer(own, dtype=dtype, count=size // dtype.itemsize, offset=at)
    return flat if len(shape) == 1 else flat.view(shape)


def _read_head(head: Head) -> tuple[int, int, int, int]:
    if len(head) < HEAD.size:
        raise InvalidArgument(f"{len(head)} bytes are no head of a message")
    magic, version, number, settled, nbytes, length = HEAD.unpack_from(head)
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
    if at + size > flat.numel():
        raise ValueError(f"{at + size} bytes are spoken of, {flat.numel()} came")
    part = flat[at : at + size]
    if dtype is torch.bool:
        _check_bools(part)
    return part.view(dtype).view(shape)


def _check_bools(flat: torch.Tensor) -> None:
    if int(flat.max()) > 1:
        raise ValueError("a bool is 0 or 1")


_PLAIN: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (IndexError, KeyError, TypeError, ValueError, RuntimeError, OSError)
}


def failed(number: int, error: Exception) -> Message:
    """The answer to a request that raised. What nobody expected carries the owner's traceback."""
    if isinstance(error, MemoryError) and not isinstance(error, MillpondError):
        error = OutOfMemory(f"the owner's memory does not suffice: {error}")
    fields = {"error": type(error).__name__, "text": str(error)}
    if not isinstance(error, MillpondError | IndexError):
        fields["traceback"] = "".join(traceback.format_exception(error))
    return Message("error", number, fields)


def raised(answer: Message) -> Exception:
    """The error in such an answer, to be raised here. One that is unknown here is a ``WorkerFailed``."""
    name, text = str(answer.fields["error"]), str(answer.fields["text"])
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, MillpondError):
        return kind(text)
    trace = answer.fields.get("traceback", "")
    plain = _PLAIN.get(name)
    if plain is not None:
        error = plain(text)
        if trace:
            error.add_note(f"raised in the process that owns the buffer:\n{trace}")
        return error
    return WorkerFailed(f"the owner of the buffer raised {name}: {text}\n{trace}")
