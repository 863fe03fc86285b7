"""Every algorithm, profile and execution together, as settings."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from millpond.core.errors import InvalidArgument, Unsatisfiable
from millpond.train.compose import choices, settings_from_overrides
from millpond.train.run import dry_run

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


def test_a_dry_run_plans_for_a_larger_machine_and_says_what_does_not_fit_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond.train.plan.available_memory", lambda: 1 << 30)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    told = dry_run(settings_from_overrides(["profile=scale_8gpu", "execution=ray"]))
    assert "# collectors: 4 × a Ray actor\n" in told
    assert "# learner: this command and 3 × a Ray actor (num_gpus 1)\n" in told
    assert "# environments: 100,000\n" in told
    assert "# batch of each rank: 4,096 of 16,384 items\n" in told
    assert "in all, the first after 10,000,000 items" in told
    assert "does not fit here: replay and rollouts need" in told
    assert "learner.world_size=4 needs 4 GPUs, and there are 1" in told
    small = dry_run(settings_from_overrides(["profile=smoke", "algorithm=td3"]))
    assert "# fits on this machine\n" in small
    assert "# updates: 1 for each item, 1,200 in all" in small


def test_a_dry_run_refuses_what_fits_nowhere() -> None:
    words = ["replay.max_debt=1000", "replay.samples_per_insert=10", "collect.frames_per_batch=1000"]
    with pytest.raises(Unsatisfiable, match=r"replay\.max_debt"):
        dry_run(settings_from_overrides(words))


def test_a_dry_run_refuses_a_place_on_disk_that_is_taken(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="exists already"):
        dry_run(settings_from_overrides([f"replay.path={tmp_path}"]))


@pytest.mark.parametrize("part", ["collector", "replay", "learner"])
def test_resources_of_a_part_are_whatever_nodes_offer(part: str) -> None:
    words = ["execution=ray", "learner.world_size=2", f"execution.{part}.resources={{simulation: 1}}"]
    made = settings_from_overrides([*words, f"execution.{part}.resources.room=0.5"])
    assert getattr(made.execution, part).resources == {"simulation": 1, "room": 0.5}


def test_a_dry_run_refuses_what_a_cpu_cannot_do() -> None:
    with pytest.raises(InvalidArgument, match="learner.amp=true is for GPUs, and learner.device is cpu"):
        dry_run(settings_from_overrides(["learner.amp=true"]))
