"""``load_policy(run).predict`` on observations as environments give them, one or many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from picky_worlds import ACTIONS, Picky
from runs import run
from tensordict import TensorDict

from millpond import load_policy
from millpond.core.errors import InvalidArgument, InvalidType

KINDS = [
    ("dqn", "late", "vector", False),
    ("dqn", "choice", "several", False),
    ("sac", "matrix", "matrix", True),
    ("td3", "scalar", "scalar", False),
    ("ddpg", "double", "choice", False),
    ("sac", "vector", "several", True),
]


def trained(path: Path, algorithm: str, action: str, observation: str, *, normalized: bool = False) -> Any:
    words = ["env=picky_worlds:Picky-v0", f"env.kwargs.action={action}", f"env.kwargs.observation={observation}"]
    words += [f"algorithm={algorithm}", "execution.mode=sync", "total_frames=40", "eval.episodes=1"]
    run(path, *words, f"normalize_observations={str(normalized).lower()}")
    return load_policy(path)


def stacked(observations: list[Any]) -> Any:
    if isinstance(observations[0], dict):
        return {name: np.stack([each[name] for each in observations]) for name in observations[0]}
    return np.stack(observations)


@pytest.mark.parametrize(("algorithm", "action", "observation", "normalized"), KINDS)
def test_an_environment_is_played_by_it_and_many_are_answered_as_each_one(
    tmp_path: Path, algorithm: str, action: str, observation: str, normalized: bool
) -> None:
    """Picky raises where an action is not in its space, or is of another type."""
    policy = trained(tmp_path / "run", algorithm, action, observation, normalized=normalized)
    world = Picky(action=action, observation=observation)
    seen, _ = world.reset(seed=1)
    kept, answers = [], []
    for _ in range(10):
        answers.append(policy.predict(seen))
        kept.append(seen)
        seen, _, _, ended, _ = world.step(answers[-1])
    assert ended
    many = policy.predict(stacked(kept))
    assert many.shape == (10, *ACTIONS[action].shape)
    assert many.dtype == ACTIONS[action].dtype
    np.testing.assert_allclose(many, np.stack(answers), rtol=1e-5, atol=1e-6)


def test_it_answers_what_the_module_answers_and_takes_lists_and_tensors(tmp_path: Path) -> None:
    policy = trained(tmp_path / "run", "sac", "vector", "vector")
    observations = torch.rand(5, 3)
    expected = policy(TensorDict({"observation": observations}, [5]))["action"].numpy()
    for form in (observations, observations.numpy(), observations.double().numpy(), observations.tolist()):
        np.testing.assert_array_equal(policy.predict(form), expected)
    assert policy.predict(observations[:0]).shape == (0, 3)
    vector = gymnasium.make_vec("picky_worlds:Picky-v0", num_envs=2, vectorization_mode="sync")
    seen, _ = vector.reset(seed=0)
    vector.step(policy.predict(seen))
    vector.close()


def test_what_is_no_observation_is_refused_by_name(tmp_path: Path) -> None:
    policy = trained(tmp_path / "run", "dqn", "choice", "several")
    assert policy.predict({"room": 2, "heat": 0.5}) in ACTIONS["choice"]
    for wrong, error, words in (
        ({"room": 2}, InvalidArgument, r"no part observation\.heat"),
        (np.zeros(3), InvalidArgument, r"no part observation\.heat"),
        ({"room": [[1]], "heat": [0.5]}, InvalidArgument, r"observation\.room has shape \[1, 1\]"),
        ({"room": [1, 2], "heat": 0.5}, InvalidArgument, "different numbers of them"),
        ({"room": [1, 2], "heat": [0.5]}, InvalidArgument, "different numbers of them"),
        ({"room": 1.5, "heat": 0.5}, InvalidType, r"observation\.room must hold whole numbers"),
        ({"room": 1, "heat": "warm"}, InvalidType, r"observation\.heat must be an array of numbers"),
        ({"room": 1, "heat": [[0.5], [0.5, 1.0]]}, InvalidArgument, r"observation\.heat is no array"),
        ({"room": 9, "heat": 0.5}, InvalidArgument, "outside of 0 … 3"),
    ):
        with pytest.raises(error, match=words):
            policy.predict(wrong)
