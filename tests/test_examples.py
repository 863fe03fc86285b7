"""Each example runs, as a user would run it, and prints what it promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
PROMISED = {
    "goal_reaching.py": ["random actions reach 0."],
    "plain_pytorch.py": ["learned 0.66 0.73 0.81 0.90 1.00", "exact   0.66 0.73 0.81 0.90 1.00"],
    "shared_processes.py": ["written 3200, sampled 5888", "from each producer: some, some"],
    "torchrl_loss.py": ["DQN: loss", "SAC: losses of actor", "SAC: 32 priorities updated"],
}
NO_TORCHRL = 3


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PROMISED)


@pytest.mark.parametrize("name", PROMISED)
def test_an_example(name: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:millpond", str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        timeout=110,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    if name == "torchrl_loss.py" and ran.returncode == NO_TORCHRL:
        pytest.skip(ran.stderr.strip())
    assert ran.returncode == 0, ran.stderr
    for line in PROMISED[name]:
        assert line in ran.stdout
