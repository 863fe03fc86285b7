"""Priorities: what a leaf is, who gets drawn how often, and what an update may touch."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from millpond import ReplayBuffer
from millpond.core.errors import InvalidArgument, InvalidType, NotReady
from millpond.replay import PrioritizedSampler

EPS, ALPHA = 1e-6, 0.6


def numbers(n: int, start: int = 0) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(start, start + n)}


def leaves(rb: ReplayBuffer) -> np.ndarray[Any, Any]:
    return rb.sampler.tree.leaves.copy()  # type: ignore[attr-defined, no-any-return]


def leaf(priority: float) -> float:
    return float((priority + EPS) ** ALPHA)


@pytest.fixture(params=[False, True], ids=["private", "shared"])
def rb(request: pytest.FixtureRequest) -> Any:
    with ReplayBuffer(8, sampler=PrioritizedSampler(alpha=ALPHA, eps=EPS), shared=request.param, seed=0) as buffer:
        yield buffer


def test_an_update_for_a_slot_written_over_is_dropped_and_counted(rb: ReplayBuffer) -> None:
    """prio-1"""
    rb.extend(numbers(8))
    batch = rb.sample(8)
    rb.extend(numbers(3, 8))
    before = leaves(rb)
    gone = batch["generation"] < 3
    assert rb.update_priority(batch, torch.full((8,), 9.0)) == int((~gone).sum())
    assert rb.stats()["stale_updates"] == int(gone.sum())
    after = leaves(rb)
    assert (after[:3] == before[:3]).all()
    assert set(after[3:]) <= {before[3], leaf(9.0)}


def test_a_leaf_is_the_same_however_it_came_about(rb: ReplayBuffer) -> None:
    """prio-2: add, extend, update, restore: (p + eps)^alpha, once."""
    rb.add({"x": torch.tensor(0)}, priority=2.5)
    rb.extend(numbers(2, 1), priority=torch.tensor([2.5, 0.5]))
    rb.extend(numbers(1, 3))
    rb.update_priority(torch.tensor([3]), torch.tensor([2.5]))
    expected = [leaf(2.5), leaf(2.5), leaf(0.5), leaf(2.5)]
    assert leaves(rb)[:4].tolist() == pytest.approx(expected, rel=1e-12)
    other = ReplayBuffer(8, sampler=PrioritizedSampler(alpha=ALPHA, eps=EPS))
    other.load_state_dict(rb.state_dict())
    assert (leaves(other) == leaves(rb)).all()


def test_new_items_get_the_largest_priority_of_those_that_are_there(rb: ReplayBuffer) -> None:
    """prio-3: a maximum of 2.7 gives 2.7, not 3; and one that was evicted counts no more."""
    rb.extend(numbers(1))
    assert leaves(rb)[0] == pytest.approx(leaf(1.0))
    rb.extend(numbers(7, 1), priority=[2.7, 1, 1, 1, 1, 1, 1])
    rb.add({"x": torch.tensor(8)})  # evicts item 0
    assert leaves(rb)[0] == pytest.approx(leaf(2.7))
    rb.update_priority(torch.tensor([0]), torch.tensor([0.3]))
    rb.add({"x": torch.tensor(9)})  # evicts the item with 2.7
    assert leaves(rb)[1] == pytest.approx(leaf(1.0))


def test_priority_zero_is_never_drawn() -> None:
    """prio-4: eps=0, 100 seeds."""
    for seed in range(100):
        rb = ReplayBuffer(7, sampler=PrioritizedSampler(alpha=0.5, eps=0.0), seed=seed)
        rb.extend(numbers(7), priority=[0.0, 0.1, 0.2, 0.0, 0.3, 0.1, 0.0])
        assert set(rb.sample(64)["x"].tolist()) <= {1, 2, 4, 5}
    rb.update_priority(torch.arange(7), torch.zeros(7))
    with pytest.raises(NotReady, match="0 of 7 items have a priority above zero"):
        rb.sample(2)


def test_unwritten_slots_count_nowhere(rb: ReplayBuffer) -> None:
    """prio-5: not in the minimum, never drawn."""
    rb.extend(numbers(3), priority=[1.0, 2.0, 4.0])
    batch = rb.sample(200)
    assert set(batch["index"].tolist()) <= {0, 1, 2}
    assert batch["priority_weight"].max() == 1.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), -1.0, 1e308])
def test_what_is_no_priority_is_refused_before_the_tree_is_touched(rb: ReplayBuffer, bad: float) -> None:
    """prio-6"""
    rb.extend(numbers(4))
    before, stats = leaves(rb), rb.stats()
    if bad == 1e308:
        bad = float("inf")
    with pytest.raises(InvalidArgument, match="number 2 of 4"):
        rb.update_priority(torch.arange(4), torch.tensor([1.0, 2.0, bad, 4.0], dtype=torch.float64))
    with pytest.raises(InvalidArgument):
        rb.extend(numbers(4, 4), priority=[1.0, 2.0, 3.0, bad])
    with pytest.raises(InvalidArgument, match="3 priorities for 4"):
        rb.update_priority(torch.arange(4), torch.ones(3))
    assert (leaves(rb) == before).all()
    assert rb.stats() == stats


@pytest.mark.parametrize("stratified", [True, False])
def test_frequencies_follow_the_priorities(stratified: bool) -> None:
    """prio-7: 1:2:3:4 over 10^5 draws."""
    rb = ReplayBuffer(4, sampler=PrioritizedSampler(alpha=1.0, eps=0.0, stratified=stratified), seed=3)
    rb.extend(numbers(4), priority=[1.0, 2.0, 3.0, 4.0])
    counts = torch.zeros(4)
    for _ in range(100):
        counts += torch.bincount(rb.sample(1000)["x"], minlength=4)
    expected = torch.tensor([0.1, 0.2, 0.3, 0.4]) * 1e5
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # 0.1 % of a chi-square with 3 degrees of freedom


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_importance_weights(beta: float) -> None:
    """(N P)^-beta over the largest of any live item, not of the batch."""
    rb = ReplayBuffer(10, sampler=PrioritizedSampler(alpha=0.7, beta=beta, eps=0.0), seed=0)
    priorities = torch.tensor([0.2, 1.0, 3.0, 7.0], dtype=torch.float64)
    rb.extend(numbers(4), priority=priorities)
    probability = priorities**0.7 / (priorities**0.7).sum()
    weights = (4 * probability) ** -beta
    weights /= weights.max()
    batch = rb.sample(50)
    assert batch["priority_weight"].dtype is torch.float32
    torch.testing.assert_close(batch["priority_weight"].double(), weights[batch["x"]], rtol=1e-6, atol=0)


def test_a_slot_whose_item_is_only_being_written_is_never_returned(rb: ReplayBuffer) -> None:
    """A writer gives a slot its priority just before its item becomes live: who draws it then must draw again."""
    rb.extend(numbers(4))
    tree = rb.sampler.tree  # type: ignore[attr-defined]
    tree.fill_at(np.array([6]), 1e9)
    with pytest.raises(NotReady, match="cannot draw"):
        rb.sample(64)
    tree.fill_at(np.array([6]), 0.0)
    assert rb.sample(64)["generation"].min() >= 0


def test_of_duplicate_indices_the_last_counts(rb: ReplayBuffer) -> None:
    rb.extend(numbers(4))
    assert rb.update_priority(torch.tensor([2, 1, 2]), torch.tensor([5.0, 6.0, 7.0])) == 3
    assert leaves(rb)[2] == pytest.approx(leaf(7.0))


@pytest.mark.parametrize(
    ("index", "error"),
    [
        (torch.tensor([0.5]), InvalidType),
        (torch.tensor([True]), InvalidType),
        (torch.tensor([-1]), InvalidArgument),
        (torch.tensor([8]), InvalidArgument),
        (torch.tensor([2**40]), InvalidArgument),
    ],
)
def test_an_index_that_is_none_is_refused(rb: ReplayBuffer, index: torch.Tensor, error: type[Exception]) -> None:
    """prio-9"""
    rb.extend(numbers(8))
    with pytest.raises(error):
        rb.update_priority(index, torch.ones(1))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.uint8, torch.int64])
def test_an_index_of_any_integer_type_is_taken(rb: ReplayBuffer, dtype: torch.dtype) -> None:
    """prio-9"""
    rb.extend(numbers(8))
    assert rb.update_priority(torch.tensor([3, 4], dtype=dtype), torch.tensor([2.0, 2.0], dtype=torch.float16)) == 2
    assert rb.update_priority([5], [2.0]) == 1
    assert rb.update_priority(6, 2.0) == 1
    assert leaves(rb)[3:7].tolist() == pytest.approx([leaf(2.0)] * 4)


def test_priorities_need_a_prioritized_sampler() -> None:
    rb = ReplayBuffer(4)
    with pytest.raises(InvalidArgument, match="PrioritizedSampler"):
        rb.extend(numbers(2), priority=1.0)
    rb.extend(numbers(2))
    with pytest.raises(InvalidArgument, match="PrioritizedSampler"):
        rb.update_priority(torch.tensor([0]), torch.ones(1))


def test_a_batch_that_is_consumed_holds_an_item_once_however_skewed() -> None:
    rb = ReplayBuffer(
        64, sampler=PrioritizedSampler(alpha=1.0, eps=1e-12), consume_after_n_samples=1, batch_size=32, seed=0
    )
    rb.extend(numbers(64), priority=torch.cat([torch.tensor([1e12]), torch.full((63,), 1e-9)]))
    first, second = rb.sample(), rb.sample()
    assert 0 in first["x"].tolist()
    assert sorted(torch.cat([first["x"], second["x"]]).tolist()) == list(range(64))


@pytest.mark.parametrize(
    "arguments", [{"alpha": -1}, {"beta": float("nan")}, {"eps": "x"}, {"stratified": 1}, {"alpha": True}]
)
def test_arguments_that_mean_nothing_are_refused(arguments: Any) -> None:
    with pytest.raises((InvalidArgument, InvalidType)):
        PrioritizedSampler(**arguments)


EXACT = [
    ([0.1], 0.1),  # not by way of float32
    ((1 / 3, 1 / 3), 1 / 3),
    (torch.tensor([2**53 + 1]), float(2**53 + 1)),
    (np.array([2**64 - 1], np.uint64), float(2**64 - 1)),
    ([2**70], float(2**70)),
    ([Fraction(1, 3)], 1 / 3),
    (torch.tensor([0.1], dtype=torch.float64, requires_grad=True), 0.1),
    (np.array([[0.1]]), 0.1),
    (torch.tensor(0.25, dtype=torch.bfloat16), 0.25),
    ([-0.0], 0.0),
]


@pytest.mark.parametrize(("given", "expected"), EXACT)
def test_a_priority_is_kept_as_float64(rb: ReplayBuffer, given: Any, expected: float) -> None:
    """From add, extend and update_priority alike."""
    n = len(given) if isinstance(given, tuple) else 1
    rb.extend(numbers(n), priority=given)
    rb.extend(numbers(n))
    rb.update_priority(torch.arange(n, 2 * n), given)
    if n == 1:
        rb.add({"x": torch.tensor(0)}, priority=given)
    kept = rb.sampler.tree.values[: rb.write_count]  # type: ignore[attr-defined]
    assert kept.tobytes() == np.full(len(kept), expected).tobytes()


@pytest.mark.parametrize(
    "bad",
    [
        "1",
        ["1.0"],
        [None],
        [1j],
        [object()],
        [[1.0], [2.0, 3.0]],
        np.array(["2026-01-01"], "M8[D]"),
        np.ma.array([1.0], mask=[True]),
        torch.ones(1).to_sparse(),
        torch.ones(1, device="meta"),
        np.array([np.longdouble("1e400")]),
        [Decimal("NaN")],
        [10**400],
        [1.0, 2.0, 3.0],
        [],
    ],
)
def test_what_is_no_real_number_is_refused_by_every_call(rb: ReplayBuffer, bad: Any) -> None:
    rb.extend(numbers(2))
    before, stats = leaves(rb), rb.stats()
    calls: list[Callable[[], Any]] = [
        lambda: rb.update_priority([0, 1], bad),
        lambda: rb.extend(numbers(2), priority=bad),
        lambda: rb.add({"x": torch.tensor(0)}, priority=bad),
    ]
    for call in calls:
        with pytest.raises(InvalidArgument, match="priorit"):
            call()
    assert (leaves(rb) == before).all()
    assert rb.stats() == stats


def test_a_priority_for_no_item_is_judged_as_well() -> None:
    with ReplayBuffer(4) as plain, pytest.raises(InvalidArgument, match="PrioritizedSampler"):
        plain.extend(numbers(0), priority=1.0)
    with ReplayBuffer(4, sampler=PrioritizedSampler()) as rb:
        assert len(rb.extend(numbers(0), priority=1.0)) == 0
        with pytest.raises(InvalidType):
            rb.extend(numbers(0), priority="x")


def test_settings_with_which_no_item_could_be_written_are_refused() -> None:
    """Where they are given, not in the middle of the first write."""
    for settings in ({"alpha": 1.0, "eps": 1e308}, {"alpha": 1e9, "eps": 1e-6}):
        with pytest.raises(InvalidArgument, match="too large"):
            ReplayBuffer(4, sampler=PrioritizedSampler(**settings))  # type: ignore[arg-type]
    with ReplayBuffer(4, sampler=PrioritizedSampler(alpha=1e9, eps=0.0)) as rb:
        with pytest.raises(InvalidArgument, match="too large"):
            rb.sampler.eps = 1e-6  # type: ignore[attr-defined]
        rb.extend(numbers(2))
        assert leaves(rb)[:2].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("index", ["0", None, [0.0], 0.5, slice(0, 2), [2**64], np.array([0.5]), torch.ones(8) > 0])
def test_what_names_no_slot_is_refused(rb: ReplayBuffer, index: Any) -> None:
    rb.extend(numbers(8))
    before = leaves(rb)
    with pytest.raises(InvalidType):
        rb.update_priority(index, 5.0)
    assert (leaves(rb) == before).all()
