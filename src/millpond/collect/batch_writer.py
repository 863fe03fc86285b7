"""One worker's share of a run: reserve, pull weights, roll out, hand over, count."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

from tensordict import TensorDict

from millpond.collect.budget import Span
from millpond.collect.rollout import Rollout
from millpond.core.errors import Cancelled, DeadlineExceeded, InvalidArgument
from millpond.core.roles import CancelEvent
from millpond.weights import Weights


class Account(Protocol):
    """Where frames are reserved and counted: the ``FrameBudget``, or what stands for it far from it."""

    def reserve_span(self, frames: int, *, worker: int, multiple_of: int) -> Span: ...

    def intend(self, worker: int, *, frames: int, receipt: int) -> None: ...

    def commit(self, worker: int, *, frames: int) -> None: ...

    def commits_by(self, worker: int) -> int: ...

    def refund(self, worker: int, *, frames: int | None = None) -> object: ...


class BatchWriter:
    """Collects batches of ``frames_per_batch`` frames on line ``line`` of a budget, and counts them exactly once.

    ``batch`` gives one and holds its reservation; then comes ``write``, or ``settle``, or ``abandon``. Until it is
    counted its frames stay in the rollout: after a cancelled write the next ``batch`` returns it again. After any
    exception, such as Ctrl-C, the next call goes on where that one was.
    """

    def __init__(
        self,
        rollout: Rollout,
        budget: Account,
        *,
        line: int,
        frames_per_batch: int,
        random_frames: int = 0,
        weights: Weights | None = None,
    ) -> None:
        self.rollout, self.budget, self.line = rollout, budget, line
        self.frames_per_batch, self.random_frames, self.weights = frames_per_batch, random_frames, weights
        self.granted = 0  # frames reserved for the batch that is in the making, or made
        self.dropped = 0  # frames that the buffer refused under "drop_newest"
        self._first = 0  # the number of the batch's first frame, of all that were ever reserved
        self._number = 0  # of the receipt for this batch, where somebody else numbers them
        self._made: TensorDict | None = None
        self._receipt: int | None = None  # the last number that we left in the buffer
        self._intended = 0  # the number under which the batch is being written
        self._reserving = self._pulling = self._dropping = False  # an exception leaves it so; the next call goes on

    def batch(self, stopped: Callable[[], bool]) -> TensorDict | None:
        """The next batch, in memory that the next call uses again.

        None: every frame is reserved by somebody (``granted`` is 0), or ``stopped()``; then a later call goes on.
        """
        if self._dropping:
            self._drop()
        if self._made is not None:
            return self._made
        if not self.granted and not self._reserve():
            return None
        if self._pulling:
            self._pull()
        rollout, first = self.rollout, self._first
        if rollout.collect(self.granted, first=first, random_frames=self.random_frames, stopped=stopped):
            self._made = self.rollout.rows.first(self.granted)
        return self._made

    def _reserve(self) -> bool:
        if self._reserving:
            self.budget.refund(self.line)
        self._reserving = True
        span = self.budget.reserve_span(
            self.frames_per_batch, worker=self.line, multiple_of=self.rollout.rows.time or 1
        )
        self.granted, self._reserving = span.frames, False
        self.begin(span.frames, first=span.first)
        return span.frames > 0

    def begin(self, granted: int, *, first: int, receipt: int = 0) -> None:
        """The next batch has ``granted`` frames, reserved by somebody for this line, the first of which is number
        ``first`` of all; weights are pulled now.

        ``receipt`` is the number under which it is to be written, from one who knows the last; 0: one more than that.
        """
        self.granted, self._first, self._number = granted, first, receipt
        if granted:
            self._pull()

    def _pull(self) -> None:
        if self.weights is not None:
            self._pulling = True
            self.rollout.version = self.weights.pull(self.rollout.policy)
        self._pulling = False

    def write(self, replay: Any, *, timeout: float | None = None, cancel_event: CancelEvent | None = None) -> int:
        """Write the batch, and count it. How many frames were written: 0 where the buffer drops new ones.

        A kill at any instant leaves the batch written and countable, or neither: see ``budget``.

        Raises:
            InvalidArgument: somebody else writes to this buffer under the number of this line.
            MillpondError: what ``extend`` raises; nothing was written or counted then.
        """
        frames, batch = self.granted, self._made
        assert batch is not None
        if self._intended and replay.receipt(self.line) == self._intended:  # an exception came after the write
            self._written(self._intended)
            return frames
        how: dict[str, Any] = {"timeout": timeout, "cancel_event": cancel_event}
        number = self._intended = self._intend(replay, frames)
        if number:
            how["receipt"] = (self.line, number)
        try:
            slots = replay.extend(batch, **how)
            if slots.numel() == 0:
                self._refused(frames)
                return 0
            self._written(number)
        except BaseException:
            if self._intended and replay.receipt(self.line) == number:  # such as Ctrl-C, just after the write
                self._written(number)
            raise
        return frames

    def _intend(self, replay: Any, frames: int) -> int:
        """Note what is about to be written; the number of its receipt, 0 where the buffer gives none."""
        if self._number or not hasattr(replay, "receipt"):
            return self._number
        last: int = replay.receipt(self.line)
        if self._receipt not in (None, last):
            raise InvalidArgument(f"another collector writes to this buffer on line {self.line}; share one FrameBudget")
        self.budget.intend(self.line, frames=frames, receipt=last + 1)
        return last + 1

    def offer(self, replay: Any, *, cancel_event: CancelEvent, stopping: Callable[[], bool]) -> int | None:
        """Write the batch, unless ``cancel_event`` cuts that off; then None, and the batch is kept.

        An event that is set in order to pause does not keep out what there is room for; one that is set to stop does.
        """
        with contextlib.suppress(Cancelled):
            return self.write(replay, cancel_event=cancel_event)
        if not stopping():
            with contextlib.suppress(DeadlineExceeded):
                return self.write(replay, timeout=0.0)
        return None

    def _written(self, receipt: int) -> None:
        self._receipt = receipt
        self.settle()

    def _refused(self, frames: int) -> None:
        self.budget.refund(self.line)
        self.granted, self._made, self._intended, self._dropping = 0, None, 0, True
        self.dropped += frames
        self._drop()

    def settle(self) -> None:
        """The batch was handed over: count it."""
        before = self.budget.commits_by(self.line)
        try:
            self.budget.commit(self.line, frames=self.granted)
            self.granted, self._made, self._intended, self._dropping = 0, None, 0, True
        except BaseException:  # such as Ctrl-C, which may come just when it was counted
            if self.budget.commits_by(self.line) != before:
                self.granted, self._made, self._intended, self._dropping = 0, None, 0, True
            raise
        self._drop()

    def handed_over(self) -> None:
        """The batch was handed over, to somebody who counts it."""
        self.granted, self._made, self._intended, self._dropping = 0, None, 0, True
        self._drop()

    def _drop(self) -> None:
        self.rollout.rows.drop()
        self._dropping = False

    def rest(self) -> None:
        """Give back what is reserved for a batch that is not complete; what is there of it is of the next one."""
        if self._made is None:
            self.abandon()

    def abandon(self) -> None:
        """Give back what is reserved. What was collected stays in the rollout."""
        if self.granted or self._reserving:
            self.budget.refund(self.line)
        self.granted, self._made, self._reserving = 0, None, False
