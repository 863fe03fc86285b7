"""Records in mapped memory that say what they are: magic, version and ABI come first, and are checked on attaching."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any, ClassVar

from millpond.core.errors import InvalidArgument, NotShareable
from millpond.shm.identity import abi

VERSION = 1


class PrivateMemory(mmap.mmap):
    """Anonymous memory of one process: a forked child gets a copy of its own, and no file is behind it."""


class SharedRecord:
    """``SIZE`` bytes at ``memory[offset:]``, 64-byte aligned, that start with magic, version and ABI (32 bits each).

    Raises:
        NotShareable: the bytes hold no such record, or one of another version, machine, boot or container.
    """

    SIZE: ClassVar[int] = 64
    MAGIC: ClassVar[int] = 0

    def __init__(self, memory: Any, offset: int = 0, *, create: bool = False) -> None:
        try:
            self._bytes = (ctypes.c_char * self.SIZE).from_buffer(memory, offset)  # also keeps the mapping open
        except ValueError as problem:
            raise NotShareable(f"{type(self).__name__} at {offset}: the memory is too small; truncated?") from problem
        self.address = ctypes.addressof(self._bytes)
        if self.address % 64:
            raise InvalidArgument(f"{type(self).__name__}: offset {offset} is not 64-byte aligned")
        self._words = memoryview(self._bytes).cast("B").cast("I")  # each access is one aligned 32-bit move
        if create:
            ctypes.memset(self.address, 0, self.SIZE)
            self._create()
            self._words[1], self._words[2] = VERSION, abi()
            self._words[0] = self.MAGIC  # last: whoever finds it finds the rest
        found, expected = tuple(self._words[:3]), (self.MAGIC, VERSION, abi())
        if found != expected:
            raise NotShareable(
                f"{type(self).__name__} at {offset}: (magic, version, ABI) {found}, expected {expected}: "
                "other data, another version, or made before a reboot or in another container"
            )

    def _create(self) -> None:
        """Fill in what comes after the first three words; the bytes are zero."""


def magic_at(memory: Any, offset: int) -> int:
    """The first 32 bits of the record at ``offset``; 0 where the memory ends before."""
    view = memoryview(memory)
    try:
        return int.from_bytes(view[offset : offset + 4], "little")
    finally:
        view.release()
