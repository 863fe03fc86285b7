"""When a run is saved, and what of it: now and then, at its end, and what there is when it fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from millpond.core.errors import Cancelled
from millpond.core.roles import CancelEvent
from millpond.train.assembly import Parts
from millpond.train.checkpoint import spec_to_json, write_parts
from millpond.train.due import Every, EveryFewSeconds
from millpond.train.reporting import Reporter
from millpond.train.run_state import Checkpoints

logger = logging.getLogger("millpond.train")
_HUNG_S = 5.0  # when a run ends nobody waits longer for a step of an environment


class Saver:
    """Saves the parts of a run as checkpoints. Saving changes nothing in a run.

    ``progress`` tells what else the run must know to go on from a checkpoint, as JSON.
    """

    def __init__(
        self, parts: Parts, reporter: Reporter, checkpoints: Checkpoints, *, progress: Callable[[], dict[str, Any]]
    ) -> None:
        settings = parts.settings.checkpoint
        self._parts, self._reporter, self._checkpoints, self._progress = parts, reporter, checkpoints, progress
        self._by_frames = Every(settings.interval_frames, after=parts.frames)
        self._by_time = EveryFewSeconds(settings.every_s)
        self._collection_ended = False

    def save_if_due(self, frames: int, *, cancel_event: CancelEvent) -> None:
        """Save, where it is time for that. A full disk puts it off; so does a stop, which saves by itself."""
        by_frames = self._by_frames.due(frames)
        if not by_frames and not self._by_time.due():
            return
        start, collector = time.monotonic(), self._parts.collector
        try:
            if not self._parts.settings.synchronous:
                collector.pause(cancel_event=cancel_event)
            self.save()
        except Cancelled:
            pass
        except OSError as error:
            logger.warning("no checkpoint at frame %d, the run goes on: %s", frames, error)
        finally:
            if not self._parts.settings.synchronous:
                collector.resume()
            self._by_time.done(since=start)

    def rest(self) -> None:
        """Let the workers rest for good, so that what is counted stays so; those that do not come to rest are ended."""
        self._parts.collector.pause(kill_after=_HUNG_S)

    def end_collection(self) -> None:
        """End the workers, whatever they are doing. What they had collected and not written was never counted."""
        self._collection_ended = True
        if not self._parts.settings.synchronous:
            self._parts.collector.close()

    def save(self) -> Path:
        """Save a checkpoint while nobody collects.

        Raises:
            OSError: the disk does not take it. Earlier checkpoints stay.
            NonFinite: the weights are not finite. Earlier checkpoints stay.
        """
        parts, reporter = self._parts, self._reporter
        collector = self._collector_state()
        state = {
            "frames": parts.frames,
            "updates": parts.algorithm.steps,
            "spec": spec_to_json(parts.world.spec),
            **reporter.state(),
            **self._progress(),
        }
        path = self._checkpoints.save(
            frames=parts.frames,
            updates=parts.algorithm.steps,
            state=state,
            write=lambda folder: write_parts(folder, parts, collector, reporter.meter.state_dict()),
        )
        logger.info("checkpoint at frame %d: %s", parts.frames, path)
        return path

    def _collector_state(self) -> dict[str, Any]:
        parts = self._parts
        if not self._collection_ended:
            state: dict[str, Any] = parts.collector.state_dict()
            return state
        # What broke, or was ended, is not asked for what it holds: others begin new episodes in its place.
        lives = [parts.lives] if parts.settings.synchronous else parts.collector.state_dict()["lives"]
        return {"collected_frames": parts.frames, "lives": lives, "workers": [], "batches": []}

    def rescue(self) -> None:
        """After a failure: save what was learned. Where that cannot be, the log says why, and what was saved stays."""
        if not self._parts.frames:
            return
        try:
            self.end_collection()
            self.save()
        except Exception as error:  # noqa: BLE001  # the failure itself is what must be told
            logger.warning("no checkpoint of the run as it failed: %s: %s", type(error).__name__, error)
