"""Policies learn: the whole trainer, fixed seeds, returns of a size that no accident gives."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import run, summary

pytestmark = pytest.mark.slow

COMMON = [
    "execution.mode=sync",
    "collectors=1",
    "total_frames=5000",
    "replay.capacity=10000",
    "replay.learning_starts=500",
    "eval.episodes=20",
    "logger.interval_frames=null",
    "checkpoint.replay=false",
]


def test_dqn_balances_the_pole(tmp_path: Path):
    words = ["algorithm=dqn", "env=CartPole-v1", "seed=1", "algorithm.hidden=[120,84]", "algorithm.epsilon_frames=3000"]
    words.append("total_frames=4000")
    assert run(tmp_path / "run", *COMMON, *words, "replay.batch_size=64").problem is None
    told = summary(tmp_path / "run")
    assert told["eval_return_first"] < 60
    assert told["eval_return_last"] >= 195


def test_sac_swings_the_pendulum_up(tmp_path: Path):
    words = ["algorithm=sac", "env=Pendulum-v1", "seed=0", "algorithm.hidden=[64,64]", "algorithm.actor_lr=1e-3"]
    assert run(tmp_path / "run", *COMMON, *words, "replay.batch_size=128").problem is None
    told = summary(tmp_path / "run")
    assert told["eval_return_first"] < -900
    assert told["eval_return_last"] >= -300
