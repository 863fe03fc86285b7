"""Starts worker processes, listens to them, and replaces those that die. One thread in the collector's process."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection as mp_connection
from multiprocessing import context as mp_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tensordict import TensorDict

from millpond.collect.budget import FrameBudget
from millpond.collect.mailbox import Mailbox
from millpond.collect.parcel import Format
from millpond.collect.roster import DEAD, FAILED, FINISHED, STARTING, Roster
from millpond.collect.supervision import Supervision, Watch
from millpond.collect.workers import run
from millpond.core.errors import WorkerFailed
from millpond.shm import identity
from millpond.shm.family import kill_family, start_family

logger = logging.getLogger("millpond.collect")
_LOOK_S = 0.5  # how often what cannot notify is looked at
_NEVER_BEGAN = "ended before it could begin"
_KILL_S = 5.0  # how long the kernel may take to end a killed process


class Delivery:
    """A batch that lies in a worker's mailbox. ``settle`` takes it out and counts it, once, whoever calls, and whatever
    exception cuts a call off."""

    def __init__(self, seat: Seat, slot: int, frames: int, number: int) -> None:
        self.worker = seat.worker
        self._seat, self._frames, self._credit = seat, frames, (slot, number)
        self._mailbox, self._connection = seat.mailbox, seat.connection
        self._lock = threading.Lock()
        self._batch: TensorDict | None = None
        self._counted = False

    def settle(self, *, count: bool = True) -> TensorDict:
        """The batch, in memory of its own. ``count=False``: somebody else counts it."""
        with self._lock:
            if self._batch is None:
                assert self._mailbox is not None
                self._batch = self._mailbox.get(self._credit[0], self._frames)
            if count and not self._counted:
                self._count()
            if self._mailbox is not None:
                with contextlib.suppress(OSError):  # the worker may be dead by now
                    self._connection.send(("credit", *self._credit))  # twice is once
                self._mailbox = None
            return self._batch

    def _count(self) -> None:
        seat = self._seat
        with seat.counting:  # nobody else counts on this line
            before = seat.budget.commits_by(seat.line)
            try:
                seat.budget.commit(seat.line, frames=self._frames)
                self._counted = True
            except BaseException:
                self._counted = seat.budget.commits_by(seat.line) != before
                raise


class Seat:
    """The place of one worker, filled by one process after another."""

    def __init__(self, worker: int, *, line: int, budget: FrameBudget) -> None:
        self.worker, self.line, self.budget = worker, line, budget
        self.process: Any = None
        self.connection: Connection = None  # type: ignore[assignment]  # set with the process
        self.lifeline: Connection = None  # type: ignore[assignment]  # likewise
        self.mailbox: Mailbox | None = None
        self.deaths: list[str] = []  # why each process that died was replaced, or was not
        self.order: tuple[int, int, int] | None = None  # frames, first, number: to be repeated to the next one
        self.answered = 0  # the number of the last order that was carried out
        self.counting = threading.Lock()
        self.posted: list[Delivery] = []  # by the process that is here now
        self.ended = False  # nobody is here, and nobody will be
        self.hung: str | None = None  # why the process that is here was killed
        self.dismissed = False


class Supervisor(Supervision):
    """Runs ``run(spec)`` in one process per spec until ``stop``. All processes are started by its own thread."""

    seats: list[Seat]

    def __init__(
        self,
        specs: Sequence[bytes],
        *,
        lines: Sequence[int],
        budget: FrameBudget,
        roster: Roster,
        context: mp_context.BaseContext,
        max_restarts: int,
        watch: Watch,
        receipt: Callable[[int], int | None],
        reclaims: bool,
    ) -> None:
        super().__init__(roster=roster, max_restarts=max_restarts, watch=watch)
        self.seats = [Seat(i, line=line, budget=budget) for i, line in enumerate(lines)]
        self._specs, self._budget, self._context = specs, budget, context
        self._receipt, self._reclaims = receipt, reclaims
        self._wake_read, self._wake_write = mp_connection.Pipe(duplex=False)

    def order(self, worker: int, frames: int, first: int, *, number: int) -> None:
        """Tell a worker to collect a batch; repeated to its successor if it dies over it. Twice under one number is
        once."""
        seat = self.seats[worker]
        with self.changed:
            if number > seat.answered:
                seat.order = (frames, first, number)
                if seat.process is not None:
                    with contextlib.suppress(OSError):
                        seat.connection.send(("collect", *seat.order))

    def ask(self, worker: int) -> bool:
        """Ask a worker for its state, which will appear in ``states``. False: nobody is there."""
        seat = self.seats[worker]
        with self.changed, contextlib.suppress(OSError):
            if not seat.ended and seat.process is not None:
                seat.connection.send(("state",))
                return True
        return False

    def dismiss(self, worker: int) -> None:
        """End a worker, by force, and put nobody into its place. What it had reserved is given back."""
        self.seats[worker].dismissed = True  # the thread sees it

    def stop(self, grace_s: float) -> None:
        """End all workers: those that do not end by themselves within ``grace_s`` seconds are killed."""
        self._roster.stop()
        self_stopped = threading.current_thread() is self._thread  # the garbage collector may run anywhere
        if self_stopped or self._thread.ident is None:
            self._stopping.set()
            return
        with self.changed:
            self.changed.wait_for(lambda: self.ended, timeout=grace_s)
            self._stopping.set()
            if not self._wake_write.closed:  # else the thread has ended by itself
                self._wake_write.send(None)
        self._thread.join(_KILL_S)
        if self._thread.is_alive():  # it is starting a process, which cannot be cut short; it ends it when it has it
            logger.warning("a worker is still being started; it will be ended as soon as it is there")

    # ------------------------------------------------------------------ the thread
    def _run(self) -> None:
        try:
            for seat in self.seats if not self._stopping.is_set() else ():
                self._fill(seat)
            looked = time.monotonic()
            while not self._stopping.is_set() and not self.ended:
                self._look()
                if time.monotonic() - looked > _LOOK_S:
                    looked = time.monotonic()
                    self._look_closely()
        except BaseException as problem:  # noqa: BLE001  # a thread's exception must reach somebody
            self.fail(f"supervising the workers failed: {problem!r}", cause=problem)
        finally:
            for seat in self.seats:
                if seat.process is not None:
                    kill_family(seat.process)  # all of them, before waiting for any
            for seat in self.seats:
                try:
                    self._clear(seat)
                except BaseException as problem:  # noqa: BLE001  # the other seats must be cleared too
                    self.fail(f"clearing up after worker {seat.worker} failed: {problem!r}", cause=problem)
                self.end(seat)
            with self.changed:
                self._wake_read.close()
                self._wake_write.close()

    def _fill(self, seat: Seat) -> None:
        """Start a process for this seat."""
        self._roster.lines[seat.worker].leave(STARTING)
        here, there = self._context.Pipe()
        theirs, lifeline = self._context.Pipe(duplex=False)
        target = self._context.Process(  # type: ignore[attr-defined]  # every concrete context has it
            target=run,
            args=(self._specs[seat.worker], identity.me(), there, theirs),
            name=f"millpond worker {seat.worker}",
            daemon=True,  # a collector that nobody closed must not hold up the end of its process
        )
        start_family(target)
        there.close()
        theirs.close()
        with self.changed:
            seat.process, seat.connection, seat.lifeline = target, here, lifeline
            seat.mailbox, seat.posted = None, []
            if seat.order is not None:
                here.send(("collect", *seat.order))

    def _look(self) -> None:
        """Wait until something happens, and deal with it."""
        open_seats = [seat for seat in self.seats if not seat.ended]
        watched = [self._wake_read]
        for seat in open_seats:
            watched += [seat.connection, seat.process.sentinel]
        ready = set(mp_connection.wait(watched, timeout=_LOOK_S))
        for seat in open_seats:
            if seat.connection in ready:
                self._listen(seat)
            if seat.process.sentinel in ready:
                self._replace(seat)

    def _look_closely(self) -> None:
        """Ask the kernel who is dead: a sentinel may be held open by processes that the environments started. And see
        who hangs."""
        for seat in self.seats:
            if not seat.ended and (seat.dismissed or self._lives(seat) is False):
                self._replace(seat)
            elif not seat.ended and (reason := self._watch.look(seat.worker, self._roster.lines[seat.worker])):
                seat.hung = reason
                self._replace(seat)

    def _lives(self, seat: Seat) -> bool | None:
        """None: its process has not told its start time yet."""
        pid, started = self._roster.lines[seat.worker].process
        return identity.alive(pid, started) if pid == seat.process.pid else None

    def _listen(self, seat: Seat) -> None:
        """Read what this worker has said, up to the end if it is dead."""
        with contextlib.suppress(EOFError, OSError):
            while seat.connection.poll(0):
                self._heed(seat, *seat.connection.recv())

    def _heed(self, seat: Seat, what: str, *details: Any) -> None:
        if what == "mailbox":
            path, form = details
            seat.mailbox = _open_mailbox(path, form)
        elif what == "batch":
            delivery = Delivery(seat, *details)
            seat.posted.append(delivery)
            seat.posted = seat.posted[-4:]  # a worker has two slots, so older ones were settled
            if seat.order is not None:
                with self.changed:
                    seat.answered, seat.order = seat.order[-1], None
            self.deliveries.put(delivery)
        elif what == "state":
            self.states.put((seat.worker, *details))
        elif what == "quarantined":
            self.note(seat.worker, *details)
        elif what == "failed":
            self._roster.lines[seat.worker].state = FAILED
            self.failed(seat.worker, *details)
        elif what == "closed":
            logger.info("worker %d ended: the replay buffer was closed", seat.worker)
        with self.changed:
            self.changed.notify_all()

    # ------------------------------------------------------------------ ends
    def _replace(self, seat: Seat) -> None:
        """The process of this seat is dead: settle what it left, and start another one if it did not end well."""
        reason = self._clear(seat)
        if reason is None or self._roster.stopping or seat.dismissed:
            self.end(seat)
            return
        if reason == _NEVER_BEGAN:  # the next one would not either
            seat.deaths.append(reason)
            self.fail(
                f"worker {seat.worker} {reason}; what it wrote to the standard error stream tells why. "
                'Does the script start workers outside of `if __name__ == "__main__":`?'
            )
            self.end(seat)
        elif self.lost(seat, reason):
            self._fill(seat)
        else:
            self.end(seat)

    def _clear(self, seat: Seat) -> str | None:
        """Make sure that nobody is in this seat, and that its frames are counted. Why it died; None: it ended well."""
        if seat.process is None:
            return None
        code, began = self._kill(seat), self._lives(seat) is not None
        self._listen(seat)
        for delivery in seat.posted if not self._stopping.is_set() else ():  # else nobody will take them
            delivery.settle(count=self._reclaims)
        if self._reclaims:
            self._budget.reclaim(seat.line, receipt=self._receipt(seat.line))
        seat.connection.close()
        seat.lifeline.close()
        seat.process.close()
        with self.changed:
            seat.process, seat.mailbox, seat.posted = None, None, []
        line = self._roster.lines[seat.worker]
        if self.failure is not None or (code == 0 and line.state == FINISHED):
            line.leave(line.state)
            return None
        line.leave(DEAD)
        hung, seat.hung = seat.hung, None
        if hung is not None:
            return hung
        if code > 0 and not began:
            return _NEVER_BEGAN
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def _kill(self, seat: Seat) -> int:
        """Kill the process of this seat, and those that its environments started; its exit code."""
        process = seat.process
        process.join(0)
        code = process.exitcode
        kill_family(process)
        if code is None:
            process.join(_KILL_S)
            code = process.exitcode
        end = time.monotonic() + _KILL_S
        while self._lives(seat) and time.monotonic() < end:  # the code may be that of a fork server, which died first
            time.sleep(0.01)
        if code is None or self._lives(seat):
            raise WorkerFailed(f"worker {seat.worker} (process {process.pid}) does not end after SIGKILL")
        return int(code)


def _open_mailbox(path: Path, form: Format) -> Mailbox:
    """Both sides have it mapped from now on; the name is needed no longer."""
    mailbox = Mailbox(path, form, create=False)
    path.unlink()
    return mailbox
