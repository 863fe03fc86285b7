"""Environments of one's own are found in the current folder, as by `python -m`, by every command and every process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MODULE = """
import gymnasium, numpy
class Reach(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Box(-1, 1, (1,), numpy.float32)
    at = 0
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        return numpy.zeros(1, numpy.float32), {}
    def step(self, action):
        self.at += 1
        return numpy.zeros(1, numpy.float32), 1.0, self.at >= 5, False, {}
gymnasium.register("Reach-v0", entry_point=Reach)
"""
PROGRAM = """
import sys
from millpond.cli import main
if __name__ == "__main__":
    sys.exit(main())
"""
SMALL = [
    "env=mymodule:Reach-v0",
    "total_frames=60",
    "collectors=1",
    "algorithm.hidden=[8]",
    "replay.capacity=100",
    "replay.learning_starts=20",
    "replay.batch_size=8",
    "eval.episodes=1",
    "logger.tensorboard=false",
    "run_dir=run",
]


def test_a_module_in_the_current_folder_is_found(tmp_path: Path):
    """The program lies in a folder of its own, as an installed one does."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "program.py").write_text(PROGRAM)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mymodule.py").write_text(MODULE)

    def start(*words: str) -> subprocess.Popen[str]:
        program = [sys.executable, str(tmp_path / "bin" / "program.py"), *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(program, cwd=tmp_path / "mine", **pipes)

    trained = start("train", *SMALL)
    out, _ = trained.communicate(timeout=100)
    assert trained.returncode == 0, out
    assert "evaluation return   before 5.0   after 5.0" in out
    for child in [start("eval", "run"), start("train", "resume=run", "total_frames=80", "dry_run=true")]:
        out, _ = child.communicate(timeout=100)
        assert child.returncode == 0, out
