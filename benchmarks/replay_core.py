"""Sampling and writing, one thread, 1 M Hopper transitions, against the bare gather of the same packed rows."""

from __future__ import annotations

import torch

from benchmarks import hopper
from benchmarks.harness import Cell, compare, report, rows
from millpond import ReplayBuffer


def main() -> None:
    """Print the table of sampling and writing."""
    torch.set_num_threads(1)
    packed = torch.zeros(hopper.ITEMS, hopper.WORDS, dtype=torch.int64)
    lines: list[dict[str, Cell]] = []
    one = hopper.item()
    for kind, shared in (("private", False), ("shared", True)):
        with ReplayBuffer(hopper.ITEMS, shared=shared, seed=0) as rb:
            hopper.fill(rb)
            for n in (256, 4096):
                batch = hopper.transitions(n)
                timings = compare(
                    {
                        "bare index_select of packed rows": lambda n=n: packed.index_select(  # type: ignore[misc]
                            0, torch.randint(0, hopper.ITEMS, (n,))
                        ),
                        "sample": lambda n=n: rb.sample(n),  # type: ignore[misc]
                        "extend": lambda batch=batch: rb.extend(batch),  # type: ignore[misc]
                        "add (a dict of NumPy arrays)": lambda: rb.add(one),
                    }
                )
                lines += rows(timings, items=n, memory=kind)
    report("replay_core", "Sampling and writing 1 M Hopper transitions", lines, notes="One thread; rows of 112 bytes.")
