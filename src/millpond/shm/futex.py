"""Process-shared locking and waiting in mapped memory, from plain Python (64-bit Linux, glibc).

``RobustMutex`` excludes, ``EventCount`` waits. Both are bytes in memory that several processes map: nothing is
inherited, and a SIGKILL at any instant, of a holder or a waiter, leaves them usable. Three rules make that true:

1. Python has no atomic read-modify-write, so shared words change under the mutex or in the kernel (FUTEX_WAKE_OP).
   Skipping a wake-up is safe only under the mutex: elsewhere the check needs a fence, on x86 too.
2. A commit and its wake-up are one system call (``publish``), so nobody can die between the two.
3. Nothing blocks longer than a slice: glibc loses a hand-over when a woken waiter is killed while a third thread
   takes the lock, and a signal that arrives just before a blocking system call does not end it.

Write ``try: mutex.lock(); ... finally: mutex.unlock()``. ``unlock`` is a C callable on purpose: no Python frame
starts, so Ctrl-C cannot come between leaving and having left (with ``with`` it does, and the lock stays taken). It
returns EPERM, harmlessly, if the caller does not hold the lock. Never unmap memory while holding a lock in it. Under
the lock, call nothing that lets go of the GIL: getting it back costs 5 ms for each busy thread of the process.

Importing this module works everywhere. Making one of its objects raises ``NotShareable`` unless ``supported()``.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

from millpond.core.errors import DeadlineExceeded, NotShareable
from millpond.shm.holding import HeldUp, describe, still_held
from millpond.shm.identity import abi, libc
from millpond.shm.interrupts import interruptible
from millpond.shm.record import PrivateMemory, SharedRecord

__all__ = ["EventCount", "RobustMutex", "abi", "supported"]

SPIN = 20  # tries before sleeping; most holders are gone within 10 µs, a sleep costs 30
LOCK_SLICE, WAIT_SLICE = 0.1, 0.5  # seconds; see rule 3
SYS_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}.get(platform.machine())
_WAKE_OP, _WAIT_BITSET, _ADD_1 = 5, 9, 1 << 28 | 1 << 12  # shared futexes: the kernel's key is (inode, offset)
_MASK, _ALL = 0xFFFFFFFF, 0x7FFFFFFF
_TID = 0x3FFFFFFF  # the bits of the lock word that hold the thread id, as the kernel and glibc define them


class _Timespec(ctypes.Structure):
    _fields_: ClassVar = [("sec", ctypes.c_int64), ("nsec", ctypes.c_int64)]


def _until(moment: float) -> Any:
    return ctypes.byref(_Timespec(int(moment), int(moment % 1 * 1e9)))


@functools.cache
def supported() -> bool:
    """Are there robust process-shared mutexes and futexes here? 64-bit Linux with glibc 2.30 or later."""
    if sys.platform != "linux" or sys.maxsize < 2**32 or SYS_FUTEX is None or not libc().startswith("glibc"):
        return False
    return hasattr(ctypes.CDLL(None), "pthread_mutex_clocklock")


@functools.cache
def _functions() -> tuple[ctypes.PyDLL, ctypes.CDLL]:
    """libc twice: the first keeps the GIL (calls that cannot block), the second lets go of it (calls that can)."""
    if not supported():
        raise NotShareable(
            "robust locks need 64-bit Linux with glibc 2.30 or later, "
            f"not {sys.platform} {platform.machine()} ({libc()})"
        )
    quick, slow, pointer, long = ctypes.PyDLL(None, use_errno=True), ctypes.CDLL(None), ctypes.c_void_p, ctypes.c_long
    for name in ("trylock", "unlock", "consistent"):
        getattr(quick, f"pthread_mutex_{name}").argtypes = [pointer]
    slow.pthread_mutex_clocklock.argtypes = [pointer, ctypes.c_int, pointer]
    for lib in (quick, slow):
        lib.syscall.argtypes, lib.syscall.restype = [long, pointer, long, long, pointer, pointer, long], long
    return quick, slow


class RobustMutex(SharedRecord):
    """A lock that survives its holder, be it a process or one thread, however started.

    After a holder ended without unlocking, the next ``lock()`` returns True, once; the mutex itself is good again.
    What to repair must be written in the data: whoever got the True may die too. On a ``sticky`` mutex every ``lock()``
    returns True until somebody says ``forgive()``, so that an exception cannot lose the news either.
    """

    SIZE, MAGIC = 128, 0x584D504D  # "MPMX"; pthread_mutex_t from byte 64 (40 bytes on x86-64, 48 on AArch64)
    _DEBT: ClassVar[int] = 3  # not 0: a holder died, and nobody has made up for it
    _LOCK_WORD: ClassVar[int] = 16  # the first 32 bits of pthread_mutex_t: the holder's thread id

    def __init__(self, memory: Any, offset: int = 0, *, create: bool = False) -> None:
        self._quick, self._slow = _functions()
        super().__init__(memory, offset, create=create)
        self.sticky = False
        self._mutex = ctypes.c_void_p(self.pthread_mutex)
        self._try = functools.partial(self._quick.pthread_mutex_trylock, self._mutex)
        self._consistent = functools.partial(self._quick.pthread_mutex_consistent, self._mutex)
        self.unlock: Callable[[], int] = functools.partial(self._quick.pthread_mutex_unlock, self._mutex)
        if isinstance(memory, PrivateMemory):
            _private.add(self)

    def _create(self) -> None:
        quick, a = self._quick, ctypes.create_string_buffer(64)  # process-shared, robust, error-checking
        codes = [
            quick.pthread_mutexattr_init(a),
            quick.pthread_mutexattr_setpshared(a, 1),
            quick.pthread_mutexattr_setrobust(a, 1),
            quick.pthread_mutexattr_settype(a, 2),
            quick.pthread_mutex_init(ctypes.c_void_p(self.address + 64), a),
        ]
        if any(codes):
            raise NotShareable(f"no robust process-shared mutex here: {codes}")

    def lock(self, timeout: float | None = None, held_up: HeldUp | None = None) -> bool:
        """True: the last holder died holding it. Any exception leaves it not held.

        ``held_up(holder, seconds)`` is called about every 0.1 s as long as a thread holds the lock; what it raises ends
        the call.

        Raises:
            DeadlineExceeded: still taken after ``timeout`` seconds.
            RecursionError: this thread holds it already, and goes on holding it.
        """
        try:
            code = self._try()
            return False if code == 0 and self._words[self._DEBT] == 0 else self._lock_slowly(code, timeout, held_up)
        except BaseException as problem:  # Ctrl-C may come right after the C call took the lock
            if self.held() and not isinstance(problem, RecursionError):
                if self._consistent() == 0:  # the last holder had died; unlocking now would ruin the mutex for good
                    self._words[self._DEBT] = 1
                self.unlock()
            raise

    @interruptible
    def _lock_slowly(self, code: int, timeout: float | None, held_up: HeldUp | None) -> bool:
        began, tries = time.monotonic(), SPIN
        deadline = float("inf") if timeout is None else began + timeout
        while code in (errno.EBUSY, errno.ETIMEDOUT):
            if tries:
                tries, code = tries - 1, self._try()
                continue
            now = time.monotonic()
            if now >= deadline:
                raise DeadlineExceeded(f"the lock was held by {describe(self.holder)} for {timeout} s")
            if code == errno.ETIMEDOUT:
                (held_up or still_held)(self.holder, now - began)
            end = _until(min(deadline, now + LOCK_SLICE))
            code = self._slow.pthread_mutex_clocklock(self._mutex, time.CLOCK_MONOTONIC, end)
        if code == errno.EOWNERDEAD:
            self._words[self._DEBT] = 1  # first: whatever comes between here and the caller, the news is kept
            self._consistent()
        elif code == errno.EDEADLK:
            raise RecursionError("this thread holds the lock already")
        elif code:
            raise OSError(code, os.strerror(code))
        died = self._words[self._DEBT] != 0
        if not self.sticky:
            self.forgive()
        return died

    def forgive(self) -> None:
        """While holding it: what the dead holder left is mended."""
        self._words[self._DEBT] = 0

    @property
    def pthread_mutex(self) -> int:
        """Address of the ``pthread_mutex_t``."""
        return self.address + 64

    @property
    def debt(self) -> int:
        """Address of the 32-bit word that is not 0 where a holder died and nobody has made up for it."""
        return self.address + 4 * self._DEBT

    @property
    def holder(self) -> int:
        """Thread id of the holder, 0 if free (advisory)."""
        return self._words[self._LOCK_WORD] & _TID

    def held(self) -> bool:
        """Does this thread hold it?"""
        return self.holder == threading.get_native_id()

    def orphan(self) -> None:
        """Make it new, as if its holder had died. Only for memory that nobody else uses."""
        self._create()
        self._words[self._DEBT] = 1

    def __enter__(self) -> bool:
        return self.lock()

    def __exit__(self, *_: object) -> None:  # convenient, not safe against signal handlers that raise
        self.unlock()


_private: weakref.WeakSet[RobustMutex] = weakref.WeakSet()


def _after_fork() -> None:
    """A child's copy of private memory: whoever held the lock there is not among the child's threads."""
    for mutex in list(_private):
        if mutex.holder:
            mutex.orphan()


os.register_at_fork(after_in_child=_after_fork)


class EventCount(SharedRecord):
    """Waits for "it changed since I looked". The condition is the caller's, under a mutex:

    waiter: ``lock; while not condition: t = prepare(); unlock; wait(t); lock``; changer: ``lock; change; publish(...);
    unlock``. A killed waiter costs one needless system call, later.
    """

    SIZE, MAGIC = 64, 0x5645504D  # "MPEV"
    SEQUENCE, AWAITED = 4, 5  # indices of 32-bit words

    def __init__(self, memory: Any, offset: int = 0, *, create: bool = False) -> None:
        self._quick, self._slow = _functions()
        super().__init__(memory, offset, create=create)
        self._at = ctypes.c_void_p(self.address + 4 * self.SEQUENCE)

    def prepare(self) -> int:
        """Under the mutex, after seeing the condition false: the ticket for ``wait``."""
        self._words[self.AWAITED] = 1
        return self._words[self.SEQUENCE]

    def current(self, ticket: int) -> bool:
        """Is this still the ticket that ``prepare`` would give?"""
        return bool(self._words[self.SEQUENCE] == ticket)

    def wait(self, ticket: int, timeout: float | None = None) -> bool:
        """Without the mutex: sleep until the sequence has left ``ticket``. False: not within ``timeout`` seconds."""
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while self._words[self.SEQUENCE] == ticket:  # EINTR, EAGAIN, ETIMEDOUT and 0 all mean: look again
            now = time.monotonic()
            if now >= deadline:
                return False
            end = _until(min(deadline, now + WAIT_SLICE))
            self._slow.syscall(SYS_FUTEX, self._at, _WAIT_BITSET, ticket, end, None, _MASK)
        return True

    def publish(self, commit: memoryview, commit_at: ctypes.c_void_p) -> None:
        """Under the mutex: add 1 to the 32-bit ``commit[0]`` (at ``commit_at``) *and* wake all waiters, indivisibly."""
        words = self._words
        words[self.SEQUENCE] = (words[self.SEQUENCE] + 1) & _MASK  # first: nobody falls asleep on the old value
        if not words[self.AWAITED]:  # nobody to wake: one plain store
            commit[0] = (commit[0] + 1) & _MASK
            return
        self._wake_op(commit_at)
        words[self.AWAITED] = 0  # last: dying before this line costs one system call, not a wake-up

    def signal(self) -> None:
        """Under the mutex, before a commit: wake all waiters; they will want the mutex, and so see the commit.

        Dying between this and the commit costs them a look. No system call where nobody waits.
        """
        if self._words[self.AWAITED]:
            self._wake_op(self._at)
            self._words[self.AWAITED] = 0

    def notify_all(self) -> None:
        """With or without the mutex: advance the sequence and wake everybody, in one system call."""
        self._wake_op(self._at)

    def _wake_op(self, increment_at: ctypes.c_void_p) -> None:
        if self._quick.syscall(SYS_FUTEX, self._at, _WAKE_OP, _ALL, None, increment_at, _ADD_1) < 0:
            raise OSError(ctypes.get_errno(), "FUTEX_WAKE_OP")
