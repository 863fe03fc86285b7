"""``buffer[index]``: items by age, in the shape of the index, as users of torch expect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from millpond import ReplayBuffer
from millpond.core.errors import InvalidArgument, InvalidType, NotReady, OutOfRange

BUFFERS: dict[str, Callable[[], ReplayBuffer]] = {
    "ring": lambda: ReplayBuffer(6),
    "pool": lambda: ReplayBuffer(6, consume_after_n_samples=3),
    "queue": lambda: ReplayBuffer(6, shared=True, consume_after_n_samples=2),
}


@pytest.fixture(params=BUFFERS)
def rb(request: pytest.FixtureRequest) -> Any:
    with BUFFERS[request.param]() as made:
        yield made


INDICES: list[Any] = [
    0, 5, -1, -6, np.int64(3), np.uint8(2), torch.tensor(4), np.array(1),
    slice(None), slice(1, 5, 2), slice(4, 1), slice(-3, None), slice(0, 99), slice(None, None, -1),
    slice(np.int64(1), torch.tensor(3)), [1, 1, 0], [], [-1, 5], [np.int64(2), 3], range(2, 5),
    torch.tensor([[0, 1, 2], [5, 4, 3]]), np.array([[[1]], [[2]]]), [[0, -1], [2, 3]],
    torch.zeros(0, dtype=torch.int64), torch.zeros(0, 3, dtype=torch.int64),
    torch.tensor([1, 2], dtype=torch.int32), np.array([4, 2])[::-1], [torch.tensor(1), torch.tensor(2)],
    [True, False, True, False, False, True], torch.tensor([True] * 6), np.array([False] * 6),
]  # fmt: skip


@pytest.mark.parametrize("plain", [False, True])
def test_an_index_gives_what_it_gives_of_a_tensor(rb: ReplayBuffer, plain: bool) -> None:
    whole = torch.arange(16).view(8, 2)
    for part in (whole[:5], whole[5:]):
        rb.extend(part if plain else {"x": part, "next": {"y": part[:, 0]}})
    live = whole[2:]
    for index in INDICES:
        found, expected = rb[index], live.numpy()[list(index) if isinstance(index, range) else _numpy(index)]
        if plain:
            assert np.array_equal(found.numpy(), expected), index
            continue
        assert np.array_equal(found["x"].numpy(), expected), index
        assert np.array_equal(found["next", "y"].numpy(), expected[..., 0]), index
        assert found.batch_size == torch.Size(expected.shape[:-1]), index


def _numpy(index: Any) -> Any:
    if isinstance(index, list):
        return np.array([_numpy(i) for i in index], dtype=None if index else int)
    if isinstance(index, slice):
        return slice(*(None if part is None else int(part) for part in (index.start, index.stop, index.step)))
    return index.numpy() if isinstance(index, torch.Tensor) else index


OUTSIDE: list[Any] = [
    6, -7, 1 << 70, [0, 6], torch.tensor([[-7]]), np.uint64(1 << 63), np.array([1 << 63], np.uint64),
    torch.tensor([True]), np.zeros((2, 3), bool), [True] * 7,
]  # fmt: skip


def test_what_is_not_there_is_out_of_range(rb: ReplayBuffer) -> None:
    rb.extend({"x": torch.arange(6)})
    for index in OUTSIDE:
        with pytest.raises(IndexError) as raised:
            rb[index]
        assert isinstance(raised.value, InvalidArgument), index


@pytest.mark.parametrize(
    "index",
    [None, ..., "x", "0", 1.0, [0.5], torch.tensor([0.0]), np.array([1j]), True, (0, 1), (slice(None), 0), {0}, [None],
     slice(0.5, 2), slice("a", None), torch.tensor([0, 1], dtype=torch.uint8)],
)  # fmt: skip
def test_what_is_no_index_is_refused(index: Any) -> None:
    rb = ReplayBuffer(6)
    rb.extend({"x": torch.arange(6)})
    with pytest.raises(InvalidType):
        rb[index]


def test_a_slice_has_a_step() -> None:
    rb = ReplayBuffer(6)
    rb.extend({"x": torch.arange(6)})
    with pytest.raises(InvalidArgument, match="step"):
        rb[::0]


def test_an_empty_buffer_has_no_items(rb: ReplayBuffer) -> None:
    with pytest.raises(NotReady):
        rb[:]
    with pytest.raises(OutOfRange):
        rb[0]
    rb.extend({"x": torch.arange(6)})
    rb.empty()
    assert rb[:].batch_size == rb[[]].batch_size == rb[torch.zeros(0, dtype=torch.bool)].batch_size == (0,)
    for index in (0, -1, [0], [True]):
        with pytest.raises(IndexError, match="0"):
            rb[index]
