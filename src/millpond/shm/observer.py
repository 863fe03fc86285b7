"""A control block as somebody sees it who only looks: mapped read-only, without its lock, changing nothing.

It can be looked at while others use it, while one of them holds the lock and is stopped, after all of them died, and
after a reboot: an observer needs none of them.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from millpond.core.errors import NotShareable
from millpond.shm import control, mapped
from millpond.shm.control import ControlBlock, Intent
from millpond.shm.fallback import FileMutex
from millpond.shm.futex import RobustMutex
from millpond.shm.locks import Kind
from millpond.shm.participants import Participants, Waiter
from millpond.shm.record import magic_at

TRIES = 200  # a commit takes microseconds; between two of them there is time for a copy of a few hundred bytes


@dataclass(frozen=True)
class SeenMutex:
    """Who held the lock when it was looked at: a thread id, 0 for nobody."""

    holder: int

    def held(self) -> bool:
        """Does this thread hold it? An observer never does."""
        return False


class Observer:
    """What a `ControlBlock` can be asked without its lock. It has no lock to take, and cannot commit.

    Raises:
        NotShareable: the file at ``path`` is no control block of this shape.
    """

    def __init__(self, path: str | os.PathLike[str], *, words: int, events: int) -> None:
        memory = mapped.look_at(path)
        if len(memory) < ControlBlock.size_needed(words, events):
            raise NotShareable(f"{os.fspath(path)}: {len(memory)} bytes are too few for a control block")
        self._view = memoryview(memory).toreadonly()
        header = self._view[:64].cast("Q")
        found, expected = (header[0], header[1], *header[3:5]), (control.MAGIC, control.VERSION, words, events)
        if found != expected:
            raise NotShareable(f"{os.fspath(path)}: (magic, version, words, events) {found}, expected {expected}")
        self.words = words
        self.SETTLED, self.DISCARDED, self.RECOVERIES = range(words, words + 3)
        self.events: list[Any] = [None] * events
        self.kind: Kind = "fallback" if magic_at(memory, control._MUTEX) == FileMutex.MAGIC else "robust"
        self._commit = self._view[control._COMMIT : control._COMMIT + 4].cast("I")
        self._intent = self._view[control._INTENT : control._INTENT + 64].cast("Q")
        self.participants = Participants(self._view[control._TABLE : control._RECORDS].cast("Q"))
        length, size = 8 * control._record_words(words), 8 * (words + 3)
        begins = (control._RECORDS, control._RECORDS + length)
        self._records = [self._view[at : at + size].cast("Q") for at in begins]

    def peek(self) -> list[int]:
        """The committed state.

        The record in force is rewritten only after ``commit`` has moved on. It is read twice, as on some machines loads
        come out of order.
        """
        for _ in range(TRIES):
            now = self._commit[0]
            state: list[int] = self._records[now & 1].tolist()
            if self._commit[0] == now and self._records[now & 1].tolist() == state and self._commit[0] == now:
                return state
            time.sleep(0)
        return state  # never seen: it would take a commit in each of the tries

    def unfinished(self) -> Intent | None:
        """What somebody is writing now, or was when it died."""
        number, pid, count, start = self._intent[:4].tolist()
        return Intent(pid, count, start) if number != self.peek()[self.SETTLED] else None

    def waiting(self, role: int | None = None) -> list[Waiter]:
        """Those that wait (as ``role``), the dead not yet buried among them."""
        return self.participants.waiting(role)

    @property
    def mutex(self) -> SeenMutex:
        """Who holds the lock now."""
        words = self._view[control._MUTEX : control._MUTEX + 128].cast("I")
        if self.kind == "robust":
            return SeenMutex(words[RobustMutex._LOCK_WORD] & 0x3FFFFFFF)
        return SeenMutex(words[FileMutex._TID] if words[FileMutex._PID] else 0)
