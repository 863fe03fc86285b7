"""What a collector must know of those who look after its workers, whether these are processes or Ray actors."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tensordict import TensorDict

from millpond.collect.roster import Roster
from millpond.core.errors import BufferClosed, MillpondError, WorkerFailed

logger = logging.getLogger("millpond.collect")
KEPT_EVENTS = 128  # transitions that were not stored, of which the latest are told


class Delivery(Protocol):
    """A batch that a worker has handed over."""

    worker: int

    def settle(self, *, count: bool = True) -> TensorDict:
        """The batch, in memory of its own, counted once, whoever calls. ``count=False``: somebody else counts it."""


class Place(Protocol):
    """The place of one worker, filled by one after another."""

    worker: int
    line: int
    deaths: list[str]
    ended: bool


class Supervision(Protocol):
    """Starts workers, listens to them, and replaces those that die, in a thread of its own."""

    failure: WorkerFailed | None
    quarantine: list[Any]

    @property
    def seats(self) -> Sequence[Place]: ...

    @property
    def deliveries(self) -> queue.SimpleQueue[Any]: ...

    @property
    def states(self) -> queue.SimpleQueue[tuple[int, dict[str, Any]]]: ...

    @property
    def ended(self) -> bool:
        """No worker runs, and none will be started."""

    @property
    def stopping(self) -> bool:
        """The workers are told to end."""

    def order(self, worker: int, frames: int, random_frames: int) -> None:
        """Tell a worker to collect a batch; repeated to its successor if it dies over it."""

    def ask(self, worker: int) -> bool:
        """Ask a worker for its state, which will appear in ``states``. False: nobody is there."""

    def stop(self, grace_s: float) -> None:
        """End all workers: those that do not end by themselves within ``grace_s`` seconds are killed."""


class Crew(Protocol):
    """Places for workers, each with a line of the budget and of the roster."""

    lines: list[int]
    roster: Roster

    @property
    def supervisor(self) -> Supervision | None: ...

    @property
    def ours(self) -> bool:
        """Was it made in this process? A forked child inherits the object, but not the workers."""

    def launch(self, rows: Mapping[int, dict[str, Any] | None]) -> Supervision:
        """Start the workers, the first time. ``rows``: what earlier ones had collected and not handed over."""

    def deaths(self) -> list[list[str]]:
        """Of each worker: why it was replaced, each time."""

    def stop(self) -> None:
        """End the workers, by force those that do not come to an end by themselves."""

    def release(self) -> None:
        """Give the lines back, and remove what was made."""


def told(worker: int, events: Sequence[Any]) -> list[tuple[int, str, int, int]]:
    """(worker, key, environment, step) of transitions that were not stored; the first ones are logged."""
    for key, env, step in events[:3]:
        logger.warning(
            "worker %d: %s is not finite in environment %d, step %d of its episode; the transition is not stored",
            *(worker, key, env, step),
        )
    return [(worker, *event) for event in events]


def receipts_of(replay: Any) -> Callable[[int], int | None]:
    """How to ask a buffer for a worker's last receipt; None where it cannot tell any more."""

    def receipt(line: int) -> int | None:
        try:
            return int(replay.receipt(line))
        except (MillpondError, BufferClosed):
            return None

    return receipt if replay is not None else lambda line: None
