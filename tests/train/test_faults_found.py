"""Each check fails a real run in which its part is broken, and no allowed setting fails one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import faults
import pytest
from runs import resume, run, summary

from millpond.train import run as run_module
from millpond.train.assembly import Parts
from millpond.train.evaluator import Evaluator
from millpond.train.leftovers import left_behind

SYNC = ("execution.mode=sync", "collectors=1")
ASYNC = ("execution.mode=async", "collectors=2")
Patch = pytest.MonkeyPatch


@pytest.mark.parametrize(
    ("fault", "checks"),
    [
        (faults.never_published, ["weights_published", "policy_reached_replay"]),
        (faults.published_at_the_end_only, ["policy_reached_replay"]),
        (faults.a_loss_is_nan, ["metrics_finite"]),
        (faults.replay_drops_a_row, ["frames_written"]),
        (faults.replay_repeats_a_row, ["frames_distinct"]),
        (faults.a_batch_is_short, ["batch_shape"]),
        (faults.a_batch_has_time, ["batch_shape"]),
        (faults.too_many_updates, ["update_ratio"]),
        (faults.too_few_updates, ["update_ratio"]),
        (faults.another_type_of_field, ["field_shapes"]),
        (faults.a_budget_below_the_target, ["frames_collected"]),
    ],
)
def test_each_fault_fails_the_run_with_its_check(
    tmp_path: Path, monkeypatch: Patch, fault: Callable[[Patch], None], checks: list[str]
):
    fault(monkeypatch)
    words = ["algorithm=dqn", "env.kwargs.discrete=true", "collect.frames_per_batch=4"]
    outcome = run(tmp_path / "run", *SYNC, *words)
    assert (outcome.status, outcome.exit_code) == ("failed", 1)
    told = summary(tmp_path / "run")
    assert [name for name, check in told["checks"].items() if not check["ok"]] == checks
    assert told["error_type"] == "RunFailed"
    assert checks[0] in told["error"]


@pytest.fixture
def open_evaluators(monkeypatch: Patch) -> Iterator[list[Evaluator]]:
    """Evaluators that are not closed before the test ends."""
    opened: list[Evaluator] = []
    close = Evaluator.close
    monkeypatch.setattr(Evaluator, "close", lambda evaluator: opened.append(evaluator))
    yield opened
    for evaluator in opened:
        close(evaluator)


def test_a_process_that_is_left_fails_the_run(tmp_path: Path, monkeypatch: Patch, open_evaluators: list[Evaluator]):
    monkeypatch.setattr(run_module, "left_behind", functools.partial(left_behind, grace_s=0.2))
    outcome = run(tmp_path / "run", *SYNC)
    assert (outcome.status, list(outcome.checks)[-1]) == ("failed", "clean_shutdown")
    assert outcome.problem is not None
    assert f"clean_shutdown: left behind: process {open_evaluators[0].pid} (" in outcome.problem
    assert "shared memory " in summary(tmp_path / "run")["error"]  # its weight board


def test_memory_that_cannot_be_closed_fails_the_run(tmp_path: Path, monkeypatch: Patch):
    close, calls = Parts.close, iter(range(10))

    def fails_once(parts: Parts) -> None:
        close(parts)
        if next(calls) == 0:
            raise OSError("the device is gone")

    monkeypatch.setattr(Parts, "close", fails_once)
    outcome = run(tmp_path / "run", *SYNC)
    assert outcome.problem is not None
    assert "clean_shutdown: left behind: what was not closed: OSError: the device is gone" in outcome.problem


@pytest.mark.parametrize(
    "words",
    [
        [*SYNC, "replay.batch_size=1"],
        [*SYNC, "replay.samples_per_insert=0.3", "collect.frames_per_batch=40"],
        [*SYNC, "total_frames=21"],
        [*SYNC, "learner.publish_interval=100000"],
        [*SYNC, "replay.capacity=20"],
        [*SYNC, "algorithm=dqn", "env.kwargs.discrete=true", "env.kwargs.choices=1"],
        [*SYNC, "total_frames=61", "envs_per_collector=7", "env.kwargs.length=3"],
        [*ASYNC, "algorithm=td3", "replay.capacity=50", "envs_per_collector=3"],
        [*ASYNC, "total_frames=21", "replay.batch_size=1", "replay.samples_per_insert=1"],
        [*ASYNC, "algorithm=ddpg", "learner.publish_interval=7", "normalize_observations=true"],
        [*ASYNC, "learner.world_size=2"],
    ],
)
def test_no_allowed_setting_fails_one(tmp_path: Path, words: list[str]):
    outcome = run(tmp_path / "run", *words)
    assert (outcome.problem, outcome.status) == (None, "completed")
    assert all(check["ok"] for check in summary(tmp_path / "run")["checks"].values())


@pytest.mark.parametrize(
    "words",
    [
        ["replay.samples_per_insert=2"],
        ["replay.samples_per_insert=24"],
        ["replay.batch_size=16", "replay.samples_per_insert=8"],
        ["replay.batch_size=3"],
        ["replay.learning_starts=5"],
        ["replay.learning_starts=200", "total_frames=300"],
    ],
)
def test_a_run_that_goes_on_with_other_sizes_passes(tmp_path: Path, words: list[str]):
    assert run(tmp_path / "run", *SYNC).status == "completed"
    outcome = resume(tmp_path / "run", "total_frames=240", *words)
    assert (outcome.problem, outcome.status) == (None, "completed")


def test_a_run_that_goes_on_after_a_failed_update_passes(tmp_path: Path, monkeypatch: Patch):
    """The batch of the update that failed was drawn, and is not learned from."""
    with monkeypatch.context() as patch:
        faults.change_one_sample(patch, lambda batch: batch.select("action"))
        assert run(tmp_path / "run", *SYNC).status == "failed"
    outcome = resume(tmp_path / "run")
    assert (outcome.problem, outcome.status) == (None, "completed")
