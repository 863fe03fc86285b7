"""One worker of a ``RayCollector``: its actor, the orders and answers, its death and replacement.

Everything here happens in the one thread of the ``RaySupervisor``.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from millpond.collect.actor import Report
from millpond.collect.orders import OrderBook, Parcel
from millpond.collect.ray_link import PULSE_S, RayLink, bury
from millpond.collect.supervision import Failure
from millpond.collect.worker_status import DEAD, FAILED, FINISHED, PAUSED, STARTING, WorkerLine
from millpond.remote.cluster import ray
from millpond.shm import identity

if TYPE_CHECKING:
    from millpond.collect.ray_supervisor import RaySupervisor

logger = logging.getLogger("millpond.collect")
DOUBT_S = 6.0  # an owner of replay notices within 5 s that a client on another host is gone, and forgets its calls
_PATIENCE_S = 30.0  # after which an actor that has not begun is wondered at
_LAST = (FAILED, FINISHED)


class ActorHandle:
    """``spec`` is what its actors begin with, ``line`` its line of the worker table."""

    def __init__(self, supervisor: RaySupervisor, order_book: OrderBook, *, spec: bytes, line: WorkerLine) -> None:
        self.order_book = order_book
        self.link: RayLink | None = None
        self._supervisor, self._spec, self.line = supervisor, spec, line

    def tend(self, pause: int, stopping: bool) -> None:
        """See what there is to be done: replace, feed, pause, or end."""
        order_book = self.order_book
        if order_book.in_doubt:
            order_book.settle(time.monotonic())
            return
        link = self.link or self.fill(stopping)
        if link is None:
            return
        if link.form is None:
            self._wonder(link)
            return
        if reason := self._supervisor.hung(self):
            self._replace(link, reason)
            return
        if time.monotonic() > link.pulse_due:
            link.pulse_due = math.inf  # until this one is answered
            link.ask(self._heeding(self._pulsed), "pulse")
        if pause == 0 and not stopping:
            self._feed(link)
        if order_book.busy:
            return
        if stopping or self._supervisor.budget.finished:
            self.line.state = FAILED if self.line.state == FAILED else FINISHED
            self._supervisor.end(order_book)
        elif pause:
            self.line.state, self.line.paused = PAUSED, pause

    def fill(self, stopping: bool) -> RayLink | None:
        """Start an actor. None: it is too late for that."""
        supervisor, order_book = self._supervisor, self.order_book
        if stopping:
            supervisor.end(order_book)
            return None
        self.line.leave(STARTING)
        link = self.link = supervisor.hire()
        details = (self.line.told(), order_book.begin(), *supervisor.surroundings, identity.me())
        link.begin(self._heeding(self._begun), self._spec, *details)
        self.mind()
        return link

    def mind(self) -> None:
        """Tell the actor whether it is to pause, or to stop."""
        if self.link is not None:
            self.link.mind(*self._supervisor.next_word())

    def ask_state(self) -> None:
        """Ask for what is collected, and not handed over."""
        if self.link is not None:
            states = self._supervisor.states
            self.link.ask(self._heeding(lambda _, state: states.put((self.order_book.worker, state))), "state")

    # ------------------------------------------------------------------ orders and answers
    def _feed(self, link: RayLink) -> None:
        order_book, supervisor = self.order_book, self._supervisor
        assert link.form is not None
        while (
            order_book.busy + order_book.handed < supervisor.ahead
            and (order := order_book.next_order(time=link.form.time)) is not None
        ):
            link.work(self._heeding(self._answered), order, supervisor.carrier.weights(link))

    def _heeding(self, heed: Callable[[RayLink, Any], None]) -> Callable[[RayLink, Any], None]:
        """``heed``, where the answer is no error, and comes from an actor that is still at its post."""

        def heeding(link: RayLink, answer: Any) -> None:
            if self.link is not link:
                return
            if isinstance(answer, ray().exceptions.RayTaskError):
                self._failed(Failure(type(answer.cause).__name__, str(answer.cause), str(answer)))
            elif isinstance(answer, BaseException):
                self._replace(link, _how(answer))
            else:
                heed(link, answer)

        return heeding

    def _begun(self, link: RayLink, answer: Report) -> None:
        self._note(answer)
        if answer.outcome == "failed":
            self._failed(answer.failure)
        else:
            link.form, link.neighbour, link.direct = answer.form, answer.neighbour, answer.direct
            link.process = self.line.process

    def _answered(self, link: RayLink, answer: Report) -> None:
        order_book, supervisor = self.order_book, self._supervisor
        self._note(answer)
        order_book.answered(answer, again=not supervisor.told_to_stop)
        if answer.outcome == "batch":
            assert link.form is not None
            settled = functools.partial(supervisor.put, order_book.settled)
            supervisor.deliveries.put(Parcel(order_book, link.form, answer, settled=settled))
        elif answer.outcome == "failed":
            self._failed(answer.failure)
        elif answer.outcome == "closed" and not order_book.ended:
            logger.info("worker %d ended: the replay buffer was closed", order_book.worker)
            self.line.state = FINISHED
            supervisor.end(order_book)

    def _note(self, answer: Report) -> None:
        self._hear(answer.line)
        if answer.quarantined:
            self._supervisor.note(self.order_book.worker, answer.quarantined)

    def _hear(self, said: tuple[int, bytes]) -> None:
        if self.line.state not in _LAST:  # else it says something older
            self.line.hear(said)

    def _pulsed(self, link: RayLink, said: tuple[int, bytes]) -> None:
        link.pulse_due = time.monotonic() + PULSE_S
        self._hear(said)

    def _wonder(self, link: RayLink) -> None:
        if time.monotonic() - link.since > _PATIENCE_S:
            link.since = time.monotonic()
            logger.warning(
                "worker %d has not begun after %.0f s; is there a node that has what ray_options asks for: %s?",
                *(self.order_book.worker, _PATIENCE_S, self._supervisor.options),
            )

    # ------------------------------------------------------------------ ends
    def dismiss(self) -> None:
        """End the actor, by force, and start no other."""
        if self.link is not None:
            self._bury(self.link)
        self._supervisor.end(self.order_book)

    def _bury(self, link: RayLink) -> None:
        """End the actor, if it is not dead, and settle what it left."""
        self.link = None
        bury([link])
        self.order_book.died(doubt_ends=0.0 if link.direct else time.monotonic() + DOUBT_S)
        self.order_book.settle(time.monotonic())
        self.line.leave(DEAD)

    def _replace(self, link: RayLink, reason: str) -> None:
        """The actor is dead, or hangs: see whether another one may be started."""
        self._bury(link)
        if self._supervisor.failure is None and not self._supervisor.stopping:
            self._supervisor.lost(self.order_book, reason)

    def _failed(self, told: Failure | None) -> None:
        assert told is not None
        self.line.state = FAILED
        self._supervisor.failed(self.order_book.worker, told)


def _how(death: BaseException) -> str:
    """In one line, what Ray says of a death."""
    text = " ".join(str(death).split())
    for mark in ("Worker exit detail: ", "due to an error in its creation task: "):
        text = text.partition(mark)[2] or text
    return f"died: {text.partition('. ')[0][:200]}"
