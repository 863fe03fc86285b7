from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from shm_children import Child, Starter, die

from millpond.shm import directory as directories
from millpond.shm import identity
from millpond.shm.directory import Owner, make_directory, remove_directory
from millpond.shm.mapped import allocate
from millpond.shm.reaper import leftovers, reap


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


def owned_by(owner: Owner) -> Path:
    path = make_directory("replay")
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
    path = owned_by(me(started=identity.start_time(os.getpid()) - 1))
    assert reap() == [path]


def test_what_was_made_before_a_reboot_is_removed() -> None:
    path = owned_by(me(boot="another-boot"))
    assert reap() == [path]


def test_what_belongs_to_another_container_is_left_alone() -> None:
    """Its pids mean nothing here, so nobody here can tell whether its owner lives."""
    owned_by(me(pid=2**22 + 1, namespace=1))
    assert leftovers() == []


def test_what_is_not_ours_is_left_alone(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
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
    paths = sorted(owned_by(me(boot="another-boot")) for _ in range(40))
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
