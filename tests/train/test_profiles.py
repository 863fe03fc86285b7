"""Every algorithm, profile and execution together, as settings."""

from __future__ import annotations

import itertools

import pytest

from millpond.train.compose import choices, settings_from_overrides

ALL = list(itertools.product(choices("algorithm"), choices("profile"), choices("execution")))


@pytest.mark.parametrize(("algorithm", "profile", "execution"), ALL)
def test_every_combination_composes(algorithm: str, profile: str, execution: str) -> None:
    words = [f"algorithm={algorithm}", f"profile={profile}", f"execution={execution}"]
    settings = settings_from_overrides(words)
    assert (settings.algorithm["name"], settings.execution.name) == (algorithm, execution)
    assert (settings.env.id == "CartPole-v1") == (algorithm == "dqn")
    assert settings.collect.random_frames == 0
    if "scale" in profile and algorithm != "dqn":
        assert settings.collectors * settings.envs_per_collector == 100_000
        updates = settings.samples_per_insert * 100_000 / settings.replay.batch_size
        assert updates == pytest.approx(25)
        assert settings.env.kwargs == ({"frame_skip": 1} if profile.startswith("humanoid") else {})
    if "scale" in profile and algorithm == "dqn":
        assert settings.total_frames == 100_000
    if profile.endswith("8gpu"):
        assert (settings.learner.world_size, settings.learner.backend) == (4, "nccl")
        assert settings.execution.learner.num_gpus == (1 if execution == "ray" else 0)


def test_all_profiles_are_there() -> None:
    wanted = {"smoke", "default", "scale", "scale_8gpu", "humanoid_scale_8gpu"}
    assert wanted <= set(choices("profile"))
