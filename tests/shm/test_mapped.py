from __future__ import annotations

import ctypes
import errno
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shm_children import Child, Starter, until

from millpond.core.errors import InvalidArgument, NotShareable, OutOfDisk, OutOfMemory
from millpond.shm import directory as directories
from millpond.shm import free_memory as room
from millpond.shm import mapped
from millpond.shm.identity import me
from millpond.shm.mapped import (
    PrivateMemory,
    alive,
    allocate,
    anonymous,
    available_memory,
    free_bytes,
    make_directory,
    map_file,
    memmove,
    remove_directory,
    shared_root,
    start_time,
    thread_alive,
)

MEBIBYTE = 1 << 20


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A memory file system of 1 MiB."""
    where = tmp_path / "small"
    where.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(where)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"may not mount a small tmpfs: {done.stderr.strip()}")
    yield where
    subprocess.run(["umount", str(where)], check=True, timeout=30)


# -------------------------------------------------------------------------------------------------------------- files


def test_an_allocated_file_is_zero_private_to_the_user_and_has_all_its_space(directory: Path) -> None:
    memory = allocate(directory / "rows", 3 * MEBIBYTE + 5)
    status = os.stat(directory / "rows")
    assert status.st_size == len(memory) == 3 * MEBIBYTE + 5
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_blocks * 512 >= status.st_size
    assert memory[:] == bytes(len(memory))


def test_two_mappings_of_a_file_are_one_memory(directory: Path) -> None:
    first = allocate(directory / "rows", 4096)
    second = map_file(directory / "rows", 4096)
    first[10] = 42
    assert second[10] == 42
    assert len(map_file(directory / "rows")) == 4096


def test_what_cannot_be_allocated_is_refused_and_nothing_is_left(directory: Path) -> None:
    (directory / "there").write_bytes(b"x")
    with pytest.raises(InvalidArgument, match="exists already"):
        allocate(directory / "there", 4096)
    assert (directory / "there").read_bytes() == b"x"
    with pytest.raises(InvalidArgument, match="is not there"):
        allocate(directory / "missing" / "rows", 4096)
    for nbytes in (0, -1):
        with pytest.raises(InvalidArgument, match=f"cannot allocate {nbytes} bytes"):
            allocate(directory / "rows", nbytes)
    assert {path.name for path in directory.iterdir()} == {"there", "owner", "alive"}


def test_more_than_there_is_names_both_numbers_and_leaves_nothing(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case unit-7: in memory and on a disk. The look comes first, so that nothing fills up before it fails."""
    monkeypatch.setattr(mapped, "_take_space", lambda *_: pytest.fail("it tried"))
    for where in (directory, tmp_path):
        error = OutOfMemory if room.in_memory(where) else OutOfDisk
        with pytest.raises(error, match=rf"rows needs {1 << 60} bytes .*, but only \d+ bytes .* are free"):
            allocate(where / "rows", 1 << 60)
        assert not (where / "rows").exists()


def test_sizes_are_told_exactly_and_in_the_unit_that_a_person_reads() -> None:
    sizes = {0: "0 bytes", 1023: "1023 bytes", 1 << 10: "1024 bytes (1.0 KiB)", 28_223_000_000_000_000: "25.1 PiB"}
    for nbytes, spelled in sizes.items():
        assert spelled in room.readable(nbytes)
    assert room.readable(5 << 39) == f"{5 << 39} bytes (2.5 TiB)"
    assert room.readable(1 << 70).endswith("(1048576.0 PiB)")


def test_a_full_disk_is_told_from_full_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "in_memory", lambda _: False)
    with pytest.raises(OutOfDisk) as caught:
        allocate(tmp_path / "rows", 1 << 60)
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.setattr(room, "in_memory", lambda _: True)
    with pytest.raises(OutOfMemory):
        allocate(tmp_path / "rows", 1 << 60)


def test_a_full_tmpfs_is_an_error_and_not_a_killed_process(small_tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert room.in_memory(small_tmpfs)
    assert free_bytes(small_tmpfs) == MEBIBYTE
    with pytest.raises(OutOfMemory, match=f"needs {4 * MEBIBYTE} bytes .* but only {MEBIBYTE} bytes"):
        allocate(small_tmpfs / "rows", 4 * MEBIBYTE)
    allocate(small_tmpfs / "half", MEBIBYTE // 2).close()
    # somebody else takes the space between the look and the taking
    monkeypatch.setattr(mapped, "free_bytes", lambda _, answers=iter([1 << 40, 123]): next(answers))
    with pytest.raises(OutOfMemory, match="but only 123 bytes"):
        allocate(small_tmpfs / "rows", MEBIBYTE)
    assert [path.name for path in small_tmpfs.iterdir()] == ["half"]


def test_no_directory_is_half_made_on_a_full_tmpfs(small_tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate(small_tmpfs / "all", MEBIBYTE).close()
    monkeypatch.setenv("MILLPOND_SHM", str(small_tmpfs))
    with pytest.raises(OutOfMemory, match="there is no room for"):
        make_directory("replay")
    assert [path.name for path in small_tmpfs.iterdir()] == ["all"]


def test_a_truncated_an_empty_and_a_missing_file_are_refused(directory: Path) -> None:
    path = directory / "rows"
    with pytest.raises(NotShareable, match="is not there"):
        map_file(path, 4096)
    allocate(path, 4096).close()
    os.truncate(path, 4095)
    with pytest.raises(NotShareable, match="4095 bytes, not 4096; truncated"):
        map_file(path, 4096)
    os.truncate(path, 0)
    with pytest.raises(NotShareable, match="0 bytes"):
        map_file(path)
    assert path.stat().st_size == 0  # nothing was created or grown


def test_an_interrupted_allocation_leaves_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(mapped, "_take_space", interrupt)
    with pytest.raises(KeyboardInterrupt):
        allocate(directory / "rows", 4096)
    assert not (directory / "rows").exists()


def test_without_posix_fallocate_the_space_is_taken_by_writing(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    memory = allocate(directory / "rows", MEBIBYTE + 7)
    assert memory[:] == bytes(MEBIBYTE + 7)
    assert os.stat(directory / "rows").st_blocks * 512 >= MEBIBYTE + 7


# ------------------------------------------------------------------------------------------------------------- memory


def test_anonymous_memory_is_zero_and_private(start: Starter) -> None:
    memory = anonymous(4096)
    assert isinstance(memory, PrivateMemory)
    assert memory[:] == bytes(4096)

    def run(child: Child) -> None:
        memory[0] = 1
        child.say("written")

    assert start(run).heard() == "written"
    assert memory[0] == 0


def test_more_memory_than_there_is_names_both_numbers() -> None:
    """Case unit-7."""
    with pytest.raises(OutOfMemory, match=rf"{1 << 60} bytes .* needed, but only \d+ bytes .* are available"):
        anonymous(1 << 60)
    with pytest.raises(InvalidArgument):
        anonymous(0)


def test_a_control_group_limits_what_is_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def group(path: Path, limit: object, usage: int, inactive: int) -> None:
        path.mkdir(exist_ok=True)
        (path / "memory.max").write_text(f"{limit}\n")
        (path / "memory.current").write_text(f"{usage}\n")
        (path / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")

    group(tmp_path / "outer", 1000, 700, 50)
    group(tmp_path / "outer" / "inner", "max", 600, 0)
    names = ("memory.max", "memory.current", "inactive_file")
    assert room._along(tmp_path, "/outer/inner", *names) == 350  # the page cache that can go counts as room
    group(tmp_path / "outer" / "inner", 100, 90, 0)
    assert room._along(tmp_path, "/outer/inner", *names) == 10
    assert room._along(tmp_path, "/../elsewhere", *names) == room._UNLIMITED
    monkeypatch.setattr(room, "_control_groups", lambda: 12345)
    assert available_memory() == 12345
    with pytest.raises(OutOfMemory, match="12345 bytes"):
        anonymous(12346)
    monkeypatch.setattr(room, "_control_groups", lambda: -5)
    assert available_memory() == 0


def test_available_memory_is_plausible() -> None:
    assert MEBIBYTE < available_memory() < 1 << 50


def test_memmove_copies_without_letting_go_of_the_gil() -> None:
    source, target = anonymous(MEBIBYTE), anonymous(MEBIBYTE)
    source[:] = os.urandom(MEBIBYTE)
    addresses = [_address(memory) for memory in (target, source)]
    count, stop = [0], threading.Event()

    def spin() -> None:
        while not stop.is_set():
            count[0] += 1

    thread = threading.Thread(target=spin)
    thread.start()
    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(0.3)
        time.sleep(0)  # from now on the other thread asks for the GIL only after 0.3 s
        before = count[0]
        for _ in range(20):
            memmove(addresses[0], addresses[1], MEBIBYTE)
        assert count[0] == before
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    assert target[:] == source[:]


def _address(memory: Any) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


# --------------------------------------------------------------------------------------------------------- who lives


def test_a_process_lives_until_it_has_ended_also_where_nobody_reaps_it(start: Starter) -> None:
    child = start(lambda child: child.ask())
    started = start_time(child.pid)
    assert started > 0
    assert alive(child.pid, started)
    assert thread_alive(child.pid, child.pid)
    assert not alive(child.pid, started + 1)  # another process had this pid before
    child.kill()
    assert start_time(child.pid) == 0  # a zombie
    assert not alive(child.pid, started)
    child.join()
    assert not alive(child.pid, started)
    assert not alive(child.pid, 0)
    assert start_time(0) == start_time(-1) == 0


def test_a_thread_lives_until_it_has_ended() -> None:
    go, tids = threading.Event(), list[int]()

    def run() -> None:
        tids.append(threading.get_native_id())
        go.wait(20)

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: bool(tids))
    assert thread_alive(os.getpid(), tids[0])
    go.set()
    thread.join()
    until(lambda: not thread_alive(os.getpid(), tids[0]))


def test_a_forked_child_knows_who_it_is(start: Starter) -> None:
    mine = me()
    assert mine == (os.getpid(), start_time(os.getpid()))
    child = start(lambda child: child.say(repr(me())))
    heard = child.heard()
    assert heard is not None
    assert heard.startswith(f"({child.pid}, ")
    assert heard != repr(mine)


# ------------------------------------------------------------------------------------------------------- directories


def test_a_shared_directory_says_whose_it_is_and_goes_when_told() -> None:
    path = make_directory("replay")
    assert path.parent == shared_root()
    assert path.name.startswith(f"millpond-{os.getpid()}-replay-")
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    owner = directories.Owner.read(path)
    assert owner is not None
    assert owner[:2] == (os.getpid(), start_time(os.getpid()))
    assert not owner.gone()
    memory = allocate(path / "rows", 4096)
    assert remove_directory(path) is True
    assert not path.exists()
    assert remove_directory(path) is False
    memory[0] = 1  # who has it mapped keeps it


def test_only_shared_directories_are_removed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    with pytest.raises(InvalidArgument, match="not a directory made by"):
        remove_directory(precious)
    assert precious.exists()


@pytest.mark.parametrize("kind", ["", "Replay", "../x", "a b", "a-b", "1"])
def test_a_kind_is_a_word(kind: str) -> None:
    with pytest.raises(InvalidArgument, match="lower-case word"):
        make_directory(kind)


def test_the_root_can_be_chosen_and_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPOND_SHM", str(tmp_path))
    path = make_directory("replay")
    assert path.parent == tmp_path
    remove_directory(path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("MILLPOND_SHM", str(tmp_path / "missing"))
    with pytest.raises(InvalidArgument, match="not a directory that this user may write into"):
        shared_root()


def test_without_dev_shm_the_directory_for_temporary_files_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MILLPOND_SHM", raising=False)
    monkeypatch.setattr(directories, "_writable", lambda _: False)
    assert shared_root() == Path(directories.tempfile.gettempdir())


@pytest.mark.parametrize("broken", ["write", "rename"])
def test_a_directory_that_could_not_be_finished_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("MILLPOND_SHM", str(tmp_path))
    monkeypatch.setattr(*((directories.Owner, "write") if broken == "write" else (Path, "rename")), interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_directory("replay")
    assert list(tmp_path.iterdir()) == []
