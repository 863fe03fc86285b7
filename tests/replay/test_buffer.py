"""One buffer in one process: what goes in, what comes out, and what is refused before anything changed."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from millpond import Flow, ReplayBuffer
from millpond.core.errors import (
    BufferClosed,
    InvalidArgument,
    InvalidType,
    NonFinite,
    NotReady,
    NotShareable,
    OutOfDisk,
    OutOfMemory,
    SchemaMismatch,
    Unsatisfiable,
)
from millpond.core.schema import Schema
from millpond.replay import (
    ConsumingSampler,
    LazyMemmapStorage,
    LazyTensorStorage,
    MappedStorage,
    PrioritizedSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    TensorStorage,
)


def transitions(n: int, start: int = 0) -> TensorDict:
    step = torch.arange(start, start + n, dtype=torch.float32)[:, None]
    return TensorDict(
        {
            "observation": step.expand(n, 3).clone(),
            "action": -step,
            "next": {"observation": step.expand(n, 3) + 1, "reward": step, "done": step % 10 == 9},
        },
        [n],
    )


def test_a_batch_holds_the_items_and_where_they_came_from() -> None:
    rb = ReplayBuffer(100, batch_size=32, seed=0)
    slots = rb.extend(transitions(50))
    assert slots.dtype is torch.int64
    assert slots.tolist() == list(range(50))
    batch = rb.sample()
    assert batch.batch_size == (32,)
    assert batch["index"].dtype is batch["generation"].dtype is torch.int64
    assert torch.equal(batch["next", "reward"][:, 0].long(), batch["generation"])
    assert torch.equal(batch["observation"] + 1, batch["next", "observation"])
    data, info = rb.sample(8, return_info=True)
    assert "index" not in set(data.keys())
    assert set(info.keys()) == {"index", "generation"}


def test_a_ring_forgets_the_oldest() -> None:
    rb = ReplayBuffer(10)
    rb.extend(transitions(7))
    assert rb.extend(transitions(7, 7)).tolist() == [7, 8, 9, 0, 1, 2, 3]
    assert rb[:]["action"][:, 0].tolist() == [-float(i) for i in range(4, 14)]
    assert (rb.write_count, rb.storage_size, rb.sampleable_size, len(rb), rb.capacity) == (14, 10, 10, 10, 10)
    assert rb.stats()["overwritten"] == 4


def test_indexing_goes_by_age() -> None:
    rb = ReplayBuffer(5)
    rb.extend({"x": torch.arange(8)[3:]})
    rb.extend({"x": torch.tensor([8, 9])})
    assert rb[0]["x"] == 5
    assert rb[-1]["x"] == 9
    assert rb[1:4]["x"].tolist() == [6, 7, 8]
    assert rb[torch.tensor([4, 0])]["x"].tolist() == [9, 5]
    assert rb[rb[:]["x"] > 7]["x"].tolist() == [8, 9]
    with pytest.raises(IndexError):
        rb[5]
    with pytest.raises(InvalidArgument, match="mask"):
        rb[torch.tensor([True])]


def test_add_takes_one_item_in_any_form() -> None:
    rb = ReplayBuffer(4)
    item = {"x": np.float32([1, 2]), "reward": 1.5, "done": False, "n": 3}
    assert [rb.add(item) for _ in range(6)] == [0, 1, 2, 3, 0, 1]
    rb.add({"x": torch.tensor([1.0, 2.0]), "reward": np.float32(1.5), "done": np.bool_(True), "n": 4})
    assert rb[-1]["done"].item() is True
    assert rb.schema is not None
    assert rb.schema.by_key["reward",].dtype is torch.float32
    for bad in ({**item, "n": 3.5}, {**item, "x": np.float32([1])}, {**item, "done": 1}, {"x": item["x"]}):
        with pytest.raises(SchemaMismatch):
            rb.add(bad)
    assert rb.write_count == 7


def test_a_plain_tensor_comes_back_as_one() -> None:
    rb = ReplayBuffer(10, seed=1)
    rb.extend(torch.arange(12).view(6, 2))
    batch = rb.sample(4)
    assert isinstance(batch, torch.Tensor)
    assert batch.shape == (4, 2)
    data, info = rb.sample(4, return_info=True)
    assert torch.equal(data[:, 0] // 2, info["generation"])


def test_the_callers_batch_and_index_are_never_changed() -> None:
    """ring-8"""
    rb = ReplayBuffer(10, sampler=PrioritizedSampler())
    batch = transitions(5)
    kept = batch.clone()
    rb.extend(batch)
    index = torch.tensor([3, 3, 1])
    priority = torch.tensor([1.0, 2.0, 3.0])
    rb.update_priority(index, priority)
    assert (batch == kept).all()
    assert index.tolist() == [3, 3, 1]
    assert priority.tolist() == [1.0, 2.0, 3.0]


def test_changing_a_sampled_batch_changes_nothing_stored() -> None:
    """ring-9"""
    rb = ReplayBuffer(10, seed=0)
    rb.extend(transitions(10))
    before = rb[:].clone()
    for read in (lambda: rb.sample(10), lambda: rb[:], lambda: rb.peek(10)):
        batch = read()
        batch["observation"].zero_()
        batch["next"].zero_()
    assert (rb[:] == before).all()


def test_the_same_seed_gives_the_same_batches() -> None:
    """seed-1: independent of the global generator."""
    drawn = []
    for disturb in (False, True):
        rb = ReplayBuffer(100, batch_size=16, seed=5)
        rb.extend(transitions(100))
        batches = []
        for _ in range(5):
            if disturb:
                torch.rand(3)
                np.random.default_rng().random(3)
            batches.append(rb.sample()["index"])
        drawn.append(torch.stack(batches))
    assert torch.equal(*drawn)
    other = ReplayBuffer(100, batch_size=16, seed=6)
    other.extend(transitions(100))
    assert not torch.equal(other.sample()["index"], drawn[0][0])
    torch.manual_seed(0)
    state = torch.get_rng_state()
    other.sample()
    ReplayBuffer(5)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_generator_may_be_given() -> None:
    one, two = (torch.Generator().manual_seed(3) for _ in range(2))
    batches = []
    for generator in (one, two):
        rb = ReplayBuffer(50, seed=generator)
        rb.extend(transitions(50))
        batches.append(rb.sample(9)["index"])
    assert torch.equal(*batches)


def test_peek_moves_nothing() -> None:
    rb = ReplayBuffer(20, consume_after_n_samples=1, flow=Flow(samples_per_insert=1.0), seed=0)
    rb.extend(transitions(20))
    before, generator = rb.stats(), rb._local.engine.random.torch.get_state()
    assert rb.peek(50).batch_size == (50,)
    assert rb.stats() == before
    assert torch.equal(rb._local.engine.random.torch.get_state(), generator)


def test_peek_into_nothing_says_so() -> None:
    with pytest.raises(NotReady):
        ReplayBuffer(3).peek(1)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"storage": 0}, InvalidArgument),
        ({"storage": -5}, InvalidArgument),
        ({"storage": 2.5}, InvalidType),
        ({"storage": True}, InvalidType),
        ({"storage": "10"}, InvalidType),
        ({"batch_size": 0}, InvalidArgument),
        ({"batch_size": 1.0}, InvalidType),
        ({"batch_size": True}, InvalidType),
        ({"prefetch": -1}, InvalidArgument),
        ({"sampler": object()}, InvalidType),
        ({"sampler": RandomSampler}, InvalidType),
        ({"flow": "block"}, InvalidType),
        ({"schema": {"x": 1}}, InvalidType),
        ({"consume_after_n_samples": 0}, InvalidArgument),
        ({"consume_after_n_samples": 1.5}, InvalidType),
        ({"sampler": ConsumingSampler(2), "consume_after_n_samples": 3}, InvalidArgument),
        ({"seed": "x"}, InvalidType),
        ({"transform": 3}, InvalidType),
        ({"batch_size": 11, "consume_after_n_samples": 1}, Unsatisfiable),
        ({"batch_size": 11, "sampler": SamplerWithoutReplacement()}, Unsatisfiable),
        ({"storage": TensorStorage(10), "shared": True}, InvalidArgument),
    ],
)
def test_arguments_that_mean_nothing_are_refused(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        ReplayBuffer(**{"storage": 10, **arguments})


@pytest.mark.parametrize("timeout", [-1, -0.001, float("nan"), True, "1", [1]])
def test_odd_timeouts_are_refused_at_once(timeout: Any) -> None:
    """flow-6"""
    rb = ReplayBuffer(10, batch_size=2)
    calls = [
        lambda: rb.sample(wait=True, timeout=timeout),
        lambda: rb.extend(transitions(2), timeout=timeout),
        lambda: rb.add(transitions(1)[0], timeout=timeout),
        lambda: rb.wait_until_sampleable(timeout=timeout),
        lambda: rb.wait_until_writable(timeout=timeout),
    ]
    for call in calls:
        with pytest.raises((ValueError, TypeError)):
            call()
    assert rb.write_count == 0
    with pytest.raises(InvalidType, match="is_set"):
        rb.sample(wait=True, cancel_event=object())


def test_what_can_never_fit_is_refused_at_once() -> None:
    """flow-6"""
    rb = ReplayBuffer(10, consume_after_n_samples=1, flow=Flow(admission="raise"))
    with pytest.raises(Unsatisfiable):
        rb.extend(transitions(11))
    rb.extend(transitions(10))
    with pytest.raises(Unsatisfiable):
        rb.sample(11, wait=True)
    with pytest.raises(Unsatisfiable):
        rb.wait_until_sampleable(11)
    with pytest.raises(Unsatisfiable):
        rb.wait_until_writable(11)


def test_a_write_that_fails_half_way_leaves_no_trace() -> None:
    """rem-7: a bad type in the third field."""
    rb = ReplayBuffer(10)
    rb.extend(transitions(4))
    before = rb.stats()
    bad = transitions(4, 4)
    bad["next", "reward"] = torch.zeros(4, 1, dtype=torch.float64)
    with pytest.raises(SchemaMismatch):
        rb.extend(bad)
    assert rb.stats() == before
    assert rb[:]["action"][:, 0].tolist() == [0, -1, -2, -3]


def test_a_first_write_that_fails_binds_nothing() -> None:
    rb = ReplayBuffer(10)
    with pytest.raises(InvalidType):
        rb.extend({"x": torch.zeros(3), "label": ["a", "b", "c"]})
    assert rb.schema is None
    rb.extend({"x": torch.zeros(3)})


def test_an_empty_batch_is_no_write() -> None:
    rb = ReplayBuffer(10)
    rb.extend(transitions(1))
    assert rb.extend(transitions(0)).shape == (0,)
    assert rb.write_count == 1


def test_nonfinite_values_can_be_refused() -> None:
    """nan-1"""
    rb = ReplayBuffer(10, check_finite=True)
    for value in (float("nan"), float("inf"), float("-inf")):
        bad = transitions(4)
        bad["next", "observation"][2, 1] = value
        with pytest.raises(NonFinite, match="next/observation.*item 2 of 4"):
            rb.extend(bad)
    assert rb.write_count == 0
    rb.extend(transitions(4))


def test_capacity_is_checked_against_memory_before_allocation() -> None:
    """unit-7: both numbers are named."""
    rb = ReplayBuffer(10**12)
    with pytest.raises(OutOfMemory, match=r"bytes.*available"):
        rb.extend(transitions(1))
    assert rb.schema is None


def test_capacity_is_checked_against_the_disk(tmp_path: Any) -> None:
    with pytest.raises((OutOfDisk, OutOfMemory), match=r"bytes.*free"):
        ReplayBuffer(MappedStorage(10**13, tmp_path / "buffer"), schema=Schema({"x": (torch.float32, (1,))}))


def test_pickling_a_private_buffer_names_the_remedies() -> None:
    """proc-8"""
    with pytest.raises(NotShareable, match=r"share\(\).*dumps"):
        pickle.dumps(ReplayBuffer(4))


def test_close_ends_everything() -> None:
    rb = ReplayBuffer(10, batch_size=2)
    rb.extend(transitions(4))
    rb.close()
    rb.close()
    calls = [
        lambda: rb.sample(),
        lambda: rb.sample(wait=True),
        lambda: rb.extend(transitions(1)),
        lambda: rb.wait_until_sampleable(),
        lambda: rb.wait_until_writable(),
        lambda: rb.peek(1),
        lambda: rb.empty(),
    ]
    for call in calls:
        with pytest.raises(BufferClosed):
            call()
    assert not rb.can_sample()
    assert "closed" in rb.explain()


def test_contiguous_and_transform() -> None:
    rb = ReplayBuffer(10, contiguous=True, transform=lambda td: td.set("twice", td["action"] * 2))
    rb.extend(transitions(10))
    batch = rb.sample(4)
    assert batch["observation"].is_contiguous()
    assert torch.equal(batch["twice"], batch["action"] * 2)


def test_update_writes_fields_back() -> None:
    rb = ReplayBuffer(10, seed=0)
    rb.extend(transitions(10))
    batch = rb.sample(10)
    rb.extend(transitions(5, 100))
    live = batch["generation"] >= 5
    patch = {"action": torch.full((10, 1), 7.0), "next": {"reward": torch.arange(10.0)[:, None]}}
    assert rb.update(batch, patch) == int(live.sum())
    assert rb.stats()["stale_updates"] == int((~live).sum())
    changed = rb[:5]
    assert set(changed["action"][changed["action"] != 7].tolist()) == {
        -float(i) for i in range(5, 10) if i not in batch["generation"].tolist()
    }
    for bad in ({"action": torch.zeros(10)}, {"nothing": torch.zeros(10, 1)}, {}):
        with pytest.raises(SchemaMismatch):
            rb.update(batch, bad)


@pytest.mark.parametrize("spelling", [LazyTensorStorage, LazyMemmapStorage])
def test_the_lazy_spellings(spelling: Any, tmp_path: Any) -> None:
    storage = spelling(10) if spelling is LazyTensorStorage else spelling(10, tmp_path / "rows")
    with ReplayBuffer(storage) as rb:
        rb.extend(transitions(10))
        assert rb.sample(3).batch_size == (3,)


def test_threads_may_use_one_buffer_at_once() -> None:
    """proc-2: no torn row (the whole 10^6 operations: benchmarks)."""
    rb = ReplayBuffer(64)
    rb.extend({"x": torch.zeros(64, 16, dtype=torch.int64)})
    done = threading.Event()

    def write() -> None:
        value = 0
        while not done.is_set():
            value += 1
            rb.extend({"x": torch.full((17, 16), value)})

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(2000):
            rows = rb.sample(32)["x"]
            assert (rows == rows[:, :1]).all()
    finally:
        done.set()
        for writer in writers:
            writer.join()


def test_many_writes_count_on() -> None:
    """rem-6: counters start near 2^31 and near 2^40."""
    for start in (2**31 - 5, 2**32 - 5, 2**40):
        rb = ReplayBuffer(7, seed=0)
        rb.extend({"x": torch.arange(7)})
        state = rb.state_dict()
        shift = start // 7 * 7
        for word in ("head", "tail", "writes"):
            state["state"][word] += shift
        rb.load_state_dict(state)
        for i in range(7, 30):
            rb.extend({"x": torch.tensor([i])})
        assert rb.write_count == shift + 30
        assert rb[:]["x"].tolist() == list(range(23, 30))
        assert set(rb.sample(50)["generation"].tolist()) <= set(range(shift + 23, shift + 30))
