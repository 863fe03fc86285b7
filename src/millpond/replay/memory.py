"""The memory of one buffer: its control block, the arrays of its slots and sampler, and, if shared, their directory.

A shared buffer is a directory of files that any process on the host can map::

    alive         held locked by the process that owns the buffer
    owner         which that is (pid, start time, boot)
    rules.json    capacity, sampler, flow: what `attach` needs to behave the same
    control       the control block: lock, counters, waiters
    arrays        slots, priorities, epochs, receipts
    rows          the packed rows, from the first write on
    schema.json   what they hold
    users         locked by whoever decides something for all: to bind a schema, to take the buffer over

On disk a buffer appears whole, by renaming; what is written anew later is written beside itself and renamed. So a kill
at any instant leaves a directory that can be attached, or one that the next creation removes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from millpond.core.errors import BufferClosed, InvalidArgument, NotShareable, PeerLost
from millpond.core.schema import Schema
from millpond.core.sealing import seal, unseal
from millpond.replay.state import CLOSED, RECEIPT_LINES, WORDS
from millpond.shm import identity, mapped
from millpond.shm.control import ControlBlock, Recover
from millpond.shm.directory import is_temporary
from millpond.shm.holding import describe, still_held
from millpond.shm.observer import Observer
from millpond.shm.ownership import Owner, hold, let_go, lives, replace_text

EVENTS = 2
FORMAT = 2  # from 2 on with a checksum
LOOK_EVERY = 0.5  # seconds between two looks whether the owner lives


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
        self.pid = os.getpid()  # of the owner, when it was looked up
        self._looked = 0.0  # when the owner was last seen alive
        self.turnstile: Any = threading.RLock()  # for the threads of this process that were woken, see `Wait.sleep`
        self.buried = 0.0  # when the table of waiters was last cleared because it was full
        self.forgot = 0.0  # when a call that was blocked last looked for the dead
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
            final, making = path, path.with_name(f"{path.name}.making.{os.getpid()}-{secrets.token_hex(4)}")
            if path.exists():
                raise InvalidArgument(f"{path} exists already; ReplayBuffer.attach({str(path)!r}) opens a buffer")
            if not path.parent.is_dir():
                raise InvalidArgument(f"{path.parent} is no directory")
            _clear(path.parent, re.escape(path.name))
            making.mkdir(0o700)
        renamed = path is None
        try:
            if path is not None:
                hold(making, name=path)
                Owner.me().write(making)
            memory = cls(sizes, final)
            (making / "users").touch(0o600)
            block = mapped.allocate(making / "control", ControlBlock.size_needed(WORDS, EVENTS))
            made = ControlBlock(block, words=WORDS, events=EVENTS, create=True, lock_path=making / "lock")
            del made
            mapped.allocate(making / "arrays", memory._nbytes).close()
            replace_text(making / "rules.json", seal({"format": FORMAT, **rules}))
            if path is not None:
                _appear(making, final)
                renamed = True
            memory._open(recover)
            memory.owner = Owner.me()
            memory.fresh = True
            return memory
        except BaseException:
            shutil.rmtree(making, ignore_errors=True)
            if renamed:  # else what is there, if anything, is another's
                shutil.rmtree(final, ignore_errors=True)
            let_go(final)
            raise

    @classmethod
    def attach(cls, sizes: Mapping[str, int], recover: Recover, path: Path) -> Memory:
        """To files that somebody made. A buffer on disk whose owner is gone gets this process as its owner.

        Raises:
            PeerLost: the owner of a buffer in shared memory is gone.
            NotShareable: there is no buffer at ``path``, or it was made in another container.
        """
        memory = cls(sizes, path)
        with memory._deciding():
            owner, alive = Owner.read(path), lives(path)
            memory.pid = 0 if owner is None else owner.pid
            if not alive:
                if is_temporary(path):
                    raise PeerLost(f"the owner of {path} (process {memory.pid or 'unknown'}) is gone")
                hold(path)
                memory.owner = Owner.me()
            try:
                if memory.owner is not None:
                    if owner is None or owner.boot != identity.boot_id():
                        memory._revive(recover)
                    _clear(path, r"[a-z.]+")
                    memory.owner.write(path)
                memory._open(recover)
            except BaseException:
                if memory.owner is not None:
                    let_go(path)
                raise
        return memory

    @classmethod
    def observe(cls, sizes: Mapping[str, int], path: Path) -> Memory:
        """To look at files that somebody made, whoever uses them or died over them. Nothing in them can be changed,
        and their lock is never taken: `control` is an `Observer`, which has none.

        Raises:
            NotShareable: there is no such buffer at ``path``.
        """
        memory = cls(sizes, path)
        memory.control = Observer(path / "control", words=WORDS, events=EVENTS)  # type: ignore[assignment]
        memory._arrays = mapped.look_at(path / "arrays")
        return memory

    def _revive(self, recover: Recover) -> None:
        """After a reboot nobody can hold the old mutex, and its bytes mean nothing any more."""
        assert self.path is not None
        block = mapped.map_file(self.path / "control", ControlBlock.size_needed(WORDS, EVENTS))
        if ControlBlock.made_here(block):
            return  # since this boot: those who use it still, if any, hold this very mutex
        ControlBlock.revive(block, words=WORDS, events=EVENTS, lock_path=self.path / "lock", recover=recover)

    @contextlib.contextmanager
    def _deciding(self) -> Iterator[None]:
        """One process at a time decides about a buffer whose owner may be gone."""
        assert self.path is not None
        try:
            fd = os.open(self.path / "users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as problem:
            raise NotShareable(
                f"{self.path} holds no buffer ({problem.strerror}); has its owner closed it?"
            ) from problem
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

    def held_up(self, what: str, holder: int, seconds: float) -> None:
        """For whoever waits for the lock: raises ``BufferClosed`` where this process left the buffer, ``PeerLost``
        where its owner died, and says every 30 s that it still waits."""
        if self.left:
            raise BufferClosed(f"{what}: the buffer was closed")
        self.look(what, lambda: f"; the lock is held by {describe(holder)}")
        still_held(holder, seconds)

    def owner_lost(self) -> str | None:
        """None, or who died. Asks the kernel: not under the lock."""
        if self.mine or self.path is None or lives(self.path) or self.control.peek()[CLOSED]:
            return None
        return f"the buffer's owner (process {self.pid or 'unknown'}) is gone"

    def look(self, what: str, more: Callable[[], str] = str) -> None:
        """Raises ``PeerLost`` where the owner of a buffer that this process only uses is gone. It asks every half
        second at most, so a call may come first in between."""
        now = time.monotonic()
        if now < self._looked + LOOK_EVERY:
            return
        lost = self.owner_lost()
        if lost is not None:
            raise PeerLost(f"{what}: {lost}{more()}")
        self._looked = now

    # ------------------------------------------------------------------ the schema
    def write_schema(self, schema: Schema) -> None:
        assert self.path is not None
        replace_text(self.path / "schema.json", schema.to_json())

    def read_schema(self) -> Schema:
        """Raises ``NotShareable`` where it is missing or damaged."""
        assert self.path is not None
        file = self.path / "schema.json"
        try:
            return Schema.from_json(file.read_text())
        except (OSError, *DAMAGE) as problem:
            raise NotShareable(f"{file} is missing or damaged ({problem!r:.200}): the rows cannot be read") from problem

    @contextlib.contextmanager
    def binding(self) -> Iterator[None]:
        """One process at a time allocates the rows."""
        if self.path is None:
            yield
            return
        with self.files(), self._deciding():
            yield

    @contextlib.contextmanager
    def files(self) -> Iterator[None]:
        """For opening some of its files. Raises ``BufferClosed`` or ``PeerLost`` where they went with the owner."""
        try:
            yield
        except (NotShareable, InvalidArgument, OSError) as problem:
            if self.mine or self.path is None or self.path.exists():
                raise
            if self.control.peek()[CLOSED]:
                raise BufferClosed("the buffer was closed by its owner") from problem
            raise PeerLost(f"the buffer's owner (process {self.pid or 'unknown'}) is gone") from problem

    def remove(self) -> None:
        """The owner leaves: the files of a buffer in shared memory go, those on disk wait for the next owner."""
        if self.path is not None and self.mine:
            give_up(self.path)


@contextlib.contextmanager
def opening(path: Path) -> Iterator[None]:
    """Raises ``NotShareable`` where something else is in the place of a file, or a file or its lock cannot be used."""
    try:
        yield
    except OSError as problem:
        if problem.errno not in (errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EINVAL):
            raise  # what ran out, such as descriptors, may be there again
        raise NotShareable(f"{path} holds no buffer that can be opened: {problem}") from problem


def give_up(path: Path) -> None:
    """What `Memory.remove` does, for whoever must not hold the memory itself."""
    if is_temporary(path):
        mapped.remove_directory(path)
        return
    if path.is_dir():
        Owner.me()._replace(pid=0, started=0).write(path)
    let_go(path)


def _appear(making: Path, final: Path) -> None:
    """Whoever finds the name finds a whole buffer."""
    try:
        os.rename(making, final)
    except OSError as problem:
        if problem.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):  # somebody else was faster
            raise InvalidArgument(f"{final} exists already") from problem
        raise


def _clear(directory: Path, name: str) -> None:
    """Remove what those left who were killed while they made ``name`` (a pattern) in a directory."""
    pattern = re.compile(rf"{name}\.making\.(?P<pid>\d+)[-0-9a-f.]*")
    for entry in os.scandir(directory):
        found = pattern.fullmatch(entry.name)
        if found is None:
            continue
        alive = lives(Path(entry.path)) if entry.is_dir(follow_symlinks=False) else None
        if alive is False or (alive is None and identity.start_time(int(found["pid"])) == 0):
            with contextlib.suppress(OSError):
                remove = shutil.rmtree if entry.is_dir(follow_symlinks=False) else os.unlink
                remove(entry.path)


DAMAGE = (AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError)


def read_rules(path: Path) -> dict[str, Any]:
    """Raises ``NotShareable`` where there is no buffer at ``path``, one of another version, or a damaged one."""
    file = path / "rules.json"
    try:
        content = file.read_bytes()
    except (OSError, ValueError) as problem:
        raise NotShareable(f"{path} holds no buffer ({type(problem).__name__}); has its owner closed it?") from problem
    try:
        rules = unseal(content.decode())
    except ValueError as problem:
        raise NotShareable(f"{file} is damaged: {problem}") from problem
    if rules.get("format") not in (1, FORMAT):
        raise NotShareable(f"{path} is a buffer of format {rules.get('format')!r:.40}; this version reads {FORMAT}")
    return rules


Arrays = Callable[[str], Any]
