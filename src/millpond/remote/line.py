"""The line between a client and an owner: one TCP connection that says who lives, and carries what is short.

The kernel answers for a process that is busy, and hangs up for one that is dead; a machine that is gone stops
answering the kernel's probes, which is noticed after `SILENCE` seconds. So nobody needs to ask whether the other side
lives, and an owner that saves for a minute is not taken for dead.

A client introduces itself with the owner's token, which it got through Ray. Then it sends heads of messages, and the
owner sends heads of answers, or the bare number of a parked request whose answer is there now::

    client → owner   token (16 bytes)  id (16 bytes)   then  length (u32)  head
    owner → client   number (u64)  length (u32)  head       number 0: closed on purpose; length 0: come and collect
"""

from __future__ import annotations

import contextlib
import hmac
import queue
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from io import BufferedReader
from typing import Literal

from millpond.core.errors import PeerLost

SILENCE = 4  # seconds
HELLO_S = 10.0  # for a stranger to say who it is
LONGEST = 1 << 26
_REQUEST, _ANSWER = struct.Struct("<I"), struct.Struct("<QI")
_CLOSED, _WELCOME = 0, (1 << 64) - 1
_NO_HEAD = b""

End = Literal["closed", "lost"]
Slot = queue.SimpleQueue[bytes | bytearray | None]  # heads, b"" for "come and collect", None for "the line has ended"


def _watch(connection: socket.socket) -> None:
    """Small messages leave at once, and a silent other side is noticed by the kernel."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probes = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": SILENCE - 1, "TCP_USER_TIMEOUT": 1000 * SILENCE}
    for name, value in probes.items():
        if hasattr(socket, name):  # not all systems have all
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Line:
    """A client's end. Any thread may ask; one thread of its own listens.

    Raises ``PeerLost`` where nobody answers at ``address``, or somebody who does not know the token.
    """

    def __init__(self, address: tuple[str, int], token: bytes, *, timeout: float) -> None:
        self.id = secrets.token_bytes(16)
        self.end: End | None = None  # how it ended
        self._slots: dict[int, Slot] = {}
        self._sending = threading.Lock()
        try:
            self._socket = socket.create_connection(address, timeout=timeout)
        except OSError as problem:
            raise PeerLost(f"nobody answers at {address[0]}:{address[1]}: {problem}") from problem
        try:
            _watch(self._socket)
            self._socket.sendall(token + self.id)
            stream = self._socket.makefile("rb")
            if _ANSWER.unpack(_exactly(stream, _ANSWER.size))[0] != _WELCOME:
                raise ConnectionError("no welcome")
            self._socket.settimeout(None)
            self.local_host: str = self._socket.getsockname()[0]
        except OSError as problem:
            self._socket.close()
            raise PeerLost(f"{address[0]}:{address[1]} is not the owner that was looked for: {problem}") from problem
        self._listener = threading.Thread(target=self._listen, args=(stream,), name="millpond-line", daemon=True)
        self._listener.start()

    def ask(self, head: bytes) -> None:
        """Send one request. Raises ``ConnectionError`` where the line has ended."""
        with self._sending:
            try:
                self._socket.sendall(_REQUEST.pack(len(head)) + head)
            except OSError as problem:
                raise ConnectionError(str(problem)) from problem

    def open(self, number: int) -> Slot:
        """Where what is said about this request arrives."""
        slot: Slot = queue.SimpleQueue()
        self._slots[number] = slot
        if self.end is not None:
            slot.put(None)
        return slot

    def shut(self, number: int) -> None:
        """Nothing more is expected about it."""
        self._slots.pop(number, None)

    def _listen(self, stream: BufferedReader) -> None:
        end: End = "lost"
        try:
            while True:
                number, nbytes = _ANSWER.unpack(_exactly(stream, _ANSWER.size))
                if number == _CLOSED:
                    end = "closed"
                    break
                head: bytes | bytearray = _exactly(stream, nbytes) if nbytes else _NO_HEAD
                slot = self._slots.get(number)
                if slot is not None:
                    slot.put(head)
        except OSError:
            pass  # the end of the line is what this loop waits for
        self.end = end
        for slot in list(self._slots.values()):
            slot.put(None)
        stream.close()
        self._socket.close()

    def close(self) -> None:
        """Hang up. The owner forgets this client."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._listener:
            self._listener.join(timeout=5)


class Caller:
    """An owner's end of one line. Nothing here waits for the client: one that does not listen is hung up on."""

    def __init__(self, connection: socket.socket, identity: bytes) -> None:
        self.id = identity
        self._socket = connection
        self._sending = threading.Lock()

    def send(self, number: int, head: bytes = _NO_HEAD) -> None:
        """An answer, or that the answer to a parked request is there."""
        frame = _ANSWER.pack(number, len(head)) + head
        with self._sending:
            try:
                whole = self._socket.send(frame, socket.MSG_DONTWAIT) == len(frame)
            except OSError:
                whole = False
        if not whole:
            self.hang_up()

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


class Exchange:
    """Where the lines of an owner end: one thread accepts, and each client has one that hears and serves it.

    ``came(caller)`` may return; ``serve(caller, head)`` answers a request; ``left(caller)`` comes once for each
    caller, after its last request. What they raise ends that line only.
    """

    def __init__(
        self,
        host: str,
        *,
        came: Callable[[Caller], None],
        serve: Callable[[Caller, bytearray], None],
        left: Callable[[Caller], None],
    ) -> None:
        self.token = secrets.token_bytes(16)
        self._came, self._serve, self._left = came, serve, left
        self._lock = threading.Lock()
        self._callers: dict[Caller, threading.Thread] = {}
        self._closed = False
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._socket = socket.create_server((host, 0), family=family, backlog=1024)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._acceptor = threading.Thread(target=self._accept, name="millpond-accept", daemon=True)
        self._acceptor.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._closed:
                    return
                continue  # this one gave up before it was accepted
            threading.Thread(target=self._hear, args=(connection,), name="millpond-caller", daemon=True).start()

    def _hear(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as stream:
            try:
                connection.settimeout(HELLO_S)
                _watch(connection)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
                hello = _exactly(stream, 32)
                if not hmac.compare_digest(hello[:16], self.token):
                    return
                connection.settimeout(None)
            except OSError:
                return
            caller = Caller(connection, bytes(hello[16:]))
            if not self._enter(caller):
                return
            try:
                self._came(caller)
                caller.send(_WELCOME)
                while True:
                    (nbytes,) = _REQUEST.unpack(_exactly(stream, _REQUEST.size))
                    if nbytes > LONGEST:
                        return
                    self._serve(caller, _exactly(stream, nbytes))
            except ConnectionError:
                pass  # it hung up
            finally:
                with self._lock:
                    self._callers.pop(caller, None)
                self._left(caller)

    def _enter(self, caller: Caller) -> bool:
        with self._lock:
            if not self._closed:
                self._callers[caller] = threading.current_thread()
            return not self._closed

    def close(self) -> None:
        """Tell everybody that this is on purpose, and hang up."""
        with self._lock:
            self._closed = True
            callers = dict(self._callers)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the acceptor
        self._socket.close()
        self._acceptor.join(timeout=5)
        for caller in callers:
            caller.send(_CLOSED)
            caller.hang_up()
        for thread in callers.values():
            if thread is not threading.current_thread():
                thread.join(timeout=5)


def _exactly(stream: BufferedReader, nbytes: int) -> bytearray:
    """Bytes that may be written to: tensors lie in them."""
    data = bytearray(nbytes)
    if stream.readinto(data) < nbytes:
        raise ConnectionError("the other side hung up")
    return data
