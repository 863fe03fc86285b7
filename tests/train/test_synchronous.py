"""Whole runs in one process: exact, repeatable, resumable, and honest about how they ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import SMALL, Silent, evaluations, reports, resume, rows, run, same, summary, weights
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from millpond.core.errors import CheckpointError, InvalidArgument
from millpond.replay import ReplayBuffer
from millpond.train.compose import settings_from_overrides
from millpond.train.run import train
from millpond.train.run_state import Checkpoints
from millpond.train.supervise import StopSignal

SYNC = ("execution.mode=sync", "collectors=1")


@pytest.mark.parametrize(("total", "collectors", "envs"), [(120, 1, 1), (97, 3, 1), (101, 1, 7)])
def test_exactly_as_many_updates_as_frames_after_learning_starts(
    tmp_path: Path, total: int, collectors: int, envs: int
):
    """unit-8, unit-3; totals that nothing divides"""
    sizes = [f"total_frames={total}", f"collectors={collectors}", f"envs_per_collector={envs}"]
    outcome = run(tmp_path / "run", *SYNC, *sizes, "logger.interval_frames=1")
    assert (outcome.status, outcome.exit_code, outcome.problem) == ("completed", 0, None)
    told = summary(tmp_path / "run")
    assert told["collected_frames"] == told["written_frames"] == told["write_count"] == total
    assert told["optimizer_steps"] == told["published_version"] == total - 20
    assert all(check["ok"] for check in told["checks"].values())
    for row in rows(tmp_path / "run"):
        assert int(row["updates"]) == max(0, int(row["frames"]) - 20)


@pytest.mark.parametrize("algorithm", ["sac", "dqn", "ddpg", "td3"])
def test_the_same_seed_gives_the_same_numbers_and_another_seed_others(tmp_path: Path, algorithm: str):
    """seed-1"""
    words = [*SYNC, f"algorithm={algorithm}", f"env.kwargs.discrete={algorithm == 'dqn'}", "eval.interval_frames=50"]
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        assert run(tmp_path / name, *words, f"seed={seed}").status == "completed"
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not same(weights(tmp_path / "a"), weights(tmp_path / "c"))


def test_a_run_stopped_before_its_first_frame_can_be_resumed(tmp_path: Path):
    """proc-7"""
    settings = settings_from_overrides([*SMALL, *SYNC, f"run_dir={tmp_path / 'run'}"])
    stop = StopSignal()
    stop.request()
    outcome = train(settings, stop=stop, progress=Silent())
    assert (outcome.problem, outcome.status, outcome.summary["collected_frames"]) == (None, "stopped", 0)
    assert resume(tmp_path / "run").status == "completed"
    assert summary(tmp_path / "run")["eval_return_first"] == 10.0


def test_a_completed_run_can_be_made_longer(tmp_path: Path):
    assert run(tmp_path / "run", *SYNC).status == "completed"
    assert resume(tmp_path / "run", "total_frames=150").status == "completed"
    told = summary(tmp_path / "run")
    assert told["collected_frames"] == 150
    assert told["optimizer_steps"] == 130
    assert [int(row["frames"]) for row in reports(tmp_path / "run")][-4:] == [120, 130, 140, 150]
    assert evaluations(tmp_path / "run") == [(0, 0), (120, 100), (150, 130)]


def test_what_cannot_be_resumed_says_why_and_changes_nothing(tmp_path: Path):
    """ckpt-3"""
    assert run(tmp_path / "run", *SYNC, "checkpoint.replay=false").status == "completed"
    with pytest.raises(CheckpointError, match="holds no replay"):
        resume(tmp_path / "run", "total_frames=150")

    assert run(tmp_path / "other", *SYNC).status == "completed"
    with pytest.raises(InvalidArgument, match="120 frames were collected already, more than total_frames=100"):
        resume(tmp_path / "other", "total_frames=100")
    replay = Checkpoints(tmp_path / "other" / "checkpoints").latest() / "replay.millpond"
    data = bytearray(replay.read_bytes())
    data[len(data) // 2] ^= 1
    replay.write_bytes(data)
    before = (tmp_path / "other" / "config.yaml").read_text()
    with pytest.raises(CheckpointError, match=r"replay\.millpond is damaged"):
        resume(tmp_path / "other", "total_frames=150")
    assert (tmp_path / "other" / "config.yaml").read_text() == before


# ------------------------------------------------------------------ runs that are not well


def test_an_environment_that_raises_fails_the_run_and_leaves_its_story(tmp_path: Path):
    words = ["env.kwargs.fault=raise", f"env.kwargs.while_there={tmp_path}", "env.kwargs.at=30"]
    outcome = run(tmp_path / "run", *SYNC, *words)
    assert (outcome.status, outcome.exit_code) == ("failed", 1)
    told = summary(tmp_path / "run")
    assert (told["error_type"], told["error"]) == ("RuntimeError", "the corridor collapsed")
    assert told["collected_frames"] == told["written_frames"] == 30
    assert "Traceback" in (tmp_path / "run" / "run.log").read_text()
    assert "the corridor collapsed" in (tmp_path / "run" / "report.html").read_text()


def test_a_loss_that_is_not_finite_stops_the_run_and_is_named(tmp_path: Path):
    """nan-1"""
    words = ["env.kwargs.fault=huge", f"env.kwargs.while_there={tmp_path}", "env.kwargs.at=30"]
    assert run(tmp_path / "run", *SYNC, *words).exit_code == 1
    told = summary(tmp_path / "run")
    assert told["error_type"] == "NonFinite"
    assert "loss/critic" in told["error"]


def test_training_goes_on_when_evaluations_fail(tmp_path: Path):
    """rem-10"""
    words = ["env.kwargs.fault=raise", f"env.kwargs.while_there={tmp_path}", "env.kwargs.where=millpond-evaluator"]
    outcome = run(tmp_path / "run", *SYNC, *words, "eval.interval_frames=50")
    assert outcome.status == "completed"
    told = summary(tmp_path / "run")
    assert told["collected_frames"] == 120
    assert told["eval_return_last"] is None
    assert rows(tmp_path / "run")[-1]["eval/failed"] == "4"
    assert "the evaluation at frame 50 failed: RuntimeError: the corridor collapsed" in (
        (tmp_path / "run" / "run.log").read_text()
    )


def test_before_and_after_are_evaluated_on_the_first_and_on_the_final_weights(tmp_path: Path):
    run(tmp_path / "run", *SYNC, "env=Pendulum-v1", "eval.max_steps=50", "eval.interval_frames=60")
    assert evaluations(tmp_path / "run") == [(0, 0), (60, 40), (120, 100)]
    told = summary(tmp_path / "run")
    means = [row["eval/return_mean"] for row in rows(tmp_path / "run") if row["eval/frames"]]
    assert [float(means[0]), float(means[-1])] == [told["eval_return_first"], told["eval_return_last"]]


def test_each_evaluation_is_told_at_its_own_frame_however_rarely_rows_come(tmp_path: Path):
    words = ["eval.interval_frames=20", "logger.interval_frames=100", "logger.tensorboard=true"]
    assert run(tmp_path / "run", *SYNC, *words).status == "completed"
    frames = [0, 20, 40, 60, 80, 100, 120]
    assert [frame for frame, _ in evaluations(tmp_path / "run")] == frames
    assert [int(row["frames"]) for row in reports(tmp_path / "run")] == [100, 120]
    told = EventAccumulator(str(tmp_path / "run"))
    told.Reload()
    assert [event.step for event in told.Scalars("eval/return_mean")] == frames


def test_a_checkpoints_replay_holds_every_frame(tmp_path: Path):
    run(tmp_path / "run", *SYNC)
    path = Checkpoints(tmp_path / "run" / "checkpoints").latest() / "replay.millpond"
    capacity = int(next(word for word in SMALL if word.startswith("replay.capacity")).split("=")[1])
    with ReplayBuffer(capacity, batch_size=8) as replay:
        replay.loads(path)
        assert replay.write_count == len(replay) == 120
