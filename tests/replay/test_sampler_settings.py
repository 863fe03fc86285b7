"""Alpha, beta and eps, assigned or following a schedule: what they are for all, at once, and after a load."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fast_paths import forked, install

from millpond import Flow, ReplayBuffer
from millpond.core.errors import InvalidArgument, InvalidType
from millpond.replay import (
    ConsumingSampler,
    HindsightSampler,
    LinearSchedule,
    MappedStorage,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorStorage,
)

GIVEN = [1.0, 2.0, 3.0, 4.0]


def made(*, shared: bool = False, capacity: int = 8, **settings: Any) -> ReplayBuffer:
    """Four items with priorities 1, 2, 3, 4."""
    sampler = PrioritizedSampler(**{"alpha": 1.0, "eps": 0.0, **settings})
    rb = ReplayBuffer(capacity, sampler=sampler, seed=0, shared=shared)
    rb.extend({"x": torch.arange(4)}, priority=GIVEN)
    return rb


def sampler_of(rb: ReplayBuffer) -> PrioritizedSampler:
    assert isinstance(rb.sampler, PrioritizedSampler)
    return rb.sampler


def shares(rb: ReplayBuffer, draws: int = 20_000) -> Any:
    return torch.bincount(rb.sample(draws)["x"], minlength=4).double() / draws


def right(alpha: float) -> Any:
    leaves = torch.tensor(GIVEN, dtype=torch.float64) ** alpha
    return leaves / leaves.sum()


def agrees(rb: ReplayBuffer, alpha: float) -> bool:
    """Stratified draws are off by less than one for each item."""
    return bool((shares(rb) - right(alpha)).abs().max() < 2e-4)


@pytest.mark.parametrize("shared", [False, True], ids=["private", "shared"])
def test_an_alpha_that_is_assigned_holds_at_once(shared: bool) -> None:
    """.163, .230, .282, .325 at alpha 0.5; also after 0, which makes all leaves equal; new items get the largest."""
    with made(shared=shared) as rb:
        for alpha in (0.5, 0.0, 0.5, 2.0, 1.0):
            rb.sampler.alpha = alpha  # type: ignore[attr-defined]
            assert agrees(rb, alpha)
        sampler = sampler_of(rb)
        sampler.alpha = 0.0
        rb.add({"x": torch.tensor(0)})
        sampler.alpha, sampler.eps = 0.5, 0.25
        assert sampler.tree.leaves[:5].tolist() == [(p + 0.25) ** 0.5 for p in (*GIVEN, 4.0)]


def test_a_priority_that_was_weighed_before_the_change_is_weighed_anew(way: Any) -> None:
    """By the kernels, and without them."""
    with made() as rb:
        short, sampler = install(rb, way), sampler_of(rb)
        early = sampler.weigh([9.0, 9.0], 2)
        slots = np.array([0, 1])
        sampler.alpha = 0.5
        assert short.set_leaves(slots, slots, early) is None
        sampler.set_leaves(slots, early)
        assert sampler.tree.leaves[:2].tolist() == [3.0, 3.0]
        assert rb.update_priority(rb.sample(1), 16.0) == 1
        assert short.done["set_leaves"] == short.done["sample"] == 1
        assert sampler.tree.max == 16.0


def test_all_processes_have_one_alpha() -> None:
    with made(shared=True) as rb, ReplayBuffer.attach(rb.handle()) as other:
        sampler_of(other).alpha = 0.5
        assert sampler_of(rb).alpha == 0.5
        assert agrees(rb, 0.5)
        before = pickle.dumps(rb)

        def child() -> None:
            mine = pickle.loads(before)
            sampler_of(mine).alpha = 2.0
            sampler_of(mine).beta = 1.0
            mine.update_priority([0], [3.0])

        assert forked(child) == 0
        assert (sampler_of(rb).alpha, sampler_of(other).beta) == (2.0, 1.0)
        assert sampler_of(other).tree.leaves[:4].tolist() == [9.0, 4.0, 9.0, 16.0]


def test_a_change_that_is_cut_off_is_made_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """The old alpha and its leaves are there, whatever was half done."""
    with made() as rb:
        sampler = sampler_of(rb)
        rebuild = sampler.tree.rebuild

        def cut_off() -> int:
            raise KeyboardInterrupt

        monkeypatch.setattr(sampler.tree, "rebuild", cut_off)
        with pytest.raises(KeyboardInterrupt):
            sampler.alpha = 0.5
        monkeypatch.setattr(sampler.tree, "rebuild", rebuild)
        assert agrees(rb, 1.0)
        assert sampler.alpha == 1.0
        sampler.alpha = 0.5
        assert agrees(rb, 0.5)


def test_the_running_code_says_what_alpha_is_after_a_load(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    with made() as rb, made(alpha=0.5) as other:
        rb.dumps(path)
        other.loads(path)
        assert agrees(other, 0.5)
        other.add({"x": torch.tensor(3)})
        assert sampler_of(other).tree.leaves[4] == 2.0


def test_what_was_assigned_is_restored_where_the_code_is_the_same() -> None:
    with made(beta=0.4) as rb, made(beta=0.4) as alike, made(alpha=0.25, beta=0.4) as other:
        sampler_of(rb).alpha, sampler_of(rb).beta = 0.5, 0.9
        saved = rb.state_dict()
        for buffer in (alike, other):
            buffer.load_state_dict(saved)
        assert (sampler_of(alike).alpha, sampler_of(alike).beta) == (0.5, 0.9)
        assert (sampler_of(other).alpha, sampler_of(other).beta) == (0.25, 0.9)
        assert sampler_of(alike).tree.leaves.tobytes() == sampler_of(rb).tree.leaves.tobytes()
        assert agrees(other, 0.25)
        rb.share()
        assert (sampler_of(rb).alpha, sampler_of(rb).beta) == (0.5, 0.9)
        assert agrees(rb, 0.5)


BAD = [
    ("alpha", -3.0),
    ("alpha", "x"),
    ("alpha", float("nan")),
    ("alpha", float("inf")),
    ("alpha", True),
    ("alpha", None),
    ("alpha", torch.ones(2)),
    ("eps", -5),
    ("eps", "x"),
    ("eps", float("nan")),
    ("eps", LinearSchedule(0, 1, over=3)),
    ("beta", 5.0),
    ("beta", 40),
    ("beta", -0.1),
    ("beta", float("nan")),
    ("beta", lambda n: 0.5),
    ("beta", LinearSchedule(0.4, 1.5, over=3)),
    ("stratified", 1),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_settings_that_mean_nothing_are_refused_whenever_they_are_given(name: str, value: Any) -> None:
    with pytest.raises((InvalidArgument, InvalidType), match=name):
        PrioritizedSampler(**{name: value})
    with made() as rb:
        before = repr(rb.sampler)
        with pytest.raises((InvalidArgument, InvalidType), match=name):
            setattr(rb.sampler, name, value)
        assert repr(rb.sampler) == before
        assert agrees(rb, 1.0)


@pytest.mark.parametrize(
    "arguments", [(-1, 1, 5), (0, float("nan"), 5), ("x", 1, 5), (0, 1, 0), (0, 1, 2.5), (0, 1, True), (0, 1, 2**60)]
)
def test_a_schedule_that_means_nothing_is_refused(arguments: Any) -> None:
    with pytest.raises((InvalidArgument, InvalidType)):
        LinearSchedule(arguments[0], arguments[1], over=arguments[2])


def test_a_priority_that_a_later_alpha_makes_too_large_is_refused() -> None:
    """When it is given, where a schedule says what comes; else when alpha is assigned."""
    with made(alpha=LinearSchedule(0.5, 3.0, over=100)) as rb, pytest.raises(InvalidArgument, match="too large"):
        rb.update_priority([0], [1e200])
    with made(alpha=0.5) as rb:
        rb.update_priority([0], [1e200])
        before = sampler_of(rb).tree.leaves.tobytes()
        with pytest.raises(InvalidArgument, match="1e"):
            sampler_of(rb).alpha = 2.0
        assert sampler_of(rb).alpha == 0.5
        assert sampler_of(rb).tree.leaves.tobytes() == before


@pytest.mark.parametrize("prefetch", [0, 2])
def test_beta_follows_the_items_drawn_so_far(prefetch: int, way: Any) -> None:
    """Each batch has the weights of the items that were drawn before it, also where they were drawn ahead."""
    rb = ReplayBuffer(
        4,
        sampler=PrioritizedSampler(alpha=1.0, eps=0.0, beta=LinearSchedule(0.2, 1.0, over=50)),
        prefetch=prefetch,
        seed=0,
    )
    with rb:
        rb.extend({"x": torch.arange(4)}, priority=GIVEN)
        short = install(rb, way)
        for k in range(9):
            beta = min(0.2 + 0.8 * 8 * k / 50, 1.0)
            batch = rb.sample(8)
            expected = (1.0 / torch.tensor(GIVEN, dtype=torch.float64)[batch["x"]]) ** beta
            torch.testing.assert_close(batch["priority_weight"].double(), expected, rtol=1e-6, atol=0)
        assert short.done["sample"] == (1 if prefetch else 9)


def test_alpha_follows_a_schedule_in_a_hundred_stages(way: Any) -> None:
    """The leaves are computed anew a hundred times, not for each sample."""
    rebuilt = 0
    with made(alpha=LinearSchedule(0.0, 1.0, over=1000)) as rb:
        short, tree = install(rb, way), sampler_of(rb).tree
        leaves = tree.leaves[:4].tolist()
        for k in range(260):
            count = 4 * k
            rb.sample(4)
            alpha = min(count // 10 * 10, 1000) / 1000
            assert tree.leaves[:4].tolist() == [float(np.power(np.array([p]), alpha)[0]) for p in GIVEN]
            rebuilt += tree.leaves[:4].tolist() != leaves
            leaves = tree.leaves[:4].tolist()
        assert rebuilt == 100
        assert short.done["sample"] == 260 - 100
        assert agrees(rb, 1.0)


def test_a_schedule_goes_on_after_a_load_and_in_other_processes(tmp_path: Path) -> None:
    rules: dict[str, Any] = {"alpha": LinearSchedule(1.0, 0.0, over=400), "beta": LinearSchedule(0.0, 1.0, over=300)}
    path = tmp_path / "saved"
    with made(**rules) as rb, made(**rules) as other:
        for _ in range(10):
            rb.sample(20)
        rb.dumps(path)
        other.loads(path)
        for _ in range(5):
            mine, theirs = rb.sample(20), other.sample(20)
            assert torch.equal(mine["index"], theirs["index"])
            assert torch.equal(mine["priority_weight"], theirs["priority_weight"])
        rb.share()
        attached = ReplayBuffer.attach(rb.handle().path)
        assert sampler_of(attached).beta == rules["beta"]
        batch = attached.sample(20)  # 300 were drawn: alpha 0.25, beta 1
        expected = (1.0 / torch.tensor(GIVEN, dtype=torch.float64)[batch["x"]]) ** 0.25
        torch.testing.assert_close(batch["priority_weight"].double(), expected, rtol=1e-6, atol=0)
        attached.close()


def test_settings_of_a_sampler_within_another() -> None:
    around: Any = NStep
    rows = {
        "x": torch.arange(4),
        "next": {"reward": torch.zeros(4, 1), "done": torch.ones(4, 1, dtype=torch.bool)},
    }
    base = PrioritizedSampler(alpha=1.0, eps=0.0, beta=LinearSchedule(0.0, 1.0, over=2**40))
    with ReplayBuffer(4, sampler=around(2, 0.9, base=base), num_envs=1, seed=0) as rb:
        rb.extend(rows, priority=GIVEN)
        base.alpha = 0.5
        assert agrees(rb, 0.5)
        saved = rb.state_dict()
        again = PrioritizedSampler(alpha=1.0, eps=0.0, beta=LinearSchedule(0.0, 1.0, over=2**40))
        with ReplayBuffer(4, sampler=around(2, 0.9, base=again), num_envs=1) as other:
            other.load_state_dict(saved)
            assert again.alpha == 0.5
            assert agrees(other, 0.5)


def reached(achieved: Any, desired: Any) -> Any:
    return (achieved == desired).all(-1)


def fixed() -> list[tuple[Any, str, Any]]:
    around = {"base": RandomSampler(), "episode_key": "trajectory"}
    changed: dict[Any, dict[str, Any]] = {
        SliceSampler(slice_len=2): {"slice_len": 3, "num_slices": 4, "short": "pad", **around},
        NStep(2, 0.9): {"n": -3, "gamma": 7.0, **around},
        HindsightSampler(reached): {
            "reward": None,
            "terminated": reached,
            "fraction": 40.0,
            "strategy": "lucky",
            "goal": "goal",
            "achieved": "position",
            **around,
        },
    }
    return [
        *((sampler, name, value) for sampler, values in changed.items() for name, value in values.items()),
        (SamplerWithoutReplacement(), "drop_last", True),
        (ConsumingSampler(2), "n", 3),
        (TensorStorage(4), "capacity", 5),
        (MappedStorage(4), "capacity", 5),
        (TensorStorage(4), "device", "cuda"),
        (Flow(), "min_size", 3),
        (LinearSchedule(0, 1, over=2), "over", 3),
    ]


@pytest.mark.parametrize(("thing", "name", "value"), fixed(), ids=lambda case: None)
def test_what_others_were_derived_from_cannot_be_assigned(thing: Any, name: str, value: Any) -> None:
    before = getattr(thing, name)
    with pytest.raises((InvalidArgument, AttributeError)):
        setattr(thing, name, value)
    assert getattr(thing, name) == before


@pytest.mark.parametrize("name", ["capacity", "batch_size", "flow", "sampler", "schema", "write_count", "shared"])
def test_attributes_of_a_buffer_cannot_be_assigned(name: str) -> None:
    with made() as rb, pytest.raises(AttributeError):
        setattr(rb, name, 3)
