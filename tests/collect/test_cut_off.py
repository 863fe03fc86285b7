"""Ctrl-C within a collector, and iterating on: no frame is lost, none comes twice, and none is put together wrongly."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from episode_worlds import Diary, diaries
from policies import Waver

from millpond.collect import Collector, FrameBudget, MultiCollector
from millpond.replay import ReplayBuffer
from millpond.weights import WeightBoard
from tests.alike import usually
from tests.replay.interrupts import Interrupt, interrupted

FRAMES = 6
WHERE = [f"collect/{name}.py" for name in ("collector", "batch_writer", "budget", "rollout", "policies")]


def check(batch: Any) -> None:
    """Each transition is one that its Diary made, and within an episode id none is missing."""
    flat = batch.flatten()
    before, after = flat["observation"].numpy(), flat["next", "observation"].numpy()
    assert (before[:, :2] == after[:, :2]).all(), "the same environment and the same episode"
    assert (before[:, 2] + 1 == after[:, 2]).all(), "one step"
    assert (before[:, 2] == flat["step"][:, 0].numpy()).all()
    assert np.allclose(after[:, 3], flat["action"].sum(-1).numpy(), atol=1e-5)
    assert (flat["next", "reward"][:, 0].numpy() == 100 * before[:, 1] + after[:, 2]).all()
    for episode in flat["episode_id"].unique():
        rows = flat[(flat["episode_id"] == episode).flatten()]
        steps = rows["step"].flatten().tolist()
        assert steps == list(range(steps[0], steps[0] + len(steps)))
        done = rows["next", "done"].flatten().tolist()
        assert not any(done[:-1])


@pytest.mark.parametrize(
    ("mode", "layout", "into"),
    [
        ("NextStep", "transitions", "hands"),
        pytest.param("SameStep", "sequences", "replay", marks=pytest.mark.exhaustive),
        pytest.param("Disabled", "transitions", "replay", marks=pytest.mark.exhaustive),
    ],
)
def test_interrupted_anywhere_a_collector_goes_on(mode: str, layout: Any, into: str) -> None:
    policy = Waver()
    policy.weight = torch.nn.Parameter(torch.zeros(1))
    with WeightBoard(policy) as board:
        for place in itertools.count(step=2):
            rb = ReplayBuffer(1000) if into == "replay" else None
            with (
                FrameBudget(3 * FRAMES) as budget,
                Collector(
                    diaries(2, mode, longest=6),
                    policy,
                    frames_per_batch=FRAMES,
                    budget=budget,
                    layout=layout,
                    replay=rb,
                    weights=board,
                    seed=place,
                ) as collector,
            ):
                batches, cut_off = [], False
                for i in range(10):
                    try:
                        with interrupted(place if i % 2 == 0 else -1, *WHERE):
                            batches.append(next(collector))
                    except StopIteration:
                        break
                    except Interrupt:
                        cut_off = True
                assert (budget.collected, budget.reserved) == (3 * FRAMES, 0)
                if rb is None:
                    found: Any = torch.cat(batches)  # type: ignore[arg-type]
                    assert found.numel() == 3 * FRAMES
                else:
                    found = rb[:]
                    assert rb.write_count * (1 if layout == "transitions" else FRAMES // 2) == 3 * FRAMES
                    found.auto_batch_size_(2 if layout == "sequences" else 1)
                check(found)
            if rb is not None:
                rb.close()
            if not cut_off:
                break
        assert place > 100


def test_an_environment_that_raised_begins_anew() -> None:
    """What it did before it raised is unknown."""

    class Raises(Diary):
        calls = 0

        def step(self, action: Any) -> Any:
            result = super().step(action)
            Raises.calls += 1
            if Raises.calls % 7 == 0:
                raise ZeroDivisionError("for once")
            return result

    batches: list[Any] = []
    with Collector(Raises, Waver(), frames_per_batch=10, total_frames=60, seed=1) as collector:
        while collector.collected_frames < 60:
            try:
                batches.append(next(collector))
            except ZeroDivisionError:
                continue
    found: Any = torch.cat(batches)
    assert found.numel() == 60
    check(found)


PARTS = [f"collect/{name}.py" for name in ("parallel", "delivery", "supervisor", "budget")]


@pytest.mark.parametrize("how", usually(["ahead", "rounds", "rounds into replay"], "ahead"))
def test_interrupted_anywhere_a_collector_of_processes_goes_on(how: str) -> None:
    total = 2000 if how == "ahead" else 3000
    rb = ReplayBuffer(total) if "replay" in how else None
    given: Any = {"num_workers": 2, "frames_per_batch": 5, "total_frames": total, "sync": how != "ahead", "seed": 0}
    with MultiCollector(Diary, Waver(), replay=rb, **given) as collector:
        batches, cut_off = [next(collector)], 0
        for place in itertools.count():
            try:
                with interrupted(place // 2 if place % 2 == 0 else -1, *PARTS):
                    batches.append(next(collector))
            except StopIteration:
                break
            except Interrupt:
                cut_off += 1
        found: Any = torch.cat(batches) if rb is None else rb[:]  # type: ignore[arg-type]
        assert (found.numel(), collector.collected_frames) == (total, total)
        assert rb is None or rb.write_count == total
        check(found)
        assert cut_off > 25
    if rb is not None:
        rb.close()
