"""Whole runs with a learner of several ranks: the numbers of one, exact counts, an end that keeps what was learned."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from runs import resume, run, summary

from millpond.shm.directory import reap
from millpond.train.run_state import Checkpoints

RANKS = ["learner.world_size=2", "replay.batch_size=8"]


def weights(path: Path) -> dict[str, torch.Tensor]:
    latest = Checkpoints(path / "checkpoints").latest()
    assert latest is not None
    return torch.load(latest / "algorithm.pt", weights_only=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize("normalized", ["true"])
def test_two_ranks_train_what_one_does(tmp_path: Path, normalized: str):
    """rank-1, of whole synchronous runs"""
    words = ["execution.mode=sync", "collectors=1", f"normalize_observations={normalized}"]
    assert run(tmp_path / "one", *words).status == "completed"
    assert run(tmp_path / "two", *words, *RANKS).status == "completed"
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_a_killed_rank_ends_the_run_with_its_weights_saved(tmp_path: Path):
    path = tmp_path / "run"
    killer = threading.Thread(target=kill_a_rank, args=(path,))
    killer.start()
    outcome = run(path, "execution.mode=async", "collectors=2", *RANKS, "total_frames=100000", "replay.capacity=100000")
    killer.join()
    assert outcome.status == "failed"
    told = summary(path)
    assert told["error_type"] == "WorkerFailed"
    assert "rank 1 of 2 was killed by signal 9" in told["error"]
    assert told["optimizer_steps"] > 0
    frames = told["collected_frames"]
    again = resume(path, f"total_frames={frames + 50}")
    assert again.status == "completed"
    assert summary(path)["collected_frames"] == summary(path)["written_frames"] == frames + 50
    reap()


def kill_a_rank(path: Path) -> None:
    """Once the run has learned something."""
    deadline = time.monotonic() + 100
    metrics = path / "metrics.csv"
    while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count("\n") > 2):
        time.sleep(0.05)
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # one that ends by itself
            if "millpond.learn.rank" in " ".join(process.cmdline()):
                os.kill(process.pid, signal.SIGKILL)
