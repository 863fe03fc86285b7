"""100,000 Hopper environments in one process: exact counts, memory, and the share of the bare physics step."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.collection import Stopwatch
from benchmarks.harness import Cell, report
from millpond.algos.sac import SAC, SACConfig
from millpond.collect import Collector
from millpond.envs import env_spec, make
from millpond.replay import ReplayBuffer

ENVS, FRAMES = 100_000, 1_000_000


def main() -> None:
    """Write benchmarks/results/collect_hopper_100000. `SCALE=0.01` tries it with a hundredth of everything."""
    scale = float(os.environ.get("SCALE", "1"))
    envs, frames = round(ENVS * scale), round(FRAMES * scale)
    torch.set_num_threads(2)
    env = make("Hopper-v5", num_envs=envs)
    policy = _Timed(SAC(env_spec(env), SACConfig(), seed=0).policy)
    physics, begin = Stopwatch(_physics(env), "step"), Stopwatch(env, "reset")
    rb = ReplayBuffer(frames)
    first = 0.0
    with Collector(env, policy, frames_per_batch=envs, total_frames=frames, replay=rb, seed=0) as collector:
        start = time.perf_counter()
        for _ in collector:
            first = first or begin.seconds  # beginning all episodes; later resets belong to collection
        seconds = time.perf_counter() - start
        counts = (collector.collected_frames, collector.written_frames, rb.write_count, len(rb))
    assert counts == (frames,) * 4, counts
    env.close()
    replay_mib = rb.stats()["nbytes"] >> 20
    rb.close()
    parts = {
        "the bare physics step": physics.seconds,
        "collection without inference": seconds - policy.seconds - first,
        "policy inference (256 × 256, sampling)": policy.seconds,
        "everything": seconds,
    }
    rows: list[dict[str, Cell]] = [
        {"part": name, "s": round(part, 2), "frames/s": round(frames / part)} for name, part in parts.items()
    ]
    share = physics.seconds / parts["collection without inference"]
    report(
        "collect_hopper_100000",
        f"Hopper-v5, {envs:,} environments, SAC policy, written into replay: {frames:,} frames",
        rows,
        notes=f"{counts[0]:,} frames collected, {counts[2]:,} rows written. Without inference collection runs at "
        f"{share:.3f} of the throughput of the bare physics step in the same run; resets of ended episodes are part of "
        f"it, beginning all {envs:,} at the start ({first:.1f} s) is not. Peak memory of the process {_peak_mib():,} "
        f"MiB, of which replay {replay_mib:,}. Physics and inference on two threads.",
    )


def _physics(env: Any) -> Any:
    return env.dynamics.physics


class _Timed(torch.nn.Module):
    """A policy, and the seconds that it took."""

    def __init__(self, policy: torch.nn.Module) -> None:
        super().__init__()
        self.policy, self.seconds = policy, 0.0

    def forward(self, data: Any) -> Any:
        start = time.perf_counter()
        given = self.policy(data)
        self.seconds += time.perf_counter() - start
        return given

    def reseed(self, seed: int) -> None:
        self.policy.reseed(seed)  # type: ignore[operator]


def _peak_mib() -> int:
    return int(Path("/proc/self/status").read_text(encoding="utf-8").partition("VmHWM:")[2].split()[0]) >> 10
