"""Does memory stay flat? A million whole operations after the buffer is full (mem-1), two threads without a torn row
(proc-2)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import psutil
import torch

from benchmarks.harness import Cell, report
from millpond import Flow, ReplayBuffer
from millpond.replay import PrioritizedSampler
from millpond.replay.kernels import loading
from millpond.replay.kernels.binding import WORTH_CALLS

OPERATIONS = 1_000_000


def main() -> None:
    """Print the table of operations."""
    torch.set_num_threads(1)
    loading.request()  # else it is their loading that would show
    loading.wait()
    lines: list[dict[str, Cell]] = []
    made: dict[str, Callable[[], ReplayBuffer]] = {
        "uniform": lambda: ReplayBuffer(10_000, seed=0),
        "prioritized, prefetch": lambda: ReplayBuffer(10_000, sampler=PrioritizedSampler(), prefetch=2, seed=0),
        "consuming, shared": lambda: ReplayBuffer(
            10_000, consume_after_n_samples=1, shared=True, flow=Flow(admission="overwrite"), seed=0
        ),
    }
    for name, make in made.items():
        with make() as rb:
            lines.append(_operations(name, rb, OPERATIONS // len(made)))
    lines.append(_threads())
    report(
        "memory", "A million operations on a full buffer", lines, notes="One operation: extend or sample of 8 items."
    )


def _operations(name: str, rb: ReplayBuffer, count: int) -> dict[str, Cell]:
    batch = {"x": torch.zeros(8, 4)}
    for _ in range(2000):
        rb.extend(batch)
    for _ in range(WORTH_CALLS // 2):  # until the compiled step is used
        rb.sample(8)
        rb.extend(batch)
    process, before = psutil.Process(), psutil.Process().memory_info().rss
    began = time.perf_counter()
    for _ in range(count // 2):
        rb.extend(batch)
        rb.sample(8)
    grown = process.memory_info().rss - before
    return {
        "what": name,
        "operations": count,
        "grown, KiB": grown // 1024,
        "seconds": round(time.perf_counter() - began, 1),
    }


def _threads() -> dict[str, Cell]:
    rb = ReplayBuffer(512)
    rb.extend({"x": torch.zeros(512, 16, dtype=torch.int64)})
    done, torn, samples = threading.Event(), 0, 0

    def write() -> None:
        value = 0
        while not done.is_set():
            value += 1
            rb.extend({"x": torch.full((17, 16), value)})

    writer = threading.Thread(target=write)
    began = time.perf_counter()
    writer.start()
    while rb.write_count // 17 + samples < OPERATIONS:
        rows = rb.sample(32)["x"]
        torn += int((rows != rows[:, :1]).any())
        samples += 1
    done.set()
    writer.join()
    return {
        "what": f"a writer and a sampler thread: {torn} torn rows",
        "operations": OPERATIONS,
        "grown, KiB": 0,
        "seconds": round(time.perf_counter() - began, 1),
    }
