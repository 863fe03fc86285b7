from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.collect.rows import DONE, EPISODE, STEP, TRUNCATED, Rows, transition_fields
from millpond.core.errors import InvalidArgument
from millpond.envs.spaces import Leaf

LEAF = Leaf((), (2,), np.dtype(np.float64))


def rows(num_envs: int, columns: int, time: int | None = None, **options: Any) -> Rows:
    fields = transition_fields([LEAF], [Leaf((), (), np.dtype(np.int64))], **options)
    return Rows(fields, num_envs=num_envs, columns=columns, time=time)


def write(store: Rows, at: int, valid: np.ndarray[Any, Any] | None) -> None:
    """Step ``at`` of every environment: the row of environment i says (i, at)."""
    column = store.open()
    store.arrays[EPISODE][:, column, 0] = np.arange(store.num_envs)
    store.arrays[STEP][:, column, 0] = at
    store.arrays["observation",][:, column] = at
    store.arrays[DONE][:, column] = False
    store.close(valid)


def read(batch: Any) -> list[tuple[int, int]]:
    return list(zip(batch["episode_id"].flatten().tolist(), batch["step"].flatten().tolist(), strict=True))


def test_types() -> None:
    """Case type-1: float64 becomes float32 unless told otherwise; rewards and flags have shape [..., 1]."""
    store = rows(2, 1)
    write(store, 0, None)
    batch = store.first(2)
    assert str(batch["observation"].dtype) == "torch.float32"
    assert batch["action"].shape == (2,)
    for key in ("reward", "done", "terminated", "truncated"):
        assert batch["next", key].shape == (2, 1)
    assert str(rows(2, 1, keep_float64=True).arrays["observation",].dtype) == "float64"


def test_a_full_rollout_is_handed_out_without_a_copy() -> None:
    store = rows(2, 3)
    for at in range(3):
        write(store, at, None)
    first = store.first(6)
    assert read(first) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert first["observation"].data_ptr() == store.tensors["observation",].data_ptr()
    store.drop()
    for at in range(3, 6):
        write(store, at, None)
    assert read(store.first(6))[0] == (0, 3)


def test_what_exceeds_a_batch_is_the_first_of_the_next() -> None:
    store = rows(3, 2)
    for at in range(2):
        write(store, at, None)
    assert read(store.first(4)) == [(0, 0), (0, 1), (1, 0), (2, 0)]
    store.drop()
    assert store.available == 2
    write(store, 2, None)
    assert read(store.first(4)) == [(0, 2), (1, 1), (1, 2), (2, 1)]


def test_until_it_is_dropped_the_same_batch_comes_again() -> None:
    store = rows(3, 2)
    for at in range(2):
        write(store, at, None)
    assert read(store.first(4)) == read(store.first(4))
    assert store.held == 6


def test_sequences_are_complete_and_of_one_environment() -> None:
    store = rows(2, 3, time=3)
    for at, valid in enumerate([[1, 1], [0, 1], [1, 1], [1, 1]]):
        write(store, at, np.array(valid, bool))
        assert store.available == {0: 0, 1: 0, 2: 3, 3: 6}[at]
    batch = store.first(6)
    assert batch.batch_size == (2, 3)
    assert read(batch) == [(0, 0), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2)]
    store.drop()
    assert store.held == 1  # step 3 of environment 1


def test_more_than_there_is_cannot_be_had() -> None:
    store = rows(2, 3, time=3)
    write(store, 0, None)
    for frames in (0, 1, 3):
        with pytest.raises(InvalidArgument, match="cannot be taken"):
            store.first(frames)


def test_truncation_marks_the_last_row_that_is_still_here() -> None:
    store = rows(3, 2)
    write(store, 0, None)
    write(store, 1, np.array([True, False, True]))
    store.arrays[DONE][2, 1] = True  # ended already: stays as it is
    store.truncate(np.array([True, True, True]))
    assert store.arrays[TRUNCATED][:, :2, 0].tolist() == [[False, True], [True, False], [False, False]]
    assert store.arrays[DONE][:, :2, 0].tolist() == [[False, True], [True, False], [False, True]]


@given(
    num_envs=st.integers(1, 4),
    columns=st.integers(1, 4),
    time=st.sampled_from([None, 1, 2, 3]),
    holes=st.lists(st.integers(0, 15), min_size=1, max_size=40),
    wanted=st.integers(1, 4),
    save=st.booleans(),
)
def test_nothing_is_lost_doubled_or_out_of_order(
    num_envs: int, columns: int, time: int | None, holes: list[int], wanted: int, save: bool
) -> None:
    """Against a list per environment, with random holes and random batch sizes."""
    store = rows(num_envs, columns, time)
    pending: list[list[int]] = [[] for _ in range(num_envs)]
    for at, bits in enumerate(holes):
        valid = np.array([not bits >> i & 1 for i in range(num_envs)])
        write(store, at, None if valid.all() else valid)
        for i in np.flatnonzero(valid):
            pending[i].append(at)
        frames = wanted * (time or 1)
        while store.available >= frames:
            batch = store.first(frames)
            for i, step in read(batch):
                assert pending[i].pop(0) == step  # each environment's rows come in order, each once
            if time is not None:
                assert all(item.unique().numel() == 1 for item in batch["episode_id"])
            store.drop()
            if save:
                saved, store = store.state_dict(), rows(num_envs, 1, time)
                store.load_state_dict(saved)
        assert store.held == sum(map(len, pending))


def test_what_does_not_fit_is_not_loaded() -> None:
    saved = rows(2, 2).state_dict()
    with pytest.raises(InvalidArgument, match="2 environments, there are 3"):
        rows(3, 2).load_state_dict(saved)
    del saved["arrays"]["action"]
    with pytest.raises(InvalidArgument, match="fields"):
        rows(2, 2).load_state_dict(saved)
