"""The check that collectors explore: it sees one that does not, and blames no setting that is allowed."""

from __future__ import annotations

import math
from pathlib import Path

import faults
import pytest
from runs import run, summary

from millpond.train.exploring import Explored

SYNC = ("execution.mode=sync", "collectors=1")


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [("sac", SYNC), ("td3", SYNC), ("ddpg", ("execution.mode=async", "collectors=2")), ("dqn", SYNC)],
)
def test_collectors_that_play_the_deterministic_policy_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, words: tuple[str, ...]
):
    faults.collectors_do_not_explore(monkeypatch)
    discrete = algorithm == "dqn"
    more = [f"algorithm={algorithm}", f"env.kwargs.discrete={discrete}", "replay.learning_starts=60"]
    outcome = run(tmp_path / "run", *words, *more)
    assert outcome.status == "failed"
    assert [name for name, check in summary(tmp_path / "run")["checks"].items() if not check["ok"]] == [
        "policy_explores"
    ]
    assert outcome.problem is not None
    assert "do not explore as they should: of" in outcome.problem


@pytest.mark.parametrize(
    "words",
    [
        ["algorithm=dqn", "env.kwargs.discrete=true", "algorithm.epsilon_end=0", "algorithm.epsilon_frames=30"],
        ["algorithm=dqn", "env.kwargs.discrete=true", "algorithm.epsilon_start=0", "algorithm.epsilon_end=0"],
        ["algorithm=td3", "algorithm.exploration_sigma=1e-9"],
        ["collect.random_frames=120"],
        ["replay.learning_starts=0", "total_frames=1"],
        ["replay.learning_starts=119"],
        ["replay.samples_per_insert=0.1", "collect.frames_per_batch=60", "learner.publish_interval=1000"],
    ],
)
def test_no_allowed_setting_fails_a_check(tmp_path: Path, words: list[str]):
    outcome = run(tmp_path / "run", *SYNC, *words)
    assert (outcome.status, outcome.problem) == ("completed", None)


def test_the_chance_of_a_false_alarm_is_bounded():
    """Against the exact tail of a binomial distribution, of which Hoeffding's bound is above."""
    for rows, seen, mean in [(100, 0, 0.05), (100, 60, 0.9), (40, 10, 0.5), (1000, 1, 0.01)]:
        exact = sum(math.comb(rows, k) * mean**k * (1 - mean) ** (rows - k) for k in range(seen + 1))
        assert exact <= Explored(rows, seen, rows * mean).chance <= 60 * exact
    assert Explored().chance == Explored(10, 10, 10.0).chance == Explored(10, 6, 5.0).chance == 1.0
