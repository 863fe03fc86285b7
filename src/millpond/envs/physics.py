"""Many simulations of one MuJoCo model. Their states are the rows of one array, and a few threads step them.

A simulation costs the bytes of its row and of the results that are asked for, and no ``MjData``: 0.8 KiB for Hopper.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import mujoco
import numpy as np
import numpy.typing as npt
from mujoco.batch import Batch

from millpond.core.errors import InvalidArgument

Ids = npt.NDArray[np.integer[Any]]
Array = npt.NDArray[Any]
_STATE = mujoco.mjtState
_FULL = int(_STATE.mjSTATE_INTEGRATION)  # everything that the next step depends on, the warm start included
_CHUNK = 8  # simulations that a thread takes at once: few, so that the threads finish together


class Physics(Protocol):
    """``rows[i]`` is the whole state of simulation i; ``qpos``, ``qvel`` and ``ctrl`` are views of the rows.

    ``results`` holds the fields of ``MjData`` that were asked for, ``[n, …]``, as MuJoCo left them.
    """

    model: Any
    rows: Array
    qpos: Array
    qvel: Array
    ctrl: Array
    results: Mapping[str, Array]

    def restart(self, ids: Ids, qpos: Array, qvel: Array) -> None:
        """Put simulations at these positions and velocities, everything else at the model's defaults."""

    def step(self, substeps: int, ids: Ids | None = None) -> None:
        """Step these simulations, or all. ``ids`` ascend."""

    def close(self) -> None: ...


class BatchPhysics:
    """MuJoCo's own batched stepping: its threads never meet Python."""

    def __init__(self, model: Any, num_sims: int, *, threads: int, results: Sequence[str] = ()) -> None:
        self.model = model
        self._batch = Batch(model, num_sims, threads)
        self.rows: Array = self._batch.state
        self.qpos: Array = self._batch.bind("qpos")
        self.qvel: Array = self._batch.bind("qvel")
        self.ctrl: Array = self._batch.bind("ctrl")
        self.results: Mapping[str, Array] = {name: self._batch.bind(name) for name in results}

    def restart(self, ids: Ids, qpos: Array, qvel: Array) -> None:
        self._batch.reset(ids, stage=int(mujoco.mjtStage.mjSTAGE_NONE))
        self.qpos[ids], self.qvel[ids] = qpos, qvel
        self._batch.forward(ids)

    def step(self, substeps: int, ids: Ids | None = None) -> None:
        self._batch.step(ids, substeps)

    def close(self) -> None:
        """MuJoCo ends its threads with the batch, when nobody refers to it any more."""


class ContactPhysics:
    """Steps that end with ``mj_rnePostConstraint``, which leaves the contact forces in ``cfrc_ext``.

    ``Batch`` cannot call it; force sensors are no substitute, since they measure before the last stage of the
    integrator. So each of a few Python threads has one ``MjData``, loads a row, steps, and saves it. MuJoCo lets go
    of the GIL meanwhile, and a model that is heavy enough to have contacts takes much longer than the bookkeeping.
    """

    def __init__(self, model: Any, num_sims: int, *, threads: int, results: Sequence[str] = ()) -> None:
        self.model = model
        data = [mujoco.MjData(model) for _ in range(threads)]
        self.rows: Array = np.empty((num_sims, mujoco.mj_stateSize(model, _FULL)))
        mujoco.mj_getState(model, data[0], self.rows[0], _FULL)
        self.rows[1:] = self.rows[0]
        self.qpos = self._view(_STATE.mjSTATE_QPOS)
        self.qvel = self._view(_STATE.mjSTATE_QVEL)
        self.ctrl = self._view(_STATE.mjSTATE_CTRL)
        shapes = {name: getattr(data[0], name).shape for name in results}
        self.results: Mapping[str, Array] = {name: np.zeros((num_sims, *shape)) for name, shape in shapes.items()}
        self._idle: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for one in data:
            self._idle.put(one)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="millpond-physics") if threads > 1 else None

    def _view(self, component: Any) -> Array:
        """The columns of the rows that hold one component; components lie in the order of their bits."""
        before = int(component) - 1 & _FULL
        at = mujoco.mj_stateSize(self.model, before)
        return self.rows[:, at : at + mujoco.mj_stateSize(self.model, int(component))]

    def restart(self, ids: Ids, qpos: Array, qvel: Array) -> None:
        def one(data: Any, at: int) -> None:
            mujoco.mj_resetData(self.model, data)
            data.qpos[:], data.qvel[:] = qpos[at], qvel[at]
            mujoco.mj_forward(self.model, data)
            self._save(data, ids[at])

        self._each(one, np.arange(len(ids)))

    def step(self, substeps: int, ids: Ids | None = None) -> None:
        def one(data: Any, sim: int) -> None:
            mujoco.mj_setState(self.model, data, self.rows[sim], _FULL)
            mujoco.mj_step(self.model, data, substeps)
            mujoco.mj_rnePostConstraint(self.model, data)
            self._save(data, sim)

        self._each(one, np.arange(len(self.rows)) if ids is None else ids)

    def _save(self, data: Any, sim: int) -> None:
        mujoco.mj_getState(self.model, data, self.rows[sim], _FULL)
        for name, result in self.results.items():
            result[sim] = getattr(data, name)

    def _each(self, work: Callable[[Any, int], None], numbers: Ids) -> None:
        def run(part: Sequence[int]) -> None:
            data = self._idle.get()
            try:
                for number in part:
                    work(data, number)
            finally:
                self._idle.put(data)

        if self._threads is None:
            run(numbers.tolist())
            return
        parts = [numbers[at : at + _CHUNK].tolist() for at in range(0, len(numbers), _CHUNK)]
        for _ in self._threads.map(run, parts):
            pass

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()


def load_model(xml_file: str, *, width: int, height: int) -> Any:
    """The model in one of Gymnasium's own files, with room for pictures of this size.

    Raises:
        InvalidArgument: the file is not there, or is no model.
    """
    from gymnasium.envs.mujoco.mujoco_env import expand_model_path

    warn = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(lambda _: None)  # what it thinks of Gymnasium's files is not news to the user
    try:
        model = mujoco.MjModel.from_xml_path(expand_model_path(xml_file))
    except (OSError, ValueError) as problem:
        raise InvalidArgument(f"cannot load the model {xml_file!r}: {problem}") from problem
    finally:
        mujoco.set_mju_user_warning(warn)
    model.vis.global_.offwidth = max(model.vis.global_.offwidth, width)
    model.vis.global_.offheight = max(model.vis.global_.offheight, height)
    return model
