"""Real SIGINTs, at any moment: no batch is lost between the buffer and its caller, and each interrupt arrives."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from millpond import BlockingReplayBuffer, ReplayBuffer, ReplayBufferEnsemble
from millpond.learn.stream import SampleStream
from millpond.replay import ConsumingSampler, PrioritizedSampler, RandomSampler, SamplerWithoutReplacement
from millpond.replay.kernels import loading as kernels
from tests.alike import usually
from tests.replay.fast_paths import from_the_start
from tests.storms import STORMS, Storm


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread that loads the compiled step in the midst of a test."""
    monkeypatch.setattr(kernels, "request", lambda: None)


KINDS: dict[str, dict[str, Any]] = {
    "queue": {"sampler": lambda: ConsumingSampler(1)},
    "pool": {"sampler": RandomSampler, "consume_after_n_samples": 1},
    "epochs": {"sampler": SamplerWithoutReplacement, "consume_after_n_samples": 1},
    "prioritized": {"sampler": PrioritizedSampler, "consume_after_n_samples": 1},
}


WAYS = [*itertools.product(["sample"], KINDS), ("iteration", "queue"), ("compiled", "queue")]


def made(kind: str, **more: Any) -> ReplayBuffer:
    how = KINDS[kind] | more
    return ReplayBuffer(54, **{**how, "sampler": how["sampler"]()}, seed=0)


@STORMS
@pytest.mark.parametrize(
    "case",
    usually(
        [f"{way} {kind} {prefetch}" for way, kind in WAYS for prefetch in (0, 2)],
        "sample pool 2",
        "sample prioritized 0",
        "sample queue 0",
        "iteration queue 2",
        "compiled queue 0",
    ),
)
def test_no_item_is_lost_and_the_counters_are_exact(case: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    way, kind, prefetch = case.split()
    if way == "compiled":
        from_the_start(monkeypatch, pytest.importorskip("millpond.replay.kernels.ring"))
    with made(kind, prefetch=int(prefetch), batch_size=5) as rb:
        got: list[Any] = []
        written: list[torch.Tensor] = []

        def step() -> None:
            if len(rb) < 30:
                first = 6 * len(written)
                written.append(rb.extend({"x": torch.arange(first, first + 6)}))
            if way != "iteration":
                n = 5 if kind == "epochs" else 3 + len(got) % 3
                got.append(rb.sample(n))  # no step of the interpreter comes between the return and the keeping
            else:
                for batch in rb:
                    got.append(batch)
                    break

        Storm(0).run(step, count)
        delivered = [number for batch in got for number in batch["x"].tolist()]
        stats = rb.stats()
        assert (stats["write_count"], stats["samples_returned"]) == (6 * len(written), len(delivered))
        kept = [number for batch in rb._local.ahead for number in batch.numbers.tolist()]
        assert stats["reserved"] == len(kept)
        assert sorted([*delivered, *kept, *rb[:]["x"].tolist()]) == list(range(6 * len(written)))


@STORMS
def test_an_ensemble_and_a_stream_lose_nothing_either(count: int) -> None:
    members = [made("queue"), made("pool")]
    with members[0], members[1], ReplayBuffer(54, sampler=ConsumingSampler(1)) as streamed:
        both = ReplayBufferEnsemble(*members, batch_size=6, seed=2)
        stream = SampleStream(streamed, batch_size=3)
        got: list[Any] = []
        told: list[Any] = []
        sizes = [0, 0, 0]

        def step() -> None:
            for i, rb in enumerate((*members, streamed)):
                if len(rb) < 30:
                    first = 1_000_000 * i + 6 * sizes[i]
                    rb.extend({"x": torch.arange(first, first + 6)})
                    sizes[i] += 1  # the same step of the interpreter as the return
            got.append(both.sample())
            told.append(stream.sample())

        Storm(1).run(step, count)
        delivered = [number for batch in got for number in batch["x"].tolist()]
        rest = [number for member in members for number in member[:]["x"].tolist()]
        written = [1_000_000 * i + number for i in range(2) for number in range(members[i].write_count)]
        assert sorted([*delivered, *rest]) == written
        assert sum(member.stats()["samples_returned"] for member in members) == len(delivered)
        in_order = [number for batch in told for number in batch["x"].tolist()]
        assert in_order == list(range(2_000_000, 2_000_000 + len(in_order)))
        stream.close()


WAITS: dict[str, Callable[[ReplayBuffer], Any]] = {
    "sample": lambda rb: rb.sample(90, wait=True),
    "extend": lambda rb: rb.extend({"x": torch.arange(30)}),
    "sampleable": lambda rb: rb.wait_until_sampleable(90),
    "iteration": list,
}


@pytest.mark.parametrize("what", WAITS)
def test_a_wait_is_interrupted_at_once(what: str) -> None:
    with BlockingReplayBuffer(100, batch_size=90) as rb:
        for _ in range(4):
            rb.extend({"x": torch.arange(20)})

        def interrupt() -> None:
            while not rb._local.engine.control.waiting():
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            WAITS[what](rb)
        thread.join()
        assert not rb._local.engine.control.waiting()
        assert len(rb) == 80


def test_a_handler_of_ones_own_stays() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []
    try:
        signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
        with ReplayBuffer(10) as rb:
            rb.extend({"x": torch.arange(3)})
            os.kill(os.getpid(), signal.SIGINT)
            while not seen:
                rb.sample(2)
        assert signal.getsignal(signal.SIGINT) is not before
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_program_that_is_interrupted_ends_as_ever() -> None:
    program = """
import os, signal, torch
from millpond import ReplayBuffer
rb = ReplayBuffer(10)
rb.extend({"x": torch.arange(3)})
print("ready", flush=True)
while True:
    rb.sample(2)
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert child.returncode == -signal.SIGINT
