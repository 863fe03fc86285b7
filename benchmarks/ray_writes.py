"""A million exact writes: four Ray actors write through four ways into one buffer, and not one bit is lost or doubled.

Each producer sums a checksum over every bit that it writes. The sum of these must be the checksum of what is stored.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.harness import Cell, report
from millpond.remote import RayReplayBuffer, ReplayClient

PRODUCERS, BATCHES, BATCH = 4, 250, 1000
ITEMS = PRODUCERS * BATCHES * BATCH
WAYS = {
    "shm": ("shm",) * PRODUCERS,
    "gloo": ("gloo",) * PRODUCERS,
    "ray": ("ray",) * PRODUCERS,
    "all three": ("shm", "gloo", "gloo", "ray"),
}


def numbered(n: int, start: int) -> TensorDict:
    """n items of 64 bytes that differ in every field."""
    ids = torch.arange(start, start + n)
    noise = ids[:, None] * torch.tensor([2654435761, 40503, 97, 1]) % 2**31
    return TensorDict({"id": ids, "noise": noise, "value": (noise[:, :3] % 1009).double()}, [n])


def checksum(items: TensorDict) -> int:
    """Of all bits of all items, in any order of the items: the sum of a mixture of the 64-bit words of each."""
    words = torch.cat([items["id"][:, None], items["noise"], items["value"].contiguous().view(torch.int64)], 1)
    mixed = words * torch.arange(1, 2 * words.shape[1], 2)
    return int((mixed.sum(1) * -7046029254386353131 ^ mixed.prod(1)).sum()) % 2**64


class Producer:
    """Writes its share of the items; returns the checksum of what it wrote."""

    def __init__(self, client: ReplayClient) -> None:
        torch.set_num_threads(1)
        self._client = client
        self._client.stats()  # it is connected

    def ready(self) -> None:
        """Answers once the producer has started."""

    def write(self, producer: int) -> int:
        """All batches of this producer."""
        total = 0
        for i in range(BATCHES):
            items = numbered(BATCH, (producer * BATCHES + i) * BATCH)
            self._client.extend(items)
            total += checksum(items)
        self._client.close()
        return total % 2**64


def main() -> None:
    """Write by each way, and write the table. Raises ``SystemExit`` where anything was lost or doubled."""
    torch.set_num_threads(1)
    with RayReplayBuffer(ITEMS, batch_size=BATCH) as buffer:
        found = [_write(buffer, name, ways) for name, ways in WAYS.items()]
    report(
        "ray_writes",
        "A million exact writes through four Ray producers",
        found,
        notes=f"Each of {PRODUCERS} producers writes {BATCHES} batches of {BATCH:,} items of 64 bytes, and sums a "
        "checksum over all bits; making and summing the items is part of the time. The last way is one producer by "
        "shared memory, two by Gloo and one by Ray.",
    )
    if not all(row["checksum"] == "equal" for row in found):
        raise SystemExit("what is stored is not what was written")


def _write(buffer: RayReplayBuffer, name: str, ways: tuple[str, ...]) -> dict[str, Cell]:
    import ray

    buffer.empty()
    before = buffer.write_count
    made: Any = ray.remote(num_cpus=0)(Producer)
    producers = [made.remote(buffer.client(transport=way)) for way in ways]
    ray.get([producer.ready.remote() for producer in producers])
    start = time.perf_counter()
    sums = ray.get([producer.write.remote(k) for k, producer in enumerate(producers)])
    seconds = time.perf_counter() - start
    exact = buffer.write_count - before == len(buffer) == ITEMS and sum(sums) % 2**64 == checksum(buffer[:])
    for producer in producers:
        ray.kill(producer)
    return {
        "by": name,
        "items": ITEMS,
        "checksum": "equal" if exact else "DIFFERENT",
        "seconds": round(seconds, 1),
        "items/s": round(ITEMS / seconds),
    }
