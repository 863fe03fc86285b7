"""A thread that an interrupted start cannot make twice."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable


class Runner(threading.Thread):
    """Runs ``target`` as a daemon. ``start`` may be called again, also after an exception such as Ctrl-C has cut it
    off; the thread is started once.

    ``Thread.start`` waits for the new thread, and an exception in that wait leaves a thread that it can start again. So
    it is called by another thread, in which Ctrl-C is never raised.
    """

    def __init__(self, target: Callable[[], None]) -> None:
        super().__init__(target=target, name="millpond collector", daemon=True)
        self._once, self._running = threading.Lock(), threading.Event()

    def start(self) -> None:
        """Begin, the first time."""
        if self.ident is None:
            _thread.start_new_thread(self._launch, ())
            self._running.wait()

    def _launch(self) -> None:
        with self._once:
            if self.ident is None:
                super().start()

    def run(self) -> None:
        """What the thread does."""
        self._running.set()
        super().run()
