"""The share of the bare physics step that a batched environment passes on, and what an environment costs in memory."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.vector import AutoresetMode

from benchmarks.harness import Cell, report
from millpond.envs.batched import BatchedEnv
from millpond.envs.catalogue import make_batched
from millpond.envs.mujoco_batch import MujocoDynamics
from millpond.envs.threads import default_threads

SIZES = (("Hopper-v5", 64), ("Hopper-v5", 1_024), ("Hopper-v5", 100_000), ("Humanoid-v5", 64), ("Humanoid-v5", 1_024))
CLASSIC = ("Pendulum-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0")
SECONDS = 10.0  # for each row, and at least three steps
MEMORY = """
import sys
from pathlib import Path
import numpy as np
from millpond.envs import make_batched

def mebibytes(line):
    return int(Path("/proc/self/status").read_text().partition(line + ":")[2].split()[0]) / 1024

env_id, n = sys.argv[1], int(sys.argv[2])
make_batched(env_id, 2).reset(seed=0)
before = mebibytes("VmRSS")
env = make_batched(env_id, n)
env.reset(seed=0)
env.step(np.zeros((n, *env.single_action_space.shape), np.float32))
print(mebibytes("VmRSS") - before, mebibytes("VmHWM") - before)
"""


class Stopwatch:
    """Adds up the seconds spent in a function."""

    def __init__(self, call: Callable[..., None]) -> None:
        self.call, self.seconds = call, 0.0

    def __call__(self, *args: Any) -> None:
        start = time.perf_counter()
        self.call(*args)
        self.seconds += time.perf_counter() - start


def batched(env_id: str, num_envs: int) -> BatchedEnv:
    """The environment, opened as collectors open it."""
    env = make_batched(env_id, num_envs, autoreset_mode=AutoresetMode.DISABLED)
    if env is None:
        raise RuntimeError(f"{env_id} has no batched version here")
    return env


def actions(env: Any) -> list[Any]:
    """A few batches of random ones, made beforehand: making them is not what is measured."""
    env.action_space.seed(0)
    return [env.action_space.sample() for _ in range(4)]


def play(env: Any, seconds: float) -> tuple[int, float]:
    """Step with random actions and reset what ended; vector steps and the seconds that they took."""
    env.reset(seed=0)
    choices = actions(env)
    steps, start = 0, time.perf_counter()
    while steps < 3 or time.perf_counter() - start < seconds:
        _, _, terminated, truncated, _ = env.step(choices[steps % 4])
        ended = terminated | truncated
        if ended.any():
            env.reset(options={"reset_mask": ended})
        steps += 1
    return steps, time.perf_counter() - start


def shares() -> list[dict[str, Cell]]:
    """Of the wall time of a batched environment, resets included, how much lies in the bare physics step."""
    found: list[dict[str, Cell]] = []
    for env_id, num_envs in SIZES:
        env = batched(env_id, num_envs)
        physics: Any = env.dynamics.physics if isinstance(env.dynamics, MujocoDynamics) else None
        physics.step = watch = Stopwatch(physics.step)
        steps, seconds = play(env, SECONDS)
        env.close()
        found.append(
            {
                "environment": env_id,
                "environments": num_envs,
                "bare physics, steps/s": round(num_envs * steps / watch.seconds),
                "vector environment, steps/s": round(num_envs * steps / seconds),
                "share": round(watch.seconds / seconds, 3),
            }
        )
    return found


def comparison() -> list[dict[str, Cell]]:
    """Beside Gymnasium's own vector of single environments."""
    found: list[dict[str, Cell]] = []
    for env_id in ("Hopper-v5", "Humanoid-v5", *CLASSIC):
        for num_envs in (8, 64):
            kwargs = {"autoreset_mode": AutoresetMode.DISABLED}
            rates = []
            for env in (
                gymnasium.make_vec(env_id, num_envs, "sync", vector_kwargs=kwargs, disable_env_checker=True),
                batched(env_id, num_envs),
            ):
                steps, seconds = play(env, SECONDS / 5)
                env.close()
                rates.append(num_envs * steps / seconds)
            found.append(
                {
                    "environment": env_id,
                    "environments": num_envs,
                    "SyncVectorEnv, steps/s": round(rates[0]),
                    "batched, steps/s": round(rates[1]),
                    "ratio": round(rates[1] / rates[0], 1),
                }
            )
    return found


def classic() -> list[dict[str, Cell]]:
    """Classic control with 100,000 environments, episodes and resets included."""
    found: list[dict[str, Cell]] = []
    for env_id in CLASSIC:
        env = batched(env_id, 100_000)
        steps, seconds = play(env, SECONDS)
        env.close()
        found.append({"environment": env_id, "M steps/s": round(100_000 * steps / seconds / 1e6, 2)})
    return found


def memory() -> list[dict[str, Cell]]:
    """Resident memory that environments add to a process which has everything imported."""
    found: list[dict[str, Cell]] = []
    for env_id, num_envs in (("Hopper-v5", 100_000), ("Humanoid-v5", 10_000), ("Pendulum-v1", 100_000)):
        command = [sys.executable, "-c", MEMORY, env_id, str(num_envs)]
        after, peak = map(float, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
        found.append(
            {
                "environment": env_id,
                "environments": num_envs,
                "MiB": round(after),
                "peak MiB": round(peak),
                "KiB each": round(after * 1024 / num_envs, 2),
            }
        )
    return found


def main() -> None:
    """Measure all of it."""
    threads = f"{default_threads()} threads."
    report(
        "env_physics_share",
        "Batched MuJoCo environments: the share of the bare physics step",
        shares(),
        notes=f"The same run: time inside the physics step against all of it, resets included. {threads}",
    )
    report(
        "env_comparison",
        "Batched environments beside Gymnasium's SyncVectorEnv",
        comparison(),
        notes=f"Random actions, resets included. SyncVectorEnv runs on one thread, MuJoCo's batch on {threads}",
    )
    report("env_classic", "Classic control, 100,000 environments", classic(), notes="Random actions, resets included.")
    report("env_memory", "Memory of batched environments", memory(), notes="After a reset and a step of all of them.")
