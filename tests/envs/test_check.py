from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from episode_worlds import MODES, Diary, DictDiary, Reusing, diaries
from gymnasium import spaces

from millpond.envs import check_env, declare


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", Diary, DictDiary, lambda: diaries(2, "SameStep")])
def test_nothing_is_wrong_with_good_environments(env: Any) -> None:
    assert check_env(env) == []


@pytest.mark.parametrize("mode", MODES)
def test_a_vector_environment_that_exists_stays_open(mode: str) -> None:
    env = diaries(2, mode)
    assert check_env(env) == []
    assert not env.closed


class Naughty(Diary):
    """Wrong in the way that its name says."""

    wrong = ""

    def reset(self, **options: Any) -> Any:
        observation, info = super().reset(**options)
        return (observation + np.float32(np.random.rand()), info) if self.wrong == "seed" else (observation, info)

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        if self.wrong == "nan" and self.at == 2:
            observation[1] = np.nan
        if self.wrong == "reward":
            reward = np.inf
        if self.wrong == "raises":
            raise ZeroDivisionError("the sheep fell over")
        return observation, reward, terminated, truncated, info


def naughty(how: str) -> Any:
    return type("Naughty", (Naughty,), {"wrong": how})


class Unbounded(Diary):
    action_space: Any = spaces.Box(-np.inf, np.inf, (2,), np.float32)


class Talking(Diary):
    observation_space: Any = spaces.Dict({"words": spaces.Text(10)})


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ("Humbug-v0", "cannot make the environment"),
        (naughty("seed"), "twice gave two different observations"),
        (naughty("nan"), r"observation: step\(\) returned NaN"),
        (naughty("reward"), "reward: NaN or infinity"),
        (naughty("raises"), "ZeroDivisionError: the sheep fell over"),
        (Unbounded, "bounds are infinite"),
        (Talking, "observation/words: Text spaces are not supported"),
    ],
)
def test_what_is_wrong_is_said_in_words(env: Any, text: str) -> None:
    problems = check_env(env)
    assert any(__import__("re").search(text, problem) for problem in problems), problems


def test_vector_environments_that_lie_about_how_they_reset() -> None:
    lying = declare(diaries(2, "SameStep"), autoreset_mode="NextStep")
    assert "declares NextStep" in check_env(lying)[0]
    undeclared: Any = diaries(2, "SameStep")
    undeclared.metadata = {}
    assert "does not say how it starts new episodes" in check_env(undeclared)[0]
    wrong_final = diaries(2, "SameStep", kind=Reusing)
    assert "the final observation equals the first one" in check_env(wrong_final)[0]
    silent = declare(diaries(2, "NextStep"), autoreset_mode="SameStep")
    assert "no final observation" in check_env(silent)[0]


def test_a_masked_reset_that_resets_others_too() -> None:
    env: Any = diaries(2, "Disabled")
    real = env.reset
    env.reset = lambda *, seed=None, options=None: real(seed=seed)
    assert "outside the mask" in check_env(env)[0]


def test_a_reward_of_the_wrong_shape() -> None:
    env: Any = diaries(2, "Disabled")
    real = env.step

    def step(actions: Any) -> Any:
        observation, reward, *others = real(actions)
        return observation, reward[:, None], *others

    env.step = step
    assert "reward: shape (2, 1)" in check_env(env)[0]
