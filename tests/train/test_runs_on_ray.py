"""Whole runs on Ray: real actors, which are killed; exact counts, and nothing of the run left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from runs import SMALL, resume, run, summary

from millpond.core.errors import InvalidArgument
from millpond.train.compose import settings_from_overrides

PATIENCE_S = 150.0
ON_RAY = ["execution=ray", "replay.capacity=100000"]
LONG = "total_frames=100000"
ACTORS = ("ray::CollectActor", "ray::_RankActor", "ray::ReplayActor")


def actors(*names: str) -> list[psutil.Process]:
    """The processes of actors of these classes, below this one."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith(names or ACTORS):
                found.append(process)
    return found


def once_it_learns(path: Path, act: Callable[[], None]) -> threading.Thread:
    """Do it in a thread when the run at ``path`` has written rows of metrics."""

    def wait() -> None:
        end, metrics = time.monotonic() + PATIENCE_S, path / "metrics.csv"
        while time.monotonic() < end and not (metrics.exists() and metrics.read_text().count("\n") > 2):
            time.sleep(0.05)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def kill_one(name: str) -> None:
    victims = actors(name)
    if victims:
        os.kill(max(victims, key=psutil.Process.create_time).pid, signal.SIGKILL)  # not one that another test has left


@pytest.fixture
def no_actor_stays(ray_session: str) -> Iterator[None]:
    before = actors()  # of other tests
    yield
    end = time.monotonic() + 30
    while left := [each for each in actors() if each not in before]:
        assert time.monotonic() < end, left
        time.sleep(0.05)


@pytest.mark.timeout(400)
def test_a_killed_collector_is_replaced_and_every_frame_counts_once(no_actor_stays: None, tmp_path: Path) -> None:
    path = tmp_path / "run"
    killer = once_it_learns(path, lambda: kill_one("ray::CollectActor"))
    outcome = run(path, *ON_RAY, "replay.transport=gloo", "total_frames=3000")
    killer.join()
    assert outcome.status == "completed", outcome.problem
    told = summary(path)
    assert told["restarts"] >= 1
    assert told["collected_frames"] == told["written_frames"] == told["write_count"] == 3000
    assert told["published_version"] == told["optimizer_steps"] == 2980
    assert all(check["ok"] for check in told["checks"].values()), told["checks"]
    assert told["checks"]["payload_beside_ray"]["detail"].startswith("0 bytes")


@pytest.mark.timeout(400)
def test_a_killed_rank_ends_the_run_and_another_goes_on(no_actor_stays: None, tmp_path: Path) -> None:
    path = tmp_path / "run"
    killer = once_it_learns(path, lambda: kill_one("ray::_RankActor"))
    outcome = run(path, *ON_RAY, "learner.world_size=2", LONG)
    killer.join()
    assert outcome.status == "failed"
    told = summary(path)
    assert told["error_type"] == "WorkerFailed"
    assert "rank 1 of 2 died" in told["error"]
    frames = told["collected_frames"]
    again = resume(path, f"total_frames={frames + 50}")
    assert again.status == "completed", again.problem
    assert summary(path)["collected_frames"] == summary(path)["written_frames"] == frames + 50


@pytest.mark.timeout(400)
def test_a_killed_replay_ends_the_run_naming_it(no_actor_stays: None, tmp_path: Path) -> None:
    path = tmp_path / "run"
    killer = once_it_learns(path, lambda: kill_one("ray::ReplayActor"))
    outcome = run(path, *ON_RAY, "replay.transport=gloo", LONG)
    killer.join()
    assert outcome.status == "failed"
    assert summary(path)["error_type"] == "PeerLost"
    assert "replay" in summary(path)["error"]


@pytest.mark.timeout(400)
def test_payload_through_ray_is_counted_where_it_is_meant_to_be_and_elsewhere(
    no_actor_stays: None, tmp_path: Path
) -> None:
    outcome = run(tmp_path / "run", *ON_RAY, "replay.transport=ray", "total_frames=300")
    assert outcome.status == "completed", outcome.problem
    assert "the settings want" in outcome.checks["payload_beside_ray"].detail


@pytest.mark.ray
@pytest.mark.timeout(400)
def test_a_run_that_starts_ray_ends_it_also_after_ctrl_c_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "millpond.cli", "train"]
    words = [*SMALL, *ON_RAY, LONG, f"run_dir={path}"]
    with subprocess.Popen([*command, *words], env=environment, start_new_session=True) as process:
        family: dict[int, psutil.Process] = {}
        end = time.monotonic() + PATIENCE_S
        metrics = path / "metrics.csv"
        while time.monotonic() < end and not (metrics.exists() and metrics.read_text().count("\n") > 2):
            assert process.poll() is None
            time.sleep(0.05)
        family = {one.pid: one for one in psutil.Process(process.pid).children(recursive=True)}
        assert len(family) > 4  # Ray's, and the actors
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: everybody hears it
        assert process.wait(PATIENCE_S) == 130
    _, alive = psutil.wait_procs(list(family.values()), timeout=30)
    assert not alive
    told = summary(path)
    assert told["collected_frames"] == told["written_frames"] == told["write_count"] > 0
    assert told["checks"]["clean_shutdown"]["ok"], told["checks"]
    frames = told["collected_frames"] + 50
    done = subprocess.run([*command, f"resume={path}", f"total_frames={frames}"], env=environment, timeout=PATIENCE_S)
    assert done.returncode == 0
    assert summary(path)["collected_frames"] == summary(path)["written_frames"] == frames


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["execution=ray", "execution.mode=sync"], "execution.mode=sync"),
        (["execution=ray", "normalize_observations=true"], "normalize_observations"),
        (["execution=ray", "replay.path=somewhere"], "replay.path"),
        (["execution=ray", "execution.learner.num_gpus=1"], "learner.world_size=1"),
        (["execution=ray", "execution.collector.num_cpus=-1"], "execution.collector: num_cpus"),
        (["execution=ray", "replay.transport=nccl"], "replay.transport"),
        (["execution=local", "replay.transport=gloo"], "replay.transport"),
        (["execution=local", "execution.address=auto"], "execution.address"),
    ],
)
def test_what_an_execution_does_not_use_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        settings_from_overrides(words)
