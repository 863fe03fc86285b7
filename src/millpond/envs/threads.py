"""How many threads a batched environment may use, where several processes share the cores of a host."""

from __future__ import annotations

import os

from millpond.core.errors import InvalidArgument

VARIABLE = "MILLPOND_ENV_THREADS"  # set where several processes share the cores: each then takes so many threads


def cores() -> int:
    """As many as this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_threads() -> int:
    """``$MILLPOND_ENV_THREADS``, or one for each core.

    Raises:
        InvalidArgument: the variable is no positive number.
    """
    wanted = os.environ.get(VARIABLE)
    if wanted is None:
        return cores()
    if not wanted.isdecimal() or int(wanted) < 1:
        raise InvalidArgument(f"{VARIABLE}={wanted!r}: must be a number of threads, at least 1")
    return int(wanted)


def share_cores(processes: int) -> None:
    """This process is one of so many that step environments here: it takes its part, unless the user has said more."""
    os.environ.setdefault(VARIABLE, str(max(1, cores() // processes)))
