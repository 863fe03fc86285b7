"""A user of a shared buffer that opens its files after they went with their owner is told that, not of a file."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from waits import until

from millpond import ReplayBuffer
from millpond.core.errors import BufferClosed, PeerLost
from millpond.shm.directory import reap

SLOTS = torch.arange(2)


def own(pipe: Any) -> None:
    rb = ReplayBuffer(16, shared=True)
    pipe.send(rb.handle())
    if pipe.recv() == "close":
        rb.close()
    pipe.recv()


def numbers(n: int) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(n)}


#: Name → whether the rows were bound, by whom, before the owner goes; and the call that opens files.
CALLS: dict[str, tuple[str, Callable[[ReplayBuffer], Any]]] = {
    "first write": ("nobody", lambda rb: rb.extend(numbers(2))),
    "first one": ("nobody", lambda rb: rb.add({"x": torch.tensor(1)})),
    "write": ("another", lambda rb: rb.extend(numbers(2))),
    "sample": ("another", lambda rb: rb.sample(2)),
    "schema": ("another", lambda rb: rb.schema),
    "items": ("another", lambda rb: rb[:]),
    "update": ("this", lambda rb: rb.update(SLOTS, numbers(2))),
}


@pytest.mark.parametrize("end", ["close", "die"])
@pytest.mark.parametrize("name", CALLS)
def test_whoever_opens_files_that_are_gone_is_told_why(name: str, end: str) -> None:
    bound_by, call = CALLS[name]
    context = mp.get_context("fork")
    mine, theirs = context.Pipe()
    owner = context.Process(target=own, args=(theirs,), daemon=True)
    owner.start()
    handle = mine.recv()
    rb, other = ReplayBuffer.attach(handle), ReplayBuffer.attach(handle)
    if bound_by != "nobody":
        (rb if bound_by == "this" else other).extend(numbers(8))
    rb._local.engine.memory._looked = float("inf")  # it is between two looks whether the owner lives
    if end == "close":
        mine.send("close")
    else:
        owner.kill()
        owner.join()
        reap()
    until(lambda: not Path(handle.path).exists())
    with pytest.raises(BufferClosed if end == "close" else PeerLost):
        call(rb)
    for one in (rb, other):
        one.close()
    owner.kill()
    owner.join()
    owner.close()
    mine.close()
    theirs.close()
