from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.collect.rollout_storage import DONE, EPISODE, STEP, FlatRows, Rows, rows_for, transition_fields
from millpond.core.errors import InvalidArgument
from millpond.envs.spaces import Leaf

LEAF = Leaf((), (2,), np.dtype(np.float64))


def rows(num_envs: int, frames: int, time: int | None = None, **options: Any) -> Rows:
    fields = transition_fields([LEAF], [Leaf((), (), np.dtype(np.int64))], **options)
    return rows_for(fields, num_envs=num_envs, frames=frames, time=time)


def write(store: Rows, at: int, valid: Any, *, done: Any = False) -> None:
    """Step ``at`` of every environment: the row of environment i says (i, at)."""
    block = store.open()
    block[EPISODE][...] = np.arange(store.num_envs)
    block[STEP][...] = at
    block["observation",][...] = at
    block[DONE][...] = done
    store.close(None if valid is None else np.array(valid, bool))


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
    assert str(rows(2, 1, keep_float64=True).open()["observation",].dtype) == "float64"


def test_a_full_rollout_is_handed_out_without_a_copy() -> None:
    store = rows(2, 6)
    for at in range(3):
        write(store, at, None)
    first = store.first(6)
    assert read(first) == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    first["observation"].fill_(7.0)
    assert store.first(6)["observation"].eq(7.0).all()
    store.drop()
    for at in range(3, 6):
        write(store, at, None)
    assert read(store.first(6))[0] == (0, 3)


def test_full_sequences_are_handed_out_without_a_copy() -> None:
    store = rows(2, 6, time=3)
    for at in range(3):
        write(store, at, None)
    first = store.first(6)
    assert read(first) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    first["observation"].fill_(7.0)
    assert store.first(6)["observation"].eq(7.0).all()


def test_what_exceeds_a_batch_is_the_first_of_the_next() -> None:
    store = rows(3, 6)
    for at in range(2):
        write(store, at, None)
    assert read(store.first(4)) == [(0, 0), (1, 0), (2, 0), (0, 1)]
    store.drop()
    assert store.available == 2
    write(store, 2, None)
    assert read(store.first(4)) == [(1, 1), (2, 1), (0, 2), (1, 2)]


def test_rows_that_are_no_transitions_leave_no_holes() -> None:
    store = rows(4, 8)
    write(store, 0, [0, 1, 0, 1])
    write(store, 1, [1, 1, 1, 0])
    write(store, 2, [0, 0, 0, 0])
    assert store.available == 5
    batch = read(store.first(5))
    assert set(batch[:2]) == {(1, 0), (3, 0)}
    assert batch[2:] == [(0, 1), (1, 1), (2, 1)]


def test_until_it_is_dropped_the_same_batch_comes_again() -> None:
    store = rows(3, 6)
    for at in range(2):
        write(store, at, None)
    assert read(store.first(4)) == read(store.first(4))
    assert store.held == 6


def test_long_use_with_a_remainder_needs_no_more_memory() -> None:
    """Case mem-1: what is left over is moved to the front, and views of old places are forgotten."""
    store = rows(5, 7)
    assert isinstance(store, FlatRows)
    taken = 0
    for at in range(5000):
        write(store, at, None if at % 3 else [1, 0, 1, 1, 0])
        while store.available >= 7:
            taken += len(read(store.first(7)))
            store.drop()
    assert taken + store.held == 5 * 5000 - 2 * 1667
    assert (store._size, len(store._blocks) < 300, len(store._batches) < 300) == (12, True, True)


def test_sequences_are_complete_and_of_one_environment() -> None:
    store = rows(2, 6, time=3)
    for at, valid in enumerate([[1, 1], [0, 1], [1, 1], [1, 1]]):
        write(store, at, valid)
        assert store.available == {0: 0, 1: 0, 2: 3, 3: 6}[at]
    batch = store.first(6)
    assert batch.batch_size == (2, 3)
    assert read(batch) == [(0, 0), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2)]
    store.drop()
    assert store.held == 1  # step 3 of environment 1


def test_more_than_there_is_cannot_be_had() -> None:
    store = rows(2, 6, time=3)
    write(store, 0, None)
    for frames in (0, 1, 3):
        with pytest.raises(InvalidArgument, match="cannot be taken"):
            store.first(frames)


@pytest.mark.parametrize("time", [None, 2])
def test_truncation_marks_the_last_row_that_is_still_here(time: int | None) -> None:
    store = rows(3, 6, time)
    write(store, 0, None)
    write(store, 1, [True, False, True], done=[False, False, True])  # the last one ended already: it stays as it is
    saved = store.state_dict(close=True)
    store.truncate(np.array([True, True, True]))
    for state in (saved, store.state_dict()):
        flags = {name: state["arrays"][f"next/{name}"].reshape(-1) for name in ("truncated", "done")}
        ids = zip(state["arrays"]["episode_id"].flatten(), state["arrays"]["step"].flatten(), strict=True)
        marks = {row: (bool(t), bool(d)) for row, t, d in zip(ids, *flags.values(), strict=True)}
        assert marks[0, 0] == marks[2, 0] == (False, False)
        assert (marks[0, 1], marks[1, 0], marks[2, 1]) == ((True, True), (True, True), (False, True))


@given(
    num_envs=st.integers(1, 4),
    frames=st.integers(1, 9),
    time=st.sampled_from([None, 1, 2, 3]),
    holes=st.lists(st.integers(0, 15), min_size=1, max_size=40),
    wanted=st.integers(1, 4),
    save=st.booleans(),
)
def test_nothing_is_lost_doubled_or_out_of_order(
    num_envs: int, frames: int, time: int | None, holes: list[int], wanted: int, save: bool
) -> None:
    """Against a list per environment, with random holes and random batch sizes."""
    store = rows(num_envs, frames, time)
    pending: list[list[int]] = [[] for _ in range(num_envs)]
    for at, bits in enumerate(holes):
        valid = np.array([not bits >> i & 1 for i in range(num_envs)])
        write(store, at, None if valid.all() else valid)
        for i in np.flatnonzero(valid):
            pending[i].append(at)
        asked = wanted * (time or 1)
        while store.available >= asked:
            batch = store.first(asked)
            for i, step in read(batch):
                assert pending[i].pop(0) == step  # each environment's rows come in order, each once
            if time is not None:
                assert all(item.unique().numel() == 1 for item in batch["episode_id"])
            store.drop()
            if save:
                saved, store = store.state_dict(), rows(num_envs, 1, time)
                store.load_state_dict(saved)
        assert store.held == sum(map(len, pending))


@pytest.mark.parametrize(("time", "other"), [(None, 2), (2, None)])
def test_what_does_not_fit_is_not_loaded(time: int | None, other: int | None) -> None:
    saved = rows(2, 2, time).state_dict()
    with pytest.raises(InvalidArgument, match="2 environments, there are 3"):
        rows(3, 2, time).load_state_dict(saved)
    with pytest.raises(InvalidArgument, match="layout"):
        rows(2, 2, other).load_state_dict(saved)
    del saved["arrays"]["action"]
    with pytest.raises(InvalidArgument, match="fields"):
        rows(2, 2, time).load_state_dict(saved)


@pytest.mark.parametrize("time", [None, 2])
def test_saved_rows_are_loaded_as_they_are_or_refused_by_the_name_of_their_field(time: int | None) -> None:
    """Not cast, repeated or cut."""
    saved = rows(2, 2, time).state_dict()
    name, array = next(iter(saved["arrays"].items()))
    wider = array.astype(np.complex128)
    for wrong in (wider, array[..., None], np.zeros((9, *array.shape[1:]), array.dtype)):
        with pytest.raises(InvalidArgument, match=f"{name}: expected"):
            rows(2, 2, time).load_state_dict({**saved, "arrays": {**saved["arrays"], name: wrong}})
