"""The actors of a ``RayCollector``, looked after by one thread in its process.

All frames are reserved and counted here: an actor gets an order for frames that are reserved already, and its answer
says what came of them. So nobody elsewhere needs the budget. Two orders are under way at a time, so that an actor need
not wait for the next. Of one that died the receipts in the replay tell which of its orders were written.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import pickle
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from millpond.collect.actor import CollectActor, Home
from millpond.collect.berth import Berth
from millpond.collect.post import CONTROL, KILL_S, Carrier, Post, bury
from millpond.collect.roster import Roster
from millpond.collect.station import Station
from millpond.collect.supervision import Supervision, Watch, receipts_of
from millpond.collect.workers import WorkerSpec
from millpond.core.errors import InvalidArgument
from millpond.remote.cluster import ray

logger = logging.getLogger("millpond.collect")
_AHEAD = 2  # orders under way, and batches that nobody has taken
_TICK_S = 0.1  # how often what cannot notify is looked at
_CLOSE_S = 2.0  # how long environments may take to be closed


class Fleet(Supervision):
    """Runs one ``CollectActor`` per spec until ``stop``.

    ``spec`` says what all of them do, ``specs`` are the pickled ones. ``options`` are Ray's. As ``Supervisor`` else.

    Raises:
        TypeError, ValueError: Ray does not take these options.
    """

    seats: list[Berth]

    def __init__(
        self,
        spec: WorkerSpec,
        specs: Sequence[bytes],
        *,
        lines: Sequence[int],
        roster: Roster,
        options: Mapping[str, Any],
        max_restarts: int,
        watch: Watch,
    ) -> None:
        super().__init__(roster=roster, max_restarts=max_restarts, watch=watch)
        self.budget, self.options = spec.budget, dict(options)
        self.carrier = Carrier(spec.weights)
        self.surroundings = (None if spec.weights is None else pickle.dumps(spec.weights), Home.here())
        flow = getattr(spec.replay, "flow", None)
        dropping = flow is not None and flow.admission == "drop_newest"
        self.ahead = 1 if dropping else _AHEAD  # a receipt tells what was written, not what was dropped before it
        self._class = ray().remote(concurrency_groups={CONTROL: 1})(CollectActor).options(**options)
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.put = self._events.put
        self._word, self._said = 0, (0, False, False)  # what the actors were told: to pause, to stop, to hurry
        receipt = receipts_of(spec.replay)
        self.seats = [Berth(i, spec, line=line, budget=spec.budget, receipt=receipt) for i, line in enumerate(lines)]
        self._stations = [
            Station(self, berth, spec=specs[berth.worker], line=roster.lines[berth.worker]) for berth in self.seats
        ]

    def order(self, worker: int, frames: int, first: int, *, number: int) -> None:
        """Tell a worker to collect a batch, whose first frame is number ``first`` of all; repeated to its successor if
        it dies over it. Twice under one number is once."""
        self.put(functools.partial(self.seats[worker].want, frames, first, number=number))

    def ask(self, worker: int) -> bool:
        """Ask a worker for its state, which will appear in ``states``. False: nobody is there."""
        station = self._stations[worker]
        if station.berth.ended or station.post is None:
            return False
        self.put(station.ask_state)
        return True

    def dismiss(self, worker: int) -> None:
        """End a worker, by force, and put nobody into its place. What it had reserved is given back."""
        self.put(self._stations[worker].dismiss)

    def stop(self, grace_s: float) -> None:
        """End all workers: those that do not end by themselves within ``grace_s`` seconds are killed."""
        self._roster.stop()
        if threading.current_thread() is self._thread or self._thread.ident is None:
            self._stopping.set()
            return
        self.put(None)
        with self.changed:
            self.changed.wait_for(lambda: self.ended, timeout=grace_s)
        self._stopping.set()
        self.put(None)
        self._thread.join(_CLOSE_S + KILL_S + 1)
        if self._thread.is_alive():
            logger.warning("an actor does not end; Ray was told to kill it")

    # ------------------------------------------------------------------ the thread
    def _run(self) -> None:
        try:
            while not self._stopping.is_set() and not self.ended:
                self._speak()
                for station in self._stations:
                    if not station.berth.ended or station.berth.in_doubt:
                        station.tend(*self._said[:2])
                self._happen()
        except BaseException as problem:  # noqa: BLE001  # a thread's exception must reach somebody
            self.fail(f"supervising the actors failed: {problem!r}", cause=problem)
        finally:
            try:
                self._dismiss()
            except BaseException as problem:  # noqa: BLE001  # Ray may have been shut down meanwhile
                self.fail(f"dismissing the actors failed: {problem!r}", cause=problem)
            for berth in self.seats:
                self.end(berth)

    def _speak(self) -> None:
        """Tell the actors where the collector has said that they are to pause, to go on, or to stop."""
        say = (self._roster.pausing, self._roster.stopping, self._roster.hurrying)
        if say != self._said:
            self._said = say
            for station in self._stations:
                station.mind()

    def _happen(self) -> None:
        """Wait until something happens, and deal with all that has."""
        with contextlib.suppress(queue.Empty):
            event = self._events.get(timeout=_TICK_S)
            while True:
                if event is not None:
                    event()
                event = self._events.get_nowait()

    def _dismiss(self) -> None:
        """Let the environments be closed, end the actors, and give back what nobody will collect any more."""
        there = [(station.berth, station.post) for station in self._stations if station.post is not None]
        if there and ray().is_initialized():
            done = [post.finish() for berth, post in there if post.form is not None and not berth.busy]
            with contextlib.suppress(ray().exceptions.RayError):
                ray().wait(done, num_returns=len(done), timeout=_CLOSE_S) if done else None
            bury([post for _, post in there])
        for station in self._stations:
            station.post = None
            station.berth.died(doubt_ends=0.0)
            with contextlib.suppress(InvalidArgument):  # said before
                station.berth.settle(0.0)
            station.berth.give_back()

    # ------------------------------------------------------------------ for the stations
    def hire(self) -> Post:
        """A new actor."""
        return Post(self._class.remote(), self.put)

    def next_word(self) -> tuple[int, int, bool, bool]:
        """What an actor is to be told: a number that rises, whether to pause, to stop, to hurry."""
        self._word += 1
        return (self._word, *self._said)

    def hung(self, station: Station) -> str | None:
        """What is wrong with a worker that hangs."""
        return self._watch.look(station.berth.worker, station.line)

    @property
    def told_to_stop(self) -> bool:
        """Were the actors told to stop?"""
        return self._said[1]
