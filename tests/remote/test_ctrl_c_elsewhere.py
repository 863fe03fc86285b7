"""Real SIGINTs to a client, at any moment: a call happens and returns, or does not happen; no interrupt is lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import remote_children as children
import torch
from remote_children import batch, wait_for

from millpond import BlockingReplayBuffer
from millpond.replay import ConsumingSampler, PrioritizedSampler
from tests.storms import STORMS, Storm

WITHIN_S = 5.0  # what takes less than a second where nothing else runs


@STORMS
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_no_item_is_lost_and_the_counters_are_exact(pond, client, transport, prefetch, count):
    made = client(pond(54, sampler=ConsumingSampler(1), prefetch=prefetch), transport=transport)
    got: list[Any] = []
    written: list[torch.Tensor] = []
    room = [0]

    def step() -> None:
        if room[0] < 30:
            first = 6 * len(written)
            written.append(made.extend({"x": torch.arange(first, first + 6)}))
        got.append(made.sample(3 + len(got) % 3))
        room[0] = 6 * len(written) - sum(len(found) for found in got)

    made.extend({"x": torch.arange(0)})
    written.append(made.extend({"x": torch.arange(6)}))
    Storm(0).run(step, count)
    delivered = [number for found in got for number in found["x"].tolist()]
    stats = made.stats()
    assert (stats["write_count"], stats["samples_returned"]) == (6 * len(written), len(delivered))
    rest = []
    while made.can_sample(1):
        rest += made.sample(1)["x"].tolist()
    assert sorted([*delivered, *rest]) == list(range(6 * len(written)))


@STORMS
def test_waits_are_withdrawn_or_answered(pond, client, count):
    """Both sides wait for each other's turns in threads of one process: only the main one is interrupted."""
    owner = pond(8, sampler=ConsumingSampler(1), kind=BlockingReplayBuffer)
    here, there = client(owner), client(owner)
    over, got, told = threading.Event(), [], []

    def write() -> None:
        n = 0
        while not over.is_set():
            try:
                there.extend({"x": torch.arange(n, n + 3)}, timeout=0.1)
                n += 3
            except TimeoutError:
                continue
        told.append(n)

    writer = threading.Thread(target=write)
    writer.start()
    Storm(2).run(lambda: got.append(here.sample(2, wait=True)), count)
    over.set()
    writer.join()
    rest = []
    while here.can_sample(1):
        rest += here.sample(1)["x"].tolist()
    assert [*(n for found in got for n in found["x"].tolist()), *rest] == list(range(told[0]))
    stats = here.stats()
    assert (stats["write_count"], stats["waiting_consumers"], stats["waiting_producers"]) == (told[0], 0, 0)


@STORMS
def test_priorities_are_changed_and_counted_or_not(pond, client, count):
    made = client(pond(100, sampler=PrioritizedSampler()))
    made.extend({"x": torch.arange(100)})
    found = made.sample(4)
    applied: list[int] = []
    Storm(3).run(lambda: applied.append(made.update_priority(found, torch.ones(4))), count)
    assert set(applied) == {4}


WAITS: dict[str, Callable[[Any], Any]] = {
    "sample": lambda rb: rb.sample(90, wait=True),
    "extend": lambda rb: rb.extend({"x": torch.arange(30)}),
    "sampleable": lambda rb: rb.wait_until_sampleable(90),
    "iteration": list,
}


def interrupt_soon(ready: Callable[[], bool]) -> threading.Thread:
    def interrupt() -> None:
        wait_for(ready, "the call")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    return thread


@pytest.mark.parametrize("what", WAITS)
def test_a_wait_is_interrupted_at_once(pond, client, keeper, what):
    owner = pond(100, batch_size=90, kind=BlockingReplayBuffer)
    made = client(owner)
    for _ in range(4):
        made.extend({"x": torch.arange(20)})

    def waits() -> bool:
        return sum(keeper.ask(children.describe, owner.name)["parked"].values()) == 1

    thread = interrupt_soon(waits)
    with pytest.raises(KeyboardInterrupt):
        WAITS[what](made)
    thread.join()
    assert not waits()
    assert len(made) == 80
    assert made.extend({"x": torch.arange(10)}).tolist() == list(range(80, 90))


@pytest.mark.parametrize("what", ["sample", "parked sample", "large extend"])
def test_an_owner_that_does_not_answer_delays_no_interrupt(child, client, what):
    """A batch that it draws later comes back, and a request that it got half of does not happen."""
    owning = child()
    asked = children.plan(200_000, sampler=ConsumingSampler(1), kind=BlockingReplayBuffer)
    owner = owning.ask(children.open_service, asked)
    made, other = client(owner), client(owner)
    made.extend(batch(10))
    call = {
        "sample": lambda: made.sample(4),
        "parked sample": lambda: made.sample(20, wait=True),
        "large extend": lambda: made.extend(batch(150_000, start=10)),
    }[what]
    owning.signal(signal.SIGSTOP)
    try:
        sent = made._buffer._session._next
        thread = interrupt_soon(lambda: made._buffer._session._next > sent)
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            call()
        assert time.monotonic() - start < WITHIN_S
        thread.join()
    finally:
        owning.signal(signal.SIGCONT)
    assert made.stats()["waiting_consumers"] == 0  # on the same line, so it comes after what was taken back
    assert other.stats()["samples_returned"] == 0
    assert children.ids_of(other.sample(10)) == list(range(10))
    assert not other.can_sample(1)
