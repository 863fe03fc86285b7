"""Where the lines of an owner end. See `millpond.remote.line` for what is said on them."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
from collections.abc import Callable
from io import BufferedReader

from millpond.remote.line import ANSWER, CLOSED, COLLECT, REQUEST, WELCOME, watch

HELLO_S = 10.0  # for a stranger to say who it is
LONGEST = 1 << 26  # bytes of a head


class Caller:
    """An owner's end of one line. Nothing here waits for the client: one that does not listen is hung up on."""

    def __init__(self, connection: socket.socket, identity: bytes) -> None:
        self.id = identity
        self._socket = connection
        self._sending = threading.Lock()

    def send(self, number: int, head: bytes = COLLECT) -> None:
        """An answer, or that the answer to a parked request is there."""
        frame = ANSWER.pack(number, len(head)) + head
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


class Switchboard:
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
                watch(connection)
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
                caller.send(WELCOME)
                while True:
                    (nbytes,) = REQUEST.unpack(_exactly(stream, REQUEST.size))
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
            caller.send(CLOSED)
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
