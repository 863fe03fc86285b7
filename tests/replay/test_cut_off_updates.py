"""An update of stored fields whose process is killed half-way: whoever comes next finishes it, also for all others."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fast_paths import die, forked, was_killed
from waits import until

from millpond import ReplayBuffer
from millpond.core.errors import PeerLost
from millpond.replay import SliceSampler
from millpond.shm.directory import reap

WIDTH = 20


def write_and_die_in_an_update(rb: ReplayBuffer) -> None:
    """Some rows have their new fields then, one has half of them, and some have the old ones."""
    rb.extend({"x": torch.zeros(8, WIDTH, dtype=torch.int64)})
    die_in_an_update(rb, [1, 4, 6], {"x": torch.ones(3, WIDTH, dtype=torch.int64)})


def die_in_an_update(rb: ReplayBuffer, slots: list[int], patch: Any) -> None:
    stored, copied = rb._local.engine.rows, []
    assert stored is not None

    def hook(_: str) -> None:
        copied.append(0)
        if len(copied) == 2:
            die()

    stored.hook = hook
    rb.update(torch.tensor(slots), patch)


COMES_NEXT: dict[str, Callable[[ReplayBuffer], Any]] = {
    "stats": lambda rb: rb.stats(),
    "sample": lambda rb: rb.sample(2),
    "extend": lambda rb: rb.extend({"x": torch.zeros(1, WIDTH, dtype=torch.int64)}),
    "state_dict": lambda rb: rb.state_dict(),
}


@pytest.mark.parametrize("name", COMES_NEXT)
def test_who_never_looked_at_the_rows_finishes_it(name: str) -> None:
    with ReplayBuffer(16, shared=True) as rb:
        assert was_killed(forked(lambda: write_and_die_in_an_update(rb)))
        COMES_NEXT[name](rb)
        x = rb[:8]["x"]
        assert x[:, 0].tolist() == [0, 1, 0, 0, 1, 0, 1, 0]
        assert (x == x[:, :1]).all()
        assert rb.stats()["recoveries"] == 1


def test_where_episodes_end_is_looked_up_again() -> None:
    def steps(done: list[int]) -> dict[str, Any]:
        flags = torch.zeros(8, 1, dtype=torch.bool)
        flags[done] = True
        return {"x": torch.arange(8), "next": {"done": flags}}

    with ReplayBuffer(8, sampler=SliceSampler(slice_len=3), num_envs=1, shared=True, seed=0) as rb:
        rb.extend(steps([7]))
        rb.sample(30)  # from now on this process knows where episodes end
        ends = {"next": {"done": torch.ones(2, 1, dtype=torch.bool)}}
        assert was_killed(forked(lambda: die_in_an_update(rb, [2, 4], ends)))
        starts = {row[0] for row in rb.sample(300)["x"].view(-1, 3).tolist()}
        assert starts == {0, 5}


def own(pipe: Any) -> None:
    rb = ReplayBuffer(16, shared=True)
    rb.extend({"x": torch.zeros(8, WIDTH, dtype=torch.int64)})
    pipe.send(rb.handle())
    pipe.recv()


def test_where_its_memory_is_gone_the_others_are_told_that_the_owner_died() -> None:
    """Rather than given a row of which nobody knows whether it is whole."""
    context = mp.get_context("fork")
    mine, theirs = context.Pipe()
    owner = context.Process(target=own, args=(theirs,), daemon=True)
    owner.start()
    handle = mine.recv()
    rb = ReplayBuffer.attach(handle)
    ones = {"x": torch.ones(3, WIDTH, dtype=torch.int64)}
    assert was_killed(forked(lambda: die_in_an_update(rb, [1, 4, 6], ones)))
    owner.kill()
    owner.join()
    owner.close()
    until(lambda: Path(handle.path) in reap() or not Path(handle.path).exists())
    for call in (lambda: rb.sample(2), lambda: rb[:]):
        with pytest.raises(PeerLost):
            call()
    assert rb.stats()["size"] == 8
    rb.close()
    mine.close()
    theirs.close()
