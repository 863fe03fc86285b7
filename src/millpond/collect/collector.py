"""Collection in the process of its user."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from tensordict import TensorDict

from millpond.collect.background import Background
from millpond.collect.batch_writer import BatchWriter
from millpond.collect.budget import FrameBudget
from millpond.collect.policies import check_policy
from millpond.collect.rollout import NOTHING, Rollout
from millpond.collect.worker_status import COLLECTING, FINISHED, PAUSED, WAITING, WRITING, WorkerTable
from millpond.core.errors import BufferClosed, InvalidArgument, InvalidType
from millpond.core.roles import CancelEvent
from millpond.envs.autoreset import Stepper
from millpond.envs.make import make
from millpond.replay.waiting import check_timeout
from millpond.weights import WeightBoard

logger = logging.getLogger("millpond.collect")
Layout = Literal["transitions", "sequences"]


class Collector:
    """Collects frames from environments that are stepped in this process: when it is iterated, or started.

    Each batch has ``frames_per_batch`` frames; the last one has what is left of ``total_frames`` (-1: no end). With
    ``layout="transitions"`` it is ``[frames]``, with ``"sequences"`` it is ``[num_envs, time]``. With ``replay`` the
    batches are written there, and the iterator yields None for each.

    A transition has ``observation``, ``action``, ``next/observation``, and, of shape ``[..., 1]``, ``next/reward``
    (float32), ``next/done``, ``next/terminated``, ``next/truncated``, ``policy_version`` (int64; -1 where the action
    was random), ``episode_id`` (int64; no other worker uses it) and ``step`` (int64; within the episode, from 0).
    float64 observations become float32 unless ``keep_float64``; other types are kept.

    Args:
        env: whatever ``millpond.envs.make`` takes.
        policy: a module from TensorDict to TensorDict that sets ``action``; None acts randomly.
        weights: pulled into ``policy`` before each batch.
        budget: shares out the frames among several collectors; then ``total_frames`` is the budget's.
        seed: decides environments, random actions and, if it has ``reseed(seed)``, the policy. None: a random one.
        random_frames: the first frames, counted over all collectors of the budget, are collected with random actions.
        cancel_event: set it to free a collector that waits for its replay; the iterator then raises ``Cancelled``.

    Raises:
        InvalidArgument, InvalidType: anything that cannot work, before anything was made.
    """

    def __init__(
        self,
        env: Any,
        policy: Any = None,
        *,
        frames_per_batch: int,
        num_envs: int = 1,
        total_frames: int = -1,
        layout: Layout = "transitions",
        replay: Any = None,
        weights: WeightBoard | None = None,
        budget: FrameBudget | None = None,
        seed: int | None = None,
        random_frames: int = 0,
        keep_float64: bool = False,
        cancel_event: CancelEvent | None = None,
    ) -> None:
        check_policy(policy, weights)
        self.replay, self.cancel_event = replay, cancel_event
        made = make(env, num_envs=num_envs)
        self._env, self._owns_env = made, not hasattr(env, "step")
        self.budget, self._owns_budget = budget or FrameBudget(total_frames), budget is None
        try:
            time = check_layout(layout, frames_per_batch, made.num_envs, self.budget.total if budget else total_frames)
            (line,) = self.budget.claim(1)
            rollout = Rollout(
                Stepper(made),
                policy,
                frames=frames_per_batch,
                time=time,
                origin=line,
                seed=seed,
                keep_float64=keep_float64,
            )
        except BaseException:
            self._release()
            raise
        self._batch_writer = BatchWriter(
            rollout,
            self.budget,
            line=line,
            frames_per_batch=frames_per_batch,
            random_frames=random_frames,
            weights=weights,
        )
        self._worker_table = WorkerTable(bytearray(WorkerTable.nbytes(1)), workers=1)
        self._me = self._worker_table.lines[0]
        self._me.enter()
        self._me.doing(NOTHING)
        rollout.doing = self._me.doing
        self._background: Background | None = None
        self._final: dict[str, Any] | None = None  # the statistics, once closed
        self._own: TensorDict | None = None  # the batch that is being handed out
        self._closed = False

    # ------------------------------------------------------------------ collecting
    def __iter__(self) -> Iterator[TensorDict | None]:
        return self

    def __next__(self) -> TensorDict | None:
        """The next batch, in memory of its own; None where it went into ``replay``.

        Raises:
            BufferClosed: the collector was closed.
            Cancelled: ``cancel_event`` was set; iterating again goes on with the same batch.
            InvalidArgument, InvalidType: the policy does not fit the environments; before any frame was collected.
            Whatever the environment, the policy or the replay raises.
        """
        self._refuse_closed()
        if self._background is not None:
            raise InvalidArgument("this collector was started, and collects by itself; it cannot be iterated too")
        if self._own is None:  # else an exception came when it was nearly handed out
            batch = self._next_batch()
            if batch is None:
                raise StopIteration
            if self.replay is None:
                self._own = batch.clone()
            else:
                self._batch_writer.write(self.replay, cancel_event=self.cancel_event)
        if self._own is not None and self._batch_writer.granted:
            self._batch_writer.settle()
        self._report(WAITING)
        own, self._own = self._own, None
        return own

    def _next_batch(self) -> TensorDict | None:
        """None: nothing is left to collect, or the collector is stopping."""
        self._me.state = COLLECTING
        batch = self._batch_writer.batch(self._stepped)
        if batch is None:
            self._report(FINISHED if self.budget.finished else WAITING)
        elif self.replay is not None:
            self._me.state = WRITING
        return batch

    def _stepped(self) -> bool:
        self._me.touch()
        return self._background is not None and self._background.stopping

    def _refuse_closed(self) -> None:
        if self._closed:
            raise BufferClosed("this collector was closed")

    # ------------------------------------------------------------------ in the background
    def start(self) -> None:
        """Collect into ``replay`` in a thread, and return at once.

        Raises:
            InvalidArgument: there is no ``replay``.
            BufferClosed: the collector was closed.
        """
        self._refuse_closed()
        if self.replay is None:
            raise InvalidArgument("start() needs replay=…; otherwise iterate over the collector")
        if self._background is None:
            self._background = Background(
                self._batch_writer,
                self.replay,
                budget=self.budget,
                next_batch=self._next_batch,
                written=lambda: self._report(WAITING),
            )
        self._background.start()

    def pause(self, *, timeout: float | None = None) -> None:
        """Finish the batch, and rest. A batch that waits for space in the replay is kept, and written afterwards.

        Raises:
            DeadlineExceeded: not within ``timeout`` seconds; it still pauses, and ``resume()`` works.
            WorkerFailed, InvalidArgument: collecting failed.
        """
        check_timeout(timeout)
        if self._background is not None:
            self._background.pause(timeout)
            self._me.state = PAUSED

    def resume(self) -> None:
        """Go on after ``pause()``, also after one that timed out."""
        if self._background is not None:
            self._background.resume()

    def check(self) -> None:
        """Raises WorkerFailed, or InvalidArgument, caused by what was raised, if collecting in the background has
        failed."""
        if self._background is not None:
            self._background.check()

    def wait(self, *, timeout: float | None = None, cancel_event: CancelEvent | None = None) -> bool:
        """Wait until a collector that was started has collected everything. False: not within ``timeout`` seconds.

        Raises:
            WorkerFailed: collecting failed.
            Cancelled: ``cancel_event`` was set.
        """
        self.start()
        assert self._background is not None
        return self._background.wait(timeout, cancel_event)

    def _report(self, state: int) -> None:
        rollout = self._batch_writer.rollout
        self._me.state = state
        held, dropped = rollout.rows.held, self._batch_writer.dropped
        self._me.report(rollout.tally, held=held, dropped=dropped, version=rollout.version)

    @property
    def policy_version(self) -> int:
        """The number of the weights that the policy holds. Set it where they come another way than by ``weights``."""
        return self._batch_writer.rollout.version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._batch_writer.rollout.version = version

    # ------------------------------------------------------------------ looking
    @property
    def collected_frames(self) -> int:
        """Frames collected by everybody who shares the budget, earlier parts of the run included."""
        return self.budget.collected

    @property
    def written_frames(self) -> int:
        """Frames that this collector wrote into ``replay``."""
        written: int = self.stats()["written_frames"]
        return written

    def stats(self) -> dict[str, Any]:
        """Counters, under the same names as those of ``MultiCollector``."""
        if self._final is not None:
            return self._final
        counted = self._worker_table.stats(self.budget, [self._batch_writer.line], [()])
        written = self.budget.collected_by(self._batch_writer.line) if self.replay is not None else 0
        return {**counted, "written_frames": written, "quarantine": list(self._batch_writer.rollout.tally.recent)}

    # ------------------------------------------------------------------ saving and ending
    def state_dict(self) -> dict[str, Any]:
        """What another collector needs to go on: the count, and the frames that are not handed over yet."""
        return {
            "collected_frames": self.collected_frames,
            "lives": [self._me.lives],
            "workers": [self._batch_writer.rollout.state_dict()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what was saved. Before the first batch only.

        Raises:
            InvalidArgument: it does not fit, or this collector has begun.
        """
        lives = max(state["lives"], default=0)
        self._batch_writer.rollout.load_state_dict(next(iter(state["workers"]), None), incarnation=lives)
        self._me.lives = lives + 1
        self._report(WAITING)
        self.budget.restore(state["collected_frames"])

    def close(self) -> None:
        """Give back what is reserved, and close what was made here. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        if self._background is not None and not self._background.stop():
            logger.warning("an environment does not return from step(); its thread is left behind")
            return
        self._batch_writer.abandon()
        self._final = self.stats()
        self.budget.release(self._batch_writer.line)
        self._release()

    def _release(self) -> None:
        if self._owns_env:
            self._env.close()
        if self._owns_budget:
            self.budget.close()

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_layout(layout: str, frames_per_batch: int, num_envs: int, total_frames: int) -> int | None:
    """The time of each sequence; None for flat transitions.

    Raises:
        InvalidArgument: an unknown layout, or sizes that do not go together.
    """
    if isinstance(frames_per_batch, bool) or not isinstance(frames_per_batch, int):
        raise InvalidType(f"frames_per_batch must be an int, not {type(frames_per_batch).__name__}")
    if frames_per_batch < 1:
        raise InvalidArgument(f"frames_per_batch must be at least 1, not {frames_per_batch}")
    if layout == "transitions":
        return None
    if layout != "sequences":
        raise InvalidArgument(f"layout must be 'transitions' or 'sequences', not {layout!r}")
    if frames_per_batch % num_envs:
        raise InvalidArgument(
            f"sequences of equal length need frames_per_batch to be a multiple of num_envs: "
            f"{frames_per_batch} frames, {num_envs} environments"
        )
    time = frames_per_batch // num_envs
    if total_frames > 0 and total_frames % time:
        raise InvalidArgument(f"total_frames={total_frames} is not a multiple of the {time} frames of a sequence")
    return time
