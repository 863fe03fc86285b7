from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from episode_worlds import MODES, Diary, DictDiary, diaries
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from hypothesis import given
from hypothesis import strategies as st

from millpond.core.errors import InvalidArgument
from millpond.envs import Stepper, declare

Row = tuple[Any, ...]


def act(observation: Any) -> Any:
    """An action that depends on the observation alone."""
    return np.sin(observation[:, 1:3] + observation[:, :1]).astype(np.float32)


def transitions(stepper: Stepper, *, rows: int, seed: int) -> dict[int, list[Row]]:
    """The first ``rows`` transitions of each environment, as a collector would store them."""
    found: dict[int, list[Row]] = {i: [] for i in range(stepper.num_envs)}
    observation = stepper.reset(seed=seed)
    while min(map(len, found.values())) < rows:
        before, action = np.array(observation), act(observation)
        step = stepper.step(action)
        for i in range(stepper.num_envs):
            if step.stored is None or step.stored[i]:
                after = tuple(np.asarray(step.next_observation)[i].tolist())
                end = bool(step.terminated[i]), bool(step.truncated[i])
                found[i].append((*before[i].tolist(), *action[i].tolist(), *after, float(step.reward[i]), *end))
        observation = stepper.advance()
    return {i: done[:rows] for i, done in found.items()}


@given(seed=st.integers(0, 2**31 - 1), longest=st.integers(1, 6), n=st.integers(1, 3))
def test_all_three_modes_give_the_same_transitions(seed: int, longest: int, n: int) -> None:
    """Cases end-2, end-3, end-4, end-7."""
    found = [transitions(Stepper(diaries(n, mode, longest=longest)), rows=12, seed=seed) for mode in MODES]
    assert found[0] == found[1] == found[2]
    for rows in found[0].values():
        for _name, episode, at, *_, next_episode, next_at, _, reward, _, _ in rows:
            assert (next_episode, next_at) == (episode, at + 1)  # the final observation is the true one
            assert reward == 100 * episode + at + 1  # the last step's reward too


@pytest.mark.leaks(reason="multiprocessing keeps the arena of AsyncVectorEnv's shared arrays for the next one")
def test_environments_in_processes_of_their_own() -> None:
    """AsyncVectorEnv shares one array among its processes: nothing may be read too late."""
    expected = transitions(Stepper(diaries(2, "Disabled")), rows=10, seed=3)
    for mode in MODES:
        env = AsyncVectorEnv([lambda: Diary(0), lambda: Diary(1)], autoreset_mode=mode)
        try:
            assert transitions(Stepper(env), rows=10, seed=3) == expected
        finally:
            env.close()


def test_next_step_reset_rows_are_no_transitions() -> None:
    """Case end-2: frames = environment steps − reset rows, and nobody else loses a row."""
    stepper = Stepper(diaries(2, "NextStep", longest=4))
    stepper.reset(seed=0)
    resets = steps = 0
    ended = np.zeros(2, bool)
    for _ in range(50):
        step = stepper.step(np.zeros((2, 2), np.float32))
        stepper.advance()
        steps += 2
        stored = np.ones(2, bool) if step.stored is None else step.stored
        assert (stored == ~ended).all()
        resets += int((~stored).sum())
        ended = np.zeros(2, bool) if step.ended is None else step.ended
    assert resets > 10
    assert steps - resets == 100 - resets


def test_gymnasiums_own_vectorised_cartpole() -> None:
    """Its reset rows look like steps but for the reward; none of them may pass for one."""
    env = gymnasium.make_vec("CartPole-v1", num_envs=5)
    stepper = Stepper(env)
    observation = stepper.reset(seed=1)
    rng = np.random.default_rng(0)
    for _ in range(200):
        before = np.array(observation)
        step = stepper.step(rng.integers(0, 2, 5))
        stored = np.ones(5, bool) if step.stored is None else step.stored
        moved = np.abs(step.next_observation - before)
        assert (moved[stored, 0] <= 0.021 * np.abs(before[stored, 1]) + 1e-4).all()  # x moves by tau times its speed
        assert (step.reward[stored] == 1).all()
        assert (step.reward[~stored] == 0).all()
        observation = stepper.advance()
    env.close()


# ---------------------------------------------------------------------------------------------- final observations
class Infos(Stepper):
    """Changes the info of each step before the stepper reads it."""

    def __init__(self, change: Any) -> None:
        env: Any = diaries(2, "SameStep", longest=2)
        real = env.step

        def step(actions: Any) -> Any:
            *others, info = real(actions)
            return *others, change(info)

        env.step = step
        super().__init__(env)


def rename(info: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("final_obs", "final_observation"): value for name, value in info.items()}


def stack(info: dict[str, Any]) -> dict[str, Any]:
    final = info.get("final_obs")
    if final is None:
        return info
    return {"final_obs": np.stack([np.zeros(4, np.float32) if x is None else x for x in final])}


@pytest.mark.parametrize("change", [rename, stack])
def test_final_observations_in_older_and_other_forms(change: Any) -> None:
    """Case end-3: ``final_observation`` is the older name; some environments give one array instead of a list."""
    assert transitions(Infos(change), rows=9, seed=5) == transitions(
        Stepper(diaries(2, "Disabled", longest=2)), rows=9, seed=5
    )


def forget_one(info: dict[str, Any]) -> dict[str, Any]:
    if "final_obs" in info:
        info["final_obs"][:] = None
    return info


def deny(info: dict[str, Any]) -> dict[str, Any]:
    if "_final_obs" in info:
        info["_final_obs"][:] = False
    return info


@pytest.mark.parametrize("change", [lambda info: {}, forget_one, deny])
def test_a_missing_final_observation_is_an_error(change: Any) -> None:
    """Case end-3."""
    with pytest.raises(InvalidArgument, match="final observation"):
        transitions(Infos(change), rows=9, seed=5)


def test_an_environment_without_final_observations_says_so_and_its_last_rows_are_marked() -> None:
    """Case end-5, as far as the stepper knows; the collector counts and marks them."""
    stepper = Stepper(declare(diaries(2, "SameStep", longest=2), final_observation=False))
    stepper.reset(seed=5)
    lost = 0
    for _ in range(20):
        step = stepper.step(np.zeros((2, 2), np.float32))
        assert (step.ended is None) == (step.lost is None)
        if step.lost is not None and step.ended is not None:
            assert (step.lost == step.ended).all()
            lost += int(step.lost.sum())
        stepper.advance()
    assert lost > 5


def test_dictionaries_keep_keys_types_and_final_observations() -> None:
    """Case type-1."""
    for mode in MODES:
        stepper = Stepper(diaries(2, mode, longest=2, kind=DictDiary))
        assert {leaf.key: str(leaf.dtype) for leaf in stepper.observation_leaves} == {
            ("id",): "int64",
            ("image",): "uint8",
            ("inner", "vector"): "float32",
        }
        stepper.reset(seed=1)
        for _ in range(20):
            step = stepper.step(np.zeros((2, 2), np.float32))
            if step.ended is not None:
                for i in np.flatnonzero(step.ended):
                    episode, at, _ = step.next_observation["inner"]["vector"][i]
                    assert (step.next_observation["image"][i] == (17 * episode + at) % 256).all()
                    assert step.next_observation["id"][i] == 2**40 + i
            stepper.advance()


# ------------------------------------------------------------------------------------------------------ declaring
def test_an_undeclared_mode_is_an_explicit_error() -> None:
    """Case end-4."""
    env: Any = diaries(2, "Disabled")
    env.metadata = {}
    with pytest.raises(InvalidArgument, match="does not say how it starts new episodes"):
        Stepper(env)
    assert Stepper(declare(env, autoreset_mode="SameStep")).mode is AutoresetMode.SAME_STEP
    assert Stepper(declare(env, autoreset_mode=AutoresetMode.DISABLED)).mode is AutoresetMode.DISABLED
    with pytest.raises(InvalidArgument, match="must be one of"):
        declare(env, autoreset_mode="Sometimes")
