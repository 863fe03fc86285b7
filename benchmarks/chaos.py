"""Four workers, one of which is killed every three seconds: exact counts at the end, and how long a restart takes."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from typing import Any

import torch

from benchmarks.harness import Cell, report
from millpond.collect import MultiCollector, RayCollector
from millpond.replay import ReplayBuffer

WORKERS, ENVS, BATCH = 4, 32, 256
EVERY_S, RATE = 3.0, 25_000  # frames that four workers collect in a second, at most: the run must outlast the kills
SECONDS = float(os.environ.get("CHAOS_S", "60"))


def main() -> None:
    """Write benchmarks/results/chaos."""
    rows = [_chaos("processes", MultiCollector, every_s=EVERY_S), _chaos("Ray actors", RayCollector, every_s=10.0)]
    report(
        "chaos",
        f"Hopper-v5, {WORKERS} workers of {ENVS} environments, of which random ones are killed for {SECONDS:.0f} s",
        rows,
        notes="At the end frames collected, frames that the workers report and rows in replay are all exactly the "
        "total, none of them is there twice, and nothing is reserved. A restart lasts from the kill until the next one "
        "steps. Processes come from a fork server that has everything imported; actors import it anew.",
    )


def _chaos(name: str, kind: Any, *, every_s: float) -> dict[str, Cell]:
    total, rng = round(SECONDS * RATE), random.Random(0)
    restarts: list[float] = []
    with (
        ReplayBuffer(total, shared=True) as rb,
        kind(
            "Hopper-v5",
            num_workers=WORKERS,
            num_envs=ENVS,
            frames_per_batch=BATCH,
            total_frames=total,
            max_restarts=1000,
            replay=rb,
        ) as collector,
    ):
        collector.start()
        while any(worker["frames"] == 0 for worker in collector.stats()["workers"]):
            collector.check()
            time.sleep(0.01)
        start = time.monotonic()
        kills, due = 0, start + every_s
        dying: dict[int, tuple[int, float]] = {}  # of each worker that was killed: its process, and when
        while time.monotonic() - start < SECONDS and not collector.wait(timeout=0.002):
            workers = collector.stats()["workers"]
            for worker, (pid, when) in list(dying.items()):
                if workers[worker]["pid"] not in (0, pid) and workers[worker]["state"] in ("collecting", "writing"):
                    restarts.append(time.monotonic() - when)
                    del dying[worker]
            alive = [w for w in workers if w["id"] not in dying and w["state"] in ("collecting", "writing", "waiting")]
            if time.monotonic() >= due and alive:
                victim = rng.choice(alive)
                dying[victim["id"]] = victim["pid"], time.monotonic()
                os.kill(victim["pid"], signal.SIGKILL)
                kills, due = kills + 1, due + every_s
        killed_s = time.monotonic() - start
        collector.wait()
        stats, seconds = collector.stats(), time.monotonic() - start
        items = rb[:]
        ids = torch.stack([items["episode_id"].flatten(), items["step"].flatten()])
        counts = (
            stats["collected_frames"],
            stats["written_frames"],
            rb.write_count,
            len(rb),
            ids.unique(dim=1).shape[1],
        )
        assert set(counts) == {total}, counts
        assert stats["reserved_frames"] == 0
    if kind is RayCollector:
        import ray

        ray.shutdown()
    return {
        "workers": name,
        "a kill every, s": every_s,
        "kills": kills,
        "restarts": stats["restarts"],
        "total": total,
        "collected = written = distinct": counts[0],
        "restart, s (median)": round(statistics.median(restarts), 2),
        "restart, s (longest)": round(max(restarts), 2),
        "under fire, s": round(killed_s, 1),
        "to the end, s": round(seconds, 1),
    }


if __name__ == "__main__":  # worker processes import this module
    main()
