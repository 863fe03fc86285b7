"""Runs of a suite in which one part is broken: each fails with the check of that part, and the suite goes on."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from test_suite import SYNC, TEST, WORLDS, marked, suite

from millpond.suite.plan import Plan, Planned
from millpond.suite.record import INTERRUPTED, SuiteRecord
from millpond.suite.running import run_suite
from millpond.suite.table import PlainTable
from millpond.train.supervise import StopSignal
from tests.train.runs import SMALL

FAULTY = Path(__file__).parent / "faulty"
FAULTS = {  # of tests/train/faults.py, with the checks that find each
    "collectors_do_not_explore": ["policy_explores"],
    "never_published": ["weights_published", "policy_reached_replay"],
    "a_loss_is_nan": ["metrics_finite"],
    "replay_drops_a_row": ["frames_written"],
    "a_batch_has_time": ["batch_shape"],
    "nothing": [],
}


@pytest.fixture(autouse=True)
def faults_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(TEST, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAULTY), str(WORLDS), *sys.path]))


def planned(path: Path, *names: str, more: Sequence[str] = ()) -> SuiteRecord:
    runs = tuple(Planned(name, ("algorithm=td3", *SMALL, *SYNC, *more), 120.0) for name in names)
    return SuiteRecord.new(Plan("faulty", path, runs, False, None, False), command="a suite of broken runs")


def run_all(record: SuiteRecord) -> None:
    with StopSignal(say=lambda text: None) as stop:
        run_suite(record, table=PlainTable(sys.stderr), stop=stop)


@pytest.mark.timeout(400)  # six processes begin, each of which imports for as long as the machine takes
def test_each_fault_fails_its_run_with_its_check_and_the_others_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    path = tmp_path / "s"
    run_all(planned(path, *FAULTS, more=["collect.frames_per_batch=4", "replay.learning_starts=60"]))
    told = suite(path)
    assert (told["status"], told["counts"]["failed"], told["counts"]["passed"]) == ("failed", 5, 1)
    for run, checks in zip(told["runs"], FAULTS.values(), strict=True):
        broken = [name for name, check in run["checks"].items() if not check["ok"]]
        assert (run["name"], broken, run["exit_code"]) == (run["name"], checks, 1 if checks else 0)
        assert run["status"] == ("failed" if checks else "passed")
        assert (run["problem"] or "").startswith(f"{checks[0]}: " if checks else "")
    page = (path / "suite.html").read_text()
    assert page.count("✗ failed") == 2 * sum(map(len, FAULTS.values()))
    assert "a_batch_has_time: failed after" in capfd.readouterr().err
    assert marked() == []


@pytest.mark.timeout(400)
def test_a_run_has_passed_only_where_it_says_so_itself(tmp_path: Path):
    """Not one that ends without a word, nor one whose earlier part did."""
    path = tmp_path / "s"
    record = planned(path, "ends_at_once", "cannot_begin", "ends_when_resumed")
    (path / "cannot_begin.log").mkdir()
    run_all(record)
    assert [run["status"] for run in suite(path)["runs"]] == ["failed", "failed", "passed"]
    record = SuiteRecord.open(path)
    record.runs[2].status = INTERRUPTED
    run_all(record)
    silent, unable, ended = suite(path)["runs"]
    assert silent["problem"] == "exit code 0, without a summary: it said nothing"
    assert unable["problem"].startswith("it could not be started: [Errno 21] Is a directory")
    assert ended["command"] == f"millpond train resume={path / 'ends_when_resumed'}"
    assert (ended["status"], ended["exit_code"], ended["summary"]) == ("failed", 7, {})
    assert ended["problem"].startswith("exit code 7, without a summary: ")
    assert list(ended["checks"]) == ["processes_ended"]


def test_a_run_that_was_stopped_and_has_failed_is_not_done_again(tmp_path: Path):
    path = tmp_path / "s"
    metrics = path / "never_published" / "metrics.csv"
    slow = ["env.kwargs.fault=slow", f"env.kwargs.while_there={metrics.parent}", "total_frames=100000"]
    record = planned(path, "never_published", more=slow)

    def stop_it(stop: StopSignal) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count("\n") > 3):
            time.sleep(0.1)
        stop.request()

    with StopSignal(say=lambda text: None) as stop:
        stops = threading.Thread(target=stop_it, args=(stop,))
        stops.start()
        run_suite(record, table=PlainTable(sys.stderr), stop=stop)
        stops.join()
    run = suite(path)["runs"][0]
    assert (run["status"], run["exit_code"]) == ("failed", 1)
    assert run["problem"].startswith("weights_published: ")
