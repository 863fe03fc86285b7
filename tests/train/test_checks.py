from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from millpond.train.checks import Facts, Ratio, failed, run_checks
from millpond.train.exploring import Explored
from millpond.train.stored import Stored

GOOD = Facts(
    total_frames=1000,
    collected_frames=1000,
    written_frames=1000,
    written_items=1000,
    optimizer_steps=900,
    published_version=900,
    newest_version=880,
    learnable_frames=900,
    batch_size=64,
    explored=Explored(rows=100, differing=99, expected=99.5),
    batch_shapes_seen={(64,): 900},
    learned=225 * 64,
    ratio=Ratio(
        samples_per_insert=16.035, learning_starts=100, most_samples_per_insert=16.035, least_learning_starts=100
    ),
    stored=Stored(frames=1000, distinct=1000),
    payload_bytes_through_ray=0,
)


def test_a_good_run_passes_and_says_by_which_numbers():
    checks = run_checks(GOOD)
    assert failed(checks) == []
    assert "900 optimizer steps" in checks["optimizer_ran"].detail


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"optimizer_steps": 0, "published_version": 0}, "optimizer_ran"),
        ({"collected_frames": 999, "written_frames": 999}, "frames_collected"),
        ({"collected_frames": 1001, "written_frames": 1001}, "frames_collected"),
        ({"written_frames": 999}, "frames_written"),
        ({"not_finite": {"loss/q": 400}}, "metrics_finite"),
        ({"published_version": 899}, "weights_published"),
        ({"newest_version": 0}, "policy_reached_replay"),
        ({"batch_shapes_seen": {(64,): 899, (63,): 1}}, "batch_shape"),
        ({"learned": 226 * 64}, "update_ratio"),
        ({"learned": 224 * 64}, "update_ratio"),
        ({"stored": Stored(frames=1000, distinct=999)}, "frames_distinct"),
        ({"stored": Stored(unfit=("action is missing",))}, "field_shapes"),
        ({"payload_bytes_through_ray": 4096}, "payload_beside_ray"),
        ({"explored": Explored(rows=100, differing=0, expected=89.0)}, "policy_explores"),
        ({"explored": Explored(rows=2000, differing=0, expected=50.0)}, "policy_explores"),
        ({"explored": Explored(rows=2000, differing=1000, expected=1900.0)}, "policy_explores"),
    ],
)
def test_each_fault_fails_its_own_check_and_no_other(change: dict[str, Any], name: str):
    checks = run_checks(replace(GOOD, **change))
    assert [line.partition(":")[0] for line in failed(checks)] == [name]


def test_a_run_too_short_for_a_new_policy_to_act_is_not_blamed_for_it():
    assert failed(run_checks(replace(GOOD, newest_version=0, learnable_frames=0))) == []


def test_a_run_that_was_stopped_need_not_have_reached_its_target_but_must_have_counted_right():
    stopped = replace(GOOD, complete=False, collected_frames=10, written_frames=10, optimizer_steps=0, learned=0)
    assert failed(run_checks(replace(stopped, published_version=0, newest_version=0))) == []
    assert failed(run_checks(replace(GOOD, complete=False, written_frames=999))) != []
