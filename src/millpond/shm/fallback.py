"""The same locking and waiting where the system has no robust futexes (macOS, musl): an flocked file, and polling.

The interfaces are those of ``futex``; the guarantees are weaker in three points. A wake-up takes up to a millisecond.
A *thread* that ends while it holds the lock keeps it until its process ends. An exception raised by a signal handler
at the very entry of ``unlock`` leaves the lock taken.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import random
import threading
import time
import weakref
from pathlib import Path
from typing import Any, ClassVar

from millpond.core.errors import DeadlineExceeded, NotShareable
from millpond.shm.holding import HeldUp, describe, still_held
from millpond.shm.interrupts import interruptible
from millpond.shm.record import SharedRecord

TELL = 0.1  # seconds between two calls of ``held_up``
POLL_MIN, POLL_MAX = 20e-6, 1e-3  # seconds between two looks; doubles from the first to the second
_MASK = 0xFFFFFFFF
_numbers = random.Random()  # not `secrets`, which lets go of the GIL; not the global one, which users seed


class FileMutex(SharedRecord):
    """A lock that survives its holder: the kernel lets go of an ``flock`` when a process ends.

    The holder's pid stands in the record while it holds: who gets the lock and finds a pid knows that its
    predecessor died; ``sticky`` as in ``futex.RobustMutex``. ``path`` names the lock file; without one only the
    threads of this process are excluded. Objects on one path exclude each other, also within a process.
    """

    SIZE, MAGIC = 128, 0x464D504D  # "MPMF"
    _DEBT, _PID, _TID = 3, 4, 5  # indices of 32-bit words

    def __init__(
        self, memory: Any, offset: int = 0, *, create: bool = False, path: str | os.PathLike[str] | None = None
    ) -> None:
        super().__init__(memory, offset, create=create)
        self.sticky = False
        self._path = None if path is None else Path(path)
        self._fd = -1
        self._thread: Any = threading.RLock()  # an RLock, because it knows whether this thread owns it
        if self._path is not None:
            flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
            try:
                self._fd = os.open(self._path, flags, 0o600)
            except OSError as problem:
                raise NotShareable(f"cannot open the lock file {self._path}: {problem.strerror}") from problem
        _living.add(self)

    def lock(self, timeout: float | None = None, held_up: HeldUp | None = None) -> bool:
        """True: the last holder died holding it. Any exception leaves it not held. ``held_up`` as in
        `futex.RobustMutex.lock`.

        Raises:
            DeadlineExceeded: still taken after ``timeout`` seconds.
            RecursionError: this thread holds it already, and goes on holding it.
        """
        if self.held():
            raise RecursionError("this thread holds the lock already")
        try:
            self._acquire(timeout, held_up)
            if self._words[self._PID]:
                self._words[self._DEBT] = 1
            self._words[self._TID] = threading.get_native_id() & _MASK
            self._words[self._PID] = os.getpid()
            died = self._words[self._DEBT] != 0
            if not self.sticky:
                self.forgive()
        except BaseException:
            self._release()
            raise
        return died

    def forgive(self) -> None:
        """While holding it: what the dead holder left is mended."""
        self._words[self._DEBT] = 0

    @interruptible
    def _acquire(self, timeout: float | None, held_up: HeldUp | None) -> None:
        began = told = time.monotonic()
        deadline = float("inf") if timeout is None else began + timeout
        while not self._thread.acquire(timeout=min(TELL, max(0.0, deadline - time.monotonic()))):
            self._tell(began, deadline, held_up)
        if self._path is None:
            return
        if self._fd < 0:
            raise NotShareable(f"the lock file {self._path} is gone, and this forked process could not reopen it")
        pause = POLL_MIN
        while True:
            with contextlib.suppress(BlockingIOError, InterruptedError):
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            now = time.monotonic()
            if now >= deadline or now - told >= TELL:
                self._tell(began, deadline, held_up)
                told = now
            time.sleep(min(pause, max(0.0, deadline - now)))
            pause = min(2 * pause, POLL_MAX)

    def _tell(self, began: float, deadline: float, held_up: HeldUp | None) -> None:
        now = time.monotonic()
        if now >= deadline:
            raise DeadlineExceeded(f"the lock was held by {describe(self.holder)} for {now - began:.3g} s")
        (held_up or still_held)(self.holder, now - began)

    def unlock(self) -> int:
        """0, or EPERM, harmlessly, if this thread does not hold it."""
        if not self.held():
            return errno.EPERM
        try:
            self._release()
        except BaseException:  # a signal handler raised half-way
            self._release()
            raise
        return 0

    def _release(self) -> None:
        if not self.held():
            return
        if self._words[self._PID] == os.getpid():  # else an interrupted lock(): a dead holder's mark stays for the next
            self._words[self._PID] = 0
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        self._thread.release()

    @property
    def holder(self) -> int:
        """Thread id of the holder, 0 if free (advisory)."""
        return self._words[self._TID] if self._words[self._PID] else 0

    def held(self) -> bool:
        """Does this thread hold it?"""
        return bool(self._thread._is_owned())

    def orphan(self) -> None:
        """Make it new, as if its holder had died. Only for memory that nobody else uses."""
        self._words[self._PID], self._words[self._DEBT] = 0, 1

    def after_fork(self) -> None:
        """In a forked child: own nothing. An flock belongs to the open file, which parent and child would share."""
        self._thread = threading.RLock()
        if self._fd >= 0:
            inherited, self._fd = self._fd, -1
            for name in (f"/proc/self/fd/{inherited}", str(self._path)):  # the first also where the name is gone
                with contextlib.suppress(OSError):
                    self._fd = os.open(name, os.O_RDWR | os.O_CLOEXEC)
                    break
            os.close(inherited)

    def __enter__(self) -> bool:
        return self.lock()

    def __exit__(self, *_: object) -> None:
        self.unlock()

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1


_living: weakref.WeakSet[FileMutex] = weakref.WeakSet()


def _after_fork() -> None:
    _numbers.seed()
    for mutex in list(_living):
        mutex.after_fork()


os.register_at_fork(after_in_child=_after_fork)


class PolledEvent(SharedRecord):
    """An event count that looks at its sequence every millisecond. Interface and use as of ``futex.EventCount``."""

    SIZE, MAGIC = 64, 0x5045504D  # "MPEP"
    SEQUENCE: ClassVar[int] = 4

    def prepare(self) -> int:
        """Under the mutex, after seeing the condition false: the ticket for ``wait``."""
        return self._words[self.SEQUENCE]

    def current(self, ticket: int) -> bool:
        """Is this still the ticket that ``prepare`` would give?"""
        return bool(self._words[self.SEQUENCE] == ticket)

    def wait(self, ticket: int, timeout: float | None = None) -> bool:
        """Without the mutex: sleep until the sequence has left ``ticket``. False: not within ``timeout`` seconds."""
        deadline, pause = float("inf") if timeout is None else time.monotonic() + timeout, POLL_MIN
        while self._words[self.SEQUENCE] == ticket:
            now = time.monotonic()
            if now >= deadline:
                return False
            time.sleep(min(pause, deadline - now))
            pause = min(2 * pause, POLL_MAX)
        return True

    def publish(self, commit: memoryview, commit_at: ctypes.c_void_p) -> None:
        """Under the mutex: wake all waiters and add 1 to the 32-bit ``commit[0]``.

        In this order: dying between the two costs a needless look, the other way round it would cost a wake-up.
        """
        self.notify_all()
        commit[0] = (commit[0] + 1) & _MASK

    def signal(self) -> None:
        """Under the mutex, before a commit: wake all waiters; they will want the mutex, and so see the commit."""
        self.notify_all()

    def notify_all(self) -> None:
        """With or without the mutex: give the sequence a value that no waiter holds as its ticket.

        Random, not the next: two that add 1 at once without a lock would write the same value, and who took his
        ticket between the two writes would miss the second.
        """
        old = new = self._words[self.SEQUENCE]
        while new == old:
            new = _numbers.getrandbits(32)
        self._words[self.SEQUENCE] = new
