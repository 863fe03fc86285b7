"""A training run: collect, replay, learn, publish, evaluate; and at the end, ask whether all of that really happened.

Two ways to run the same parts. *Synchronous*: everything takes turns in this process; the same seed gives the same
numbers, also where the run was stopped and resumed. *Asynchronous*: collector processes write into shared replay and
this process learns, each at its own pace, tied by the replay ratio on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millpond.core.errors import Cancelled, DeadlineExceeded
from millpond.learn.learner import Learner
from millpond.train.assembly import Parts
from millpond.train.checks import Facts, Ratio
from millpond.train.due import Every
from millpond.train.evaluator import Evaluator, Task
from millpond.train.exploring import Explorers
from millpond.train.reporting import Reporter
from millpond.train.run_state import Checkpoints, RunDirectory
from millpond.train.saving import Saver
from millpond.train.stored import look_at_stored
from millpond.train.supervise import StopSignal

_SLICE_S = 0.25  # how long a wait for a batch lasts before the rest of the run is looked at
_NEWEST = 1024  # items that are looked at, of those that were written last


class Trainer:
    """Runs one run, from wherever its parts stand, to its last frame or until it is stopped.

    ``restored`` is the ``run.json`` of the checkpoint that the parts were loaded from; ``changes`` lists which settings
    were changed at which frame, when the run was resumed.
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
        restored: Mapping[str, Any] | None = None,
        changes: list[dict[str, Any]] | None = None,
    ) -> None:
        settings = parts.settings
        self._parts, self._run, self._reporter, self._evaluator = parts, run, reporter, evaluator
        self._stop, self._algorithm, self._replay = stop, parts.algorithm, parts.replay
        self._learner = Learner(
            parts.algorithm,
            parts.replay,
            parts.board,
            batch_size=settings.replay.batch_size,
            publish_every=settings.learner.publish_interval,
            frames=lambda: parts.frames,
        )
        self._saver = Saver(parts, reporter, checkpoints, progress=self._progress)
        written, time = parts.replay.write_count, settings.sequence_length
        self._explorers = Explorers(parts.algorithm, parts.world.spec, written=written, time=time)
        self._due = {
            "report": Every(settings.report_interval, after=parts.frames),
            "evaluation": Every(settings.eval.interval_frames, after=parts.frames),
            "film": Every(settings.eval.video_interval_frames or 0, after=parts.frames),
        }
        self._changes = changes or []
        self._first_publication: int | None = None  # frames that were collected or on their way by then
        self._again: Mapping[str, Any] | None = None  # an evaluation that was cut off, of the weights as they are
        self._begun = False  # is the evaluation before training made, or cut off?
        self.ended = False
        """All is done: the last frame, the last update, the last evaluation."""
        if restored:
            self._restore(restored)

    @property
    def complete(self) -> bool:
        """Every frame is collected and every update that they allow is done."""
        return self._parts.frames >= self._parts.settings.total_frames and not self._replay.can_sample()

    def run(self) -> None:
        """Train. Returns when the run has ended, or when a stop was requested."""
        parts, reporter = self._parts, self._reporter
        if self.ended and self.complete:
            parts.publish()
            return
        self.ended = False
        reporter.tick(phase="start")
        if parts.group is not None:
            parts.group.start()
        if self._again is not None:
            self._evaluate(film=self._again["film"], frames=self._again["frames"])
        elif not self._begun and parts.frames == 0:
            self._begun = self._evaluate(film=False)
        if not self._stop.requested:
            (self._take_turns if parts.settings.synchronous else self._side_by_side)()
        parts.publish()
        if self.complete and not self._stop.requested:
            reporter.tick(phase="evaluate")
            self._evaluate_last()
        if self.complete and not self._stop.requested:
            reporter.report(last=True)
            self.ended = True
        self._poll()
        self._saver.save()

    def rescue(self) -> None:
        """After a failure: what was evaluated is told, and what was learned is saved, as far as that can be."""
        self._poll()
        self._saver.rescue()

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
            self._explorers.note()
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
        self._saver.rest()

    def _learn(self) -> None:
        """One update, if a batch for it can be had before the rest of the run must be looked at."""
        try:
            metrics = self._learner.step(timeout=_SLICE_S, cancel_event=self._stop.event)
        except (DeadlineExceeded, Cancelled):
            return
        batch = self._learner.batch
        assert batch is not None
        self._reporter.updated(batch, metrics)
        if self._parts.board is not None and self._parts.board.version == self._algorithm.steps:
            self._explorers.note()
        if self._first_publication is None and self._algorithm.steps >= self._parts.settings.learner.publish_interval:
            budget = self._parts.budget
            reserved = budget.reserved if budget is not None else 0  # read first: what is counted since counts twice
            self._first_publication = self._parts.frames + reserved

    # ------------------------------------------------------------------ beside learning
    def _look(self) -> None:
        """Whatever is due by now. Nothing here that depends on the clock changes the numbers of a synchronous run."""
        frames = self._parts.frames
        self._poll()
        self._explorers.look(self._replay, frames=frames, newest=_NEWEST)
        # The last evaluation, row and checkpoint come when all is done; what a stop leaves undone, on resuming.
        if not self.complete and not self._stop.requested:
            self._evaluate_if_due(frames)
        if not self.complete and not self._stop.requested:
            if self._due["report"].due(frames):
                self._reporter.report()
            self._saver.save_if_due(frames, cancel_event=self._stop.event)
        self._reporter.tick()

    def _evaluate_if_due(self, frames: int) -> None:
        due, film = self._due["evaluation"].due(frames), self._due["film"].ready(frames)
        if not due and (not film or self._evaluator.busy):
            return
        if self._evaluate(film=film) and film:  # else it is filmed the next time
            self._due["film"].done(frames)

    def _evaluate(self, *, film: bool, frames: int | None = None) -> bool:
        """Evaluate the weights as they are, as those of ``frames`` (default: now); False: another one is running."""
        frames = self._parts.frames if frames is None else frames
        path = self._run.videos / f"frame-{frames:09d}.mp4" if film else None
        task = Task(frames, self._algorithm.steps, path, wall_s=self._reporter.wall_s)
        if self._stop.requested or not self._evaluator.submit(task):
            return False
        if self._parts.settings.synchronous:
            self._collect_result()
        return True

    def _collect_result(self) -> None:
        result = self._evaluator.wait(self._stop.event)
        if result is not None:
            self._reporter.evaluated(result)

    def _poll(self) -> None:
        if (result := self._evaluator.poll()) is not None:
            self._reporter.evaluated(result)

    def _evaluate_last(self) -> None:
        """The final weights, after whatever is still being evaluated."""
        self._collect_result()
        self._evaluate(film=self._parts.settings.eval.video_interval_frames != 0)
        self._collect_result()

    # ------------------------------------------------------------------ checkpoints
    def _progress(self) -> dict[str, Any]:
        return {
            "due": {name: every.state for name, every in self._due.items()},
            "evaluating": self._cut_off(),
            "first_publication": self._first_publication,
            "changes": self._changes,
            "begun": self._begun,
            "ended": self.ended,
        }

    def _cut_off(self) -> dict[str, Any] | None:
        """The evaluation that a stop has cut off, where the weights are still those that it was of."""
        task = self._evaluator.task
        if task is None or task.version != self._algorithm.steps or self.complete:
            return None
        return {"frames": task.frames, "film": task.film is not None}

    def _restore(self, state: Mapping[str, Any]) -> None:
        for name, saved in state["due"].items():
            self._due[name].go_on(saved)
        self._first_publication = state["first_publication"]
        self._again, self._begun, self.ended = state["evaluating"], state["begun"], state["ended"]

    # ------------------------------------------------------------------ the end
    def facts(self, *, not_finite: Mapping[str, int]) -> Facts:
        """What the checks are about."""
        parts, meter, replay = self._parts, self._reporter.meter, self._replay
        settings, steps = parts.settings, self._algorithm.steps
        if len(replay):
            meter.look(replay[-_NEWEST:], steps=steps)
            self._explorers.look(replay, frames=parts.frames, newest=_NEWEST, last=True)
        first = settings.total_frames if self._first_publication is None else self._first_publication
        return Facts(
            total_frames=settings.total_frames,
            collected_frames=parts.frames,
            written_frames=parts.written_frames,
            written_items=parts.write_count,
            optimizer_steps=steps,
            published_version=parts.published_version,
            newest_version=meter.newest_version,
            learnable_frames=settings.total_frames - max(first, settings.collect.random_frames),
            batch_size=settings.replay.batch_size,
            explored=self._explorers.explored,
            complete=self.complete or not self._stop.requested,
            batch_shapes_seen=dict(meter.batch_shapes),
            learned=meter.learned,
            ratio=self._ratio(),
            stored=look_at_stored(replay, parts.world.spec, time=settings.sequence_length),
            not_finite=not_finite,
            payload_bytes_through_ray=parts.payload_bytes_through_ray,
            payload_by_ray=settings.replay.transport == "ray",
        )

    def _ratio(self) -> Ratio:
        """As the settings are, and as they were in earlier parts of the run."""
        settings = self._parts.settings
        replay, ratio = settings.replay, settings.samples_per_insert

        def all_of(name: str, now: Any) -> list[Any]:
            found = [now]
            for change in self._changes:
                found += change["settings"].get(f"replay.{name}", ())
            return found

        batches = all_of("batch_size", replay.batch_size)
        ratios = all_of("samples_per_insert", replay.samples_per_insert)  # None is a batch for each item
        consumed = ratio is None  # then each item is drawn so often, the first ones too
        count = float(replay.consume_after_n_samples or 1)
        lost = (self._parts.lives - 1) * max(batches)
        if consumed:  # of less than a batch of items all draws may be left
            lost += int(count - 1) * replay.batch_size
        return Ratio(
            samples_per_insert=count if ratio is None else ratio,
            learning_starts=0 if consumed else replay.learning_starts,
            most_samples_per_insert=count if consumed else max(max(batches) if one is None else one for one in ratios),
            least_learning_starts=0 if consumed else min(all_of("learning_starts", replay.learning_starts)),
            lost=lost,
        )
