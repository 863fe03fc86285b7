"""A client takes, and refuses, what the buffer itself would, in the same words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack

from millpond import BlockingReplayBuffer, ReplayBuffer
from millpond.core.errors import InvalidArgument, InvalidType, NonFinite, SchemaMismatch, Unsatisfiable
from millpond.core.schema import Schema
from millpond.replay import PrioritizedSampler


def test_what_cannot_be_stored_is_refused_by_its_name(make: Any) -> None:
    buffer = make(10, schema=Schema({"a": (torch.float32, ())}))
    slots = buffer.extend({"a": torch.arange(3.0)})
    unfit = [
        TensorDict({"a": torch.zeros(3), "s": ["x", "y", "z"]}, [3]),
        TensorDict({"a": torch.zeros(3), "s": TensorDict({}, [3])}, [3]),
        {"a": torch.zeros(3), "s": object()},
        {"a": torch.zeros(3), "s": np.array(["x", "y", "z"])},
        lazy_stack([TensorDict({"a": torch.zeros(())} | ({"s": torch.zeros(())} if i else {}), []) for i in range(3)]),
        lazy_stack([TensorDict({"a": torch.zeros(()), "s": torch.zeros(i)}, []) for i in range(3)]),
    ]
    for batch in unfit:
        with pytest.raises(InvalidArgument, match=r"\bs\b"):
            buffer.extend(batch)
        with pytest.raises(InvalidArgument, match=r"\bs\b"):
            buffer.update(slots, batch)
    with pytest.raises(InvalidArgument, match=r"\bs\b"):
        buffer.add({"a": 0.0, "s": "x"})
    with pytest.raises(SchemaMismatch, match=r"add\(\) takes one item"):
        buffer.extend({"a": 1.0})
    assert buffer.write_count == 3
    assert buffer[:]["a"].tolist() == [0.0, 1.0, 2.0]


def test_lists_are_stacked(make: Any) -> None:
    buffer = make(10)
    buffer.extend([TensorDict({"x": torch.tensor([1.0])}, []), TensorDict({"x": torch.tensor([2.0])}, [])])
    buffer.extend({"x": [torch.tensor([3.0]), torch.tensor([4.0])]})
    buffer.extend({"x": np.array([[5.0], [6.0]])[::-1]})
    assert buffer[:]["x"].tolist() == [[1.0], [2.0], [3.0], [4.0], [6.0], [5.0]]


def test_update_takes_what_extend_takes(make: Any) -> None:
    buffer = make(10, check_finite=True)
    slots = buffer.extend({"a": torch.zeros(3), "b": torch.zeros(3, 2, dtype=torch.int32)})
    odd = np.arange(6, dtype=">i4").reshape(3, 2)[::-1]
    assert buffer.update(slots.tolist(), {"a": [0.5, 1.0, 2.0], "b": odd}) == 3
    assert buffer[:]["a"].tolist() == [0.5, 1.0, 2.0]
    assert buffer[:]["b"].tolist() == odd.tolist()
    with pytest.raises(NonFinite, match="item 2 of 3"):
        buffer.update(slots, {"a": np.array([0.0, 0.0, np.inf])})
    for patch in ({"c": torch.zeros(3)}, {"a": torch.zeros(3).double()}, {"a": 0.0}, {"b": torch.zeros(3, 2)}):
        with pytest.raises(SchemaMismatch, match=next(iter(patch))):
            buffer.update(slots, patch)
    for wrong in (["0"], [0.0], None):
        with pytest.raises(InvalidType):
            buffer.update(wrong, {"a": [1.0]})


def test_a_priority_is_not_rounded(make: Any) -> None:
    """By way of float32, 16777217 and 16777216 would be one."""
    buffer = make(4, sampler=PrioritizedSampler(alpha=1.0, beta=1.0, eps=0.0), batch_size=64, seed=0)
    buffer.extend({"x": torch.arange(2)}, priority=[16777217.0, 1.0])
    buffer.update_priority([1], [16777216.0])
    batch = buffer.sample()
    weights = dict(zip(batch["x"].tolist(), batch["priority_weight"].double().tolist(), strict=True))
    assert weights[1] == 1.0
    assert weights[0] == float(np.float32(16777216.0 / 16777217.0)) < 1.0
    for priority in (["x"], None, [1j], [object()]):
        with pytest.raises(InvalidType):
            buffer.update_priority([1], priority)


def test_an_index_gives_its_own_shape(make: Any) -> None:
    buffer = make(10)
    buffer.extend({"x": torch.arange(6)})
    for index in ([[0, 1, 2], [5, 4, 3]], [[0], [-1]], np.array(3), [], [True, False] * 3, np.int64(2)):
        expected = np.arange(6)[np.asarray(index, dtype=None if len(np.shape(index)) != 1 or len(index) else int)]
        assert buffer[index].batch_size == torch.Size(expected.shape)
        assert np.array_equal(buffer[index]["x"].numpy(), expected)
    for index in (6, [-7], [True]):
        with pytest.raises(IndexError):
            buffer[index]
    for index in ("x", None, (0, 1), slice(0.5, 1)):
        with pytest.raises(InvalidType):
            buffer[index]


def test_a_batch_above_the_capacity(make: Any) -> None:
    buffer = make(7)
    buffer.extend({"x": torch.arange(3)})
    assert buffer.extend({"x": torch.arange(3, 30)}).tolist() == [n % 7 for n in range(3, 30)]
    assert buffer[:]["x"].tolist() == list(range(23, 30))
    assert (buffer.write_count, buffer.stats()["overwritten"]) == (30, 23)


def test_it_never_fits_where_nothing_is_overwritten(make: Any) -> None:
    buffer = make(7, kind=BlockingReplayBuffer)
    with pytest.raises(Unsatisfiable, match="8 items never fits.*capacity of 7"):
        buffer.extend({"x": torch.arange(8)})


def test_an_item_without_a_name_is_updated_and_one_element_of_any_stride_travels(make: Any) -> None:
    buffer = make(7, kind=ReplayBuffer)
    buffer.extend(torch.arange(3, dtype=torch.int16))
    one = torch.arange(4, dtype=torch.int16)[::2][1:]
    assert one.tolist() == [2]
    assert buffer.update([0], one) == 1
    buffer.extend(one)
    assert buffer[:].tolist() == [2, 1, 2, 2]
