"""From what happens in a run to the numbers of a report."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from millpond.core.spec import BoxAction, EnvSpec


class UpdateMeter:
    """Means over the updates since the last report, and what the last batch looked like.

    Cheap enough for every update: sums stay tensors, and batches are looked at only when a report asks.
    """

    def __init__(self, spec: EnvSpec) -> None:
        self._spec = spec
        self._sums: dict[str, Tensor] = {}
        self._counts: Counter[str] = Counter()  # of each: some come with some updates only
        self._count = 0
        self._batch: TensorDictBase | None = None
        self.batch_shapes: Counter[tuple[int, ...]] = Counter()
        self.learned = 0
        """Items in all batches, those of earlier parts of the run included."""
        self.newest_version = 0

    def saw(self, batch: TensorDictBase, metrics: Mapping[str, Tensor]) -> None:
        self._batch = batch
        self.batch_shapes[tuple(batch.batch_size)] += 1
        self.learned += batch.numel()
        self._count += 1
        for name, value in metrics.items():
            if value.ndim == 0:  # "td_error" is per item, for priorities
                before = self._sums.get(name)
                self._counts[name] += 1
                self._sums[name] = value.clone() if before is None else before.to(value.device).add_(value)

    def row(self, *, steps: int) -> dict[str, float]:
        """The means, the state of the last batch, and a fresh start; empty where nothing was updated."""
        if self._batch is None or not self._count:
            return {}
        row = {name: total.item() / self._counts[name] for name, total in self._sums.items()}
        row |= self.look(self._batch, steps=steps)
        self._sums.clear()
        self._counts.clear()
        self._count = 0
        return row

    def state_dict(self) -> dict[str, Any]:
        """What the next row will tell of the updates since the last one, as tensors and numbers."""
        batch = self._batch if self._count else None
        fields = ("action", "policy_version", "priority_weight")  # copies: a batch is one piece of memory, of all types
        looked_at = {} if batch is None else {f: batch.get(f).cpu().clone() for f in fields if f in batch}
        return {
            "sums": {name: value.cpu() for name, value in self._sums.items()},
            "count": self._count,
            "counts": dict(self._counts),
            "batch": looked_at,
            "newest_version": self.newest_version,
            "learned": self.learned,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another meter was."""
        self._sums, self._count = dict(state["sums"]), int(state["count"])
        counts = state.get("counts", dict.fromkeys(self._sums, self._count))  # older checkpoints do not have them
        self._counts = Counter(counts)
        self.newest_version, self.learned = int(state["newest_version"]), int(state["learned"])
        looked_at = state["batch"]
        self._batch = TensorDict(looked_at, batch_size=[len(looked_at["action"])]) if looked_at else None

    def look(self, batch: TensorDictBase, *, steps: int) -> dict[str, float]:
        """What a batch from replay tells of the collectors: how they act, and how old their policy is."""
        row = action_statistics(batch.get("action"), self._spec)
        version = batch.get("policy_version", None)
        if version is not None:
            self.newest_version = max(self.newest_version, int(version.max()))
            row["lag/policy_version"] = steps - version.double().mean().item()
        weight = batch.get("priority_weight", None)
        if weight is not None:
            row["replay/priority_weight_mean"] = weight.mean().item()
            row["replay/priority_weight_min"] = weight.min().item()
        return row


def action_statistics(action: Tensor, spec: EnvSpec) -> dict[str, float]:
    """``replay/action_std`` (mean over dimensions), ``_absmax``, ``_saturation`` (the share within 1 % of a bound)."""
    size = spec.action.size if isinstance(spec.action, BoxAction) else 1
    values = action.reshape(-1, size).double()  # one row for each transition, in sequences too
    row = {
        "replay/action_std": values.std(0, correction=0).mean().item(),
        "replay/action_absmax": values.abs().max().item(),
    }
    if isinstance(spec.action, BoxAction):
        low, high = (torch.tensor(bound, dtype=torch.float64) for bound in (spec.action.low, spec.action.high))
        unit = (values - (low + high) / 2) / ((high - low) / 2)
        row["replay/action_saturation"] = (unit.abs() >= 0.99).double().mean().item()
    return row


class RateMeter:
    """Frames and updates per second since the last report."""

    def __init__(self, *, frames: int = 0, updates: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = (clock(), frames, updates)

    def row(self, *, frames: int, updates: int) -> dict[str, float]:
        now, (then, frames_then, updates_then) = self._clock(), self._last
        if now <= then:
            return {}
        self._last = (now, frames, updates)
        return {
            "throughput/frames_per_s": (frames - frames_then) / (now - then),
            "throughput/updates_per_s": (updates - updates_then) / (now - then),
        }


class SlidingRates:
    """Frames and updates per second over the last ``window_s`` seconds: what a person can read."""

    def __init__(self, *, window_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_s, self._clock = window_s, clock
        self._seen: deque[tuple[float, int, int]] = deque()

    def __call__(self, *, frames: int, updates: int) -> tuple[float, float] | None:
        """The two rates; None at the first call."""
        now = self._clock()
        while len(self._seen) > 1 and self._seen[1][0] <= now - self._window_s:
            self._seen.popleft()
        self._seen.append((now, frames, updates))
        then, frames_then, updates_then = self._seen[0]
        if now <= then:
            return None
        return (frames - frames_then) / (now - then), (updates - updates_then) / (now - then)


def replay_row(stats: Mapping[str, Any], *, learning_starts: int) -> dict[str, float]:
    """``replay/…`` from ``ReplayBuffer.stats()``. The measured ratio counts what came after ``learning_starts``."""
    row = {
        f"replay/{name}": float(stats[name])
        for name in ("size", "write_count", "samples_returned", "producer_blocks", "consumer_blocks")
    }
    inserted = stats["write_count"] - learning_starts
    if inserted > 0:
        row["replay/samples_per_insert"] = stats["samples_returned"] / inserted
    return row
