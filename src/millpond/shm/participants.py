"""The table of threads that wait for, or have reserved, something. Counts are derived from it, never kept.

1024 lines of 64 bytes: pid, thread id, start time of the process, role, need, since, and two reserved amounts. A line
is claimed under the mutex and then written by its thread only, or by who finds that thread dead. So no death can
falsify it: the line of a dead thread is recognised, and cleared, by the others.
"""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from millpond.shm import identity

LINES, WORDS = 1024, 8
TABLE_BYTES = LINES * WORDS * 8
_PID, _TID, _STARTED, _ROLE, _NEED, _SINCE, _RESERVED = range(7)
IDLE = 0


class Waiter(NamedTuple):
    """One thread that waits: ``need`` is what for (in items), ``since_ns`` when it began (monotonic clock)."""

    pid: int
    tid: int
    role: int
    need: int
    since_ns: int


class Line(NamedTuple):
    """One line of the table, as it stood when its thread was found dead."""

    number: int
    pid: int
    tid: int
    started: int
    role: int
    reserved: tuple[int, int]


class Participants:
    """The table over ``table``, a memoryview of ``LINES * WORDS`` 64-bit words."""

    def __init__(self, table: memoryview) -> None:
        self._table = table
        self._mine: dict[int, int] = {}

    def claim(self) -> int | None:
        """Under the mutex: this thread's line. None: all are taken; bury the dead, without the mutex, and try again."""
        return self._claim(threading.get_native_id())

    def claim_process(self) -> int | None:
        """Under the mutex: the line of this process's first thread, for what lives as long as the process."""
        return self._claim(identity.me()[0])

    def _claim(self, tid: int) -> int | None:
        table, (pid, started) = self._table, identity.me()
        line = self._mine.get(tid)
        if line is not None and table[WORDS * line + _PID] == pid and table[WORDS * line + _TID] == tid:
            return line
        pids: list[int] = table[::WORDS].tolist()
        if 0 not in pids:
            return None
        line = pids.index(0)
        at = WORDS * line
        for word, value in enumerate((tid, started, IDLE, 0, 0, 0, 0), start=1):
            table[at + word] = value
        table[at] = pid  # last
        self._mine[tid] = line
        return line

    def begin_wait(self, line: int, role: int, need: int) -> None:
        """Say that this thread waits, as ``role`` (not 0), for ``need``. ``end_wait`` must follow, whatever happens."""
        at = WORDS * line
        self._table[at + _NEED], self._table[at + _SINCE] = need, time.monotonic_ns()
        self._table[at + _ROLE] = role  # last

    def end_wait(self, line: int) -> None:
        """It waits no longer."""
        self._table[WORDS * line + _ROLE] = IDLE

    def reserve(self, line: int, first: int, second: int = 0) -> None:
        """Under the mutex: what this thread has reserved now, in two amounts that mean what the block's owner says.

        Where words of the state count the same, do it between ``begin`` and the commit that settles.
        """
        at = WORDS * line + _RESERVED
        self._table[at], self._table[at + 1] = first, second

    def reserved(self, line: int) -> tuple[int, int]:
        """What that thread has reserved."""
        at = WORDS * line + _RESERVED
        return self._table[at], self._table[at + 1]

    def all_reserved(self) -> tuple[int, int]:
        """The sums over all lines, dead ones included. Under the mutex they are exact."""
        return sum(self._table[_RESERVED::WORDS].tolist()), sum(self._table[_RESERVED + 1 :: WORDS].tolist())

    def reservations(self) -> list[tuple[int, int]]:
        """Process and first amount of those that have reserved something, the dead not yet buried among them."""
        amounts = self._table[_RESERVED::WORDS].tolist()
        if not any(amounts):
            return []
        pids = self._table[::WORDS].tolist()
        return [(pid, amount) for pid, amount in zip(pids, amounts, strict=True) if pid and amount]

    def waiting(self, role: int | None = None) -> list[Waiter]:
        """Those that wait now (as ``role``), the dead not yet buried among them."""
        found = []
        for line, its_role in enumerate(self._table[_ROLE::WORDS].tolist()):
            if its_role != IDLE and role in (None, its_role):
                at = WORDS * line
                pid, tid, _, role_now, need, since = self._table[at : at + _RESERVED].tolist()
                if pid and role_now == its_role:
                    found.append(Waiter(pid, tid, role_now, need, since))
        return found

    def holding(self, role: int) -> list[int]:
        """Lines of other processes that have reserved something, or wait as ``role``: others may wait because of
        these."""
        table, me = self._table, identity.me()[0]
        reserved, roles = table[_RESERVED::WORDS].tolist(), table[_ROLE::WORDS].tolist()
        return [
            line
            for line, (amount, its_role) in enumerate(zip(reserved, roles, strict=True))
            if (amount or its_role == role) and table[WORDS * line] != me
        ]

    def dead(self, among: list[int] | None = None) -> list[Line]:
        """Lines (of those ``among``) whose process or thread is gone. Without the mutex: reading ``/proc`` lets go of
        the GIL."""
        found = []
        for line in range(LINES) if among is None else among:
            if self._table[WORDS * line] == 0:
                continue
            read = self._read(line)
            if not (identity.alive(read.pid, read.started) and identity.thread_alive(read.pid, read.tid)):
                found.append(read)
        return found

    def still(self, dead: Line) -> Line | None:
        """Under the mutex: the dead thread's line as it is now, or None if it was buried since."""
        read = self._read(dead.number)
        return read if (read.pid, read.tid, read.started) == (dead.pid, dead.tid, dead.started) else None

    def bury(self, line: Line) -> None:
        """Under the mutex: free it."""
        at = WORDS * line.number
        self._table[at + _ROLE] = IDLE
        self._table[at + _RESERVED] = self._table[at + _RESERVED + 1] = 0
        self._table[at] = 0

    def _read(self, number: int) -> Line:
        pid, tid, started, role, _, _, first, second = self._table[WORDS * number : WORDS * (number + 1)].tolist()
        return Line(number, pid, tid, started, role, (first, second))

    def release(self) -> memoryview:
        """The view of the table, for who wants to release it."""
        return self._table

    def forget_all(self) -> None:
        """Empty the table. Only for memory that nobody else uses."""
        self._table[:] = memoryview(bytes(TABLE_BYTES)).cast("Q")
        self._mine = {}
