from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from side_by_side import MODES, agree, ours

from millpond.core.errors import InvalidArgument
from millpond.envs import check_env, make, make_batched
from millpond.envs.catalogue import CLASSIC_IDS


def push_along(observation: Any) -> Any:
    """Accelerate the car as it moves: it gains energy, and reaches the flag."""
    return np.where(observation[:, 1] < 0, 0, 2)


def push_along_hard(observation: Any) -> Any:
    return np.where(observation[:, 1:2] < 0, -1, 1).astype(np.float32)


def swing_along(observation: Any) -> Any:
    """Torque against the lower link's velocity, as energy flows through the joint: the end reaches the height."""
    return np.where(observation[:, 5] < 0, 0, 2)


SOLVERS = {"MountainCar-v0": push_along, "MountainCarContinuous-v0": push_along_hard, "Acrobot-v1": swing_along}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("env_id", sorted(CLASSIC_IDS))
def test_random_actions_give_every_bit_of_gymnasiums_own(env_id: str, mode: str) -> None:
    ends = agree(env_id, mode=mode, steps=300, seed=MODES.index(mode), max_episode_steps=70)
    assert ends.truncated >= 10


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("env_id", sorted(SOLVERS))
def test_episodes_that_reach_the_goal_give_every_bit_of_gymnasiums_own(env_id: str, mode: str) -> None:
    ends = agree(env_id, mode=mode, steps=400, seed=11, act=SOLVERS[env_id])
    assert ends.terminated >= 3


def test_the_time_limit_is_gymnasiums() -> None:
    assert agree("Pendulum-v1", steps=450, num_envs=2).truncated == 4


def test_a_long_run_of_many_environments_does_not_drift() -> None:
    """Acrobot is chaotic: one wrong bit would be another episode soon."""
    assert agree("Acrobot-v1", steps=1001, num_envs=8, mode="SameStep").truncated == 16


@pytest.mark.parametrize(
    ("env_id", "kwargs"),
    [("Pendulum-v1", {"g": 1.62}), ("MountainCar-v0", {"goal_velocity": 0.02})],
)
def test_arguments_mean_what_they_mean_in_gymnasium(env_id: str, kwargs: Any) -> None:
    agree(env_id, steps=250, act=SOLVERS.get(env_id), **kwargs)


def test_one_seed_for_each_environment() -> None:
    agree("Pendulum-v1", steps=30, seed=[5, 5, 1], max_episode_steps=9)


@pytest.mark.parametrize("env_id", sorted(CLASSIC_IDS))
def test_the_environment_passes_its_own_check(env_id: str) -> None:
    with contextlib.closing(ours(env_id, 4, "SameStep", max_episode_steps=20)) as env:
        assert check_env(env) == []


@pytest.mark.parametrize("env_id", sorted(CLASSIC_IDS))
def test_a_saved_environment_goes_on_bit_for_bit(env_id: str) -> None:
    with contextlib.closing(ours(env_id, 3, max_episode_steps=5)) as env:
        env.reset(seed=2)
        env.action_space.seed(0)
        actions = [env.action_space.sample() for _ in range(20)]
        for one in actions[:7]:
            env.step(one)
        saved = env.state_dict()
        expected = [env.step(one)[0] for one in actions[7:]]
    with contextlib.closing(ours(env_id, 3, max_episode_steps=5)) as again:
        again.load_state_dict(saved)
        for one, wanted in zip(actions[7:], expected, strict=True):
            np.testing.assert_array_equal(again.step(one)[0], wanted)


def test_cartpole_is_gymnasiums_own_vectorised_one() -> None:
    with contextlib.closing(make("CartPole-v1", num_envs=5)) as env:
        assert isinstance(env, CartPoleVectorEnv)
        assert env.num_envs == 5


@pytest.mark.parametrize("kwargs", [{"render_mode": "rgb_array"}, {"colour": "red"}, {"threads": 2}])
def test_what_only_gymnasiums_own_can_do_is_left_to_it(kwargs: Any) -> None:
    assert make_batched("Pendulum-v1", 2, **kwargs) is None


def test_unknown_ids_have_no_batched_version() -> None:
    assert make_batched("LunarLander-v3", 2) is None


@pytest.mark.parametrize("num_envs", [0, -1, True, 2.0])
def test_the_number_of_environments_is_checked(num_envs: Any) -> None:
    with pytest.raises(InvalidArgument, match="num_envs"):
        make_batched("Pendulum-v1", num_envs)
