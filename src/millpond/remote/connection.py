"""The line between a client and an owner: one TCP connection that says who lives, and carries what is short.

The kernel answers for a process that is busy, and hangs up for one that is dead; a machine that is gone stops
answering the kernel's probes, which is noticed after `SILENCE` seconds. So nobody needs to ask whether the other side
lives, and an owner that saves for a minute is not taken for dead.

A client introduces itself with the owner's token, which it got through Ray. Then it sends messages, and the
owner sends answers, or the bare number of a pending request whose answer is there now::

    client → owner   token (16 bytes)  id (16 bytes)   then  length (u32)  head  payload
    owner → client   number (u64)  length (u32)  head  payload   number 0: closed on purpose; length 0: collect it

How long a payload is its head says. It is sent from where it lies, and received into memory of its own. Clients whose
payloads go through Ray hear on the line only who lives, and what there is to collect.

This is the client's end; the owner's is in `millpond.remote.listener`.
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
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

import torch

from millpond.core.errors import PeerLost
from millpond.remote.messages import payload_nbytes
from millpond.shm.interrupts import due

SILENCE = 4  # seconds
REQUEST, ANSWER = struct.Struct("<I"), struct.Struct("<QI")
CLOSED, WELCOME = 0, (1 << 64) - 1  # numbers that no request has
COLLECT: Final = b""  # instead of an answer: the one to the pending request is there
_INFO = struct.Struct("8B13I")  # the beginning of Linux's tcp_info
_BUSY_S = 600.0  # that an owner may be busy, and live
_SLICE_S = 0.5
_LONGEST_S = 1e6  # that a system call can be told to wait
_LOOK_S = 0.1  # between looks whether another thread has stopped sending, or there is room to send
ANSWER_S = 0.4  # after Ctrl-C, for the answer that was asked for

End = Literal["closed", "lost"]


class Answer(NamedTuple):
    """A head, and its payload: uint8 ``[n]``."""

    head: bytearray
    payload: torch.Tensor | None


Said = Answer | Literal[b""]


def watch(connection: socket.socket, patience: float) -> None:
    """Small messages leave at once, and a silent other side is noticed by the kernel: within `SILENCE` where nothing is
    on its way there, else after ``patience`` seconds, which one that lives and does not read may take."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    patience_ms = round(1000 * patience)
    probes = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": SILENCE - 1, "TCP_USER_TIMEOUT": patience_ms}
    for name, value in probes.items():
        if hasattr(socket, name):  # not all systems have all
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def silent(connection: socket.socket) -> bool:
    """Has the other side's kernel answered nothing for `SILENCE` seconds, though something is on its way there?

    One that lives, and does not read, still answers: what is sent again within the time after which it is, and each
    look whether there is room by now.
    """
    if not hasattr(socket, "TCP_INFO"):
        return False
    try:
        about = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    except OSError:
        return True
    _, _, _, probes, _, _, _, _, again_us, _, _, _, underway, *_, heard_ms = _INFO.unpack(about)
    unheard_s, again_s = heard_ms / 1e3, again_us / 1e6
    unanswered: bool = probes > 1 or (underway > 0 and unheard_s > 1.2 * again_s + 0.5)
    return unheard_s > SILENCE and unanswered


class Unanswered(Exception):  # it never reaches users: Ctrl-C does, see `millpond.shm.interrupts`
    """Ctrl-C came, and `ANSWER_S` later there is no answer."""


class _Turn:
    """In a slot: you may be the one who listens now."""


_TURN = _Turn()


class Slot:
    """Where what is said about one request arrives: answers, or `COLLECT`; None once the line has ended."""

    __slots__ = ("said", "waiting")

    def __init__(self) -> None:
        self.said: queue.SimpleQueue[Said | _Turn | None] = queue.SimpleQueue()
        self.waiting = False


class Connection:
    """A client's end, for any number of threads.

    It has no thread of its own: of those that wait one listens for all, and hands that duty on when it has what it
    waits for. So a client with one thread is woken by the kernel itself.

    ``pinned``: receive into memory from which a GPU copies faster. Raises ``PeerLost`` where nobody answers at
    ``address``, or somebody who does not know the token.
    """

    def __init__(self, address: tuple[str, int], token: bytes, *, timeout: float, pinned: bool = False) -> None:
        self.id = secrets.token_bytes(16)
        self.end: End | None = None  # how it ended, as far as anybody has listened
        self._slots: dict[int, Slot] = {}
        self._sending, self._listening = threading.Lock(), threading.Lock()
        self._pinned = pinned
        self._prefix = bytearray(ANSWER.size)
        self._number, self._head = 0, bytearray()  # of the answer that is being read
        self._payload: torch.Tensor | None = None
        self._part, self._filled = memoryview(self._prefix), 0  # what is being read, and how much of it is there
        try:
            self._socket = socket.create_connection(address, timeout=min(timeout, _LONGEST_S))
        except OSError as problem:
            raise PeerLost(f"nobody answers at {address[0]}:{address[1]}: {problem}") from problem
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        welcome = self.open(WELCOME)
        try:
            watch(self._socket, _BUSY_S)
            self._socket.settimeout(None)
            self._socket.sendall(token + self.id)
            if self.wait(welcome, min(timeout, _LONGEST_S)) == COLLECT:
                self.shut(WELCOME)
                return
        except (OSError, queue.Empty):
            pass
        except BaseException:  # Ctrl-C, while an owner that is busy lets wait
            self._socket.close()
            raise
        self._socket.close()
        raise PeerLost(f"{address[0]}:{address[1]} is not the owner that was looked for")

    # ------------------------------------------------------------------ asking
    def ask(self, head: bytes, payload: torch.Tensor | None = None) -> None:
        """Send one request. Raises ``ConnectionError`` where the line has ended.

        An exception that cuts this off ends the line: it is not known how much was sent. `Unanswered`, where there is
        no room for a request for so long, is one.
        """
        parts = [memoryview(REQUEST.pack(len(head)) + head)]
        if payload is not None:
            parts.append(payload.numpy().data)
        with self._sends():
            try:
                while parts:
                    sent = self._send(parts)
                    while parts and sent >= len(parts[0]):
                        sent -= len(parts.pop(0))
                    if sent:
                        parts[0] = parts[0][sent:]
            except OSError as problem:
                raise ConnectionError(str(problem)) from problem
            except BaseException:
                self._cut()
                raise

    @contextlib.contextmanager
    def _sends(self) -> Iterator[None]:
        """One thread at a time."""
        while not self._sending.acquire(timeout=_LOOK_S):
            _give_up_in_time()
        try:
            yield
        finally:
            self._sending.release()

    def _send(self, parts: list[memoryview]) -> int:
        """As much as there is room for. Where there is none the owner may be waiting to be heard: then listen too."""
        try:
            return self._socket.sendmsg(parts, [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            self.look()
            if self.end is not None:
                raise ConnectionError("the line has ended") from None
            room = select.poll()
            room.register(self._socket, select.POLLOUT | select.POLLIN)
            if not room.poll(1000 * _LOOK_S) and silent(self._socket):
                self._cut()
            _give_up_in_time()
            return 0

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
        """What is said next about a request. None: the line has ended. Raises ``queue.Empty`` after so many seconds,
        and `Unanswered`."""
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
            _give_up_in_time()
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
            heard = self._receive()
            if heard is not None:
                if heard:
                    return True
                continue
            left = _left(deadline)
            slice_s = _SLICE_S if left is None else min(left, _SLICE_S)
            if left == 0:
                return False
            if not self._poll.poll(1000 * slice_s):
                if silent(self._socket):
                    self._cut()
                _give_up_in_time()
        return True

    def _receive(self) -> bool | None:
        """Take what is there. True: and with it there is something to hand out. None: nothing is there."""
        try:
            came = self._socket.recv_into(self._part[self._filled :], 0, socket.MSG_DONTWAIT)
            if came == 0:
                self._finish("lost")
                return True
            self._filled += came
            return self._filled == len(self._part) and self._heard()
        except BlockingIOError:
            return None
        except OSError:
            self._finish("lost")
            return True
        except BaseException:  # it is not known how much was read
            self._cut()
            raise

    def _heard(self) -> bool:
        """A part is complete. True: and with it something to hand out."""
        self._filled = 0
        if self._part.obj is self._prefix:
            number, nbytes = ANSWER.unpack(self._prefix)
            if number == CLOSED:
                self._finish("closed")
            elif nbytes == 0:
                self._put(number, COLLECT)
            else:
                self._number, self._head = number, bytearray(nbytes)
                self._part = memoryview(self._head)
                return False
            return True
        if self._part.obj is self._head:
            self._payload = None
            nbytes = payload_nbytes(self._head)
            if nbytes:
                self._payload = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)
                self._part = self._payload.numpy().data
                return False
        answer, self._head, self._payload = Answer(self._head, self._payload), bytearray(), None
        self._part = memoryview(self._prefix)
        self._put(self._number, answer)
        return True

    def _put(self, number: int, said: Said) -> None:
        slot = self._slots.get(number)
        if slot is not None:
            slot.said.put(said)

    def _finish(self, end: End) -> None:
        self.end = end
        for slot in list(self._slots.values()):
            slot.said.put(None)

    def _cut(self) -> None:
        """What follows could not be understood."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._finish("lost")

    def close(self) -> None:
        """Hang up. The owner forgets this client, and whoever waits hears the end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._listening:  # whoever listens hears it, and lets go
            if self.end is None:
                self._finish("lost")
            self._socket.close()


def _give_up_in_time() -> None:
    if due(ANSWER_S):
        raise Unanswered


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
