"""Learning, on one rank or as rank 0 of a `LearnerGroup`: sample, update, publish, report."""

from __future__ import annotations

from collections.abc import Callable

from tensordict import TensorDictBase
from torch import Tensor

from millpond.core.errors import InvalidArgument
from millpond.core.roles import Algorithm, Board, CancelEvent, Replay


class Learner:
    """Turns samples into optimizer steps, and optimizer steps into published versions.

    A version is the number of optimizer steps that made it. It is published after every ``publish_every``-th step, and
    by `finish` after the last one, so that at the end the published version equals the optimizer steps.

    Args:
        algorithm: what is updated, in place; a `LearnerGroup` where several ranks learn.
        replay: where batches come from; a ``ReplayBuffer``, a client of one, or a ``SampleStream``.
        board: where weights go; None publishes nothing.
        batch_size: items per update; those of all ranks together.
        publish_every: updates between two publications.
        device: where batches are moved; None leaves them where replay puts them.
        frames: how many frames were collected so far, for exploration schedules; by default ``replay.write_count``,
            which is the same where an item is one transition.

    Raises:
        InvalidArgument: a number below 1.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        replay: Replay,
        board: Board | None = None,
        *,
        batch_size: int,
        publish_every: int = 1,
        device: str | None = None,
        frames: Callable[[], int] | None = None,
    ) -> None:
        if batch_size < 1 or publish_every < 1:
            raise InvalidArgument(f"batch_size and publish_every must be at least 1, got {batch_size}, {publish_every}")
        self.algorithm = algorithm
        self.batch: TensorDictBase | None = None
        """The batch of the last update, for whoever measures what was learned from."""
        self._replay = replay
        self._board = board
        self._batch_size = batch_size
        self._publish_every = publish_every
        self._device = device
        self._frames = frames or (lambda: replay.write_count)

    def step(self, *, timeout: float | None = None, cancel_event: CancelEvent | None = None) -> dict[str, Tensor]:
        """Wait for a batch, learn from it, and return the algorithm's metrics: detached scalars by namespaced name.

        Where replay is prioritized, the new priorities go back to it, and ``replay/priority_…`` tell of them. Waits at
        most ``timeout`` seconds for the batch.

        Raises:
            DeadlineExceeded, Cancelled, BufferClosed, PeerLost: from the wait. No step was made.
            NonFinite: the loss is not finite; the message names field and row. The parameters are as before.
            WorkerFailed: another rank failed, died or hangs; the parameters are those of the last whole step.
        """
        batch = self._replay.sample(self._batch_size, wait=True, timeout=timeout, cancel_event=cancel_event)
        self.batch = batch if self._device is None else batch.to(self._device)
        self.algorithm.advance(self._frames())
        metrics = self.algorithm.update(self.batch)
        td_error = metrics.pop("td_error", None)
        if td_error is not None and batch.get("priority_weight", None) is not None:
            self._replay.update_priority(batch, td_error.to(batch.device or "cpu"))
            metrics |= {"replay/priority_mean": td_error.mean(), "replay/priority_max": td_error.max()}
        if self.algorithm.steps % self._publish_every == 0:
            self.publish()
        return metrics

    def publish(self) -> int:
        """Publish the weights as they are, unless this version is out already. Returns the version."""
        steps = self.algorithm.steps
        if self._board is not None and self._board.version < steps:
            self._board.publish(self.algorithm.published, version=steps)
        return steps

    def finish(self) -> int:
        """Publish the last step. Returns the number of optimizer steps, which now is the published version."""
        self.algorithm.advance(self._frames())
        return self.publish()
