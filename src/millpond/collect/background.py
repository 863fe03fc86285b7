"""A collector's loop in a thread of its own: ``start``, ``pause``, ``resume`` without worker processes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from millpond.collect.batch_writer import BatchWriter
from millpond.collect.budget import FrameBudget
from millpond.collect.thread import Runner
from millpond.core.errors import BufferClosed, DeadlineExceeded, InvalidArgument, WorkerFailed
from millpond.core.roles import CancelEvent

logger = logging.getLogger("millpond.collect")
_SLICE_S = 0.1
_STOP_S = 9.0  # an environment that hangs cannot be killed in a thread; nobody waits for it longer


class Background:
    """Writes the batches of a batch writer into ``replay`` until all is collected, the replay is closed, or ``stop``.

    ``next_batch`` makes the next batch; ``written`` is told when one was offered. It is itself the cancel event of the
    writes, and a worker's line says nothing of it: the thread is part of its collector.
    """

    def __init__(
        self,
        batch_writer: BatchWriter,
        replay: Any,
        *,
        budget: FrameBudget,
        next_batch: Callable[[], object | None],
        written: Callable[[], None],
    ) -> None:
        self._batch_writer, self._replay, self._next_batch, self._written = batch_writer, replay, next_batch, written
        self._budget = budget
        self._changed = threading.Condition()
        self.stopping = self._pausing = self._idle = False
        self.ended = False
        self.failure: BaseException | None = None
        self._thread = Runner(self._run)

    def start(self) -> None:
        """Begin, the first time."""
        self._thread.start()

    def is_set(self) -> bool:
        """Waits are to be cut off: to stop, or to pause."""
        return self.stopping or self._pausing

    def _run(self) -> None:
        try:
            while self._may_go_on() and self._go_on():
                pass
        except BufferClosed:
            logger.info("the collection ended: the replay buffer was closed")
        except BaseException as problem:  # noqa: BLE001  # `check` raises it where somebody can catch it
            self.failure = problem
        finally:
            with self._changed:
                self.ended = True
                self._changed.notify_all()

    def _may_go_on(self) -> bool:
        with self._changed:
            while self._pausing and not self.stopping:
                self._idle = True
                self._changed.notify_all()
                self._changed.wait()
            self._idle = False
            return not self.stopping

    def _go_on(self) -> bool:
        """One batch. False: everything is collected."""
        budget = self._budget
        if self._next_batch() is not None:
            self._batch_writer.offer(self._replay, cancel_event=self, stopping=lambda: self.stopping)
            self._written()
        elif not self.stopping:  # all is reserved, but somebody may give frames back
            budget.wait_until(lambda: budget.finished or bool(budget.remaining), timeout=_SLICE_S)
        return not budget.finished

    def check(self) -> None:
        """Raises WorkerFailed, or InvalidArgument, caused by what was raised, if anything was."""
        if isinstance(self.failure, InvalidArgument):  # it says all that there is to say
            raise type(self.failure)(str(self.failure)) from self.failure
        if self.failure is not None:
            raise WorkerFailed(f"collecting in the background failed: {self.failure!r}") from self.failure

    def pause(self, timeout: float | None) -> None:
        """Returns when the batch is done, and no other is begun. Raises DeadlineExceeded, WorkerFailed."""
        with self._changed:
            self._pausing = True
            if not self._changed.wait_for(lambda: self._idle or self.ended, timeout):
                raise DeadlineExceeded(f"the collector was not done with its batch after {timeout} s")
        self.check()

    def resume(self) -> None:
        """Go on."""
        with self._changed:
            self._pausing = False
            self._changed.notify_all()

    def wait(self, timeout: float | None, cancel_event: CancelEvent | None) -> bool:
        """Wait for the end. False: not within ``timeout`` seconds. Raises WorkerFailed, Cancelled."""
        ended = self._budget.wait_until(lambda: self.ended, timeout=timeout, cancel_event=cancel_event)
        self.check()
        return ended

    def stop(self) -> bool:
        """End it. False: the environment does not return from its step."""
        with self._changed:
            self.stopping = True
            self._changed.notify_all()
        self._thread.join(_STOP_S)
        return not self._thread.is_alive()
