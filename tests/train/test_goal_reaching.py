"""From the command line: hindsight replay reaches the goals of the example's environment, uniform replay does not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sampler", ["hindsight", "uniform"])
def test_which_goals_are_reached(tmp_path: Path, sampler: str) -> None:
    """Some 8,000 updates, a minute or two each."""
    words = ["env=goal_reaching:PointReach-v0", "algorithm=td3", "total_frames=8000", "seed=1", "run_dir=run"]
    millpond(tmp_path, "train", *words, f"replay.sampler={sampler}")
    played = millpond(tmp_path, "eval", "run", "--episodes", "100")
    returns = [float(found) for found in re.findall(r"^episode +\d+ +return +(\S+)", played, re.MULTILINE)]
    assert len(returns) == 100
    share = sum(one > -40 for one in returns) / len(returns)
    assert share >= 0.9 if sampler == "hindsight" else share <= 0.5


def millpond(path: Path, *words: str) -> str:
    python_path = os.pathsep.join(filter(None, [str(EXAMPLES), os.environ.get("PYTHONPATH")]))
    ran = subprocess.run(
        [sys.executable, "-m", "millpond", *words],
        cwd=path,
        capture_output=True,
        text=True,
        timeout=800,
        env=os.environ | {"PYTHONPATH": python_path},
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
