"""What collection costs on top of stepping: vectorised CartPole at its largest, and worker processes at usual sizes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch

from benchmarks.harness import Cell, report
from millpond.collect import Collector, MultiCollector
from millpond.envs import make
from millpond.replay import ReplayBuffer

LARGE = 100_000
ROUNDS, STEPS = 5, 30  # of the large one
SIZES = (8, 64, 1_024)
SECONDS = 1.5  # for each variant in each of three rounds


class Stopwatch:
    """Adds up the seconds spent in a method of one object."""

    def __init__(self, thing: Any, name: str) -> None:
        self.seconds, self._call = 0.0, getattr(thing, name)
        setattr(thing, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return self._call(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - start


def main() -> None:
    """Write benchmarks/results/collect_cartpole and collect_overhead."""
    torch.set_num_threads(1)
    _large()
    _small()


# ---------------------------------------------------------------------- 100,000 CartPoles
def _large() -> None:
    rb = ReplayBuffer(1_000_000)
    env = make("CartPole-v1", num_envs=LARGE)
    env.action_space.seed(0)
    env.reset(seed=0)
    choices = [env.action_space.sample() for _ in range(4)]
    with Collector("CartPole-v1", frames_per_batch=LARGE, num_envs=LARGE, replay=rb, seed=0) as collector:
        rollout = collector._batch_writer.rollout
        watches = {
            "the environment's step": Stopwatch(rollout.stepper.env, "step"),
            "drawing random actions": Stopwatch(rollout.stepper.env.action_space, "sample"),
            "writing into replay": Stopwatch(rb, "extend"),
        }
        bare, share, parts = [], [], []
        for _ in range(ROUNDS + 1):  # the first warms up
            start = time.perf_counter()
            for at in range(STEPS):
                env.step(choices[at % 4])
            bare.append((time.perf_counter() - start) / (STEPS * LARGE))
            before, frames, start = (
                [w.seconds for w in watches.values()],
                collector.collected_frames,
                time.perf_counter(),
            )
            for _ in range(STEPS):
                next(collector)
            seconds, frames = time.perf_counter() - start, collector.collected_frames - frames
            share.append(bare[-1] / (seconds / frames))
            spent = [w.seconds - b for w, b in zip(watches.values(), before, strict=True)]
            parts.append([1e9 * part / frames for part in [*spent, seconds - sum(spent)]])
        assert rb.write_count == collector.collected_frames
    env.close()
    rb.close()
    median = [statistics.median(column) for column in zip(*parts[1:], strict=True)]
    rows: list[dict[str, Cell]] = [
        {"part": name, "ns per frame": round(ns, 1), "share of the time": round(ns / sum(median), 3)}
        for name, ns in zip([*watches, "keeping rows, counting, checking for NaN"], median, strict=True)
    ]
    rate, ours = 1 / statistics.median(bare[1:]), 1e9 / sum(median)
    rows.append({"part": "all of it", "ns per frame": round(sum(median), 1), "share of the time": 1.0})
    report(
        "collect_cartpole",
        f"CartPole-v1, {LARGE:,} environments, random policy, into replay: where the time goes",
        rows,
        notes=f"The bare vector environment makes {rate / 1e6:.1f} M steps/s in the same process, in turns with the "
        f"collector; {ours / 1e6:.1f} M frames/s reach replay, a share of {statistics.median(share[1:]):.2f} (medians "
        f"of {ROUNDS} rounds of {STEPS} vector steps). A frame is 78 bytes in ten fields. They are copied three times: "
        "into the rows of the collector, into packed rows, and into the ring. One thread.",
    )


# ---------------------------------------------------------------------- processes at usual sizes
def _small() -> None:
    rows: list[dict[str, Cell]] = []
    for env_id in ("CartPole-v1", "Hopper-v5"):
        for n in SIZES:
            variants: dict[str, Callable[[], float]] = {
                "bare": lambda i=env_id, n=n: _bare(i, n),  # type: ignore[misc]
                "Collector": lambda i=env_id, n=n: _collector(i, n),  # type: ignore[misc]
                "MultiCollector": lambda i=env_id, n=n: _multi(i, n),  # type: ignore[misc]
            }
            rounds = [{name: call() for name, call in variants.items()} for _ in range(3)]
            us = {name: statistics.median(one[name] for one in rounds) * 1e6 for name in variants}
            over = statistics.median(one["MultiCollector"] - one["bare"] for one in rounds) * 1e6
            rows.append(
                {
                    "environment": env_id,
                    "environments": n,
                    "bare loop, µs/frame": round(us["bare"], 3),
                    "Collector, µs/frame": round(us["Collector"], 3),
                    "MultiCollector, µs/frame": round(us["MultiCollector"], 3),
                    "overhead of MultiCollector, µs/frame": round(over, 3),
                    "share of the bare loop": round(us["bare"] / us["MultiCollector"], 2),
                }
            )
    report(
        "collect_overhead",
        "Frames into shared replay: random policy, one worker, batches of eight vector steps",
        rows,
        notes="The bare loop steps the same vector environment with random actions, resets what ended, and keeps "
        "nothing. CPU time of the process that steps, so that other programs on the machine do not count. Medians of "
        "three rounds, in which the variants take turns. Physics on one thread.",
    )


def _bare(env_id: str, n: int) -> float:
    env = _env(env_id, n)()
    disabled = env.metadata["autoreset_mode"].value == "Disabled"
    env.action_space.seed(0)
    env.reset(seed=0)
    steps, start, cpu = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - start < SECONDS:
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        ended = terminated | truncated
        if disabled and ended.any():
            env.reset(options={"reset_mask": ended})
        steps += 1
    cpu = time.process_time() - cpu
    env.close()
    return cpu / (steps * n)


def _env(env_id: str, n: int) -> Callable[[], Any]:
    return lambda: make(env_id, num_envs=n, kwargs={"threads": 1} if env_id == "Hopper-v5" else None)


def _collector(env_id: str, n: int) -> float:
    with (
        ReplayBuffer(200_000, shared=True) as rb,
        Collector(_env(env_id, n), frames_per_batch=8 * n, num_envs=n, replay=rb, seed=0) as collector,
    ):
        for _ in range(3):
            next(collector)
        frames, start, cpu = collector.collected_frames, time.perf_counter(), time.process_time()
        while time.perf_counter() - start < SECONDS:
            next(collector)
        return (time.process_time() - cpu) / (collector.collected_frames - frames)


def _multi(env_id: str, n: int) -> float:
    with (
        ReplayBuffer(200_000, shared=True) as rb,
        MultiCollector(
            _env(env_id, n), num_workers=1, frames_per_batch=8 * n, num_envs=n, replay=rb, seed=0
        ) as collector,
    ):
        collector.start()
        while collector.collected_frames < 24 * n:
            collector.check()
            time.sleep(0.01)
        worker = psutil.Process(collector.stats()["workers"][0]["pid"])
        frames, cpu = _next_count(collector), sum(worker.cpu_times()[:2])
        time.sleep(2 * SECONDS)
        last = _next_count(collector)
        return float(sum(worker.cpu_times()[:2]) - cpu) / (last - frames)


def _next_count(collector: MultiCollector) -> int:
    """The frames at the end of a batch."""
    before = collector.collected_frames
    while (after := collector.collected_frames) == before:
        time.sleep(0.0002)
    return after
