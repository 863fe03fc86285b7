"""Collection in Ray actors, on this host and on others."""

from __future__ import annotations

import atexit
import dataclasses
import os
import weakref
from collections.abc import Mapping
from typing import Any

from millpond.collect.budget import FrameBudget
from millpond.collect.collector import Layout
from millpond.collect.crew import Lines, pickled
from millpond.collect.fleet import Fleet
from millpond.collect.roster import Roster
from millpond.collect.team import TeamCollector, plan
from millpond.collect.workers import WorkerSpec
from millpond.core.errors import InvalidArgument
from millpond.remote import cluster
from millpond.weights import WeightBoard

_GRACE_S = 2.0  # how long actors may take to end by themselves
_OURS = ("max_restarts", "max_task_retries", "max_concurrency", "concurrency_groups", "lifetime", "name")


class RayCollector(TeamCollector):
    """Collects frames in ``num_workers`` Ray actors, each with ``num_envs`` environments and a copy of the policy.

    Used like ``MultiCollector``, with the same counters and the same promise: whatever is killed when, frames collected
    are frames written, and never exceed ``total_frames``. Frames are reserved, and counted, in this process. An actor
    that dies is replaced here, up to ``max_restarts`` times in all; one that raises ends the collection.

    A ``replay`` that this process shares in memory serves actors on this host; a ``RayReplayBuffer``, or a client of
    one, serves actors on any. Weights are pulled from the board on this host, and travel to others as one Ray object
    for each version. An actor that dies on another host, or writes to one, while it writes leaves its frames in doubt
    for six seconds: so long the owner of the replay may take to forget it.

    Args:
        ray_options: of each actor, as ``ray.remote`` takes them: ``num_cpus``, ``resources``, ``runtime_env``….
            Without ``num_cpus`` it is 0, so that no actor waits for a core that is never free.
        others: as for ``MultiCollector``.

    Ray is initialised, quietly, where the program has not done so.

    Raises:
        InvalidArgument, InvalidType: anything that cannot work, before anything was started.
    """

    def __init__(
        self,
        env: Any,
        policy: Any = None,
        *,
        num_workers: int,
        frames_per_batch: int,
        num_envs: int = 1,
        total_frames: int = -1,
        sync: bool = False,
        max_restarts: int = 20,
        ray_options: Mapping[str, Any] | None = None,
        layout: Layout = "transitions",
        replay: Any = None,
        weights: WeightBoard | None = None,
        budget: FrameBudget | None = None,
        seed: int | None = None,
        random_frames: int = 0,
        keep_float64: bool = False,
    ) -> None:
        cluster.ray()
        options = {"num_cpus": 0, **(ray_options or {})}
        if decided := sorted(set(options) & set(_OURS)):
            raise InvalidArgument(f"ray_options[{decided[0]!r}] is decided by the collector")
        spec = plan(
            env,
            policy,
            num_workers=num_workers,
            frames_per_batch=frames_per_batch,
            num_envs=num_envs,
            sync=sync,
            layout=layout,
            replay=replay,
            weights=weights,
            budget=budget,
            total_frames=total_frames,
            max_restarts=max_restarts,
            seed=seed,
            random_frames=random_frames,
            keep_float64=keep_float64,
        )
        crew = RayCrew(spec, replay=replay, options=options, max_restarts=max_restarts)
        super().__init__(spec, crew, replay=replay, owns_budget=budget is None)


class RayCrew:
    """Berths for ``spec.workers`` actors; as ``ProcessCrew``, but the roster is in this process alone."""

    def __init__(self, spec: WorkerSpec, *, replay: Any, options: Mapping[str, Any], max_restarts: int) -> None:
        self._spec, self._options, self._max_restarts = spec, options, max_restarts
        self._claimed = Lines(spec.budget, replay, workers=spec.workers)
        self.lines = self._claimed.numbers
        self.roster = Roster(bytearray(Roster.nbytes(spec.workers)), workers=spec.workers)
        self.supervisor: Fleet | None = None
        self._owner = os.getpid()

    @property
    def ours(self) -> bool:
        """Was it made in this process? A forked child inherits the object, but not the actors."""
        return self._owner == os.getpid()

    def launch(self, rows: Mapping[int, dict[str, Any] | None]) -> Fleet:
        """Start the actors, the first time. ``rows``: what earlier ones had collected and not handed over.

        Raises:
            InvalidArgument: the environment or the policy cannot be pickled, or Ray does not know an option.
        """
        if self.supervisor is None:
            specs = pickled((self._spec_of(i, rows.get(i)), self._spec.budget.total) for i in range(len(self.lines)))
            cluster.join(None)
            try:
                fleet = Fleet(
                    self._spec,
                    specs,
                    lines=self.lines,
                    roster=self.roster,
                    options=self._options,
                    max_restarts=self._max_restarts,
                )
            except (TypeError, ValueError) as problem:
                raise InvalidArgument(f"Ray does not take these ray_options: {problem}") from problem
            self._stop_forgotten = weakref.finalize(self, _stop, fleet, self._owner)
            self._stop_forgotten.atexit = False
            atexit.register(self._stop_forgotten)  # registered after Ray's own, so called before it
            fleet.start()
            self.supervisor = fleet
        return self.supervisor

    def _spec_of(self, worker: int, rows: dict[str, Any] | None) -> WorkerSpec:
        return dataclasses.replace(
            self._spec,
            worker=worker,
            line=self.lines[worker],
            first_life=self.roster.lines[worker].lives,
            rows=rows,
            budget=None,  # type: ignore[arg-type]  # it stays here
            weights=None,
        )

    def deaths(self) -> list[list[str]]:
        """Of each worker: why it was replaced, each time."""
        berths = self.supervisor.seats if self.supervisor is not None else []
        return [list(berth.deaths) for berth in berths] or [[] for _ in self.lines]

    def stop(self) -> None:
        """End the actors, by force those that do not come to an end by themselves."""
        if self.supervisor is not None:
            self.supervisor.stop(_GRACE_S)
            atexit.unregister(self._stop_forgotten)
            self._stop_forgotten.detach()

    def release(self) -> None:
        """Give the lines back."""
        self._claimed.release()


def _stop(fleet: Fleet, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child, which inherits the finalizer
        fleet.stop(0.0)
