"""What a transition is once it stands for several steps, is pursued with another goal, or both.

`NStep` and `HindsightSampler` say which steps and which goal; the fields are computed here, in one place, so that it
does not matter which of the two is around the other: one goal holds for a whole window, and the reward of each of its
steps is the one for that goal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from millpond.core.errors import InvalidArgument
from millpond.core.schema import Key
from millpond.replay.order import DONE, REWARD, TERMINATED, TRUNCATED
from millpond.replay.samplers.protocol import Bools, Draw, Goals, Ints, Items

Judge = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def compute(items: Items, draw: Draw) -> None:
    """Add the fields that differ from the stored ones to ``draw.extra``."""
    windows, goals = draw.windows, draw.goals
    if windows is None:
        slots, lengths, gamma = draw.slots[:, None], np.ones(len(draw.slots), np.int64), 1.0
    else:
        slots, lengths, gamma = windows.slots, windows.lengths, windows.gamma
    used = np.arange(slots.shape[1]) < lengths[:, None]
    found: dict[Key, torch.Tensor] = {}
    ended: Bools | None = None  # of the last steps: does the goal that was reached end the episode?
    relabelled = None if goals is None else _Relabelled(items, goals, slots)
    if relabelled is not None:
        ended = relabelled.shorten(used)
        lengths = used.sum(1)
    last = draw.slots if windows is None else slots[np.arange(len(slots)), lengths - 1]
    if windows is not None:
        keys = [f.key for f in items.schema.fields if f.key[0] == "next" and f.key != REWARD]
        found.update(zip(keys, items.read(last, keys), strict=True))
        found["steps_to_next_obs",] = torch.from_numpy(lengths[:, None].astype(np.int64))
    found[REWARD] = _rewards(items, np.where(used, slots, slots[:, :1]), used, gamma, relabelled)
    if relabelled is not None:
        relabelled.replace_goals(found, draw.slots, last)
        if ended is not None:
            _mark_ends(items, found, last, relabelled.mask, ended)
        found["relabelled",] = torch.from_numpy(relabelled.mask)[:, None]
    draw.extra |= found


def _rewards(items: Items, slots: Ints, used: Bools, gamma: float, relabelled: _Relabelled | None) -> torch.Tensor:
    """``sum_j gamma^j r_j`` over the steps that are used. Of one step it is the reward itself, bit for bit."""
    k, n = slots.shape
    (stored,) = items.read(slots.reshape(-1), [REWARD])
    shape = stored.shape[1:]
    if relabelled is not None:
        relabelled.judge_anew(stored, used)
    if n == 1:
        return stored
    steps = stored.reshape(k, n, -1).to(torch.float32)
    weights = torch.from_numpy(np.where(used, gamma ** np.arange(n), 0.0).astype(np.float32))
    total = torch.einsum("kn,knr->kr", weights, torch.where(torch.from_numpy(used)[..., None], steps, 0.0))
    alone = torch.from_numpy(used.sum(1) == 1)[:, None]
    return torch.where(alone, steps[:, 0], total).reshape(k, *shape).to(stored.dtype)


class _Relabelled:
    """The windows of a batch, some of which are pursued with another goal."""

    def __init__(self, items: Items, goals: Goals, slots: Ints) -> None:
        self._items, self._slots, self._sampler = items, slots, goals.sampler
        self.mask = goals.mask
        (self._achieved,) = items.read(goals.slots, [goals.sampler.achieved_key])  # one for each that is relabelled
        self._which = np.cumsum(goals.mask) - 1

    def shorten(self, used: Bools) -> Bools | None:
        """End each window at the step that reaches its goal, where that ends an episode. Does its last step?"""
        terminated: Judge | None = self._sampler.terminated
        if terminated is None:
            return None
        rows, steps = np.nonzero(used & self.mask[:, None])
        reached = np.zeros(used.shape, np.bool_)
        reached[rows, steps] = self._judged(terminated, "terminated", rows, steps).numpy().astype(np.bool_)
        before = np.zeros(used.shape, np.bool_)
        before[:, 1:] = np.logical_or.accumulate(reached[:, :-1], axis=1)
        used &= ~before
        ended: Bools = np.logical_or.reduce(reached & used, axis=1)
        return ended

    def judge_anew(self, rewards: torch.Tensor, used: Bools) -> None:
        """Put the rewards for the other goals in the place of the stored ones, ``[k * n, …]``."""
        rows, steps = np.nonzero(used & self.mask[:, None])
        at = torch.from_numpy(rows * used.shape[1] + steps)
        fresh = self._judged(self._sampler.reward, "reward", rows, steps, rewards.shape[1:])
        rewards[at] = fresh.to(rewards.dtype)

    def _judged(
        self, judge: Judge, name: str, rows: Ints, steps: Ints, shape: torch.Size | tuple[int, ...] = ()
    ) -> torch.Tensor:
        """What the user's function says of so many steps."""
        sampler = self._sampler
        (reached,) = self._items.read(self._slots[rows, steps], [sampler.achieved_key])
        desired = self._achieved[torch.from_numpy(self._which[rows])].to(self._goal_dtype())
        if not len(rows):
            return torch.zeros((0, *shape))
        fresh = torch.as_tensor(judge(reached, desired))
        if fresh.numel() != len(rows) * int(np.prod(shape)):
            raise InvalidArgument(
                f"{name}(achieved, desired) gives one value for each of {len(rows)} goals, not {list(fresh.shape)}"
            )
        return fresh.reshape(len(rows), *shape)

    def _goal_dtype(self) -> torch.dtype:
        return self._items.schema.by_key[self._sampler.goal_key].dtype

    def replace_goals(self, found: dict[Key, torch.Tensor], slots: Ints, last: Ints) -> None:
        """In the observation, and in the next one where it has a goal."""
        mask, here, after = torch.from_numpy(self.mask), self._sampler.goal_key, ("next", *self._sampler.goal_key)
        parts = [(slots, [here]), (last, [after])] if after in self._items.schema.by_key else [(slots, [here])]
        if last is slots and len(parts) == 2:
            parts = [(slots, [here, after])]
        for where, keys in parts:
            for key, values in zip(keys, self._items.read(where, keys), strict=True):
                values[mask] = self._achieved.reshape(-1, *values.shape[1:]).to(values.dtype)
                found[key] = values


def _mark_ends(items: Items, found: dict[Key, torch.Tensor], last: Ints, mask: Bools, ended: Bools) -> None:
    """``terminated`` says whether the goal was reached, ``truncated`` stays, and ``done`` is either of the two."""
    keys = [key for key in (TERMINATED, TRUNCATED, DONE) if key in items.schema.by_key]
    stored = dict(zip(keys, items.read(last, keys), strict=True))
    some = torch.from_numpy(mask)
    shape = stored[keys[0]].shape
    fresh = torch.from_numpy(ended).reshape(-1, *[1] * (len(shape) - 1)).expand(shape)[some]
    if TRUNCATED in stored:
        cut = stored[TRUNCATED][some].bool()
    elif DONE in stored:
        cut = stored[DONE][some].bool() & ~stored[TERMINATED][some].bool().reshape(stored[DONE][some].shape)
    else:
        cut = torch.zeros_like(fresh)
    for key, value in ((TERMINATED, fresh), (DONE, fresh.reshape(cut.shape) | cut)):
        if key in stored:
            values = stored[key]
            values[some] = value.reshape(values[some].shape).to(values.dtype)
            found[key] = values


def can_tell_ends(known: Any) -> bool:
    """Can ``terminated`` be told from ``truncated`` by the fields?"""
    return TERMINATED in known or (DONE in known and TRUNCATED in known)
