"""What collectors of many workers have in common: iterating, starting, pausing, looking, saving, ending."""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

from tensordict import TensorDict

from millpond.collect.budget import FrameBudget
from millpond.collect.collector import check_layout
from millpond.collect.delivery import DeliveryMode, HandedOver, Rounds, Written, over, raise_failure
from millpond.collect.policies import check_policy
from millpond.collect.supervision import Supervision
from millpond.collect.worker import Duty, WorkerSpec
from millpond.collect.worker_pool import WorkerPool
from millpond.collect.worker_status import STATES
from millpond.core.errors import BufferClosed, Cancelled, DeadlineExceeded, InvalidArgument
from millpond.core.roles import CancelEvent
from millpond.envs.make import check_portable
from millpond.replay.waiting import check_timeout
from millpond.weights import WeightBoard

logger = logging.getLogger("millpond.collect")
_ANSWER_S = 30.0  # how long a paused worker may take to tell its state
_SLICE_S = 0.005


def plan(
    env: Any,
    policy: Any,
    *,
    num_workers: int,
    frames_per_batch: int,
    num_envs: int,
    sync: bool,
    layout: str,
    replay: Any,
    weights: WeightBoard | None,
    budget: FrameBudget | None,
    total_frames: int,
    max_restarts: int,
    seed: int | None,
    random_frames: int,
    keep_float64: bool,
) -> WorkerSpec:
    """What the workers of such a collector must know. The replay is shared, if it is not yet.

    Raises:
        InvalidArgument, InvalidType: anything that cannot work, before anything was made.
    """
    check_policy(policy, weights)
    check_portable(env, workers=num_workers)
    check_layout(layout, frames_per_batch, num_envs, budget.total if budget else total_frames)
    if max_restarts < 0:
        raise InvalidArgument(f"max_restarts must be at least 0, not {max_restarts}")
    if replay is not None and not sync:
        if not hasattr(replay, "receipt"):
            raise InvalidArgument(f"workers elsewhere cannot count what they write into a {type(replay).__name__}")
        replay.share()
    duty: Duty = "obey" if sync else "hand_over" if replay is None else "write"
    return WorkerSpec(
        workers=num_workers,
        duty=duty,
        env=env,
        policy=policy,
        num_envs=num_envs,
        frames_per_batch=frames_per_batch,
        layout=layout,
        random_frames=random_frames,
        keep_float64=keep_float64,
        seed=seed,
        budget=budget or FrameBudget(total_frames),
        weights=weights,
        replay=replay if duty == "write" else None,
    )


class ParallelCollector:
    """A collector whose frames come from a pool of workers. What these are says the class made of it.

    ``replay`` is where batches go, and ``owns_budget`` whether the budget was made for this collector alone.
    """

    def __init__(self, spec: WorkerSpec, pool: WorkerPool, *, replay: Any, owns_budget: bool) -> None:
        self.replay, self.sync, self.budget = replay, spec.duty == "obey", spec.budget
        self._spec, self._pool, self._owns_budget = spec, pool, owns_budget
        self._delivery: DeliveryMode | None = None
        self._loaded: Mapping[str, Any] = {"workers": [], "batches": []}
        self._final: dict[str, Any] | None = None  # the statistics, once closed

    # ------------------------------------------------------------------ running
    def start(self) -> None:
        """Start the workers, if they are not started yet, and return at once. They write into ``replay``.

        Raises:
            InvalidArgument: there is no ``replay``, or ``sync`` is set, so that somebody must iterate; or something
                cannot travel to the workers.
            BufferClosed: the collector was closed.
        """
        if self._spec.duty != "write":
            raise InvalidArgument("start() needs replay=… and sync=False; otherwise iterate over the collector")
        self._launch()

    def _launch(self) -> tuple[Supervision, DeliveryMode]:
        if self._final is not None:
            raise BufferClosed("this collector was closed")
        supervisor = self._pool.launch(dict(enumerate(self._loaded["workers"])))
        if self._delivery is None:
            self._delivery = self._new_harvest(supervisor)
        return supervisor, self._delivery

    def _new_harvest(self, supervisor: Supervision) -> DeliveryMode:
        spec = self._spec
        if spec.duty == "write":
            return Written(supervisor, self.budget)
        if spec.duty == "hand_over":
            return HandedOver(supervisor, self.budget, first=self._loaded["batches"])
        return Rounds(
            supervisor,
            self.budget,
            frames_per_batch=spec.frames_per_batch,
            multiple_of=check_layout(spec.layout, spec.frames_per_batch, spec.num_envs, self.budget.total) or 1,
            replay=self.replay,
        )

    def __iter__(self) -> Iterator[TensorDict | None]:
        return self

    def __next__(self) -> TensorDict | None:
        """The next batch, in memory of its own; None where it went into ``replay``.

        Raises:
            WorkerFailed: a worker raised, or more died than may be replaced.
            InvalidArgument, InvalidType: a worker raised it: the policy does not fit the environments, or these cannot
                be made.
            BufferClosed: the collector was closed.
        """
        _, delivery = self._launch()
        return delivery.next()

    def check(self) -> None:
        """Raises what iterating would, such as WorkerFailed with the worker's traceback, if the collection has
        failed."""
        if self._pool.supervisor is not None:
            raise_failure(self._pool.supervisor)

    def wait(self, *, timeout: float | None = None, cancel_event: CancelEvent | None = None) -> bool:
        """Wait until everything is collected, or the replay was closed. False: not within ``timeout`` seconds.

        Raises:
            WorkerFailed: the collection failed.
            Cancelled: ``cancel_event`` was set.
        """
        supervisor, _ = self._launch()
        return self.budget.wait_until(lambda: over(supervisor, self.budget), timeout=timeout, cancel_event=cancel_event)

    # ------------------------------------------------------------------ pausing
    def pause(
        self, *, timeout: float | None = None, cancel_event: CancelEvent | None = None, kill_after: float | None = None
    ) -> None:
        """Let every worker finish its batch, hand it over and rest. Returns when all of them do, and all is counted.

        That takes as long as the environments need. A worker that waits for space in the replay keeps its batch, and
        writes it after ``resume()``.

        With ``kill_after`` workers stop between two steps, and what they had reserved for a batch that is not complete
        is given back; one that is not done with its step after so many seconds is ended for good. So a pause at the end
        of a run, which nobody resumes, does not wait for an environment that hangs.

        Raises:
            DeadlineExceeded: not within ``timeout`` seconds; the workers still pause, and ``resume()`` works.
            Cancelled: ``cancel_event`` was set; likewise.
            WorkerFailed: the collection failed.
        """
        start = time.monotonic()
        end, last = start + check_timeout(timeout), start + check_timeout(kill_after)
        number, supervisor = self._pool.worker_table.pause(hurry=kill_after is not None), self._pool.supervisor
        if supervisor is None or self._delivery is None:
            return
        while active := self._active(supervisor, number):
            raise_failure(supervisor)
            if cancel_event is not None and cancel_event.is_set():
                raise Cancelled(f"cancelled while these workers had not paused yet: {self._described(active)}")
            if time.monotonic() >= last:
                logger.warning("ended, since they did not pause within %g s: %s", kill_after, self._described(active))
                for worker in active:
                    supervisor.dismiss(worker)
                last = math.inf
            if time.monotonic() >= end:
                raise DeadlineExceeded(f"after {timeout} s these workers did not pause: {self._described(active)}")
            time.sleep(_SLICE_S)
        self._delivery.settle()

    def _active(self, supervisor: Supervision, pause: int) -> list[int]:
        lines = self._pool.worker_table.lines
        return [
            handle.worker for handle in supervisor.handles if not handle.ended and lines[handle.worker].paused != pause
        ]

    def _described(self, workers: Iterable[int]) -> str:
        """Who they are, and what they do."""
        words = []
        for worker in workers:
            line = self._pool.worker_table.lines[worker]
            call = self._pool.watch.describe(worker, line)
            doing = f", process {line.process[0]}, {call}" if call else ""
            words.append(f"worker {worker} ({STATES[line.state]}){doing}")
        return "; ".join(words) or "no worker"

    def resume(self) -> None:
        """Go on after ``pause()``, also after one that timed out."""
        self._pool.worker_table.resume()

    # ------------------------------------------------------------------ looking
    @property
    def collected_frames(self) -> int:
        """Frames collected by everybody who shares the budget, earlier parts of the run included."""
        return self._final["collected_frames"] if self._final else self.budget.collected

    @property
    def written_frames(self) -> int:
        """Frames that this collector wrote into ``replay``."""
        written: int = self.stats()["written_frames"]
        return written

    def stats(self) -> dict[str, Any]:
        """Counters; ``workers`` has an entry for each: id, pid, state, frames, last_step_age_s, restarts, and why."""
        if self._final is not None:
            return self._final
        pool = self._pool
        counted = pool.worker_table.stats(self.budget, pool.lines, pool.deaths())
        written = sum(worker["frames"] for worker in counted["workers"]) if self.replay is not None else 0
        quarantine = list(pool.supervisor.quarantine) if pool.supervisor is not None else []
        return {**counted, "written_frames": written, "quarantine": quarantine}

    def explain(self) -> str:
        """In one line: how far the collection is, and what each worker does, since when."""
        if self._final is not None:
            return f"closed, with {self._final['collected_frames']} frames collected"
        budget, pool = self.budget, self._pool
        total = "" if budget.total < 0 else f" of {budget.total}"
        told = "not started" if pool.supervisor is None else self._described(range(len(pool.lines)))
        return f"{budget.collected}{total} frames collected, {budget.reserved} reserved; {told}"

    # ------------------------------------------------------------------ saving and ending
    def state_dict(self) -> dict[str, Any]:
        """What another collector needs to go on. Pauses the workers for it, if they are not paused."""
        states: dict[int, Any] = dict(enumerate(self._loaded["workers"]))
        batches, pool = list(self._loaded["batches"]), self._pool
        if pool.supervisor is not None and self._delivery is not None and self._final is None:
            was_pausing = pool.worker_table.pausing
            self.pause()
            states, batches = _ask(pool.supervisor), self._delivery.waiting()
            if not was_pausing:
                self.resume()
        return {
            "collected_frames": self.collected_frames,
            "lives": [line.lives for line in pool.worker_table.lines],
            "workers": [states.get(i) for i in range(len(pool.lines))],
            "batches": batches,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what was saved. Before the workers are started only.

        Raises:
            InvalidArgument: the collector has started, or its budget has.
        """
        pool = self._pool
        if pool.supervisor is not None:
            raise InvalidArgument("a collector that has started cannot load what another one saved")
        self.budget.restore(state["collected_frames"])
        lives = max(state["lives"], default=0)
        for line in pool.worker_table.lines:
            line.lives = lives
        if len(state["workers"]) > len(pool.lines):
            logger.warning(
                "%d workers were saved, there are %d: what the others had collected and not handed over is lost",
                *(len(state["workers"]), len(pool.lines)),
            )
        self._loaded = state

    def close(self) -> None:
        """End the workers, within 10 s whatever they do, and remove what was made here. Closing twice is fine."""
        if self._final is not None or not self._pool.ours:
            return
        self._pool.stop()
        self._final = self.stats()
        self._pool.release()
        if self._owns_budget:
            self.budget.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _ask(supervisor: Supervision) -> dict[int, dict[str, Any]]:
    """The states of all workers, which are paused; not of those that die over it, or do not answer."""
    asked = {handle.worker: len(handle.deaths) for handle in supervisor.handles if supervisor.ask(handle.worker)}
    states: dict[int, dict[str, Any]] = {}
    end = time.monotonic() + _ANSWER_S
    while missing := [
        worker
        for worker, deaths in asked.items()
        if worker not in states
        and not supervisor.handles[worker].ended
        and len(supervisor.handles[worker].deaths) == deaths
    ]:
        raise_failure(supervisor)
        with contextlib.suppress(queue.Empty):
            worker, state = supervisor.states.get(timeout=0.1)
            states[worker] = state
        if time.monotonic() > end:
            logger.warning(
                "workers %s did not tell their state within %g s; what they hold is not saved", missing, _ANSWER_S
            )
            break
    return states
