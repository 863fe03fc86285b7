"""A call that fails, at whatever stage, leaves everything as it was for all others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from waits import Call, until

from millpond import Flow, ReplayBuffer, ReplayBufferEnsemble
from millpond.core.errors import (
    BufferFull,
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    MillpondError,
    NonFinite,
    NotReady,
    Unsatisfiable,
)
from millpond.core.schema import Schema
from millpond.replay import (
    ConsumingSampler,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
)
from millpond.replay.state import CONSUMER_BLOCKS, NAMES, PRESSURE, PRODUCER_BLOCKS

SOON = 0.01


def numbers(n: int, start: int = 0) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(start, start + n)}


def seen(rb: ReplayBuffer) -> dict[str, Any]:
    """All that others, and later calls, go by; the words of the state but for the count of blocks."""
    local = rb._local
    state = dict(zip(NAMES, local.engine.control.peek(), strict=False))
    for word in (CONSUMER_BLOCKS, PRODUCER_BLOCKS):
        del state[NAMES[word]]
    del state[NAMES[PRESSURE]]  # as the figures tell it
    stats = rb.stats()
    del stats["producer_blocks"], stats["consumer_blocks"]
    return {
        **state,
        **stats,
        "generator": local.engine.random.torch.get_state().tolist(),
        "ahead": [batch.numbers.tolist() for batch in local.ahead],
        "waiting": local.engine.control.waiting(),
        "items": rb[:]["x"].tolist() if rb.schema is not None else None,
        "schema": rb.schema,
    }


# ---------------------------------------------------------------------- pressure
def marked(high: int = 8, low: int | None = 2) -> ReplayBuffer:
    flow = Flow(admission="block", high_watermark=high, low_watermark=low)
    return ReplayBuffer(10, consume_after_n_samples=1, flow=flow, seed=0)


def give_up(rb: ReplayBuffer, how: str) -> None:
    """An insert of 4 that does not fit waits, and then does not."""
    if how == "timeout":
        with pytest.raises(DeadlineExceeded):
            rb.extend(numbers(4), timeout=SOON)
        return
    stop = threading.Event()
    waiting = Call(lambda: rb.extend(numbers(4), cancel_event=stop))
    until(lambda: rb.stats()["waiting_producers"] == 1)
    assert rb.stats()["under_pressure"]
    stop.set()
    with pytest.raises(Cancelled):
        waiting.result()


@pytest.mark.parametrize("how", ["timeout", "cancel"])
@pytest.mark.parametrize("low", [2, None])
def test_a_write_that_gave_up_leaves_no_pressure_behind(how: str, low: int | None) -> None:
    with marked(low=low) as rb:
        rb.extend(numbers(6))
        give_up(rb, how)
        assert not rb.stats()["under_pressure"]
        rb.extend(numbers(2), timeout=0)  # would have fitted all the time
        assert len(rb) == 8


def test_while_it_waits_smaller_writes_wait_with_it_and_no_longer() -> None:
    with marked() as rb:
        rb.extend(numbers(6))
        stop = threading.Event()
        large = Call(lambda: rb.extend(numbers(4), cancel_event=stop))
        until(lambda: rb.stats()["waiting_producers"] == 1)
        small = Call(lambda: rb.extend(numbers(1)))
        until(lambda: rb.stats()["waiting_producers"] == 2)
        stop.set()
        with pytest.raises(Cancelled):
            large.result()
        small.result(timeout=5)
        assert len(rb) == 7


def test_pressure_that_was_there_before_stays() -> None:
    with marked() as rb:
        rb.extend(numbers(2))
        rb.extend(numbers(7))  # from the low watermark an insert may go above the high one
        assert rb.stats()["under_pressure"]
        give_up(rb, "timeout")
        assert rb.stats()["under_pressure"]
        rb.sample(4)
        with pytest.raises(DeadlineExceeded):
            rb.extend(numbers(1), timeout=SOON)
        rb.sample(3)
        assert not rb.stats()["under_pressure"]
        rb.extend(numbers(1), timeout=0)


# ---------------------------------------------------------------------- every call, at every stage
def refused(rb: ReplayBuffer, call: Callable[[], Any], *errors: type[MillpondError]) -> None:
    before = seen(rb)
    with pytest.raises(errors):
        call()
    assert seen(rb) == before


SAMPLERS: dict[str, Callable[[], Any]] = {
    "uniform": RandomSampler,
    "epochs": SamplerWithoutReplacement,
    "queue": lambda: ConsumingSampler(1),
    "prioritized": PrioritizedSampler,
    "slices": lambda: SliceSampler(slice_len=3),
    "nstep": lambda: NStep(2, 0.9),
}


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_samples_that_fail_change_nothing(kind: str, prefetch: int) -> None:
    n = 3 if kind in ("slices", "nstep") else 4
    flow = Flow(min_size=5, samples_per_insert=1)
    with ReplayBuffer(40, sampler=SAMPLERS[kind](), flow=flow, prefetch=prefetch, seed=0) as rb:
        stop = threading.Event()
        stop.set()
        rb.extend(steps(4))
        for _ in range(2):
            refused(rb, lambda: rb.sample(n), NotReady)
            refused(rb, lambda: rb.sample(n, wait=True, timeout=0), DeadlineExceeded)
            refused(rb, lambda: rb.sample(n, wait=True, timeout=SOON), DeadlineExceeded)
            refused(rb, lambda: rb.sample(n, wait=True, cancel_event=stop), Cancelled)
            refused(rb, lambda: rb.sample(-1), InvalidArgument)
            assert not rb.wait_until_sampleable(n, timeout=SOON)
            assert not rb.can_sample(n)
            rb.extend(steps(7, 4))
            while rb.can_sample(n):
                rb.sample(n)


def steps(n: int, start: int = 0) -> dict[str, Any]:
    """One long episode, for samplers that need to know."""
    zeros = torch.zeros(n, 1)
    ends = torch.zeros(n, 1, dtype=torch.bool)
    return {
        **numbers(n, start),
        "episode_id": torch.zeros(n, dtype=torch.int64),
        "step": torch.arange(start, start + n),
        "observation": zeros,
        "next": {"observation": zeros, "reward": zeros, "done": ends, "terminated": ends, "truncated": ends},
    }


@pytest.mark.parametrize("admission", ["block", "raise", "overwrite"])
def test_writes_that_fail_change_nothing(admission: Any) -> None:
    flow = Flow(admission=admission, samples_per_insert=1, max_debt=8)
    with ReplayBuffer(10, sampler=PrioritizedSampler(), consume_after_n_samples=1, flow=flow, check_finite=True) as rb:
        stop = threading.Event()
        stop.set()
        first: list[tuple[Any, dict[str, Any], tuple[type[MillpondError], ...]]] = [
            ({"x": torch.tensor([1.0, float("nan")])}, {}, (NonFinite,)),
            ({"x": torch.ones(2)}, {"priority": -1.0}, (InvalidArgument,)),
            ({"x": torch.ones(2)}, {"receipt": (64, 1)}, (InvalidArgument,)),
            ({"x": torch.ones(2)}, {"cancel_event": stop}, (Cancelled,)),
            ({"x": torch.ones(2)}, {"timeout": -1}, (InvalidArgument,)),
            ({"x": torch.ones(11)}, {}, (Unsatisfiable,)),
        ]
        for items, how, errors in first:  # none binds the schema
            refused(rb, lambda: rb.extend(items, **how), *errors)  # noqa: B023
        refused(rb, lambda: rb.add({"x": torch.tensor(float("inf"))}), NonFinite)
        assert rb.schema is None
        rb.extend(numbers(8), priority=2.0)
        full = (DeadlineExceeded, BufferFull)
        refused(rb, lambda: rb.extend(numbers(2), timeout=0), *full)
        refused(rb, lambda: rb.extend(numbers(2), timeout=SOON), *full)
        refused(rb, lambda: rb.extend(numbers(2), cancel_event=stop), Cancelled)
        refused(rb, lambda: rb.extend({"y": torch.ones(2)}), InvalidArgument)
        refused(rb, lambda: rb.extend(numbers(2), priority=float("nan")), InvalidArgument)
        refused(rb, lambda: rb.update_priority(torch.tensor([1, 2]), float("nan")), InvalidArgument)
        refused(rb, lambda: rb.update_priority(torch.tensor([11]), 1.0), InvalidArgument)
        refused(rb, lambda: rb.update(torch.tensor([1]), {"y": torch.ones(1)}), InvalidArgument)
        assert not rb.wait_until_writable(2, timeout=SOON)


def test_the_schema_that_is_given_at_last_is_the_one_that_counts() -> None:
    with ReplayBuffer(10, check_finite=True) as rb:
        with pytest.raises(NonFinite):
            rb.extend({"x": torch.full((2, 3), float("nan"))})
        rb.extend({"x": torch.ones(2)})
        assert rb.schema == Schema.from_example({"x": torch.ones(2)})


def test_a_sample_of_an_ensemble_that_fails_moves_no_generator() -> None:
    def made(tries: int) -> list[list[int]]:
        members = [ReplayBuffer(100, seed=i) for i in range(2)]
        with members[0], members[1]:
            both = ReplayBufferEnsemble(*members, batch_size=6, seed=3)
            members[0].extend(numbers(50))
            for _ in range(tries):
                with pytest.raises(NotReady):
                    both.sample(64)
            members[1].extend(numbers(50, 50))
            return [both.sample()["x"].tolist() for _ in range(3)]

    assert made(0) == made(3)
