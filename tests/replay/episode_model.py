"""Episodes in plain Python, slow and obvious: which item follows which, and what a window of them is worth."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Step:
    env: Any
    episode: int
    step: int
    done: bool
    terminated: bool
    reward: float
    after: int | None = None  # number of the step that came before, where nothing came between


@dataclass
class Worlds:
    """Environments whose every written step is known: the n-th item ever written is ``steps[n]``."""

    seed: int = 0
    lengths: tuple[int, int] = (1, 7)
    steps: list[Step] = field(default_factory=list)
    first_id: int = 0

    def __post_init__(self) -> None:
        self.rnd = random.Random(self.seed)
        self.now: dict[Any, list[int]] = {}  # episode, step, length
        self.made = self.first_id
        self.latest: dict[Any, int] = {}

    def step(self, env: Any) -> Step:
        """What an environment does next; it is written by `written`."""
        episode, step, length = self.now.get(env) or self._new(env)
        done = step + 1 >= length
        self.now[env][1] += 1
        if done:
            del self.now[env]
        terminated = done and self.rnd.random() < 0.5
        return Step(env, episode, step, done, terminated, self.rnd.uniform(-1, 1))

    def _new(self, env: Any) -> list[int]:
        self.made += 1
        self.now[env] = [self.made, 0, self.rnd.randint(*self.lengths)]
        return self.now[env]

    def written(self, rows: list[Step]) -> list[Step]:
        """These rows were written, in this order."""
        for row in rows:
            row.after = self.latest.get(row.env)
            self.latest[row.env] = len(self.steps)
            self.steps.append(row)
        return rows

    def interrupted(self, env: Any = None) -> None:
        """What comes next, of one environment or of all, does not follow what was written."""
        for one in [env] if env is not None else list(self.latest):
            self.latest.pop(one, None)

    def window(self, number: int, n: int, live: set[int]) -> list[int]:
        """Up to n successive live steps of one episode."""
        following = {s.after: i for i, s in enumerate(self.steps) if s.after is not None}
        found = [number]
        while len(found) < n and not self.steps[found[-1]].done:
            after = following.get(found[-1])
            if after is None or after not in live:
                break
            found.append(after)
        return found


def batch(rows: list[Step], *, ids: str = "") -> dict[str, Any]:
    """The rows as they are written. ``ids``: which of ``episode_id`` and ``step`` they carry."""

    def column(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)[:, None]

    place = column([r.episode * 100 + r.step for r in rows], torch.float32)
    items: dict[str, Any] = {
        "observation": {"achieved_goal": place, "desired_goal": torch.full_like(place, -1.0)},
        "next": {
            "observation": {"achieved_goal": place + 1, "desired_goal": torch.full_like(place, -1.0)},
            "reward": column([r.reward for r in rows], torch.float32),
            "done": column([r.done for r in rows], torch.bool),
            "terminated": column([r.terminated for r in rows], torch.bool),
            "truncated": column([r.done and not r.terminated for r in rows], torch.bool),
        },
    }
    if "episode_id" in ids:
        items["episode_id"] = column([r.episode for r in rows], torch.int64)
    if "step" in ids:
        items["step"] = column([r.step for r in rows], torch.int64)
    return items


def one(rows: list[Step], *, ids: str = "") -> dict[str, Any]:
    """A single row, as ``add`` takes it."""

    def first(value: Any) -> Any:
        return {k: first(v) for k, v in value.items()} if isinstance(value, dict) else value[0]

    return dict(first(batch(rows, ids=ids)))
