"""The rows of a rollout while it grows: one array per field, into which each step of all environments is written.

Some rows are no transitions: the reset rows of some environments, rows with NaN. What is taken out has none of them.
Rows that exceed what is taken stay for the next batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

from millpond.core.errors import InvalidArgument, SchemaMismatch
from millpond.envs.spaces import Leaf, nested

Key = tuple[str, ...]
Mask = npt.NDArray[np.bool_]
Array = npt.NDArray[Any]
REWARD, DONE = ("next", "reward"), ("next", "done")
TERMINATED, TRUNCATED = ("next", "terminated"), ("next", "truncated")
VERSION, EPISODE, STEP = ("policy_version",), ("episode_id",), ("step",)
Block = dict[Key, Array]  # where one step of all environments is written: [num_envs, …], without the 1 of _FIXED
_FEW = 6  # rows that are moved sooner one by one
_KEPT = 256  # views that are kept, since making them anew takes as long as a small step
_FIXED: dict[Key, type] = {
    REWARD: np.float32,
    DONE: np.bool_,
    TERMINATED: np.bool_,
    TRUNCATED: np.bool_,
    VERSION: np.int64,
    EPISODE: np.int64,
    STEP: np.int64,
}


@dataclass(frozen=True, slots=True)
class RowField:
    """One field of a transition."""

    key: Key
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def transition_fields(
    observation: Sequence[Leaf], action: Sequence[Leaf], *, keep_float64: bool = False
) -> list[RowField]:
    """The fields of a transition. float64 observations become float32 unless ``keep_float64``; actions stay what they
    are, so that what is stored is what was executed."""

    def fields(prefix: Key, leaves: Sequence[Leaf], *, keep: bool = keep_float64) -> list[RowField]:
        narrow = np.dtype(np.float32)
        return [
            RowField((*prefix, *x.key), x.shape, narrow if x.dtype == np.float64 and not keep else x.dtype)
            for x in leaves
        ]

    return [
        *fields(("observation",), observation),
        *fields(("action",), action, keep=True),
        *fields(("next", "observation"), observation),
        *(RowField(key, (1,), np.dtype(dtype)) for key, dtype in _FIXED.items()),
    ]


def store(into: Array, values: Any, key: Key) -> None:
    """Write what all environments returned of one observation field; floating-point numbers may be of another width.

    Raises:
        SchemaMismatch: another shape, or numbers that the field's type cannot hold.
    """
    if type(values) is not np.ndarray or values.dtype is not into.dtype or values.shape != into.shape:
        _refuse_unfit(into, np.asarray(values), "/".join(key))
    into[...] = values


def _refuse_unfit(into: Array, values: Array, name: str) -> None:
    if values.shape != into.shape:
        raise SchemaMismatch(f"{name}: the environment returned shape {values.shape}, its space says {into.shape}")
    kinds = values.dtype.kind + into.dtype.kind
    if kinds == "ff" or np.can_cast(values.dtype, into.dtype):
        return
    if kinds in ("ii", "iu", "ui", "uu", "if", "uf"):
        whole = kinds[1] != "f"
        limit: Any = np.iinfo(into.dtype) if whole else np.finfo(into.dtype)
        low, high = (int(limit.min), int(limit.max)) if whole else (-int(2 / limit.eps), int(2 / limit.eps))
        if not values.size or (low <= int(values.min()) and int(values.max()) <= high):
            return
    raise SchemaMismatch(
        f"{name}: the environment returned {values.dtype} numbers, and its space says {into.dtype}, which cannot hold "
        "them: change the space, or convert them in a wrapper"
    )


class FlatRows:
    """Rows one after the other, by step and, within a step, in an order that may change where some are no transitions.

    What is taken is a part of the arrays themselves, without a copy. There is room for a batch of ``frames`` and one
    step, and no more, so that many environments find it in the caches; what is left over is moved to the front.
    """

    time = None

    def __init__(self, fields: Sequence[RowField], *, num_envs: int, frames: int) -> None:
        self.num_envs, self.fields = num_envs, tuple(fields)
        self._start = self._end = self._taken = 0
        self._arrays: dict[Key, Array] = {}
        self._everybody = np.arange(num_envs, dtype=np.int32)
        self._env = np.empty(0, np.int32)  # which environment a row is of
        self._allocate(frames + num_envs)

    def _allocate(self, size: int) -> None:
        old, rows, held = self._arrays, slice(self._start, self._end), self.held
        arrays = {f.key: np.zeros((size, *f.shape), f.dtype) for f in self.fields}
        env = np.zeros(size, np.int32)
        for key, array in old.items():
            arrays[key][:held] = array[rows]
        env[:held] = self._env[rows]
        tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
        written = {key: array[:, 0] if key in _FIXED else array for key, array in arrays.items()}
        self._tensors, self._written = tensors, written  # no call from here on, so no exception can come in between
        self._arrays, self._env, self._size, self._end, self._start = arrays, env, size, held, 0
        self._blocks: dict[int, Block] = {}  # by the row where they begin
        self._batches: dict[tuple[int, int], TensorDict] = {}  # by their first row, and their size

    # ------------------------------------------------------------------ growing
    def open(self) -> Block:
        """Where the next step is to be written."""
        if self._end + self.num_envs > self._size:
            self._make_room()
        block = self._blocks.get(self._end)
        if block is None:
            if len(self._blocks) >= _KEPT:
                self._blocks.clear()
            rows = slice(self._end, self._end + self.num_envs)
            block = {key: array[rows] for key, array in self._written.items()}
            self._blocks[self._end] = block
        return block

    def _make_room(self) -> None:
        if self.held + self.num_envs > self._size:
            self._allocate(2 * self._size)
            return
        for array in (*self._arrays.values(), self._env):
            array[: self.held] = array[self._start : self._end]
        self._start, self._end = 0, self.held

    def close(self, valid: Mask | None) -> None:
        """The step is written; ``valid`` says which of its rows are transitions, None that all are."""
        rows = slice(self._end, self._end + self.num_envs)
        self._env[rows] = self._everybody
        if valid is None:
            self._end += self.num_envs
            return
        left = int(np.count_nonzero(valid))
        holes, last = (~valid[:left]).nonzero()[0], left + valid[left:].nonzero()[0]
        if len(holes):
            self._fill(self._end + holes, self._end + last)
        self._end += left

    def _fill(self, holes: npt.NDArray[np.int64], last: npt.NDArray[np.int64]) -> None:
        if len(holes) > _FEW:
            for array in (*self._arrays.values(), self._env):
                array[holes] = array[last]
            return
        for hole, row in zip(holes.tolist(), last.tolist(), strict=True):
            for array in (*self._arrays.values(), self._env):
                array[hole] = array[row]

    @property
    def available(self) -> int:
        """Frames that can be taken."""
        return self._end - self._start

    @property
    def held(self) -> int:
        """Frames that are here."""
        return self._end - self._start

    def truncate(self, envs: Mask) -> None:
        """Mark the last row of these environments as truncated, where it is still here and no end already."""
        _truncate_flat({key: array[self._start : self._end] for key, array in self._arrays.items()}, self._of, envs)

    @property
    def _of(self) -> npt.NDArray[np.int32]:
        return self._env[self._start : self._end]

    # ------------------------------------------------------------------ taking
    def first(self, frames: int) -> TensorDict:
        """The oldest ``frames`` frames, in the store's own memory. They stay until ``drop``, and are valid until then.

        Raises:
            InvalidArgument: there are fewer.
        """
        _refuse_excess(frames, self.available)
        self._taken = frames
        batch = self._batches.get((self._start, frames))
        if batch is None:
            if len(self._batches) >= _KEPT:
                self._batches.clear()
            rows = slice(self._start, self._start + frames)
            tensors = {key: tensor[rows] for key, tensor in self._tensors.items()}
            batch = self._batches[self._start, frames] = TensorDict(nested(tensors), batch_size=[frames])
        return batch

    def drop(self) -> None:
        """Remove what the last ``first`` gave."""
        self._start += self._taken
        self._taken = 0
        if self._start == self._end:
            self._start = self._end = 0

    # ------------------------------------------------------------------ saving
    def state_dict(self, *, close: bool = False) -> dict[str, Any]:
        """What is here and not taken yet. ``close``: with the last row of every environment truncated."""
        arrays = {key: array[self._start : self._end].copy() for key, array in self._arrays.items()}
        if close:
            _truncate_flat(arrays, self._of, np.ones(self.num_envs, bool))
        named = {"/".join(key): array for key, array in arrays.items()}
        return {"num_envs": self.num_envs, "env": self._of.copy(), "arrays": named}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hold what was saved.

        Raises:
            InvalidArgument: it is of another number of environments, of other fields, or of another layout.
        """
        env = np.asarray(_saved(state, "env"))
        arrays = _fitting(state, self.num_envs, self.fields, (len(env),))
        if len(env) and not (int(env.min()) >= 0 and int(env.max()) < self.num_envs):
            raise InvalidArgument(f"the saved rows are of environments {env.min()} to {env.max()} of {self.num_envs}")
        self._start = self._end = 0
        if len(env) + self.num_envs > self._size:
            self._allocate(len(env) + self.num_envs)
        for key, array in self._arrays.items():
            array[: len(env)] = arrays[key]
        self._env[: len(env)] = env
        self._end = len(env)


def _truncate_flat(arrays: dict[Key, Array], env: npt.NDArray[np.int32], envs: Mask) -> None:
    last = np.full(len(envs), -1)
    last[env] = np.arange(len(env))  # of those of one environment the last one stays
    rows = last[envs & (last >= 0)]
    rows = rows[~arrays[DONE][rows, 0]]
    arrays[TRUNCATED][rows] = arrays[DONE][rows] = True


class SequenceRows:
    """Rows of sequences, ``[items, time]``, each of one environment. One column for each step.

    Rows that are no transitions leave holes, which a mask notes.
    """

    def __init__(self, fields: Sequence[RowField], *, num_envs: int, columns: int, time: int) -> None:
        self.num_envs, self.time = num_envs, time
        self.fields = tuple(fields)
        self.arrays: dict[Key, Array] = {}
        self.column = 0  # the one that is written next
        self._rows = 0
        self._holes = False  # is any row of the columns before `column` no transition?
        self._valid: Mask = np.ones((num_envs, 0), bool)
        self._chosen: Mask | None = None  # what the last `first` gave; None: everything
        self._allocate(columns)

    def _allocate(self, columns: int) -> None:
        arrays = {f.key: np.zeros((self.num_envs, columns, *f.shape), f.dtype) for f in self.fields}
        valid = np.ones((self.num_envs, columns), bool)
        for key, array in self.arrays.items():
            arrays[key][:, : array.shape[1]] = array
        valid[:, : self._valid.shape[1]] = self._valid
        tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
        flat, everything = {key: tensor.flatten(0, 1) for key, tensor in tensors.items()}, _sequences(tensors)
        self.tensors, self._flat, self._all = tensors, flat, everything  # no call, so no exception, in between
        self.arrays, self._valid, self.columns = arrays, valid, columns

    # ------------------------------------------------------------------ growing
    def open(self) -> Block:
        """Where the next step is to be written."""
        if self.column == self.columns:
            self._allocate(2 * self.columns)
        at = self.column
        return {key: a[:, at, 0] if key in _FIXED else a[:, at] for key, a in self.arrays.items()}

    def close(self, valid: Mask | None) -> None:
        """The column is written; ``valid`` says which of its rows are transitions, None that all are."""
        if valid is None:
            self._rows += self.num_envs
        else:
            self._valid[:, self.column] = valid
            self._rows += int(np.count_nonzero(valid))
            self._holes = True
        self.column += 1

    @property
    def available(self) -> int:
        """Frames that can be taken: those of complete sequences."""
        if not self._holes:
            return self.num_envs * (self.column // self.time) * self.time
        return int((self._counts() // self.time).sum()) * self.time

    @property
    def held(self) -> int:
        """Frames that are here, complete or not."""
        return self._rows

    def _counts(self) -> npt.NDArray[np.int64]:
        counts: npt.NDArray[np.int64] = self._valid[:, : self.column].sum(1, dtype=np.int64)
        return counts

    def truncate(self, rows: Mask) -> None:
        """Mark the last row of these environments as truncated, where it is still here and no end already."""
        _truncate_columns(self.arrays, self._valid[:, : self.column], rows)

    # ------------------------------------------------------------------ taking
    def first(self, frames: int) -> TensorDict:
        """The oldest ``frames`` frames. They stay until ``drop``; the memory may be the store's own, valid until then.

        Raises:
            InvalidArgument: there are fewer.
        """
        _refuse_excess(frames, self.available)
        self._chosen = None
        if not self._holes and frames == self._rows and self.column == self.time:
            return self._everything()
        self._chosen = self._first_sequences(frames // self.time)
        shape = (frames // self.time, self.time)
        env, column = np.nonzero(self._chosen)
        index = torch.from_numpy(env * self.columns + column)
        return _sequences({key: t.index_select(0, index).unflatten(0, shape) for key, t in self._flat.items()})

    def drop(self) -> None:
        """Remove what the last ``first`` gave."""
        if self._chosen is None:
            self.column = self._rows = 0
        else:
            self._keep(self._valid[:, : self.column] & ~self._chosen)

    def _everything(self) -> TensorDict:
        if self.column == self.columns:
            return self._all
        return _sequences({key: tensor[:, : self.column] for key, tensor in self.tensors.items()})

    def _first_sequences(self, items: int) -> Mask:
        """Every environment's first sequence, then every second one, and so on."""
        complete = self._counts() // self.time
        wanted = np.zeros_like(complete)
        while items:
            having = np.flatnonzero(complete > wanted)[:items]
            wanted[having] += 1
            items -= having.size
        order = np.cumsum(self._valid[:, : self.column], 1)
        return self._valid[:, : self.column] & (order <= (wanted * self.time)[:, None])

    def _keep(self, left: Mask) -> None:
        """Move the rows ``left`` to the first columns."""
        counts = left.sum(1)
        columns = int(counts.max(initial=0))
        if columns:
            order = np.argsort(~left, 1, kind="stable")[:, :columns]
            for array in self.arrays.values():
                index = order.reshape(*order.shape, *(1,) * (array.ndim - 2))
                array[:, :columns] = np.take_along_axis(array, index, 1)
        self._valid[:] = True
        self._valid[:, :columns] = np.arange(columns) < counts[:, None]
        self.column, self._rows = columns, int(counts.sum())
        self._holes = not self._valid[:, :columns].all()

    # ------------------------------------------------------------------ saving
    def state_dict(self, *, close: bool = False) -> dict[str, Any]:
        """What is here and not taken yet. ``close``: with the last row of every environment truncated."""
        valid = self._valid[:, : self.column].copy()
        arrays = {key: array[:, : self.column].copy() for key, array in self.arrays.items()}
        if close:
            _truncate_columns(arrays, valid, np.ones(self.num_envs, bool))
        named = {"/".join(key): array for key, array in arrays.items()}
        return {"num_envs": self.num_envs, "valid": valid, "arrays": named}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hold what was saved.

        Raises:
            InvalidArgument: it is of another number of environments, of other fields, or of another layout.
        """
        valid = np.asarray(_saved(state, "valid"), bool)
        arrays = _fitting(state, self.num_envs, self.fields, valid.shape)
        columns = valid.shape[1]
        if columns > self.columns:
            self._allocate(columns)
        for key, array in self.arrays.items():
            array[:, :columns] = arrays[key]
        self._valid[:] = True
        self._valid[:, :columns] = valid
        self.column, self._rows, self._holes = columns, int(valid.sum()), not valid.all()


def _truncate_columns(arrays: dict[Key, Array], valid: Mask, envs: Mask) -> None:
    rows = np.flatnonzero(valid.any(1) & envs)
    last = valid.shape[1] - 1 - valid[rows, ::-1].argmax(1) if len(rows) else rows
    still_open = ~arrays[DONE][rows, last, 0]
    rows, last = rows[still_open], last[still_open]
    arrays[TRUNCATED][rows, last] = arrays[DONE][rows, last] = True


def _sequences(tensors: dict[Key, torch.Tensor]) -> TensorDict:
    return TensorDict(nested(tensors), batch_size=next(iter(tensors.values())).shape[:2])


def _refuse_excess(frames: int, available: int) -> None:
    if not 0 < frames <= available:
        raise InvalidArgument(f"{frames} frames cannot be taken: {available} are there")


def _saved(state: dict[str, Any], name: str) -> Any:
    if name not in state:
        raise InvalidArgument("the saved rows are of another layout")
    return state[name]


def _fitting(
    state: dict[str, Any], num_envs: int, fields: Sequence[RowField], rows: tuple[int, ...]
) -> dict[Key, Array]:
    """The saved arrays by field. Raises ``InvalidArgument`` where they are of others."""
    if state["num_envs"] != num_envs:
        raise InvalidArgument(f"the saved rows are of {state['num_envs']} environments, there are {num_envs}")
    if set(state["arrays"]) != {"/".join(field.key) for field in fields}:
        raise InvalidArgument(f"the saved rows have the fields {sorted(state['arrays'])}")
    arrays = {field.key: np.asarray(state["arrays"]["/".join(field.key)]) for field in fields}
    for field in fields:
        saved = arrays[field.key]
        if (saved.dtype, saved.shape) != (field.dtype, (*rows, *field.shape)):
            raise InvalidArgument(
                f"{'/'.join(field.key)}: expected {field.dtype}{[*rows, *field.shape]}, the saved rows have "
                f"{saved.dtype}{list(saved.shape)}"
            )
    return arrays


Rows = FlatRows | SequenceRows


def rows_for(fields: Sequence[RowField], *, num_envs: int, frames: int, time: int | None) -> Rows:
    """Rows for batches of ``frames`` frames: flat ones, or sequences of ``time``."""
    if time is None:
        return FlatRows(fields, num_envs=num_envs, frames=frames)
    return SequenceRows(fields, num_envs=num_envs, columns=time, time=time)
