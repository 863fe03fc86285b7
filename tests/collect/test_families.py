"""Environments with processes of their own: none of these is left when a worker or an evaluator has ended, anyhow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from episode_worlds import Diary
from gymnasium.envs.registration import register

from millpond.algos.sac import SAC
from millpond.collect import MultiCollector
from millpond.core.spec import BoxAction, EnvSpec
from millpond.replay import ReplayBuffer
from millpond.shm.directory import reap
from millpond.train.evaluator import Evaluator, Task
from millpond.train.settings import EnvSettings, EvalSettings
from tests.alike import usually

HERE = Path(__file__).parent
PATIENCE_S = 60.0


class Parent(Diary):
    """Has a child, whose process id names a file in ``folder``. ``busy``: ``step`` keeps the GIL for ever."""

    def __init__(self, folder: str, busy: bool = False) -> None:
        super().__init__()
        self.busy = busy
        child = subprocess.Popen(["sleep", "1000"])
        child.returncode = 0  # nobody here waits for it
        (Path(folder) / str(child.pid)).touch()

    def step(self, action: Any) -> Any:
        if self.busy:
            sum(range(10**13))  # one call of C
        return super().step(action)


register("Parent-v0", entry_point=Parent)


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def born(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir()]


def alive(folder: Path) -> list[int]:
    def lives(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return [pid for pid in born(folder) if lives(pid)]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    made = tmp_path / "children"
    made.mkdir()
    yield made
    for pid in alive(made):
        os.kill(pid, signal.SIGKILL)


def evaluator(folder: Path) -> Evaluator:
    spec = EnvSpec.vector(4, action=BoxAction((-100.0,) * 2, (100.0,) * 2))
    settings = EvalSettings(
        interval_frames=1, episodes=2, max_steps=10, timeout=60, video_interval_frames=0, video_steps=1
    )
    env = EnvSettings(id="test_families:Parent-v0", kwargs={"folder": str(folder)})
    return Evaluator(SAC(spec, seed=0).evaluation_policy(), env=env, settings=settings, seed=0)


@pytest.mark.parametrize("end", ["close", "kill"])
def test_an_evaluator_leaves_no_child_of_its_environments(folder: Path, end: str) -> None:
    judge = evaluator(folder)
    assert judge.submit(Task(0, 0))
    result = judge.wait()
    assert result is not None
    assert result.error is None
    assert len(alive(folder)) >= 2
    if end == "kill":
        assert judge.pid is not None
        os.kill(judge.pid, signal.SIGKILL)
    judge.close()
    until(lambda: not alive(folder))


@pytest.mark.parametrize("end", ["finish", "close", "kill"])
def test_a_worker_leaves_no_child_of_its_environments(folder: Path, end: str) -> None:
    rb, total = ReplayBuffer(1000), 40 if end == "finish" else -1
    with MultiCollector(
        lambda: Parent(str(folder)), num_workers=2, frames_per_batch=5, total_frames=total, replay=rb, max_restarts=0
    ) as collector:
        collector.start()
        until(lambda: len(born(folder)) == 2 and rb.write_count)
        if end == "finish":
            assert collector.wait(timeout=PATIENCE_S)
        if end == "kill":
            first = alive(folder)
            os.kill(next(w["pid"] for w in collector.stats()["workers"] if w["pid"]), signal.SIGKILL)
            until(lambda: len(alive(folder)) < len(first))
    until(lambda: not alive(folder))
    rb.close()


@pytest.mark.parametrize("busy", usually([False, True], True))
def test_nobody_outlives_an_owner_that_is_killed(folder: Path, tmp_path: Path, busy: bool) -> None:
    """Workers, an evaluator, and the children of the environments of both; also where a worker never lets go of the
    GIL."""
    script = tmp_path / "owner.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys, time
            sys.path[:0] = {[str(HERE), str(HERE.parent / "envs"), str(HERE.parents[1])]!r}
            from pathlib import Path
            from test_families import MultiCollector, Parent, ReplayBuffer, Task, evaluator

            if __name__ == "__main__":
                folder = Path({str(folder)!r})
                judge = evaluator(folder)
                judge.submit(Task(0, 0))
                judge.wait()
                rb = ReplayBuffer(1000)
                env = lambda: Parent(str(folder), busy={busy})
                collector = MultiCollector(env, num_workers=2, frames_per_batch=5, replay=rb)
                collector.start()
                while [w["doing"] for w in collector.stats()["workers"]].count("step()") < 2:
                    time.sleep(0.01)
                print("ready", flush=True)
                time.sleep(1000)
            """
        )
    )
    owner = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "ready\n"
    family = psutil.Process(owner.pid).children(recursive=True)
    assert len(alive(folder)) >= 4
    assert {process.pid for process in family} >= set(alive(folder))
    owner.kill()
    owner.wait()
    owner.stdout.close()
    _, left = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert left == []
    assert not alive(folder)
    reap()
