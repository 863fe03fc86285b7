"""What every start method must find by name. It imports what it needs when it runs: see ``slim``."""

from __future__ import annotations

from pathlib import Path


def count_up(path: Path, lock_path: Path, times: int) -> None:
    """Increment a shared word, which is wrong without a lock."""
    import slim  # noqa: F401  (before millpond)
    from shm_children import counters

    from millpond.shm.locks import make_lock
    from millpond.shm.mapped import map_file

    memory = map_file(path)
    mutex, _ = make_lock(memory, 0, create=False, path=lock_path)
    words = counters(memory)
    for _ in range(times):
        try:
            mutex.lock()
            now = words[0]
            for _ in range(20):
                pass
            words[0] = now + 1
        finally:
            mutex.unlock()
