"""Saving, loading, sharing and attaching take the memory of one piece, however much a buffer holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PIECES = 64 << 20
SCRIPT = """
import gc, json, sys
import torch
from millpond import ReplayBuffer
from millpond.replay.kernels import loading as kernels
from millpond.replay import PrioritizedSampler, RandomSampler

N, WIDTH = 120_000, 250  # 120 MB of rows
path, took = sys.argv[1], {}

def status(word):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(word))

def measure(name, act):
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    before = status("VmRSS")
    act()
    took[name] = status("VmHWM") - before

def use(rb, n):
    block = torch.arange(n * WIDTH, dtype=torch.float32).view(n, WIDTH)
    for i in range(rb.capacity // n + 1):  # once round and a piece more
        rb.extend({"x": block + i})

def total(rb):
    some = rb.peek(1000)["x"]
    assert torch.equal(some[:, 1] - some[:, 0], torch.ones(len(some)))
    return [float(rb[i]["x"].double().sum()) for i in range(0, N, N // 50)]

small = ReplayBuffer(8, sampler=SAMPLER)  # what is loaded once, whatever the size
use(small, 4)
small.dumps(path)
small.loads(path)
small.share()
ReplayBuffer.attach(small.handle()).close()
small.close()
kernels.request()
kernels.wait()

rb = ReplayBuffer(N, sampler=SAMPLER)
use(rb, 5_000)
expected = total(rb)
measure("dumps", lambda: rb.dumps(path))
measure("loads", lambda: rb.loads(path))
assert total(rb) == expected
measure("share", rb.share)
assert total(rb) == expected
measure("attach", lambda: ReplayBuffer.attach(rb.handle()).close())
measure("dumps, shared", lambda: rb.dumps(path))
measure("loads, shared", lambda: rb.loads(path))
assert total(rb) == expected
state = rb.state_dict()
measure("load_state_dict", lambda: rb.load_state_dict(state))
assert total(rb) == expected
rb.close()
print(json.dumps(took))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize("sampler", ["PrioritizedSampler()", "RandomSampler(), consume_after_n_samples=3"])
def test_no_copy_of_the_rows_is_made(sampler: str, tmp_path: Path) -> None:
    script = SCRIPT.replace("SAMPLER", sampler)
    command = [sys.executable, "-c", script, str(tmp_path / "saved")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    took = {name: round(nbytes / 2**20) for name, nbytes in json.loads(done.stdout).items()}
    assert all(mebibytes <= PIECES >> 20 for mebibytes in took.values()), took
