"""A buffer that is saved in the middle of any program goes on in a fresh one as if it had never stopped.

`MILLPOND_EXAMPLES=3000` tries so many random programs; 80 by default.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from millpond import ReplayBuffer
from millpond.core.errors import NotReady
from millpond.replay import (
    ConsumingSampler,
    HindsightSampler,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
)

CAPACITY, BATCH = 48, 4
Make = Callable[[], Any]


def reward(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
    return -(achieved - desired).abs().sum(-1)


def reached(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
    return (achieved == desired).all(-1)


def hindsight(strategy: str, base: Any = None, **more: Any) -> HindsightSampler:
    return HindsightSampler(reward, strategy=strategy, base=base, fraction=0.7, **more)


STRATEGIES = ("future", "final", "episode", "random")
SAMPLERS: dict[str, Make] = {
    "uniform": RandomSampler,
    "epochs": SamplerWithoutReplacement,
    "whole epochs": lambda: SamplerWithoutReplacement(drop_last=True),
    "fifo": lambda: ConsumingSampler(2),
    "prioritized": PrioritizedSampler,
    "independent": lambda: PrioritizedSampler(stratified=False, alpha=1.0),
    "slices": lambda: SliceSampler(slice_len=2),
    "num_slices": lambda: SliceSampler(num_slices=2),
    "prioritized slices": lambda: SliceSampler(slice_len=2, base=PrioritizedSampler()),
    "padded slices": lambda: SliceSampler(slice_len=2, short="pad"),
    "padded prioritized slices": lambda: SliceSampler(num_slices=1, short="pad", base=PrioritizedSampler()),
    "n-step": lambda: NStep(3, 0.9),
    "n-step prioritized": lambda: NStep(3, 0.9, base=PrioritizedSampler()),
    "n-step epochs": lambda: NStep(3, 0.9, base=SamplerWithoutReplacement()),
    "n-step fifo": lambda: NStep(3, 0.9, base=ConsumingSampler(1)),
    "n-step slices": lambda: NStep(3, 0.9, base=SliceSampler(slice_len=2)),
    **{s: lambda s=s: hindsight(s) for s in STRATEGIES},  # type: ignore[misc]
    **{f"{s} prioritized": lambda s=s: hindsight(s, PrioritizedSampler()) for s in STRATEGIES},  # type: ignore[misc]
    **{f"{s} fifo": lambda s=s: hindsight(s, ConsumingSampler(2)) for s in STRATEGIES},  # type: ignore[misc]
    **{f"{s} slices": lambda s=s: hindsight(s, SliceSampler(slice_len=2)) for s in STRATEGIES},  # type: ignore[misc]
    **{f"n-step {s}": lambda s=s: NStep(3, 0.9, base=hindsight(s)) for s in STRATEGIES},  # type: ignore[misc]
    **{f"{s} n-step": lambda s=s: hindsight(s, NStep(3, 0.9), terminated=reached) for s in STRATEGIES},  # type: ignore[misc]
}
#: How rows tell what follows what: by an id and a step, by an id, or by the order in which they are written.
TELLS = ("steps", "ids", "turns")


class World:
    """Episodes of random lengths in three environments, whose rows come interleaved."""

    def __init__(self, choose: random.Random, tells: str) -> None:
        self.choose, self.tells, self.written = choose, tells, 0
        self.at = [(0, i) for i in range(3)]  # step and id

    def rows(self, times: int, *, end: bool = False) -> dict[str, Any]:
        steps, ids, ends = [], [], []
        for time, env in itertools.product(range(times), range(3)):
            step, name = self.at[env]
            ends.append(self.choose.random() < 0.2 or (end and time == times - 1))
            steps.append(step)
            ids.append(name)
            self.at[env] = (0, name + 3) if ends[-1] else (step + 1, name)
        n = len(steps)
        x = torch.arange(self.written, self.written + n)
        self.written += n
        done = torch.tensor(ends)[:, None]
        place = torch.tensor(steps, dtype=torch.float32)[:, None]
        observation = {"observation": place + 100, "achieved_goal": place, "desired_goal": place * 0 + 5}
        after = {"observation": place + 101, "achieved_goal": place + 1, "desired_goal": place * 0 + 5}
        kinds = {
            "terminated": done & torch.tensor([self.choose.random() < 0.5 for _ in range(n)])[:, None],
            "done": done,
        }
        kinds["truncated"] = done & ~kinds["terminated"]
        items = {"x": x, "observation": observation, "next": {"observation": after, "reward": place * 0.5, **kinds}}
        if self.tells != "turns":
            items["episode_id"] = torch.tensor(ids)
        if self.tells == "steps":
            items["step"] = torch.tensor(steps)
        return items


def program(seed: int, tells: str) -> tuple[list[tuple[Any, ...]], int]:
    """What to do, and before which of it to save. Rows that do not name their steps do not follow those before a load:
    then it is saved where all episodes have ended."""
    choose = random.Random(seed)
    world, cut = World(choose, tells), choose.randint(1, 30)
    steps: list[tuple[Any, ...]] = [("extend", world.rows(4), None)]
    for at in range(1, 40):
        if at == cut and tells != "steps":
            steps.append(("extend", world.rows(2, end=True), None))
            cut = len(steps)
        what = choose.choices(["extend", "sample", "priority", "update", "empty"], [30, 55, 10, 4, 1])[0]
        if what == "extend":
            given = choose.random() < 0.3
            rows = world.rows(choose.randint(1, 4))
            steps.append((what, rows, [choose.random() * 3 for _ in range(len(rows["x"]))] if given else None))
        elif what == "sample":
            steps.append((what, BATCH if choose.random() < 0.85 else 2))
        else:
            steps.append((what, choose.random()))
    return steps, cut


def run(rb: ReplayBuffer, steps: list[tuple[Any, ...]], last: Any) -> tuple[list[Any], Any]:
    """All that comes out, and the last batch."""
    found: list[Any] = []
    weighs = rb._local.engine.priorities is not None
    for what, *given in steps:
        if what == "extend":
            found.append(rb.extend(given[0], priority=given[1] if weighs else None))
        elif what == "sample":
            try:
                last = rb.sample(given[0])
                found.append(last.clone())
            except NotReady:
                found.append(None)
        elif what == "priority" and weighs and last is not None:
            found.append(rb.update_priority(last, last["x"].float() * given[0]))
        elif what == "update" and last is not None:
            kept = last["generation"] >= 0
            found.append(rb.update(last[kept], {"x": last["x"][kept]}))
        elif what == "empty":
            rb.empty()
    return found, last


def same(one: Any, two: Any) -> bool:
    if one is None or two is None or isinstance(one, int):
        return one is two or one == two
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    keys = sorted(map(str, one.keys(True, True)))
    return keys == sorted(map(str, two.keys(True, True))) and all(
        one[key].dtype == two[key].dtype and torch.equal(one[key], two[key]) for key in one.keys(True, True)
    )


def cases() -> list[tuple[str, str, int | None, int, bool]]:
    whole = itertools.product(SAMPLERS, TELLS, (None, 1, 2), (0, 2), (False, True))
    pool = [
        case
        for case in whole
        if case[2] is None or (case[1] == "steps" and "fifo" not in case[0] and "padded" not in case[0])
    ]
    random.Random(7).shuffle(pool)
    return pool


POOL = cases()
EXAMPLES = int(os.environ.get("MILLPOND_EXAMPLES", "80"))
PARTS = max(10, EXAMPLES // 50)  # each has its own limit of time


def check(seed: int, folder: Path) -> str | None:
    """What differs after a resume in the middle of a random program; None where nothing does."""
    name, tells, consume, prefetch, shared = POOL[seed % len(POOL)]

    def fresh(draws: int) -> ReplayBuffer:
        return ReplayBuffer(
            CAPACITY,
            sampler=SAMPLERS[name](),
            batch_size=BATCH,
            consume_after_n_samples=consume,
            prefetch=prefetch,
            num_envs=3,
            seed=draws,
            shared=shared,
        )

    steps, cut = program(seed, tells)
    with fresh(seed) as rb, fresh(1) as by_file, fresh(2) as by_dict:
        _, last = run(rb, steps[:cut], None)
        rb.dumps(folder / "saved")
        state = rb.state_dict()
        by_file.loads(folder / "saved")
        by_dict.load_state_dict(state)
        expected, _ = run(rb, steps[cut:], last)
        for way, other in (("dumps", by_file), ("state_dict", by_dict)):
            found, _ = run(other, steps[cut:], last)
            where = f"program {seed}: {name}, {tells}, consume {consume}, prefetch {prefetch}, shared {shared}, {way}"
            for i, (one, two) in enumerate(zip(expected, found, strict=True)):
                if not same(one, two):
                    return f"{where}: result {i} of {len(expected)}"
            ours, theirs = rb.stats(), other.stats()
            if ours != theirs:
                return f"{where}: {[key for key in ours if ours[key] != theirs[key]]}"
    return None


@pytest.mark.parametrize("part", range(PARTS))
def test_a_resume_in_the_middle_of_any_program_changes_nothing(part: int, tmp_path: Path) -> None:
    failures = [found for seed in range(part, EXAMPLES, PARTS) if (found := check(seed, tmp_path)) is not None]
    assert not failures, f"{len(failures)} of {len(range(part, EXAMPLES, PARTS))}: {failures[:8]}"
