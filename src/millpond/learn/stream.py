"""Batches sampled ahead of their use, on a thread, so that drawing and copying overlap with learning."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from millpond.core.errors import BufferClosed, Cancelled, DeadlineExceeded, InvalidArgument, NotReady
from millpond.core.roles import CancelEvent, Replay
from millpond.shm.interrupts import uninterrupted

_SLICE_S = 0.1  # a foreign cancel event cannot notify, so it is looked at this often


class SampleStream:
    """Stands in front of a replay and keeps up to ``ahead`` batches ready.

    It has the replay's own ``sample`` and ``update_priority``, so a learner does not notice the difference. A batch is
    drawn when the thread gets to it, not when it is asked for; with ``ahead=0`` there is no thread, each batch is drawn
    in the call that returns it, and the same seed gives the same numbers.

    What the thread meets (a closed buffer, a lost peer) is raised from ``sample``, after the batches that were drawn
    before it, and again from every later call. Batches left over at ``close`` count as sampled.

    Args:
        replay: where batches come from.
        batch_size: items in each of them.
        ahead: how many are kept ready at most.
        device: where the thread moves them; None leaves them as they are.
    """

    def __init__(self, replay: Replay, *, batch_size: int, ahead: int = 2, device: str | None = None) -> None:
        if batch_size < 1 or ahead < 0:
            raise InvalidArgument(f"batch_size must be at least 1 and ahead at least 0, got {batch_size}, {ahead}")
        self._replay = replay
        self._batch_size = batch_size
        self._ahead = ahead
        self._device = device
        self._ready: deque[Any] = deque()
        self._drawn: Any = None  # a batch that could not be moved: the next one to be moved
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @uninterrupted
    def sample(
        self,
        batch_size: int | None = None,
        *,
        wait: bool = True,
        timeout: float | None = None,
        cancel_event: CancelEvent | None = None,
    ) -> Any:
        """The next batch, in the order of drawing. Waits for it at most ``timeout`` seconds.

        Raises:
            InvalidArgument: another batch size than the stream's.
            DeadlineExceeded: no batch within ``timeout`` seconds; with the replay's explanation.
            NotReady: with ``wait=False``, no batch is ready now; with the same.
            Cancelled: ``cancel_event`` is set.
            BufferClosed: the stream or the replay was closed. Whatever else the replay raised comes as it is.
        """
        if batch_size not in (None, self._batch_size):
            raise InvalidArgument(f"this stream draws batches of {self._batch_size}, not of {batch_size}")
        if not self._ahead:
            self._raise_if_closed()
            return self._draw(wait=wait, timeout=timeout, cancel_event=cancel_event)
        return self._take(timeout if wait else 0.0, wait, cancel_event)

    def update_priority(self, index_or_sample: Any, priority: Tensor) -> int:
        """Hand new priorities to the replay; returns how many were applied."""
        return self._replay.update_priority(index_or_sample, priority)

    def explain(self, op: str = "sample", n: int | None = None) -> str:
        """The replay's: why ``sample`` or ``extend`` of n items cannot proceed there now."""
        return self._replay.explain(op, self._batch_size if n is None and op == "sample" else n)

    @property
    def write_count(self) -> int:
        """The replay's."""
        return self._replay.write_count

    def close(self) -> None:
        """Stop the thread and wait for it to end. The replay stays open. Closing twice is fine."""
        with self._changed:
            self._stop.set()
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._ready.clear()

    def __iter__(self) -> Iterator[Any]:
        """Batches until the replay or the stream is closed."""
        while True:
            try:
                yield self.sample()
            except BufferClosed:
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(self, timeout: float | None, wait: bool, cancel_event: CancelEvent | None) -> Any:
        deadline = None if timeout is None else time.monotonic() + timeout
        batch = self._next(deadline, cancel_event)
        if batch is not None:
            return batch
        if not wait:
            raise NotReady(f"no batch of {self._batch_size} is ready: {self.explain()}")
        raise DeadlineExceeded(f"no batch of {self._batch_size} within {timeout:g} s: {self.explain()}")

    def _next(self, deadline: float | None, cancel_event: CancelEvent | None) -> Any:
        """The next batch; None where there is none in time."""
        with self._changed:
            self._raise_if_closed()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="millpond-sample-stream", daemon=True)
                self._thread.start()
            while True:
                if cancel_event is not None and cancel_event.is_set():
                    raise Cancelled("sample: the cancel event was set")
                if self._ready:
                    self._changed.notify_all()
                    return self._ready.popleft()
                self._raise_if_closed()
                if self._failure is not None:
                    raise self._failure
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._changed.wait(left if cancel_event is None else min(_SLICE_S, left or _SLICE_S))

    def _draw(self, *, wait: bool, timeout: float | None, cancel_event: CancelEvent | None) -> Any:
        batch, self._drawn = self._drawn, None
        if batch is None:
            batch = self._replay.sample(self._batch_size, wait=wait, timeout=timeout, cancel_event=cancel_event)
        if self._device is None:
            return batch
        try:
            return batch.to(self._device)
        except BaseException:
            self._drawn = batch
            raise

    def _raise_if_closed(self) -> None:
        if self._stop.is_set():
            raise BufferClosed("this sample stream was closed")

    def _run(self) -> None:
        try:
            while self._wait_for_room():
                batch = self._draw(wait=True, timeout=None, cancel_event=self._stop)
                with self._changed:
                    self._ready.append(batch)
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001  # whatever it is, the caller of `sample` must see it
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _wait_for_room(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._stop.is_set() or len(self._ready) < self._ahead)
        return not self._stop.is_set()
