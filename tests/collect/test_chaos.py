"""Whatever is killed when: frames written are frames collected, and exactly as many as were asked for."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from episode_worlds import diaries
from policies import Waver

from millpond.collect import MultiCollector
from millpond.replay import ReplayBuffer
from millpond.shm.directory import leftovers
from millpond.shm.mapped import remove_directory
from tests.alike import usually

PATIENCE_S = 60.0


def kill_somebody(collector: MultiCollector, rng: random.Random) -> bool:
    """SIGKILL a random worker that lives. False: none does."""
    alive = [w for w in collector.stats()["workers"] if w["state"] in ("collecting", "writing", "waiting")]
    if not alive:
        return False
    try:
        os.kill(rng.choice(alive)["pid"], signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("layout", ["transitions", "sequences"])
def test_workers_killed_at_random_in_the_middle(layout: Any) -> None:
    """Cases flow-11, unit-1: at the end nothing is missing, doubled, or too much."""
    rng = random.Random(layout)
    rb = ReplayBuffer(200_000, shared=True)
    total = 30_000
    with MultiCollector(
        lambda: diaries(4, "NextStep", longest=9),
        Waver(),
        num_workers=3,
        num_envs=4,
        frames_per_batch=40,
        total_frames=total,
        layout=layout,
        replay=rb,
        max_restarts=1000,
    ) as collector:
        collector.start()
        kills, due = 0, 1_000
        while not collector.wait(timeout=rng.random() * 0.02):
            written = rb.write_count * (10 if layout == "sequences" else 1)
            assert written <= total
            if written >= due and kills < 8 and kill_somebody(collector, rng):
                kills, due = kills + 1, written + 3_000
        stats = collector.stats()
        items = rb[:]
    assert kills >= 3
    assert stats["restarts"] >= kills - 3  # the last ones may have been as good as done
    assert stats["collected_frames"] == stats["written_frames"] == total == items["step"].numel()
    assert stats["reserved_frames"] == 0
    ids = torch.stack([items["episode_id"].flatten(), items["step"].flatten()])
    assert ids.unique(dim=1).shape[1] == total  # no frame twice
    rb.close()


DRIVER = """
import time
from millpond.collect import MultiCollector
from millpond.replay import ReplayBuffer

if __name__ == "__main__":
    rb = ReplayBuffer(100_000, shared=True)
    collectors = [
        MultiCollector("CartPole-v1", num_workers=2, frames_per_batch=8, replay=rb, start_method=method)
        for method in ("forkserver", "fork")
    ]
    for collector in collectors:
        collector.start()
    while any(w["state"] == "starting" for c in collectors for w in c.stats()["workers"]):
        time.sleep(0.01)
    print(*(w["pid"] for c in collectors for w in c.stats()["workers"]), flush=True)
    time.sleep(120)
"""


def test_workers_end_when_their_owner_is_killed(tmp_path: Path) -> None:
    """Case proc-4: within 10 s, and nothing stays in shared memory once the reaper has run."""
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    driver = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    workers = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
    assert len(workers) == 4
    family = {*workers, *(worker.parent() for worker in workers)}  # the fork server too
    driver.kill()
    killed = time.monotonic()
    driver.wait()
    driver.stdout.close()
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family if process):
        assert time.monotonic() - killed < 10
        time.sleep(0.01)
    left = [path for path in leftovers() if path.name.startswith(f"millpond-{driver.pid}-")]
    assert len(left) == 5  # replay, two budgets, two rosters
    for path in left:
        remove_directory(path)


FORGETFUL = """
from millpond.collect import MultiCollector
from millpond.replay import ReplayBuffer

if __name__ == "__main__":
    rb = ReplayBuffer(100, shared=True)
    collector = MultiCollector("CartPole-v1", num_workers=2, frames_per_batch=8, replay=rb, start_method="fork")
    collector.start()
    rb.sample(8, wait=True)
"""


def test_a_collector_that_nobody_closed_does_not_hold_up_the_end(tmp_path: Path) -> None:
    script = tmp_path / "forgetful.py"
    script.write_text(FORGETFUL)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")


UNGUARDED = """
from millpond import ReplayBuffer
from millpond.collect import MultiCollector
collector = MultiCollector(
    "Pendulum-v1", num_workers=1, frames_per_batch=64, total_frames=100, replay=ReplayBuffer(1000), start_method="{}"
)
collector.start()
collector.wait(timeout=60)
"""


@pytest.mark.parametrize("method", usually(["forkserver", "spawn"], "forkserver"))
def test_a_script_without_a_main_guard_is_told_so_and_leaves_nothing(method: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED.format(method))
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 1
    assert 'must stand under `if __name__ == "__main__":`' in ended.stderr
    assert 'outside of `if __name__ == "__main__":`?' in ended.stderr.strip().splitlines()[-1]
    assert not list(leftovers())
