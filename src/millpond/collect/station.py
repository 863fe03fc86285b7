"""One worker of a ``RayCollector``: the actor that is at its berth, its orders and answers, its death and replacement.

Everything here happens in the one thread of the ``Fleet``.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from millpond.collect.actor import Report
from millpond.collect.berth import Berth, Parcel
from millpond.collect.post import PULSE_S, Post, bury
from millpond.collect.roster import DEAD, FAILED, FINISHED, PAUSED, STARTING, WorkerLine
from millpond.collect.supervision import Failure
from millpond.remote.cluster import ray
from millpond.shm import identity

if TYPE_CHECKING:
    from millpond.collect.fleet import Fleet

logger = logging.getLogger("millpond.collect")
DOUBT_S = 6.0  # an owner of replay notices within 5 s that a client on another host is gone, and forgets its calls
_PATIENCE_S = 30.0  # after which an actor that has not begun is wondered at
_LAST = (FAILED, FINISHED)


class Station:
    """``spec`` is what its actors begin with, ``line`` its line of the roster."""

    def __init__(self, fleet: Fleet, berth: Berth, *, spec: bytes, line: WorkerLine) -> None:
        self.berth = berth
        self.post: Post | None = None
        self._fleet, self._spec, self.line = fleet, spec, line

    def tend(self, pause: int, stopping: bool) -> None:
        """See what there is to be done: replace, feed, pause, or end."""
        berth = self.berth
        if berth.in_doubt:
            berth.settle(time.monotonic())
            return
        post = self.post or self.fill(stopping)
        if post is None:
            return
        if post.form is None:
            self._wonder(post)
            return
        if reason := self._fleet.hung(self):
            self._replace(post, reason)
            return
        if time.monotonic() > post.pulse_due:
            post.pulse_due = math.inf  # until this one is answered
            post.ask(self._heeding(self._pulsed), "pulse")
        if pause == 0 and not stopping:
            self._feed(post)
        if berth.busy:
            return
        if stopping or self._fleet.budget.finished:
            self.line.state = FAILED if self.line.state == FAILED else FINISHED
            self._fleet.end(berth)
        elif pause:
            self.line.state, self.line.paused = PAUSED, pause

    def fill(self, stopping: bool) -> Post | None:
        """Start an actor. None: it is too late for that."""
        fleet, berth = self._fleet, self.berth
        if stopping:
            fleet.end(berth)
            return None
        self.line.leave(STARTING)
        post = self.post = fleet.hire()
        details = (self.line.told(), berth.begin(), *fleet.surroundings, identity.me())
        post.begin(self._heeding(self._begun), self._spec, *details)
        self.mind()
        return post

    def mind(self) -> None:
        """Tell the actor whether it is to pause, or to stop."""
        if self.post is not None:
            self.post.mind(*self._fleet.next_word())

    def ask_state(self) -> None:
        """Ask for what is collected, and not handed over."""
        if self.post is not None:
            states = self._fleet.states
            self.post.ask(self._heeding(lambda _, state: states.put((self.berth.worker, state))), "state")

    # ------------------------------------------------------------------ orders and answers
    def _feed(self, post: Post) -> None:
        berth, fleet = self.berth, self._fleet
        assert post.form is not None
        while berth.busy + berth.handed < fleet.ahead and (order := berth.next_order(time=post.form.time)) is not None:
            post.work(self._heeding(self._answered), order, fleet.carrier.weights(post))

    def _heeding(self, heed: Callable[[Post, Any], None]) -> Callable[[Post, Any], None]:
        """``heed``, where the answer is no error, and comes from an actor that is still at its post."""

        def heeding(post: Post, answer: Any) -> None:
            if self.post is not post:
                return
            if isinstance(answer, ray().exceptions.RayTaskError):
                self._failed(Failure(type(answer.cause).__name__, str(answer.cause), str(answer)))
            elif isinstance(answer, BaseException):
                self._replace(post, _how(answer))
            else:
                heed(post, answer)

        return heeding

    def _begun(self, post: Post, answer: Report) -> None:
        self._note(answer)
        if answer.outcome == "failed":
            self._failed(answer.failure)
        else:
            post.form, post.neighbour, post.direct = answer.form, answer.neighbour, answer.direct
            post.process = self.line.process

    def _answered(self, post: Post, answer: Report) -> None:
        berth, fleet = self.berth, self._fleet
        self._note(answer)
        berth.answered(answer, again=not fleet.told_to_stop)
        if answer.outcome == "batch":
            assert post.form is not None
            settled = functools.partial(fleet.put, berth.settled)
            fleet.deliveries.put(Parcel(berth, post.form, answer, settled=settled))
        elif answer.outcome == "failed":
            self._failed(answer.failure)
        elif answer.outcome == "closed" and not berth.ended:
            logger.info("worker %d ended: the replay buffer was closed", berth.worker)
            self.line.state = FINISHED
            fleet.end(berth)

    def _note(self, answer: Report) -> None:
        self._hear(answer.line)
        if answer.quarantined:
            self._fleet.note(self.berth.worker, answer.quarantined)

    def _hear(self, said: tuple[int, bytes]) -> None:
        if self.line.state not in _LAST:  # else it says something older
            self.line.hear(said)

    def _pulsed(self, post: Post, said: tuple[int, bytes]) -> None:
        post.pulse_due = time.monotonic() + PULSE_S
        self._hear(said)

    def _wonder(self, post: Post) -> None:
        if time.monotonic() - post.since > _PATIENCE_S:
            post.since = time.monotonic()
            logger.warning(
                "worker %d has not begun after %.0f s; is there a node that has what ray_options asks for: %s?",
                *(self.berth.worker, _PATIENCE_S, self._fleet.options),
            )

    # ------------------------------------------------------------------ ends
    def dismiss(self) -> None:
        """End the actor, by force, and start no other."""
        if self.post is not None:
            self._bury(self.post)
        self._fleet.end(self.berth)

    def _bury(self, post: Post) -> None:
        """End the actor, if it is not dead, and settle what it left."""
        self.post = None
        bury([post])
        self.berth.died(doubt_ends=0.0 if post.direct else time.monotonic() + DOUBT_S)
        self.berth.settle(time.monotonic())
        self.line.leave(DEAD)

    def _replace(self, post: Post, reason: str) -> None:
        """The actor is dead, or hangs: see whether another one may be started."""
        self._bury(post)
        if self._fleet.failure is None and not self._fleet.stopping:
            self._fleet.lost(self.berth, reason)

    def _failed(self, told: Failure | None) -> None:
        assert told is not None
        self.line.state = FAILED
        self._fleet.failed(self.berth.worker, told)


def _how(death: BaseException) -> str:
    """In one line, what Ray says of a death."""
    text = " ".join(str(death).split())
    for mark in ("Worker exit detail: ", "due to an error in its creation task: "):
        text = text.partition(mark)[2] or text
    return f"died: {text.partition('. ')[0][:200]}"
