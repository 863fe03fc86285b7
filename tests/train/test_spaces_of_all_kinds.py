"""Environments with unusual spaces are trained on, evaluated, and played by a policy that is loaded again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from picky_worlds import ACTIONS, OBSERVATIONS, Picky
from runs import run, summary
from tensordict import TensorDict

from millpond import load_policy
from millpond.commands.eval import main as evaluate
from millpond.envs import Stepper, env_spec, make
from millpond.train.checkpoint import spec_from_json, spec_to_json
from millpond.train.evaluation import act

KINDS = [
    ("dqn", "late", "vector"),
    ("dqn", "choice", "choice"),
    ("dqn", "late", "several"),
    ("sac", "matrix", "matrix"),
    ("td3", "scalar", "scalar"),
    ("ddpg", "double", "choice"),
    ("sac", "vector", "several"),
]


def words(algorithm: str, action: str, observation: str) -> list[str]:
    return [
        "env=picky_worlds:Picky-v0",
        f"env.kwargs.action={action}",
        f"env.kwargs.observation={observation}",
        f"algorithm={algorithm}",
    ]


@pytest.mark.parametrize(("algorithm", "action", "observation"), KINDS)
def test_a_run_trains_evaluates_and_is_loaded_again(
    tmp_path: Path, capsys: Any, algorithm: str, action: str, observation: str
) -> None:
    """Picky raises where an action is not in its space."""
    path = tmp_path / "run"
    run(path, *words(algorithm, action, observation), "execution.mode=sync")
    assert summary(path)["status"] == "completed"
    assert evaluate([str(path), "--episodes", "2"]) == 0
    assert "over 2 episodes" in capsys.readouterr().out

    policy, space = load_policy(path), ACTIONS[action]
    world = make(lambda: Picky(action=action, observation=observation), num_envs=4)
    stepper = Stepper(world)
    actions = act(policy, stepper, stepper.reset(seed=0))
    assert actions.shape == (4, *space.shape)
    stepper.step(actions)
    world.close()


def test_several_processes_store_actions_in_the_shape_of_the_space(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(path, *words("sac", "matrix", "choice"), "collectors=2", "execution.mode=async")
    assert summary(path)["status"] == "completed"


@pytest.mark.parametrize("normalized", [False, True])
def test_matrices_and_scalars_are_normalised_too(tmp_path: Path, normalized: bool) -> None:
    for observation in ("matrix", "several"):
        path = tmp_path / observation
        extra = [f"normalize_observations={str(normalized).lower()}", "execution.mode=sync"]
        run(path, *words("sac", "vector", observation), *extra)
        assert summary(path)["status"] == "completed"
        spaces = OBSERVATIONS[observation]
        seen = spaces.sample()
        tree = seen if isinstance(seen, dict) else {"": seen}
        data = TensorDict(batch_size=[1])
        for name, value in tree.items():
            kept = np.asarray(value, np.float32 if np.asarray(value).dtype == np.float64 else None)
            data["observation" if not name else ("observation", name)] = torch.from_numpy(np.array(kept)[None])
        assert load_policy(path)(data)["action"].shape == (1, 3)


@pytest.mark.parametrize(("algorithm", "action", "observation"), KINDS)
def test_a_specification_survives_its_file(algorithm: str, action: str, observation: str) -> None:
    spec = env_spec(make(lambda: Picky(action=action, observation=observation)))
    assert spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec
