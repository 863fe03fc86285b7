"""Who holds a lock, and what whoever waits for it does meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

LOG_EVERY = 30.0

HeldUp = Callable[[int, float], None]  # the holder's thread id, and for how many seconds the call has waited

log = logging.getLogger("millpond")
_logged = 0.0


def still_held(holder: int, seconds: float) -> None:
    """Without anything else to do: say every 30 s that the lock is held, one line for all that wait in this process."""
    global _logged
    now = time.monotonic()
    if seconds >= LOG_EVERY and now - _logged >= LOG_EVERY:
        _logged = now
        log.warning("a lock still waits after %.0f s: it is held by %s", seconds, describe(holder))


def describe(holder: int) -> str:
    """A thread by its number: its process, and whether it is stopped. Reads ``/proc``, so not for holders of a lock."""
    pid = _process_of(holder)
    name = f"thread {holder} of process {pid}" if pid else f"thread {holder}"
    return f"{name}, which is stopped" if stopped(holder) else name


def stopped(thread: int) -> bool:
    """Was this thread stopped, by SIGSTOP or a debugger? Elsewhere than on Linux nobody can tell: False."""
    try:
        with open(f"/proc/{thread}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False


def _process_of(thread: int) -> int:
    try:
        with open(f"/proc/{thread}/status", "rb") as file:
            return next((int(line.split()[1]) for line in file if line.startswith(b"Tgid:")), 0)
    except OSError:
        return 0
