from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from millpond.algos.ddpg import DDPG
from millpond.algos.dqn import DQN
from millpond.algos.sac import SAC
from millpond.core.errors import Cancelled
from millpond.envs import env_spec, make
from millpond.train.compose import settings_from_overrides
from millpond.train.evaluation import play
from millpond.train.evaluator import Evaluator, Task
from millpond.train.settings import EnvSettings

PENDULUM = EnvSettings(id="Pendulum-v1", kwargs={})


def learner(env: EnvSettings, kind: Any = SAC) -> Any:
    world = make(env.id, kwargs=env.kwargs)
    spec = env_spec(world)
    world.close()
    return kind(spec, seed=0)


def corridor(**kwargs: Any) -> EnvSettings:
    return EnvSettings(id="worlds:Corridor-v0", kwargs=kwargs)


# ------------------------------------------------------------------ in this process


@pytest.mark.parametrize("kind", [DDPG, SAC])
def test_evaluation_is_exactly_deterministic_and_collection_is_not(kind: Any):
    """eval-1"""
    algorithm = learner(PENDULUM, kind)
    policy = algorithm.evaluation_policy()
    first = play(policy, PENDULUM, episodes=3, max_steps=50, seed=7)
    assert play(policy, PENDULUM, episodes=3, max_steps=50, seed=7).returns == first.returns
    assert play(policy, PENDULUM, episodes=3, max_steps=50, seed=8).returns != first.returns
    noisy = [play(algorithm.policy, PENDULUM, episodes=3, max_steps=50, seed=7).returns for _ in range(2)]
    assert noisy[0] != noisy[1]


def test_playing_moves_no_generator_of_the_algorithm():
    algorithm = learner(PENDULUM)
    before = algorithm.state_dict()
    state = torch.get_rng_state()
    play(algorithm.evaluation_policy(), PENDULUM, episodes=2, max_steps=20, seed=7)
    after = algorithm.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(state, torch.get_rng_state())


def test_the_first_episode_of_each_environment_counts_whole():
    env = corridor(length=10)
    played = play(learner(env).evaluation_policy(), env, episodes=4, max_steps=100, seed=0)
    assert played.returns == (10.0,) * 4
    assert played.lengths == (10,) * 4


def test_a_long_episode_counts_as_far_as_it_came():
    env = corridor(length=10)
    played = play(learner(env).evaluation_policy(), env, episodes=2, max_steps=4, seed=0)
    assert played.returns == (4.0, 4.0)


def test_environments_that_reset_in_the_next_step_give_whole_episodes_too():
    cartpole = EnvSettings(id="CartPole-v1", kwargs={})
    played = play(learner(cartpole, DQN).evaluation_policy(), cartpole, episodes=5, max_steps=1000, seed=3)
    assert played.returns == tuple(map(float, played.lengths))
    assert max(played.lengths) < 100


def test_playing_can_be_cancelled():
    with pytest.raises(Cancelled):
        play(learner(PENDULUM).evaluation_policy(), PENDULUM, episodes=1, max_steps=50, seed=7, cancelled=lambda: True)


# ------------------------------------------------------------------ in a process of its own


@pytest.fixture
def evaluators() -> Iterator[Any]:
    made: list[Evaluator] = []

    def make_one(env: EnvSettings, algorithm: Any, *words: str) -> Evaluator:
        settings = settings_from_overrides(["eval.episodes=2", "eval.max_steps=30", *words]).eval
        made.append(Evaluator(algorithm.evaluation_policy(), env=env, settings=settings, seed=7))
        return made[-1]

    yield make_one
    for evaluator in made:
        evaluator.close()


def test_a_snapshot_is_exact_whatever_happens_to_the_weights_since(evaluators: Any):
    algorithm = learner(PENDULUM)
    here = play(algorithm.evaluation_policy(), PENDULUM, episodes=2, max_steps=30, seed=7)
    evaluator = evaluators(PENDULUM, algorithm)
    assert evaluator.submit(Task(frames=0, version=0))
    with torch.no_grad():
        algorithm.actor_adam.values.zero_()
    result = evaluator.wait()
    assert result.episodes.returns == here.returns
    assert result.row()["eval/version"] == 0

    there = play(algorithm.evaluation_policy(), PENDULUM, episodes=2, max_steps=30, seed=7)
    assert evaluator.submit(Task(frames=100, version=5))
    assert evaluator.wait().episodes.returns == there.returns
    assert there.returns != here.returns


def test_what_is_due_while_one_runs_is_skipped_and_counted(evaluators: Any, tmp_path: Path):
    """eval-2"""
    (tmp_path / "hang").write_text("")
    env = corridor(fault="hang", while_there=str(tmp_path / "hang"))
    evaluator = evaluators(env, learner(env))
    assert evaluator.submit(Task(frames=0, version=0))
    assert not evaluator.submit(Task(frames=1, version=1))
    assert not evaluator.submit(Task(frames=2, version=2))
    assert evaluator.skipped == 2
    assert evaluator.poll() is None


@pytest.mark.parametrize(
    ("fault", "words", "said"),
    [
        ("raise", [], "RuntimeError: the corridor collapsed"),
        ("kill", [], "the evaluator died (killed by SIGKILL)"),
        ("hang", ["eval.timeout=5"], "it took more than 5 s (eval.timeout)"),
    ],
)
def test_an_evaluation_that_fails_is_reported_and_the_next_one_runs(
    evaluators: Any, tmp_path: Path, fault: str, words: list[str], said: str
):
    """rem-10, for every way of failing."""
    flag = tmp_path / "fault"
    flag.write_text("")
    env = corridor(fault=fault, while_there=str(flag))
    evaluator = evaluators(env, learner(env), *words)
    evaluator.submit(Task(frames=0, version=0))
    result = evaluator.wait()
    assert result.episodes is None
    assert result.row() == {}
    assert result.error == said
    flag.unlink(missing_ok=True)
    assert evaluator.submit(Task(frames=10, version=1))
    assert evaluator.wait().episodes.returns == (10.0, 10.0)
    assert evaluator.failed == 1


def test_closing_does_not_wait_for_an_evaluation(evaluators: Any):
    env = corridor(length=10**9)
    evaluator = evaluators(env, learner(env), "eval.max_steps=1000000000")
    evaluator.submit(Task(frames=0, version=0))
    evaluator.close()
    assert evaluator.wait() is None


def test_ctrl_c_in_the_terminal_does_not_reach_it(evaluators: Any):
    algorithm = learner(PENDULUM)
    evaluator = evaluators(PENDULUM, algorithm)
    evaluator.submit(Task(frames=0, version=0))
    evaluator.wait()
    os.kill(evaluator.pid, signal.SIGINT)
    evaluator.submit(Task(frames=1, version=1))
    assert evaluator.wait().error is None
