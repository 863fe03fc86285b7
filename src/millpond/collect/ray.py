"""Collection in Ray actors, on this host and on others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millpond.collect.budget import FrameBudget
from millpond.collect.collector import Layout
from millpond.collect.parallel import ParallelCollector, plan
from millpond.collect.ray_supervisor import RaySupervisor
from millpond.collect.worker import WorkerSpec
from millpond.collect.worker_pool import WorkerPool, pickled
from millpond.collect.worker_status import WorkerTable
from millpond.core.errors import InvalidArgument
from millpond.remote import cluster
from millpond.weights import WeightBoard

_OURS = ("max_restarts", "max_task_retries", "max_concurrency", "concurrency_groups", "lifetime", "name")


class RayCollector(ParallelCollector):
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
        stall_timeout: float | None = 300.0,
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
        pool = RayWorkerPool(
            spec, replay=replay, options=options, max_restarts=max_restarts, stall_timeout=stall_timeout
        )
        super().__init__(spec, pool, replay=replay, owns_budget=budget is None)


class RayWorkerPool(WorkerPool):
    """Actors. The worker table is in this process alone, and so is the budget."""

    _grace_s = 2.0

    def __init__(self, spec: WorkerSpec, *, options: Mapping[str, Any], **shared: Any) -> None:
        super().__init__(spec, **shared)
        self._options = options
        self.worker_table = WorkerTable(bytearray(WorkerTable.nbytes(spec.workers)), workers=spec.workers)

    def _hire(self, rows: Mapping[int, dict[str, Any] | None]) -> RaySupervisor:
        total, workers = self._spec.budget.total, range(len(self.lines))
        specs = pickled((self._spec_of(i, rows.get(i), budget=None, weights=None), total) for i in workers)
        cluster.join(None)
        try:
            return RaySupervisor(
                self._spec,
                specs,
                lines=self.lines,
                worker_table=self.worker_table,
                options=self._options,
                max_restarts=self._max_restarts,
                watch=self.watch,
            )
        except (TypeError, ValueError) as problem:
            raise InvalidArgument(f"Ray does not take these ray_options: {problem}") from problem
