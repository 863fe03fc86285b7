from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from episode_worlds import Diary, DictDiary, Reusing, diaries
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from millpond.core.errors import InvalidArgument, InvalidType
from millpond.core.spec import BoxAction, DiscreteAction
from millpond.envs import Stepper, env_spec, leaves, make
from millpond.envs.make import check_portable


def closing(env: Any) -> Any:
    env.close()
    return env


def test_from_an_id() -> None:
    assert closing(make("CartPole-v1", num_envs=3)).num_envs == 3
    pendulum = closing(make("Pendulum-v1", num_envs=2, kwargs={"g": 1.62}))
    assert pendulum.dynamics.rule.g == 1.62
    assert pendulum.metadata["autoreset_mode"] is AutoresetMode.DISABLED


def test_kwargs_go_to_each_environment_also_where_there_is_a_vectorised_version() -> None:
    env = closing(make("CartPole-v1", num_envs=2, kwargs={"max_episode_steps": 7}))
    assert env.envs[1].spec.max_episode_steps == 7


@pytest.mark.parametrize("env_id", ["Nothing-v0", "CartPole-v99", "no_such_module:Env-v0", "Humbug"])
def test_an_unknown_id_is_one_clear_line(env_id: str) -> None:
    with pytest.raises(InvalidArgument, match="cannot make the environment") as problem:
        make(env_id)
    assert "\n" not in str(problem.value)


def test_arguments_that_the_environment_does_not_take() -> None:
    with pytest.raises(InvalidArgument, match="colour"):
        make("Pendulum-v1", kwargs={"colour": "blue"})
    with pytest.raises(InvalidArgument, match="kwargs go with an id"):
        make(Diary, kwargs={"name": 1})


def test_from_an_environment_a_factory_a_vector_environment_and_one_factory_per_worker() -> None:
    assert make(Diary()).num_envs == 1
    assert make(Diary, num_envs=3).num_envs == 3
    vector = diaries(2, "NextStep")
    assert make(vector) is vector
    assert make(vector, num_envs=2) is vector
    assert make(lambda: vector) is vector
    factories = [lambda: Diary(7), lambda: Diary(8)]
    assert make(factories, worker=1).reset()[0][0, 0] == 8


def test_what_is_no_environment_is_refused() -> None:
    with pytest.raises(InvalidType, match="not int"):
        make(3)
    with pytest.raises(InvalidType, match="made a str"):
        make(lambda: "CartPole-v1")
    with pytest.raises(InvalidArgument, match="num_envs=3, but"):
        make(diaries(2, "NextStep"), num_envs=3)
    with pytest.raises(InvalidArgument, match="cannot be 2"):
        make(Diary(), num_envs=2)
    with pytest.raises(InvalidArgument, match="none for worker 2"):
        make([Diary, Diary], worker=2)
    with pytest.raises(InvalidArgument, match="num_envs"):
        make(Diary, num_envs=0)


def test_what_can_go_to_other_processes() -> None:
    check_portable("CartPole-v1", workers=2)
    check_portable(Diary, workers=2)
    check_portable([Diary, "CartPole-v1"], workers=2)
    for env, text in ((Diary(), "exists"), (diaries(1, "NextStep"), "exists"), (3, "not int")):
        with pytest.raises(InvalidType, match=text):
            check_portable(env, workers=1)
    with pytest.raises(InvalidArgument, match="3 factories were given for 2 workers"):
        check_portable([Diary] * 3, workers=2)
    with pytest.raises(InvalidArgument, match="cannot make"):
        check_portable("Humbug-v0", workers=1)


def test_a_seed_decides() -> None:
    """Case seed-1."""
    observations, actions = [], []
    for seed in (5, 5, 6):
        env = make("Pendulum-v1", num_envs=2, seed=seed)
        observations.append(env.reset()[0])
        actions.append(env.action_space.sample())
        env.close()
    assert np.array_equal(observations[0], observations[1])
    assert np.array_equal(actions[0], actions[1])
    assert not np.array_equal(observations[0], observations[2])


def test_final_observations_are_true_also_of_an_environment_that_reuses_its_array() -> None:
    stepper = Stepper(make(lambda: Reusing(0, 3), num_envs=2))
    observation = np.array(stepper.reset(seed=2))
    for _ in range(30):
        step = stepper.step(np.zeros((2, 2), np.float32))
        assert (np.asarray(step.next_observation)[:, 1] == observation[:, 1]).all()
        assert (np.asarray(step.next_observation)[:, 2] == observation[:, 2] + 1).all()
        observation = np.array(stepper.advance())


# --------------------------------------------------------------------------------------------------------- spaces
@pytest.mark.parametrize(
    ("space", "named"),
    [
        (spaces.Text(3), "observation: Text"),
        (spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Dict({"c": spaces.Text(3)})}), "observation/b/c: Text"),
        (spaces.Tuple((spaces.Discrete(2),)), "observation: Tuple"),
        (spaces.Dict({}), "empty"),
    ],
)
def test_spaces_that_cannot_be_stored_are_refused_by_name(space: Any, named: str) -> None:
    """Case type-2."""
    with pytest.raises(InvalidArgument, match=named):
        leaves(space)


def test_spaces_that_can() -> None:
    found = leaves(spaces.MultiBinary([2, 3])), leaves(spaces.MultiDiscrete([3, 4])), leaves(spaces.Discrete(5))
    assert [(x[0].shape, str(x[0].dtype)) for x in found] == [((2, 3), "int8"), ((2,), "int64"), ((), "int64")]


def test_what_networks_must_know() -> None:
    hopper = env_spec(closing(gymnasium.make_vec("Hopper-v5", num_envs=1)))
    assert hopper.observation[0].key == ("observation",)
    assert (hopper.observation_size, hopper.observation[0].dtype) == (11, torch.float32)
    assert hopper.action == BoxAction((-1.0,) * 3, (1.0,) * 3)
    assert env_spec(closing(make("CartPole-v1"))).action == DiscreteAction(2)
    fields = {field.key: (field.shape, field.dtype) for field in env_spec(make(DictDiary)).observation}
    assert fields == {
        ("observation", "id"): ((1,), torch.int64),
        ("observation", "image"): ((2, 3), torch.uint8),
        ("observation", "inner", "vector"): ((3,), torch.float32),
    }


class Odd(Diary):
    action_space: Any = spaces.MultiDiscrete([2, 2])


class Bits(Diary):
    action_space: Any = spaces.MultiBinary(2)


class Whole(Diary):
    action_space: Any = spaces.Box(0, 9, (2,), np.int64)


class Several(Diary):
    action_space: Any = spaces.Dict({"arm": spaces.Box(-1, 1, (2,))})


class Endless(Diary):
    action_space: Any = spaces.Box(-np.inf, np.inf, (2,))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Odd, "MultiDiscrete actions"),
        (Bits, "MultiBinary actions"),
        (Whole, "int64"),
        (Several, "Dict actions"),
        (Endless, "must be finite"),
    ],
)
def test_actions_that_no_network_here_gives_are_refused_by_name(kind: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        env_spec(make(kind))
