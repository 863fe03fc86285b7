"""Exploration schedules follow the frames that all workers together have collected, whether or not anybody learns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from picky_worlds import Picky

from millpond.algos.dqn import DQN, DQNConfig
from millpond.collect import Collector, MultiCollector, RayCollector
from millpond.core.spec import DiscreteAction, EnvSpec
from millpond.envs.normalize import NormalizedPolicy, Normalizer
from millpond.replay import ReplayBuffer
from millpond.weights import WeightBoard

MANY = 1000  # choices: an action at random is hardly ever the greedy one
ANNEAL, TOTAL = 500, 900


def world() -> Picky:
    return Picky(action=spaces.Discrete(MANY))


def dqn() -> DQN:
    config = DQNConfig(hidden=(8,), epsilon_start=1.0, epsilon_end=0.0, epsilon_frames=ANNEAL)
    return DQN(EnvSpec.vector(3, action=DiscreteAction(MANY)), config, seed=0)


def at_random(algorithm: DQN, batch: Any) -> Any:
    """Which rows have another action than the greedy one, in the order of ``batch``."""
    greedy = algorithm.evaluation_policy()(batch.select("observation").clone())["action"]
    return (batch["action"] != greedy).numpy()


def check(random: Any, *, slack: int, ordered: bool = True) -> None:
    """ε falls from 1 to 0 over 500 frames. ``slack``: how far a row's place may be from its frame's number; without
    ``ordered`` nobody knows."""
    assert 190 < random.sum() < 310  # 250 are expected, give or take 9
    if not ordered:
        return
    assert not random[ANNEAL + slack :].any()
    assert abs(random[:100].mean() - 0.9) < 0.1 + slack / ANNEAL
    assert abs(random[:ANNEAL].mean() - 0.5) < 0.12 + slack / ANNEAL


@pytest.fixture
def replay() -> Iterator[ReplayBuffer]:
    made = ReplayBuffer(TOTAL)
    yield made
    made.close()


@pytest.mark.parametrize("board", [False, True])
def test_a_collector_needs_no_learner_for_its_schedule(board: bool) -> None:
    """The board holds weights of frame 0; what is pulled must not take the schedule back."""
    algorithm = dqn()
    weights = WeightBoard(dqn().published) if board else None
    with Collector(
        world, algorithm.policy, frames_per_batch=30, num_envs=3, total_frames=TOTAL, weights=weights, seed=0
    ) as collector:
        batch = torch.cat(list(collector))  # type: ignore[arg-type]
    if weights is not None:
        weights.close()
    check(at_random(algorithm, batch), slack=3)


def test_a_policy_on_normalised_observations_follows_too() -> None:
    algorithm = dqn()
    policy = NormalizedPolicy(algorithm.policy, Normalizer(3))
    with Collector(world, policy, frames_per_batch=30, num_envs=3, total_frames=TOTAL, seed=0) as collector:
        batch = torch.cat(list(collector))  # type: ignore[arg-type]
    check(at_random(algorithm, batch), slack=3)


def test_a_resumed_collector_goes_on_in_the_schedule() -> None:
    algorithm = dqn()
    with Collector(world, algorithm.policy, frames_per_batch=30, total_frames=TOTAL, seed=0) as first:
        for _ in range(15):  # 450 frames: ε is 0.1
            next(first)
        state = first.state_dict()
    again = dqn()
    with Collector(world, again.policy, frames_per_batch=30, total_frames=TOTAL, seed=0) as second:
        second.load_state_dict(state)
        batch = torch.cat(list(second))  # type: ignore[arg-type]
    random = at_random(again, batch)
    assert random[:50].sum() <= 12  # 2.5 are expected; from the beginning it would be more than 40
    assert not random[50:].any()


@pytest.mark.parametrize("sync", [False, True])
def test_the_frames_of_all_workers_count(replay: ReplayBuffer, sync: bool) -> None:
    algorithm = dqn()
    with (
        WeightBoard(algorithm.published) as board,
        MultiCollector(
            world,
            algorithm.policy,
            num_workers=2,
            frames_per_batch=20,
            total_frames=TOTAL,
            replay=replay,
            weights=board,
            sync=sync,
            seed=0,
        ) as collector,
    ):
        for _ in collector:
            pass
    check(at_random(algorithm, replay[:]), slack=60, ordered=sync)


@pytest.mark.parametrize("sync", [False, True])
def test_the_frames_of_all_actors_count(cluster: Any, replay: ReplayBuffer, sync: bool) -> None:
    algorithm = dqn()
    with (
        WeightBoard(algorithm.published) as board,
        RayCollector(
            world,
            algorithm.policy,
            num_workers=2,
            frames_per_batch=20,
            total_frames=TOTAL,
            replay=replay,
            weights=board,
            sync=sync,
            seed=0,
        ) as collector,
    ):
        for _ in collector:
            pass
    check(at_random(algorithm, replay[:]), slack=60, ordered=sync)


def test_random_frames_come_before_the_schedule_matters() -> None:
    algorithm = dqn()
    with Collector(
        world, algorithm.policy, frames_per_batch=100, total_frames=700, random_frames=600, seed=0
    ) as collector:
        batch = torch.cat(list(collector))  # type: ignore[arg-type]
    random = at_random(algorithm, batch)
    assert np.flatnonzero(random).max() < 600
    assert random[:600].mean() > 0.98
