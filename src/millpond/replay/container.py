"""A tree of numbers, strings and tensors in one file, written and read in pieces: its size is never needed in memory.

A file is, without pickle::

    "MILLPOND"  version (u32)  length of the header (u64)  crc32 of the header (u32)
    header      JSON: the tree, and for each of its tensors type, shape, length and crc32
    sections    the tensors' raw bytes

It is written beside its place and renamed, so a kill at any instant leaves the last good one. What a killed writer left
beside it the next one removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import secrets
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from millpond.core.errors import CheckpointError, InvalidArgument
from millpond.replay.samplers.protocol import Ints

MAGIC = b"MILLPOND"
# What reading numbers that mean nothing may raise, before anybody has said so in words.
DAMAGE = (
    AttributeError,
    IndexError,
    KeyError,
    OverflowError,
    RecursionError,
    RuntimeError,
    TypeError,
    ValueError,
)
VERSION = 1
PIECE = 4 << 20  # bytes that are in memory at a time
_HEAD = struct.Struct("<8sIQI")
_MAKING = re.compile(r"\..*\.making\.\d+(-[0-9a-f]{8})?", re.DOTALL)


class Column:
    """A tensor by its bytes, wherever they are: in memory, in a file, or still to be gathered.

    ``fetch(at, nbytes)`` gives some of them, uint8 ``[nbytes]``, 8-byte aligned; both are multiples of ``unit``, the
    bytes of one entry along the first dimension.
    """

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], fetch: Callable[[int, int], torch.Tensor]) -> None:
        self.dtype, self.shape, self.fetch = dtype, shape, fetch
        self.unit = dtype.itemsize * math.prod(shape[1:])
        self.nbytes = dtype.itemsize * math.prod(shape)

    @classmethod
    def of(cls, held: Any) -> Column:
        """The column of a tensor. Raises ``TypeError`` for what is none."""
        if isinstance(held, Column):
            return held
        if not isinstance(held, torch.Tensor):
            raise TypeError(f"a tensor is expected, not {type(held).__name__}")
        flat = held.detach().cpu().contiguous().reshape(-1)
        raw = flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
        return cls(held.dtype, tuple(held.shape), lambda at, nbytes: raw[at : at + nbytes])

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 1

    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def spans(self) -> Iterator[tuple[int, int]]:
        """The first entry of each piece, and the one behind its last."""
        step = max(1, PIECE // max(1, self.unit))
        return ((a, min(a + step, len(self))) for a in range(0, len(self), step))

    def pieces(self) -> Iterator[torch.Tensor]:
        """All bytes, in pieces of about 4 MiB."""
        return (self.fetch(a * self.unit, (b - a) * self.unit) for a, b in self.spans() if self.unit)

    def read(self, first: int, last: int) -> torch.Tensor:
        """The entries ``first`` to ``last - 1``."""
        raw = self.fetch(first * self.unit, (last - first) * self.unit)
        return raw.view(self.dtype).view(last - first, *self.shape[1:])

    def whole(self) -> torch.Tensor:
        """All of it."""
        out = torch.empty(self.nbytes, dtype=torch.uint8)
        at = 0
        for piece in self.pieces():
            out[at : at + len(piece)] = piece
            at += len(piece)
        return out.view(self.dtype).view(self.shape)

    def words(self, first: int, last: int) -> Ints:
        """Of bytes that hold 64-bit numbers: number ``first`` to ``last - 1``."""
        found: Ints = self.fetch(8 * first, 8 * (last - first)).numpy().view(np.int64)
        return found


# ---------------------------------------------------------------------- writing
def write(file: BinaryIO, tree: Any) -> None:
    """Write a tree of dictionaries, lists, tensors (or `Column`s), and what JSON knows, from the start of ``file``."""
    columns: list[Column] = []
    lifted = _lift(tree, columns)
    index = [
        {"nbytes": c.nbytes, "crc32": 0xFFFFFFFF, "dtype": str(c.dtype).removeprefix("torch."), "shape": list(c.shape)}
        for c in columns
    ]
    room = len(_header(lifted, index))  # the longest checksums: the real ones are known once the bytes are written
    file.write(_HEAD.pack(MAGIC, VERSION, room, 0))
    file.write(bytes(room))
    for column, about in zip(columns, index, strict=True):
        crc = 0
        for piece in column.pieces():
            view = piece.numpy().data
            file.write(view)
            crc = zlib.crc32(view, crc)
        about["crc32"] = crc
    header = _header(lifted, index).ljust(room)
    file.seek(0)
    file.write(_HEAD.pack(MAGIC, VERSION, room, zlib.crc32(header)))
    file.write(header)
    file.flush()


def _header(lifted: Any, index: list[dict[str, Any]]) -> bytes:
    return json.dumps({"tree": lifted, "sections": index}).encode()


def _lift(node: Any, columns: list[Column]) -> Any:
    """A tree without its tensors, which go to ``columns``."""
    if isinstance(node, (torch.Tensor, Column)):
        columns.append(Column.of(node))
        return {"tensor": len(columns) - 1}
    if isinstance(node, dict):
        return {"dict": {key: _lift(value, columns) for key, value in node.items()}}
    if isinstance(node, list):
        return {"list": [_lift(value, columns) for value in node]}
    return {"value": node}


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file that takes the place of ``path`` when the block ends, on the disk by then; not at all where it raises.
    The block writes a container into it.

    Who may read it the user's umask says. Raises ``InvalidArgument`` where there is no such directory.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise InvalidArgument(f"{path.parent} is no directory")
    clear(path.parent)
    file, making = _beside(path)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(making, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(making)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the new name too survives a power cut
    finally:
        os.close(directory)


def _beside(path: Path) -> tuple[BinaryIO, Path]:
    """A new file that its writer holds locked, so that others see that it lives."""
    while True:
        making = path.with_name(f".{path.name[:200]}.making.{os.getpid()}-{secrets.token_hex(4)}")
        file = open(making, "xb")  # noqa: SIM115  # the caller closes it
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(MAGIC)
            file.seek(0)
            if making.exists():  # else somebody took it for a dead writer's, before it was locked
                return file, making
        except BaseException:
            file.close()
            making.unlink(missing_ok=True)
            raise
        file.close()


def clear(directory: Path) -> None:
    """Remove what writers that were killed left in a directory."""
    with os.scandir(directory) as entries:
        found = [entry.path for entry in entries if _MAKING.fullmatch(entry.name)]
    for path in found:
        with contextlib.suppress(OSError):  # gone meanwhile, or somebody else's
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused where its writer lives
                if os.pread(fd, len(MAGIC), 0) in (b"", MAGIC):
                    os.unlink(path)
            finally:
                os.close(fd)


# ---------------------------------------------------------------------- reading
@contextlib.contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file, open. Raises ``CheckpointError`` where it cannot be."""
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise CheckpointError(f"{path} cannot be read: it is no file")  # a pipe would be waited for
        file = open(path, "rb")  # noqa: SIM115  # closed below; an error in the block is not one of opening
    except CheckpointError:
        raise
    except (OSError, ValueError) as problem:
        raise CheckpointError(f"{path} cannot be read: {getattr(problem, 'strerror', problem)}") from problem
    with file:
        yield file


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[Any]:
    """The tree in a file, with a `Column` for each tensor. Every byte was checked, and nothing was kept of it.

    Raises ``CheckpointError``, naming the file.
    """
    with reading(path) as file:
        try:
            found = read(file, str(path))
        except OSError as problem:
            raise CheckpointError(f"{path} cannot be read: {problem.strerror}") from problem
        yield found


def read(file: BinaryIO, name: str) -> Any:
    """The same of a file that is open, and must stay so as long as the tree is used."""
    size = os.fstat(file.fileno()).st_size
    head = os.pread(file.fileno(), _HEAD.size, 0)
    if len(head) < _HEAD.size or not head.startswith(MAGIC):
        raise CheckpointError(f"{name} is no checkpoint of a replay buffer")
    _, version, length, crc = _HEAD.unpack(head)
    if version != VERSION:
        raise CheckpointError(f"{name} is of checkpoint format {version}; this version reads {VERSION}")
    at = _HEAD.size + length
    if at > size:
        raise CheckpointError(f"{name} is damaged in its header, or cut off: {size} bytes, a header of {length}")
    header = os.pread(file.fileno(), length, _HEAD.size)
    if len(header) != length or zlib.crc32(header) != crc:
        raise CheckpointError(f"{name} is damaged in its header")
    try:
        content = json.loads(header)
        sections, sums = [], []
        for about in content["sections"]:
            sections.append(_section(file, at, about))
            sums.append(about["crc32"])
            at += sections[-1].nbytes
        if at != size:
            raise CheckpointError(f"{name} has {size} bytes, {at} are expected: cut off, or too many")
        tree = _lower(content["tree"], sections)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError) as problem:
        if isinstance(problem, CheckpointError):
            raise
        raise CheckpointError(f"{name} is no checkpoint of a replay buffer: {problem!r:.200}") from problem
    for column, expected in zip(sections, sums, strict=True):
        crc = 0
        for piece in column.pieces():
            crc = zlib.crc32(piece.numpy().data, crc)
        if crc != expected:
            raise CheckpointError(f"{name} is damaged: a section of {column.nbytes} bytes has another checksum")
    return tree


def _section(file: BinaryIO, begin: int, about: Any) -> Column:
    dtype, shape = getattr(torch, about["dtype"]), tuple(about["shape"])
    if not isinstance(dtype, torch.dtype) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"a tensor of type {about['dtype']} and shape {shape}")

    def fetch(at: int, nbytes: int) -> torch.Tensor:
        out = torch.empty(nbytes, dtype=torch.uint8)
        view, done = out.numpy().data, 0
        while done < nbytes:
            n = os.preadv(file.fileno(), [view[done:]], begin + at + done)
            if n == 0:
                raise CheckpointError("the file became shorter while it was read")
            done += n
        return out

    column = Column(dtype, shape, fetch)
    if type(about["nbytes"]) is not int or about["nbytes"] != column.nbytes:
        raise ValueError(f"{about['nbytes']} bytes for {about['dtype']}{list(shape)}")
    return column


def _lower(node: Any, sections: list[Column]) -> Any:
    """What `_lift` took apart."""
    if "tensor" in node:
        number = node["tensor"]
        if type(number) is not int or number < 0:
            raise ValueError(f"section {number!r}")
        return sections[number]
    if "dict" in node:
        return {key: _lower(value, sections) for key, value in node["dict"].items()}
    if "list" in node:
        return [_lower(value, sections) for value in node["list"]]
    return node["value"]
