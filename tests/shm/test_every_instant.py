"""What ``every_instant.py`` finds, in the code as it is and in deliberately broken variants of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from every_instant import BROKEN, concerned

CODE = """
import slim, sys
import every_instant
assert "torch" not in sys.modules
every_instant.main(*sys.argv[1:])
"""


def find(directory: Path, *, event: int, step: int, variant: str = "") -> dict[str, Any]:
    command = [sys.executable, "-c", CODE, str(directory), str(event), str(step), variant]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("event", [0, 1])
def test_killed_at_any_instruction_a_commit_is_visible_exactly_if_it_was_told(
    directory: Path, kind: str, event: int
) -> None:
    """Cases proc-1 and flow-3, at every instruction, or at every few where waking is slow."""
    found = find(directory, event=event, step=1 if kind == "robust" else 5)
    assert "violation" not in found, found
    assert found["kills"] > 100


@pytest.mark.parametrize("event", [0, 1])
def test_killed_at_random_instants_too(directory: Path, kind: str, event: int) -> None:
    """Case proc-1. Within system calls no instruction is counted."""
    assert find(directory, event=event, step=0) == {"kills": 60}


@pytest.mark.parametrize(("variant", "kind"), [(v, k) for v in BROKEN for k in concerned(v)], indirect=["kind"])
def test_this_check_notices_when(variant: str, directory: Path, kind: str) -> None:
    _, _, _, event, problem = BROKEN[variant]
    found = find(directory, event=event, step=3, variant=variant)
    assert problem in found.get("violation", ""), found
