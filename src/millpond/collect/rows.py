"""The rows of a rollout while it grows: one array ``[num_envs, columns, …]`` per field, one column per step.

Rows that are no transitions (the reset rows of some environments, rows with NaN) leave holes, which a mask notes; what
is taken out has none. Rows that exceed what is taken stay for the next batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

from millpond.core.errors import InvalidArgument
from millpond.envs.spaces import Leaf, nested

Key = tuple[str, ...]
Mask = npt.NDArray[np.bool_]
Array = npt.NDArray[Any]
REWARD, DONE = ("next", "reward"), ("next", "done")
TERMINATED, TRUNCATED = ("next", "terminated"), ("next", "truncated")
VERSION, EPISODE, STEP = ("policy_version",), ("episode_id",), ("step",)
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
    """The fields of a transition. What an environment calls float64 becomes float32 unless ``keep_float64``."""

    def fields(prefix: Key, leaves: Sequence[Leaf]) -> list[RowField]:
        narrow = np.dtype(np.float32)
        return [
            RowField((*prefix, *x.key), x.shape, narrow if x.dtype == np.float64 and not keep_float64 else x.dtype)
            for x in leaves
        ]

    return [
        *fields(("observation",), observation),
        *fields(("action",), action),
        *fields(("next", "observation"), observation),
        *(RowField(key, (1,), np.dtype(dtype)) for key, dtype in _FIXED.items()),
    ]


class Rows:
    """Rows of ``num_envs`` environments, in the order in which they were stepped.

    With ``time=None`` batches are flat, ``[frames]``, each environment's rows side by side; else they are sequences,
    ``[items, time]``, each of one environment.
    """

    def __init__(self, fields: Sequence[RowField], *, num_envs: int, columns: int, time: int | None = None) -> None:
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
        old, self.columns = self.arrays, columns
        self.arrays = {f.key: np.zeros((self.num_envs, columns, *f.shape), f.dtype) for f in self.fields}
        valid = np.ones((self.num_envs, columns), bool)
        if old:
            for key, array in old.items():
                self.arrays[key][:, : array.shape[1]] = array
            valid[:, : self._valid.shape[1]] = self._valid
        self._valid = valid
        self.tensors = {key: torch.from_numpy(array) for key, array in self.arrays.items()}
        self._flat = {key: tensor.flatten(0, 1) for key, tensor in self.tensors.items()}
        self._all = self._tensordict(self._flat if self.time is None else self.tensors)

    def _tensordict(self, tensors: dict[Key, torch.Tensor]) -> TensorDict:
        dims = 1 if self.time is None else 2
        return TensorDict(nested(tensors), batch_size=next(iter(tensors.values())).shape[:dims])

    # ------------------------------------------------------------------ growing
    def open(self) -> int:
        """The column to write the next step into."""
        if self.column == self.columns:
            self._allocate(2 * self.columns)
        return self.column

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
        """Frames that can be taken: of sequences, those of complete ones."""
        if self.time is None:
            return self._rows
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
        here = self._valid[:, : self.column] & rows[:, None]
        for i in np.flatnonzero(here.any(1)):
            last = int(np.flatnonzero(here[i])[-1])
            if not self.arrays[DONE][i, last, 0]:
                self.arrays[TRUNCATED][i, last] = self.arrays[DONE][i, last] = True

    # ------------------------------------------------------------------ taking
    def first(self, frames: int) -> TensorDict:
        """The oldest ``frames`` frames. They stay until ``drop``; the memory may be the store's own, valid until then.

        Raises:
            InvalidArgument: there are fewer.
        """
        if not 0 < frames <= self.available:
            raise InvalidArgument(f"{frames} frames cannot be taken: {self.available} are there")
        self._chosen = None
        if not self._holes and frames == self._rows and self.column == (self.time or self.column):
            return self._everything()
        self._chosen = self._first_rows(frames) if self.time is None else self._first_sequences(frames // self.time)
        shape = (frames,) if self.time is None else (frames // self.time, self.time)
        env, column = np.nonzero(self._chosen)
        index = torch.from_numpy(env * self.columns + column)
        return self._tensordict({key: t.index_select(0, index).unflatten(0, shape) for key, t in self._flat.items()})

    def drop(self) -> None:
        """Remove what the last ``first`` gave."""
        if self._chosen is None:
            self.column = self._rows = 0
        else:
            self._keep(self._valid[:, : self.column] & ~self._chosen)

    def _everything(self) -> TensorDict:
        if self.column == self.columns:
            return self._all
        cut = {key: tensor[:, : self.column] for key, tensor in self.tensors.items()}
        return self._tensordict({key: t.flatten(0, 1) if self.time is None else t for key, t in cut.items()})

    def _first_rows(self, frames: int) -> Mask:
        """By step, then by environment: what exceeds ``frames`` is the end of the last step."""
        by_step = self._valid[:, : self.column].T.copy()
        by_step.reshape(-1)[np.flatnonzero(by_step)[frames:]] = False
        return by_step.T

    def _first_sequences(self, items: int) -> Mask:
        """Every environment's first sequence, then every second one, and so on."""
        assert self.time is not None
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
    def state_dict(self) -> dict[str, Any]:
        """What is here and not taken yet."""
        columns = self.column
        arrays = {"/".join(key): array[:, :columns].copy() for key, array in self.arrays.items()}
        return {"valid": self._valid[:, :columns].copy(), "arrays": arrays}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hold what was saved.

        Raises:
            InvalidArgument: it is of another number of environments, or of other fields.
        """
        valid, arrays = np.asarray(state["valid"], bool), state["arrays"]
        if valid.shape[0] != self.num_envs:
            raise InvalidArgument(f"the saved rows are of {valid.shape[0]} environments, there are {self.num_envs}")
        if set(arrays) != {"/".join(key) for key in self.arrays}:
            raise InvalidArgument(f"the saved rows have the fields {sorted(arrays)}")
        columns = valid.shape[1]
        if columns > self.columns:
            self._allocate(columns)
        for key, array in self.arrays.items():
            array[:, :columns] = arrays["/".join(key)]
        self._valid[:] = True
        self._valid[:, :columns] = valid
        self.column, self._rows, self._holes = columns, int(valid.sum()), not valid.all()
