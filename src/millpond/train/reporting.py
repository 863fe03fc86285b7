"""What a run tells while it goes on: rows for the loggers, moments for the progress line, warnings for the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from millpond.train.assembly import Parts
from millpond.train.evaluator import Evaluator, Result
from millpond.train.loggers import Loggers
from millpond.train.machine import MemoryMeter
from millpond.train.meters import RateMeter, SlidingRates, UpdateMeter, replay_row
from millpond.train.progress import Moment, Progress

logger = logging.getLogger("millpond.train")
TICK_S = 0.5


class Reporter:
    """Collects the numbers of one run. ``tick`` often, ``report`` when a row is due."""

    def __init__(self, parts: Parts, loggers: Loggers, progress: Progress, evaluator: Evaluator) -> None:
        self._parts, self._loggers, self._progress, self._evaluator = parts, loggers, progress, evaluator
        self.meter = UpdateMeter(parts.world.spec)
        self.memory = MemoryMeter()
        self.restarts = 0
        self._earlier_restarts = 0
        self.first_return: float | None = None
        self.last_return: float | None = None
        self._phase = ""
        self._next_tick = 0.0
        self.begin(wall_s=0.0)

    def begin(self, *, wall_s: float, restarts: int = 0) -> None:
        """Start the clocks. ``wall_s`` and ``restarts`` are those of earlier parts of the run."""
        self.restarts = self._earlier_restarts = restarts
        self._start = time.monotonic() - wall_s
        self._rates = RateMeter(frames=self._parts.frames, updates=self._parts.algorithm.steps)
        self._shown = SlidingRates()

    def state(self) -> dict[str, Any]:
        """What is told of the run so far, for ``go_on``."""
        return {
            "wall_s": self.wall_s,
            "eval_return_first": self.first_return,
            "eval_return_last": self.last_return,
            "restarts": self.restarts,
            "evaluations_skipped": self._evaluator.skipped,
            "evaluations_failed": self._evaluator.failed,
        }

    def go_on(self, state: Mapping[str, Any], meter: Mapping[str, Any]) -> None:
        """Go on from what an earlier part of the run has told."""
        self.first_return, self.last_return = state["eval_return_first"], state["eval_return_last"]
        self._evaluator.skipped, self._evaluator.failed = state["evaluations_skipped"], state["evaluations_failed"]
        drawn = self._parts.replay.stats()["samples_returned"]  # for checkpoints that do not say what was learned
        self.meter.load_state_dict({"learned": drawn, **meter})
        self.begin(wall_s=state["wall_s"], restarts=state["restarts"])

    @property
    def wall_s(self) -> float:
        """Seconds since the run began, earlier parts of it included."""
        return time.monotonic() - self._start

    # ------------------------------------------------------------------ what happens
    def updated(self, batch: TensorDictBase, metrics: Mapping[str, Tensor]) -> None:
        """One update was done."""
        self._phase = "train"
        self.meter.saw(batch, metrics)

    def evaluated(self, result: Result) -> None:
        """An evaluation ended, well or not. What it gave is a row of its own, at its own frame."""
        if result.episodes is None:
            return
        task, row = result.task, result.row()
        logger.info("evaluation at frame %d, version %d: %s", task.frames, task.version, result.episodes)
        self._loggers.write(task.frames, {"updates": task.version, "wall_s": task.wall_s, **row})
        if task.film is not None and result.film_error is None:
            self._loggers.film(task.frames, task.film)
        if lost := int(row["eval/quarantined_episodes"]):
            logger.warning(
                "the evaluation at frame %d: %d of %d episodes had numbers that are not finite, and count in no mean",
                *(task.frames, lost, len(result.episodes.returns)),
            )
        self.last_return = row.get("eval/return_mean")
        if task.frames == 0 and self.first_return is None:
            self.first_return = self.last_return

    # ------------------------------------------------------------------ what is told
    def tick(self, *, phase: str | None = None) -> None:
        """Refresh the progress line, look at the workers and the memory; at most twice a second, or for a new phase."""
        now = time.monotonic()
        if now < self._next_tick and phase in (None, self._phase):
            return
        self._phase = phase or self._phase
        if self._phase == "start" and self._parts.frames:
            self._phase = "prefill"
        self._next_tick = now + TICK_S
        stats = self._parts.collector.stats()
        self._look_at_processes(stats)
        self._show(self._shown(frames=self._parts.frames, updates=self._parts.algorithm.steps))

    def report(self, *, last: bool = False) -> None:
        """Write one row; the ``last`` has no rates, since nothing went on before it."""
        parts, frames, steps = self._parts, self._parts.frames, self._parts.algorithm.steps
        collected = parts.collector.stats()
        self._look_at_processes(collected)
        rates = self._rates.row(frames=frames, updates=steps)
        row: dict[str, float] = {"updates": steps, "wall_s": self.wall_s, "optim/steps": steps}
        row |= _collect_row(collected) | {"collect/restarts": self.restarts}
        row |= replay_row(parts.replay_stats(), learning_starts=parts.settings.replay.learning_starts)
        row |= self.meter.row(steps=steps) | ({} if last else rates)
        row |= {"eval/skipped": self._evaluator.skipped, "eval/failed": self._evaluator.failed}
        self._loggers.write(frames, row)

    def _look_at_processes(self, stats: Mapping[str, Any]) -> None:
        self.restarts = self._earlier_restarts + int(stats["restarts"])
        pids = [worker["pid"] for worker in stats.get("workers", ()) if worker["pid"]]
        self.memory.look({*pids, *filter(None, [self._evaluator.pid, self._parts.replay_pid])})

    def _show(self, rates: tuple[float, float] | None) -> None:
        parts = self._parts
        frames_per_s, updates_per_s = rates or (None, None)
        self._progress.show(
            Moment(
                frames=parts.frames,
                total_frames=parts.settings.total_frames,
                updates=parts.algorithm.steps,
                frames_per_s=frames_per_s,
                updates_per_s=updates_per_s,
                replay_size=len(parts.replay),
                eval_return=self.last_return,
                phase=self._phase,
            )
        )


def _collect_row(stats: Mapping[str, Any]) -> dict[str, float]:
    row = {"collect/frames": float(stats["collected_frames"])}
    for name in ("episodes", "episode_return", "episode_length", "quarantined_rows"):
        if stats.get(name) is not None:
            row[f"collect/{name}"] = float(stats[name])
    return row
