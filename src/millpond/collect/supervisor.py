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
from millpond.collect.packing import Format, Mailbox
from millpond.collect.supervision import Supervision, Watch
from millpond.collect.worker import run
from millpond.collect.worker_status import DEAD, FAILED, FINISHED, STARTING, WorkerTable
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

    def __init__(self, handle: WorkerHandle, slot: int, frames: int, number: int) -> None:
        self.worker = handle.worker
        self._handle, self._frames, self._credit = handle, frames, (slot, number)
        self._mailbox, self._connection = handle.mailbox, handle.connection
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
        handle = self._handle
        with handle.counting:  # nobody else counts on this line
            before = handle.budget.commits_by(handle.line)
            try:
                handle.budget.commit(handle.line, frames=self._frames)
                self._counted = True
            except BaseException:
                self._counted = handle.budget.commits_by(handle.line) != before
                raise


class WorkerHandle:
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

    handles: list[WorkerHandle]

    def __init__(
        self,
        specs: Sequence[bytes],
        *,
        lines: Sequence[int],
        budget: FrameBudget,
        worker_table: WorkerTable,
        context: mp_context.BaseContext,
        max_restarts: int,
        watch: Watch,
        receipt: Callable[[int], int | None],
        reclaims: bool,
    ) -> None:
        super().__init__(worker_table=worker_table, max_restarts=max_restarts, watch=watch)
        self.handles = [WorkerHandle(i, line=line, budget=budget) for i, line in enumerate(lines)]
        self._specs, self._budget, self._context = specs, budget, context
        self._receipt, self._reclaims = receipt, reclaims
        self._wake_read, self._wake_write = mp_connection.Pipe(duplex=False)

    def order(self, worker: int, frames: int, first: int, *, number: int) -> None:
        """Tell a worker to collect a batch; repeated to its successor if it dies over it. Twice under one number is
        once."""
        handle = self.handles[worker]
        with self.changed:
            if number > handle.answered:
                handle.order = (frames, first, number)
                if handle.process is not None:
                    with contextlib.suppress(OSError):
                        handle.connection.send(("collect", *handle.order))

    def ask(self, worker: int) -> bool:
        """Ask a worker for its state, which will appear in ``states``. False: nobody is there."""
        handle = self.handles[worker]
        with self.changed, contextlib.suppress(OSError):
            if not handle.ended and handle.process is not None:
                handle.connection.send(("state",))
                return True
        return False

    def dismiss(self, worker: int) -> None:
        """End a worker, by force, and put nobody into its place. What it had reserved is given back."""
        self.handles[worker].dismissed = True  # the thread sees it

    def stop(self, grace_s: float) -> None:
        """End all workers: those that do not end by themselves within ``grace_s`` seconds are killed."""
        self._worker_table.stop()
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
            for handle in self.handles if not self._stopping.is_set() else ():
                self._fill(handle)
            looked = time.monotonic()
            while not self._stopping.is_set() and not self.ended:
                self._look()
                if time.monotonic() - looked > _LOOK_S:
                    looked = time.monotonic()
                    self._look_closely()
        except BaseException as problem:  # noqa: BLE001  # a thread's exception must reach somebody
            self.fail(f"supervising the workers failed: {problem!r}", cause=problem)
        finally:
            for handle in self.handles:
                if handle.process is not None:
                    kill_family(handle.process)  # all of them, before waiting for any
            for handle in self.handles:
                try:
                    self._clear(handle)
                except BaseException as problem:  # noqa: BLE001  # the other workers must be cleared too
                    self.fail(f"clearing up after worker {handle.worker} failed: {problem!r}", cause=problem)
                self.end(handle)
            with self.changed:
                self._wake_read.close()
                self._wake_write.close()

    def _fill(self, handle: WorkerHandle) -> None:
        """Start a process for this worker."""
        self._worker_table.lines[handle.worker].leave(STARTING)
        here, there = self._context.Pipe()
        theirs, lifeline = self._context.Pipe(duplex=False)
        target = self._context.Process(  # type: ignore[attr-defined]  # every concrete context has it
            target=run,
            args=(self._specs[handle.worker], identity.me(), there, theirs),
            name=f"millpond worker {handle.worker}",
            daemon=True,  # a collector that nobody closed must not hold up the end of its process
        )
        start_family(target)
        there.close()
        theirs.close()
        with self.changed:
            handle.process, handle.connection, handle.lifeline = target, here, lifeline
            handle.mailbox, handle.posted = None, []
            if handle.order is not None:
                here.send(("collect", *handle.order))

    def _look(self) -> None:
        """Wait until something happens, and deal with it."""
        open_seats = [handle for handle in self.handles if not handle.ended]
        watched = [self._wake_read]
        for handle in open_seats:
            watched += [handle.connection, handle.process.sentinel]
        ready = set(mp_connection.wait(watched, timeout=_LOOK_S))
        for handle in open_seats:
            if handle.connection in ready:
                self._listen(handle)
            if handle.process.sentinel in ready:
                self._replace(handle)

    def _look_closely(self) -> None:
        """Ask the kernel who is dead: a sentinel may be held open by processes that the environments started. And see
        who hangs."""
        for handle in self.handles:
            if not handle.ended and (handle.dismissed or self._lives(handle) is False):
                self._replace(handle)
            elif not handle.ended and (
                reason := self._watch.look(handle.worker, self._worker_table.lines[handle.worker])
            ):
                handle.hung = reason
                self._replace(handle)

    def _lives(self, handle: WorkerHandle) -> bool | None:
        """None: its process has not told its start time yet."""
        pid, started = self._worker_table.lines[handle.worker].process
        return identity.alive(pid, started) if pid == handle.process.pid else None

    def _listen(self, handle: WorkerHandle) -> None:
        """Read what this worker has said, up to the end if it is dead."""
        with contextlib.suppress(EOFError, OSError):
            while handle.connection.poll(0):
                self._heed(handle, *handle.connection.recv())

    def _heed(self, handle: WorkerHandle, what: str, *details: Any) -> None:
        if what == "mailbox":
            path, form = details
            handle.mailbox = _open_mailbox(path, form)
        elif what == "batch":
            delivery = Delivery(handle, *details)
            handle.posted.append(delivery)
            handle.posted = handle.posted[-4:]  # a worker has two slots, so older ones were settled
            if handle.order is not None:
                with self.changed:
                    handle.answered, handle.order = handle.order[-1], None
            self.deliveries.put(delivery)
        elif what == "state":
            self.states.put((handle.worker, *details))
        elif what == "quarantined":
            self.note(handle.worker, *details)
        elif what == "failed":
            self._worker_table.lines[handle.worker].state = FAILED
            self.failed(handle.worker, *details)
        elif what == "closed":
            logger.info("worker %d ended: the replay buffer was closed", handle.worker)
        with self.changed:
            self.changed.notify_all()

    # ------------------------------------------------------------------ ends
    def _replace(self, handle: WorkerHandle) -> None:
        """The process of this worker is dead: settle what it left, and start another one if it did not end well."""
        reason = self._clear(handle)
        if reason is None or self._worker_table.stopping or handle.dismissed:
            self.end(handle)
            return
        if reason == _NEVER_BEGAN:  # the next one would not either
            handle.deaths.append(reason)
            self.fail(
                f"worker {handle.worker} {reason}; what it wrote to the standard error stream tells why. "
                'Does the script start workers outside of `if __name__ == "__main__":`?'
            )
            self.end(handle)
        elif self.lost(handle, reason):
            self._fill(handle)
        else:
            self.end(handle)

    def _clear(self, handle: WorkerHandle) -> str | None:
        """Make sure that it lives no more, and that its frames are counted. Why it died; None: it ended well."""
        if handle.process is None:
            return None
        code, began = self._kill(handle), self._lives(handle) is not None
        self._listen(handle)
        for delivery in handle.posted if not self._stopping.is_set() else ():  # else nobody will take them
            delivery.settle(count=self._reclaims)
        if self._reclaims:
            self._budget.reclaim(handle.line, receipt=self._receipt(handle.line))
        handle.connection.close()
        handle.lifeline.close()
        handle.process.close()
        with self.changed:
            handle.process, handle.mailbox, handle.posted = None, None, []
        line = self._worker_table.lines[handle.worker]
        if self.failure is not None or (code == 0 and line.state == FINISHED):
            line.leave(line.state)
            return None
        line.leave(DEAD)
        hung, handle.hung = handle.hung, None
        if hung is not None:
            return hung
        if code > 0 and not began:
            return _NEVER_BEGAN
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def _kill(self, handle: WorkerHandle) -> int:
        """Kill the process of this worker, and those that its environments started; its exit code."""
        process = handle.process
        process.join(0)
        code = process.exitcode
        kill_family(process)
        if code is None:
            process.join(_KILL_S)
            code = process.exitcode
        end = time.monotonic() + _KILL_S
        while self._lives(handle) and time.monotonic() < end:  # the code may be that of a fork server, which died first
            time.sleep(0.01)
        if code is None or self._lives(handle):
            raise WorkerFailed(f"worker {handle.worker} (process {process.pid}) does not end after SIGKILL")
        return int(code)


def _open_mailbox(path: Path, form: Format) -> Mailbox:
    """Both sides have it mapped from now on; the name is needed no longer."""
    mailbox = Mailbox(path, form, create=False)
    path.unlink()
    return mailbox
