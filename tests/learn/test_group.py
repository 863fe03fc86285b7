"""Several ranks learn what one process learns, step together or not at all, and end together when one of them fails."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from millpond import Flow, ReplayBuffer
from millpond.core.errors import BufferClosed, InvalidArgument, InvalidType, NonFinite, WorkerFailed
from millpond.learn.group import LearnerGroup
from millpond.learn.learner import Learner
from millpond.replay import NStep, PrioritizedSampler, RandomSampler, SamplerWithoutReplacement
from millpond.shm import identity
from millpond.shm.directory import reap
from tests.algos.batches import NAMES, batch_for, make, snapshot
from tests.alike import usually

ENDS_S = 10.0  # within which one failing rank ends the group


def made(name: str, device: str) -> Any:
    assert device == "cpu"
    return make(name)


def group_of(algorithm: Any, name: str, world_size: int, batch_size: int = 48, **options: Any) -> LearnerGroup:
    return LearnerGroup(
        algorithm, functools.partial(made, name), world_size=world_size, batch_size=batch_size, **options
    )


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of any state tensor, relative to the largest value in it."""
    assert one.keys() == other.keys()
    tensors = [key for key in one if one[key].is_floating_point()]
    return max(float((one[k] - other[k]).abs().max() / (one[k].abs().max() + 1e-12)) for k in tensors)


@pytest.mark.parametrize("name", usually(NAMES, "sac", "dqn"))
def test_two_ranks_learn_what_one_process_learns(name: str) -> None:
    """Case rank-1: 50 updates, each of two halves, against 50 of the whole batches."""
    alone, together = make(name), make(name)
    with group_of(together, name, 2) as group:
        for step in range(50):
            batch = batch_for(name, 48, seed=step)
            alone.advance(step)
            expected = alone.update(batch.clone())
            group.advance(step)
            metrics = group.update(batch)
            assert metrics.keys() == expected.keys()
            for key, value in expected.items():
                torch.testing.assert_close(metrics[key], value, rtol=1e-3, atol=1e-4)
        assert len(group.timings) == 2
    assert furthest(snapshot(alone), snapshot(together)) <= 1e-5


@pytest.mark.parametrize("world_size", usually([3, 4], 3))
def test_more_ranks_learn_the_same(world_size: int) -> None:
    alone, together = make("sac"), make("sac")
    with group_of(together, "sac", world_size) as group:
        for step in range(50):
            batch = batch_for("sac", 48, seed=step)
            alone.update(batch.clone())
            group.update(batch)
    assert furthest(snapshot(alone), snapshot(together)) <= 1e-5


SAMPLERS = {
    "uniform": RandomSampler,
    "prioritized": PrioritizedSampler,
    "without_replacement": functools.partial(SamplerWithoutReplacement, drop_last=True),
    "n_step": functools.partial(NStep, 3, 0.99),
}


def replay_of(kind: str) -> ReplayBuffer:
    """240 steps of one environment, and a ratio that lets 20 batches of 48 be drawn."""
    rb = ReplayBuffer(240, sampler=SAMPLERS[kind](), seed=3, flow=Flow(samples_per_insert=4))
    rows = batch_for("td3", 240, seed=9)
    rows["episode_id"] = torch.zeros(240, dtype=torch.int64)
    rows["step"] = torch.arange(240)
    ended = (torch.arange(240) % 40 == 39)[:, None]
    rows["next", "terminated"], rows["next", "truncated"], rows["next", "done"] = ended, ended & False, ended
    rows["episode_id"] = torch.arange(240) // 40
    rows["step"] = torch.arange(240) % 40
    rb.extend(rows)
    return rb


@pytest.mark.parametrize("kind", usually(sorted(SAMPLERS), "prioritized", "without_replacement"))
def test_replay_counts_draws_and_weighs_as_for_one_process(kind: str) -> None:
    """One reservation and one draw for each whole batch: the same items, priorities and limits as with one rank."""
    alone, together = make("td3"), make("td3")
    one, two = replay_of(kind), replay_of(kind)
    learner = Learner(alone, one, batch_size=48)
    with group_of(together, "td3", 2) as group:
        learners = Learner(group, two, batch_size=48)
        for _ in range(20):
            learner.step(timeout=0)
            learners.step(timeout=0)
            assert torch.equal(learner.batch["index"], learners.batch["index"])  # type: ignore[index]
        assert not two.can_sample(48)  # no half of a batch is left over
        assert together.steps == alone.steps == 20
    mine, theirs = one.stats(), two.stats()
    for key in ("samples_returned", "sample_calls", "stale_updates"):
        assert mine[key] == theirs[key]
    assert furthest(snapshot(alone), snapshot(together)) <= 1e-5
    for rb in (one, two):
        rb.close()


def test_ranks_begin_with_the_state_of_rank_0() -> None:
    """Whatever seed the others were made with; here rank 0 has learned already."""
    together, alone = make("sac", seed=7), make("sac", seed=7)
    for step in range(3):
        together.update(batch_for("sac", 48, seed=100 + step))
        alone.update(batch_for("sac", 48, seed=100 + step))
    with group_of(together, "sac", 2) as group:
        for step in range(5):
            alone.update(batch_for("sac", 48, seed=step))
            group.update(batch_for("sac", 48, seed=step))
    assert furthest(snapshot(alone), snapshot(together)) <= 1e-5


def test_a_batch_with_other_fields_is_learned_from_too() -> None:
    alone, together = make("td3"), make("td3")
    with group_of(together, "td3", 2) as group:
        for step in range(4):
            batch = batch_for("td3", 48, seed=step)
            if step % 2:
                batch["priority_weight"] = torch.linspace(0.1, 1, 48)
            alone.update(batch.clone())
            group.update(batch)
    assert furthest(snapshot(alone), snapshot(together)) <= 1e-5


# ---------------------------------------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"world_size": 3, "batch_size": 64}, InvalidArgument, "63 or 66 can"),
        ({"world_size": 0}, InvalidArgument, "world_size must be at least 1"),
        ({"world_size": True}, InvalidType, "world_size"),
        ({"world_size": 2.0}, InvalidType, "world_size"),
        ({"backend": "mpi"}, InvalidArgument, "gloo or nccl"),
        ({"backend": "nccl"}, InvalidArgument, "GPU"),
        ({"launch": "slurm"}, InvalidArgument, "process or ray or torchrun"),
        ({"launch": "torchrun"}, InvalidArgument, "WORLD_SIZE"),
        ({"timeout": 0}, InvalidArgument, "timeout"),
        ({"ray_options": {"num_gpus": 1}}, InvalidArgument, "launch='ray'"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    """Case rank-2 among them."""
    algorithm = make("sac")
    arguments = {"world_size": 2, "batch_size": 64, **options}
    with pytest.raises(kind, match=words):
        LearnerGroup(algorithm, functools.partial(made, "sac"), **arguments).start()


def test_an_algorithm_that_cannot_share_its_gradients_is_refused() -> None:
    class Mine:
        steps = 0

    with pytest.raises(InvalidType, match="shard"):
        LearnerGroup(Mine(), functools.partial(made, "sac"), world_size=2, batch_size=64)


def test_a_batch_that_cannot_be_split_is_refused_and_the_next_one_learned_from() -> None:
    algorithm = make("sac")
    with group_of(algorithm, "sac", 2) as group:
        with pytest.raises(InvalidArgument, match="drop_last"):
            group.update(batch_for("sac", 47))
        group.update(batch_for("sac", 48))
    assert algorithm.steps == 1
    with pytest.raises(BufferClosed):
        group.update(batch_for("sac", 48))


def test_ranks_with_other_networks_are_refused() -> None:
    def wider(device: str) -> Any:
        return make("sac", hidden=(32, 32))

    with pytest.raises(InvalidArgument, match="other network sizes"):
        LearnerGroup(make("sac"), wider, world_size=2, batch_size=48).update(batch_for("sac", 48))


# ---------------------------------------------------------------------------------------------------- ranks that fail
class Faulty:
    """TD3 that, on its third update on a rank other than 0, does what ``deed`` says."""

    def __init__(self, deed: str) -> None:
        self.inner, self.deed = make("td3"), deed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "shard":
            self.inner.shard = value
        else:
            super().__setattr__(name, value)

    def update(self, batch: Any) -> Any:
        if self.inner.steps == 2 and self.inner.shard.rank == 1:
            if self.deed == "raise":
                raise ZeroDivisionError("on purpose")
            if self.deed == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.deed == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            while self.deed == "hang":
                time.sleep(0.01)
        return self.inner.update(batch)


ENDS = [
    ("raise", "ZeroDivisionError: on purpose"),
    ("die", "rank 1 of 3 was killed by signal 9"),
    ("hang", "rank 1 of 3 did not answer for 3 s"),
    ("stop", "rank 1 of 3 did not answer for 3 s"),
]


@pytest.mark.parametrize(("deed", "words"), [*ENDS[:3], pytest.param(*ENDS[3], marks=pytest.mark.exhaustive)])
def test_one_failing_rank_ends_the_group(deed: str, words: str) -> None:
    """Case proc-6: within ten seconds, naming the rank and where it failed; rank 0 holds the last whole step."""
    algorithm = Faulty(deed)
    group = LearnerGroup(algorithm, functools.partial(faulty, deed), world_size=3, batch_size=48, timeout=3)
    for step in range(2):
        group.update(batch_for("td3", 48, seed=step))
    learned = snapshot(algorithm)
    began = time.monotonic()
    with pytest.raises(WorkerFailed, match=words) as failure:
        group.update(batch_for("td3", 48, seed=2))
    assert time.monotonic() - began < ENDS_S
    if deed in ("raise", "hang"):
        assert "in update" in str(failure.value)
    after = snapshot(algorithm)
    assert all(torch.equal(learned[key], after[key]) for key in learned if not key.startswith("generator"))
    with pytest.raises(WorkerFailed, match=words):
        group.update(batch_for("td3", 48, seed=3))
    group.close()
    algorithm.update(batch_for("td3", 48))  # alone it goes on


def faulty(deed: str, device: str) -> Faulty:
    return Faulty(deed)


def test_a_rank_that_cannot_begin_ends_the_group_with_its_traceback() -> None:
    def unable(device: str) -> Any:
        raise KeyError("no such network")

    with pytest.raises(WorkerFailed, match="no such network"):
        LearnerGroup(make("sac"), unable, world_size=2, batch_size=48).start()


@pytest.mark.parametrize("row", usually([3, 40], 40))
def test_a_loss_that_is_not_finite_changes_nothing_on_any_rank(row: int) -> None:
    algorithm = make("sac")
    group = group_of(algorithm, "sac", 2)
    group.update(batch_for("sac", 48))
    learned = snapshot(algorithm)
    batch = batch_for("sac", 48, seed=1)
    batch["next", "reward"][row] = float("nan")
    with pytest.raises(NonFinite, match="reward"):
        group.update(batch)
    after = snapshot(algorithm)
    assert all(torch.equal(learned[key], after[key]) for key in learned if not key.startswith("generator"))
    group.close()


def test_ranks_end_when_rank_0_is_killed() -> None:
    script = (
        "import sys; sys.path.insert(0, '.')\n"
        "from tests.learn.test_group import *\n"
        "group = group_of(make('sac'), 'sac', 3)\ngroup.start()\n"
        "print(*[process.pid for process in group._ranks._processes.values()], flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as rank_0:
        assert rank_0.stdout is not None
        pids = [int(pid) for pid in rank_0.stdout.readline().split()]
        rank_0.kill()
    assert len(pids) == 2
    deadline = time.monotonic() + ENDS_S
    while any(identity.start_time(pid) for pid in pids) and time.monotonic() < deadline:  # 0: gone, or a zombie
        time.sleep(0.05)
    assert not [pid for pid in pids if identity.start_time(pid)]
    reap()  # as the next start on this host does


# ---------------------------------------------------------------------------------------------------- other launchers
TORCHRUN = """
import functools, sys
sys.path.insert(0, ".")
import torch
from millpond.learn.group import LearnerGroup, serve
from millpond.learn.launch import torchrun_environment
from tests.learn.test_group import batch_for, furthest, made, make, snapshot

world_size = int(sys.argv[1])
arguments = {"world_size": world_size if torchrun_environment().rank == 0 else int(sys.argv[2]), "batch_size": 48}
if torchrun_environment().rank:
    serve(functools.partial(made, "sac"), **arguments)
else:
    alone, together = make("sac"), make("sac")
    with LearnerGroup(together, functools.partial(made, "sac"), launch="torchrun", **arguments) as group:
        for step in range(10):
            batch = batch_for("sac", 48, seed=step)
            alone.update(batch.clone())
            group.update(batch)
    print("DIFFERENCE", furthest(snapshot(alone), snapshot(together)))
"""


def torchrun(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "learn.py"
    script.write_text(TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.run([*command, str(script), *arguments], capture_output=True, text=True, timeout=100)


def test_torchrun_starts_the_ranks(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "2", "2")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split("DIFFERENCE")[1]) <= 1e-5


def test_ranks_that_name_another_world_size_are_refused(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "2", "4")
    assert done.returncode != 0
    assert "world_size=4, but torchrun started 2" in done.stderr
