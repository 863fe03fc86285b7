"""Prioritized sample + update_priority at 1 M items, against the bare gather."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks import hopper
from benchmarks.harness import Cell, compare, report, rows
from millpond import ReplayBuffer
from millpond.replay import PrioritizedSampler


def main() -> None:
    """Print the table of prioritized sampling."""
    torch.set_num_threads(1)
    packed = torch.zeros(hopper.ITEMS, hopper.WORDS, dtype=torch.int64)
    rb = ReplayBuffer(hopper.ITEMS, sampler=PrioritizedSampler(), seed=0)
    hopper.fill(rb)
    rb.update_priority(torch.arange(hopper.ITEMS), torch.rand(hopper.ITEMS))
    lines: list[dict[str, Cell]] = []
    for n in (256, 4096):
        timings = compare(
            {"bare index_select of packed rows": _gather(packed, n), "sample + update_priority": _learn(rb, n)}
        )
        lines += rows(timings, items=n)
    report("prioritized", "Prioritized replay at 1 M items", lines, notes="One thread; the tree runs on Numba.")


def _gather(packed: torch.Tensor, n: int) -> Callable[[], object]:
    return lambda: packed.index_select(0, torch.randint(0, hopper.ITEMS, (n,)))


def _learn(rb: ReplayBuffer, n: int) -> Callable[[], object]:
    priority = torch.rand(n)
    return lambda: rb.update_priority(rb.sample(n), priority)
