"""What a run keeps, and what it says, when it does not end well: no failure and no number costs the weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from runs import evaluations, reports, resume, rows, run, summary, weights

from millpond.cli import main
from millpond.core.errors import CheckpointError, InvalidArgument
from millpond.train.loggers import read_metrics
from millpond.train.run_state import Checkpoints, RunDirectory, read_checkpoint

SYNC = ("execution.mode=sync", "collectors=1")
ASYNC = ("execution.mode=async", "collectors=2")


def strict(path: Path) -> dict[str, object]:
    """The JSON in a file, which has neither NaN nor infinities."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{path} holds {word}")

    found: dict[str, object] = json.loads(path.read_text(), parse_constant=refuse)
    return found


@pytest.mark.parametrize(("mode", "error"), [(SYNC, "RuntimeError"), (ASYNC, "WorkerFailed")])
def test_a_run_that_fails_keeps_what_it_learned_and_can_be_continued(
    tmp_path: Path, mode: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str]
):
    flag, path = tmp_path / "flag", tmp_path / "run"
    flag.write_text("")
    where = "env.kwargs.where=Main" if mode is SYNC else "env.kwargs.where=millpond worker"
    outcome = run(path, *mode, "env.kwargs.fault=raise", f"env.kwargs.while_there={flag}", "env.kwargs.at=40", where)
    assert (outcome.status, outcome.summary["error_type"], outcome.resumable) == ("failed", error, True)
    saved = read_checkpoint(Checkpoints(path / "checkpoints").latest())
    assert saved["frames"] == outcome.summary["collected_frames"] == outcome.summary["written_frames"] >= 40
    assert saved["updates"] == outcome.summary["optimizer_steps"] > 0
    assert main(["eval", str(path), "--episodes", "1"]) == 0
    assert "mean return 10.00" in capsys.readouterr().out
    flag.unlink()
    assert resume(path).status == "completed"
    assert summary(path)["collected_frames"] == summary(path)["written_frames"] == 120


def test_rewards_that_are_not_finite_are_quarantined_and_counted_and_the_run_is_well(tmp_path: Path):
    words = ["env.kwargs.fault=nan_reward", f"env.kwargs.while_there={tmp_path}", "env.kwargs.where=Main"]
    some = run(tmp_path / "some", *SYNC, *words, "env.kwargs.at=55", "env.kwargs.for_steps=5")
    assert (some.status, some.problem) == ("completed", None)
    assert reports(tmp_path / "some")[-1]["collect/quarantined_rows"] == "5"
    assert summary(tmp_path / "some")["written_frames"] == 120


def test_an_environment_that_has_diverged_ends_the_run_and_not_what_it_learned(tmp_path: Path):
    words = ["env.kwargs.fault=nan_reward", f"env.kwargs.while_there={tmp_path}", "env.kwargs.where=Main"]
    outcome = run(tmp_path / "run", *SYNC, *words, "env.kwargs.at=55")
    assert (outcome.status, outcome.summary["error_type"], outcome.resumable) == ("failed", "NonFinite", True)
    assert int(weights(tmp_path / "run")["steps"]) == 35


@pytest.mark.parametrize("fault", ["nan_reward", "nan_observation"])
def test_an_evaluation_with_numbers_that_are_not_finite_costs_the_run_nothing(
    tmp_path: Path, fault: str, capsys: pytest.CaptureFixture[str]
):
    path, where = tmp_path / "run", "env.kwargs.where=millpond-evaluator"
    words = [f"env.kwargs.fault={fault}", f"env.kwargs.while_there={tmp_path}", where, "env.kwargs.at=5"]
    outcome = run(path, *SYNC, *words, "eval.interval_frames=60")
    assert (outcome.status, outcome.problem) == ("completed", None)
    told = strict(path / "summary.json")
    assert told["eval_return_first"] is told["eval_return_last"] is None
    strict(Checkpoints(path / "checkpoints").latest() / "run.json")
    assert evaluations(path) == [(0, 0), (60, 40), (120, 100)]
    columns, _ = read_metrics(path / "metrics.csv")
    assert "eval/quarantined_episodes" in columns
    assert [row["eval/quarantined_episodes"] for row in rows(path) if row["eval/frames"]] == ["2", "2", "2"]
    assert all(row["eval/return_mean"] == "" for row in rows(path))
    assert "nan" not in (path / "metrics.csv").read_text()
    assert "NaN" not in (path / "report.html").read_text()
    (path / "config.yaml").write_text(
        (path / "config.yaml").read_text().replace("where: millpond-evaluator", "where: ''")
    )
    assert main(["eval", str(path), "--episodes", "3"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("3 episodes had numbers that are not finite")


def test_a_loss_that_is_not_finite_stops_the_run_names_the_batch_and_keeps_the_last_good_weights(tmp_path: Path):
    """nan-1"""
    words = ["env.kwargs.fault=huge", f"env.kwargs.while_there={tmp_path}", "env.kwargs.at=30"]
    outcome = run(tmp_path / "run", *SYNC, *words)
    assert (outcome.exit_code, outcome.resumable) == (1, True)
    told = summary(tmp_path / "run")
    assert told["error_type"] == "NonFinite"
    assert "loss/critic" in told["error"]
    kept = weights(tmp_path / "run")
    assert int(kept["steps"]) == told["optimizer_steps"] > 0
    assert all(bool(torch.isfinite(value).all()) for value in kept.values() if value.is_floating_point())


def test_a_run_that_ended_before_its_first_checkpoint_says_so(tmp_path: Path):
    words = ["env.kwargs.fault=raise", f"env.kwargs.while_there={tmp_path}", "env.kwargs.where=Main"]
    outcome = run(tmp_path / "run", *SYNC, *words)
    assert (outcome.status, outcome.resumable) == ("failed", False)
    with pytest.raises(CheckpointError, match="before its first one was saved"):
        resume(tmp_path / "run")


def test_nobody_else_runs_where_a_run_is_alive(tmp_path: Path):
    path = tmp_path / "run"
    assert run(path, *SYNC).status == "completed"
    before = sorted(path.rglob("*"))
    with RunDirectory.open(path).held():
        with pytest.raises(InvalidArgument, match=r"a run is going on in .* \(process \d+\)"):
            resume(path, "total_frames=150")
        assert sorted(path.rglob("*")) == before
        with pytest.raises(InvalidArgument, match="not empty"):
            run(path, *SYNC)
    new = RunDirectory.create(tmp_path / "new")
    with new.held(), pytest.raises(InvalidArgument, match="a run is going on"):
        run(tmp_path / "new", *SYNC)
    assert resume(path, "total_frames=150").status == "completed"


def test_settings_that_change_at_a_resume_take_effect_and_are_recorded(tmp_path: Path):
    path = tmp_path / "run"
    assert run(path, *SYNC).status == "completed"
    before = weights(path)
    assert resume(path, "total_frames=150", "algorithm.actor_lr=0.5").status == "completed"
    assert (weights(path)["actor"] - before["actor"]).abs().max() > 1
    assert summary(path)["changes"] == [
        {"frames": 120, "settings": {"algorithm.actor_lr": [3e-4, 0.5], "total_frames": [120, 150]}}
    ]
    assert resume(path, "total_frames=160").summary["changes"][1:] == [
        {"frames": 150, "settings": {"total_frames": (150, 160)}}
    ]
    assert "actor_lr: 0.5" in (path / "config.yaml").read_text()


def test_a_resume_of_a_run_that_has_ended_repeats_nothing(tmp_path: Path):
    path = tmp_path / "run"
    assert run(path, *SYNC).status == "completed"
    before, told = (path / "metrics.csv").read_text(), summary(path)
    assert resume(path).status == "completed"
    assert (path / "metrics.csv").read_text() == before
    assert summary(path)["eval_return_last"] == told["eval_return_last"]
    assert summary(path)["published_version"] == told["published_version"]
