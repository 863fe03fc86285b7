"""A kill at any line of making, opening and closing a buffer on disk leaves one that opens, or a place that is free."""

from __future__ import annotations

import os
import random
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from millpond import ReplayBuffer
from millpond.core.errors import InvalidArgument, NotShareable
from millpond.core.schema import Schema
from millpond.replay import MappedStorage
from millpond.shm.directory import make_directory, remove_directory

FILES = ("memory.py", "ownership.py", "storage.py", "works.py", "mapped.py")
SCHEMA = Schema({"x": (torch.int64, ())})


def make(path: Path) -> None:
    rb = ReplayBuffer(MappedStorage(8, path), schema=SCHEMA)
    rb.extend({"x": torch.arange(4)})
    rb.close()


def open_again(path: Path) -> None:
    rb = ReplayBuffer.attach(path)
    rb.extend({"x": torch.arange(4, 6)})
    rb.close()


def killed_at(line: int, act: Callable[[], Any]) -> bool:
    """Was a child killed before it came to an end?"""
    pid = os.fork()
    if pid == 0:
        left = line

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal left
            if os.path.basename(frame.f_code.co_filename) not in FILES:
                return None
            if event == "line":
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        try:
            act()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def lines(act: Callable[[], Any], most: int, seed: int) -> list[int]:
    """Some lines of it, and the last ones: about where it ends is found by halving."""
    low, high = 0, 4096
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if killed_at(middle, act) else (low, middle)
    return sorted(random.Random(seed).sample(range(low), min(most, low)))


@pytest.mark.parametrize("most", [20, pytest.param(4096, marks=pytest.mark.exhaustive)])
def test_a_kill_while_a_buffer_is_made(most: int, tmp_path: Path) -> None:
    places = iter(range(10**6))
    for line in lines(lambda: make(tmp_path / f"counted{next(places)}-{os.getpid()}"), most, 1):
        folder = tmp_path / f"line{line}"
        folder.mkdir()
        path = folder / "buffer"
        killed_at(line, lambda path=path: make(path))  # or not, by a line or two
        if path.exists():
            with ReplayBuffer.attach(path) as rb:
                held = rb.write_count
                assert held in (0, 4)
                rb.extend({"x": torch.arange(held, 6)})
                assert rb[:]["x"].tolist() == list(range(6))
            assert not [file.name for file in path.iterdir() if ".making" in file.name]
        else:
            make(path)
            assert [file.name for file in folder.iterdir()] == ["buffer"]
            with ReplayBuffer.attach(path) as rb:
                assert rb[:]["x"].tolist() == list(range(4))


@pytest.mark.parametrize("most", [20, pytest.param(4096, marks=pytest.mark.exhaustive)])
def test_a_kill_while_a_buffer_is_opened_or_closed(most: int, tmp_path: Path) -> None:
    path = tmp_path / "buffer"
    make(path)
    for line in lines(lambda: open_again(path), most, 2):
        killed_at(line, lambda: open_again(path))
        with ReplayBuffer.attach(path) as rb:
            assert rb[:4]["x"].tolist()[-1] in range(6)
            rb.empty()
            rb.extend({"x": torch.arange(4)})
            assert rb[:]["x"].tolist() == list(range(4))
        assert not [file.name for file in path.iterdir() if ".making" in file.name]


@pytest.mark.parametrize("content", ["", "nonsense", "1 2", None])
def test_what_says_who_owned_a_buffer_is_not_needed_to_open_it(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "buffer"
    make(path)
    (path / "owner").unlink()
    if content is not None:
        (path / "owner").write_text(content)
    with ReplayBuffer.attach(path) as rb:
        assert rb[:]["x"].tolist() == list(range(4))


def test_rows_that_are_missing_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "buffer"
    make(path)
    (path / "rows").rename(path / "elsewhere")
    with pytest.raises(NotShareable, match="rows is not there"):
        ReplayBuffer.attach(path)
    assert not (path / "rows").exists()
    (path / "elsewhere").rename(path / "rows")
    with ReplayBuffer.attach(path) as rb:
        assert rb[:]["x"].tolist() == list(range(4))


def test_rows_of_a_schema_that_was_never_bound_are_made_anew(tmp_path: Path) -> None:
    """Somebody was killed between making them and saying what they hold."""
    path = tmp_path / "buffer"
    with ReplayBuffer(MappedStorage(8, path)) as rb:
        (path / "rows").write_bytes(b"x" * 100)
        rb.extend({"x": torch.arange(4)})
        assert rb[:]["x"].tolist() == list(range(4))


def test_a_place_that_is_taken_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "buffer"
    make(path)
    with pytest.raises(InvalidArgument, match="exists already"):
        make(path)
    with ReplayBuffer.attach(path) as rb:
        assert len(rb) == 4


def modes(*paths: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in paths}


@pytest.mark.parametrize(("umask", "saved"), [(0o022, 0o644), (0o077, 0o600)])
def test_a_save_follows_the_umask_and_the_memory_of_a_buffer_is_its_users_alone(
    umask: int, saved: int, tmp_path: Path
) -> None:
    before = os.umask(umask)
    try:
        make(tmp_path / "disk")
        directory = make_directory("test")
        with ReplayBuffer(8, schema=SCHEMA, shared=True) as rb:
            rb.dumps(tmp_path / "saved")
            shared = Path(rb.handle().path)
            assert modes(shared, directory, tmp_path / "disk") == {0o700}
            assert modes(*shared.iterdir(), *directory.iterdir(), *(tmp_path / "disk").iterdir()) == {0o600}
        assert modes(tmp_path / "saved") == {saved}
        remove_directory(directory)
    finally:
        os.umask(before)
