from __future__ import annotations

import math
from pathlib import Path

import pytest

from millpond.train.loggers import EventsFile, Loggers, MetricsFile, format_number, read_metrics


def test_columns_are_stable_and_absent_values_are_empty(tmp_path: Path):
    file = MetricsFile(tmp_path / "metrics.csv", ("loss/a", "eval/b"))
    file.write(10, {"updates": 1, "wall_s": 0.5, "loss/a": 0.25})
    file.write(20, {"updates": 2, "wall_s": 1.0, "eval/b": -3})
    file.close()
    assert (tmp_path / "metrics.csv").read_text() == (
        "frames,updates,wall_s,loss/a,eval/b\n10,1,0.5,0.25,\n20,2,1,,-3\n"
    )


def test_a_new_metric_becomes_the_last_column_and_loses_no_row(tmp_path: Path):
    file = MetricsFile(tmp_path / "metrics.csv", ("loss/a",))
    file.write(10, {"loss/a": 1})
    file.write(20, {"loss/a": 2, "loss/new": 0.125})
    file.write(30, {"loss/new": 3})
    file.close()
    columns, rows = read_metrics(tmp_path / "metrics.csv")
    assert columns == ["frames", "updates", "wall_s", "loss/a", "loss/new"]
    assert [(row["frames"], row["loss/a"], row["loss/new"]) for row in rows] == [
        ("10", "1", ""),
        ("20", "2", "0.125"),
        ("30", "", "3"),
    ]


def test_every_row_is_on_disk_when_write_returns(tmp_path: Path):
    file = MetricsFile(tmp_path / "metrics.csv", ())
    file.write(10, {"updates": 4})
    assert len(read_metrics(tmp_path / "metrics.csv")[1]) == 1
    file.close()


def test_a_resumed_run_drops_the_rows_that_it_will_report_again(tmp_path: Path):
    file = MetricsFile(tmp_path / "metrics.csv", ("loss/a",))
    for frames in (10, 20, 30):
        file.write(frames, {"loss/a": frames, "loss/own": 1})
    file.close()
    again = MetricsFile(tmp_path / "metrics.csv", ("loss/a",), after_frames=20)
    again.write(30, {"loss/a": 31})
    again.close()
    columns, rows = read_metrics(tmp_path / "metrics.csv")
    assert [row["loss/a"] for row in rows] == ["10", "20", "31"]
    assert columns[-1] == "loss/own"


def test_a_row_cut_short_by_a_kill_is_left_out(tmp_path: Path):
    path = tmp_path / "metrics.csv"
    file = MetricsFile(path, ("loss/a",))
    file.write(10, {"loss/a": 1})
    file.close()
    path.write_text(path.read_text() + "20,3")
    assert [row["frames"] for row in read_metrics(path)[1]] == ["10"]


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-300, 123456789.123, -0.5, 2.0**60, 7, 0])
def test_numbers_read_back_exactly(value: float):
    assert float(format_number(value)) == value


def test_what_is_not_finite_is_remembered_by_name_and_first_frame_and_not_passed_on(tmp_path: Path):
    loggers = Loggers([MetricsFile(tmp_path / "metrics.csv", ("loss/a", "loss/b"))])
    loggers.write(10, {"loss/a": 1.0, "loss/b": 2.0})
    loggers.write(20, {"loss/a": math.nan, "loss/b": math.inf})
    loggers.write(30, {"loss/a": math.nan})
    loggers.close()
    assert loggers.not_finite == {"loss/a": 20, "loss/b": 20}
    assert "nan" not in (tmp_path / "metrics.csv").read_text()


def test_tensorboard_reads_the_events(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventsFile(tmp_path)
    events.write(10, {"updates": 1, "loss/a": 0.5})
    events.write(20, {"updates": 2, "loss/a": 0.25})
    events.close()
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    assert accumulator.Tags()["scalars"] == ["loss/a"]
    assert [(event.step, event.value) for event in accumulator.Scalars("loss/a")] == [(10, 0.5), (20, 0.25)]
