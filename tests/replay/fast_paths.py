"""Buffers whose fast path is there from the first call, counted; and rows that tell whether they are whole."""

from __future__ import annotations

import collections
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import slow_kernels
import torch

from millpond.core.schema import Schema
from millpond.replay import ConsumingSampler, PrioritizedSampler, RandomSampler, ReplayBuffer
from millpond.replay import engine as engine_module
from millpond.replay.kernels import loading as kernels
from millpond.replay.kernels.binding import CompiledFastPath, FastPath, NoFastPath, fast_path_for

ROW = Schema({"row": (torch.int64, (4,))})  # number, two words, and the sum of the three
FACTORS = np.array([1, 3, 5])


def compiled() -> Any:
    """The compiled kernels, now."""
    pytest.importorskip("numba")
    kernels.request()
    found = kernels.wait()
    assert found is not None
    return found


def either(name: str) -> Any:
    return compiled() if name == "compiled" else slow_kernels


class Counted:
    """A fast path, and how often each of its methods did its work, or left it to the ordinary way."""

    def __init__(self, engine: Any, compiled: Any) -> None:
        self._inner = CompiledFastPath(engine, compiled)
        self.done: collections.Counter[str] = collections.Counter()
        self.left: collections.Counter[str] = collections.Counter()

    def sample(self, n: int, into: Any = None) -> Any:
        return self._count("sample", self._inner.sample(n, into))

    def put(self, rows: Any, receipt: Any, who: Any = None) -> Any:
        return self._count("put", self._inner.put(rows, receipt, who))

    def set_leaves(self, slots: Any, numbers: Any, leaves: Any) -> Any:
        return self._count("set_leaves", self._inner.set_leaves(slots, numbers, leaves))

    def _count(self, name: str, answer: Any) -> Any:
        (self.left if answer is None else self.done)[name] += 1
        return answer


def install(rb: Any, kernels: Any) -> Counted:
    """Give a buffer with a schema its fast path at once."""
    counted = Counted(rb._local.engine, kernels)
    rb._local.engine.fast_path = counted
    return counted


def at_once(kernels: Any) -> Callable[[Any], FastPath]:
    """What takes the place of ``engine.fast_path_for``: who would get a fast path later has it from the start."""

    def made(engine: Any) -> FastPath:
        usual = fast_path_for(engine)
        return usual if isinstance(usual, NoFastPath) else Counted(engine, kernels)

    return made


def from_the_start(monkeypatch: pytest.MonkeyPatch, kernels: Any) -> None:
    monkeypatch.setattr(engine_module, "fast_path_for", at_once(kernels))


# ---------------------------------------------------------------------- rows that tell whether they are whole
def rows(first: int, n: int) -> dict[str, torch.Tensor]:
    made = np.empty((n, 4), np.int64)
    made[:, 0] = np.arange(first, first + n)
    made[:, 1:3] = np.random.default_rng(first).integers(-(2**60), 2**60, (n, 2))
    made[:, 3] = (made[:, :3] * FACTORS).sum(1)  # wraps
    return {"row": torch.from_numpy(made)}


def whole(batch: Any) -> bool:
    a = batch["row"].numpy()
    return bool(((a[:, :3] * FACTORS).sum(1) == a[:, 3]).all())


def numbers(batch: Any) -> list[int]:
    found: list[int] = batch["row"][:, 0].tolist()
    return found


def tree_bytes(rb: Any) -> bytes:
    priorities = rb._local.engine.priorities
    return b"" if priorities is None else priorities.tree.arguments[0].tobytes() + priorities.tree.values.tobytes()


def tree_is_sound(rb: ReplayBuffer) -> bool:
    """Are the inner nodes what the leaves make them?"""
    before = tree_bytes(rb)
    if rb._local.engine.priorities is None:
        return True
    rb._local.engine.priorities.tree.rebuild()
    return tree_bytes(rb) == before


# ---------------------------------------------------------------------- a buffer of each kind that has one
CAPACITY = 16
SAMPLERS: dict[str, Callable[[], Any]] = {
    "uniform": RandomSampler,
    "prioritized": PrioritizedSampler,
    "oldest": lambda: ConsumingSampler(1),
}


def made(kind: str = "uniform", n: int = 10, **options: Any) -> ReplayBuffer:
    rb = ReplayBuffer(CAPACITY, sampler=SAMPLERS[kind](), schema=ROW, seed=0, **options)
    if n:
        rb.extend(rows(0, n))
    return rb


def seen(rb: ReplayBuffer) -> list[Any]:
    """All that another process could see of a buffer, but for the lock."""
    engine = rb._local.engine
    assert engine.rows is not None
    control, lines = engine.control, engine._receipts.tolist()
    return [control.peek(), list(control._intent[:4]), lines, tree_bytes(rb), engine.rows._words.tolist()]


def altered(found: torch.Tensor) -> torch.Tensor:
    """Other rows of the same items."""
    changed = found.clone()
    changed[:, 1] += 1
    changed[:, 3] += 3
    return changed


def amend(rb: ReplayBuffer, word: int, value: int) -> None:
    """One word of the state, and nothing else."""
    control = rb._local.engine.control
    try:
        control.mutex.lock()
        control.amend(word, value)
    finally:
        control.mutex.unlock()


# ---------------------------------------------------------------------- processes
def forked(action: Callable[[], Any]) -> int:
    """Do something in a forked child. Its exit status as ``os.waitpid`` gives it; 0: it came to its end."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    end = time.monotonic() + 20
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError("the child never ended")
        time.sleep(0.0002)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def was_killed(status: int) -> bool:
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
