"""Slices, n-step returns and hindsight against brute force, on rings that wrap, with several environments."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from waits import Call, until

from millpond import Flow, ReplayBuffer
from millpond.core.errors import InvalidArgument, InvalidType, NotReady, SchemaMismatch
from millpond.replay import (
    ConsumingSampler,
    HindsightSampler,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
)

GAMMA = 0.9


class World:
    """Environments whose every step is known: item n is ``steps[n]``."""

    def __init__(self, envs: int, lengths: tuple[int, int], seed: int) -> None:
        self.rnd = random.Random(seed)
        self.made = 0
        self.envs = [self._episode() for _ in range(envs)]
        self.lengths = lengths
        self.steps: list[dict[str, Any]] = []
        self._lengths = [self.rnd.randint(*lengths) for _ in range(envs)]

    def _episode(self) -> dict[str, int]:
        self.made += 1
        return {"episode": self.made, "step": 0}

    def rollout(self, time: int) -> TensorDict:
        """[envs * time] transitions, one environment after the other, as a collector flattens them."""
        rows = []
        for i, env in enumerate(self.envs):
            for _ in range(time):
                last = env["step"] + 1 >= self._lengths[i]
                cut = last and self.rnd.random() < 0.5
                rows.append({**env, "done": last, "truncated": cut, "terminated": last and not cut})
                rows[-1]["reward"] = self.rnd.uniform(-1, 1)
                env["step"] += 1
                if last:
                    env.update(self._episode())
                    self._lengths[i] = self.rnd.randint(*self.lengths)
        self.steps += rows
        return self.batch(rows)

    def batch(self, rows: list[dict[str, Any]]) -> TensorDict:
        def column(name: str, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor([row[name] for row in rows], dtype=dtype)[:, None]

        place = column("episode", torch.float32) * 1000 + column("step", torch.float32)
        return TensorDict(
            {
                "observation": {
                    "place": place,
                    "achieved_goal": place,
                    "desired_goal": torch.full_like(place, -1.0),
                },
                "episode_id": column("episode", torch.int64),
                "step": column("step", torch.int64),
                "next": {
                    "observation": {
                        "place": place + 1,
                        "achieved_goal": place + 1,
                        "desired_goal": torch.full_like(place, -1.0),
                    },
                    "reward": column("reward", torch.float32),
                    "done": column("done", torch.bool),
                    "terminated": column("terminated", torch.bool),
                    "truncated": column("truncated", torch.bool),
                },
            },
            [len(rows)],
        )

    def window(self, number: int, n: int, oldest: int) -> list[int]:
        """Brute force: the numbers of up to n successive steps of one episode from ``number`` on that are live."""
        found = [number]
        while len(found) < n and not self.steps[found[-1]]["done"]:
            here = self.steps[found[-1]]
            following = [
                i
                for i in range(oldest, len(self.steps))
                if self.steps[i]["episode"] == here["episode"] and self.steps[i]["step"] == here["step"] + 1
            ]
            if not following:
                break
            found.append(following[0])
        return found


BASES: dict[str, Any] = {
    "random": RandomSampler,
    "prioritized": PrioritizedSampler,
    "epochs": SamplerWithoutReplacement,
}


@pytest.mark.parametrize("base", list(BASES))
@pytest.mark.parametrize("envs", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_nstep_equals_brute_force(n: int, envs: int, base: str) -> None:
    """ring-1, ring-2, ring-3, ring-5: exponents are the steps really used; windows end with episode and data."""
    for seed in range(3):
        world = World(envs, (1, 7), seed)
        rb = ReplayBuffer(17, sampler=NStep(n, GAMMA, base=BASES[base]()), seed=seed, batch_size=16)
        for _ in range(12):
            rb.extend(world.rollout(world.rnd.randint(1, 5)))
            if len(rb) < 16:
                continue
            oldest = rb.write_count - len(rb)
            for item in rb.sample():
                window = world.window(int(item["generation"]), n, oldest)
                last = world.steps[window[-1]]
                rewards = [world.steps[i]["reward"] for i in window]
                expected = sum(GAMMA**j * r for j, r in enumerate(rewards))
                assert item["next", "reward"].item() == pytest.approx(expected, abs=1e-5)
                assert item["steps_to_next_obs"].item() == len(window)
                assert item["next", "observation", "place"].item() == last["episode"] * 1000 + last["step"] + 1
                assert item["next", "terminated"].item() == last["terminated"]
                assert item["next", "done"].item() == last["done"]


def test_nstep_of_one_is_the_stored_reward_bit_for_bit() -> None:
    world = World(2, (1, 9), 0)
    rb = ReplayBuffer(50, sampler=NStep(1, 0.99), seed=0)
    rb.extend(world.rollout(20))
    batch = rb.sample(64)
    rewards = torch.tensor([world.steps[i]["reward"] for i in batch["generation"].tolist()])
    assert torch.equal(batch["next", "reward"][:, 0], rewards)


@pytest.mark.parametrize("length", [1, 3, 6])
@pytest.mark.parametrize("envs", [1, 3])
def test_slices_are_successive_steps_of_one_episode(length: int, envs: int) -> None:
    """ring-2, ring-4: no slice crosses the write cursor or an episode end; stubs are not sampled."""
    for seed in range(4):
        world = World(envs, (1, 12), seed)
        rb = ReplayBuffer(23, sampler=SliceSampler(slice_len=length), seed=seed)
        for _ in range(12):
            rb.extend(world.rollout(world.rnd.randint(1, 5)))
            oldest = rb.write_count - len(rb)
            possible = [i for i in range(oldest, rb.write_count) if len(world.window(i, length, oldest)) == length]
            assert rb.can_sample(4 * length) == bool(possible)
            if not possible:
                with pytest.raises(NotReady, match=f"0 slices of {length}"):
                    rb.sample(4 * length)
                continue
            for part in rb.sample(4 * length)["generation"].view(4, length).tolist():
                assert part[0] in possible
                assert part == world.window(part[0], length, oldest)


def test_every_place_where_a_slice_can_begin_is_as_likely() -> None:
    world = World(1, (5, 9), 3)
    rb = ReplayBuffer(40, sampler=SliceSampler(num_slices=100), seed=0)
    rb.extend(world.rollout(40))
    starts = torch.cat([rb.sample(400)["generation"].view(100, 4)[:, 0] for _ in range(60)])
    possible = [i for i in range(40) if len(world.window(i, 4, 0)) == 4]
    counts = torch.bincount(starts, minlength=40)[possible].numpy()
    assert counts.sum() == len(starts)
    expected = len(starts) / len(possible)
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < len(possible) + 4 * (2 * len(possible)) ** 0.5


def test_a_first_episode_longer_than_the_first_rollout_waits() -> None:
    """ring-7: 104 steps, rollouts of 100."""
    world = World(1, (104, 104), 0)
    rb = ReplayBuffer(1000, sampler=SliceSampler(slice_len=104), batch_size=104, seed=0)
    rb.extend(world.rollout(100))
    waiting = Call(lambda: rb.sample(wait=True, timeout=30))
    until(lambda: rb.stats()["waiting_consumers"] == 1)
    rb.extend(world.rollout(100))
    assert waiting.result()["step"][:, 0].tolist() == list(range(104))


def test_slices_that_are_consumed_share_no_item() -> None:
    world = World(2, (10, 10), 0)
    rb = ReplayBuffer(40, sampler=SliceSampler(slice_len=5), consume_after_n_samples=1, seed=0)
    rb.extend(world.rollout(20))
    seen: list[int] = []
    while rb.can_sample(5):
        part = rb.sample(5)["generation"].tolist()
        assert part == world.window(part[0], 5, 0)
        seen += part
    assert len(set(seen)) == len(seen)
    with pytest.raises(InvalidArgument, match="stubs"):
        ReplayBuffer(40, sampler=SliceSampler(slice_len=5), consume_after_n_samples=1, flow=Flow(admission="block"))


def test_without_episode_ids_the_order_of_writing_is_the_episode() -> None:
    done = torch.tensor([0, 0, 0, 1, 0, 0, 0, 0, 0, 1], dtype=torch.bool)[:, None]
    rb = ReplayBuffer(10, sampler=SliceSampler(slice_len=4), seed=0, num_envs=1)
    for a, b in ((0, 3), (3, 7), (7, 10)):
        rb.extend({"x": torch.arange(a, b), "next": {"done": done[a:b]}})
    starts = set(rb.sample(400)["x"].view(100, 4)[:, 0].tolist())
    assert starts == {0, 4, 5, 6}


def reward(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
    return -(achieved - desired).abs()


@pytest.mark.parametrize("base", list(BASES))
def test_goals_come_from_a_later_step_of_the_same_episode(base: str) -> None:
    """ring-6: capacity 15, episodes of 10 and 20."""
    for seed in range(4):
        world = World(1, (10, 20), seed)
        rb = ReplayBuffer(15, sampler=HindsightSampler(reward, base=BASES[base]()), seed=seed)
        for _ in range(8):
            rb.extend(world.rollout(7))
            for item in rb.sample(6):
                here = int(item["episode_id"]) * 1000 + int(item["step"])
                goal = item["observation", "desired_goal"].item()
                assert item["next", "observation", "desired_goal"].item() == goal
                if not item["relabelled"]:
                    assert goal == -1
                    continue
                assert int(goal) // 1000 == int(item["episode_id"]) or int(goal) % 1000 == 0
                assert goal >= here + 1
                assert item["next", "reward"].item() == pytest.approx(here + 1 - goal)


def test_hindsight_relabels_the_share_that_was_asked_for() -> None:
    world = World(1, (20, 20), 0)
    rb = ReplayBuffer(1000, sampler=HindsightSampler(reward, fraction=0.8), seed=0)
    rb.extend(world.rollout(1000))
    share = torch.cat([rb.sample(500)["relabelled"] for _ in range(20)]).float().mean().item()
    assert share == pytest.approx(0.8, abs=0.02)


def around() -> Iterator[Any]:
    for name, make in BASES.items():
        for outer in ("nstep", "hindsight", "both"):
            for consume in (None, 2):
                yield pytest.param(make, outer, consume, id=f"{outer} around {name}, consume {consume}")
    yield pytest.param(lambda: ConsumingSampler(2), "nstep", None, id="nstep around fifo")


@pytest.mark.parametrize(("make", "outer", "consume"), list(around()))
@pytest.mark.parametrize("shared", [False, True], ids=["private", "shared"])
def test_any_combination_works(make: Any, outer: str, consume: int | None, shared: bool) -> None:
    """With prefetch, consumption, sharing and a ratio, all at once; and goes on after a checkpoint bit for bit."""

    def buffer() -> ReplayBuffer:
        sampler = make()
        if outer in ("hindsight", "both"):
            sampler = HindsightSampler(reward, base=sampler)
        if outer in ("nstep", "both"):
            sampler = NStep(3, GAMMA, base=sampler)
        flow = Flow(min_size=4, samples_per_insert=3.0)
        return ReplayBuffer(
            29, sampler=sampler, prefetch=1, consume_after_n_samples=consume, flow=flow, shared=shared, seed=1
        )

    with buffer() as rb, buffer() as other:
        world = World(2, (2, 9), 5)
        for i in range(14):
            if i == 7:
                other.load_state_dict(rb.state_dict())
            rollout, batches = world.rollout(3), []
            for one in (rb, other)[: 1 + (i >= 7)]:
                one.extend(rollout)
                if one.can_sample(5):
                    batches.append(one.sample(5))
            assert len(batches) in (0, 1 + (i >= 7))
            assert all((batch == batches[0]).all() for batch in batches)
        assert rb.stats() == other.stats()
        assert rb.stats()["sample_calls"] > 5


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: SliceSampler(), InvalidArgument),
        (lambda: SliceSampler(slice_len=2, num_slices=2), InvalidArgument),
        (lambda: SliceSampler(slice_len=0), InvalidArgument),
        (lambda: SliceSampler(slice_len=1.5), InvalidType),
        (lambda: NStep(0, 0.9), InvalidArgument),
        (lambda: NStep(2, 1.1), InvalidArgument),
        (lambda: NStep(2, 0.9, base=RandomSampler), InvalidType),
        (lambda: NStep(2, float("nan")), InvalidArgument),
        (lambda: HindsightSampler(None), InvalidType),
        (lambda: HindsightSampler(reward, fraction=2), InvalidArgument),
    ],
)
def test_arguments_that_mean_nothing_are_refused(make: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        make()


def test_items_without_what_a_sampler_needs_are_refused_before_anything_is_written() -> None:
    for sampler in (SliceSampler(slice_len=2), NStep(2, 0.9), HindsightSampler(reward)):
        rb = ReplayBuffer(10, sampler=sampler)
        with pytest.raises(SchemaMismatch, match="next/"):
            rb.extend({"observation": torch.zeros(3, 1)})
        assert rb.schema is None
    rb = ReplayBuffer(10, sampler=SliceSampler(slice_len=4), num_envs=1)
    rb.extend({"x": torch.zeros(8), "next": {"done": torch.zeros(8, 1, dtype=torch.bool)}})
    with pytest.raises(InvalidArgument, match="cannot be cut"):
        rb.sample(6)


def test_an_episode_that_never_ends_keeps_memory_bounded() -> None:
    rb = ReplayBuffer(16, sampler=SliceSampler(slice_len=4), seed=0, num_envs=1)
    item = {"x": torch.zeros(8), "next": {"done": torch.zeros(8, 1, dtype=torch.bool)}}
    for _ in range(600):
        rb.extend(item)
        assert np.all(np.diff(rb.sample(8)["generation"].view(2, 4).numpy(), axis=1) == 1)
    index = rb.sampler.episodes._index  # type: ignore[attr-defined]
    assert len(index._places._table) + len(index._spans) < 4096
