"""A sample that had to wait returns what one that need not would have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from waits import Call, until

from millpond import Flow, ReplayBuffer
from millpond.core.schema import Schema
from millpond.replay import NStep, PrioritizedSampler, RandomSampler, SamplerWithoutReplacement
from millpond.replay import rows as rows_module

SAMPLERS: dict[str, Any] = {
    "random": RandomSampler,
    "epochs": SamplerWithoutReplacement,
    "prioritized": PrioritizedSampler,
    "n-step": lambda: NStep(2, gamma=0.9),
}


def transitions(n: int) -> dict[str, Any]:
    number = torch.arange(n)
    return {
        "observation": number.float()[:, None].repeat(1, 3),
        "action": number.to(torch.bfloat16),
        "next": {
            "observation": number.float()[:, None].repeat(1, 3) + 1,
            "reward": torch.ones(n, 1),
            "terminated": torch.zeros(n, 1, dtype=torch.bool),
            "truncated": torch.zeros(n, 1, dtype=torch.bool),
            "done": torch.zeros(n, 1, dtype=torch.bool),
        },
        "episode_id": torch.zeros(n, dtype=torch.int64),
        "step": number,
    }


def waited(items: Any, n: int, **options: Any) -> Any:
    """A batch that `sample` waited for, and the same batch of a buffer that was full at once."""
    batches = []
    for patient in (True, False):
        kept = {**options, "sampler": options["sampler"](), "schema": Schema.from_example(items)}
        with ReplayBuffer(1000, seed=3, flow=Flow(min_size=600), **kept) as rb:
            if patient:
                call = Call(lambda rb=rb: rb.sample(n, wait=True, timeout=60))
                until(lambda rb=rb: rb.stats()["waiting_consumers"] == 1)
                rb.extend(items)
                batches.append(call.result(60))
            else:
                rb.extend(items)
                batches.append(rb.sample(n))
            if isinstance(items, dict):
                rb.update(torch.arange(600), {"step": torch.full((600,), -1)})
    return batches


@pytest.mark.parametrize("vast", [False, True])
@pytest.mark.parametrize("n", [1, 8, 9, 40, 500])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_after_a_wait_the_batch_is_the_same(monkeypatch: Any, sampler: str, n: int, vast: bool) -> None:
    """Also that it is a copy: what is written afterwards does not show in it (ring-9)."""
    monkeypatch.setattr(rows_module, "VAST", 1 if vast else 1 << 60)
    after, at_once = waited(transitions(600), n, sampler=SAMPLERS[sampler])
    assert sorted(map(str, after.keys(True, True))) == sorted(map(str, at_once.keys(True, True)))
    for key in at_once.keys(True, True):
        assert torch.equal(after[key], at_once[key]), key
    assert after["index"].data_ptr() != after["generation"].data_ptr()


@pytest.mark.parametrize("options", [{"contiguous": True}, {"device": "cpu"}, {"transform": lambda td: td.clone()}, {}])
def test_whatever_is_done_to_the_batch(options: dict[str, Any]) -> None:
    after, at_once = waited(transitions(600), 20, sampler=RandomSampler, **options)
    for key in at_once.keys(True, True):
        assert torch.equal(after[key], at_once[key]), key


def test_plain_tensors() -> None:
    after, at_once = waited(torch.arange(600), 20, sampler=RandomSampler)
    assert torch.equal(after, at_once)
    assert np.unique(after.numpy()).size > 1


def test_two_that_wait_get_batches_of_their_own() -> None:
    """Each batch is new memory, also for one caller after the other."""
    with ReplayBuffer(100, flow=Flow(samples_per_insert=1), seed=0) as rb:
        batches = []
        for i in range(3):
            call = Call(lambda: rb.sample(4, wait=True, timeout=60))
            until(lambda: rb.stats()["waiting_consumers"] == 1)
            rb.extend({"x": torch.full((4,), i)})
            batches.append(call.result(60))
        assert len({batch["x"].data_ptr() for batch in batches}) == 3
        assert batches[0]["x"].tolist() == [0] * 4
