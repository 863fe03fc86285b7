"""A sampled batch may be written to another buffer: what tells where its items came from is left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from millpond import ReplayBuffer, ReplayBufferEnsemble
from millpond.core.errors import SchemaMismatch
from millpond.core.schema import Schema
from millpond.replay import HindsightSampler, NStep, PrioritizedSampler

FIELDS = {"x", "next"}


def items(n: int) -> dict[str, Any]:
    return {"x": torch.arange(n), "next": {"reward": torch.arange(n).float()[:, None], "done": torch.zeros(n, 1) > 0}}


def source(**how: Any) -> ReplayBuffer:
    rb = ReplayBuffer(100, batch_size=8, seed=0, num_envs=1, **how)
    rb.extend(items(20))
    return rb


def forms(sampled: TensorDict) -> list[Any]:
    """A sampled batch as people carry it on."""
    return [
        sampled,
        sampled.clone(),
        sampled.to_dict(),
        {k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in sampled.items()},
    ]


@pytest.mark.parametrize("bound", ["at the first write", "before", "given"])
@pytest.mark.parametrize("sampler", [None, PrioritizedSampler()], ids=["random", "prioritized"])
def test_a_sampled_batch_is_written_to_another_buffer(bound: str, sampler: Any) -> None:
    with source(sampler=sampler) as rb:
        for sampled in forms(rb.sample()):
            with ReplayBuffer(100, schema=rb.schema if bound == "given" else None) as other:
                if bound == "before":
                    other.extend(items(3))
                other.extend(sampled)
                other.extend(sampled)
                assert other.schema == rb.schema
                found = other[-8:]
                assert set(found.keys()) == FIELDS
                assert torch.equal(found["x"], torch.as_tensor(sampled["x"]))
                assert torch.equal(found["next", "reward"][:, 0].long(), found["x"])


def test_so_is_one_item_of_it_and_a_batch_of_an_ensemble() -> None:
    with source(sampler=PrioritizedSampler()) as rb, source() as plain, ReplayBuffer(100) as other:
        sampled = rb.sample()
        other.add(sampled[3])
        other.add({key: sampled[4][key] for key in sampled.keys()})  # noqa: SIM118
        assert other.schema == rb.schema
        assert other[:]["x"].tolist() == sampled["x"][3:5].tolist()
        other.extend(ReplayBufferEnsemble(rb, plain, batch_size=30, seed=0).sample())
        assert set(other[:].keys()) == FIELDS
        assert len(other) == 32


def test_back_into_the_buffer_that_it_came_from() -> None:
    with source() as rb:
        rb.extend(rb.sample())
        assert (len(rb), rb.write_count) == (28, 28)


def test_what_a_batch_was_computed_to_be_is_kept_or_refused() -> None:
    """n-step rewards without their number of steps would be wrong."""
    with source(sampler=NStep(3, 0.9)) as rb, ReplayBuffer(100) as other, ReplayBuffer(100) as single:
        sampled = rb.sample()
        other.extend(sampled)
        assert torch.equal(other[:]["steps_to_next_obs"], sampled["steps_to_next_obs"])
        single.extend(items(3))
        with pytest.raises(SchemaMismatch, match="unknown: steps_to_next_obs"):
            single.extend(sampled)
        assert single.write_count == 3


def test_relabelled_items_are_items() -> None:
    goals = {"desired_goal": torch.ones(20, 1), "achieved_goal": torch.zeros(20, 1)}
    hindsight = HindsightSampler(lambda achieved, desired: (achieved == desired).float())
    with ReplayBuffer(100, batch_size=8, sampler=hindsight, num_envs=1) as rb, ReplayBuffer(100) as other:
        rb.extend({**items(20), "observation": goals} | {"next": {**items(20)["next"], "observation": goals}})
        sampled = rb.sample()
        assert "relabelled" in sampled.keys()  # noqa: SIM118
        for _ in range(2):
            other.extend(sampled)
        assert other.schema == rb.schema


def test_fields_of_the_user_s_own_stay() -> None:
    schema = Schema({"x": (torch.int64, ()), "priority_weight": (torch.float32, ())})
    with source(sampler=PrioritizedSampler()) as rb, ReplayBuffer(100, schema=schema) as other:
        sampled = rb.sample()
        other.extend(sampled.exclude("next"))
        assert torch.equal(other[:]["priority_weight"], sampled["priority_weight"])
        sampled["mine"] = torch.zeros(8)
        with pytest.raises(SchemaMismatch, match="mine"):
            other.extend(sampled.exclude("next"))


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize(
    "batch",
    [
        {"index": torch.arange(4)},
        {"generation": torch.arange(4)},
        {"index": torch.arange(4), "generation": torch.arange(4.0)},
        {"index": torch.arange(8).view(4, 2), "generation": torch.arange(4)},
        {"index": {"inner": torch.arange(4)}, "generation": torch.arange(4)},
        {"index": np.arange(4, dtype=np.int32), "generation": np.arange(4)},
    ],
)
def test_what_was_not_sampled_is_refused_as_before(batch: dict[str, Any], bound: bool) -> None:
    with ReplayBuffer(100) as rb:
        if bound:
            rb.extend({"x": torch.arange(4)})
        with pytest.raises(SchemaMismatch, match="index|generation"):
            rb.extend({"x": torch.arange(4), **batch})
        assert rb.write_count == 4 * bound


def test_a_schema_that_names_such_a_field_is_refused() -> None:
    with pytest.raises(SchemaMismatch, match="its own"):
        ReplayBuffer(100, schema=Schema({"x": (torch.int64, ()), "index": (torch.int64, ())}))
