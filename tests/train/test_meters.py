from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from tensordict import TensorDict

from millpond.core.spec import BoxAction, DiscreteAction, EnvSpec
from millpond.train.machine import MemoryMeter, command_line, versions
from millpond.train.meters import RateMeter, SlidingRates, UpdateMeter, action_statistics, replay_row

SPEC = EnvSpec.vector(3, action=BoxAction((-2.0, -1.0), (2.0, 3.0)))


def batch(actions: list[list[float]], versions: list[int]) -> TensorDict:
    data = {"action": torch.tensor(actions), "policy_version": torch.tensor(versions)[:, None]}
    return TensorDict(data, batch_size=[len(actions)])


def test_means_over_the_updates_since_the_last_row():
    meter = UpdateMeter(SPEC)
    for loss in (1.0, 2.0, 6.0):
        meter.saw(batch([[0.0, 0.0]], [0]), {"loss/a": torch.tensor(loss), "td_error": torch.ones(1)})
    row = meter.row(steps=3)
    assert row["loss/a"] == 3.0
    assert "td_error" not in row
    assert meter.row(steps=3) == {}
    meter.saw(batch([[0.0, 0.0]], [0]), {"loss/a": torch.tensor(10.0)})
    assert meter.row(steps=4)["loss/a"] == 10.0


def test_what_only_some_updates_tell_is_a_mean_over_those():
    """Such as the loss of an actor that every second update trains; also across a checkpoint."""
    meter = UpdateMeter(SPEC)
    for number in range(4):
        own = {"loss/actor": torch.tensor(8.0)} if number % 2 else {}
        meter.saw(batch([[0.0, 0.0]], [0]), {"loss/critic": torch.tensor(2.0), **own})
    again = UpdateMeter(SPEC)
    again.load_state_dict(meter.state_dict())
    for one in (meter, again):
        row = one.row(steps=4)
        assert (row["loss/critic"], row["loss/actor"]) == (2.0, 8.0)


def test_the_algorithms_own_tensors_are_left_alone():
    meter, loss = UpdateMeter(SPEC), torch.tensor(1.0)
    for _ in range(2):
        meter.saw(batch([[0.0, 0.0]], [0]), {"loss/a": loss})
    assert loss.item() == 1.0


def test_what_batches_tell_of_the_collectors():
    meter = UpdateMeter(SPEC)
    meter.saw(batch([[2.0, 1.0], [-2.0, 1.0]], [10, 30]), {})
    row = meter.row(steps=50)
    assert row["lag/policy_version"] == 30.0
    assert row["replay/action_std"] == pytest.approx(1.0)  # 2 in one dimension, 0 in the other
    assert row["replay/action_absmax"] == 2.0
    assert row["replay/action_saturation"] == 0.5
    assert meter.newest_version == 30
    assert meter.batch_shapes == {(2,): 1}


def test_a_choice_has_no_bounds_to_saturate():
    spec = EnvSpec.vector(3, action=DiscreteAction(4))
    assert set(action_statistics(torch.tensor([0, 3]), spec)) == {"replay/action_std", "replay/action_absmax"}


def test_rates_are_of_the_time_since_the_last_row():
    now = 10.0
    meter = RateMeter(frames=100, updates=5, clock=lambda: now)
    assert meter.row(frames=100, updates=5) == {}
    now = 12.0
    assert meter.row(frames=300, updates=5) == {"throughput/frames_per_s": 100, "throughput/updates_per_s": 0}
    now = 13.0
    assert meter.row(frames=300, updates=15)["throughput/updates_per_s"] == 10


def test_what_a_person_reads_follows_the_last_ten_seconds():
    now = 0.0
    rates = SlidingRates(window_s=10, clock=lambda: now)
    assert rates(frames=0, updates=0) is None
    for second in range(1, 31):  # slow at first, then fast
        now = float(second)
        shown = rates(frames=second if second <= 15 else 15 + 100 * (second - 15), updates=second)
    assert shown == (100.0, 1.0)


def test_the_measured_ratio_counts_what_came_after_learning_started():
    stats = {"size": 300, "write_count": 300, "samples_returned": 1600, "producer_blocks": 1, "consumer_blocks": 2}
    assert replay_row(stats, learning_starts=100)["replay/samples_per_insert"] == 8
    assert "replay/samples_per_insert" not in replay_row(stats, learning_starts=300)


def test_memory_of_children_counts_and_the_dead_do_not():
    meter = MemoryMeter()
    alone = meter.look([])
    assert alone > 20
    script = "import sys; held = b'x' * 200_000_000; print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        together = meter.look([child.pid])
        child.communicate()
    assert together > alone + 150
    assert meter.look([child.pid]) == together


def test_where_a_run_took_place():
    assert versions()["torch"] == torch.__version__
    assert command_line(["/somewhere/bin/millpond", "train", "run_dir=a b"]) == "millpond train 'run_dir=a b'"
