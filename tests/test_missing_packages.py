"""Without what an extra brings: whatever needs it says which one to install, and the rest works."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
from millpond.core.errors import MissingExtra, InvalidArgument
{code}
"""
TRY = """
try:
    {code}
except MissingExtra as problem:
    assert isinstance(problem, ImportError)
    assert {text!r} in str(problem), problem
else:
    raise AssertionError({code!r})
"""
CONFIG = "from millpond.train.compose import settings_from_overrides as f; f([])"
RAY = "from millpond.collect import RayCollector; RayCollector('Pendulum-v1', num_workers=1, frames_per_batch=1)"


def without(blocked: list[str], code: str) -> None:
    script = BLOCK.format(blocked=blocked, code=code)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("package", "extra", "calls"),
    [
        (
            "gymnasium",
            "train",
            (
                "from millpond.collect import Collector",
                "from millpond.collect import MultiCollector",
                "from millpond.envs import make",
                "from millpond import load_policy",
            ),
        ),
        ("hydra", "train", ("from millpond import load_policy", CONFIG)),
        ("ray", "ray", (RAY, "from millpond.remote import RayReplayBuffer as R; R(10)")),
    ],
)
def test_the_extra_is_named(package: str, extra: str, calls: tuple[str, ...]) -> None:
    text = f"the package {package!r} is not installed: pip install 'millpond[{extra}]'"
    without([package], "".join(TRY.format(code=call, text=text) for call in calls))


def test_mujoco_is_named_where_an_environment_needs_it() -> None:
    code = """
from millpond.envs import make
try:
    make('Hopper-v5')
except InvalidArgument as problem:
    assert "pip install 'millpond[train]'" in str(problem), problem
else:
    raise AssertionError"""
    without(["mujoco"], code)


def test_the_buffer_and_the_algorithms_need_no_extra() -> None:
    code = """
import torch
from millpond import ReplayBuffer
from millpond.algos.sac import SAC
from millpond.collect import FrameBudget
rb = ReplayBuffer(10)
rb.extend(torch.zeros(3, 2))
rb.sample(2)"""
    without(["gymnasium", "hydra", "omegaconf", "mujoco", "ray", "numba", "imageio", "tensorboard"], code)
