"""Every kind of replay, each way to reach it, and several ranks, with ``execution=ray``."""

from __future__ import annotations

from pathlib import Path

import pytest
from alike import usually
from runs import run, summary

DISCRETE = ("algorithm=dqn", "env.kwargs.discrete=true")
RUNS = [
    ("algorithm=sac",),
    ("algorithm=td3", "replay.transport=gloo", "learner.world_size=2"),
    ("algorithm=ddpg", "replay.transport=ray", "replay.prefetch=2"),
    (*DISCRETE, "replay.sampler=prioritized", "replay.n_step=3"),
    ("algorithm=sac", "replay.consume_after_n_samples=3", "replay.admission=block"),
    ("algorithm=td3", "replay.sampler=hindsight", "env=worlds:Reach-v0", "execution.collector.num_cpus=0.5"),
    ("replay.layout=sequences", "collect.frames_per_batch=10", "replay.learning_starts=4", "replay.batch_size=2"),
]


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("words", usually(RUNS, RUNS[1], RUNS[3]), ids=" ".join)
def test_a_run_passes_its_checks(tmp_path: Path, words: tuple[str, ...]) -> None:
    outcome = run(tmp_path / "run", "execution=ray", "collectors=2", *words)
    assert (outcome.status, outcome.problem) == ("completed", None)
    found = summary(tmp_path / "run")
    assert found["collected_frames"] == found["written_frames"] == 120
