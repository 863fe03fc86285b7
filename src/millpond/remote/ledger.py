"""What one client asked and what it was told, so that a request that comes twice is carried out once."""

from __future__ import annotations

import threading

from millpond.core.errors import InvalidArgument
from millpond.remote.failures import failed
from millpond.remote.messages import Message

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
        """It is not being carried out any more, and was not answered, unless it is parked or was since."""
        with self._changed:
            self._busy.discard(number)
            self._changed.notify_all()

    def look(self, number: int) -> Message | None:
        """The answer, "parked", or None where neither is there. Waits while the request is being carried out."""
        with self._changed:
            while number in self._busy:
                self._changed.wait()
            return self._look(number)

    def _look(self, number: int) -> Message | None:
        return Message("parked", number) if number in self._parked else self._answers.get(number)
