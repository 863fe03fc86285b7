"""Exact accounting of frames among processes that may be killed at any instant.

A frame is *reserved* before it is collected and *committed* once it is written. ``collected + reserved`` never exceeds
the total, so no write can go past it, including those still in flight; what a dead worker had reserved goes back.

Between the write of a batch and its commit lies an instant in which a kill would leave a written batch uncounted.
It is closed with a receipt: the worker first notes here what it is about to write, under a number that rises
(``intend``); the write then stores that number in the buffer, atomically with the rows; and ``reclaim``, given the last
number that the buffer holds for this worker, knows whether the batch was written and counts it exactly if it was.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from millpond.core.errors import BufferClosed, Cancelled, InvalidArgument, InvalidType, Unsatisfiable
from millpond.core.roles import CancelEvent
from millpond.replay.waiting import check_timeout
from millpond.shm import identity
from millpond.shm.control import ControlBlock
from millpond.shm.mapped import allocate, make_directory, map_file, remove_directory

WORKERS = 64
_TOTAL, _BASE, _LINES = 0, 1, 2  # words; the lines of the workers follow
_RESERVED, _COLLECTED, _COMMITS, _RECEIPT, _INTENDED, _PID, _STARTED = range(7)  # words of one line
_LINE_WORDS = 7
_WORDS = _LINES + WORKERS * _LINE_WORDS
_UNLIMITED = 2**64 - 1
_SLICE_S = 0.5
Answer = TypeVar("Answer")


class Span(NamedTuple):
    """A reservation: how many frames, and how many had been collected or reserved before it."""

    first: int
    frames: int


class FrameBudget:
    """``total_frames`` frames to be shared out among up to 64 workers, in any processes of this host. -1: no limit.

    Pickling a budget pickles its path; unpickling attaches to it. The process that made it removes it: by ``close()``,
    when the object is collected, or at its end. ``collected`` is what an earlier part of the run has collected.

    Raises:
        InvalidArgument: ``total_frames`` is negative and not -1, or ``collected`` exceeds it.
    """

    _remover: weakref.finalize[Any, Any] | None = None  # only where the budget was made

    def __init__(self, total_frames: int = -1, *, collected: int = 0) -> None:
        total = _whole("total_frames", total_frames, least=-1)
        base = _whole("collected", collected)
        if 0 <= total < base:
            raise InvalidArgument(f"{base} frames were collected already, more than total_frames={total}")
        path = make_directory("budget")
        self._remover = weakref.finalize(self, _remove, path, os.getpid())
        allocate(path / "control", ControlBlock.size_needed(_WORDS, 1))
        self._attach(path, create=True)

        def begin(state: list[int]) -> None:
            state[_TOTAL], state[_BASE] = _UNLIMITED if total < 0 else total, base

        self._change(begin)

    def _attach(self, path: Path, *, create: bool) -> None:
        self._path = path
        memory = map_file(path / "control")
        self._control: ControlBlock | None = ControlBlock(
            memory, words=_WORDS, events=1, create=create, lock_path=path / "lock"
        )

    def _block(self) -> ControlBlock:
        block = self._control
        if block is None:
            raise BufferClosed(f"this frame budget ({self._path.name}) was closed")
        return block

    def __reduce__(self) -> tuple[Any, ...]:
        self._block()
        return _attached, (os.fspath(self._path),)

    def _change(self, change: Callable[[list[int]], Answer]) -> Answer:
        """Change the state under the lock, and commit it: all or nothing.

        Not by ``with``: an exception such as Ctrl-C on its way in or out would leave the lock taken.
        """
        block = self._block()
        try:
            state = block.load(block.mutex.lock())
            answer = change(state)
            block.commit(state, block.events[0])
            return answer
        finally:
            block.mutex.unlock()

    # ------------------------------------------------------------------ the lines of the workers
    def claim(self, workers: int, *, avoid: Collection[int] = ()) -> list[int]:
        """Numbers of ``workers`` free lines, none of them in ``avoid``, taken for this process.

        Raises:
            Unsatisfiable: fewer are free; a budget has 64.
        """

        def claim(state: list[int]) -> list[int]:
            free = [i for i in range(WORKERS) if i not in avoid and state[_line(i) + _PID] == 0]
            if len(free) < _whole("workers", workers, least=1):
                raise Unsatisfiable(f"{workers} workers asked for, {len(free)} of the {WORKERS} lines are free")
            for i in free[:workers]:
                state[_line(i) + _PID], state[_line(i) + _STARTED] = identity.me()
            return free[:workers]

        return self._change(claim)

    def release(self, worker: int) -> None:
        """Give a line up, with what is reserved on it. Its collected frames stay counted."""
        at = _line(worker)

        def release(state: list[int]) -> None:
            state[_BASE] += state[at + _COLLECTED]
            state[at : at + _LINE_WORDS] = [0] * _LINE_WORDS

        self._change(release)

    # ------------------------------------------------------------------ counting
    def reserve(self, frames: int, *, worker: int = 0, multiple_of: int = 1) -> int:
        """Reserve up to ``frames`` for ``worker``; how many were granted: less near the end, and then 0.

        ``multiple_of`` rounds what is granted down, for items of several frames.

        Raises:
            InvalidArgument: ``frames`` is below 1, or another live process has a reservation on this line.
        """
        return self.reserve_span(frames, worker=worker, multiple_of=multiple_of).frames

    def reserve_span(self, frames: int, *, worker: int = 0, multiple_of: int = 1) -> Span:
        """As ``reserve``; the answer also says where the reservation stands among all frames."""
        at, wanted = _line(worker), _whole("frames", frames, least=1)

        def reserve(state: list[int]) -> Span:
            if state[at + _RESERVED]:
                _refuse_stranger(state, at, worker)
            taken = _collected(state) + _reserved(state)
            granted = wanted if state[_TOTAL] == _UNLIMITED else min(wanted, max(0, state[_TOTAL] - taken))
            granted -= granted % multiple_of
            if granted:
                state[at + _PID], state[at + _STARTED] = identity.me()
                state[at + _RESERVED] += granted
            return Span(taken, granted)

        return self._change(reserve)

    def intend(self, worker: int, *, frames: int, receipt: int) -> None:
        """Note that ``worker`` is about to write ``frames`` of its reservation, under this number of a receipt."""
        at = _line(worker)

        def intend(state: list[int]) -> None:
            _refuse_excess(state, at, worker, frames)
            state[at + _RECEIPT], state[at + _INTENDED] = receipt, frames

        self._change(intend)

    def commit(self, worker: int = 0, *, frames: int) -> None:
        """Count ``frames`` of the worker's reservation as collected.

        Raises:
            InvalidArgument: the worker has reserved fewer.
        """
        at = _line(worker)

        def commit(state: list[int]) -> None:
            _refuse_excess(state, at, worker, frames)
            state[at + _RESERVED] -= frames
            state[at + _COLLECTED] += frames
            state[at + _COMMITS] += 1
            state[at + _INTENDED] = 0

        self._change(commit)

    def refund(self, worker: int = 0, *, frames: int | None = None) -> int:
        """Give ``frames`` of the worker's reservation (default: all of it) back; how many that were."""
        at = _line(worker)

        def refund(state: list[int]) -> int:
            returned = state[at + _RESERVED] if frames is None else frames
            _refuse_excess(state, at, worker, returned)
            state[at + _RESERVED] -= returned
            state[at + _INTENDED] = 0
            return returned

        return self._change(refund)

    def reclaim(self, worker: int, *, receipt: int | None = None) -> int:
        """After a worker's death: settle its line, and return how many frames went back to the budget.

        ``receipt`` is the last number that the buffer holds for this worker. If it is the one that the worker noted
        before its last write, that write happened, and is counted. May be called again, also by several at once.
        """
        at = _line(worker)

        def reclaim(state: list[int]) -> int:
            if state[at + _INTENDED] and receipt == state[at + _RECEIPT]:
                state[at + _COLLECTED] += state[at + _INTENDED]
                state[at + _COMMITS] += 1
                state[at + _RESERVED] -= state[at + _INTENDED]
            returned = state[at + _RESERVED]
            state[at + _RESERVED] = state[at + _INTENDED] = 0
            state[at + _PID], state[at + _STARTED] = identity.me()
            return returned

        return self._change(reclaim)

    def restore(self, collected: int) -> None:
        """Begin again from so many collected frames.

        Raises:
            InvalidArgument: more than the total, or frames are reserved or collected already.
        """
        base = _whole("collected", collected)

        def restore(state: list[int]) -> None:
            if _reserved(state) or _collected(state) != state[_BASE]:
                raise InvalidArgument("frames cannot be restored while others are collected; restore before starting")
            if base > state[_TOTAL]:
                raise InvalidArgument(f"{base} frames were collected already, more than total_frames={state[_TOTAL]}")
            state[_BASE] = base

        self._change(restore)

    # ------------------------------------------------------------------ looking
    @property
    def total(self) -> int:
        """Frames in all; -1 without a limit."""
        total = self._block().peek()[_TOTAL]
        return -1 if total == _UNLIMITED else total

    @property
    def collected(self) -> int:
        """Frames committed, by all workers, including those of earlier parts of the run."""
        return _collected(self._block().peek())

    def collected_by(self, worker: int) -> int:
        """Frames committed by one worker, since its line was claimed."""
        return self._block().peek()[_line(worker) + _COLLECTED]

    def commits_by(self, worker: int) -> int:
        """Batches committed by one worker, since its line was claimed."""
        return self._block().peek()[_line(worker) + _COMMITS]

    @property
    def reserved(self) -> int:
        """Frames reserved and not yet committed or refunded."""
        return _reserved(self._block().peek())

    @property
    def remaining(self) -> int | None:
        """Frames that can still be reserved; None without a limit."""
        state = self._block().peek()
        return None if state[_TOTAL] == _UNLIMITED else state[_TOTAL] - _collected(state) - _reserved(state)

    @property
    def finished(self) -> bool:
        """Every frame is collected."""
        state = self._block().peek()
        return _collected(state) == state[_TOTAL]

    def wait_until(
        self, ready: Callable[[], bool], *, timeout: float | None = None, cancel_event: CancelEvent | None = None
    ) -> bool:
        """Wait until ``ready()``, looked at after every change of the budget and twice a second. False: ``timeout``.

        Raises:
            Cancelled: ``cancel_event`` was set.
        """
        deadline = time.monotonic() + check_timeout(timeout)
        while True:
            block = self._block()
            try:
                block.mutex.lock()
                ticket = block.events[0].prepare()
            finally:
                block.mutex.unlock()
            if ready():
                return True
            if cancel_event is not None and cancel_event.is_set():
                raise Cancelled(f"cancelled while waiting for frames: {self!r}")
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            block.events[0].wait(ticket, min(left, _SLICE_S if cancel_event is None else 0.1))

    def close(self) -> None:
        """Detach; in the process that made the budget also remove it. Closing twice is fine."""
        block, self._control = self._control, None
        if block is not None and self._remover is not None:
            self._remover()

    def __enter__(self) -> FrameBudget:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._control is None:
            return f"FrameBudget({self._path.name}, closed)"
        return f"FrameBudget(total {self.total}, collected {self.collected}, reserved {self.reserved})"


def _attached(path: str) -> FrameBudget:
    budget = FrameBudget.__new__(FrameBudget)
    budget._attach(Path(path), create=False)
    return budget


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child, which inherits the finalizer
        remove_directory(path)


def _line(worker: int) -> int:
    if isinstance(worker, bool) or not isinstance(worker, int):
        raise InvalidType(f"a worker is numbered by an int, not {type(worker).__name__}")
    if not 0 <= worker < WORKERS:
        raise InvalidArgument(f"worker {worker}: a budget has lines 0 to {WORKERS - 1}")
    return _LINES + worker * _LINE_WORDS


def _collected(state: list[int]) -> int:
    return state[_BASE] + sum(state[_LINES + _COLLECTED : _WORDS : _LINE_WORDS])


def _reserved(state: list[int]) -> int:
    return sum(state[_LINES + _RESERVED : _WORDS : _LINE_WORDS])


def _refuse_excess(state: list[int], at: int, worker: int, frames: int) -> None:
    reserved = state[at + _RESERVED]
    if not 0 <= frames <= reserved:
        raise InvalidArgument(f"worker {worker} has reserved {reserved} frames, not {frames}")


def _refuse_stranger(state: list[int], at: int, worker: int) -> None:
    holder = state[at + _PID], state[at + _STARTED]
    if holder != identity.me():
        raise InvalidArgument(
            f"process {holder[0]} holds {state[at + _RESERVED]} frames on line {worker}; "
            "give each process a line of its own, or reclaim() this one after its holder's death"
        )


def _whole(name: str, value: int, *, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidType(f"{name} must be an int, not {type(value).__name__}")
    if value < least:
        raise InvalidArgument(f"{name} must be at least {least}, not {value}")
    return value
