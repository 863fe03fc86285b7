"""The memory of one buffer: its control block, the arrays of its slots and sampler, and, if shared, their directory.

A shared buffer is a directory of files that any process on the host can map::

    owner         who made it, or took it over (pid, start time, boot)
    rules.json    capacity, sampler, flow: what `attach` needs to behave the same
    control       the control block: lock, counters, waiters
    arrays        slots, priorities, epochs, receipts
    rows          the packed rows, from the first write on
    schema.json   what they hold
    users         held locked by everybody who uses the buffer
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from millpond.core.errors import InvalidArgument, NotShareable, PeerLost
from millpond.core.schema import Schema
from millpond.replay.state import RECEIPT_LINES, WORDS
from millpond.shm import identity, mapped
from millpond.shm.control import ControlBlock, Recover
from millpond.shm.directory import Owner, is_temporary
from millpond.shm.onlooker import Onlooker

EVENTS = 2
FORMAT = 1


class Memory:
    """Made by `private`, `create`, `attach` or `observe`."""

    def __init__(self, sizes: Mapping[str, int], path: Path | None) -> None:
        self.path = path
        self._places: dict[str, tuple[int, int]] = {}
        at = 0
        for name, nbytes in {**sizes, "receipts": 8 * RECEIPT_LINES}.items():
            self._places[name] = (at, nbytes)
            at += -(-nbytes // 64) * 64
        self._nbytes = at
        self.control: ControlBlock
        self._arrays: mmap.mmap
        self.owner: Owner | None = None
        self.turnstile: Any = threading.RLock()  # for the threads of this process that were woken, see `Wait.sleep`
        self.buried = 0.0  # when the table of waiters was last cleared because it was full
        self.logged = 0.0  # when a wait last said that it still waits
        self.left = False  # this process has no use for it any more: who waits leaves
        self.fresh = False  # made now, so that its arrays are still to be initialised

    # ------------------------------------------------------------------ three ways to have one
    @classmethod
    def private(cls, sizes: Mapping[str, int], recover: Recover) -> Memory:
        """In this process alone."""
        memory = cls(sizes, None)
        block = mapped.anonymous(ControlBlock.size_needed(WORDS, EVENTS))
        memory.control = ControlBlock(block, words=WORDS, events=EVENTS, create=True, recover=recover)
        memory._arrays = mapped.anonymous(memory._nbytes)
        memory.fresh = True
        return memory

    @classmethod
    def create(cls, sizes: Mapping[str, int], recover: Recover, rules: Mapping[str, Any], path: Path | None) -> Memory:
        """In files. Without a ``path`` in shared memory, and removed with the buffer.

        Raises:
            InvalidArgument: something is at ``path`` already.
            OutOfMemory, OutOfDisk: nothing is left behind.
        """
        if path is None:
            final = making = mapped.make_directory("replay")
        else:
            final, making = path, path.with_name(f"{path.name}.making.{os.getpid()}")
            if path.exists():
                raise InvalidArgument(f"{path} exists already; ReplayBuffer.attach({str(path)!r}) opens a buffer")
            if not path.parent.is_dir():
                raise InvalidArgument(f"{path.parent} is no directory")
            making.mkdir(0o700)
        try:
            if path is not None:
                Owner.me().write(making)
            memory = cls(sizes, final)
            (making / "users").touch(0o600)
            block = mapped.allocate(making / "control", ControlBlock.size_needed(WORDS, EVENTS))
            made = ControlBlock(block, words=WORDS, events=EVENTS, create=True, lock_path=making / "lock")
            del made
            mapped.allocate(making / "arrays", memory._nbytes).close()
            (making / "rules.json").write_text(json.dumps({"format": FORMAT, **rules}))
            if path is not None:
                os.rename(making, final)  # whoever finds the name finds a whole buffer
            memory._open(recover)
            memory.owner = Owner.me()
            memory.fresh = True
            return memory
        except BaseException:
            shutil.rmtree(making, ignore_errors=True)
            if path is not None:
                shutil.rmtree(final, ignore_errors=True)
            raise

    @classmethod
    def attach(cls, sizes: Mapping[str, int], recover: Recover, path: Path) -> Memory:
        """To files that somebody made. A buffer on disk whose owner is gone gets this process as its owner.

        Raises:
            PeerLost: the owner of a buffer in shared memory is gone.
            NotShareable: there is no buffer at ``path``, or it was made in another container.
        """
        memory = cls(sizes, path)
        owner = Owner.read(path)
        if owner is None:
            raise NotShareable(f"{path} holds no buffer; has its owner closed it?")
        with memory._deciding():
            owner = Owner.read(path) or owner
            if owner.gone():
                if is_temporary(path):
                    raise PeerLost(f"the owner of {path} (process {owner.pid}) is gone")
                if owner.boot != identity.boot_id():
                    memory._revive(recover)
                owner = Owner.me()
                owner.write(path)
                memory.owner = owner
            memory._open(recover)
        return memory

    @classmethod
    def observe(cls, sizes: Mapping[str, int], path: Path) -> Memory:
        """To look at files that somebody made, whoever uses them or died over them. Nothing in them can be changed,
        and their lock is never taken: `control` is an `Onlooker`, which has none.

        Raises:
            NotShareable: there is no such buffer at ``path``.
        """
        memory = cls(sizes, path)
        memory.control = Onlooker(path / "control", words=WORDS, events=EVENTS)  # type: ignore[assignment]
        memory._arrays = mapped.look_at(path / "arrays")
        return memory

    def _revive(self, recover: Recover) -> None:
        """After a reboot nobody can hold the old mutex, and its bytes mean nothing any more."""
        assert self.path is not None
        block = mapped.map_file(self.path / "control", ControlBlock.size_needed(WORDS, EVENTS))
        ControlBlock.revive(block, words=WORDS, events=EVENTS, lock_path=self.path / "lock", recover=recover)

    @contextlib.contextmanager
    def _deciding(self) -> Iterator[None]:
        """One process at a time decides about a buffer whose owner may be gone."""
        assert self.path is not None
        fd = os.open(self.path / "owner", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _open(self, recover: Recover) -> None:
        assert self.path is not None
        block = mapped.map_file(self.path / "control", ControlBlock.size_needed(WORDS, EVENTS))
        self.control = ControlBlock(
            block, words=WORDS, events=EVENTS, create=False, lock_path=self.path / "lock", recover=recover
        )
        self._arrays = mapped.map_file(self.path / "arrays", self._nbytes)

    # ------------------------------------------------------------------ what is in it
    def array(self, name: str) -> memoryview:
        """The zeroed (or shared) bytes that ``sizes`` asked for under this name, 64-byte aligned."""
        at, nbytes = self._places[name]
        return memoryview(self._arrays)[at : at + nbytes]

    def __contains__(self, name: str) -> bool:
        return name in self._places

    @property
    def shared(self) -> bool:
        return self.path is not None

    @property
    def mine(self) -> bool:
        """Does this process own the buffer?"""
        return self.path is None or (self.owner is not None and self.owner.pid == os.getpid())

    def owner_lost(self) -> str | None:
        """None, or who died. Reads ``/proc``: not under the lock."""
        if self.mine or self.path is None:
            return None
        owner = Owner.read(self.path)
        if owner is None:
            return f"the buffer's directory {self.path} is gone"
        return f"the buffer's owner (process {owner.pid}) is gone" if owner.gone() else None

    # ------------------------------------------------------------------ the schema
    def write_schema(self, schema: Schema) -> None:
        assert self.path is not None
        making = self.path / f"schema.making.{os.getpid()}"
        making.write_text(schema.to_json())
        os.rename(making, self.path / "schema.json")

    def read_schema(self) -> Schema:
        assert self.path is not None
        return Schema.from_json((self.path / "schema.json").read_text())

    @contextlib.contextmanager
    def binding(self) -> Iterator[None]:
        """One process at a time allocates the rows."""
        if self.path is None:
            yield
            return
        fd = os.open(self.path / "users", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def remove(self) -> None:
        """The owner leaves: the files of a buffer in shared memory go, those on disk wait for the next owner."""
        if self.path is not None and self.mine:
            give_up(self.path)


def give_up(path: Path) -> None:
    """What `Memory.remove` does, for whoever must not hold the memory itself."""
    if is_temporary(path):
        mapped.remove_directory(path)
    elif path.is_dir():
        Owner.me()._replace(pid=0, started=0).write(path)


def read_rules(path: Path) -> dict[str, Any]:
    """Raises ``NotShareable`` where there is no buffer at ``path``, or one of another version."""
    try:
        rules: dict[str, Any] = json.loads((path / "rules.json").read_text())
    except (OSError, json.JSONDecodeError) as problem:
        raise NotShareable(f"{path} holds no buffer ({type(problem).__name__}); has its owner closed it?") from problem
    if rules.get("format") != FORMAT:
        raise NotShareable(f"{path} is a buffer of format {rules.get('format')}; this version reads {FORMAT}")
    return rules


Arrays = Callable[[str], Any]
