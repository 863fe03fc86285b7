"""Calls that cannot be answered yet wait here, holding nothing that could run out: no thread, no slot of the owner's.

A `Lot` holds calls that wait for one kind of event. Its one thread sleeps until the buffer changed, and then tries them
again, in the order in which they came. After a refusal whoever needs as much or more is not tried: it would be
refused too. Smaller ones may overtake, as they may among threads that wait in one process.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from millpond.remote.messages import Message

SLICE = 0.5  # seconds between looks for what cannot notify, such as a process that was killed before its wake-up


class Tickets(Protocol):
    """How the lot learns that the buffer changed: an event count."""

    def prepare(self) -> int:
        """To be called before a look at the buffer."""

    def wait(self, ticket: int, seconds: float) -> bool:
        """Sleep until something changed since the ticket was given. False: nothing did."""


@dataclass(frozen=True, slots=True)
class Call:
    """One parked request. ``attempt`` never waits and never raises; None means: not yet."""

    client: bytes
    number: int
    need: int  # items
    exempt: bool  # from the ratio, so that others' refusals say nothing about it
    attempt: Callable[[], Message | None]
    answered: Callable[[Message], None]
    advisory: bool = False  # it only asks whether it may, and blocks nobody
    left: Callable[[], None] = lambda: None  # comes once, when it is here no more


class Lot:
    """Parked calls of one kind."""

    def __init__(self, name: str, tickets: Tickets) -> None:
        self._name, self._tickets = name, tickets
        self._calls: dict[tuple[bytes, int], Call] = {}
        self._changed = threading.Condition()  # the calls; never held during an attempt
        self._turn = threading.Lock()  # held during an attempt, so that no call is tried twice at once
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"millpond-{self._name}", daemon=True)
        self._thread.start()  # now: later there may be no room for one

    def park(self, call: Call) -> None:
        """Keep the call until an attempt succeeds. The first is made here: the buffer may have changed meanwhile."""
        with self._changed:
            if not self._closed:
                self._calls[call.client, call.number] = call
                self._changed.notify()
                closed = False
            else:
                closed = True
        if closed:
            answer = call.attempt()  # says that the buffer was closed
            if answer is not None:
                call.answered(answer)
            call.left()
        else:
            self._try(call)

    def withdraw(self, client: bytes, number: int) -> bool:
        """Take a call out. False: it is not here, so it was answered."""
        with self._turn, self._changed:
            call = self._calls.pop((client, number), None)
        if call is not None:
            call.left()
        return call is not None

    def forget(self, client: bytes) -> None:
        """The client is gone, and its calls with it."""
        with self._turn, self._changed:
            gone = [self._calls.pop(key) for key in [key for key in self._calls if key[0] == client]]
        for call in gone:
            call.left()

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def blocked(self) -> int:
        """How many of them are not advisory."""
        return sum(not call.advisory for call in list(self._calls.values()))

    def close(self) -> None:
        """Try everybody a last time: the buffer is closed by now, and says so."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout=5)
        self.look()

    def look(self) -> None:
        """Try those that may succeed, once."""
        refused = {True: math.inf, False: math.inf}
        for call in list(self._calls.values()):
            if call.need < refused[call.exempt] and not self._try(call):
                refused[call.exempt] = call.need

    def _try(self, call: Call) -> bool:
        """False: refused."""
        with self._turn:
            if (call.client, call.number) not in self._calls:
                return True
            answer = call.attempt()
            if answer is None:
                return False
            with self._changed:
                del self._calls[call.client, call.number]
            call.answered(answer)
            call.left()
            return True

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._calls and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
            ticket = self._tickets.prepare()
            self.look()
            if self._calls:
                self._tickets.wait(ticket, SLICE)
