"""Samplers around samplers: each pair gives what plain Python gives, or is refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from episode_model import Worlds, batch

from millpond import ReplayBuffer
from millpond.core.errors import InvalidArgument, SchemaMismatch
from millpond.replay import (
    ConsumingSampler,
    HindsightSampler,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
)
from millpond.replay.samplers.episodes import STRATEGIES

GAMMA, N, SLICE = 0.5, 3, 4
BASES: dict[str, Callable[[], Any]] = {
    "random": RandomSampler,
    "epochs": SamplerWithoutReplacement,
    "fifo": lambda: ConsumingSampler(2),
    "prioritized": PrioritizedSampler,
    "slices": lambda: SliceSampler(slice_len=SLICE),
    "prioritized slices": lambda: SliceSampler(slice_len=SLICE, base=PrioritizedSampler()),
    "padded slices": lambda: SliceSampler(slice_len=SLICE, short="pad"),
}


def reward(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
    return -(achieved - desired).abs() / 8


def reached(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
    return (achieved == desired)[:, 0]


def hindsight(base: Any, **more: Any) -> Any:
    return HindsightSampler(reward, fraction=0.6, base=base, **more)


OUTER: dict[str, Callable[[Any], Any]] = {
    "nstep": lambda base: NStep(N, GAMMA, base=base),
    "hindsight": hindsight,
    "hindsight that ends": lambda base: hindsight(base, terminated=reached),
    "nstep around hindsight": lambda base: NStep(N, GAMMA, base=hindsight(base)),
    "hindsight around nstep": lambda base: hindsight(NStep(N, GAMMA, base=base)),
    "nstep around hindsight that ends": lambda base: NStep(N, GAMMA, base=hindsight(base, terminated=reached)),
    "hindsight that ends around nstep": lambda base: hindsight(NStep(N, GAMMA, base=base), terminated=reached),
}


def expected(worlds: Worlds, item: Any, outer: str, live: set[int], leader: int) -> dict[str, Any]:
    """What an item must hold, by search. ``leader`` is the first step of its slice, or itself."""
    number = int(item["index_number"])
    window = worlds.window(number, N if "nstep" in outer else 1, live)
    steps = [worlds.steps[i] for i in window]
    places = [s.episode * 100 + s.step + 1 for s in steps]
    rewards, goal = [s.reward for s in steps], -1.0
    terminated = steps[-1].terminated
    if "hindsight" in outer and bool(item["relabelled"]):
        goal = item["observation", "desired_goal"].item()
        first = worlds.steps[leader]
        assert (int(goal) - 1) // 100 == first.episode
        assert (int(goal) - 1) % 100 >= first.step
        assert any(s.episode * 100 + s.step + 1 == goal for i, s in enumerate(worlds.steps) if i in live)
        if "ends" in outer and goal in places:
            places = places[: places.index(goal) + 1]
            steps = steps[: len(places)]
        rewards = [-abs(place - goal) / 8 for place in places]
        terminated = places[-1] == goal if "ends" in outer else steps[-1].terminated
    truncated = steps[-1].done and not steps[-1].terminated
    return {
        "goal": goal,
        "reward": sum(GAMMA**j * r for j, r in enumerate(rewards)),
        "steps": len(places),
        "place": places[-1],
        "terminated": terminated,
        "truncated": truncated,
        "done": terminated or truncated,
    }


def check(worlds: Worlds, sampled: Any, base: str, outer: str, live: set[int]) -> None:
    numbers = sampled["generation"].clone()
    length = SLICE if "slices" in base else 1
    if "mask" in sampled.keys():  # noqa: SIM118
        mask = sampled["mask"].view(-1, length)
        assert torch.equal(sampled["generation"] >= 0, sampled["mask"])
        for row, valid in zip(numbers.view(-1, length), mask, strict=True):
            row[~valid] = row[int(valid.sum()) - 1]  # padding repeats the last step
    if length > 1:
        for part in numbers.view(-1, length).tolist():
            window = worlds.window(part[0], length, live)
            assert part == window + [window[-1]] * (length - len(window))
            assert len(window) == length or base == "padded slices"
        if "hindsight" in outer:  # one goal for a slice
            goals = sampled["observation", "desired_goal"].view(-1, length)
            assert (goals == goals[:, :1]).all()
    sampled["index_number"] = numbers
    for i, item in enumerate(sampled):
        want = expected(worlds, item, outer, live, int(numbers[i - i % length]))
        after = item["next"]
        assert item["observation", "desired_goal"].item() == want["goal"]
        assert after["observation", "desired_goal"].item() == want["goal"]
        assert after["observation", "achieved_goal"].item() == want["place"]
        assert after["reward"].item() == pytest.approx(want["reward"], abs=1e-4)
        for key in ("terminated", "truncated", "done"):
            assert after[key].item() == want[key], key
        if "nstep" in outer:
            assert item["steps_to_next_obs"].item() == want["steps"]


def check_priorities(rb: ReplayBuffer, sampled: Any, length: int) -> None:
    """The weights are those of the first steps, by what was in the tree; priorities go to the items."""
    assert set(sampled["priority_weight"].view(-1, length).std(1, correction=0).tolist()) == {0.0}
    assert rb.update_priority(sampled, torch.rand(len(sampled)) + 0.1) == int((sampled["generation"] >= 0).sum())


@pytest.mark.parametrize("base", list(BASES))
@pytest.mark.parametrize("outer", list(OUTER))
def test_each_pair_equals_a_search(outer: str, base: str) -> None:
    """n-step, hindsight and both, in either order, around each sampler: one goal for a window, and for a slice."""
    worlds = Worlds(seed=1, lengths=(2, 9))
    rb = ReplayBuffer(47, sampler=OUTER[outer](BASES[base]()), batch_size=16, seed=3)
    live: set[int] = set()
    delivered: dict[int, int] = {}
    for _ in range(12):
        rows = worlds.written([worlds.step(env) for env in range(2) for _ in range(worlds.rnd.randint(4, 8))])
        rb.extend(batch(rows, ids="episode_id step"))
        live |= set(range(len(worlds.steps) - len(rows), len(worlds.steps)))
        live = set(sorted(live)[-47:])
        if not rb.can_sample():
            continue
        sampled = rb.sample()
        if "prioritized" in base:
            check_priorities(rb, sampled, SLICE if "slices" in base else 1)
        check(worlds, sampled, base, outer, live)
        if base == "fifo":
            for number in sampled["generation"].tolist():
                delivered[number] = delivered.get(number, 0) + 1
            live -= {number for number, times in delivered.items() if times == 2}


@pytest.mark.parametrize("outer", list(OUTER))
@pytest.mark.parametrize("base", ["prioritized", "prioritized slices", "padded slices"])
def test_each_pair_goes_on_where_it_was(outer: str, base: str) -> None:
    """With prefetching, after a checkpoint and after `share`: bit for bit."""

    def buffer() -> ReplayBuffer:
        return ReplayBuffer(47, sampler=OUTER[outer](BASES[base]()), batch_size=8, seed=3, prefetch=2, num_envs=2)

    worlds = Worlds(seed=1, lengths=(5, 9))
    with buffer() as one, buffer() as two:
        for turn in range(8):
            rows = batch(
                worlds.written([worlds.step(env) for _ in range(6) for env in range(2)]), ids="episode_id step"
            )
            one.extend(rows)
            if turn == 3:
                two.load_state_dict(one.state_dict())
            elif turn > 3:
                two.extend(rows)
            if turn == 5:
                one.share()
            first = one.sample()
            if turn >= 3:
                second = two.sample()
                assert (first == second).all()
                if "prioritized" in base:
                    priority = torch.arange(8) + 1.0
                    assert one.update_priority(first, priority) == two.update_priority(second, priority)


def test_pairs_that_mean_nothing_are_refused_in_words() -> None:
    for base in (NStep(2, GAMMA), HindsightSampler(reward), SamplerWithoutReplacement(), ConsumingSampler()):
        with pytest.raises(InvalidArgument, match="first steps of slices.*SliceSampler"):
            SliceSampler(slice_len=2, base=base)
    with pytest.raises(InvalidArgument, match="NStep around another NStep"):
        NStep(2, GAMMA, base=HindsightSampler(reward, base=NStep(3, GAMMA)))
    with pytest.raises(InvalidArgument, match="HindsightSampler around another"):
        HindsightSampler(reward, base=HindsightSampler(reward))
    with pytest.raises(InvalidArgument, match="give it once"):
        NStep(2, GAMMA, episode_key="a", base=HindsightSampler(reward, episode_key="b"))


# ---------------------------------------------------------------------- ends
@pytest.mark.parametrize("keys", ["done terminated truncated", "done terminated", "done truncated", "terminated"])
@pytest.mark.parametrize("outer", ["hindsight that ends", "hindsight that ends around nstep"])
def test_done_is_terminated_or_truncated_in_every_row(outer: str, keys: str) -> None:
    """With whichever of the keys the items have."""
    worlds = Worlds(seed=5, lengths=(2, 6))
    rb = ReplayBuffer(500, sampler=OUTER[outer](None), seed=0)
    items = batch(worlds.written([worlds.step(0) for _ in range(400)]), ids="episode_id step")
    for key in ("done", "terminated", "truncated"):
        if key not in keys:
            del items["next"][key]
    rb.extend(items)
    sampled = rb.sample(1000)
    stored = [worlds.steps[i] for i in sampled["generation"].tolist()]
    goals, places = sampled["observation", "desired_goal"], sampled["next", "observation", "achieved_goal"]
    ends = {s.episode: s for s in worlds.steps if s.done}
    changed = 0
    for i in range(1000):
        here = int(places[i]) - 1
        last = next(s for s in worlds.steps if s.episode == stored[i].episode and s.step == here % 100)
        truncated = last.done and not last.terminated
        terminated = bool(goals[i] == places[i]) if sampled["relabelled"][i] else last.terminated
        changed += terminated != last.terminated
        found = {key: bool(sampled["next", key][i]) for key in keys.split()}
        want = {"terminated": terminated, "truncated": truncated, "done": terminated or truncated}
        assert found == {key: want[key] for key in found}
    assert changed > 100
    assert ends


def test_ends_that_cannot_be_told_apart_are_refused() -> None:
    rb = ReplayBuffer(50, sampler=hindsight(None, terminated=reached))
    for keys in (("done",), ("truncated",)):
        items = batch([Worlds().step(0)], ids="episode_id step")
        for key in {"done", "terminated", "truncated"} - set(keys):
            del items["next"][key]
        with pytest.raises(SchemaMismatch, match="next/terminated"):
            rb.extend(items)
    assert rb.schema is None


# ---------------------------------------------------------------------- goals
@pytest.mark.parametrize("consume", [None, 1])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_goals_are_those_of_the_strategy(strategy: str, consume: int | None) -> None:
    worlds = Worlds(seed=4, lengths=(3, 9))
    sampler = HindsightSampler(reward, strategy=strategy, fraction=1.0)
    rb = ReplayBuffer(40, sampler=sampler, seed=0, consume_after_n_samples=consume)
    live: set[int] = set()
    seen: dict[int, set[int]] = {}
    for turn in range(60):
        rows = worlds.written([worlds.step(env) for env in range(3)])
        rb.extend(batch(rows, ids="episode_id step"))
        live |= set(range(len(worlds.steps) - 3, len(worlds.steps)))
        live = set(sorted(live)[-40:])
        sampled = rb.sample(2 if turn < 59 else 30)
        for item in sampled:
            here = worlds.steps[int(item["generation"])]
            mates = [i for i in live if worlds.steps[i].episode == here.episode]
            allowed = {
                "future": [i for i in mates if worlds.steps[i].step >= here.step],
                "final": [max(mates, key=lambda i: worlds.steps[i].step)],
                "episode": mates,
                "random": list(live),
            }[strategy]
            place = int(item["observation", "desired_goal"].item()) - 1
            goal = next(i for i in live if worlds.steps[i].episode * 100 + worlds.steps[i].step == place)
            assert goal in allowed
            seen.setdefault(int(item["generation"]), set()).add(goal)
        if consume:
            live -= set(sampled["generation"].tolist())
    if strategy == "episode":
        assert any(min(goals) < number for number, goals in seen.items())


def test_every_step_of_an_episode_is_as_likely_a_goal() -> None:
    """Of what is left of it: 6 of 20 steps, after eviction."""
    worlds = Worlds(lengths=(20, 20))
    rb = ReplayBuffer(6, sampler=HindsightSampler(reward, strategy="episode", fraction=1.0), seed=0)
    rb.extend(batch([worlds.step(0) for _ in range(6)], ids="episode_id step"))
    rb.sample(4)
    for _ in range(6):
        rb.extend(batch([worlds.step(0)], ids="episode_id step"))
        rb.sample(4)
    counts = torch.bincount(rb.sample(6000)["observation", "desired_goal"][:, 0].long() - 107, minlength=6)
    assert len(counts) == 6
    assert float(((counts - 1000.0) ** 2 / 1000).sum()) < 20.5  # p = 0.001, 5 degrees of freedom


def test_goals_may_stand_at_keys_of_the_users_choice() -> None:
    worlds = Worlds(lengths=(9, 9))
    rows = worlds.written([worlds.step(0) for _ in range(9)])
    items = batch(rows, ids="episode_id step")
    items["aim"] = items["observation"].pop("desired_goal")
    items["where"] = {"hand": items["observation"].pop("achieved_goal")}
    items["next"]["where"] = {"hand": items["next"]["observation"].pop("achieved_goal")}
    del items["next"]["observation"], items["observation"]
    sampler = HindsightSampler(reward, fraction=1.0, goal=("aim",), achieved=("where", "hand"), strategy="final")
    rb = ReplayBuffer(20, sampler=sampler, seed=0)
    rb.extend(items)
    for item in rb.sample(30):
        assert item["aim"].item() == 109.0
        assert item["next", "reward"].item() == -(109.0 - item["next", "where", "hand"].item()) / 8


def test_names_that_nobody_knows_are_refused_with_the_nearest() -> None:
    with pytest.raises(InvalidArgument, match="did you mean 'future'"):
        HindsightSampler(reward, strategy="futur")
    with pytest.raises(InvalidArgument, match="'skip', 'pad'"):
        SliceSampler(slice_len=2, short="drop")
    rb = ReplayBuffer(20, sampler=HindsightSampler(reward, goal="desired_gaol"))
    with pytest.raises(SchemaMismatch, match="did you mean observation/desired_goal"):
        rb.extend(batch([Worlds().step(0)], ids="episode_id step"))
    rb = ReplayBuffer(20, sampler=NStep(2, GAMMA, episode_key="episode"))
    with pytest.raises(SchemaMismatch, match="did you mean episode_id"):
        rb.extend(batch([Worlds().step(0)], ids="episode_id step"))


def test_a_reward_function_of_the_wrong_shape_is_named() -> None:
    rb = ReplayBuffer(20, sampler=HindsightSampler(lambda a, d: torch.zeros(3), fraction=1.0), seed=0)
    rb.extend(batch([Worlds(lengths=(9, 9)).step(0) for _ in range(9)], ids="episode_id step"))
    with pytest.raises(InvalidArgument, match=r"reward\(achieved, desired\).*5 goals.*\[3\]"):
        rb.sample(5)


# ---------------------------------------------------------------------- items that are sequences
@pytest.mark.parametrize("key", ["done", "terminated", "truncated"])
@pytest.mark.parametrize(
    "make", [lambda: NStep(2, GAMMA), lambda: SliceSampler(slice_len=2), lambda: HindsightSampler(reward)]
)
def test_items_that_are_sequences_are_refused_with_the_reason(make: Any, key: str) -> None:
    """At the first write, or where the schema is given. With other samplers they are sampled as they are."""
    items = {
        "observation": torch.zeros(6, 5, 3),
        "next": {"reward": torch.zeros(6, 5, 1), key: torch.zeros(6, 5, 1) > 0},
    }
    rb = ReplayBuffer(10, sampler=make())
    with pytest.raises(SchemaMismatch, match=rf"next/{key} has shape \[5, 1\].*sequences.*transitions"):
        rb.extend(items)
    assert rb.schema is None
    plain = ReplayBuffer(10)
    plain.extend(items)
    assert plain.schema is not None
    with pytest.raises(SchemaMismatch, match="sequences"):
        ReplayBuffer(10, sampler=make(), schema=plain.schema)
    sampled = plain.sample(4)
    assert sampled.batch_size == torch.Size([4])
    assert sampled["observation"].shape == (4, 5, 3)
    assert sampled["next", "reward"].shape == (4, 5, 1)


def test_ids_that_are_no_whole_numbers_are_refused() -> None:
    items = batch([Worlds().step(0)], ids="episode_id step")
    items["episode_id"] = items["episode_id"].float()
    with pytest.raises(SchemaMismatch, match="whole numbers in episode_id"):
        ReplayBuffer(10, sampler=NStep(2, GAMMA)).extend(items)
