"""How long after a write does a blocked ``sample`` in another process return? Beside it,
``multiprocessing.Condition``."""

from __future__ import annotations

import mmap
import multiprocessing as mp
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Cell, report
from millpond import BlockingReplayBuffer
from millpond.replay.kernels import loading as kernels
from millpond.replay.kernels.binding import WORTH_CALLS

ROUNDS, WARM_UP = 1500, 100


def main() -> None:
    """Print the table of wake-ups."""
    torch.set_num_threads(1)
    lines: list[dict[str, Cell]] = []
    with BlockingReplayBuffer(1024, shared=True) as rb:
        one = {"x": torch.zeros(1, 14, dtype=torch.int64)}
        kernels.request()
        kernels.wait()
        for _ in range(WORTH_CALLS // 2 + 1):  # from then on the compiled step is used
            rb.extend(one)
            rb.sample(1)
        lines.append(_measure("ReplayBuffer: extend → a blocked sample", _sample, rb, lambda: rb.extend(one)))
    condition = mp.get_context("fork").Condition()

    def notify() -> None:
        with condition:
            condition.notify_all()

    lines.append(_measure("multiprocessing.Condition: notify → a blocked wait", _wait, condition, notify))
    report(
        "wakeup",
        "Waking a process that waits",
        lines,
        notes=f"Medians of {ROUNDS - WARM_UP} wake-ups, 0.5 ms apart, in one run.",
    )


def _measure(name: str, wait: Callable[[Any], None], what: Any, wake: Callable[[], object]) -> dict[str, Cell]:
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(8 * ROUNDS)
        memory = mmap.mmap(file.fileno(), 0)
        woken = np.frombuffer(memory, np.int64)
        context = mp.get_context("fork")
        ready = context.Event()
        process = context.Process(target=_sleeper, args=(wait, what, memory, ready))
        process.start()
        ready.wait()
        called, returned = np.zeros(ROUNDS, np.int64), np.zeros(ROUNDS, np.int64)
        for i in range(ROUNDS):
            while i and not woken[i - 1]:
                time.sleep(0)
            time.sleep(0.0005)
            called[i] = time.perf_counter_ns()
            wake()
            returned[i] = time.perf_counter_ns()
        process.join()
        after_call = (woken - called)[WARM_UP:] / 1e3
        after_return = (woken - returned)[WARM_UP:] / 1e3
    return {
        "what": name,
        "from its call, µs": round(statistics.median(after_call), 1),
        "from its return, µs": round(statistics.median(after_return), 1),
        "99th percentile from its call, µs": round(float(np.percentile(after_call, 99)), 1),
    }


def _sleeper(wait: Callable[[Any], None], what: Any, memory: mmap.mmap, ready: Any) -> None:
    torch.set_num_threads(1)
    woken = np.frombuffer(memory, np.int64)
    ready.set()
    for i in range(ROUNDS):
        wait(what)
        woken[i] = time.perf_counter_ns()


def _sample(rb: BlockingReplayBuffer) -> None:
    rb.sample(1, wait=True)


def _wait(condition: Any) -> None:
    with condition:
        condition.wait()
