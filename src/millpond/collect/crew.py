"""The worker processes of one collector, and what they share with it: a directory, a roster, lines of the budget."""

from __future__ import annotations

import atexit
import dataclasses
import os
import weakref
from collections.abc import Iterable, Mapping
from multiprocessing import context as mp_context
from typing import Any

from millpond.collect.budget import FrameBudget
from millpond.collect.roster import Roster
from millpond.collect.supervision import receipts_of
from millpond.collect.supervisor import Supervisor
from millpond.collect.workers import WorkerSpec
from millpond.core.errors import InvalidArgument, MillpondError
from millpond.shm.mapped import allocate, make_directory, map_file, remove_directory

_GRACE_S = 4.0  # how long workers may take to end by themselves
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


class ProcessCrew:
    """Places for ``spec.workers`` workers, each with a line of the budget that is also free in ``replay``.

    ``launch`` fills them, ``stop`` empties them, ``release`` gives everything back. Whoever forgets the crew leaves no
    process behind, neither when it is collected nor at the end of the program.

    Raises:
        InvalidArgument, Unsatisfiable: fewer than one worker, or more than there are lines.
    """

    def __init__(self, spec: WorkerSpec, *, replay: Any, context: mp_context.BaseContext, max_restarts: int) -> None:
        self._spec, self._context, self._max_restarts = spec, context, max_restarts
        self._claimed = Lines(spec.budget, replay, workers=spec.workers)
        self.lines = self._claimed.numbers
        self._owner, self._directory = os.getpid(), make_directory("collector")
        self._remove = weakref.finalize(self, _remove, self._directory, self._owner)
        allocate(self._directory / "roster", Roster.nbytes(spec.workers))
        self.roster = Roster(map_file(self._directory / "roster"), workers=spec.workers)
        self.supervisor: Supervisor | None = None

    @property
    def ours(self) -> bool:
        """Was it made in this process? A forked child inherits the object, but not the processes."""
        return self._owner == os.getpid()

    def launch(self, rows: Mapping[int, dict[str, Any] | None]) -> Supervisor:
        """Start the workers, the first time. ``rows``: what earlier ones had collected and not handed over.

        Raises:
            InvalidArgument: the environment or the policy cannot be pickled.
        """
        if self.supervisor is None:
            supervisor = Supervisor(
                pickled(self._spec_of(i, rows.get(i)) for i in range(len(self.lines))),
                lines=self.lines,
                budget=self._spec.budget,
                roster=self.roster,
                context=self._context,
                max_restarts=self._max_restarts,
                receipt=receipts_of(self._spec.replay),
                reclaims=self._spec.duty != "obey",
            )
            self._stop_forgotten = weakref.finalize(self, _stop, supervisor, self._owner)
            atexit.register(self._stop_forgotten)  # before multiprocessing's own, which would wait for the workers
            supervisor.start()
            self.supervisor = supervisor
        return self.supervisor

    def _spec_of(self, worker: int, rows: dict[str, Any] | None) -> WorkerSpec:
        return dataclasses.replace(
            self._spec,
            worker=worker,
            line=self.lines[worker],
            directory=self._directory,
            first_life=self.roster.lines[worker].lives,
            rows=rows,
        )

    def deaths(self) -> list[list[str]]:
        """Of each worker: why it was replaced, each time."""
        seats = self.supervisor.seats if self.supervisor is not None else []
        return [list(seat.deaths) for seat in seats] or [[] for _ in self.lines]

    def stop(self) -> None:
        """End the workers, by force those that do not come to an end by themselves."""
        if self.supervisor is not None:
            self.supervisor.stop(_GRACE_S)
            atexit.unregister(self._stop_forgotten)
            self._stop_forgotten.detach()

    def release(self) -> None:
        """Give the lines back, and remove the directory."""
        self._claimed.release()
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


def _stop(supervisor: Supervisor, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child, which inherits the finalizer
        supervisor.stop(0.0)


def _remove(path: Any, owner: int) -> None:
    if os.getpid() == owner:
        remove_directory(path)
