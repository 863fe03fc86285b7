"""Producers and consumers that wait for each other, and why a wait ends."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing as mp
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from waits import Call, until

from millpond import BlockingReplayBuffer, Flow, RateLimitedReplayBuffer, ReplayBuffer
from millpond.core.errors import (
    BufferClosed,
    BufferFull,
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    NotReady,
    Unsatisfiable,
)
from millpond.replay import ConsumingSampler, PrioritizedSampler, RandomSampler, SamplerWithoutReplacement
from tests.alike import usually
from tests.replay.interrupts import Interrupt, interrupted

BLOCK = Flow(admission="block")
CONSUMERS: dict[str, Any] = {
    "fifo": lambda k: {"sampler": ConsumingSampler(k)},
    "random": lambda k: {"sampler": RandomSampler(), "consume_after_n_samples": k},
    "prioritized": lambda k: {"sampler": PrioritizedSampler(), "consume_after_n_samples": k},
    "epochs": lambda k: {"sampler": SamplerWithoutReplacement(), "consume_after_n_samples": k},
}


def numbers(n: int, start: int = 0) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(start, start + n)}


@pytest.fixture(params=[False, True], ids=["private", "shared"])
def shared(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=list(CONSUMERS))
def consumer(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def full(consumer: str, shared: bool) -> Iterator[ReplayBuffer]:
    """A buffer of 10 items, each consumed by its first delivery, whose producers wait for space."""
    with ReplayBuffer(10, flow=BLOCK, shared=shared, seed=0, **CONSUMERS[consumer](1)) as rb:
        rb.extend(numbers(10))
        yield rb


def test_all_items_consumed(consumer: str, shared: bool) -> None:
    """flow-1: physical size 100, sampleable 0; readiness waits."""
    with ReplayBuffer(100, batch_size=10, flow=BLOCK, shared=shared, **CONSUMERS[consumer](1)) as rb:
        rb.extend(numbers(100))
        seen = torch.cat([rb.sample()["x"] for _ in range(10)])
        assert sorted(seen.tolist()) == list(range(100))
        assert (rb.storage_size, rb.sampleable_size, len(rb)) == (100, 0, 0)
        assert not rb.can_sample()
        assert not rb.wait_until_sampleable(timeout=0)
        waiting = Call(lambda: rb.wait_until_sampleable(timeout=30))
        until(lambda: len(rb._local.engine.control.waiting()) == 1)
        stats = rb.stats()
        assert (stats["consumer_blocks"], stats["waiting_consumers"]) == (0, 0)  # an advisory wait is no block
        rb.extend(numbers(10, 100))
        assert waiting.result() is True


def test_a_batch_is_written_whole_or_not_at_all(full: ReplayBuffer) -> None:
    """flow-2: space for 3, a batch of 4."""
    full.sample(3)
    before = {k: v for k, v in full.stats().items() if k != "producer_blocks"}
    contents = full[:]["x"].tolist()
    with pytest.raises(DeadlineExceeded, match="7 items are stored"):
        full.extend(numbers(4, 10), timeout=0.01)
    cancel = threading.Event()
    waiting = Call(lambda: full.extend(numbers(4, 10), cancel_event=cancel))
    until(lambda: full.stats()["waiting_producers"] == 1)
    cancel.set()
    with pytest.raises(Cancelled):
        waiting.result()
    assert {k: v for k, v in full.stats().items() if k != "producer_blocks"} == before
    assert full.stats()["producer_blocks"] == 2
    assert full[:]["x"].tolist() == contents
    waiting = Call(lambda: full.extend(numbers(4, 10)))
    until(lambda: full.stats()["waiting_producers"] == 1)
    full.sample(1)
    assert len(waiting.result()) == 4
    assert len(full) == 10


def test_stopping_frees_every_blocked_producer(full: ReplayBuffer) -> None:
    """flow-5"""
    cancel = threading.Event()
    cancelled = [Call(lambda: full.extend(numbers(1), cancel_event=cancel)) for _ in range(5)]
    closed = [Call(lambda: full.extend(numbers(1))) for _ in range(5)]
    until(lambda: full.stats()["waiting_producers"] == 10)
    cancel.set()
    for call in cancelled:
        with pytest.raises(Cancelled):
            call.result()
    full.close()
    for call in closed:
        with pytest.raises(BufferClosed):
            call.result()


@pytest.mark.parametrize("k", [1, 2, 5])
def test_each_item_is_delivered_exactly_k_times(consumer: str, k: int, shared: bool) -> None:
    """flow-4: k·N deliveries in total."""
    total, got = 60, []
    with ReplayBuffer(16, flow=BLOCK, shared=shared, seed=1, **CONSUMERS[consumer](k)) as rb:
        producer = Call(lambda: [rb.extend(numbers(4, a)) for a in range(0, total, 4)])
        while len(got) < k * total:
            left = k * total - len(got)
            size = 1 if left < 4 * k or consumer == "epochs" else 4
            got += rb.sample(size, wait=True, timeout=20)["x"].tolist()
        producer.result()
        assert len(rb) == 0
        with pytest.raises(NotReady):
            rb.sample(1)
    counts = torch.bincount(torch.tensor(got))
    assert counts.tolist() == [k] * total


def test_a_timeout_names_the_unmet_condition_and_the_counters() -> None:
    """flow-10"""
    rb = ReplayBuffer(100, batch_size=8, flow=Flow(min_size=50, samples_per_insert=1.0))
    with pytest.raises(DeadlineExceeded, match=r"sample\(8\) waited 0.01 s.*0 of 50 items written.*min_size=50"):
        rb.sample(wait=True, timeout=0.01)
    rb.extend(numbers(60))
    rb.sample()
    with pytest.raises(NotReady, match=r"10 items beyond min_size=50, and 8 were drawn"):
        rb.sample()
    assert "10 items beyond" in rb.explain()
    assert rb.explain("extend", 5) == "extend(5) can proceed"


@pytest.mark.parametrize("policy", ["overwrite", "block", "drop_newest", "raise"])
def test_a_set_cancel_event_raises_under_every_policy(policy: Any) -> None:
    """So that a drop and a cancellation differ."""
    rb = ReplayBuffer(10, flow=Flow(admission=policy), consume_after_n_samples=1)
    event = threading.Event()
    event.set()
    with pytest.raises(Cancelled):
        rb.extend(numbers(2), cancel_event=event)
    with pytest.raises(Cancelled):
        rb.sample(1, wait=True, cancel_event=event)
    assert rb.write_count == 0


def test_what_finds_no_space_is_dropped_or_refused_whole() -> None:
    dropping = ReplayBuffer(10, flow=Flow(admission="drop_newest"), consume_after_n_samples=1)
    raising = ReplayBuffer(10, flow=Flow(admission="raise"), consume_after_n_samples=1)
    for rb in (dropping, raising):
        rb.extend(numbers(8))
    assert dropping.extend(numbers(3)).shape == (0,)
    assert dropping.add({"x": torch.tensor(1)}) == 8
    assert dropping.extend(numbers(2)).shape == (0,)
    assert dropping.stats()["dropped"] == 5
    with pytest.raises(BufferFull, match="8 items are stored"):
        raising.extend(numbers(3))
    assert raising.write_count == 8


def test_add_says_where_it_was_dropped() -> None:
    rb = ReplayBuffer(2, flow=Flow(admission="drop_newest"), consume_after_n_samples=1)
    assert [rb.add({"x": torch.tensor(i)}) for i in range(4)] == [0, 1, -1, -1]


def test_watermarks_hold_producers_back_until_the_low_one() -> None:
    rb = BlockingReplayBuffer(100, high_watermark=8, low_watermark=3)
    rb.extend(numbers(8))
    waiting = Call(lambda: rb.extend(numbers(2, 8)))
    until(lambda: rb.stats()["waiting_producers"] == 1)
    assert rb.stats()["under_pressure"]
    rb.sample(4)
    until(lambda: rb.stats()["waiting_producers"] == 1)
    assert waiting.waits
    assert not rb.wait_until_writable(1, timeout=0)
    rb.sample(1)
    waiting.result()
    assert not rb.stats()["under_pressure"]
    assert (rb.stats()["high_watermark"], rb.stats()["low_watermark"]) == (8, 3)


def test_waiting_and_taking_is_one_step(shared: bool) -> None:
    """Two consumers never both pass a gate that one batch can satisfy."""
    with BlockingReplayBuffer(64, shared=shared) as rb:
        results: list[torch.Tensor] = []
        consumers = [Call(lambda: results.append(rb.sample(4, wait=True)["x"])) for _ in range(8)]
        until(lambda: rb.stats()["waiting_consumers"] == 8)
        for batch in range(8):
            rb.extend(numbers(4, 4 * batch))
        for consumer in consumers:
            consumer.result()
        assert sorted(torch.cat(results).tolist()) == list(range(32))


def test_the_ratio_holds_samples_back() -> None:
    rb = RateLimitedReplayBuffer(1000, samples_per_insert=2.0, min_size=10, batch_size=10)
    rb.extend(numbers(10))
    assert not rb.can_sample()  # filling to min_size owes nothing
    rb.extend(numbers(5))
    rb.sample()
    waiting = Call(lambda: rb.sample(wait=True))
    until(lambda: rb.stats()["waiting_consumers"] == 1)
    rb.extend(numbers(4))
    assert waiting.waits
    rb.extend(numbers(1))
    waiting.result()
    assert rb.stats()["samples_returned"] == 20


def test_the_debt_holds_producers_back() -> None:
    rb = RateLimitedReplayBuffer(1000, samples_per_insert=1.0, max_debt=20, batch_size=10)
    rb.extend(numbers(10))
    rb.extend(numbers(10))
    waiting = Call(lambda: rb.extend(numbers(10)))
    until(lambda: rb.stats()["waiting_producers"] == 1)
    rb.sample()
    waiting.result()
    with pytest.raises(DeadlineExceeded, match="max_debt=20"):
        rb.extend(numbers(10), timeout=0)


def test_a_band_that_must_deadlock_is_refused_with_its_numbers() -> None:
    """flow-7: as soon as both sizes are known."""
    rb = RateLimitedReplayBuffer(1000, samples_per_insert=1.0, max_debt=19, batch_size=16)
    rb.extend(numbers(6), timeout=0)
    with pytest.raises(Unsatisfiable, match=r"max_debt=19.*inserts of 6 and samples of 16.*at least 20"):
        rb.sample()
    rb = RateLimitedReplayBuffer(1000, samples_per_insert=1.0, max_debt=20, batch_size=16)
    for _ in range(100):
        while rb.can_sample():
            rb.sample()
        rb.extend(numbers(6), timeout=0)


def test_an_insert_that_alone_owes_too_much_is_refused() -> None:
    """flow-7: also where it passes min_size, which no sample could make up for."""
    rb = ReplayBuffer(1000, flow=Flow(min_size=20, samples_per_insert=8, max_debt=10))
    rb.extend(numbers(8))
    rb.extend(numbers(8))
    with pytest.raises(Unsatisfiable, match=r"insert of 8 items alone would owe 32 samples, above max_debt=10"):
        rb.extend(numbers(8))
    rb.extend(numbers(5))
    assert rb.write_count == 21


def test_prefetched_batches_reserve_and_refund() -> None:
    rb = ReplayBuffer(1000, flow=Flow(samples_per_insert=1.0), prefetch=2, batch_size=10, seed=0)
    rb.extend(numbers(35))
    rb.sample()
    stats = rb.stats()
    assert (stats["samples_returned"], stats["reserved"], stats["prefetched"]) == (10, 20, 2)
    assert rb.can_sample(25)  # what was drawn ahead in tens is given back first
    assert not rb.can_sample(26)
    rb.sample(5)
    stats = rb.stats()
    assert (stats["samples_returned"], stats["reserved"], stats["prefetched"]) == (15, 10, 2)
    rb.empty()
    stats = rb.stats()
    assert (stats["reserved"], stats["prefetched"]) == (0, 0)


def test_what_is_drawn_ahead_is_owed_until_it_is_returned() -> None:
    """By the counters that anybody can read, neither side ever leaves its bound; and nobody waits for ever."""
    flow = Flow(samples_per_insert=4.0, max_debt=120)
    with ReplayBuffer(1000, flow=flow, prefetch=3, batch_size=16, seed=0) as rb:
        for turn in range(300):
            with contextlib.suppress(DeadlineExceeded):
                rb.extend(numbers(5), timeout=0)
            owed = 4 * rb.write_count - rb.stats()["samples_returned"]
            assert owed <= 120
            if turn % 3:
                with contextlib.suppress(NotReady):
                    rb.sample()
            stats = rb.stats()
            assert stats["samples_returned"] + stats["reserved"] <= 4 * rb.write_count
        assert rb.stats()["samples_returned"] > 2000
        while True:  # a full debt, most of it drawn ahead already: the next sample makes room
            try:
                rb.extend(numbers(5), timeout=0)
            except DeadlineExceeded:
                break
        assert rb.stats()["reserved"] == 48
        assert f"48 by process {os.getpid()}" in rb.explain("extend", 5)
        waiting = Call(lambda: rb.extend(numbers(5)))
        until(lambda: rb.stats()["waiting_producers"] == 1)
        for _ in range(2):
            rb.sample()
        waiting.result()


@pytest.mark.parametrize("consume", [None, 1])
def test_items_that_another_process_has_drawn_ahead_are_named(consume: int | None) -> None:
    flow = Flow(samples_per_insert=1.0, max_debt=24)
    more: dict[str, Any] = {"flow": flow} if consume is None else {}
    with ReplayBuffer(24, prefetch=2, batch_size=8, consume_after_n_samples=consume, shared=True, **more) as rb:
        rb.extend(numbers(24))
        context = mp.get_context("fork")
        mine, theirs = context.Pipe()
        process = context.Process(target=sample_once_and_stay, args=(rb.handle(), theirs), daemon=True)
        process.start()
        assert mine.recv()
        named = f"drawn ahead and not returned yet: 16 by process {process.pid}"
        assert named in rb.explain()
        with pytest.raises(NotReady, match=named):
            rb.sample()
        with pytest.raises(DeadlineExceeded, match=named):
            rb.sample(wait=True, timeout=0.01)
        if consume is None:
            assert named in rb.explain("extend", 17)
        mine.send(None)
        process.join()
        process.close()
        mine.close()
        theirs.close()


def sample_once_and_stay(handle: Any, pipe: Any) -> None:
    rb = ReplayBuffer.attach(handle)
    rb.sample()
    pipe.send(True)
    pipe.recv()
    rb.close()


def test_what_this_process_has_drawn_ahead_counts_for_its_next_sample() -> None:
    """Although the ratio allows no more to be drawn: no look says otherwise, and no advisory wait waits."""
    with ReplayBuffer(100, flow=Flow(samples_per_insert=1.0), prefetch=2, batch_size=8, seed=0) as rb:
        rb.extend(numbers(24))
        rb.sample()
        assert rb.stats()["reserved"] == 16
        assert rb.can_sample()
        assert rb.explain() == "sample(8) can proceed"
        assert rb.wait_until_sampleable(timeout=0)
        assert rb.wait_until_sampleable(16, timeout=0)  # what was drawn ahead in eights is given back first
        assert not rb.wait_until_sampleable(17, timeout=0)
        assert rb.sample(16).batch_size == (16,)


def test_unlimited_leaves_the_admission_as_it_is() -> None:
    """What has no room is dropped there too, where nobody could ever make room."""
    with ReplayBuffer(4, flow=Flow(admission="drop_newest")) as rb:
        rb.extend(numbers(4))
        with rb.unlimited():
            assert rb.extend(numbers(1), timeout=10).tolist() == []
        assert rb.stats()["dropped"] == 1


def test_unlimited_is_outside_the_ratio() -> None:
    rb = RateLimitedReplayBuffer(1000, samples_per_insert=1.0, min_size=10, max_debt=20, batch_size=10)
    with rb.unlimited():
        rb.extend(numbers(500))
    assert not rb.can_sample()  # the prefill owes nothing
    rb.extend(numbers(10))
    rb.sample()
    with pytest.raises(NotReady):
        rb.sample()
    with rb.unlimited():
        rb.sample(100)
    rb.extend(numbers(10))
    rb.sample()
    assert rb.stats()["samples_returned"] == 120


def test_an_idle_learner_bounds_its_producers() -> None:
    """flow-9: what producers hold beyond the buffer is one batch each."""
    rb = BlockingReplayBuffer(10)
    cancel = threading.Event()
    producers = [Call(lambda: [rb.extend(numbers(5), cancel_event=cancel) for _ in range(100)]) for _ in range(3)]
    until(lambda: rb.stats()["waiting_producers"] == 3)
    assert rb.write_count == 10
    cancel.set()
    for producer in producers:
        with pytest.raises(Cancelled):
            producer.result()


def test_a_blocking_buffer_that_never_consumes_warns() -> None:
    with pytest.warns(UserWarning, match=r"never consumes.*empty\(\)"):
        ReplayBuffer(10, flow=BLOCK)


def test_a_blocking_buffer_cannot_be_told_not_to_block() -> None:
    with pytest.raises(InvalidArgument, match="admission"):
        BlockingReplayBuffer(10, flow=Flow(admission="raise"))


def test_iteration_waits_and_ends_with_the_buffer() -> None:
    rb = BlockingReplayBuffer(10, batch_size=2)
    got: list[int] = []
    reader = Call(lambda: [got.extend(batch["x"].tolist()) for batch in rb])
    rb.extend(numbers(6))
    until(lambda: len(got) == 6)
    rb.close()
    reader.result()
    assert got == list(range(6))


def test_iteration_ends_with_the_epoch() -> None:
    for drop_last, sizes in ((False, [4, 4, 2]), (True, [4, 4])):
        rb = ReplayBuffer(20, sampler=SamplerWithoutReplacement(drop_last=drop_last), batch_size=4, seed=0)
        rb.extend(numbers(10))
        for _ in range(3):
            batches = [batch["x"] for batch in rb]
            assert [len(batch) for batch in batches] == sizes
            seen = torch.cat(batches)
            assert len(seen.unique()) == len(seen)


def test_hundreds_of_waiters_each_get_one() -> None:
    rb = BlockingReplayBuffer(2000)
    calls = [Call(lambda: rb.sample(1, wait=True)["x"].item()) for _ in range(300)]
    rb.extend(numbers(300))
    assert sorted(call.result(30) for call in calls) == list(range(300))


@pytest.mark.parametrize("op", usually(["sample", "extend"], "sample"))
@pytest.mark.parametrize("every", usually([1, 13], 13))
def test_interrupted_anywhere_nobody_is_left_among_those_that_wait(op: str, every: int) -> None:
    with ReplayBuffer(10, flow=Flow(min_size=5, admission="block"), consume_after_n_samples=1) as rb:
        rb.extend(numbers(2))
        for place in itertools.count(step=every):
            cut_off = False
            try:
                with interrupted(place, "replay/", "shm/"):
                    if op == "sample":
                        rb.sample(1, wait=True, timeout=0.002)
                    else:
                        rb.extend(numbers(9), timeout=0.002)
            except Interrupt:
                cut_off = True
            except DeadlineExceeded:
                pass
            stats = rb.stats()
            assert (stats["waiting_consumers"], stats["waiting_producers"]) == (0, 0)
            if not cut_off:
                break
        assert place > 50
