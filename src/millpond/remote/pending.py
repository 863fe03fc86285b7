"""Calls that cannot be answered yet wait here, holding nothing that could run out: no thread, no slot of the owner's.

`PendingCalls` wait for one kind of event. Their one thread sleeps until the buffer changed, and then tries them again,
in the order in which they came. After a refusal whoever needs as much or more is not tried: it would be
refused too. Smaller ones may overtake, as they may among threads that wait in one process.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from millpond.core.errors import InvalidArgument
from millpond.remote.messages import Message, failed

SLICE = 0.5  # seconds between looks for what cannot notify, such as a process that was killed before its wake-up


class Tickets(Protocol):
    """How they learn that the buffer changed: an event count."""

    def prepare(self) -> int:
        """To be called before a look at the buffer."""

    def wait(self, ticket: int, seconds: float) -> bool:
        """Sleep until something changed since the ticket was given. False: nothing did."""


@dataclass(frozen=True, slots=True)
class Call:
    """One pending request. ``attempt`` never waits and never raises; None means: not yet."""

    client: bytes
    number: int
    need: int  # items
    exempt: bool  # from the ratio, so that others' refusals say nothing about it
    attempt: Callable[[], Message | None]
    answered: Callable[[Message], None]
    advisory: bool = False  # it only asks whether it may, and blocks nobody
    left: Callable[[], None] = lambda: None  # comes once, when it is here no more


class PendingCalls:
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


UNSETTLED = 1 << 16  # answers that are kept for a client


class Ledger:
    """A client repeats a request, under its number, where it cannot know whether it arrived. For that the answer is
    kept until the client's requests say that it is ``settled``."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._busy: set[int] = set()
        self._parked: set[int] = set()
        self._answers: dict[int, Message] = {}
        self._settled = 0

    def begin(self, request: Message) -> Message | None:
        """None: carry it out, then say `end` or `park`. Otherwise the answer: it was carried out, or waits already."""
        number = request.number
        with self._changed:
            if request.settled > self._settled:
                self._settled = request.settled
                self._answers = {n: answer for n, answer in self._answers.items() if n >= self._settled}
            if number < self._settled:
                return failed(number, InvalidArgument(f"request {number} comes after {self._settled} was settled"))
            while number in self._busy:  # a repetition, while the first is being carried out
                self._changed.wait()
            known = self._look(number)
            if known is None:
                if len(self._answers) >= UNSETTLED:
                    raise InvalidArgument(f"{len(self._answers)} answers were given, and none of them was settled")
                self._busy.add(number)
            return known

    def park(self, number: int) -> None:
        """It waits; `end` will come."""
        with self._changed:
            self._busy.discard(number)
            self._parked.add(number)
            self._changed.notify_all()

    def end(self, number: int, answer: Message | None) -> None:
        """The answer to keep; None where the request may be carried out again instead, or was withdrawn."""
        with self._changed:
            self._busy.discard(number)
            self._parked.discard(number)
            if answer is not None and number >= self._settled:
                self._answers[number] = answer
            self._changed.notify_all()

    def leave(self, number: int) -> None:
        """It is not being carried out any more, and was not answered, unless it is pending or was since."""
        with self._changed:
            self._busy.discard(number)
            self._changed.notify_all()

    def look(self, number: int) -> Message | None:
        """The answer, "pending", or None where neither is there. Waits while the request is being carried out."""
        with self._changed:
            while number in self._busy:
                self._changed.wait()
            return self._look(number)

    def _look(self, number: int) -> Message | None:
        return Message("parked", number) if number in self._parked else self._answers.get(number)
