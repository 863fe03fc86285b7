"""A few 64-bit words that processes share, change together, and never find half changed, whoever is killed when.

The state is two records. The low bit of one 32-bit word, ``commit``, names the record in force. A change writes the
other record and adds 1 to the word: that single store (or, where somebody waits, that single FUTEX_WAKE_OP) *is* the
commit. There is nothing to undo after a death: what was not committed never was.

A holder that is about to touch memory outside the record first writes an *intent*: a number, one above the number
that the record in force counts as settled. The commit that ends the change counts it. Whoever locks next and finds an
intent that nobody settled knows that a predecessor was killed, or was left by an exception, half-way; ``recover``
then mends. Killed recoverers are no trouble: the next one finds what they found.

Layout, every part that another core writes on cache lines of its own::

       0  header: magic, version, ABI, words, events (64 bits each)
     128  mutex
     256  16 event counts of 64 bytes
    1280  commit
    1344  intent: number, pid, count, start
    1408  participants, 1024 × 64 bytes
   66944  two records of ``words + 3`` 64-bit words, each rounded up to 64 bytes
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import weakref
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from millpond.core.errors import InvalidArgument, NotShareable
from millpond.shm import identity
from millpond.shm.futex import SYS_FUTEX, EventCount, RobustMutex
from millpond.shm.holding import HeldUp
from millpond.shm.locks import Event, Kind, Mutex, make_event, make_lock
from millpond.shm.participants import TABLE_BYTES, Line, Participants, Waiter
from millpond.shm.record import PrivateMemory

__all__ = ["ControlBlock", "Intent", "Line", "Waiter"]

MAGIC, VERSION = int.from_bytes(b"MILPOND1", "little"), 1
MAX_EVENTS, MAX_WORDS = 16, 4096
_MUTEX, _EVENTS, _COMMIT, _INTENT, _TABLE = 128, 256, 1280, 1344, 1408
_RECORDS = _TABLE + TABLE_BYTES
OWN_WORDS = 3  # after the caller's: settled intents, discarded intents, recoveries
_MASK = 0xFFFFFFFF
_WHOLE = slice(None)
ORDERED = platform.machine() in ("x86_64", "AMD64")  # loads stay in order: the state can be read without the lock


@dataclass(frozen=True, slots=True)
class Intent:
    """What somebody was about to write when it was killed, or left by an exception."""

    pid: int
    count: int
    start: int


Recover = Callable[[list[int], Intent | None, bool], None]
Forget = Callable[[list[int], list[Line]], None]


def _record_words(words: int) -> int:
    return -(-(words + OWN_WORDS) // 8) * 8


class ControlBlock:
    """``words`` shared 64-bit words, a mutex, ``events`` event counts and a table of participants.

    ``load`` gives a list: the first ``words`` entries are the caller's, the last three the block's own counts:
    ``state[block.SETTLED]``, ``state[block.DISCARDED]`` (writes that were begun and never settled),
    ``state[block.RECOVERIES]`` (holders that died). Use, where ``mutex`` is ``block.mutex``::

        try:
            state = block.load(mutex.lock())
            block.begin(state, count=n, start=state[HEAD])  # only before touching memory outside the record
            ...
            state[HEAD] += n
            block.settle(state)
            block.commit(state, block.events[ITEMS])
        finally:
            mutex.unlock()

    ``recover(state, intent, owner_died)`` changes ``state`` (and what the intent says was touched) into something
    sound; it runs under the mutex, may be cut off and run again, and must not let go of the GIL. ``hook(step)`` is for
    tests, which kill and delay at: ``intent``, ``record written``, ``signalled``, ``committed``, ``recover``, ``bury``.

    Raises:
        NotShareable: the memory holds no such block, or one of another shape, version, machine, boot or container.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        *,
        words: int,
        events: int,
        create: bool,
        lock_path: str | os.PathLike[str] | None = None,
        recover: Recover | None = None,
    ) -> None:
        _check_shape(memory, words, events)
        self.words, self.recover = words, recover
        self.hook: Callable[[str], None] | None = None
        self.SETTLED, self.DISCARDED, self.RECOVERIES = range(words, words + OWN_WORDS)
        self._view = memoryview(memory)
        self._header = self._view[:64].cast("Q")
        if create:
            self._view[: self.size_needed(words, events)] = bytes(self.size_needed(words, events))
        else:
            self._check_header(words, events)
        self.kind: Kind
        self.mutex: Mutex
        self.mutex, self.kind = make_lock(memory, _MUTEX, create=create, path=lock_path)
        self.mutex.sticky = True  # a death stays reported until it is mended, whatever interrupts the mending
        self.events: list[Event] = [make_event(memory, _EVENTS + 64 * i, create=create) for i in range(events)]
        self._commit_word = self._view[_COMMIT : _COMMIT + 4].cast("I")
        self._commit_at = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory, _COMMIT)))
        self._intent = self._view[_INTENT : _INTENT + 64].cast("Q")
        self.participants = Participants(self._view[_TABLE : _TABLE + TABLE_BYTES].cast("Q"))
        length, size = 8 * _record_words(words), 8 * (words + OWN_WORDS)
        self._records = [self._view[at : at + size].cast("Q") for at in (_RECORDS, _RECORDS + length)]
        self._private = isinstance(memory, PrivateMemory)
        if create:
            self._header[1:5] = memoryview(array("Q", (VERSION, identity.abi(), words, events)))
            self._header[0] = MAGIC  # last
        _blocks.add(self)

    @staticmethod
    def size_needed(words: int, events: int) -> int:
        """Bytes of memory for a block of this shape. ``events`` does not matter now; it is part of the shape."""
        return _RECORDS + 2 * 8 * _record_words(words)

    def _check_header(self, words: int, events: int) -> None:
        found, expected = tuple(self._header[:5]), (MAGIC, VERSION, identity.abi(), words, events)
        if found != expected:
            raise NotShareable(
                f"control block: (magic, version, ABI, words, events) {found}, expected {expected}: other data, "
                "another version, or made before a reboot or in another container"
            )

    # ---------------------------------------------------------------- the state, under the mutex
    def load(self, owner_died: bool = False) -> list[int]:
        """The state in force, once for each time the lock is taken. Mends what a predecessor left unfinished.

        ``owner_died`` is what ``mutex.lock()`` returned.
        """
        state: list[int] = self._records[self._commit_word[0] & 1].tolist()
        if owner_died or self._intent[0] != state[self.SETTLED]:
            self._mend(state, owner_died)
        return state

    def _mend(self, state: list[int], owner_died: bool) -> None:
        if self.hook is not None:
            self.hook("recover")
        number, pid, count, start = self._intent[:4]
        unfinished = number != state[self.SETTLED]
        if self.recover is not None:
            self.recover(state, Intent(pid, count, start) if unfinished else None, owner_died)
        state[self.SETTLED] = number
        state[self.DISCARDED] += unfinished and count > 0
        state[self.RECOVERIES] += owner_died
        self.commit(state, *self.events)
        self.mutex.forgive()

    def commit(self, state: list[int], event: Event | None = None, *others: Event) -> None:
        """Make ``state`` the state in force, and wake those that wait for ``event`` or ``others``, all or nothing.

        The others are woken just before: they will want the mutex, and get it when this change is in force, or when
        its maker is dead. So here too nobody can die between a commit and its wake-up.
        """
        word = self._commit_word
        self._records[(word[0] + 1) & 1][_WHOLE] = array("Q", state)
        if self.hook is not None:
            self.hook("record written")
        for other in others:
            other.signal()
        if others and self.hook is not None:
            self.hook("signalled")
        if event is None:
            word[0] = (word[0] + 1) & _MASK
        else:
            event.publish(word, self._commit_at)
        if self.hook is not None:
            self.hook("committed")

    def begin(self, state: list[int], count: int = 0, start: int = 0) -> None:
        """Before touching memory outside the record: note who writes ``count`` things from ``start`` on.

        A ``count`` of 0 is for what is no write, such as a change of reservations; it is never counted as discarded.
        """
        intent = self._intent
        intent[1], intent[2], intent[3] = identity.me()[0], count, start
        intent[0] = state[self.SETTLED] + 1  # last
        if self.hook is not None:
            self.hook("intent")

    def settle(self, state: list[int]) -> None:
        """The next commit of ``state`` ends what ``begin`` began."""
        state[self.SETTLED] = self._intent[0]

    def amend(self, index: int, value: int) -> None:
        """Change one word of the record in force in place: for a word that means something to lock holders only."""
        self._records[self._commit_word[0] & 1][index] = value

    # ---------------------------------------------------------------- the state, without the mutex
    def peek(self) -> list[int]:
        """The committed state. Without the lock where loads stay in order (x86-64), else under it, so not for holders.

        The record in force is rewritten only after ``commit`` has moved on, which the second look notices.
        """
        if not ORDERED:
            return self._peek_locked()
        word, records = self._commit_word, self._records
        while True:
            now = word[0]
            state: list[int] = records[now & 1].tolist()
            if word[0] == now:
                return state

    def glance(self) -> memoryview:
        """The record in force, not copied: soon it may be another, and this one be written. Only to decide whether a
        closer look is worth it."""
        return self._records[self._commit_word[0] & 1]

    def _peek_locked(self) -> list[int]:
        try:
            return self.load(self.mutex.lock())
        finally:
            self.mutex.unlock()

    # ---------------------------------------------------------------- who takes part
    def participant(self) -> int | None:
        """Under the mutex: this thread's line in the table, or None if 1024 have it full (then: ``bury_dead``)."""
        return self.participants.claim()

    def waiting(self, role: int | None = None) -> list[Waiter]:
        """(pid, tid, role, need, since_ns) of those that wait. Without the mutex it is advisory."""
        return self.participants.waiting(role)

    def bury_dead(
        self, forget: Forget | None = None, *, among: list[int] | None = None, held_up: HeldUp | None = None
    ) -> list[Line]:
        """Without the mutex: free the lines of threads and processes that are gone. Returns them, reservations and all.

        ``among`` names the lines to look at, all by default; ``held_up`` is for the lock.
        ``forget(state, lines)`` takes what they had reserved out of ``state``; the commit of that wakes everybody.
        Cut off half-way it is an unsettled intent of count 0, which is no write: ``recover`` must always set the words
        that count reservations from ``participants.all_reserved()``.
        """
        gone = self.participants.dead(among)
        if not gone:
            return []
        try:
            state = self.load(self.mutex.lock(None, held_up))
            lines = [line for line in map(self.participants.still, gone) if line is not None]
            if not lines:
                return []
            self.begin(state)
            for line in lines:
                self.participants.bury(line)
                if self.hook is not None:
                    self.hook("bury")
            if forget is not None:
                forget(state, lines)
            self.settle(state)
            self.commit(state, *self.events)
            return lines
        finally:
            self.mutex.unlock()

    def addresses(self) -> tuple[dict[str, int], object]:
        """Of the parts of a block with robust locks, for compiled code that does what this class does; and what must
        be held as long as they are used."""
        assert isinstance(self.mutex, RobustMutex)
        items, space = self.events
        assert isinstance(items, EventCount)
        assert isinstance(space, EventCount)
        found = {
            "MUTEX": self.mutex.pthread_mutex,
            "DEBT": self.mutex.debt,
            "ITEMS_EVENT": items.address,
            "SPACE_EVENT": space.address,
            "COMMIT": _address(self._commit_word),
            "INTENT": _address(self._intent),
            "RECORD_0": _address(self._records[0]),
            "RECORD_1": _address(self._records[1]),
            "FUTEX": SYS_FUTEX or 0,
        }
        return found, (self._view.obj, self.mutex, items, space)

    def notify_all(self) -> None:
        """Wake everybody who waits for anything, to look again. With or without the mutex."""
        for event in self.events:
            event.notify_all()

    # ---------------------------------------------------------------- other lives of a block
    @staticmethod
    def made_here(memory: mmap.mmap) -> bool:
        """Do these bytes say that they are of this boot and container?"""
        with memoryview(memory) as view, view[:64].cast("Q") as header:
            return bool(header[2] == identity.abi())

    @classmethod
    def revive(
        cls,
        memory: mmap.mmap,
        *,
        words: int,
        events: int,
        lock_path: str | os.PathLike[str] | None = None,
        recover: Recover | None = None,
    ) -> ControlBlock:
        """A block from before a reboot, or of another container, as good as new, with its committed state.

        The caller must know that nobody uses it: for instance by an exclusive ``flock`` on a file that every user holds
        locked shared. An unsettled intent is still found by the first ``load``.
        """
        _check_shape(memory, words, events)
        with memoryview(memory) as view, view[:64].cast("Q") as header:
            found = (header[0], header[1], header[3], header[4])
            if found != (MAGIC, VERSION, words, events):
                raise NotShareable(f"control block: (magic, version, words, events) {found}; other data or shape")
            make_lock(memory, _MUTEX, create=True, path=lock_path)
            for i in range(events):
                make_event(memory, _EVENTS + 64 * i, create=True)
            view[_TABLE : _TABLE + TABLE_BYTES] = bytes(TABLE_BYTES)
            header[2] = identity.abi()
        block = cls(memory, words=words, events=events, create=False, lock_path=lock_path, recover=recover)
        block.mutex.orphan()  # the old mutex may have had a holder
        return block

    def after_fork(self) -> None:
        """In a forked child. Its copy of private memory has one user, without the parent's other threads."""
        if self._private:
            if any(self.participants.all_reserved()):
                self.mutex.orphan()  # so that recover counts reservations anew
            self.participants.forget_all()

    def close(self) -> None:
        """Let go of the memory, so that it can be unmapped. No thread may be inside, or come again."""
        if self not in _blocks:
            return
        _blocks.discard(self)
        self.recover = None
        del self.mutex, self.events
        for view in (*self._records, self._intent, self._commit_word, self._header, self.participants.release()):
            view.release()
        with contextlib.suppress(BufferError):
            self._view.release()


_blocks: weakref.WeakSet[ControlBlock] = weakref.WeakSet()


def _after_fork() -> None:
    for block in list(_blocks):
        block.after_fork()


os.register_at_fork(after_in_child=_after_fork)  # after those of identity, futex and fallback, which are imported above


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view.cast("B")))


def _check_shape(memory: mmap.mmap, words: int, events: int) -> None:
    if not 1 <= words <= MAX_WORDS or not 1 <= events <= MAX_EVENTS:
        raise InvalidArgument(f"{words} words and {events} events: must be 1 to {MAX_WORDS} and 1 to {MAX_EVENTS}")
    needed = ControlBlock.size_needed(words, events)
    if len(memory) < needed:
        raise NotShareable(f"control block: {needed} bytes needed, the memory has {len(memory)}; truncated?")
