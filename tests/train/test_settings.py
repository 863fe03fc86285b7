from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from millpond.core.errors import InvalidArgument, InvalidType
from millpond.train.compose import changed_settings, describe_settings, save_settings, settings_from_overrides
from millpond.train.settings import Settings


def defaults(**changes: Any) -> dict[str, Any]:
    values = settings_from_overrides([]).to_dict()
    for name, value in changes.items():
        group, _, last = name.rpartition("__")
        (values[group] if group else values)[last] = value
    return values


def test_every_setting_can_be_overridden_and_the_rest_stay():
    settings = settings_from_overrides(
        ["algorithm=dqn", "env=CartPole-v1", "total_frames=5e3", "replay.batch_size=64", "logger.tensorboard=false"]
    )
    assert settings.algorithm["name"] == "dqn"
    assert settings.env.id == "CartPole-v1"
    assert settings.total_frames == 5000
    assert settings.replay.batch_size == 64
    assert settings.logger.tensorboard is False
    assert settings.replay.capacity == settings_from_overrides([]).replay.capacity


def test_one_update_per_frame_unless_said_otherwise():
    assert settings_from_overrides(["replay.batch_size=64"]).samples_per_insert == 64
    assert settings_from_overrides(["replay.batch_size=64", "replay.samples_per_insert=8"]).samples_per_insert == 8


def test_arguments_of_an_environment_may_be_new():
    settings = settings_from_overrides(["env=Hopper-v5", "env.kwargs.frame_skip=1"])
    assert settings.env.kwargs == {"frame_skip": 1}
    assert settings_from_overrides(["env.kwargs={frame_skip: 2}"]).env.kwargs == {"frame_skip": 2}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["replay.capacty=5"], "unknown setting replay.capacty; did you mean replay.capacity?"),
        (["capacity=5"], "did you mean replay.capacity?"),
        (["batchsize=5"], "did you mean replay.batch_size?"),
        (["+colour=red"], "unknown setting colour"),
        (["algorithm=ppo"], "algorithm=ppo is unknown; there are: "),
        (["execution=slurm"], "execution=slurm is unknown; there are: local"),
        (["fast"], "'fast' is no setting: write name=value"),
        (["--fast=1"], "'--fast=1' is no setting"),
        (["seed=1,2"], "one run takes one value"),
        (["=3"], ""),
        (["total_frames=-4"], "total_frames must be at least 1, got -4"),
        (["total_frames=1.5"], "total_frames: expected a whole number, got 1.5"),
        (["total_frames=many"], "total_frames: expected a whole number, got 'many'"),
        (["total_frames=true"], "total_frames: expected a whole number, got True"),
        (["total_frames=null"], "total_frames: expected a whole number, got None"),
        (["total_frames=.nan"], "expected a whole number"),
        (["total_frames=.inf"], "expected a whole number"),
        (["total_frames=${nothing}"], "nothing"),
        (["replay=5"], "replay: expected a group of settings, got 5"),
        (["replay.samples_per_insert=0"], "replay.samples_per_insert must be above 0"),
        (["execution.mode=quick"], "execution.mode must be async or sync, got 'quick'"),
        (["learner.world_size=3"], "replay.batch_size=256 is the batch of all ranks"),
        (["learner.world_size=0"], "learner.world_size must be at least 1, got 0"),
        (["learner.backend=mpi"], "learner.backend must be gloo or nccl"),
        (["learner.backend=nccl"], "learner.backend=nccl needs learner.device=cuda"),
        (["replay.capacity=10"], "never fit replay.capacity=10"),
        (["total_frames=500", "replay.learning_starts=500"], "leaves no frame of total_frames=500"),
        (["envs_per_collector=3", "collect.frames_per_batch=4"], "not divisible by the 3 environments"),
        (["eval.episodes=0"], "eval.episodes must be at least 1"),
        (["~env"], "missing setting env"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_setting(words: list[str], said: str):
    with pytest.raises(InvalidArgument) as caught:
        settings_from_overrides(words)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_types_are_checked_also_for_dictionaries():
    with pytest.raises(InvalidType, match=r"logger\.wandb: expected true or false, got 'yes'"):
        Settings.from_dict(defaults(logger__wandb="yes"))
    with pytest.raises(InvalidArgument, match=r"unknown setting replay\.speed"):
        Settings.from_dict(defaults(replay__speed=3))


def test_saved_settings_come_back_and_may_be_changed(tmp_path: Path):
    settings = settings_from_overrides(["env=CartPole-v1", "algorithm=dqn", "env.kwargs.sutton_barto_reward=true"])
    save_settings(settings, tmp_path / "config.yaml")
    again = settings_from_overrides([f"resume={tmp_path}", "total_frames=77000"])
    assert again.env == settings.env
    assert again.algorithm == settings.algorithm
    assert again.total_frames == 77000
    assert again.resume == str(tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["algorithm=dqn"], "algorithm.name cannot change"),
        (["algorithm.hidden=[8]"], "algorithm.hidden cannot change"),
        (["algorithm.initial_alpha=2"], "algorithm.initial_alpha cannot change"),
        (["env=Hopper-v5"], "env.id cannot change"),
        (["execution.mode=sync"], "execution.mode cannot change"),
        (["seed=3"], "seed cannot change"),
        (["replay.capacity=5000"], "replay.capacity cannot change"),
        (["profile=demo"], "profile cannot change"),
        (["replay.capacty=3"], "did you mean replay.capacity?"),
    ],
)
def test_what_a_resumed_run_cannot_change(tmp_path: Path, words: list[str], said: str):
    save_settings(settings_from_overrides([]), tmp_path / "config.yaml")
    with pytest.raises(InvalidArgument) as caught:
        settings_from_overrides([f"resume={tmp_path}", *words])
    assert said in str(caught.value)


def test_a_resumed_run_may_be_given_the_settings_that_it_has_and_others_that_can_change(tmp_path: Path):
    save_settings(settings_from_overrides(["seed=4"]), tmp_path / "config.yaml")
    same = ["algorithm=sac", "env=Pendulum-v1", "seed=4", "algorithm.hidden=[256,256]", "execution=local"]
    again = settings_from_overrides([f"resume={tmp_path}", *same, "algorithm.actor_lr=1e-5", "eval.episodes=3"])
    assert changed_settings(tmp_path / "config.yaml", again) == {
        "algorithm.actor_lr": (3e-4, 1e-5),
        "eval.episodes": (10, 3),
    }


def test_settings_that_were_saved_before_there_was_one_more_are_read(tmp_path: Path):
    save_settings(settings_from_overrides([]), tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(text.replace("  every_s: 300.0\n", ""))
    assert settings_from_overrides([f"resume={tmp_path}"]).checkpoint.every_s == 300.0


@pytest.mark.parametrize("text", ["", "[1, 2]", "a: [", "env: 3"])
def test_a_config_that_holds_no_settings_is_refused(tmp_path: Path, text: str):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(InvalidArgument):
        settings_from_overrides([f"resume={tmp_path}"])


def test_no_folder_is_made_and_the_working_directory_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    settings_from_overrides(["seed=3"])
    assert list(tmp_path.iterdir()) == []
    assert Path.cwd() == tmp_path


def test_help_lists_every_setting_with_a_meaning():
    lines = {line.split()[0]: line for line in describe_settings().splitlines()}

    def names(values: dict[str, Any], prefix: str = "") -> list[str]:
        found = []
        for name, value in values.items():
            found += names(value, f"{prefix}{name}.") if isinstance(value, dict) and value else [prefix + name]
        return found

    for name in set(names(settings_from_overrides([]).to_dict())) - {"algorithm.name"}:
        assert name in lines
        assert len(lines[name].split()) > 2, f"{name} has no help text"


def test_help_offers_no_choice_where_there_is_none():
    lines = {line.split()[0]: line for line in describe_settings().splitlines()}
    assert lines["execution"].split()[1] == "local|ray"
    values, found = defaults(), []
    for name, text in lines.items():
        changed = copy.deepcopy(values)
        group, _, last = name.rpartition(".")
        there = changed.get(group) if group else changed
        if isinstance(there, dict) and isinstance(there.get(last), str):
            there[last] = "?"
            try:
                Settings.from_dict(changed)
            except InvalidArgument as refused:
                only = re.search(r"must be (\w+), got", str(refused))
                if only:
                    assert f"(only {only[1]})" in text
                    found.append(name)
    assert found == []


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("algorithm.lr=1", "did you mean algorithm.actor_lr or algorithm.critic_lr or algorithm.lr_schedule?"),
        ("algorithm.gama=1", "did you mean algorithm.gamma?"),
        ("gamma=1", "did you mean algorithm.gamma?"),
        ("replay.batch=1", "did you mean replay.batch_size?"),
        ("batch_size=1", "did you mean replay.batch_size?"),
        ("algoritm.tau=1", "did you mean algorithm.tau?"),
        ("eval.xyzzy=1", "unknown setting eval.xyzzy (`"),
    ],
)
def test_an_unknown_setting_names_those_that_may_be_meant(word: str, meant: str):
    with pytest.raises(InvalidArgument) as refused:
        settings_from_overrides([word])
    assert meant in str(refused.value)


@pytest.mark.parametrize("extra", [[], ["replay.layout=sequences", "collect.frames_per_batch=10"]])
def test_a_schedule_of_learning_rates_ends_with_the_updates_of_the_run(extra: list[str]) -> None:
    words = ["total_frames=500", "collectors=1", "replay.learning_starts=20", "replay.batch_size=10", *extra]
    words += ["replay.samples_per_insert=5", "algorithm.lr_schedule=linear"]
    items = 50 if extra else 500
    settings = settings_from_overrides(words)
    assert settings.algorithm["lr_updates"] == (items - 20) * 5 // 10
    assert settings_from_overrides([*words, "algorithm.lr_updates=7"]).algorithm["lr_updates"] == 7
    longer = {**settings.to_dict(), "total_frames": 1000}
    assert Settings.from_dict(longer).algorithm["lr_updates"] == settings.algorithm["lr_updates"]


def test_a_schedule_counts_the_updates_of_items_that_are_consumed() -> None:
    words = ["total_frames=500", "replay.learning_starts=20", "replay.batch_size=10", "algorithm.lr_schedule=cosine"]
    settings = settings_from_overrides([*words, "replay.consume_after_n_samples=3"])
    assert settings.algorithm["lr_updates"] == 150
