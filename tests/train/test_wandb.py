"""Weights & Biases: refused in one line before anything begins, or one W&B run for each run directory."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from millpond.cli import main
from millpond.core.errors import InvalidArgument
from millpond.train.compose import settings_from_overrides
from millpond.train.wandb_run import WandbRun, has_key

SMALL = [
    "env=worlds:Strict-v0",
    "algorithm.hidden=[8]",
    "total_frames=40",
    "replay.capacity=100",
    "replay.learning_starts=20",
    "replay.batch_size=8",
    "eval.episodes=1",
    "eval.max_steps=5",
    "execution.mode=sync",
    "logger.tensorboard=false",
    "run_dir=run",
    "logger=wandb",
]


@pytest.fixture(autouse=True)
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without a key, in an empty directory."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "NETRC", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def test_without_the_package_nothing_begins(
    nobody: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for module, more in ((None, []), (types.ModuleType("wandb"), ["dry_run=true"])):  # the other: a folder of that name
        monkeypatch.setitem(sys.modules, "wandb", module)
        assert main(["train", *SMALL, *more]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err == (
            "millpond train: logger.wandb=true needs the package 'wandb': pip install 'millpond[wandb]' brings it\n"
        )
        assert list(nobody.iterdir()) == []


def test_keys_are_found_where_they_are_kept(tmp_path: Path):
    host = "api.wandb.ai"
    home = {"HOME": str(tmp_path)}
    assert not has_key(home, host=host)
    assert has_key({**home, "WANDB_API_KEY": "x"}, host=host)
    assert has_key({**home, "WANDB_IDENTITY_TOKEN_FILE": "x"}, host=host)
    (tmp_path / ".netrc").write_text("machine github.com login a password b\n")
    assert not has_key(home, host=host)
    (tmp_path / "mine").write_text("machine api.wandb.ai login user password x\n")
    assert has_key({**home, "NETRC": str(tmp_path / "mine")}, host=host)
    (tmp_path / "mine").replace(tmp_path / ".netrc")
    assert has_key(home, host=host)
    (tmp_path / ".netrc").write_text("machine wandb.example.com:8080 login user password x\n")
    assert has_key(home, host="wandb.example.com:8080")
    (tmp_path / ".netrc").write_text("what is this")
    assert not has_key(home, host=host)


def test_help_says_which_mode_holds_where_none_is_given(capsys: pytest.CaptureFixture[str]):
    assert settings_from_overrides(["logger=wandb"]).logger.mode is None
    assert settings_from_overrides(["logger=wandb"]).logger.wandb
    assert main(["train", "--help"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "logger.mode " in line)
    assert "(null: as WANDB_MODE says, else online)" in line
    with pytest.raises(InvalidArgument, match="offline or online or disabled"):
        settings_from_overrides(["logger.mode=sometimes"])


# ------------------------------------------------------------------ with the package


@pytest.fixture
def wandb() -> object:
    return pytest.importorskip("wandb", reason="needs the package wandb")


@pytest.mark.leaks(reason="wandb keeps a service until the process ends")
def test_without_a_key_nothing_begins(nobody: Path, wandb: object, capsys: pytest.CaptureFixture[str]):
    for more in ([], ["dry_run=true"], ["logger.mode=online"]):
        assert main(["train", *SMALL, *more]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("millpond train: logger.wandb=true: no key for Weights & Biases was found. `wandb login`")
        assert "logger.mode=offline needs neither key nor network" in err
        assert err.count("\n") == 1
        assert list(nobody.iterdir()) == []


@pytest.mark.leaks(reason="wandb keeps a service until the process ends")
def test_a_key_that_is_refused_leaves_no_directory_in_the_way(
    nobody: Path, wandb: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("WANDB_API_KEY", "short")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "2")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    assert main(["train", *SMALL]) == 2
    err = capsys.readouterr().err
    assert "Weights & Biases cannot begin" in err
    assert err.count("\n") == 1
    assert list(nobody.iterdir()) == []


@pytest.mark.leaks(reason="wandb keeps a service until the process ends")
def test_a_run_that_is_resumed_is_one_run_there_too(nobody: Path, wandb: object, monkeypatch: pytest.MonkeyPatch):
    """Offline, as the environment says. The film goes there too."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert main(["train", *SMALL, "eval.video_interval_frames=1000", "eval.video_steps=3"]) == 0
    first = json.loads((nobody / "run" / "wandb.json").read_text())
    assert main(["train", "resume=run", "total_frames=60"]) == 0
    assert json.loads((nobody / "run" / "wandb.json").read_text()) == first
    folders = [path.name for path in (nobody / "run" / "wandb").glob("offline-run-*")]
    assert len(folders) == 2
    assert all(name.endswith(f"-{first['id']}") for name in folders)
    assert list((nobody / "run" / "wandb").rglob("*.mp4"))


@pytest.mark.leaks(reason="wandb keeps a service until the process ends")
def test_a_service_that_fails_is_let_go(nobody: Path, wandb: object, caplog: pytest.LogCaptureFixture):
    settings = settings_from_overrides(["logger=wandb", "logger.mode=offline"]).logger
    run = WandbRun(nobody, settings, config={"seed": 1})
    run.write(10, {"loss/a": 0.5})
    run.write(5, {"eval/return_mean": 0.5})
    run.film(10, nobody / "nowhere.mp4")
    run.write(20, {"loss/a": 0.5})
    run.close()
    assert caplog.text.count("no more is logged to Weights & Biases") == 1
