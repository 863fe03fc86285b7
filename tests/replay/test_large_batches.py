"""A batch above the capacity of a buffer that overwrites: as its items one after the other. Elsewhere it never fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from millpond import Flow, ReplayBuffer
from millpond.core.errors import DeadlineExceeded, NonFinite, SchemaMismatch, Unsatisfiable
from millpond.replay import (
    ConsumingSampler,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
)

CAPACITY = 7
Make = Callable[[], ReplayBuffer]
KINDS: dict[str, Make] = {
    "ring": lambda: ReplayBuffer(CAPACITY, seed=0),
    "shared": lambda: ReplayBuffer(CAPACITY, seed=0, shared=True),
    "pool": lambda: ReplayBuffer(CAPACITY, seed=0, consume_after_n_samples=3),
    "queue": lambda: ReplayBuffer(CAPACITY, seed=0, sampler=ConsumingSampler(2)),
    "prioritized": lambda: ReplayBuffer(CAPACITY, seed=0, sampler=PrioritizedSampler()),
    "prioritized pool": lambda: ReplayBuffer(
        CAPACITY, seed=0, sampler=PrioritizedSampler(), consume_after_n_samples=2, shared=True
    ),
    "epochs": lambda: ReplayBuffer(CAPACITY, seed=0, sampler=SamplerWithoutReplacement()),
    "n-step": lambda: ReplayBuffer(CAPACITY, seed=0, sampler=NStep(3, 0.5), num_envs=1),
    "slices": lambda: ReplayBuffer(CAPACITY, seed=0, sampler=SliceSampler(slice_len=2), num_envs=1),
}
ALIKE = (RandomSampler, NStep, SliceSampler)  # what they draw follows from the items and the seed alone
COUNTS = ("size", "storage_size", "write_count", "overwritten", "consumed", "discarded_writes", "stale_updates")


@pytest.fixture(params=KINDS)
def two(request: pytest.FixtureRequest) -> Any:
    """Two buffers of one kind."""
    with KINDS[request.param]() as one, KINDS[request.param]() as other:
        yield one, other


def steps(start: int, n: int) -> dict[str, Any]:
    number = torch.arange(start, start + n)
    return {"x": number, "next": {"reward": number[:, None].float(), "done": (number % 4 == 3)[:, None]}}


def item(number: int) -> dict[str, Any]:
    batch = steps(number, 1)
    return {"x": batch["x"][0], "next": {name: value[0] for name, value in batch["next"].items()}}


def look(rb: ReplayBuffer) -> Any:
    stats = rb.stats()
    return rb[:]["x"].tolist(), {name: stats[name] for name in COUNTS}


@pytest.mark.parametrize("sizes", [[8], [7], [3, 8], [7, 20], [5, 14, 3, 30, 7], [1, 100, 2]])
def test_it_is_as_if_items_were_added_one_by_one(two: Any, sizes: list[int]) -> None:
    whole, single = two
    for n in sizes:
        start = whole.write_count
        slots = whole.extend(steps(start, n))
        for number in range(start, start + n):
            single.add(item(number))
        assert look(whole) == look(single)
        assert slots.dtype is torch.int64
        assert slots.shape == (n,)
        kept = slots[-CAPACITY:]
        assert len(kept.unique()) == len(kept) == min(n, CAPACITY)
        assert torch.equal(slots[:-CAPACITY], slots[CAPACITY:])
        last = list(range(start + n - len(kept), start + n))
        whole.update(kept, {"x": -torch.tensor(last)})  # these slots are those of the last items
        assert whole[-len(kept) :]["x"].tolist() == [-number for number in last]
        whole.update(kept, {"x": torch.tensor(last)})
        assert whole.can_sample(2) == single.can_sample(2)
        if type(whole.sampler) in ALIKE and not whole._local.rules.deliveries and whole.can_sample(2):
            batches = [rb.sample(2) for rb in two]
            assert all(torch.equal(batches[0][key], batches[1][key]) for key in ("x", "index", ("next", "reward")))


def test_priorities_and_slots_are_those_of_the_last_items(two: Any) -> None:
    rb, _ = two
    if not isinstance(rb.sampler, PrioritizedSampler):
        return
    priority = torch.zeros(20)
    priority[15] = 1.0
    slots = rb.extend(steps(0, 20), priority=priority)
    leaves = rb._local.engine.priorities.tree.leaf
    by_slot = leaves(slots[-CAPACITY:].numpy())
    assert by_slot.argmax() == 15 - 13
    rb.update_priority(slots, torch.arange(20.0))  # of a slot that is named twice the last one counts
    assert leaves(slots[-CAPACITY:].numpy()).argmax() == CAPACITY - 1


def test_all_of_it_is_judged_before_any_is_written() -> None:
    rb = ReplayBuffer(3, check_finite=True)
    rb.extend({"x": torch.zeros(2)})
    with pytest.raises(NonFinite, match="item 0 of 9"):
        rb.extend({"x": torch.tensor([float("nan")] + [0.0] * 8)})
    with pytest.raises(SchemaMismatch):
        rb.extend({"x": torch.zeros(9, 1)})
    assert rb.write_count == 2


def test_all_of_it_counts_for_the_ratio() -> None:
    rb = ReplayBuffer(5, flow=Flow(samples_per_insert=1, max_debt=30, min_size=2), batch_size=4)
    assert rb.wait_until_writable(12, timeout=0)
    rb.extend(steps(0, 12), receipt=(3, 17))
    assert rb.receipt(3) == 17
    assert [len(rb.sample()) for _ in range(2)] == [4, 4]
    assert not rb.can_sample()  # 10 are owed, 8 were drawn
    rb.extend(steps(12, 12))
    with pytest.raises(DeadlineExceeded, match=r"max_debt=30"):
        rb.extend(steps(24, 20), timeout=0)
    with pytest.raises(Unsatisfiable, match="max_debt=30"):
        rb.extend(steps(24, 31))
    assert rb.write_count == 24
    with rb.unlimited():
        rb.extend(steps(24, 50))
    assert (rb.write_count, len(rb), rb[:]["x"].tolist()) == (74, 5, [69, 70, 71, 72, 73])


@pytest.mark.parametrize("admission", ["block", "drop_newest", "raise"])
def test_where_nothing_is_overwritten_it_never_fits(admission: Any) -> None:
    rb = ReplayBuffer(5, flow=Flow(admission=admission), consume_after_n_samples=1)
    rb.extend(steps(0, 2))
    for call in (lambda: rb.extend(steps(2, 6)), lambda: rb.wait_until_writable(6)):
        with pytest.raises(Unsatisfiable, match="6 items never fits.*capacity of 5"):
            call()
    assert rb.stats()["dropped"] == 0
    assert rb[:]["x"].tolist() == [0, 1]


def test_prefetched_batches_of_what_is_gone_are_drawn_again() -> None:
    rb = ReplayBuffer(5, prefetch=2, batch_size=3, seed=0)
    rb.extend(steps(0, 5))
    rb.sample()
    rb.extend(steps(5, 20))
    for _ in range(20):
        assert (rb.sample()["generation"] >= 0).all()
    assert set(rb.sample()["x"].tolist()) <= set(range(20, 25))


@pytest.mark.parametrize("kind", ["ring", "shared", "pool"])
def test_one_that_is_cut_off_never_was(kind: str) -> None:
    """What it had overwritten is gone, as after any write that is cut off; none of its own items is there."""
    with KINDS[kind]() as rb:
        rb.extend(steps(0, 5))

        def cut_off(_: str) -> None:
            raise KeyboardInterrupt

        rows: Any = rb._local.engine.rows
        rows.hook = cut_off
        with pytest.raises(KeyboardInterrupt):
            rb.extend(steps(5, 30))
        rows.hook = None
        stats = rb.stats()
        assert (stats["write_count"], stats["size"], stats["overwritten"], stats["discarded_writes"]) == (5, 0, 5, 1)
        rb.extend(steps(5, 9))
        assert rb[:]["x"].tolist() == list(range(7, 14))
        assert rb.write_count == 14
