"""SIGINTs at random moments, for the tests of Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable

import pytest

from millpond.shm import interrupts

MANY = int(os.environ.get("MILLPOND_INTERRUPTS", "300"))  # 5,000 take some minutes each
STORMS = pytest.mark.parametrize(
    "count", [60, pytest.param(MANY, marks=pytest.mark.exhaustive)], ids=["few", "exhaustive"]
)


class Storm:
    """SIGINTs to this process from a thread, each some random time after the last one was caught."""

    def __init__(self, seed: int) -> None:
        self.caught, self._random = 0, random.Random(seed)
        self._armed, self._over = threading.Event(), False
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over:
            if self._armed.wait(0.05):
                self._armed.clear()
                time.sleep(self._random.random() * 2e-3)
                os.kill(os.getpid(), signal.SIGINT)

    def run(self, step: Callable[[], None], count: int) -> None:
        """Call ``step`` until so many interrupts came out of it."""
        assert signal.getsignal(signal.SIGINT) is interrupts._on_interrupt
        self._thread.start()
        try:
            while self.caught < count:
                try:
                    self._armed.set()
                    for _ in range(100_000):
                        step()
                except KeyboardInterrupt:
                    self.caught += 1
        finally:
            self._over = True
            self._thread.join()
            with contextlib.suppress(KeyboardInterrupt):  # one may be on its way
                time.sleep(0.05)
