"""``millpond suite``: real runs in fresh processes; those that fail, hang or are interrupted do not stop the rest."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from millpond.cli import main
from millpond.core.errors import InvalidArgument
from millpond.suite.page import render
from millpond.suite.plan import plan_suite
from millpond.suite.process import MARK
from millpond.suite.record import FAILED, PASSED, TIMEOUT, RunRecord, SuiteRecord
from millpond.suite.table import LiveTable, Moment, PlainTable, cells_of
from tests.train.runs import SMALL

TEST = "MILLPOND_TEST"  # in the environment of all that a test starts: whose it is
WORLDS = Path(__file__).parent.parent / "train"
SYNC = ["execution.mode=sync", "collectors=1"]


@pytest.fixture(autouse=True)
def worlds_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(TEST, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(WORLDS), *sys.path]))


def suite(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "suite.json").read_text())
    return found


def marked() -> list[int]:
    """The processes that belong to a run of a suite of this test; others may have theirs at the same time."""
    found = []
    for process in psutil.process_iter():
        try:
            around = process.environ()
            if MARK in around and around.get(TEST) == os.environ[TEST] and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
    return found


def test_a_run_that_fails_is_recorded_and_the_next_one_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    path = tmp_path / "s"
    code = main(["suite", "mode=full", "algorithm=dqn,sac", f"suite_dir={path}", *SMALL, *SYNC])
    told = suite(path)
    assert (code, told["status"], told["counts"]["passed"], told["counts"]["failed"]) == (1, "failed", 1, 1)
    dqn, sac = told["runs"]
    assert (dqn["name"], dqn["status"], dqn["exit_code"]) == ("default-dqn-local", "failed", 2)
    assert "Discrete" in dqn["problem"] or "discrete" in dqn["problem"]  # the last line that it said
    assert (sac["name"], sac["status"], sac["exit_code"], sac["problem"]) == ("default-sac-local", "passed", 0, None)
    assert sac["checks"]["processes_ended"]["ok"]
    assert sac["checks"]["frames_distinct"]["detail"].startswith("120 different ones")
    assert len(sac["checks"]) >= 14
    assert (sac["summary"]["collected_frames"], sac["summary"]["status"]) == (120, "completed")
    page = (path / "suite.html").read_text()
    assert 'href="default-sac-local/report.html"' in page
    assert (path / "default-sac-local" / "report.html").is_file()
    said = capfd.readouterr()
    assert "default-dqn-local: failed after" in said.err
    assert "suite failed: 1 passed, 1 failed of 2" in said.out
    assert main(["suite", f"resume={path}"]) == 1  # nothing is left to do, and the answer is the same
    assert suite(path)["runs"] == told["runs"]


def test_a_run_that_hangs_is_killed_at_its_limit_with_its_children(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    path = tmp_path / "s"
    hang = ["env.kwargs.fault=hang", f"env.kwargs.while_there={path}", "env.kwargs.at=30"]
    began = time.monotonic()
    code = main(["suite", "mode=full", "algorithm=sac", f"suite_dir={path}", "timeout=12", *SMALL, *hang])
    told = suite(path)["runs"][0]
    assert (code, told["status"], told["problem"]) == (1, "timeout", "not done after 12 s, and killed")
    assert told["wall_s"] >= 12
    assert time.monotonic() - began < 100
    assert marked() == []
    assert "not done after 12 s" in capfd.readouterr().out


@pytest.mark.timeout(400)  # four processes begin, each of which imports for as long as the machine takes
def test_ctrl_c_ends_the_run_and_resume_does_what_is_not_done(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    path = tmp_path / "s"
    metrics = path / "default-td3-local" / "metrics.csv"
    slow = ["env.kwargs.fault=slow", f"env.kwargs.while_there={metrics.parent}"]

    def press_ctrl_c() -> None:
        deadline = time.monotonic() + 100
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
            if time.monotonic() > deadline:
                return
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    presses = threading.Thread(target=press_ctrl_c)
    presses.start()
    code = main(["suite", "mode=full", "algorithm=td3,sac", f"suite_dir={path}", *SMALL, *SYNC, *slow])
    presses.join()
    assert code == 130
    said = capfd.readouterr()
    assert "stopping" in said.err
    assert f"continue  millpond suite resume={path}" in said.out
    before = suite(path)
    assert [run["status"] for run in before["runs"]] == ["interrupted", "waiting"]
    assert (before["status"], before["counts"]["waiting"]) == ("interrupted", 1)
    assert "interrupted" in (path / "suite.html").read_text()
    assert marked() == []
    assert main(["suite", f"resume={path}"]) == 0
    after = suite(path)
    assert [run["status"] for run in after["runs"]] == ["passed"] * 2
    assert after["runs"][0]["command"] == f"millpond train resume={metrics.parent}"  # from its checkpoint
    assert after["runs"][0]["summary"]["collected_frames"] == 120
    assert after["wall_s"] > before["wall_s"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mode=fast"], "mode must be smoke, full, all"),
        (["algorithm=ppo"], "algorithm must be all, or one or more of ddpg,dqn,sac,td3; got 'ppo'"),
        (["execution=cloud"], "execution must be all, or one or more of"),
        (["timeout=0"], "timeout must be a number of seconds above 0"),
        (["dry_run=perhaps"], "dry_run must be true or false"),
        (["smoke"], "'smoke' is no setting: write name=value"),
        (["run_dir=x"], "a suite chooses the run_dir of each run"),
        (["profile=demo"], "a suite chooses the profile of each run"),
        (["mode=full", "replay.capacty=5"], "default-ddpg-local: .*capacity"),
        (["mode=full", "replay.batch_size=0"], "default-ddpg-local: replay.batch_size must be at least 1"),
        (["resume=x", "seed=3"], "only timeout= and dry_run= can stand beside it"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(words: list[str], message: str):
    with pytest.raises(InvalidArgument, match=message):
        plan_suite(words)


def test_what_a_suite_consists_of():
    plan = plan_suite(["mode=full", "algorithm=td3,sac,td3", "seed=5", "timeout=30"])
    assert [run.name for run in plan.runs] == ["default-td3-local", "default-sac-local"]
    assert plan.runs[0].words == ("profile=default", "algorithm=td3", "execution=local", "seed=5")
    assert [run.timeout_s for run in plan.runs] == [30.0, 30.0]
    assert plan.directory.parent == Path("runs")


def test_a_dry_run_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "s"
    assert main(["suite", "mode=full", f"suite_dir={path}", "dry_run=true", "algorithm=sac"]) == 0
    assert "default-sac-local (14400 s): millpond train profile=default algorithm=sac" in capsys.readouterr().out
    assert not path.exists()


def test_a_directory_that_is_no_suite_or_is_taken_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["suite", f"resume={tmp_path}"]) == 2
    assert "holds no suite that can be gone on with" in capsys.readouterr().err
    (tmp_path / "suite.json").write_text('{"format": 99}')
    assert main(["suite", f"resume={tmp_path}"]) == 2
    assert main(["suite", "mode=full", f"suite_dir={tmp_path}"]) == 2
    assert "is not empty: choose another" in capsys.readouterr().err


def record() -> SuiteRecord:
    checks = {"a": {"ok": True, "detail": "fine"}, "b": {"ok": False, "detail": "3 < 4 & so"}}
    good = RunRecord("one", [], 300, PASSED, "millpond train", "one", 0, 41.0, None, {"a": checks["a"]})
    bad = RunRecord("two", [], 300, FAILED, "millpond train", "two", 1, 3.0, "b: 3 < 4 & so", checks)
    late = RunRecord("three", [], 300, TIMEOUT, "millpond train", "three", -9, 300.0, "not done")
    good.summary = {"collected_frames": 1500, "optimizer_steps": 1200, "eval_return_last": -8.5}
    return SuiteRecord(Path("x"), "smoke", "millpond suite", [good, bad, late, RunRecord("four", [], 300)])


def test_the_page_has_each_check_of_each_run():
    page = render(record())
    assert page.count("✓ ok") == 4
    assert page.count("✗ failed") == 2
    assert "3 &lt; 4 &amp; so" in page
    assert "3 < 4" not in page


def test_plain_lines_and_the_live_table_say_the_same(monkeypatch: pytest.MonkeyPatch):
    told, plain, live = record(), io.StringIO(), io.StringIO()
    table = PlainTable(plain)
    for run in told.runs[:3]:
        table.end(run)
    assert plain.getvalue().splitlines() == [
        "one: passed after 41.0 s, 1,500 frames, 1,200 updates, checks 1 of 1 ok",
        "two: failed after 3.0 s, – frames, – updates, checks 1 of 2 ok: b: 3 < 4 & so",
        "three: timeout after 5 min 00 s, – frames, – updates, checks –: not done",
    ]
    monkeypatch.setenv("COLUMNS", "120")
    shown = LiveTable(told, live)
    shown.show(told.runs[3], Moment(7.0, 640, 320, 1.5))
    shown.close(told)
    text = live.getvalue()
    for run in told.runs:
        assert run.name in text
    assert "1 of 2 ok" in text
    assert cells_of(told.runs[3], Moment(7.0, 640, 320, 1.5))["time"] == "7.0 s"
