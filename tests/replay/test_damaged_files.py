"""A buffer on disk whose files were damaged: it is refused, or it can be used. The process lives on either way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from damage_files import CAPACITY, items

from millpond import ReplayBuffer
from millpond.core.errors import NotShareable
from millpond.replay import MappedStorage, SamplerWithoutReplacement

ROUNDS = int(os.environ.get("MILLPOND_DAMAGED", "60"))
SCRIPT = Path(__file__).with_name("damage_files.py")


@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_is_damaged_nothing_crashes(tmp_path: Path, seed: int) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path), str(seed), str(ROUNDS)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60 + 2 * ROUNDS)
    assert ended.returncode == 0, ended.stderr[-2000:]
    came = json.loads(ended.stdout)
    assert came["foreign"] == []
    assert came["NotShareable"] > ROUNDS // 4
    assert came["fine"] > 0


def test_slots_that_are_none_are_refused_before_they_are_used(tmp_path: Path) -> None:
    """An epoch that names a slot beyond the last."""
    path = tmp_path / "buffer"
    buffer = ReplayBuffer(MappedStorage(CAPACITY, path), batch_size=4, sampler=SamplerWithoutReplacement(), seed=0)
    buffer.extend(items(CAPACITY))
    buffer.sample()
    buffer.close()
    whole = (path / "arrays").read_bytes()
    (path / "arrays").write_bytes(whole.replace((CAPACITY - 1).to_bytes(8, "little"), (1 << 62).to_bytes(8, "little")))
    with pytest.raises(NotShareable, match="is damaged: slots of an epoch outside 0 to 63"):
        ReplayBuffer.attach(path)
    (path / "arrays").write_bytes(whole)
    again = ReplayBuffer.attach(path)
    assert len(again.sample()) == 4
    again.close()


@pytest.mark.parametrize("name", ["alive", "owner", "control", "arrays"])
def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "buffer"
    buffer = ReplayBuffer(MappedStorage(CAPACITY, path))
    buffer.extend(items(8))
    buffer.close()
    (path / name).unlink(missing_ok=True)
    (path / name).mkdir()
    with pytest.raises(NotShareable, match=f"{path} holds no buffer that can be opened"):
        ReplayBuffer.attach(path)
