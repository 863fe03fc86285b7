"""Several buffers sampled as one: shares, waiting for all members, all or nothing."""

from __future__ import annotations

import multiprocessing as mp
import os
import threading
from typing import Any

import pytest
import torch
from waits import Call, until

from millpond import BlockingReplayBuffer, Flow, ReplayBuffer, ReplayBufferEnsemble
from millpond.core.errors import (
    BufferClosed,
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    InvalidType,
    NotReady,
    PeerLost,
    SchemaMismatch,
    Unsatisfiable,
)
from millpond.replay import PrioritizedSampler
from millpond.shm.directory import remove_directory

FORK: Any = mp.get_context("fork")


def numbers(n: int, start: int = 0) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(start, start + n)}


def filled(*starts: int, **options: Any) -> tuple[ReplayBuffer, ...]:
    """Buffers of ten items, numbered from each start on."""
    made = tuple(ReplayBuffer(10, seed=i, **options) for i in range(len(starts)))
    for buffer, start in zip(made, starts, strict=True):
        buffer.extend(numbers(10, start))
    return made


def test_items_come_from_the_members_in_their_shares() -> None:
    """A chi-square bound: 3 degrees of freedom, p = 1e-6."""
    weights = [1.0, 2.0, 5.0, 0.0, 2.0]
    with_all = ReplayBufferEnsemble(*filled(0, 10, 20, 30, 40), weights=weights, batch_size=250, seed=0)
    counts = torch.zeros(5)
    for _ in range(40):
        batch = with_all.sample()
        assert torch.equal(batch["x"] // 10, batch["buffer_id"])
        assert batch["buffer_id"].dtype is torch.int64
        counts += torch.bincount(batch["buffer_id"], minlength=5)
    expected = torch.tensor(weights) / 10 * 10_000
    assert counts[3] == 0
    drawn = torch.tensor([0, 1, 2, 4])
    assert float(((counts - expected)[drawn] ** 2 / expected[drawn]).sum()) < 30.7
    with_all.close()


def test_a_batch_comes_apart_and_writes_go_to_one_member() -> None:
    with_both = ReplayBufferEnsemble(*filled(0, 10), batch_size=6, seed=1)
    data, info = with_both.sample(return_info=True)
    assert set(data.keys()) == {"x"}
    assert set(info.keys()) == {"index", "generation", "buffer_id"}
    with_both.extend(numbers(3, 50), member=1)
    assert [b.write_count for b in with_both.buffers] == [10, 13]
    assert len(with_both) == 20
    with_both.empty()
    assert len(with_both) == 0
    with pytest.raises(NotReady, match="member"):
        with_both.sample()
    with_both.close()


def test_the_same_seeds_give_the_same_batches() -> None:
    def go() -> list[list[int]]:
        both = ReplayBufferEnsemble(*filled(0, 10), batch_size=6, seed=1)
        found = [both.sample()["x"].tolist() for _ in range(3)]
        both.close()
        return found

    assert go() == go()


def test_it_waits_until_every_member_can_give() -> None:
    members = [BlockingReplayBuffer(10) for _ in range(3)]
    for member in members:
        member.schema  # noqa: B018
    all_three = ReplayBufferEnsemble(*members, batch_size=9, seed=3)
    members[0].extend(numbers(10))
    waiting = Call(lambda: all_three.sample(wait=True, timeout=60))
    until(lambda: members[1].stats()["waiting_consumers"] == 1)
    members[1].extend(numbers(10, 10))
    until(lambda: members[2].stats()["waiting_consumers"] == 1)
    assert all_three.stats()["waiting_consumers"] == 1
    assert (len(members[0]), len(members[1])) == (10, 10)
    assert "member 2: sample(9) cannot proceed" in all_three.explain()
    members[2].extend(numbers(10, 20))
    batch = waiting.result(60)
    assert len(set(batch["x"].tolist())) == 9
    assert len(all_three) == 21
    stats = all_three.stats()
    assert (stats["waiting_consumers"], stats["consumer_blocks"]) == (0, 2)  # one for each member waited for
    all_three.close()


def test_a_wait_ends() -> None:
    members = [BlockingReplayBuffer(10), BlockingReplayBuffer(10)]
    both = ReplayBufferEnsemble(*members, batch_size=8, seed=0)
    members[0].extend(numbers(10))
    with pytest.raises(DeadlineExceeded, match="member 1"):
        both.sample(wait=True, timeout=0)
    with pytest.raises(DeadlineExceeded, match=r"waited 0\.05 s"):
        both.sample(wait=True, timeout=0.05)
    cancel = threading.Event()
    waiting = Call(lambda: both.sample(wait=True, cancel_event=cancel))
    until(lambda: both.stats()["waiting_consumers"] == 1)
    cancel.set()
    with pytest.raises(Cancelled):
        waiting.result()
    with pytest.raises(Unsatisfiable):
        both.sample(100, wait=True)
    waiting = Call(lambda: both.sample(wait=True))
    until(lambda: both.stats()["waiting_consumers"] == 1)
    both.close()
    with pytest.raises(BufferClosed):
        waiting.result()
    with pytest.raises(BufferClosed):
        both.sample()
    assert len(members[0]) == 10


def owner_of_a_member(pipe: Any) -> None:
    rb = BlockingReplayBuffer(10, shared=True)
    pipe.send(rb)
    pipe.recv()
    os.kill(os.getpid(), 9)


def test_the_owner_of_any_member_may_be_lost() -> None:
    """Also that of a member that is not the first."""
    mine, theirs = FORK.Pipe()
    process = FORK.Process(target=owner_of_a_member, args=(theirs,))
    process.start()
    theirs.close()
    second = mine.recv()
    first = BlockingReplayBuffer(10)
    first.extend(numbers(10))
    both = ReplayBufferEnsemble(first, second, batch_size=8, seed=0)
    waiting = Call(lambda: both.sample(wait=True, timeout=60))
    until(lambda: second.stats()["waiting_consumers"] == 1)
    mine.send("die")
    with pytest.raises(PeerLost):
        waiting.result(60)
    process.join(60)
    process.close()
    mine.close()
    path = second.handle().path
    both.close()

    assert remove_directory(path)


def take(members: list[ReplayBuffer], pipe: Any, seed: int) -> None:
    torch.set_num_threads(1)
    both = ReplayBufferEnsemble(*members, batch_size=4, seed=seed)
    got: list[int] = []
    while True:
        try:
            got += both.sample(wait=True, timeout=60)["x"].tolist()
        except BufferClosed:
            break
        pipe.send(got[-4:])
    pipe.send(None)
    both.close()


def test_competing_ensembles_with_their_members_in_different_order() -> None:
    """Two processes and two threads take from the same members: nothing is lost, nobody waits for ever."""
    # room for all that is written: a producer that waits for one member could starve those who wait for another
    members = [BlockingReplayBuffer(512, shared=True) for _ in range(3)]
    processes, pipes = [], []
    for i, order in enumerate(([0, 1, 2], [2, 1, 0])):
        mine, theirs = FORK.Pipe()
        processes.append(FORK.Process(target=take, args=([members[k] for k in order], theirs, i)))
        processes[-1].start()
        theirs.close()
        pipes.append(mine)
    got: list[int] = []
    lock = threading.Lock()

    def collect(pipe: Any) -> None:
        while (batch := pipe.recv()) is not None:
            with lock:
                got.extend(batch)

    def take_here(order: list[int]) -> None:
        both = ReplayBufferEnsemble(*(members[k] for k in order), batch_size=4)
        try:
            while True:
                batch = both.sample(wait=True, timeout=60)["x"].tolist()
                with lock:
                    got.extend(batch)
        except BufferClosed:
            return

    readers = [Call(lambda pipe=pipe: collect(pipe)) for pipe in pipes]  # type: ignore[misc]
    takers = [Call(lambda order=order: take_here(order)) for order in ([1, 0, 2], [2, 0, 1])]  # type: ignore[misc]
    for i in range(60):
        for k, member in enumerate(members):
            member.extend(numbers(8, 10_000 * k + 8 * i), timeout=60)

    def taken() -> int:
        return sum(m.stats()["consumed"] for m in members)

    until(lambda: any(len(m) < 4 for m in members), 60)
    for member in members:
        member._local.engine.close(everybody=True)  # wakes everybody, and keeps the figures
    for call in [*takers, *readers]:
        call.result(60)
    for process, pipe in zip(processes, pipes, strict=True):
        process.join(60)
        assert process.exitcode == 0
        process.close()
        pipe.close()
    everything = {10_000 * k + i for k in range(3) for i in range(480)}
    assert len(got) == len(set(got)) == taken()
    assert set(got) <= everything
    assert taken() + sum(len(m) for m in members) == len(everything)
    for member in members:
        member.close()


def test_priorities_of_all_members() -> None:
    members = filled(0, sampler=PrioritizedSampler()) + filled(10, sampler=PrioritizedSampler())
    both = ReplayBufferEnsemble(*members, batch_size=64, seed=0)
    batch = both.sample()
    assert both.update_priority(batch, (batch["x"] % 10 == 3).double()) == 64
    for i, member in enumerate(members):
        seen = set((batch["x"][batch["buffer_id"] == i] % 10).tolist())
        leaves = member.sampler.tree.leaves[:10]  # type: ignore[attr-defined]
        assert leaves[3] > 0.5
        assert all(leaves[k] < 0.1 for k in seen - {3})
    members[1].extend(numbers(10, 10))
    assert both.update_priority(batch, 1.0) == int((batch["buffer_id"] == 0).sum())
    assert both.stats()["stale_updates"] == int((batch["buffer_id"] == 1).sum())
    before = [m.sampler.tree.leaves.copy() for m in members]  # type: ignore[attr-defined]
    for bad in (torch.where(batch["buffer_id"] == 1, -1.0, 1.0), torch.ones(63)):
        with pytest.raises(InvalidArgument, match="priorit"):
            both.update_priority(batch, bad)
    with pytest.raises(InvalidArgument, match="buffer_id"):
        both.update_priority(members[0].sample(2), 1.0)
    assert all((m.sampler.tree.leaves == b).all() for m, b in zip(members, before, strict=True))  # type: ignore[attr-defined]
    both.close()


def test_priorities_of_some_members() -> None:
    (plain,) = filled(0)
    (prioritized,) = filled(10, sampler=PrioritizedSampler())
    both = ReplayBufferEnsemble(plain, prioritized, batch_size=32, seed=0)
    batch = both.sample()
    assert batch["priority_weight"].dtype is torch.float32
    assert set(batch["priority_weight"].tolist()) == {1.0}  # all are equally likely
    assert both.update_priority(batch, 2.0) == int((batch["buffer_id"] == 1).sum())
    both.close()


def test_figures() -> None:
    members = filled(0, 10)
    both = ReplayBufferEnsemble(*members, batch_size=4, seed=0)
    both.sample()
    stats = both.stats()
    assert stats.keys() - {"members"} == members[0].stats().keys()
    assert (stats["write_count"], stats["samples_returned"], stats["capacity"]) == (20, 4, 20)
    assert stats["members"] == [m.stats() for m in members]
    assert both.can_sample()
    assert both.explain().count("\n") == 1
    both.close()


def test_each_member_keeps_its_flow() -> None:
    limited = ReplayBuffer(10, flow=Flow(samples_per_insert=1))
    limited.extend(numbers(2))
    (free,) = filled(10)
    both = ReplayBufferEnsemble(limited, free, batch_size=40, seed=0)
    with pytest.raises(NotReady, match="member 0"):
        both.sample()
    assert both.stats()["samples_returned"] == 0
    assert not both.can_sample()
    both.close()


def test_members_of_different_schemas() -> None:
    (one,) = filled(0)
    other = ReplayBuffer(10)
    other.extend({"x": torch.zeros(10)})
    both = ReplayBufferEnsemble(one, other, batch_size=4)
    with pytest.raises(SchemaMismatch, match="members 0 and 1"):
        both.sample()
    both.close()


def test_bad_arguments() -> None:
    one, other = filled(0, 10)
    with one, other:
        with pytest.raises(InvalidArgument, match="at least one"):
            ReplayBufferEnsemble()
        with pytest.raises(InvalidArgument, match="twice"):
            ReplayBufferEnsemble(one, other, one)
        with pytest.raises(InvalidType, match="ReplayBuffer"):
            ReplayBufferEnsemble(one, 3)
        for weights in ([1], [1, -1], [0, 0], [1, float("nan")], [[1, 1]]):
            with pytest.raises(InvalidArgument, match="weights"):
                ReplayBufferEnsemble(one, other, weights=weights)  # type: ignore[arg-type]
        both = ReplayBufferEnsemble(one, other)
        with pytest.raises(InvalidArgument, match="batch_size"):
            both.sample()
        for member in (2, -1):
            with pytest.raises(InvalidArgument, match="member"):
                both.extend(numbers(1), member=member)
        with pytest.raises(InvalidType, match="member"):
            both.extend(numbers(1), member=True)
        for options in ({"timeout": -1}, {"cancel_event": 3}):
            with pytest.raises(InvalidArgument):
                both.sample(2, wait=True, **options)  # type: ignore[arg-type]
        one.share()
        with ReplayBuffer.attach(one.handle()) as again, pytest.raises(InvalidArgument, match="twice"):
            ReplayBufferEnsemble(one, again)
