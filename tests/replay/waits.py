"""Running a call in a thread, and looking whether it waits, without sleeping longer than it takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any


class Call:
    """``Call(f)`` runs f in a thread; ``result()`` is what it returned or raised."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._outcome: Any = None
        self._failed = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome = self._function()
        except Exception as error:
            self._outcome, self._failed = error, True

    def result(self, timeout: float = 10.0) -> Any:
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "the call still waits"
        if self._failed:
            raise self._outcome
        return self._outcome

    @property
    def waits(self) -> bool:
        return self._thread.is_alive()


def until(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    """Return as soon as the condition holds; fail if it does not within ``timeout`` seconds."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "this never came true"
        time.sleep(0.001)
