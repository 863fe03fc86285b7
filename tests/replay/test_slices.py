"""Slices: what cannot be cut or never fit is refused, short episodes are padded, first steps are drawn by priority."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from episode_model import Worlds, batch

from millpond import ReplayBuffer
from millpond.core.errors import InvalidArgument, NotReady, SchemaMismatch, Unsatisfiable
from millpond.replay import NStep, PrioritizedSampler, SliceSampler


def filled(lengths: list[int], sampler: Any, capacity: int = 100, **how: Any) -> ReplayBuffer:
    """Whole episodes, one after the other: item n is number n."""
    rb = ReplayBuffer(capacity, sampler=sampler, seed=0, **how)
    for i, length in enumerate(lengths):
        worlds = Worlds(lengths=(length, length), first_id=i)
        rb.extend(batch([worlds.step(0) for _ in range(length)], ids="episode_id step"))
    return rb


def test_a_slice_longer_than_the_buffer_is_refused_when_the_buffer_is_made() -> None:
    for sampler in (SliceSampler(slice_len=5), NStep(2, 0.9, base=SliceSampler(slice_len=5))):
        with pytest.raises(Unsatisfiable, match="slices of 5 steps never lie among 3 items"):
            ReplayBuffer(3, sampler=sampler)
    with pytest.raises(Unsatisfiable, match="slices of 20 steps never lie among 19"):
        ReplayBuffer(19, sampler=SliceSampler(num_slices=2), batch_size=40)
    ReplayBuffer(3, sampler=SliceSampler(slice_len=5, short="pad"))
    ReplayBuffer(5, sampler=SliceSampler(slice_len=5))


def test_a_slice_longer_than_an_environments_part_of_the_buffer_is_refused() -> None:
    """10 items of 3 environments hold at most 4 successive steps of one."""
    worlds = Worlds(lengths=(90, 90))
    rb = ReplayBuffer(10, sampler=SliceSampler(slice_len=5), num_envs=3)
    with pytest.raises(Unsatisfiable, match=r"slices of 5 steps.*among 4 items.*num_envs=3"):
        rb.extend(batch([worlds.step(env) for env in range(3)]))
    assert rb.write_count == 0
    rb = ReplayBuffer(10, sampler=SliceSampler(slice_len=4), num_envs=3)
    found = False
    for _ in range(9):
        rb.extend(batch([worlds.step(env) for env in range(3)]))
        found = found or rb.can_sample(4)
    assert found
    ids = ReplayBuffer(10, sampler=SliceSampler(slice_len=5), num_envs=3)
    ids.extend(batch([worlds.step(env) for env in range(3)], ids="episode_id step"))


def test_a_longer_slice_is_refused_by_the_call_that_asks_for_it() -> None:
    rb = filled([10], SliceSampler(num_slices=2), capacity=10)
    asks: list[Any] = [partial(rb.sample, 40, wait=True), partial(rb.wait_until_sampleable, 40)]
    for ask in asks:
        with pytest.raises(Unsatisfiable, match="slices of 20 steps"):
            ask()
    assert not rb.can_sample(40)
    assert "slices of 20 steps" in rb.explain(n=40)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("make", [lambda s: s, lambda s: NStep(2, 0.9, base=s)], ids=["slices", "n-step around slices"])
@pytest.mark.parametrize(("how", "bad"), [({"slice_len": 5}, 12), ({"num_slices": 5}, 12), ({"num_slices": 5}, 4)])
def test_a_batch_that_cannot_be_cut_is_refused_and_explained(
    make: Any, how: dict[str, Any], bad: int, prefetch: int
) -> None:
    with pytest.raises(InvalidArgument, match=f"{bad} items cannot be cut"):
        ReplayBuffer(100, sampler=make(SliceSampler(**how)), batch_size=bad)
    empty = ReplayBuffer(100, sampler=make(SliceSampler(**how)), prefetch=prefetch)
    full = filled([30, 30], make(SliceSampler(**how)), prefetch=prefetch)
    full.sample(10)
    for rb in (empty, full):
        asks: list[Any] = [
            partial(rb.sample, bad),
            partial(rb.sample, bad, wait=True),  # before it waits
            partial(rb.wait_until_sampleable, bad),
        ]
        for ask in asks:
            with pytest.raises(InvalidArgument, match=f"{bad} items cannot be cut"):
                ask()
        assert not rb.can_sample(bad)
        assert f"{bad} items cannot be cut" in rb.explain(n=bad)
    assert full.stats()["consumer_blocks"] == 0
    assert full.sample(10).shape == (10,)


def test_short_episodes_are_sampled_whole_and_padded() -> None:
    """Episodes of 2, 5 and 3: slices of 4 begin at steps 0 and 1 of the second, and at the first of the others."""
    rb = filled([2, 5, 3], SliceSampler(slice_len=4, short="pad"))
    sampled = rb.sample(4 * 4000)
    numbers, mask = sampled["generation"].view(-1, 4), sampled["mask"].view(-1, 4)
    found = {tuple(n[m].tolist()) for n, m in zip(numbers, mask, strict=True)}
    assert found == {(0, 1), (2, 3, 4, 5), (3, 4, 5, 6), (7, 8, 9)}
    assert (numbers[~mask] == -1).all()
    counts = torch.bincount(numbers[:, 0], minlength=10)
    assert counts.nonzero()[:, 0].tolist() == [0, 2, 3, 7]
    assert float(((counts[[0, 2, 3, 7]] - 1000.0) ** 2 / 1000).sum()) < 16.3  # p = 0.001, 3 degrees of freedom
    place = sampled["next", "observation", "achieved_goal"].view(-1, 4)
    last = mask.sum(1) - 1
    assert (place[~mask] == place[torch.arange(4000), last][:, None].expand(-1, 4)[~mask]).all()


def test_a_stub_that_eviction_left_is_padded_too() -> None:
    worlds = Worlds(seed=3, lengths=(1, 8))
    rb = ReplayBuffer(13, sampler=SliceSampler(slice_len=5, short="pad"), num_envs=2, seed=0)
    for _ in range(30):
        rb.extend(batch(worlds.written([worlds.step(env) for env in range(2)])))
        live = set(range(len(worlds.steps) - len(rb), len(worlds.steps)))
        sampled = rb.sample(40)
        for numbers, mask in zip(sampled["generation"].view(-1, 5), sampled["mask"].view(-1, 5), strict=True):
            part = numbers[mask].tolist()
            assert part == worlds.window(part[0], 5, live)
            assert len(part) == 5 or worlds.steps[part[0]].step == 0 or worlds.steps[part[0]].after not in live


def test_padding_is_no_item() -> None:
    rb = filled([2, 5, 3], SliceSampler(slice_len=4, short="pad", base=PrioritizedSampler()))
    sampled = rb.sample(80)
    assert rb.update_priority(sampled, 2.0) == int(sampled["mask"].sum())
    assert rb.stats()["stale_updates"] == 80 - int(sampled["mask"].sum())
    other = ReplayBuffer(100)
    with pytest.raises(InvalidArgument, match="padding"):
        other.extend(sampled)
    assert other.write_count == 0
    other.extend(sampled[sampled["mask"]])
    assert other.schema == rb.schema
    with pytest.raises(InvalidArgument, match="padding"):
        ReplayBuffer(9, sampler=SliceSampler(slice_len=2, short="pad"), consume_after_n_samples=1)
    schema = ReplayBuffer(9)
    schema.extend({"mask": torch.zeros(2), "next": {"done": torch.zeros(2, 1) > 0}})
    with pytest.raises(SchemaMismatch, match="mask"):
        ReplayBuffer(9, sampler=SliceSampler(slice_len=2, short="pad"), schema=schema.schema)


@pytest.mark.parametrize("stratified", [True, False])
@pytest.mark.parametrize("few", [False, True], ids=["many places", "few places"])
@pytest.mark.parametrize("short", ["skip", "pad"])
def test_first_steps_are_drawn_by_their_priorities(short: str, few: bool, stratified: bool) -> None:
    """In proportion among the places where a slice can begin, also where nearly all of the mass is elsewhere."""
    lengths = [3, 6, 5, 4]
    base = PrioritizedSampler(alpha=0.5, beta=0.75, eps=0.0, stratified=stratified)
    rb = filled(lengths, SliceSampler(slice_len=4, short=short, base=base))
    priority = torch.tensor([float(1 + n % 5) for n in range(18)])
    able = [3, 4, 5, 9, 10, 14] + ([0] if short == "pad" else [])
    if few:
        priority[[n for n in range(18) if n not in able]] = 1e6
    rb.update_priority(torch.arange(18), priority)
    size = 250
    sampled = [rb.sample(4 * size) for _ in range(40)]
    firsts = torch.cat([s["generation"].view(-1, 4)[:, 0] for s in sampled])
    counts = torch.bincount(firsts, minlength=18).double()
    leaves = priority.double() ** 0.5
    expected = torch.zeros(18, dtype=torch.float64)
    expected[able] = leaves[able] / leaves[able].sum() * 40 * size
    assert counts[expected == 0].sum() == 0
    assert float(((counts - expected)[able] ** 2 / expected[able]).sum()) < 24.4  # p < 0.001, 6 degrees of freedom
    weights = torch.cat([s["priority_weight"].view(-1, 4) for s in sampled])
    wanted = (leaves.min() / leaves[firsts]) ** 0.75
    torch.testing.assert_close(weights, wanted[:, None].expand(-1, 4).float(), rtol=1e-5, atol=0)


def test_slices_whose_first_steps_have_no_priority_are_not_there() -> None:
    rb = filled([5, 5], SliceSampler(slice_len=4, base=PrioritizedSampler(eps=0.0)))
    rb.update_priority(torch.arange(10), torch.zeros(10))
    assert not rb.can_sample(4)
    rb.update_priority(torch.tensor([9]), 1.0)  # the last step of an episode
    with pytest.raises(NotReady, match="0 slices of 4 steps"):
        rb.sample(4)
    rb.update_priority(torch.tensor([6]), 1.0)
    assert rb.sample(8)["generation"].tolist() == [6, 7, 8, 9] * 2


def test_prioritized_slices_that_are_consumed_share_no_item() -> None:
    rb = filled([8, 8, 8], SliceSampler(slice_len=4, base=PrioritizedSampler()), consume_after_n_samples=1)
    seen: list[int] = []
    while rb.can_sample(8):
        parts = rb.sample(8)["generation"].view(2, 4)
        assert (parts - parts[:, :1] == torch.arange(4)).all()
        seen += parts.reshape(-1).tolist()
    assert len(set(seen)) == len(seen) >= 8


def test_a_handle_and_a_path_bring_the_same_slices() -> None:
    sampler = SliceSampler(slice_len=4, short="pad", base=PrioritizedSampler(), episode_key="episode_id")
    with ReplayBuffer(50, sampler=sampler, num_envs=2, shared=True, seed=0) as rb:
        rb.extend(batch([Worlds(lengths=(6, 6)).step(0) for _ in range(6)], ids="episode_id step"))
        for attached in (ReplayBuffer.attach(rb.handle()), ReplayBuffer.attach(rb.handle().path)):
            assert repr(attached.sampler) == repr(rb.sampler)
            assert attached._local.rules.num_envs == 2
            assert attached.sample(8)["mask"].shape == (8,)
            attached.close()
