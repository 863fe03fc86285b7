"""Two producer processes and a learner on one buffer in shared memory, tied to two samples for each item written.

    python examples/shared_processes.py

While it runs, ``millpond inspect`` (in another terminal) lists the buffer, and ``millpond inspect PATH --watch`` shows
who waits for what.
"""

from __future__ import annotations

import multiprocessing as mp

import torch

from millpond import Flow, ReplayBuffer

PRODUCERS, WRITES, WRITE, BATCH = 2, 50, 32, 64


def produce(buffer: ReplayBuffer, who: int) -> None:
    """Writes; waits where the learner is too far behind. The buffer attaches itself in this process."""
    torch.set_num_threads(1)
    for _ in range(WRITES):
        buffer.extend(
            {"observation": torch.randn(WRITE, 8), "producer": torch.full((WRITE,), who)},
            timeout=60,
        )
    buffer.close()  # in a process that did not make the buffer: leave it


def main() -> None:
    """The learner's side, which also starts the producers."""
    flow = Flow(min_size=256, samples_per_insert=2, max_debt=512)
    with ReplayBuffer(4_096, batch_size=BATCH, flow=flow, shared=True, seed=0) as buffer:
        producers = [mp.get_context("spawn").Process(target=produce, args=(buffer, who)) for who in range(PRODUCERS)]
        for process in producers:
            process.start()
        written = PRODUCERS * WRITES * WRITE
        batches = 2 * (written - flow.min_size) // BATCH
        seen = torch.zeros(PRODUCERS)
        for _ in range(batches):
            batch = buffer.sample(wait=True, timeout=60)  # waits where the producers are too far behind
            seen += torch.bincount(batch["producer"], minlength=PRODUCERS)
        for process in producers:
            process.join()
        stats = buffer.stats()
        print(f"written {stats['write_count']}, sampled {stats['samples_returned']}")
        print(f"from each producer: {', '.join('some' if n else 'none' for n in seen.tolist())}")


if __name__ == "__main__":
    main()
