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
from millpond.collect.actor_handle import ActorHandle
from millpond.collect.orders import OrderBook
from millpond.collect.ray_link import CONTROL, KILL_S, Carrier, RayLink, bury
from millpond.collect.supervision import Supervision, Watch, receipts_of
from millpond.collect.worker import WorkerSpec
from millpond.collect.worker_status import WorkerTable
from millpond.core.errors import InvalidArgument
from millpond.remote.cluster import ray

logger = logging.getLogger("millpond.collect")
_AHEAD = 2  # orders under way, and batches that nobody has taken
_TICK_S = 0.1  # how often what cannot notify is looked at
_CLOSE_S = 2.0  # how long environments may take to be closed


class RaySupervisor(Supervision):
    """Runs one ``CollectActor`` per spec until ``stop``.

    ``spec`` says what all of them do, ``specs`` are the pickled ones. ``options`` are Ray's. As ``Supervisor`` else.

    Raises:
        TypeError, ValueError: Ray does not take these options.
    """

    handles: list[OrderBook]

    def __init__(
        self,
        spec: WorkerSpec,
        specs: Sequence[bytes],
        *,
        lines: Sequence[int],
        worker_table: WorkerTable,
        options: Mapping[str, Any],
        max_restarts: int,
        watch: Watch,
    ) -> None:
        super().__init__(worker_table=worker_table, max_restarts=max_restarts, watch=watch)
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
        self.handles = [
            OrderBook(i, spec, line=line, budget=spec.budget, receipt=receipt) for i, line in enumerate(lines)
        ]
        self._actor_handles = [
            ActorHandle(self, order_book, spec=specs[order_book.worker], line=worker_table.lines[order_book.worker])
            for order_book in self.handles
        ]

    def order(self, worker: int, frames: int, first: int, *, number: int) -> None:
        """Tell a worker to collect a batch, whose first frame is number ``first`` of all; repeated to its successor if
        it dies over it. Twice under one number is once."""
        self.put(functools.partial(self.handles[worker].want, frames, first, number=number))

    def ask(self, worker: int) -> bool:
        """Ask a worker for its state, which will appear in ``states``. False: nobody is there."""
        actor_handle = self._actor_handles[worker]
        if actor_handle.order_book.ended or actor_handle.link is None:
            return False
        self.put(actor_handle.ask_state)
        return True

    def dismiss(self, worker: int) -> None:
        """End a worker, by force, and put nobody into its place. What it had reserved is given back."""
        self.put(self._actor_handles[worker].dismiss)

    def stop(self, grace_s: float) -> None:
        """End all workers: those that do not end by themselves within ``grace_s`` seconds are killed."""
        self._worker_table.stop()
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
                for actor_handle in self._actor_handles:
                    if not actor_handle.order_book.ended or actor_handle.order_book.in_doubt:
                        actor_handle.tend(*self._said[:2])
                self._happen()
        except BaseException as problem:  # noqa: BLE001  # a thread's exception must reach somebody
            self.fail(f"supervising the actors failed: {problem!r}", cause=problem)
        finally:
            try:
                self._dismiss()
            except BaseException as problem:  # noqa: BLE001  # Ray may have been shut down meanwhile
                self.fail(f"dismissing the actors failed: {problem!r}", cause=problem)
            for order_book in self.handles:
                self.end(order_book)

    def _speak(self) -> None:
        """Tell the actors where the collector has said that they are to pause, to go on, or to stop."""
        say = (self._worker_table.pausing, self._worker_table.stopping, self._worker_table.hurrying)
        if say != self._said:
            self._said = say
            for actor_handle in self._actor_handles:
                actor_handle.mind()

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
        there = [
            (actor_handle.order_book, actor_handle.link)
            for actor_handle in self._actor_handles
            if actor_handle.link is not None
        ]
        if there and ray().is_initialized():
            done = [link.finish() for order_book, link in there if link.form is not None and not order_book.busy]
            with contextlib.suppress(ray().exceptions.RayError):
                ray().wait(done, num_returns=len(done), timeout=_CLOSE_S) if done else None
            bury([link for _, link in there])
        for actor_handle in self._actor_handles:
            actor_handle.link = None
            actor_handle.order_book.died(doubt_ends=0.0)
            with contextlib.suppress(InvalidArgument):  # said before
                actor_handle.order_book.settle(0.0)
            actor_handle.order_book.give_back()

    # ------------------------------------------------------------------ for the actor handles
    def hire(self) -> RayLink:
        """A new actor."""
        return RayLink(self._class.remote(), self.put)

    def next_word(self) -> tuple[int, int, bool, bool]:
        """What an actor is to be told: a number that rises, whether to pause, to stop, to hurry."""
        self._word += 1
        return (self._word, *self._said)

    def hung(self, actor_handle: ActorHandle) -> str | None:
        """What is wrong with a worker that hangs."""
        return self._watch.look(actor_handle.order_book.worker, actor_handle.line)

    @property
    def told_to_stop(self) -> bool:
        """Were the actors told to stop?"""
        return self._said[1]
