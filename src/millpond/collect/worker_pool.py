"""The workers of one collector, and what they share with it: its table, lines of the budget, processes, a directory."""

from __future__ import annotations

import atexit
import dataclasses
import os
import weakref
from collections.abc import Iterable, Mapping
from multiprocessing import context as mp_context
from typing import Any

from millpond.collect.budget import FrameBudget
from millpond.collect.supervision import Supervision, Watch, receipts_of
from millpond.collect.supervisor import Supervisor
from millpond.collect.worker import WorkerSpec
from millpond.collect.worker_status import WorkerTable
from millpond.core.errors import InvalidArgument, MillpondError
from millpond.envs.make import env_name
from millpond.shm.mapped import allocate, make_directory, map_file, remove_directory

_lines_in_use: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()  # of each buffer


class Lines:
    """Numbers of lines for ``workers`` workers: theirs alone in the budget, and in ``replay``, which has receipts.

    Raises:
        InvalidArgument, Unsatisfiable: fewer than one worker, or more than there are lines.
    """

    def __init__(self, budget: FrameBudget, replay: Any, *, workers: int) -> None:
        self._budget, self._replay = budget, replay
        busy = _lines_in_use.setdefault(replay, set()) if replay is not None else set()
        self.numbers = budget.claim(workers, avoid=busy)
        busy.update(self.numbers)

    def release(self) -> None:
        """Give them back."""
        for line in self.numbers:
            self._budget.release(line)
        if self._replay is not None:
            _lines_in_use.get(self._replay, set()).difference_update(self.numbers)


class WorkerPool:
    """Places for ``spec.workers`` workers, each with a line of the budget that is also free in ``replay``.

    ``launch`` fills them, ``stop`` empties them, ``release`` gives everything back. Whoever forgets the pool leaves no
    worker behind, neither when it is collected nor at the end of the program. What the workers are says `_hire`.

    Raises:
        InvalidArgument, Unsatisfiable: fewer than one worker, or more than there are lines.
    """

    worker_table: WorkerTable
    _grace_s: float  # how long workers may take to end by themselves

    def __init__(self, spec: WorkerSpec, *, replay: Any, max_restarts: int, stall_timeout: float | None) -> None:
        self._spec, self._max_restarts = spec, max_restarts
        names = [env_name(spec.env, worker=i) for i in range(spec.workers)]
        self.watch = Watch(stall_timeout=stall_timeout, names=names)
        self._claimed = Lines(spec.budget, replay, workers=spec.workers)
        self.lines = self._claimed.numbers
        self.supervisor: Supervision | None = None
        self._owner = os.getpid()

    @property
    def ours(self) -> bool:
        """Was it made in this process? A forked child inherits the object, but not the workers."""
        return self._owner == os.getpid()

    def launch(self, rows: Mapping[int, dict[str, Any] | None]) -> Supervision:
        """Start the workers, the first time. ``rows``: what earlier ones had collected and not handed over.

        Raises:
            InvalidArgument: the environment, the policy or something else cannot travel to them.
        """
        if self.supervisor is None:
            supervisor = self._hire(rows)
            self._stop_forgotten = weakref.finalize(self, _stop, supervisor, self._owner)
            self._stop_forgotten.atexit = False
            atexit.register(self._stop_forgotten)  # runs before what multiprocessing and Ray have registered earlier
            self.supervisor = supervisor  # before it starts, so that nobody makes a second one after Ctrl-C
        self.supervisor.start()
        return self.supervisor

    def _hire(self, rows: Mapping[int, dict[str, Any] | None]) -> Supervision:
        raise NotImplementedError

    def _spec_of(self, worker: int, rows: dict[str, Any] | None, **own: Any) -> WorkerSpec:
        life = self.worker_table.lines[worker].lives
        return dataclasses.replace(
            self._spec, worker=worker, line=self.lines[worker], first_life=life, rows=rows, **own
        )

    def deaths(self) -> list[list[str]]:
        """Of each worker: why it was replaced, each time."""
        handles = self.supervisor.handles if self.supervisor is not None else []
        return [list(handle.deaths) for handle in handles] or [[] for _ in self.lines]

    def stop(self) -> None:
        """End the workers, by force those that do not come to an end by themselves."""
        if self.supervisor is not None:
            self.supervisor.stop(self._grace_s)
            atexit.unregister(self._stop_forgotten)
            self._stop_forgotten.detach()

    def release(self) -> None:
        """Give back what was taken."""
        self._claimed.release()


class ProcessWorkerPool(WorkerPool):
    """Processes on this host, that share a directory with the worker table."""

    _grace_s = 4.0

    def __init__(self, spec: WorkerSpec, *, context: mp_context.BaseContext, **shared: Any) -> None:
        super().__init__(spec, **shared)
        self._context, self._directory = context, make_directory("collector")
        self._remove = weakref.finalize(self, _remove, self._directory, self._owner)
        allocate(self._directory / "roster", WorkerTable.nbytes(spec.workers))
        self.worker_table = WorkerTable(map_file(self._directory / "roster"), workers=spec.workers)

    def _hire(self, rows: Mapping[int, dict[str, Any] | None]) -> Supervisor:
        workers = range(len(self.lines))
        return Supervisor(
            pickled(self._spec_of(i, rows.get(i), directory=self._directory) for i in workers),
            lines=self.lines,
            budget=self._spec.budget,
            worker_table=self.worker_table,
            context=self._context,
            max_restarts=self._max_restarts,
            watch=self.watch,
            receipt=receipts_of(self._spec.replay),
            reclaims=self._spec.duty != "obey",
        )

    def release(self) -> None:
        """Also the directory."""
        super().release()
        self._remove()


def pickled(specs: Iterable[object]) -> list[bytes]:
    """What goes to the workers. Raises InvalidArgument where it cannot."""
    import cloudpickle

    try:
        return [cloudpickle.dumps(spec) for spec in specs]
    except MillpondError:
        raise
    except Exception as problem:
        raise InvalidArgument(f"the environment or the policy cannot travel to the workers: {problem}") from problem


def _stop(supervisor: Supervision, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child, which inherits the finalizer
        supervisor.stop(0.0)


def _remove(path: Any, owner: int) -> None:
    if os.getpid() == owner:
        remove_directory(path)
