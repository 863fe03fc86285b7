from __future__ import annotations

import contextlib
import sys
from typing import Any

import numpy as np
import pytest
import torch

from millpond.collect import Collector
from millpond.core.errors import InvalidArgument, NotReady
from millpond.envs import check_env, make
from millpond.envs.backends import EnvPoolEnv
from millpond.envs.make import check_portable


@pytest.fixture
def envpool() -> Any:
    return pytest.importorskip("envpool", reason="EnvPool is not installed (the extra `envpool`)")


def episodes(seed: int, steps: int = 30) -> list[Any]:
    with contextlib.closing(make("envpool:CartPole-v1", num_envs=3)) as env:
        env.action_space.seed(0)
        found = [env.reset(seed=seed)[0]]
        for _ in range(steps):
            found += env.step(env.action_space.sample())[:4]
        return [np.array(one) for one in found]


def test_envpool_comes_through_the_same_door(envpool: Any) -> None:
    with contextlib.closing(make("envpool:Pendulum-v1", num_envs=5, kwargs={"max_episode_steps": 7})) as env:
        assert isinstance(env, EnvPoolEnv)
        assert env.observation_space.shape == (5, 3)
        observation, info = env.reset(seed=3)
        assert (observation.shape, info) == ((5, 3), {})
        for _ in range(7):
            *_, truncated, _ = env.step(np.zeros((5, 1), np.float32))
        assert truncated.all()
    with pytest.raises(NotReady):
        env.reset()
    check_portable("envpool:Pendulum-v1", workers=3)


def test_envpool_passes_our_own_check_and_a_seed_decides(envpool: Any) -> None:
    assert check_env("envpool:CartPole-v1") == []
    for a, b in zip(episodes(5), episodes(5), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not all(np.array_equal(a, b) for a, b in zip(episodes(5), episodes(6), strict=True))


def test_reset_rows_of_envpool_are_not_collected(envpool: Any) -> None:
    """Case end-2: the step behind an end is a reset, and no transition."""
    with Collector("envpool:CartPole-v1", frames_per_batch=50, num_envs=4, total_frames=600, seed=1) as collector:
        frames: Any = torch.cat(list(collector))  # type: ignore[arg-type]
        assert collector.stats()["reset_rows"] > 10
    first = frames[(frames["step"] == 0).flatten()]["observation"]
    assert bool((first.abs() <= 0.05).all())  # where CartPole begins
    moved = (frames["observation"] - frames["next", "observation"]).abs().sum(1)
    assert bool((moved > 0).all())
    assert bool((frames["next", "reward"] == 1).all())


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: make("envpool:NoSuchTask-v9"), "NoSuchTask"),
        (lambda: make("envpool:Pendulum-v1", kwargs={"no_such": 1}), "no_such"),
        (lambda: make("envpool:Pendulum-v1").reset(seed=[1]), "one seed"),
        (lambda: make("envpool:Pendulum-v1").reset(options={"reset_mask": 1}), "reset_mask"),
    ],
)
def test_what_envpool_does_not_take_is_said(envpool: Any, call: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        call()


def test_without_envpool_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "envpool", None)
    for call in (lambda: make("envpool:Pendulum-v1"), lambda: check_portable("envpool:Pendulum-v1", workers=1)):
        with pytest.raises(InvalidArgument, match=r"pip install 'millpond\[envpool\]'"):
            call()


@pytest.mark.parametrize("prefix", ["mjx", "mujoco_warp", "mujoco_torch"])
def test_physics_on_a_gpu_is_refused_with_what_to_do(prefix: str) -> None:
    for call in (lambda: make(f"{prefix}:Hopper-v5"), lambda: check_portable(f"{prefix}:Hopper-v5", workers=1)):
        with pytest.raises(InvalidArgument, match=r"pip install mujoco.*VectorEnv"):
            call()
