"""Looking after workers, whether these are processes or Ray actors."""

from __future__ import annotations

import logging
import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from tensordict import TensorDict

from millpond.collect.roster import Roster
from millpond.core import errors
from millpond.core.errors import BufferClosed, InvalidArgument, MillpondError, WorkerFailed

logger = logging.getLogger("millpond.collect")
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


class Place(Protocol):
    """The place of one worker, filled by one after another."""

    worker: int
    line: int
    deaths: list[str]
    ended: bool


class Supervision:
    """Starts workers, listens to them, and replaces those that die, in a thread of its own, which is `_run`.

    Batches that workers hand over appear in ``deliveries``; after anything that a waiter might wait for, ``changed`` is
    notified. ``failure`` is set once, when a worker raised, or more than ``max_restarts`` died.
    """

    seats: Sequence[Place]

    def __init__(self, *, roster: Roster, max_restarts: int) -> None:
        self.deliveries: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.states: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()
        self.quarantine: list[Any] = []  # the latest transitions that were not stored
        self.failure: MillpondError | None = None
        self.changed = threading.Condition()
        self._roster, self._max_restarts = roster, max_restarts
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="millpond collector", daemon=True)

    def _run(self) -> None:
        raise NotImplementedError

    def start(self) -> None:
        """Start the workers; returns at once."""
        self._thread.start()

    @property
    def ended(self) -> bool:
        """No worker runs, and none will be started."""
        return all(seat.ended for seat in self.seats)

    @property
    def stopping(self) -> bool:
        """The workers are told to end."""
        return self._roster.stopping

    def order(self, worker: int, frames: int, first: int, *, number: int) -> None:
        """Tell a worker to collect a batch, whose first frame is number ``first`` of all; repeated to its successor if it dies over it. Twice under one number is
        once."""
        raise NotImplementedError

    def ask(self, worker: int) -> bool:
        """Ask a worker for its state, which will appear in ``states``. False: nobody is there."""
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

    def lost(self, seat: Place, reason: str) -> bool:
        """A worker died. May it be replaced? If not, the collection has failed."""
        seat.deaths.append(reason)
        restarts = sum(len(one.deaths) for one in self.seats)
        if restarts > self._max_restarts:
            self.fail(f"worker {seat.worker} {reason}; the {self._max_restarts} restarts that are allowed were made")
            return False
        logger.warning("worker %d %s; restart %d of %d", seat.worker, reason, restarts, self._max_restarts)
        return True

    def end(self, seat: Place) -> None:
        """Nobody is in this seat, and nobody will be."""
        with self.changed:
            seat.ended = True
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
        self._roster.stop()


def receipts_of(replay: Any) -> Callable[[int], int | None]:
    """How to ask a buffer for a worker's last receipt; None where it cannot tell any more."""

    def receipt(line: int) -> int | None:
        try:
            return int(replay.receipt(line))
        except (MillpondError, BufferClosed):
            return None

    return receipt if replay is not None else lambda line: None
