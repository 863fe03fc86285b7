"""What a batch of an ensemble is worth: importance weights and shares of the whole mix, checked by brute force."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from millpond import BlockingReplayBuffer, ReplayBuffer, ReplayBufferEnsemble
from millpond.core.errors import InvalidArgument, NotReady
from millpond.replay import (
    ConsumingSampler,
    LinearSchedule,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
)
from millpond.replay.ensemble.mixture import Mix, shares_of
from millpond.replay.samplers.protocol import Generator

DRAWS = 4000


def prioritized(priorities: list[float], start: int, **settings: Any) -> ReplayBuffer:
    sampler = PrioritizedSampler(**{"alpha": 1.0, "beta": 1.0, "eps": 0.0, **settings})
    rb = ReplayBuffer(len(priorities), sampler=sampler, seed=start)
    rb.extend({"x": torch.arange(start, start + len(priorities))}, priority=priorities)
    return rb


def uniform(n: int, start: int, **options: Any) -> ReplayBuffer:
    rb = ReplayBuffer(n, seed=start, **options)
    rb.extend({"x": torch.arange(start, start + n)})
    return rb


def test_an_ensemble_weighs_its_items_as_one_buffer_would() -> None:
    """A: 100 items of priority 1. B: 50 of 1 and 50 of 99. With alpha = beta = 1 the members' parts of the loss are
    equal, as all items are."""
    a = prioritized([1.0] * 100, 0)
    b = prioritized([1.0] * 50 + [99.0] * 50, 100)
    with ReplayBufferEnsemble(a, b, batch_size=DRAWS, seed=0) as both:
        batches = [both.sample() for _ in range(10)]
        weight = torch.cat([x["priority_weight"] for x in batches]).double()
        of_a = torch.cat([x["buffer_id"] for x in batches]) == 0
        assert float(weight[of_a].sum() / weight.sum()) == pytest.approx(0.5, abs=0.02)
        # The least probable items of all are those of B with priority 1: 1/2 of 1/5000. An item of A has 1/2 of 1/100.
        assert weight[of_a].unique().tolist() == pytest.approx([0.02])
        assert sorted(weight[~of_a].unique().tolist()) == pytest.approx([1 / 99, 1.0])


def brute_force(members: list[tuple[Any, float, float]], shares: list[float]) -> tuple[Any, Any]:
    """Probability and weight of each item of members (priorities, or a number of items; alpha; beta)."""
    beta = max((b for p, _, b in members if not isinstance(p, int)), default=0.0)
    probability, exponent = [], []
    for (given, alpha, own), share in zip(members, shares, strict=True):
        leaves = np.ones(given) if isinstance(given, int) else np.asarray(given) ** alpha
        probability.append(share / sum(shares) * leaves / leaves.sum())
        exponent.append(np.full(len(leaves), beta if isinstance(given, int) else own))
    chances, betas = np.concatenate(probability), np.concatenate(exponent)
    weights = (len(chances) * chances) ** -betas
    return chances, weights / weights.max()


CASES: list[tuple[list[tuple[Any, float, float]], list[float]]] = [
    ([([1.0, 2.0, 3.0], 1.0, 1.0), ([5.0, 0.5], 1.0, 1.0)], [1, 1]),
    ([([1.0, 2.0, 3.0], 0.6, 0.4), ([5.0, 0.5], 0.6, 0.4)], [1, 9]),
    ([([1.0, 2.0, 3.0], 0.6, 0.5), (4, 0.0, 0.0)], [3, 1]),
    ([(2, 0.0, 0.0), ([1.0, 7.0], 0.5, 1.0), (5, 0.0, 0.0)], [1, 2, 3]),
    ([([1.0, 2.0], 1.0, 0.3), ([4.0, 2.0, 2.0], 0.5, 0.9), (3, 0.0, 0.0)], [1, 1, 2]),
    ([([1.0, 2.0], 1.0, 0.0), ([4.0, 2.0, 2.0], 0.5, 0.0)], [1, 1]),
]


@pytest.mark.parametrize(("members", "shares"), CASES)
def test_weights_and_frequencies_by_brute_force(members: list[tuple[Any, float, float]], shares: list[float]) -> None:
    starts = list(itertools.accumulate([m if isinstance(m, int) else len(m) for m, _, _ in members], initial=0))
    made = [
        uniform(given, start) if isinstance(given, int) else prioritized(given, start, alpha=alpha, beta=beta)
        for (given, alpha, beta), start in zip(members, starts, strict=False)
    ]
    chances, weights = brute_force(members, shares)
    with ReplayBufferEnsemble(*made, weights=shares, seed=1) as mix:
        batches = [mix.sample(DRAWS) for _ in range(5)] + [mix.sample(1) for _ in range(20)]
        x = torch.cat([b["x"] for b in batches]).numpy()
        found = torch.cat([b["priority_weight"] for b in batches]).double().numpy()
        np.testing.assert_allclose(found, weights[x], rtol=2e-6)
        expected = chances * len(x)
        counts = np.bincount(x, minlength=len(chances))
        assert ((counts - expected) ** 2 / expected).sum() < 40  # at most 9 degrees of freedom: p < 1e-5


def test_the_least_probable_item_has_the_weight_1_after_any_change() -> None:
    """Of shares, priorities, settings, and of what is there."""
    a, b = prioritized([1.0, 2.0], 0), prioritized([4.0, 5.0, 6.0], 2)
    with ReplayBufferEnsemble(a, b, seed=0) as both:
        for shares in ([1, 1], [1, 30], [50, 1]):
            both.weights = shares
            for member, alpha in ((a, 1.0), (b, 0.5)):
                member.sampler.alpha = alpha  # type: ignore[attr-defined]
            batch = both.sample(2000)
            ours, theirs = [1.0, 2.0], np.sqrt([4.0, 5.0, 6.0])
            chances = np.concatenate([shares[0] * np.array(ours) / 3, shares[1] * theirs / theirs.sum()])
            expected = (1 / chances) / (1 / chances).max()
            np.testing.assert_allclose(batch["priority_weight"].numpy(), expected[batch["x"].numpy()], rtol=2e-6)
        both.weights = [1, 0]  # what is never drawn counts nowhere
        assert sorted(both.sample(50)["priority_weight"].unique().tolist()) == pytest.approx([0.5, 1.0])


def test_a_beta_that_follows_a_schedule_follows_each_members_own_items() -> None:
    rules = LinearSchedule(0.0, 1.0, over=100)
    a, b = prioritized([1.0, 3.0], 0, beta=rules), prioritized([1.0, 1.0], 2, beta=rules)
    with ReplayBufferEnsemble(a, b, seed=0) as both:
        for _ in range(12):
            betas = [rules.at(m.stats()["samples_returned"]) for m in (a, b)]
            batch = both.sample(10)
            _, expected = brute_force([([1.0, 3.0], 1.0, betas[0]), ([1.0, 1.0], 1.0, betas[1])], [1, 1])
            np.testing.assert_allclose(batch["priority_weight"].numpy(), expected[batch["x"].numpy()], rtol=1e-5)


# ---------------------------------------------------------------------- how many items each gives
@pytest.mark.parametrize(
    ("units", "shares", "n"),
    [
        ([1, 1], [1, 3], 7),
        ([5, 5], [1, 3], 20),
        ([5, 1], [1, 1], 16),
        ([5, 1], [1, 9], 4 + 5),
        ([4, 6], [1, 2], 24),
        ([3, 1, 1], [2, 1, 1], 31),
        ([2, 3, 1], [1, 1, 2], 50),
    ],
)
def test_every_member_gives_its_share_in_whole_units(units: list[int], shares: list[float], n: int) -> None:
    mix, random = Mix(shares_of(shares, len(units)), units), Generator(torch.Generator().manual_seed(0))
    counts = np.array([mix.counts(n, random) for _ in range(4000)])
    assert (counts.sum(1) == n).all()
    assert (counts % units == 0).all()
    assert (counts.max(0) <= mix.most(n)).all()
    expected = n * np.array(shares) / sum(shares)
    error = counts.std(0) / np.sqrt(len(counts))
    assert (abs(counts.mean(0) - expected) <= 5 * error + 1e-9).all()


@pytest.mark.parametrize(("units", "shares", "n"), [([5, 5], [1, 1], 12), ([4, 6], [1, 1], 10), ([5, 1], [9, 1], 6)])
def test_a_batch_that_no_choice_of_members_can_make_is_refused(units: list[int], shares: list[float], n: int) -> None:
    mix = Mix(shares_of(shares, 2), units)
    with pytest.raises(InvalidArgument, match="multiple of"):
        mix.most(n)


def episodes(n: int, length: int, start: int) -> dict[str, Any]:
    done = (torch.arange(n) % length == length - 1)[:, None]
    return {
        "x": torch.arange(start, start + n),
        "next": {"done": done, "reward": torch.ones(n, 1)},
        "episode_id": torch.arange(n) // length + start,
        "step": torch.arange(n) % length,
    }


def walked(n: int, start: int, sampler: Any, **options: Any) -> ReplayBuffer:
    rb = ReplayBuffer(n, sampler=sampler, seed=start, **options)
    rb.extend(episodes(n, 10, start))
    return rb


def test_an_ensemble_of_slices_always_gives_whole_ones() -> None:
    members = [walked(40, start, SliceSampler(slice_len=5)) for start in (0, 100)]
    with ReplayBufferEnsemble(*members, weights=[1, 3], batch_size=40, seed=0) as both:
        of_first = 0
        for _ in range(200):
            batch = both.sample()
            slices = batch["x"].reshape(-1, 5)
            assert (slices - slices[:, :1] == torch.arange(5)).all()
            assert (batch["buffer_id"].reshape(-1, 5) == (slices >= 100)).all()
            of_first += int((batch["buffer_id"] == 0).sum())
        assert of_first / 8000 == pytest.approx(0.25, abs=0.05)
        with pytest.raises(InvalidArgument, match="ask for a multiple of 5"):
            both.sample(12)
        with pytest.raises(InvalidArgument, match="ask for a multiple of 5"):
            both.can_sample(12)
    with pytest.raises(InvalidArgument, match="slice_len instead"):
        ReplayBufferEnsemble(walked(10, 0, SliceSampler(num_slices=2)), walked(10, 10, RandomSampler()))


def test_slices_beside_single_items() -> None:
    with ReplayBufferEnsemble(
        walked(40, 0, SliceSampler(slice_len=5)), walked(40, 100, RandomSampler()), batch_size=16, seed=0
    ) as both:
        total = 0
        for _ in range(300):
            batch = both.sample()
            assert len(batch) == 16
            slices = batch["x"][batch["buffer_id"] == 0].reshape(-1, 5)
            assert (slices - slices[:, :1] == torch.arange(5)).all()
            total += slices.numel()
        assert total / 4800 == pytest.approx(0.5, abs=0.05)


def test_an_ensemble_of_n_step_returns() -> None:
    around: Any = NStep
    members = [walked(40, start, around(3, 0.5)) for start in (0, 100)]
    with ReplayBufferEnsemble(*members, batch_size=64, seed=0) as both:
        batch = both.sample()
        steps = torch.minimum(10 - batch["step"], torch.tensor(3))
        assert torch.equal(batch["steps_to_next_obs"][:, 0], steps)
        torch.testing.assert_close(batch["next", "reward"][:, 0], 2 * (1 - 0.5 ** steps.float()))


@pytest.mark.parametrize("sampler", [SamplerWithoutReplacement, ConsumingSampler])
def test_members_that_give_each_item_once(sampler: Any) -> None:
    members = [uniform(30, start, sampler=sampler()) for start in (0, 30)]
    with ReplayBufferEnsemble(*members, batch_size=5, seed=0) as both:
        seen: list[int] = []
        while len(seen) < 40:
            seen += both.sample()["x"].tolist()
        assert len(set(seen)) == len(seen)


def test_blocking_members_are_never_half_taken() -> None:
    members = [BlockingReplayBuffer(10), BlockingReplayBuffer(10)]
    with ReplayBufferEnsemble(*members, batch_size=6, seed=0) as both:
        both.extend({"x": torch.arange(10)}, member=0)
        for _ in range(5):
            with pytest.raises(NotReady, match="member 1"):
                both.sample()
        assert len(members[0]) == 10
        both.extend({"x": torch.arange(10)}, member=1, timeout=0)
        assert len(both.sample(wait=True, timeout=10)) == 6
        assert len(both) == 14
