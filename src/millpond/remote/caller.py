"""An owner's end of one line: what it hears is as long as was said, comes in time, and takes memory as it comes."""

from __future__ import annotations

import collections
import contextlib
import select
import socket
import time
from threading import Lock

import torch

from millpond.core.errors import InvalidArgument
from millpond.remote.allowance import STEP, Allowance
from millpond.remote.connection import ANSWER, CLOSED, COLLECT, REQUEST
from millpond.remote.messages import HEAD, SMALL, payload_nbytes

STALLED_S = 10.0  # for a message to come, or an answer to go, and one more for so many bytes:
SLOWEST = 1 << 16  # a second
_LAST_S = 1.0  # for an answer that is on its way when the owner closes
LONGEST = 1 << 26  # bytes of a head


class Caller:
    """One client. One thread hears it and answers; any may notify it, which waits for nothing.

    ``longest()`` says how many bytes a payload may have now. Raises ``ConnectionError`` where the client is gone, says
    what is no message, is too slow, or does not listen.
    """

    def __init__(self, connection: socket.socket, identity: bytes, allowance: Allowance) -> None:
        self.id = identity
        self.heard = self.said = 0  # bytes
        self._socket, self._allowance = connection, allowance
        self._sending = Lock()
        self._notices: collections.deque[bytes] = collections.deque()
        self._ready = {sign: select.poll() for sign in (select.POLLIN, select.POLLOUT)}
        for sign, poll in self._ready.items():
            poll.register(connection, sign)

    # ------------------------------------------------------------------ hearing
    def hear(self) -> bytearray:
        """The head of the next request, whenever it comes. Memory is given back with `done`."""
        prefix = bytearray(REQUEST.size)
        came = self._socket.recv_into(prefix)
        if came == 0:
            raise ConnectionError("it hung up")
        self._fill(memoryview(prefix)[came:], time.monotonic() + STALLED_S)
        (nbytes,) = REQUEST.unpack(prefix)
        if not HEAD.size <= nbytes <= LONGEST:
            raise ConnectionError(f"{nbytes} bytes are no head of a message")
        self.heard += REQUEST.size + nbytes
        deadline = _deadline(nbytes)
        head = bytearray(min(nbytes, SMALL))
        self._fill(memoryview(head), deadline)
        while len(head) < nbytes:  # memory only for what comes
            part = bytearray(min(nbytes - len(head), STEP))
            self._allow(2 * len(part), deadline)
            self._fill(memoryview(part), deadline)
            head += part
        return head

    def payload(self, head: bytearray, longest: int) -> torch.Tensor | None:
        """What follows this head: uint8 ``[n]``."""
        try:
            nbytes = payload_nbytes(head)
        except InvalidArgument as problem:
            raise ConnectionError(str(problem)) from problem
        if nbytes > longest:
            raise ConnectionError(f"a payload of {nbytes} bytes; {longest} could be of use")
        if nbytes == 0:
            return None
        self.heard += nbytes
        deadline = _deadline(nbytes)
        self._await(select.POLLIN, deadline)  # its memory is taken when its first byte is there
        payload = torch.empty(nbytes, dtype=torch.uint8)
        view = payload.numpy().data
        for at in range(0, nbytes, STEP):
            part = view[at : at + STEP]
            self._allow(len(part), deadline)
            self._fill(part, deadline)
        return payload

    def done(self) -> None:
        """What was heard is not needed any more."""
        self._allowance.give_back(self)

    def _fill(self, view: memoryview, deadline: float) -> None:
        while view:
            try:
                came = self._socket.recv_into(view, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._await(select.POLLIN, deadline)
                continue
            if came == 0:
                raise ConnectionError("it hung up")
            view = view[came:]

    def _allow(self, nbytes: int, deadline: float) -> None:
        if not self._allowance.take(self, nbytes, deadline):
            raise ConnectionError(f"{self._allowance.nbytes} bytes are taken by others for too long")

    def _await(self, sign: int, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0 or not self._ready[sign].poll(1000 * left):
            raise ConnectionError("it is too slow")

    # ------------------------------------------------------------------ answering
    def answer(self, number: int, head: bytes, payload: torch.Tensor | None = None) -> None:
        """Send an answer, for as long as the client takes it."""
        parts = [memoryview(ANSWER.pack(number, len(head)) + head)]
        if payload is not None:
            parts.append(payload.numpy().data)
        nbytes = sum(len(part) for part in parts)
        deadline = _deadline(nbytes)
        with self._sending:
            self.said += nbytes
            while parts:
                try:
                    sent = self._socket.sendmsg(parts, [], socket.MSG_DONTWAIT)
                except BlockingIOError:
                    self._await(select.POLLOUT, deadline)
                    continue
                while parts and sent >= len(parts[0]):
                    sent -= len(parts.pop(0))
                if sent:
                    parts[0] = parts[0][sent:]
        self._notify()

    def notify(self, number: int) -> None:
        """Say that the answer to a pending request is there. Waits for nothing."""
        self._notices.append(ANSWER.pack(number, len(COLLECT)))
        self._notify()

    def _notify(self) -> None:
        """What cannot be sent now, because an answer is on its way, is sent by whoever sends that."""
        while self._notices and self._sending.acquire(blocking=False):
            try:
                while self._notices:
                    notice = self._notices.popleft()
                    self.said += len(notice)
                    if self._socket.send(notice, socket.MSG_DONTWAIT) < len(notice):
                        raise ConnectionError("it does not listen")
            except (OSError, IndexError):  # nobody else takes notices out: the client is gone, or does not listen
                self.hang_up()
                return
            finally:
                self._sending.release()

    # ------------------------------------------------------------------ ends
    def dismiss(self) -> None:
        """Say that the buffer was closed on purpose, and hang up."""
        self.notify(CLOSED)
        if self._sending.acquire(timeout=_LAST_S):  # an answer may be on its way
            self._sending.release()
        self._notify()
        self.hang_up()

    def hang_up(self) -> None:
        """Whoever hears this client finds that it is gone."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def _deadline(nbytes: int) -> float:
    return time.monotonic() + STALLED_S + nbytes / SLOWEST
