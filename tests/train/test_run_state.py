from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest

from millpond.core.errors import CheckpointError, InvalidArgument
from millpond.train.run_state import Checkpoints, RunDirectory, default_run_directory, read_checkpoint, write_json


def save(checkpoints: Checkpoints, frames: int, text: str = "weights") -> Path:
    return checkpoints.save(
        frames=frames,
        updates=frames,
        state={"frames": frames},
        write=lambda folder: (folder / "algorithm.pt").write_text(text) and None,
    )


def test_a_directory_with_something_in_it_is_refused_and_left_alone(tmp_path: Path):
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(InvalidArgument, match=r"not empty: .* resume="):
        RunDirectory.create(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_directory_that_cannot_be_made_is_an_error_of_the_user(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match="run_dir="):
        RunDirectory.create(tmp_path / "file" / "run")
    with pytest.raises(InvalidArgument, match="is no run"):
        RunDirectory.open(tmp_path)


def test_default_directories_never_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    first = default_run_directory("sac", "ALE/Pong-v5", 3)
    assert first.parent == Path("runs")
    assert first.name.startswith("sac-ALE_Pong-v5-s3-")
    first.mkdir(parents=True)
    assert default_run_directory("sac", "ALE/Pong-v5", 3) != first


def test_the_newest_checkpoints_stay(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        checkpoints.latest()
    for frames in (5, 40, 300):
        save(checkpoints, frames)
    assert [int(path.name.split("-")[0]) for path in checkpoints.all()] == [40, 300]
    assert read_checkpoint(checkpoints.latest())["frames"] == 300


def test_a_save_that_fails_leaves_the_last_checkpoint_and_nothing_else(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path)
    last = save(checkpoints, 5)

    def fail(folder: Path) -> None:
        (folder / "algorithm.pt").write_text("half")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        checkpoints.save(frames=6, updates=6, state={}, write=fail)
    assert list(tmp_path.iterdir()) == [last]
    assert read_checkpoint(checkpoints.latest())["frames"] == 5


def test_a_kill_while_saving_leaves_the_last_checkpoint(tmp_path: Path):
    """ckpt-2"""
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 5)
    ready = multiprocessing.get_context("fork").Event()

    def write(folder: Path) -> None:
        (folder / "algorithm.pt").write_text("half")
        ready.set()
        time.sleep(60)

    arguments = {"frames": 6, "updates": 6, "state": {}, "write": write}
    child = multiprocessing.get_context("fork").Process(target=checkpoints.save, kwargs=arguments)
    child.start()
    assert ready.wait(60)
    child.kill()
    child.join(10)
    child.close()
    assert len(list(tmp_path.iterdir())) == 2  # the torn one is there, under a name that nobody reads
    assert read_checkpoint(checkpoints.latest())["frames"] == 5
    save(checkpoints, 7)
    assert [path.name for path in tmp_path.iterdir()] == [checkpoints.latest().name]


def test_a_flipped_byte_a_truncated_file_a_missing_file_another_format_are_named(tmp_path: Path):
    """ckpt-3"""
    path = save(Checkpoints(tmp_path), 5)
    weights = path / "algorithm.pt"
    for damaged in (b"weighty", b"weigh", b""):
        weights.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"algorithm\.pt is damaged"):
            read_checkpoint(path)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"algorithm\.pt is missing"):
        read_checkpoint(path)
    write_json(path / "run.json", {"format": 99, "sha256": {}})
    with pytest.raises(CheckpointError, match="has format 99"):
        read_checkpoint(path)
    (path / "run.json").write_text('{"format": 1')
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_checkpoint(path)
