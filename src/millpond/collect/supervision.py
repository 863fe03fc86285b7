"""Looking after workers, whether these are processes or Ray actors."""

from __future__ import annotations

import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from tensordict import TensorDict

from millpond.collect.thread import Runner
from millpond.collect.worker_status import WorkerLine, WorkerTable
from millpond.core import errors
from millpond.core.errors import BufferClosed, InvalidArgument, MillpondError, WorkerFailed
from millpond.replay.waiting import check_timeout

logger = logging.getLogger("millpond.collect")
_LONG_S = 10.0
_CLOCKS_S = 1.0  # from one report to the next, the beginning of the same call on another clock moves by less
KEPT_EVENTS = 128  # transitions that were not stored, of which the latest are told


class Failure(NamedTuple):
    """What a worker raised: the name of its kind, the text, and the traceback."""

    kind: str
    text: str
    trace: str

    @classmethod
    def of(cls, problem: BaseException) -> Failure:
        """Of what is being raised. An error that says all that its user needs counts as the kind that millpond has."""
        kinds = (kind for kind in type(problem).__mro__ if kind.__module__ == errors.__name__)
        kind = next(kinds, type(problem)) if isinstance(problem, InvalidArgument) else type(problem)
        return cls(kind.__name__, str(problem), "".join(traceback.format_exception(problem)))


class Delivery(Protocol):
    """A batch that a worker has handed over."""

    worker: int

    def settle(self, *, count: bool = True) -> TensorDict:
        """The batch, in memory of its own, counted once, whoever calls. ``count=False``: somebody else counts it."""


class WorkerSlot(Protocol):
    """The place of one worker, filled by one after another."""

    worker: int
    line: int
    deaths: list[str]
    ended: bool


class Watch:
    """Looks how long the calls of others' code last: those of environments and policies.

    A call that has lasted 10 s is told in the log, again whenever it has lasted twice as long, and counts as hung after
    ``stall_timeout`` seconds. None: never. ``names`` are the environments of the workers.
    """

    def __init__(self, *, stall_timeout: float | None, names: Sequence[str]) -> None:
        self._limit_s = check_timeout(stall_timeout)
        if not self._limit_s:
            raise InvalidArgument("stall_timeout must be above 0, or None")
        self._names = names
        self._seen: dict[int, tuple[str | None, float]] = {}  # by worker: its call at the look before
        self._told_s: dict[int, float] = {}

    def describe(self, worker: int, line: WorkerLine) -> str | None:
        """The call that a worker is in, in words; None: it is in none."""
        doing, since = line.activity()
        if doing is None:
            return None
        return f"has been in {doing} of {self._names[worker]} for {time.monotonic() - since:.1f} s"

    def look(self, worker: int, line: WorkerLine) -> str | None:
        """Tell of a call that lasts long; what is wrong with a worker that hangs."""
        call, described = line.activity(), self.describe(worker, line)
        before, since = self._seen.get(worker, (None, 0.0))
        same = before == call[0] and abs(since - call[1]) < _CLOCKS_S
        if described is None or not same:  # a call is judged when it is seen twice
            self._seen[worker], self._told_s[worker] = call, _LONG_S
            return None
        lasted = time.monotonic() - call[1]
        if lasted > self._limit_s:
            return f"{described}, longer than stall_timeout={self._limit_s:g}"
        if lasted > self._told_s[worker]:
            self._told_s[worker] = 2 * lasted
            logger.warning("worker %d (process %d) %s", worker, line.process[0], described)
        return None


class Supervision:
    """Starts workers, listens to them, and replaces those that die, in a thread of its own, which is `_run`.

    Batches that workers hand over appear in ``deliveries``; after anything that a waiter might wait for, ``changed`` is
    notified. ``failure`` is set once, when a worker raised, or more than ``max_restarts`` died.
    """

    handles: Sequence[WorkerSlot]

    def __init__(self, *, worker_table: WorkerTable, max_restarts: int, watch: Watch) -> None:
        self.deliveries: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.states: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()
        self.quarantine: list[Any] = []  # the latest transitions that were not stored
        self.failure: MillpondError | None = None
        self.changed = threading.Condition()
        self._worker_table, self._max_restarts, self._watch = worker_table, max_restarts, watch
        self._stopping = threading.Event()
        self._thread = Runner(self._run)

    def _run(self) -> None:
        raise NotImplementedError

    def start(self) -> None:
        """Start the workers, the first time; returns at once."""
        self._thread.start()

    @property
    def ended(self) -> bool:
        """No worker runs, and none will be started."""
        return all(handle.ended for handle in self.handles)

    @property
    def stopping(self) -> bool:
        """The workers are told to end."""
        return self._worker_table.stopping

    def order(self, worker: int, frames: int, first: int, *, number: int) -> None:
        """Tell a worker to collect a batch, whose first frame is number ``first`` of all; repeated to its successor if
        it dies over it. Twice under one number is once."""
        raise NotImplementedError

    def ask(self, worker: int) -> bool:
        """Ask a worker for its state, which will appear in ``states``. False: nobody is there."""
        raise NotImplementedError

    def dismiss(self, worker: int) -> None:
        """End a worker, by force, and put nobody into its place. What it had reserved is given back."""
        raise NotImplementedError

    def stop(self, grace_s: float) -> None:
        """End all workers: those that do not end by themselves within ``grace_s`` seconds are killed."""
        raise NotImplementedError

    # ------------------------------------------------------------------ what happens to workers
    def note(self, worker: int, events: Sequence[Any]) -> None:
        """Transitions that were not stored, as (key, environment, step); the first ones are logged."""
        for key, env, step in events[:3]:
            logger.warning(
                "worker %d: %s is not finite in environment %d, step %d of its episode; the transition is not stored",
                *(worker, key, env, step),
            )
        self.quarantine = [*self.quarantine, *((worker, *event) for event in events)][-KEPT_EVENTS:]

    def lost(self, handle: WorkerSlot, reason: str) -> bool:
        """A worker died. May it be replaced? If not, the collection has failed."""
        handle.deaths.append(reason)
        restarts = sum(len(one.deaths) for one in self.handles)
        if restarts > self._max_restarts:
            self.fail(f"worker {handle.worker} {reason}; the {self._max_restarts} restarts that are allowed were made")
            return False
        logger.warning("worker %d %s; restart %d of %d", handle.worker, reason, restarts, self._max_restarts)
        return True

    def end(self, handle: WorkerSlot) -> None:
        """This worker has no process, and will have none."""
        with self.changed:
            handle.ended = True
            self.changed.notify_all()

    def failed(self, worker: int, told: Failure) -> None:
        """A worker raised: the others would too, so nobody is replaced."""
        kind = getattr(errors, told.kind, WorkerFailed)
        if issubclass(kind, InvalidArgument):
            logger.debug("%s", told.trace)
            self.fail(f"worker {worker}: {told.text}", kind=kind)
        else:
            self.fail(f"worker {worker} raised {told.kind}: {told.text}\n\n{told.trace}")

    def fail(self, text: str, *, cause: BaseException | None = None, kind: type[MillpondError] = WorkerFailed) -> None:
        """The collection has failed, for the first reason that there is."""
        if self.failure is None:
            logger.error("%s", text)
            failure = kind(text)
            failure.__cause__ = cause
            self.failure = failure
        self._worker_table.stop()


def receipts_of(replay: Any) -> Callable[[int], int | None]:
    """How to ask a buffer for a worker's last receipt; None where it cannot tell any more."""

    def receipt(line: int) -> int | None:
        try:
            return int(replay.receipt(line))
        except (MillpondError, BufferClosed):
            return None

    return receipt if replay is not None else lambda line: None
