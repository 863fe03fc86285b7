from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from shm_children import Child, Starter, die

from millpond.shm import directory as directories
from millpond.shm import identity, ownership
from millpond.shm.directory import leftovers, make_directory, reap, remove_directory
from millpond.shm.mapped import allocate
from millpond.shm.ownership import Owner


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place of its own, where nobody else's directories are."""
    monkeypatch.setenv("MILLPOND_SHM", str(tmp_path))
    return tmp_path


def made_by_a_child(start: Starter) -> tuple[Child, Path]:
    def run(child: Child) -> None:
        path = make_directory("replay")
        allocate(path / "rows", 4096)
        child.say(str(path))
        child.ask()

    child = start(run)
    return child, Path(child.heard() or "")


def without_lock(owner: Owner) -> Path:
    """As an earlier version made it: only the words say to whom it belongs."""
    path = make_directory("replay")
    ownership.let_go(path)
    (path / ownership.ALIVE).unlink()
    owner.write(path)
    return path


def me(**changes: object) -> Owner:
    return Owner.me()._replace(**changes)


def test_what_a_killed_process_left_is_removed_and_nothing_else(start: Starter, root: Path) -> None:
    """Case proc-4."""
    dead, its = made_by_a_child(start)
    _, anothers = made_by_a_child(start)
    mine = make_directory("weights")
    assert reap() == leftovers() == []
    dead.kill()  # a zombie: nobody has reaped the process yet
    assert leftovers() == [its]
    assert reap() == [its]
    assert sorted(root.iterdir()) == sorted([anothers, mine])
    assert (anothers / "rows").stat().st_size == 4096
    assert reap() == []
    remove_directory(mine)


def test_the_root_can_be_named(start: Starter, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead, its = made_by_a_child(start)
    dead.kill()
    monkeypatch.delenv("MILLPOND_SHM")
    assert reap(root) == [its]


def test_a_pid_that_another_process_has_now_does_not_save_it() -> None:
    path = make_directory("replay")
    ownership.let_go(path)  # as the death of an owner that had this process's pid leaves it
    assert reap() == [path]
    path = without_lock(me(started=identity.start_time(os.getpid()) - 1))
    assert reap() == [path]


def test_what_was_made_before_a_reboot_is_removed() -> None:
    path = without_lock(me(boot="another-boot"))
    assert reap() == [path]


def test_what_belongs_to_another_container_is_left_alone_where_only_a_pid_tells() -> None:
    """Its pids mean nothing here, so nobody here can tell whether its owner lives."""
    path = without_lock(me(pid=2**22 + 1, namespace=1))
    assert leftovers() == []
    remove_directory(path)


ELSEWHERE = """
import sys
from millpond.shm.directory import make_directory
from millpond.shm.directory import reap
print(reap(), flush=True)
print(make_directory("replay"), flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
@pytest.mark.parametrize("namespace", [["--time", "--boottime", "100000"], ["--pid"]], ids=["time", "pid"])
def test_a_living_owner_in_another_namespace_keeps_its_own_and_a_dead_one_does_not(
    namespace: list[str], root: Path
) -> None:
    """There other processes have its pid and its start time, and it sees another pid and start time than we do."""
    unshare = ["unshare", *namespace, "--fork", "--kill-child"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("this user may not make namespaces")
    mine = make_directory("replay")
    command = [*unshare, sys.executable, "-c", ELSEWHERE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "[]\n"
        its = Path(other.stdout.readline().strip())
        assert its.parent == root
        assert reap() == []
        other.kill()  # and its child with it
        other.wait()
        assert other.stdout.read() == ""  # its end of the pipe is closed: it is dead
    assert reap() == [its]
    assert mine.exists()
    remove_directory(mine)


def test_a_forked_child_does_not_keep_alive_what_its_parent_owned(start: Starter) -> None:
    def run(child: Child) -> None:
        path = make_directory("replay")
        pid = os.fork()
        if pid == 0:
            child.say(str(path))
            child.ask()  # lives on
            os._exit(0)
        child.say(str(pid))
        child.ask()

    child = start(run)
    words = {child.heard() or "", child.heard() or ""}
    pid, path = sorted(words, key=len)
    assert reap() == []
    child.kill()
    assert reap() == [Path(path)]
    os.kill(int(pid), signal.SIGKILL)


def test_the_next_shared_directory_frees_what_the_dead_left(start: Starter, root: Path) -> None:
    dead, its = made_by_a_child(start)
    _, anothers = made_by_a_child(start)
    dead.kill()
    mine = make_directory("weights")
    assert not its.exists()
    assert sorted(root.iterdir()) == sorted([anothers, mine])
    remove_directory(mine)


def test_what_is_not_ours_is_left_alone(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")  # what says nothing about a living owner, or is none of ours
    me(boot="another-boot").write(elsewhere)
    for name in ("millpond-notes", "millpond-12-x", "other-1-replay-00", "millpond-1-replay-00.backup"):
        (root / name).mkdir()
        me(boot="another-boot").write(root / name)
    (root / "millpond-4194305-replay-00aa").write_text("a file")
    (root / "millpond-4194305-replay-00bb").mkdir()  # says nothing about its owner
    (root / "millpond-4194305-replay-00cc").mkdir()
    (root / "millpond-4194305-replay-00cc" / "owner").write_text("nonsense")
    (root / "millpond-4194305-replay-00dd").symlink_to(elsewhere)
    before = sorted(root.iterdir())
    assert reap() == []
    assert sorted(root.iterdir()) == before


@pytest.mark.parametrize("step", ["write", "rename"])
def test_what_was_killed_while_it_was_made_is_removed(start: Starter, root: Path, step: str) -> None:
    def run(child: Child) -> None:
        where = directories.Owner if step == "write" else Path
        setattr(where, step, lambda *_: (child.say("there"), child.ask()))
        make_directory("replay")

    child = start(run)
    assert child.heard() == "there"
    (making,) = root.iterdir()
    assert ".making-" in making.name
    assert reap() == []  # it may still be finished
    child.kill()
    assert reap() == [making]
    assert list(root.iterdir()) == []


def test_what_was_killed_while_it_was_removed_is_removed(start: Starter, root: Path) -> None:
    def run(_: Child) -> None:
        path = make_directory("replay")
        directories.shutil.rmtree = lambda *_: die()  # type: ignore[assignment]
        remove_directory(path)

    start(run).join()
    (going,) = root.iterdir()
    assert ".removing-" in going.name
    assert reap() == [going]
    assert list(root.iterdir()) == []


def test_several_reapers_share_the_work(root: Path) -> None:
    paths = sorted(make_directory("replay") for _ in range(40))
    for path in paths:
        ownership.let_go(path)
    for path in paths:
        for i in range(5):
            (path / f"rows{i}").write_bytes(b"x")
    reaped: list[Path] = []
    problems: list[BaseException] = []

    def run() -> None:
        try:
            reaped.extend(reap())
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert list(root.iterdir()) == []
    assert {path.name.partition(".")[0] for path in reaped} == {path.name for path in paths}
