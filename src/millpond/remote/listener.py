"""Where the lines of an owner end. See `millpond.remote.connection` for what is said on them."""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable

from millpond.remote.allowance import Allowance
from millpond.remote.caller import Caller
from millpond.remote.connection import WELCOME, watch

HELLO_S = 10.0  # for a stranger to say who it is, in all
BUSY_S = 20.0  # that a client may be busy, and not take its answers
STRANGERS = 256  # that may be heard at a time; who comes then takes the place of the one who came first
TOKEN, IDENTITY = 16, 16  # bytes
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_REST_S = 0.1  # after a caller who could not be taken

log = logging.getLogger("millpond")


class _Stranger:
    """Somebody who has not said yet who it is."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.said = connection, b""
        self.until = time.monotonic() + HELLO_S


class Listener:
    """Where the lines of an owner end: one thread accepts and hears who it is, and each client has one that serves it.

    ``came(caller)`` may refuse by ``ConnectionError``; ``serve(caller, head)`` answers a request; ``left(caller)``
    comes once for each caller who was not refused, after its last request. What they raise ends that line only. Where
    descriptors, threads or memory run out, who comes is refused, and nobody else concerned.
    """

    def __init__(
        self,
        host: str,
        *,
        token: bytes,
        allowance: Allowance,
        came: Callable[[Caller], None],
        serve: Callable[[Caller, bytearray], None],
        left: Callable[[Caller], None],
    ) -> None:
        self._token, self._allowance = token, allowance
        self._came, self._serve, self._left = came, serve, left
        self._lock = threading.Lock()
        self._callers: dict[Caller, threading.Thread] = {}
        self._strangers: dict[int, _Stranger] = {}  # in the order in which they came
        self._closed = False
        with contextlib.ExitStack() as undo:
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
            self._socket = undo.enter_context(socket.create_server((host, 0), family=family, backlog=1024))
            self._socket.setblocking(False)
            self.address: tuple[str, int] = self._socket.getsockname()[:2]
            self._selector = undo.enter_context(selectors.DefaultSelector())
            self._selector.register(self._socket, selectors.EVENT_READ)
            self._bell, self._ring = socket.socketpair()
            undo.callback(self._bell.close)
            undo.callback(self._ring.close)
            self._selector.register(self._bell, selectors.EVENT_READ)
            self._spare: int | None = os.open(os.devnull, os.O_RDONLY)
            undo.callback(os.close, self._spare)
            self._acceptor = threading.Thread(target=self._receive, name="millpond-accept", daemon=True)
            self._acceptor.start()
            undo.pop_all()

    # ------------------------------------------------------------------ strangers
    def _receive(self) -> None:
        """The acceptor's life: it ends when this is closed, and for no other reason."""
        resting = 0.0
        while not self._closed:
            try:
                now = time.monotonic()
                events = self._selector.select(self._patience(now, resting))
                for key, _ in events:
                    stranger = self._strangers.get(key.fd)
                    if stranger is not None:
                        self._listen(key.fd, stranger)
                if time.monotonic() >= resting and any(key.fileobj is self._socket for key, _ in events):
                    resting = self._accept()
                elif resting > now:
                    time.sleep(min(_REST_S, resting - now))
                self._drop_late()
            except Exception as problem:  # noqa: BLE001  # whatever it is, others must still be able to come
                log.warning("a caller could not be taken: %r", problem)
                time.sleep(_REST_S)

    def _patience(self, now: float, resting: float) -> float | None:
        times = [stranger.until for stranger in self._strangers.values()][:1]
        if resting > now:
            times.append(resting)
        return max(0.0, min(times) - now) if times else None

    def _accept(self) -> float:
        """Take who waits. Returns until when nobody else should be taken: 0, or where something ran out a bit later."""
        for _ in range(STRANGERS):
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                return 0.0
            except OSError as problem:
                if problem.errno in _SCARCE and not self._closed:
                    self._refuse()
                    return time.monotonic() + _REST_S
                continue  # this one gave up before it was accepted
            with contextlib.suppress(OSError):
                connection.setblocking(False)
                self._selector.register(connection, selectors.EVENT_READ)
                if len(self._strangers) >= STRANGERS:
                    self._drop(next(iter(self._strangers)))
                self._strangers[connection.fileno()] = _Stranger(connection)
                continue
            connection.close()
        return 0.0

    def _refuse(self) -> None:
        """No descriptor is left. One is kept for this: so that who comes is hung up on, instead of left waiting."""
        spare, self._spare = self._spare, None
        if spare is not None:
            os.close(spare)
        with contextlib.suppress(OSError):
            for _ in range(STRANGERS):
                self._socket.accept()[0].close()
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY)

    def _listen(self, number: int, stranger: _Stranger) -> None:
        try:
            part = stranger.connection.recv(TOKEN + IDENTITY - len(stranger.said))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        stranger.said += part
        if not part or not hmac.compare_digest(stranger.said[:TOKEN], self._token[: len(stranger.said)]):
            self._drop(number)
        elif len(stranger.said) == TOKEN + IDENTITY:
            self._admit(number, stranger)

    def _admit(self, number: int, stranger: _Stranger) -> None:
        self._selector.unregister(stranger.connection)
        del self._strangers[number]
        connection = stranger.connection
        caller = Caller(connection, stranger.said[TOKEN:], self._allowance)
        thread = threading.Thread(target=self._attend, args=(caller, connection), name="millpond-caller", daemon=True)
        with self._lock:
            if not self._closed:
                self._callers[caller] = thread
        try:
            if self._closed:
                raise RuntimeError("this owner is closing")
            connection.setblocking(True)
            watch(connection, BUSY_S)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            thread.start()
        except (RuntimeError, OSError, MemoryError) as problem:  # no thread can be made, or it hung up
            log.warning("a client was refused: %s", problem)
            self._forget(caller)
            connection.close()

    def _drop(self, number: int) -> None:
        stranger = self._strangers.pop(number)
        self._selector.unregister(stranger.connection)
        stranger.connection.close()

    def _drop_late(self) -> None:
        now = time.monotonic()
        for number, stranger in list(self._strangers.items()):
            if stranger.until > now:
                return
            self._drop(number)

    # ------------------------------------------------------------------ callers
    def _attend(self, caller: Caller, connection: socket.socket) -> None:
        """The life of a caller's thread."""
        with connection:
            try:
                self._came(caller)
                try:
                    caller.notify(WELCOME)
                    while True:
                        head = caller.hear()
                        try:
                            self._serve(caller, head)
                        finally:
                            del head
                            caller.done()
                finally:
                    self._left(caller)
            except OSError as problem:
                log.debug("a line has ended: %s", problem)
            except Exception as problem:  # noqa: BLE001  # it is this client's, whatever it is
                log.warning("a client was hung up on: %r", problem)
            finally:
                caller.done()
                self._forget(caller)

    def _forget(self, caller: Caller) -> None:
        with self._lock:
            self._callers.pop(caller, None)

    def close(self) -> None:
        """Tell everybody that this is on purpose, and hang up."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            callers = dict(self._callers)
        self._ring.close()
        self._acceptor.join(timeout=5)
        for number in list(self._strangers):
            self._drop(number)
        for each in (self._selector, self._socket, self._bell):
            each.close()
        if self._spare is not None:
            os.close(self._spare)
        for caller in callers:
            caller.dismiss()
        for thread in callers.values():
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(timeout=5)
