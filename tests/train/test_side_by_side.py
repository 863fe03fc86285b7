"""Whole runs with worker processes: exact counts, the replay ratio, deaths, Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from runs import SMALL, reports, resume, rows, run, summary

from millpond.shm.directory import reap
from millpond.train.run_state import Checkpoints, read_checkpoint

ASYNC = ["execution.mode=async", "collectors=2"]


def test_exact_counts_and_the_replay_ratio(tmp_path: Path):
    """unit-1, unit-4; a total that no batch size divides"""
    words = ["total_frames=1009", "envs_per_collector=3", "replay.samples_per_insert=4", "replay.capacity=2000"]
    words.append("learner.publish_interval=7")
    outcome = run(tmp_path / "run", *ASYNC, *words)
    assert (outcome.status, outcome.problem) == ("completed", None)
    told = summary(tmp_path / "run")
    assert told["collected_frames"] == told["written_frames"] == told["write_count"] == 1009
    assert told["optimizer_steps"] == told["published_version"] == (1009 - 20) * 4 // 8
    assert told["restarts"] == 0
    debt = outcome.settings.max_debt
    assert debt is not None
    for row in reports(tmp_path / "run"):
        owed = 4 * max(0, int(row["replay/write_count"]) - 20) - int(row["replay/samples_returned"])
        assert 0 <= owed <= debt
    assert float(reports(tmp_path / "run")[-1]["replay/samples_per_insert"]) == pytest.approx(4.0, rel=0.01)


def test_a_killed_worker_is_replaced_and_every_frame_counts(tmp_path: Path):
    flag = tmp_path / "flag"
    flag.write_text("")
    words = ["env.kwargs.fault=kill", f"env.kwargs.while_there={flag}", "env.kwargs.at=40"]
    words.append("env.kwargs.where=millpond worker")
    outcome = run(tmp_path / "run", *ASYNC, *words, "total_frames=301")
    assert (outcome.status, outcome.exit_code) == ("completed", 0)
    told = summary(tmp_path / "run")
    assert told["collected_frames"] == told["written_frames"] == 301
    assert told["optimizer_steps"] == 281
    assert told["restarts"] == 1
    assert reports(tmp_path / "run")[-1]["collect/restarts"] == "1"
    assert "was killed by SIGKILL; restart 1 of 3" in (tmp_path / "run" / "run.log").read_text()


def test_a_worker_that_raises_fails_the_run_with_its_traceback(tmp_path: Path):
    """proc-5"""
    words = ["env.kwargs.fault=raise", f"env.kwargs.while_there={tmp_path}", "env.kwargs.at=40"]
    outcome = run(tmp_path / "run", *ASYNC, *words, "total_frames=400")
    assert outcome.exit_code == 1
    told = summary(tmp_path / "run")
    assert told["error_type"] == "WorkerFailed"
    assert "RuntimeError: the corridor collapsed" in told["error"]
    assert "Traceback" in told["error"]
    assert "in _commit" in told["error"]
    assert outcome.problem is not None
    said = outcome.problem.replace("worker 1", "worker 0")
    assert said == f"WorkerFailed: worker 0 raised RuntimeError: the corridor collapsed (more in {outcome.run.log})"


def test_a_worker_that_dies_again_and_again_fails_the_run(tmp_path: Path):
    words = ["env.kwargs.fault=kill", f"env.kwargs.while_there={tmp_path}", "env.kwargs.where=millpond worker"]
    outcome = run(tmp_path / "run", *ASYNC, *words, "collect.max_restarts=1")
    assert outcome.exit_code == 1
    assert summary(tmp_path / "run")["error_type"] == "WorkerFailed"


def test_evaluations_that_are_due_while_one_runs_are_skipped_and_counted(tmp_path: Path):
    """eval-2"""
    flag = tmp_path / "flag"
    flag.write_text("")
    words = ["env.kwargs.fault=hang", f"env.kwargs.while_there={flag}", "env.kwargs.where=millpond-evaluator"]
    outcome = run(tmp_path / "run", *ASYNC, *words, "eval.interval_frames=10", "eval.timeout=1")
    assert outcome.status == "completed"
    last = reports(tmp_path / "run")[-1]
    assert int(last["eval/skipped"]) >= 1
    assert int(last["eval/failed"]) >= 1


def test_a_run_with_workers_resumes_with_exact_counts(tmp_path: Path):
    outcome = run(tmp_path / "run", *ASYNC, "total_frames=203", "checkpoint.interval_frames=90")
    assert outcome.status == "completed"
    assert resume(tmp_path / "run", "total_frames=307", "collectors=1").status == "completed"
    told = summary(tmp_path / "run")
    assert told["collected_frames"] == told["written_frames"] == 307
    assert told["optimizer_steps"] == told["published_version"] == 287


# ------------------------------------------------------------------ real signals on a real command line


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a `millpond train` that would run for ever; it is killed with all its children if the test leaves it."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        endless = [*SMALL, *ASYNC, "total_frames=100000000", "replay.capacity=5000", f"run_dir={tmp_path / 'run'}"]
        child = subprocess.Popen(
            [sys.executable, "-m", "millpond.cli", "train", *endless, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=Path(__file__).parent,  # where `worlds` is found
            start_new_session=True,
        )
        started.append(child)
        return child

    yield start
    for child in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [*psutil.Process(child.pid).children(recursive=True), child]:
                process.kill()
        child.wait(timeout=10)
        assert child.stdout is not None
        child.stdout.close()


def wait_for(what: object, condition, timeout: float = 60.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen within {timeout} s"
        time.sleep(0.02)


def learning(path: Path) -> bool:
    return (path / "metrics.csv").exists() and any(int(row["updates"] or 0) > 0 for row in rows(path))


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGHUP, signal.SIGHUP]])
def test_ctrl_c_once_or_a_closed_terminal_saves_a_checkpoint_and_ends_cleanly(
    tmp_path: Path, command: Callable[..., subprocess.Popen[str]], signals: list[signal.Signals]
):
    """proc-7; a terminal that closes may send its signal twice"""
    path, child = tmp_path / "run", command()
    wait_for("learning", lambda: learning(path))
    for number in signals:
        os.killpg(child.pid, number)  # as a terminal does: to everybody in the foreground
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "stopping: saving a checkpoint" in out
    assert f"millpond train resume={path}" in out
    assert "Traceback" not in out
    told = summary(path)
    assert told["status"] == "interrupted"
    assert told["collected_frames"] == told["written_frames"] > 20
    assert read_checkpoint(Checkpoints(path / "checkpoints").latest())["frames"] == told["collected_frames"]
    assert resume(path, f"total_frames={told['collected_frames'] + 100}").status == "completed"


def test_ctrl_c_does_not_wait_for_a_worker_that_hangs(tmp_path: Path, command: Callable[..., subprocess.Popen[str]]):
    """Its frames are given back, the others' are counted, and the checkpoint is there."""
    hang = ["env.kwargs.fault=hang", f"env.kwargs.while_there={tmp_path}", "env.kwargs.where=millpond worker 0"]
    path, child = tmp_path / "run", command(*hang, "env.kwargs.at=60")
    wait_for("the other's frames", lambda: learning(path) and int(rows(path)[-1]["frames"]) >= 300)
    os.killpg(child.pid, signal.SIGINT)
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 130, out
    told = summary(path)
    assert told["status"] == "interrupted"
    assert told["collected_frames"] == told["written_frames"] >= 300
    assert read_checkpoint(Checkpoints(path / "checkpoints").latest())["frames"] == told["collected_frames"]
    said = (path / "run.log").read_text()
    assert re.search(r"worker 0 \(collecting\), process \d+, has been in step\(\) of 'worlds:Corridor-v0' for", said)


def test_a_worker_that_hangs_is_replaced_after_the_time_that_is_set(tmp_path: Path):
    flag = tmp_path / "flag"
    flag.touch()
    hang = ["env.kwargs.fault=stall", f"env.kwargs.while_there={flag}", "env.kwargs.where=millpond worker"]
    outcome = run(tmp_path / "run", *ASYNC, *hang, "env.kwargs.at=30", "total_frames=400", "collect.stall_timeout=3")
    assert outcome.status == "completed"
    told = summary(tmp_path / "run")
    assert told["collected_frames"] == told["written_frames"] == 400
    assert told["restarts"] <= 1  # 0 where the other worker had the last frames meanwhile


def imports(child: subprocess.Popen[str]) -> bool:
    return "libtorch" in Path(f"/proc/{child.pid}/maps").read_text()


def starts_its_fork_server(child: subprocess.Popen[str]) -> bool:
    return any("forkserver" in " ".join(each.cmdline()) for each in psutil.Process(child.pid).children())


@pytest.mark.parametrize("moment", [imports, starts_its_fork_server])
def test_ctrl_c_in_the_first_seconds_ends_in_one_line_and_leaves_nothing(
    tmp_path: Path, command: Callable[..., subprocess.Popen[str]], moment: Callable[[subprocess.Popen[str]], bool]
):
    child = command()
    wait_for(moment.__name__, lambda: moment(child))
    family = psutil.Process(child.pid).children(recursive=True)
    os.killpg(child.pid, signal.SIGINT)
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "Traceback" not in out
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []
    if (tmp_path / "run").exists():
        assert summary(tmp_path / "run")["status"] == "interrupted"


@pytest.mark.exhaustive
def test_ctrl_c_twice_ends_at_once_and_leaves_the_last_checkpoint(
    tmp_path: Path, command: Callable[..., subprocess.Popen[str]]
):
    """proc-7; the workers hang, so that stopping cleanly would take long"""
    hang = ["env.kwargs.fault=hang", f"env.kwargs.while_there={tmp_path}", "env.kwargs.where=millpond worker"]
    path, child = tmp_path / "run", command(*hang, "env.kwargs.at=60", "checkpoint.interval_frames=40")
    checkpoints = Checkpoints(path / "checkpoints")
    wait_for("a checkpoint", lambda: bool(checkpoints.all()))
    wait_for("the hang", lambda: int(rows(path)[-1]["frames"]) >= 80)
    assert child.stdout is not None
    os.killpg(child.pid, signal.SIGINT)
    while "stopping" not in (line := child.stdout.readline()):
        assert line
    os.killpg(child.pid, signal.SIGINT)
    out, _ = child.communicate(timeout=30)
    assert child.returncode == 130
    assert "Traceback" not in out
    assert summary(path)["status"] == "interrupted"
    read_checkpoint(checkpoints.latest())


def test_nobody_outlives_a_killed_trainer_and_its_run_goes_on_from_a_checkpoint(
    tmp_path: Path, command: Callable[..., subprocess.Popen[str]]
):
    """proc-4"""
    path, child = tmp_path / "run", command("checkpoint.interval_frames=30")
    wait_for("learning, and a checkpoint", lambda: learning(path) and bool(Checkpoints(path / "checkpoints").all()))
    family = psutil.Process(child.pid).children(recursive=True)
    assert len(family) >= 3  # two workers and the evaluator, beside multiprocessing's own helpers
    child.kill()
    child.wait(timeout=10)
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []
    reap()
    saved = read_checkpoint(Checkpoints(path / "checkpoints").latest())["frames"]
    assert resume(path, f"total_frames={saved + 100}", "checkpoint.interval_frames=0").status == "completed"
    told = summary(path)
    assert told["collected_frames"] == told["written_frames"] == saved + 100
