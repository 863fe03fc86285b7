from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import millpond
from millpond.cli import main


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


SMALL = [
    "env=Pendulum-v1",
    "total_frames=60",
    "replay.capacity=100",
    "replay.learning_starts=20",
    "replay.batch_size=8",
    "algorithm.hidden=[8]",
    "eval.episodes=1",
    "eval.max_steps=5",
    "execution.mode=sync",
    "logger.tensorboard=false",
    "run_dir=run",
]


# ------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["env=Nonsense-v0"], "cannot make the environment 'Nonsense-v0'"),
        (["env=Pendulum-v1", "env.kwargs.gravitas=9"], "gravitas"),
        (["env=worlds:Strange-v0"], "Tuple spaces are not supported"),
        (["env=worlds:Unbounded-v0"], "they must be finite"),
        (["algorithm=sac", "env=CartPole-v1"], "sac needs a continuous action"),
        (["algorithm=dqn", "env=Pendulum-v1"], "dqn needs a discrete action"),
        (["algorithm.gamma=7"], "algorithm.gamma must be between 0 and 1"),
        (["algorithm.gama=0.9"], "did you mean algorithm.gamma?"),
        (["total_frames=-5"], "total_frames must be at least 1, got -5"),
        (["replay.capacity=100000000000"], "replay.capacity=100000000000: "),
        (["execution.mode=async", "replay.capacity=100000000000"], "are free, in memory: make it smaller\n"),
        (["replay.capacity=100000000000"], "TiB)"),
        (["execution.mode=async", "replay.max_debt=10"], "it must be at least 72"),
        (["collect.frames_per_batch=200", "collectors=1"], "never fit"),
        (["learner.device=cuda"], "execution.mode=sync needs learner.device=cpu"),
        (["execution.mode=async", "learner.device=abacus"], "learner.device=abacus is no device"),
        (["run_dir=taken"], "run_dir=taken exists and is not empty"),
        (["resume=nowhere"], "cannot read nowhere/config.yaml"),
        (["collectors=65", "execution.mode=async"], "64"),
        (["nonsense"], "'nonsense' is no setting"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    elsewhere: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
):
    (elsewhere / "taken").mkdir()
    (elsewhere / "taken" / "mine.txt").write_text("precious")
    before = sorted(elsewhere.rglob("*"))
    assert main(["train", *SMALL, *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("millpond train: ")
    assert err.count("\n") == 1
    assert said in err
    assert sorted(elsewhere.rglob("*")) == before


def test_unknown_commands_and_help(capsys: pytest.CaptureFixture[str]):
    assert main(["trian"]) == 2
    assert capsys.readouterr().err.startswith("millpond: unknown command 'trian'; there are: train, suite, eval")
    assert main([]) == 2
    assert main(["--help"]) == 0
    assert "train a policy" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"millpond {millpond.__version__}\n"
    assert main(["train", "--help"]) == 0
    out = capsys.readouterr().out
    for part in ("resume=", "replay.samples_per_insert", "algorithm.tau", "Ctrl-C once stops with a checkpoint"):
        assert part in out


def test_a_dry_run_tells_sizes_and_settings_and_starts_nothing(elsewhere: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["train", *SMALL, "dry_run=true"]) == 0
    out = capsys.readouterr().out
    assert "total_frames: 60" in out
    assert "bytes per item" in out
    assert list(elsewhere.iterdir()) == []


@pytest.fixture
def small_disk(elsewhere: Path) -> Iterator[Path]:
    """An empty file system of 64 KiB."""
    disk = elsewhere / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small file system")
    yield disk
    gc.collect()  # a failed write's traceback may hold its file
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_one_line_and_leaves_nothing(small_disk: Path, capsys: pytest.CaptureFixture[str]):
    (small_disk / "filler").write_bytes(b"x" * 60_000)
    assert main(["train", *SMALL, f"run_dir={small_disk}/run"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("millpond train: ")
    assert err.count("\n") == 1
    assert "No space left on device" in err
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def test_a_disk_that_fills_up_fails_the_run_in_words(small_disk: Path, capsys: pytest.CaptureFixture[str]):
    words = [f"run_dir={small_disk}/run", "algorithm.hidden=[256,256]"]  # a checkpoint of 3 MB
    assert main(["train", *SMALL, *words]) == 1
    out, err = capsys.readouterr()
    assert "sac on Pendulum-v1: failed, 60 frames, 40 updates" in out
    last = err.splitlines()[-1]
    assert last.startswith("millpond train: ")
    assert "Traceback" not in err
    assert not list((small_disk / "run" / "checkpoints").iterdir())


def test_no_traceback_and_no_process_from_a_real_command_line(elsewhere: Path):
    done = subprocess.run(
        [sys.executable, "-m", "millpond", "train", "env=Nonsense-v0"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    assert list(elsewhere.iterdir()) == []


# ------------------------------------------------------------------ a run, its policy, its evaluation


def test_train_then_eval_then_load(elsewhere: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["train", *SMALL]) == 0
    out = capsys.readouterr().out
    assert "sac on Pendulum-v1: completed, 60 frames, 40 updates" in out
    assert "evaluation return   before " in out
    assert "curves              run/report.html" in out
    summary = json.loads((elsewhere / "run" / "summary.json").read_text())
    assert set(SUMMARY_KEYS) == set(summary)

    assert main(["eval", "run", "--episodes", "2"]) == 0
    first = capsys.readouterr().out
    assert first.count("episode ") == 2
    assert main(["eval", "run", "--episodes", "2"]) == 0
    assert capsys.readouterr().out == first
    newest = max(path.name for path in (elsewhere / "run" / "checkpoints").iterdir())
    for checkpoint in (newest, f"run/checkpoints/{newest}"):
        assert main(["eval", "run", "--episodes", "2", "--checkpoint", checkpoint]) == 0
        assert capsys.readouterr().out == first
    assert main(["eval", "run", "--checkpoint", f"nowhere/{newest}"]) == 2  # another run's, which is not there
    assert main(["eval", "run", "--episodes", "0"]) == 2
    assert main(["eval", "nowhere"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "millpond eval: nowhere is no run: it holds no config.yaml"

    import torch
    from tensordict import TensorDict

    policy = millpond.load_policy("run")
    observed = TensorDict({"observation": torch.randn(5, 3)}, batch_size=[5])
    first_action = policy(observed.clone())["action"]
    assert first_action.shape == (5, 1)
    assert torch.equal(first_action, policy(observed.clone())["action"])


SUMMARY_KEYS = (
    "status algorithm env total_frames collected_frames written_frames write_count optimizer_steps published_version"
    " eval_return_first eval_return_last wall_s frames_per_s updates_per_s restarts peak_rss_mb checks changes command"
    " git_commit versions"
).split()
