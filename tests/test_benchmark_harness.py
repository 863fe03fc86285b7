"""The benchmark harness measures what it says, in turns, and writes it down with the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import harness

ROOT = Path(__file__).parent.parent


@pytest.fixture
def clock(monkeypatch):
    """A clock that only variants move: `clock(name, seconds)` makes one; `seconds` may depend on the call's number."""
    now, calls = [0.0], []
    monkeypatch.setattr(harness.gc, "collect", lambda: 0)  # takes long where many tests have run before
    monkeypatch.setattr(harness.time, "perf_counter", lambda: now[0])

    def variant(name, seconds):
        def call():
            now[0] += seconds(calls.count(name)) if callable(seconds) else seconds
            calls.append(name)

        return call

    variant.calls = calls
    return variant


def test_times_and_ratios_are_those_of_the_variants(clock):
    floor, ours = harness.compare({"floor": clock("floor", 2e-5), "ours": clock("ours", 3e-5)}, rounds=10)
    assert floor.median_s == pytest.approx(2e-5)
    assert (floor.ratio, ours.ratio) == (pytest.approx(1.0), pytest.approx(1.5))
    assert floor.calls_per_round == 1000, "a round fills 0.02 s"


def test_the_ratio_is_taken_within_a_round_so_that_a_slow_machine_cancels_out(clock):
    floor = clock("floor", lambda call: 1.0 * (1, 9)[call % 2])
    ours = clock("ours", lambda call: 2.0 * (1, 9)[call % 2])
    _, result = harness.compare({"floor": floor, "ours": ours}, rounds=20)
    assert result.calls_per_round == 1
    assert result.high_s / result.low_s == pytest.approx(9.0), "the rounds did differ"
    assert result.ratio == pytest.approx(2.0)


def test_variants_take_turns_in_an_order_that_changes(clock):
    harness.compare({name: clock(name, 1.0) for name in "abc"}, rounds=20)
    rounds = [tuple(clock.calls[i : i + 3]) for i in range(6, 66, 3)]  # after 2 calls each to calibrate
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    assert len(set(rounds)) > 1


def test_the_garbage_collector_is_left_as_it_was(clock):
    def fails():
        raise RuntimeError("broken variant")

    with pytest.raises(RuntimeError):
        harness.compare({"fails": fails})
    assert harness.gc.isenabled()


def test_nothing_to_measure_is_refused():
    with pytest.raises(ValueError, match="needs a variant"):
        harness.compare({})


def test_the_report_is_printed_and_written_with_its_machine(tmp_path, capsys):
    rows = [{"items": 256, "variant": "floor", "µs": 16.0}, {"items": 256, "variant": "ours", "µs": 24.5}]
    harness.report("sample", "Sampling", rows, notes="One thread.", folder=tmp_path)
    written = (tmp_path / "sample.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out == written + "\n"
    assert "| items | variant | µs |\n| ---: | --- | ---: |\n| 256 | floor | 16.0 |\n| 256 | ours | 24.5 |" in written
    result = json.loads((tmp_path / "sample.json").read_text(encoding="utf-8"))
    assert result["rows"] == rows
    facts = result["machine"]
    assert {"commit", "processor", "cores", "memory", "python", "torch", "numpy"} <= facts.keys()
    assert "/" not in facts["processor"] + facts["system"], "no folders"


@pytest.mark.parametrize("rows", [[], [{"a": 1}, {"b": 2}]])
def test_rows_that_make_no_table_are_refused_and_nothing_is_written(rows, tmp_path):
    with pytest.raises(ValueError, match="same keys"):
        harness.report("broken", "Broken", rows, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def run(*arguments):
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_the_runner_lists_what_has_a_main_and_refuses_what_it_does_not_know():
    listed = run("--list")
    assert listed.returncode == 0
    assert "harness" not in listed.stdout.split()
    refused = run("no_such_benchmark")
    assert refused.returncode == 2
    assert "no benchmark called no_such_benchmark" in refused.stderr


def test_the_runner_runs_each_and_fails_if_one_fails(tmp_path):
    package = tmp_path / "benchmarks"
    package.mkdir()
    for name in ("__init__.py", "__main__.py"):
        (package / name).write_text((ROOT / "benchmarks" / name).read_text(encoding="utf-8"), encoding="utf-8")
    (package / "bad.py").write_text("def main():\n    raise SystemExit('it broke')\n", encoding="utf-8")
    (package / "good.py").write_text("def main():\n    print('it ran')\n", encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 1
    assert "it ran" in result.stdout
    assert result.stderr.splitlines()[-1] == "failed: bad"
