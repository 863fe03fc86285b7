"""Ways to break one part of a run, each for as long as the ``MonkeyPatch`` that it is given holds."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from millpond.collect import rollout_storage
from millpond.collect.budget import FrameBudget
from millpond.replay import ReplayBuffer
from millpond.train import assembly
from millpond.train import replay as replay_module
from millpond.train.assembly import Parts
from millpond.train.meters import UpdateMeter

Patch = pytest.MonkeyPatch


def never_published(patch: Patch) -> None:
    patch.setattr(Parts, "publish", lambda parts: None)


def published_at_the_end_only(patch: Patch) -> None:
    publish = Parts.publish
    patch.setattr(Parts, "publish", lambda parts: publish(parts) if parts.frames == 120 else None)


def a_loss_is_nan(patch: Patch) -> None:
    saw = UpdateMeter.saw
    patch.setattr(UpdateMeter, "saw", lambda self, batch, metrics: saw(self, batch, {"loss/q": torch.tensor(np.nan)}))


def change_one_write(patch: Patch, change: Callable[[Any], Any]) -> None:
    """The fifth one, of four frames."""
    extend, calls = ReplayBuffer.extend, iter(range(1000))

    def changed(self: ReplayBuffer, items: Any, **more: Any) -> Any:
        return extend(self, change(items) if next(calls) == 4 else items, **more)

    patch.setattr(ReplayBuffer, "extend", changed)


def replay_drops_a_row(patch: Patch) -> None:
    change_one_write(patch, lambda items: items[1:])


def replay_repeats_a_row(patch: Patch) -> None:
    change_one_write(patch, lambda items: items[torch.tensor([0, 1, 2, 2])])


def change_one_sample(patch: Patch, change: Callable[[Any], Any]) -> None:
    sample, calls = ReplayBuffer.sample, iter(range(1000))

    def changed(self: ReplayBuffer, *more: Any, **named: Any) -> Any:
        batch = sample(self, *more, **named)
        return change(batch) if next(calls) == 30 else batch

    patch.setattr(ReplayBuffer, "sample", changed)


def a_batch_is_short(patch: Patch) -> None:
    change_one_sample(patch, lambda batch: batch[1:])


def a_batch_has_time(patch: Patch) -> None:
    saw, calls = UpdateMeter.saw, iter(range(1000))

    def changed(self: UpdateMeter, batch: Any, metrics: Any) -> None:
        saw(self, batch.reshape(4, 2) if next(calls) == 30 else batch, metrics)

    patch.setattr(UpdateMeter, "saw", changed)


def replay_allows(patch: Patch, factor: float) -> None:
    flow = replay_module.Flow

    def other(*, samples_per_insert: float, **more: Any) -> Any:
        return flow(samples_per_insert=factor * samples_per_insert, **more)

    patch.setattr(replay_module, "Flow", other)


def too_many_updates(patch: Patch) -> None:
    replay_allows(patch, 2.0)


def too_few_updates(patch: Patch) -> None:
    replay_allows(patch, 0.5)


def another_type_of_field(patch: Patch) -> None:
    patch.setitem(rollout_storage._FIXED, ("next", "truncated"), np.int8)


def a_budget_below_the_target(patch: Patch) -> None:
    patch.setattr(assembly, "FrameBudget", lambda total: FrameBudget(total - 3))


def collectors_do_not_explore(patch: Patch) -> None:
    """They get the deterministic policy, and the learner keeps the other."""

    def without_noise(self: Parts, state: Any = None) -> None:
        exploring, kind = self.algorithm.policy, type(self.algorithm)
        with patch.context() as inner:
            inner.setattr(kind, "policy", self.algorithm.evaluation_policy(), raising=False)
            self.algorithm.policy = self.algorithm.evaluation_policy()  # type: ignore[misc]
            collect(self, state)
        self.algorithm.policy = exploring  # type: ignore[misc]

    collect = Parts.collect
    patch.setattr(Parts, "collect", without_noise)


def ends_at_once(patch: Patch) -> None:
    """As if all were well, and nothing was done."""
    os._exit(0)


def ends_when_resumed(patch: Patch) -> None:
    if any(word.startswith("resume=") for word in sys.orig_argv):
        os._exit(7)
