"""Checkpoints on the wire: the bytes of the file that they are, in pieces that do not grow with the buffer.

At both ends they pass through a file, so that neither has a copy of the rows in memory.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

import torch

from millpond.core.errors import InvalidArgument

PIECE = 16 << 20  # bytes


class Spool:
    """A checkpoint on its way, in a file without a name in the directory for temporary files (``TMPDIR``).

    ``expected``: bytes that will be `put` into it.
    """

    def __init__(self, expected: int = 0) -> None:
        self.file = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115  # closed with this object
        weakref.finalize(self, self.file.close)
        self._expected = expected

    @property
    def nbytes(self) -> int:
        return os.fstat(self.file.fileno()).st_size

    def put(self, at: Any, piece: torch.Tensor) -> None:
        """A piece has come. Raises ``InvalidArgument`` where it is none of this file."""
        put(self.file, at, piece, self._expected)

    def piece(self, at: Any) -> torch.Tensor:
        """The bytes from ``at`` on."""
        if type(at) is not int or not 0 <= at < self.nbytes:
            raise InvalidArgument(f"a file of {self.nbytes} bytes has no piece at {at!r:.40}")
        return piece(self.file, at)


def put(file: BinaryIO, at: Any, piece: torch.Tensor, nbytes: int) -> None:
    """Write a piece into a file that will have ``nbytes``. Raises ``InvalidArgument`` where it does not fit in."""
    if type(at) is not int or piece.dtype is not torch.uint8 or not 0 <= at <= nbytes - piece.numel():
        raise InvalidArgument(f"{piece.numel()} {piece.dtype} at {at!r:.40} do not fit into {nbytes} bytes")
    view, done = piece.contiguous().reshape(-1).numpy().data, 0
    while done < len(view):
        done += os.pwrite(file.fileno(), view[done:], at + done)


def piece(file: BinaryIO, at: int) -> torch.Tensor:
    """Up to 16 MiB of a file from ``at`` on."""
    return torch.frombuffer(bytearray(os.pread(file.fileno(), PIECE, at)), dtype=torch.uint8)


def places(nbytes: int) -> Iterator[int]:
    """Where each piece of so many bytes begins."""
    return iter(range(0, nbytes, PIECE))
