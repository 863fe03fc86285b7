"""A training run: collect, replay, learn, publish, evaluate; and at the end, ask whether all of that really happened.

Two ways to run the same parts. *Synchronous*: everything takes turns in this process; the same seed gives the same
numbers. *Asynchronous*: collector processes write into shared replay and this process learns, each at its own pace,
tied by the replay ratio on both sides.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from tensordict import TensorDictBase
from torch import nn

from millpond.core.errors import Cancelled, DeadlineExceeded
from millpond.learn.learner import Learner
from millpond.train.assembly import Parts
from millpond.train.checkpoint import spec_to_json, write_parts
from millpond.train.checks import Facts
from millpond.train.evaluator import Evaluator, Task
from millpond.train.meters import action_statistics
from millpond.train.reporting import Reporter
from millpond.train.run_state import Checkpoints, RunDirectory
from millpond.train.supervise import StopSignal

logger = logging.getLogger("millpond.train")
_SLICE_S = 0.25  # how long a wait for a batch lasts before the rest of the run is looked at
_HUNG_S = 5.0  # when a run ends nobody waits longer for a step of an environment
_NEWEST = 1024  # items that the last checks look at


class Every:
    """Is something due that is done every ``interval`` frames? Never, with 0."""

    def __init__(self, interval: int, *, after: int = 0) -> None:
        self._interval = interval
        self._next = self._following(after)

    def due(self, frames: int) -> bool:
        if not self._interval or frames < self._next:
            return False
        self._next = self._following(frames)
        return True

    def _following(self, frames: int) -> int:
        return (frames // self._interval + 1) * self._interval if self._interval else 0


class Trainer:
    """Runs one run, from wherever its parts stand, to its last frame or until it is stopped.

    ``restored`` is the ``run.json`` of the checkpoint that the parts were loaded from.
    """

    def __init__(
        self,
        parts: Parts,
        run: RunDirectory,
        *,
        reporter: Reporter,
        evaluator: Evaluator,
        checkpoints: Checkpoints,
        stop: StopSignal,
        restored: dict[str, Any] | None = None,
    ) -> None:
        settings = parts.settings
        self._parts, self._run, self._reporter, self._evaluator = parts, run, reporter, evaluator
        self._checkpoints, self._stop = checkpoints, stop
        self._algorithm, self._replay = parts.algorithm, parts.replay
        self._learner = Learner(
            parts.algorithm,
            parts.replay,
            parts.board,
            batch_size=settings.replay.batch_size,
            publish_every=settings.learner.publish_interval,
            frames=lambda: parts.frames,
        )
        frames = parts.frames
        self._report_due = Every(settings.report_interval, after=frames)
        self._evaluation_due = Every(settings.eval.interval_frames, after=frames)
        self._video_due = Every(settings.eval.video_interval_frames, after=frames)
        self._checkpoint_due = Every(settings.checkpoint.interval_frames, after=frames)
        self._first_publication: int | None = None  # frames that were collected or on their way by then
        if restored:
            self._restore(restored)

    @property
    def complete(self) -> bool:
        """Every frame is collected and every update that they allow is done."""
        return self._parts.frames >= self._parts.settings.total_frames and not self._replay.can_sample()

    def run(self) -> None:
        """Train. Returns when the run is complete, or when a stop was requested."""
        parts, reporter = self._parts, self._reporter
        reporter.tick(phase="start")
        if parts.frames == 0:
            self._evaluate(film=False)
        (self._take_turns if parts.settings.synchronous else self._side_by_side)()
        if not parts.settings.synchronous:
            parts.collector.pause(kill_after=_HUNG_S)  # for good: what is counted from here on stays so
        parts.publish()
        if self.complete:
            reporter.tick(phase="evaluate")
            self._evaluate_last()
        reporter.report(last=True)
        self._save()

    # ------------------------------------------------------------------ two ways of running
    def _take_turns(self) -> None:
        parts, replay = self._parts, self._replay
        while True:
            while replay.can_sample() and not self._stop.requested:
                self._learn()
            self._look()
            if self._stop.requested:
                return
            parts.publish()
            try:
                next(parts.collector)
            except StopIteration:
                return

    def _side_by_side(self) -> None:
        parts = self._parts
        parts.collector.start()
        while not self._stop.requested and not self.complete:
            parts.collector.check()
            self._learn()
            self._look()

    def _learn(self) -> None:
        """One update, if a batch for it can be had before the rest of the run must be looked at."""
        try:
            metrics = self._learner.step(timeout=_SLICE_S, cancel_event=self._stop.event)
        except (DeadlineExceeded, Cancelled):
            return
        batch = self._learner.batch
        assert batch is not None
        self._reporter.updated(batch, metrics)
        if self._first_publication is None and self._algorithm.steps >= self._parts.settings.learner.publish_interval:
            budget = self._parts.budget
            self._first_publication = self._parts.frames + (budget.reserved if budget is not None else 0)

    # ------------------------------------------------------------------ beside learning
    def _look(self) -> None:
        """Whatever is due by now. In synchronous mode nothing here depends on the clock but what is shown."""
        frames, evaluator = self._parts.frames, self._evaluator
        if (result := evaluator.poll()) is not None:
            self._reporter.evaluated(result)
        if not self.complete:  # the last evaluation, row and checkpoint come when all is done
            if self._evaluation_due.due(frames):
                self._evaluate(film=self._video_due.due(frames))
            if self._report_due.due(frames):
                self._reporter.report()
            if self._checkpoint_due.due(frames):
                self._save_and_go_on()
        self._reporter.tick()

    def _evaluate(self, *, film: bool) -> None:
        frames, version = self._parts.frames, self._algorithm.steps
        path = self._run.videos / f"frame-{frames:09d}.mp4" if film else None
        if self._evaluator.submit(Task(frames, version, path)) and self._parts.settings.synchronous:
            self._collect_result()

    def _collect_result(self) -> None:
        result = self._evaluator.wait(self._stop.event)
        if result is not None:
            self._reporter.evaluated(result)

    def _evaluate_last(self) -> None:
        """The final weights, after whatever is still being evaluated."""
        self._collect_result()
        self._evaluate(film=self._parts.settings.eval.video_interval_frames > 0)
        self._collect_result()

    # ------------------------------------------------------------------ checkpoints
    def _save_and_go_on(self) -> None:
        """A synchronous collector begins anew after a checkpoint, exactly as it would after a resume."""
        parts = self._parts
        if parts.settings.synchronous:
            collector = self._save()
            parts.collect(collector)
            parts.publish()
        else:
            try:
                parts.collector.pause(cancel_event=self._stop.event)
            except (
                Cancelled
            ):  # a stop was requested while an environment took its time; the checkpoint comes at the end
                return
            self._save()
            parts.collector.resume()

    def _save(self) -> dict[str, Any]:
        """Save a checkpoint while nobody collects; returns the state of the collector."""
        parts, reporter = self._parts, self._reporter
        collector: dict[str, Any] = parts.collector.state_dict()
        state = {
            "frames": parts.frames,
            "updates": self._algorithm.steps,
            "wall_s": reporter.wall_s,
            "eval_return_first": reporter.first_return,
            "eval_return_last": reporter.last_return,
            "restarts": reporter.restarts,
            "newest_version": reporter.meter.newest_version,
            "first_publication": self._first_publication,
            "spec": spec_to_json(parts.world.spec),
        }
        path = self._checkpoints.save(
            frames=parts.frames,
            updates=self._algorithm.steps,
            state=state,
            write=lambda folder: write_parts(folder, parts, collector),
        )
        logger.info("checkpoint %s", path)
        return collector

    def _restore(self, state: dict[str, Any]) -> None:
        reporter = self._reporter
        reporter.first_return, reporter.last_return = state["eval_return_first"], state["eval_return_last"]
        reporter.meter.newest_version = state["newest_version"]
        reporter.begin(wall_s=state["wall_s"], restarts=state["restarts"])
        self._first_publication = state["first_publication"]

    # ------------------------------------------------------------------ the end
    def facts(self, *, not_finite: Mapping[str, int]) -> Facts:
        """What the checks are about."""
        parts, meter, replay = self._parts, self._reporter.meter, self._replay
        settings, steps = parts.settings, self._algorithm.steps
        exploration = action_std = 0.0
        if len(replay):
            newest = replay[-_NEWEST:]
            meter.look(newest, steps=steps)
            action_std = action_statistics(newest.get("action"), parts.world.spec)["replay/action_std"]
            exploration = explores(self._algorithm.policy, newest)
        first = settings.total_frames if self._first_publication is None else self._first_publication
        return Facts(
            total_frames=settings.total_frames,
            collected_frames=parts.frames,
            written_frames=replay.write_count,
            optimizer_steps=steps,
            published_version=parts.published_version,
            newest_version=meter.newest_version,
            learnable_frames=settings.total_frames - first,
            batch_size=settings.replay.batch_size,
            exploration=exploration,
            action_std=action_std,
            complete=self.complete,
            batch_sizes_seen=dict(meter.batch_sizes),
            not_finite=not_finite,
        )


def explores(policy: nn.Module, observed: TensorDictBase) -> float:
    """How far two actions of ``policy`` for the same observations differ, on average: 0 if it is deterministic."""
    asked = observed.select("observation").to(next(policy.parameters()).device)
    first, second = (policy(asked.clone()).get("action").double() for _ in range(2))
    return float((first - second).abs().mean())
