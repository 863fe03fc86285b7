"""Collection in worker processes."""

from __future__ import annotations

from multiprocessing import current_process, get_context, set_forkserver_preload
from typing import Any, Literal, get_args

from millpond.collect.budget import FrameBudget
from millpond.collect.collector import Layout
from millpond.collect.parallel import ParallelCollector, plan
from millpond.collect.worker_pool import ProcessWorkerPool
from millpond.core.errors import InvalidArgument
from millpond.weights import WeightBoard

StartMethod = Literal["forkserver", "spawn", "fork"]
_PRELOAD = ["millpond.collect.worker"]  # and with it torch, TensorDict and Gymnasium: a new worker then starts at once


class MultiCollector(ParallelCollector):
    """Collects frames in ``num_workers`` processes, each with ``num_envs`` environments and a copy of the policy.

    There are three ways to use it. ``start()`` with a ``replay``: the workers write directly into it, which is shared
    for that if it is not yet, and never closed here. Iterating: each step gives the next batch of whichever worker has
    one (with ``replay``: None, for each batch that was written). Iterating with ``sync=True``: every worker collects
    one batch with the same weights, and each step gives all of them, put together in the order of the workers.

    Whatever is killed when: frames collected are frames written, and never exceed ``total_frames``. A worker that dies
    is replaced, up to ``max_restarts`` times in all; one that raises ends the collection with its traceback.

    Nothing here judges how fast environments are: waits follow their pace. A call of an environment or a policy that
    lasts 10 s is named in the log, in ``stats()`` and by ``explain()``; one that lasts ``stall_timeout`` seconds (None:
    for ever) counts as hung, and its worker is replaced as if it had died.

    Args:
        env, policy, frames_per_batch, num_envs: as for ``Collector``, for each worker; a list of factories has one for
            each. They travel by cloudpickle; the workers cannot change the originals.
        total_frames, layout, replay, weights, budget, random_frames, keep_float64: as for ``Collector``.
        seed: each worker, and each successor of one that died, derives its own from it.
        start_method: how processes start. With "forkserver" and "spawn" a script needs ``if __name__ == "__main__":``.

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
        layout: Layout = "transitions",
        replay: Any = None,
        weights: WeightBoard | None = None,
        budget: FrameBudget | None = None,
        seed: int | None = None,
        random_frames: int = 0,
        keep_float64: bool = False,
        start_method: StartMethod = "forkserver",
    ) -> None:
        if getattr(current_process(), "_inheriting", False):  # before anything is made that nobody would remove
            raise InvalidArgument(
                "a process that is just starting cannot start workers: it imports the main script for that, so what "
                'the script does must stand under `if __name__ == "__main__":`'
            )
        if start_method not in get_args(StartMethod):
            raise InvalidArgument(f"start_method must be one of {get_args(StartMethod)}, not {start_method!r}")
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
        if start_method == "forkserver":  # no effect on a fork server that runs already
            set_forkserver_preload(_PRELOAD)
        pool = ProcessWorkerPool(
            spec,
            replay=replay,
            context=get_context(start_method),
            max_restarts=max_restarts,
            stall_timeout=stall_timeout,
        )
        super().__init__(spec, pool, replay=replay, owns_budget=budget is None)
