"""The line between a client and an owner: one TCP connection that says who lives, and carries what is short.

The kernel answers for a process that is busy, and hangs up for one that is dead; a machine that is gone stops
answering the kernel's probes, which is noticed after `SILENCE` seconds. So nobody needs to ask whether the other side
lives, and an owner that saves for a minute is not taken for dead.

A client introduces itself with the owner's token, which it got through Ray. Then it sends heads of messages, and the
owner sends heads of answers, or the bare number of a parked request whose answer is there now::

    client → owner   token (16 bytes)  id (16 bytes)   then  length (u32)  head
    owner → client   number (u64)  length (u32)  head       number 0: closed on purpose; length 0: come and collect

This is the client's end; the owner's is in `millpond.remote.switchboard`.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import select
import socket
import struct
import threading
import time
from typing import Final, Literal

from millpond.core.errors import PeerLost

SILENCE = 4  # seconds
REQUEST, ANSWER = struct.Struct("<I"), struct.Struct("<QI")
CLOSED, WELCOME = 0, (1 << 64) - 1  # numbers that no request has
FIRST_GROUP = (1 << 64) - 2  # the number of a wish for a group; the next has one less
COLLECT: Final = b""  # instead of a head: the answer to the parked request is there
_SLICE_S = 0.5

End = Literal["closed", "lost"]
Said = bytes | bytearray


def watch(connection: socket.socket) -> None:
    """Small messages leave at once, and a silent other side is noticed by the kernel."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probes = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": SILENCE - 1, "TCP_USER_TIMEOUT": 1000 * SILENCE}
    for name, value in probes.items():
        if hasattr(socket, name):  # not all systems have all
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class _Turn:
    """In a slot: you may be the one who listens now."""


_TURN = _Turn()


class Slot:
    """Where what is said about one request arrives: heads, or `COLLECT`; None once the line has ended."""

    __slots__ = ("said", "waiting")

    def __init__(self) -> None:
        self.said: queue.SimpleQueue[Said | _Turn | None] = queue.SimpleQueue()
        self.waiting = False


class Line:
    """A client's end, for any number of threads.

    It has no thread of its own: of those that wait one listens for all, and hands that duty on when it has what it
    waits for. So a client with one thread is woken by the kernel itself.

    Raises ``PeerLost`` where nobody answers at ``address``, or somebody who does not know the token.
    """

    def __init__(self, address: tuple[str, int], token: bytes, *, timeout: float) -> None:
        self.id = secrets.token_bytes(16)
        self.end: End | None = None  # how it ended, as far as anybody has listened
        self._slots: dict[int, Slot] = {}
        self._sending, self._listening = threading.Lock(), threading.Lock()
        self._prefix, self._body, self._filled = bytearray(ANSWER.size), bytearray(), 0
        self._number: int | None = None  # of the answer whose head is being read
        try:
            self._socket = socket.create_connection(address, timeout=timeout)
        except OSError as problem:
            raise PeerLost(f"nobody answers at {address[0]}:{address[1]}: {problem}") from problem
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        welcome = self.open(WELCOME)
        with contextlib.suppress(OSError, queue.Empty):
            watch(self._socket)
            self._socket.settimeout(None)
            self._socket.sendall(token + self.id)
            self.local_host: str = self._socket.getsockname()[0]
            if self.wait(welcome, timeout) == COLLECT:
                self.shut(WELCOME)
                return
        self._socket.close()
        raise PeerLost(f"{address[0]}:{address[1]} is not the owner that was looked for")

    # ------------------------------------------------------------------ asking
    def ask(self, head: bytes) -> None:
        """Send one request. Raises ``ConnectionError`` where the line has ended."""
        with self._sending:
            try:
                self._socket.sendall(REQUEST.pack(len(head)) + head)
            except OSError as problem:
                raise ConnectionError(str(problem)) from problem

    def open(self, number: int) -> Slot:
        """Where to wait for what is said about this request."""
        slot = self._slots[number] = Slot()
        if self.end is not None:
            slot.said.put(None)
        return slot

    def shut(self, number: int) -> None:
        """Nothing more is expected about it."""
        slot = self._slots.pop(number, None)
        if slot is not None and not slot.said.empty() and slot.said.get_nowait() is _TURN:
            self._hand_on()

    def clear(self, slot: Slot) -> None:
        """Forget what was said so far: the request is going to be asked again."""
        with contextlib.suppress(queue.Empty):
            while True:
                if slot.said.get_nowait() is _TURN:
                    self._hand_on()

    # ------------------------------------------------------------------ listening
    def wait(self, slot: Slot, seconds: float | None) -> Said | None:
        """What is said next about a request. None: the line has ended. Raises ``queue.Empty`` after so many seconds."""
        deadline = None if seconds is None else time.monotonic() + seconds
        try:
            while True:
                slot.waiting = True  # before the duty is found taken: whoever hands it on looks after having let go
                if self._listening.acquire(blocking=False):
                    slot.waiting = False  # nobody hands it on to himself
                    self._listen(slot, deadline)
                    said = slot.said.get_nowait()
                else:
                    said = self._overhear(slot, deadline)
                if not isinstance(said, _Turn):
                    return said
        finally:
            slot.waiting = False

    def look(self) -> End | None:
        """Has the line ended? Hears what is there already, and waits for nothing."""
        if self.end is None and self._listening.acquire(blocking=False):
            try:
                heard = self._poll.poll(0)  # cheaper than to read in vain; one thread at a time may
                while heard and self.end is None and self._read(0):
                    pass
            finally:
                self._listening.release()
                self._hand_on()
        return self.end

    def _listen(self, slot: Slot, deadline: float | None) -> None:
        """Whoever calls this listens, until something is in its own slot or the time is over."""
        try:
            while slot.said.empty() and self._read(_left(deadline)):
                pass
        finally:
            self._listening.release()
            self._hand_on()

    def _overhear(self, slot: Slot, deadline: float | None) -> Said | _Turn | None:
        """Wait until the one who listens says something. Whoever left without handing the duty on is noticed here."""
        left = _left(deadline)
        try:
            return slot.said.get(timeout=_SLICE_S if left is None else min(left, _SLICE_S))
        except queue.Empty:
            if left is not None and left <= _SLICE_S:
                raise
            return _TURN

    def _hand_on(self) -> None:
        """Let another thread that waits, if there is one, be the one who listens."""
        for slot in list(self._slots.values()):
            if slot.waiting and slot.said.empty():
                slot.said.put(_TURN)
                return

    def _read(self, seconds: float | None) -> bool:
        """Hear one thing, and put it where it belongs. False: nothing whole came within so many seconds."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while self.end is None:
            part = self._prefix if self._number is None else self._body
            try:
                came = self._socket.recv_into(memoryview(part)[self._filled :], 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                left = _left(deadline)
                if left == 0 or not self._poll.poll(None if left is None else 1000 * left):
                    return False
                continue
            except OSError:
                came = 0
            if came == 0:
                self._finish("lost")
                return True
            self._filled += came
            if self._filled == len(part) and self._heard():
                return True
        return True

    def _heard(self) -> bool:
        """A part is complete. True: and with it something to hand out."""
        self._filled = 0
        if self._number is None:
            number, nbytes = ANSWER.unpack(self._prefix)
            if number == CLOSED:
                self._finish("closed")
            elif nbytes == 0:
                self._put(number, COLLECT)
            else:
                self._number, self._body = number, bytearray(nbytes)
                return False
            return True
        number, self._number = self._number, None
        self._put(number, self._body)
        return True

    def _put(self, number: int, said: Said) -> None:
        slot = self._slots.get(number)
        if slot is not None:
            slot.said.put(said)

    def _finish(self, end: End) -> None:
        self.end = end
        for slot in list(self._slots.values()):
            slot.said.put(None)

    def close(self) -> None:
        """Hang up. The owner forgets this client, and whoever waits hears the end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._listening:  # whoever listens hears it, and lets go
            if self.end is None:
                self._finish("lost")
            self._socket.close()


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
