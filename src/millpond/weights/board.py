"""One flat, versioned block of a module's parameters and buffers in shared memory: the learner writes, collectors read.

Two copies of the block lie in one mapped file. ``COMMIT`` counts publications; its low bit names the copy in force.
A publication marks the *other* copy as begun, fills it, and then advances ``COMMIT``: that one store is the
publication, so a publisher that is killed half-way leaves the last version in force. A reader copies out what is in
force and then looks whether that copy has been begun again since; if so it reads the newer one. So no reader holds
anything that a publisher would wait for, and what a reader returns is always one whole version.
"""

from __future__ import annotations

import os
import platform
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from millpond.core.errors import BufferClosed, Cancelled, DeadlineExceeded, InvalidArgument, InvalidType, PeerLost
from millpond.core.roles import CancelEvent
from millpond.replay.waiting import LOG_EVERY, check_timeout, log
from millpond.shm import identity
from millpond.shm.locks import make_event, make_lock
from millpond.shm.mapped import allocate, make_directory, map_file, remove_directory
from millpond.shm.ownership import lives
from millpond.weights.layout import Layout, Source
from millpond.weights.snapshot import Snapshot

_MUTEX, _EVENT, _WORDS, _BLOCKS = 0, 128, 192, 4096  # byte offsets
_COMMIT, _CLOSED, _OWNER, _STARTED, _BEGUN, _VERSION = 0, 1, 2, 3, 4, 6  # 64-bit words; the last two are pairs
_SLICE_S, _CANCEL_SLICE_S = 0.5, 0.1  # what cannot notify is looked at this often
_ORDERED_LOADS = platform.machine() in ("x86_64", "AMD64")  # elsewhere readers take the lock


class _Block:
    """The mapped file of one board: two copies of the weights, and the words that say which is in force."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.layout = Layout.from_json((path / "layout").read_text())
        memory = map_file(path / "block", _BLOCKS + 2 * self.layout.nbytes)
        self.mutex, _ = make_lock(memory, _MUTEX, create=False, path=path / "lock")
        self.event = make_event(memory, _EVENT, create=False)
        self.words = memoryview(memory)[_WORDS:_BLOCKS].cast("Q")  # each access is one aligned 64-bit move
        self.halves = [self.layout.views(memory, _BLOCKS + i * self.layout.nbytes) for i in range(2)]

    @classmethod
    def create(cls, layout: Layout) -> _Block:
        path = make_directory("weights")
        try:
            (path / "layout").write_text(layout.to_json())
            memory = allocate(path / "block", _BLOCKS + 2 * layout.nbytes)
            make_lock(memory, _MUTEX, create=True, path=path / "lock")
            make_event(memory, _EVENT, create=True)
            block = cls(path)
            block.words[_OWNER], block.words[_STARTED] = identity.me()
            return block
        except BaseException:
            remove_directory(path)
            raise

    def write(self, tensors: list[Tensor], version: int) -> None:
        """Under the lock. Letting go of the GIL there holds up other publishers and nobody else."""
        words, commit = self.words, self.words[_COMMIT] + 1
        half = commit & 1
        words[_BEGUN + half] = commit
        with torch.no_grad():
            torch._foreach_copy_(self.halves[half], tensors)
        words[_VERSION + half] = version
        words[_COMMIT] = commit
        self.event.notify_all()

    @property
    def version(self) -> int:
        words = self.words
        while True:
            commit = words[_COMMIT]
            version = words[_VERSION + (commit & 1)]
            if words[_BEGUN + (commit & 1)] == commit:
                return version

    def read(self, tensors: list[Tensor]) -> int:
        """Copy out one whole version; its number."""
        if _ORDERED_LOADS:
            return self._read_until_whole(tensors)
        try:  # where loads may be reordered the check after the copy proves nothing, so publishers are kept out
            self.mutex.lock()
            return self._read_until_whole(tensors)
        finally:
            self.mutex.unlock()

    def _read_until_whole(self, tensors: list[Tensor]) -> int:
        words = self.words
        while True:  # again only if two publications fell into the time of one copy
            commit = words[_COMMIT]
            half = commit & 1
            version = words[_VERSION + half]
            with torch.no_grad():
                torch._foreach_copy_(tensors, self.halves[half])
            if words[_BEGUN + half] == commit:
                return version


class WeightBoard:
    """Publishes a module's weights to any number of processes, as numbered versions.

    The weights given at construction are published at once, as ``version`` (0 unless a run is resumed), so there is
    always something to pull. Types are kept; each way costs one copy. Pickling a board pickles its path, and
    unpickling attaches to it, in processes started in any way. The process that made it removes it: by ``close()``,
    when the object is collected, or at its end.

    Raises:
        InvalidArgument: the module has no tensors, or ``version`` is negative.
        OutOfMemory: the shared memory that two copies of the weights need is not there.
    """

    _remover: weakref.finalize[Any, Any] | None = None  # only where the board was made

    def __init__(self, module_or_tensors: Source, *, version: int = 0) -> None:
        first = _checked_version(version)
        self._attach(_Block.create(Layout.of(module_or_tensors)))
        self._remover = weakref.finalize(self, _remove, self._path, os.getpid())
        block = self._attached()
        block.write(block.layout.match(module_or_tensors), first)

    def _attach(self, block: _Block) -> None:
        self._path = block.path
        self._block: _Block | None = block
        self._held: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()

    def _attached(self) -> _Block:
        block = self._block
        if block is None:
            raise BufferClosed(f"this weight board ({self._path.name}) was closed")
        return block

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (os.fspath(self._attached().path),)

    def publish(self, module_or_tensors: Source, version: int | None = None) -> int:
        """Make these weights the ones in force, under ``version`` (default: the last plus one). Returns the version.

        Waits for no reader. Publishers of several processes or threads take turns.

        Raises:
            InvalidArgument: ``version`` does not exceed the last one.
            SchemaMismatch: a tensor is missing, or has another shape or type than on the board; nothing changed.
            BufferClosed: the board was closed.
        """
        block = self._attached()
        tensors = block.layout.match(module_or_tensors)
        wanted = None if version is None else _checked_version(version)
        if block.words[_CLOSED]:
            raise BufferClosed(f"the owner closed weight board {self._path.name}; nothing can be published on it")
        try:
            block.mutex.lock()
            last = block.version
            number = last + 1 if wanted is None else wanted
            if number <= last:
                raise InvalidArgument(f"version {number} cannot be published: version {last} was; versions must rise")
            block.write(tensors, number)
        finally:
            block.mutex.unlock()
        return number

    @property
    def version(self) -> int:
        """The version in force."""
        return self._attached().version

    def pull(self, module_or_tensors: Source, *, force: bool = False) -> int:
        """Copy the version in force into a module, or into tensors, and return its number.

        A module that holds this version already, from an earlier pull, is left alone unless ``force`` is set; tensors
        are always written. Whatever is raised, a module half written is written again by the next pull.

        Raises:
            SchemaMismatch: a tensor is missing, or has another shape or type than on the board; nothing changed.
            BufferClosed: this object was closed. (One that is attached pulls on after the owner closed the board.)
        """
        block = self._attached()
        module = module_or_tensors if isinstance(module_or_tensors, nn.Module) else None
        if module is not None and not force and self._held.get(module) == (held := block.version):
            return held
        tensors = block.layout.match(module_or_tensors)
        if module is not None:
            self._held.pop(module, None)
        version = block.read(tensors)
        if module is not None:
            self._held[module] = version
        return version

    def snapshot(self) -> Snapshot:
        """The version in force, as bytes that can go to other hosts.

        Raises:
            BufferClosed: this object was closed.
        """
        block = self._attached()
        copy = np.zeros(block.layout.nbytes, np.uint8)
        return Snapshot(block.read(block.layout.views(copy, 0)), block.layout.to_json(), copy)

    def wait_for(self, version: int, *, timeout: float | None = None, cancel_event: CancelEvent | None = None) -> int:
        """Wait until ``version`` or a later one is in force, and return the one that is. Every 30 s it is logged.

        Raises:
            DeadlineExceeded: not within ``timeout`` seconds.
            Cancelled: ``cancel_event`` was set.
            BufferClosed: the board was closed first.
            PeerLost: the process that made the board died first.
        """
        block = self._attached()
        began = logged = time.monotonic()
        deadline = began + check_timeout(timeout)
        while True:
            ticket = block.event.prepare()  # every publication notifies, so the ticket needs no lock
            if (now := block.version) >= version:
                return now
            _raise_if_pointless(block, f"waiting for version {version} of the weights; {now} is in force", cancel_event)
            time_now = time.monotonic()
            left = deadline - time_now
            if left <= 0:
                raise DeadlineExceeded(f"waited {timeout} s for version {version} of the weights; {now} is in force")
            if time_now - logged >= LOG_EVERY:
                logged = time_now
                text = "still waits, %.0f s by now, for version %d of the weights; %d is in force (%s, of process %d)"
                log.warning(text, time_now - began, version, now, self._path.name, block.words[_OWNER])
            block.event.wait(ticket, min(left, _SLICE_S if cancel_event is None else _CANCEL_SLICE_S))

    def close(self) -> None:
        """Detach; in the process that made the board also end every wait and remove it. Closing twice is fine.

        Who is attached elsewhere can go on pulling the last version.
        """
        block, self._block = self._block, None
        if block is not None and self._remover is not None and os.getpid() == block.words[_OWNER]:
            block.words[_CLOSED] = 1
            block.event.notify_all()
            self._remover()

    def __enter__(self) -> WeightBoard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._block is None:
            return f"WeightBoard({self._path.name}, closed)"
        layout = self._block.layout
        return f"WeightBoard({len(layout.places)} tensors, {layout.nbytes} bytes, version {self._block.version})"


def _attach(path: str) -> WeightBoard:
    board = WeightBoard.__new__(WeightBoard)
    board._attach(_Block(Path(path)))
    return board


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child, which inherits the finalizer
        remove_directory(path)


def _raise_if_pointless(block: _Block, waiting: str, cancel_event: CancelEvent | None) -> None:
    if cancel_event is not None and cancel_event.is_set():
        raise Cancelled(f"cancelled while {waiting}")
    if block.words[_CLOSED]:
        raise BufferClosed(f"the board was closed while {waiting}")
    owner = block.words[_OWNER]
    if owner != os.getpid() and lives(block.path) is not True:
        raise PeerLost(f"process {owner}, which made the board, died while {waiting}")


def _checked_version(version: int) -> int:
    if isinstance(version, bool) or not isinstance(version, int):
        raise InvalidType(f"a version is an int, not {type(version).__name__}")
    if version < 0:
        raise InvalidArgument(f"a version is not negative: {version}")
    return version
