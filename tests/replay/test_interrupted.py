"""Exceptions that come from outside, such as Ctrl-C, and from what users give: no reservation and no item is lost."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from millpond import Flow, ReplayBuffer
from millpond.replay import ConsumingSampler, PrioritizedSampler, RandomSampler, SamplerWithoutReplacement
from tests.replay.interrupts import Interrupt, interrupted

KINDS: dict[str, dict[str, Any]] = {
    "random": {"sampler": RandomSampler(), "flow": Flow(samples_per_insert=4.0)},
    "prioritized": {"sampler": PrioritizedSampler()},
    "epochs": {"sampler": SamplerWithoutReplacement()},
    "queue": {"sampler": ConsumingSampler(1)},
    "pool": {"sampler": RandomSampler(), "consume_after_n_samples": 2},
}


def make(kind: str, **more: Any) -> ReplayBuffer:
    how = KINDS[kind] | {"seed": 0} | more
    how["sampler"] = type(how["sampler"])(*([1] if kind == "queue" else []))
    return ReplayBuffer(1000, **how)


def numbers(first: int, n: int) -> dict[str, torch.Tensor]:
    return {"number": torch.arange(first, first + n)}


def agree(rb: ReplayBuffer) -> None:
    """What everybody sees to be reserved is what this process keeps."""
    stats, kept = rb.stats(), list(rb._ahead)
    assert (stats["reserved"], stats["prefetched"]) == (sum(len(b.slots) for b in kept), len(kept))
    assert rb._engine.control.participants.all_reserved() == (stats["reserved"], stats["prefetched"])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("sizes", [(4,), (4, 3), (4, 9)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_anywhere_a_sample_leaves_no_reservation_behind(
    kind: str, sizes: tuple[int, ...], shared: bool
) -> None:
    with make(kind, prefetch=2, shared=shared) as rb:
        written = 0
        for place in itertools.count():
            rb.extend(numbers(written, 40))
            written += 40
            cut_off = False
            try:
                with interrupted(place, "replay/"):
                    for n in sizes:
                        rb.sample(n)
            except Interrupt:
                cut_off = True
            rb.sample(sizes[0])
            agree(rb)
            if not cut_off:
                break
        assert place > 50


@pytest.mark.parametrize("sizes", [(4, 3), (4, 9), (9, 4)], ids=str)
@pytest.mark.parametrize("kind", ["queue", "pool", "epochs"])
def test_interrupted_while_batches_are_handed_out_no_item_is_lost(kind: str, sizes: tuple[int, ...]) -> None:
    """Everywhere but in the midst of drawing."""
    more = {} if kind == "epochs" else {"consume_after_n_samples": 1}
    with make(kind, prefetch=2, **more) as rb:
        written = 5000 if kind == "epochs" else 0
        if written:
            rb.extend(numbers(0, 1000))
        returned: list[int] = []
        for place in itertools.count():
            if kind != "epochs" and len(rb) < 100:
                rb.extend(numbers(written, 40))
                written += 40
            cut_off = False
            for n in sizes:
                found = None
                try:
                    with interrupted(place, "replay/ahead.py"):
                        found = rb.sample(n)
                except Interrupt:
                    cut_off = True
                returned += [] if found is None else found["number"].tolist()
            agree(rb)
            assert rb.stats()["samples_returned"] == len(returned)
            if not cut_off:
                break
        assert place > 40
        if kind == "epochs":
            while len(returned) < 1000:
                returned += rb.sample(7)["number"].tolist()
            assert sorted(returned[:1000]) == list(range(1000))
        else:
            kept = [number for batch in rb._ahead for number in batch.numbers.tolist()]
            assert sorted([*returned, *kept, *rb[:]["number"].tolist()]) == list(range(written))
