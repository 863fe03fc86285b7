"""One actor of a ``RayCollector`` as its collector sees it: calls, and answers that come in the collector's thread."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from millpond.collect.packing import Format
from millpond.core.errors import WorkerFailed
from millpond.remote.cluster import ray
from millpond.shm import identity
from millpond.weights import WeightBoard

CONTROL = "control"  # calls of this group are answered while a batch is in the making
PULSE_S = 0.5
KILL_S = 5.0
Heed = Callable[["RayLink", Any], None]


class RayLink:
    """The actor that has these orders now, and what is known of it.

    ``heed(post, answer)`` is put into the queue ``put`` when there is an answer, or an error instead.
    """

    def __init__(self, actor: Any, put: Callable[[Callable[[], None]], None]) -> None:
        self._actor, self._put = actor, put
        self.form: Format | None = None  # None: it has not begun
        self.neighbour = self.direct = False  # see Report
        self.process = (0, 0)  # (pid, start time), once it has begun
        self.since = time.monotonic()  # when it was started
        self.pulse_due = 0.0  # when it is next asked for a sign of life
        self._answers: deque[Any] = deque()  # to the orders under way: Ray forgets what nobody holds

    def begin(self, heed: Heed, *details: Any) -> None:
        """See ``CollectActor``, as for all that follows."""
        self._hear(heed, self._actor.begin.remote(*details))

    def work(self, heed: Heed, order: Any, weights: Any) -> None:
        answer = self._actor.work.remote(order, weights)
        self._answers.append(answer)

        def done(link: RayLink, said: Any) -> None:
            self._answers.popleft()  # they come in their order
            heed(link, said)

        self._hear(done, answer)

    def mind(self, *what: int) -> None:
        self._control("mind").remote(*what)

    def ask(self, heed: Heed, what: str) -> None:
        """``pulse`` or ``state``."""
        self._hear(heed, self._control(what).remote())

    def _control(self, what: str) -> Any:
        return getattr(self._actor, what).options(concurrency_group=CONTROL)

    def finish(self) -> Any:
        """What to wait for."""
        return self._actor.finish.remote()

    def kill(self) -> None:
        with contextlib.suppress(ray().exceptions.RayError, ValueError):
            ray().kill(self._actor)

    def _hear(self, heed: Heed, reference: Any) -> None:
        def came(future: Any) -> None:
            error = future.exception()
            self._put(functools.partial(heed, self, future.result() if error is None else error))

        reference.future().add_done_callback(came)


class Carrier:
    """The weights as an object in Ray's store, one for each version that somebody needs."""

    def __init__(self, board: WeightBoard | None) -> None:
        self._board, self._version = board, -1
        self._latest: Any = None

    def weights(self, link: RayLink) -> Any:
        """What goes along with an order. Nothing to neighbours, who pull from the board."""
        if self._board is None or link.neighbour:
            return None
        if self._board.version != self._version:
            snapshot = self._board.snapshot()
            self._latest, self._version = ray().put(snapshot), snapshot.version
        return self._latest


def bury(posts: Sequence[RayLink]) -> None:
    """Kill these actors, and see to it that their processes are dead where this can be seen.

    Raises:
        WorkerFailed: one that does not end.
    """
    for link in posts:
        link.kill()
    end = time.monotonic() + KILL_S
    for link in posts:
        while link.neighbour and identity.alive(*link.process):
            left = end - time.monotonic()
            if left < 0:
                raise WorkerFailed(f"an actor (process {link.process[0]}) does not end after SIGKILL")
            if left < KILL_S - 1:  # Ray has had its chance
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(link.process[0], signal.SIGKILL)
            time.sleep(0.01)
