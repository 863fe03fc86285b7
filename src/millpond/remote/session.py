"""Requests to one owner: each carried out once, waiting without holding anything of the owner's."""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, overload

import torch

from millpond.core.errors import BufferClosed, Cancelled, DeadlineExceeded, MillpondError, PeerLost
from millpond.remote import cluster
from millpond.remote.address import OwnerAddress
from millpond.remote.connection import Connection, Slot, Unanswered
from millpond.remote.messages import Message, raised
from millpond.replay.waiting import CANCEL_SLICE, LOG_EVERY, OWNER_SLICE, check_cancel, check_timeout
from millpond.shm.interrupts import due, interrupt, uninterrupted

TRIES = 5  # of one request, where what carries it breaks and the owner lives
END_S = 0.5  # a dying process closes its connections one after the other

log = logging.getLogger("millpond")
T = TypeVar("T")


class Wire(Protocol):
    """What carries a request to the owner and brings the answer back: the one place where transports differ."""

    @property
    def transport(self) -> str: ...

    def exchange(self, request: Message, slot: Slot) -> tuple[Message, bool]: ...

    def tell(self, request: Message) -> None: ...

    def close(self) -> None: ...


class Patience:
    """How long a call may wait, and what ends it from outside. Raises ``InvalidType`` or ``InvalidArgument``."""

    def __init__(self, what: str, op: str, n: int, timeout: float | None, cancel: Any) -> None:
        self.what, self.op, self.n = what, op, n
        self.timeout = check_timeout(timeout)
        check_cancel(cancel)
        self._cancel = cancel
        self._deadline = time.monotonic() + self.timeout
        self.check()

    def check(self) -> None:
        """Raises ``Cancelled`` where the event is set."""
        if self.cancelled:
            raise Cancelled(f"{self.what}: the cancel event is set")

    @property
    def cancelled(self) -> bool:
        return self._cancel is not None and bool(self._cancel.is_set())

    @property
    def slice_s(self) -> float:
        """How long to sleep before the next look; 0 where the time is over."""
        left = self._deadline - time.monotonic()
        looks = self._cancel is not None or threading.current_thread() is threading.main_thread()  # for Ctrl-C
        return max(0.0, min(left, CANCEL_SLICE if looks else OWNER_SLICE))


class _Withdrawn(Exception):
    """The request was, for Ctrl-C."""


class Session:
    """One client's connection to an owner. Any thread may call."""

    def __init__(self, owner: OwnerAddress, line: Connection, wire: Wire) -> None:
        self.owner, self._line, self._wire = owner, line, wire
        self._lock = threading.Lock()
        self._next = 1
        self._open: set[int] = set()
        self._left = False

    @overload
    def call(
        self,
        kind: str,
        fields: Mapping[str, Any] | None = None,
        tensors: Mapping[str, torch.Tensor] | None = None,
        patience: Patience | None = None,
    ) -> Message: ...

    @overload
    def call(
        self,
        kind: str,
        fields: Mapping[str, Any] | None = None,
        tensors: Mapping[str, torch.Tensor] | None = None,
        patience: Patience | None = None,
        *,
        use: Callable[[Message], T],
    ) -> T: ...

    @uninterrupted
    def call(
        self,
        kind: str,
        fields: Mapping[str, Any] | None = None,
        tensors: Mapping[str, torch.Tensor] | None = None,
        patience: Patience | None = None,
        *,
        use: Callable[[Message], T] | None = None,
    ) -> Message | T:
        """Ask, wait where the owner says so, and return the answer, or what ``use`` makes of it. Where it is a batch,
        and an exception comes in between, the batch goes back.

        Ctrl-C waits until the answer is there, unless the request is pending: then it is withdrawn. An owner that does
        not answer is told to undo the request when it comes to it.

        Raises:
            BufferClosed, PeerLost: the owner has closed the buffer, or has died. Where the request was a write,
                whether it was done is not known: a receipt tells.
            DeadlineExceeded, Cancelled: nothing was done.
            MillpondError: what the owner raised.
        """
        number, there = self._begin(), False
        slot = self._line.open(number)
        try:
            answer, noticed = self._exchange(number, Message(kind, number, fields or {}, tensors or {}), slot)
            if answer.kind == "parked":
                assert patience is not None
                answer = self._wait(number, slot, patience, noticed)
            if answer.kind == "error":
                raise raised(answer)
            there = True
            return answer if use is None else use(answer)
        except (Unanswered, _Withdrawn) as ended:
            if isinstance(ended, Unanswered):
                self._abandon(kind, number, patience)
        except BaseException as problem:
            if there or not isinstance(problem, Exception):  # nothing may be done behind the caller's back
                with contextlib.suppress(MillpondError):
                    if patience is not None and not there:
                        self._about("withdraw", number, patience)
                with contextlib.suppress(MillpondError):
                    if kind == "sample":
                        self.call("give_back", {"number": number})
            raise
        finally:
            self._line.shut(number)
            self._settle(number)
        return interrupt()

    # ------------------------------------------------------------------ waiting
    def _wait(self, number: int, slot: Slot, patience: Patience, noticed: bool) -> Message:
        """Until the pending request is answered. Whatever ends the wait takes the request back first."""
        logged = time.monotonic()
        while True:
            if noticed:
                answer = self._about("collect", number, patience)
                if answer.kind != "parked":
                    return answer
            noticed = self._told(slot, patience.slice_s)
            if noticed:
                continue
            cancelled = patience.cancelled
            if cancelled or patience.slice_s == 0 or due():
                return self._give_up(number, patience, cancelled)
            if patience.timeout == math.inf and time.monotonic() - logged >= LOG_EVERY:
                logged = time.monotonic()
                log.warning("%s still waits: %s", patience.what, self._explain(patience))

    def _told(self, slot: Slot, seconds: float) -> bool:
        """Is the answer there? Raises where the line has ended."""
        try:
            said = self._line.wait(slot, seconds)
        except queue.Empty:
            return False
        if said is None:
            raise self._ended()
        return True

    def _give_up(self, number: int, patience: Patience, cancelled: bool) -> Message:
        answer = self._about("withdraw", number, patience)
        if answer.kind != "withdrawn":
            return answer  # it was answered in the last moment
        if cancelled:
            raise Cancelled(f"{patience.what}: the cancel event is set")
        if due():
            raise _Withdrawn
        raise DeadlineExceeded(f"{patience.what} waited {patience.timeout:g} s: {answer.fields['text']}")

    def _abandon(self, kind: str, number: int, patience: Patience | None) -> None:
        """Have the owner withdraw a request that it has not answered, or take its batch back, as soon as it comes to
        that. Waits for nothing: what it says to this is not listened for."""
        undo: list[tuple[str, dict[str, Any]]] = []
        if patience is not None:
            undo.append(("withdraw", {"number": number, "op": patience.op, "n": patience.n}))
        if kind == "sample":
            undo.append(("give_back", {"number": number}))
        with contextlib.suppress(ConnectionError, MillpondError, Unanswered):  # at the line's end all that waits ends
            for kind, fields in undo:
                own = self._begin()
                self._settle(own)
                self._wire.tell(Message(kind, own, fields))

    def _explain(self, patience: Patience) -> str:
        return str(self.call("explain", {"op": patience.op, "n": patience.n}).fields["text"])

    def _about(self, kind: str, number: int, patience: Patience) -> Message:
        """Collect or withdraw a pending request."""
        own = self._begin()
        slot = self._line.open(own)
        try:
            fields = {"number": number, "op": patience.op, "n": patience.n}
            return self._exchange(own, Message(kind, own, fields), slot)[0]
        finally:
            self._line.shut(own)
            self._settle(own)

    # ------------------------------------------------------------------ one exchange
    def _exchange(self, number: int, request: Message, slot: Slot) -> tuple[Message, bool]:
        """Repeats under the same number what may not have arrived: the owner carries it out once."""
        for left in reversed(range(TRIES)):
            sent = Message(request.kind, number, request.fields, request.tensors, self._settled())
            try:
                return self._wire.exchange(sent, slot)
            except ConnectionError as problem:
                if self._line_ended() or not left or isinstance(problem, PeerLost):
                    raise self._ended(problem) from problem
                log.info("%s of %s is repeated: %s", request.kind, self.owner, str(problem))  # it holds what broke
        raise AssertionError("unreachable")

    def _line_ended(self) -> bool:
        end = time.monotonic() + END_S
        while self._line.look() is None and time.monotonic() < end:
            time.sleep(0.01)
        return self._line.end is not None

    def _ended(self, problem: object = None) -> MillpondError:
        if self._left:
            return BufferClosed("this client was closed")
        if self._line.end == "closed":
            return BufferClosed("the buffer was closed")
        if self._line.end == "lost":
            if cluster.was_closed(self.owner):
                return BufferClosed("the buffer was closed")
            return PeerLost(f"{self.owner} is gone")
        return PeerLost(f"{self.owner} cannot be reached: {problem}")

    # ------------------------------------------------------------------ numbers
    def _begin(self) -> int:
        if self._left or self._line.end is not None:
            raise self._ended()
        with self._lock:
            number = self._next
            self._next += 1
            self._open.add(number)
            return number

    def _settle(self, number: int) -> None:
        with self._lock:
            self._open.discard(number)

    def _settled(self) -> int:
        with self._lock:
            return min(self._open, default=self._next)

    @property
    def transport(self) -> str:
        """The name of what carries the payloads."""
        return self._wire.transport

    @property
    def lost(self) -> bool:
        """Has the connection ended, not on purpose?"""
        return self._line.look() == "lost" and not self._left

    def close(self) -> None:
        """Leave the owner."""
        self._left = True
        self._line.close()
        self._wire.close()
