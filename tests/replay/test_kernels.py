"""Numba's kernels are loaded beside the program: no call waits for them, and nothing needs them."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fast_paths import compiled, forked
from waits import until

from millpond import ReplayBuffer
from millpond.core.errors import NotReady
from millpond.replay.kernels import binding as fast_path
from millpond.replay.kernels import loading as kernels

NAME = "millpond.replay.kernels.ring"


class Door(MetaPathFinder):
    """Whoever imports the kernels stands here until it is opened; then the import goes on, or fails as told."""

    def __init__(self) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        self.threads: list[str] = []
        self.problem: Exception | None = None

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == NAME:
            self.threads.append(threading.current_thread().name)
            self.reached.set()
            assert self.opened.wait(60)
            if self.problem is not None:
                raise self.problem


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    """As in a process that has loaded nothing yet, with a door before the import."""
    kernels.wait()
    made = Door()
    for name, value in {"_asked": False, "_thread": None, "_kernels": None}.items():
        monkeypatch.setattr(kernels, name, value)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    monkeypatch.delattr("millpond.replay.kernels.ring", raising=False)
    monkeypatch.setattr(sys, "meta_path", [made, *sys.meta_path])
    monkeypatch.setattr(fast_path, "WORTH_CALLS", 3)
    yield made
    made.opened.set()
    kernels.wait()


def filled(**options: Any) -> ReplayBuffer:
    rb = ReplayBuffer(100, seed=0, **options)
    rb.extend({"x": torch.arange(50)})
    return rb


def kind(rb: ReplayBuffer) -> str:
    return type(rb._local.engine.fast_path).__name__


def loading() -> int:
    return sum(thread.name == "millpond-kernels" for thread in threading.enumerate())


def test_no_call_waits_for_the_loading(door: Door) -> None:
    with filled() as rb, filled() as empty:
        empty.empty()
        for _ in range(5):
            rb.sample(4)
        assert door.reached.wait(10)
        rb.sample(4)
        rb.extend({"x": torch.arange(4)}, timeout=0.05)
        rb.sample(4, wait=True, timeout=0.05)
        for _ in range(5):
            with pytest.raises(NotReady):
                empty.sample(4)
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            empty.sample(4, wait=True, timeout=0.05)
        assert time.monotonic() - began < 5  # the door is shut for much longer
        assert kind(rb) == kind(empty) == "LaterFastPath"
        assert loading() == 1


def test_when_they_are_loaded_they_are_used(door: Door) -> None:
    pytest.importorskip("numba")
    door.opened.set()
    with filled() as rb:
        for _ in range(3):
            assert kind(rb) == "LaterFastPath"
            rb.sample(4)
        kernels.wait()
        rb.sample(4)
        assert kind(rb) == "CompiledFastPath"
        assert rb.sample(4)["x"].shape == (4,)
        assert rb.stats()["sample_calls"] == 5


@pytest.mark.parametrize("call", ["extend", "sample", "update_priority"])
def test_every_ordinary_call_counts(door: Door, call: str) -> None:
    from millpond.replay import PrioritizedSampler

    door.opened.set()
    with filled(sampler=PrioritizedSampler() if call == "update_priority" else None) as rb:
        batch = rb.peek(4)
        for i in range(20):
            assert i < 10, "it is never asked for"
            if kernels._asked:
                break
            if call == "extend":
                rb.extend({"x": torch.arange(4)})
            elif call == "sample":
                rb.sample(4)
            else:
                rb.update_priority(batch, 1.0)


def test_of_many_threads_that_ask_one_loads(door: Door) -> None:
    """Also where all of them have seen that nobody asked yet."""
    asking: list[int] = []

    def ask() -> None:
        asking.append(1)
        for _ in range(100):
            assert kernels.request() is None

    threads = [threading.Thread(target=ask) for _ in range(8)]
    with kernels._lock:
        for thread in threads:
            thread.start()
        until(lambda: len(asking) == 8)
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    assert door.reached.wait(10)
    assert loading() == 1
    door.opened.set()
    kernels.wait()
    assert door.threads == ["millpond-kernels"]


@pytest.mark.parametrize(
    ("problem", "told"),
    [(ImportError("no module named 'numba'"), 0), (TypeError("no such signature"), 1), (SystemError("LLVM"), 1)],
    ids=["no Numba", "cannot compile", "LLVM"],
)
def test_without_them_all_goes_on(door: Door, problem: Exception, told: int, caplog: pytest.LogCaptureFixture) -> None:
    """Where there is no Numba nothing is said, where it cannot do it one line is."""
    door.problem = problem
    door.opened.set()
    with caplog.at_level(logging.WARNING, "millpond"), filled() as rb:
        for _ in range(10):
            rb.sample(4)
            kernels.wait()
        rb.extend({"x": torch.arange(4)})
        assert kind(rb) == "LaterFastPath"
        assert rb.stats()["sample_calls"] == 10
    assert len(caplog.records) == told
    assert len(door.threads) == 1


def test_where_the_system_gives_no_thread_all_goes_on(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with filled() as rb:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        for _ in range(10):
            rb.sample(4)
        monkeypatch.undo()
        assert rb.stats()["sample_calls"] == 10


def test_a_fork_waits_for_the_loading_and_the_child_has_the_kernels(door: Door) -> None:
    pytest.importorskip("numba")
    kernels.request()
    assert door.reached.wait(10)
    opener = threading.Timer(0.1, door.opened.set)
    opener.start()
    with filled() as rb:

        def child() -> None:
            assert not loading()
            assert kernels.request() is not None
            for _ in range(5):
                rb.sample(4)
            assert kind(rb) == "CompiledFastPath"

        assert forked(child) == 0
    assert door.opened.is_set()
    opener.join()


def test_a_child_can_load_them_itself(door: Door) -> None:
    pytest.importorskip("numba")
    door.opened.set()

    def child() -> None:
        assert kernels.request() is None or kernels._thread is not None
        assert kernels.wait() is not None

    assert forked(child) == 0
    assert not kernels._asked


def test_while_one_forks_no_other_begins(door: Door) -> None:
    """Else the child would be forked in the middle of an import."""
    asked: list[Any] = []
    kernels._before_fork()
    try:
        thread = threading.Thread(target=lambda: asked.append(kernels.request()))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        assert not asked
        assert not door.reached.is_set()
    finally:
        kernels._lock.release()
    thread.join(10)
    assert asked == [None]
    assert door.reached.wait(10)


def test_after_a_fork_both_can_ask(door: Door) -> None:
    """The lock that was held meanwhile is free again, in the parent and in the child."""

    def child() -> None:
        thread = threading.Thread(target=kernels.request)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
        assert kernels._asked
        door.opened.set()

    assert forked(child) == 0
    assert not kernels._asked
    thread = threading.Thread(target=kernels.request)
    thread.start()
    thread.join(10)
    assert kernels._asked


def test_the_loading_thread_itself_may_fork(door: Door) -> None:
    """It does not wait for itself."""
    statuses: list[int] = []

    def load() -> None:
        statuses.append(forked(lambda: None))

    kernels._asked, kernels._thread = True, threading.Thread(target=load)
    kernels._thread.start()
    until(lambda: bool(statuses))
    kernels.wait()
    assert statuses == [0]


# ---------------------------------------------------------------------- processes of their own
BEGIN = """
import sys, threading, time
import torch
from millpond import ReplayBuffer
from millpond.replay.kernels import loading as kernels
from millpond.replay.kernels import binding as fast_path
fast_path.WORTH_CALLS = 3

class Slow:
    def find_spec(self, name, path, target=None):
        if name == "millpond.replay.kernels.ring":
            print("loading", flush=True)
            time.sleep(0.3)

sys.meta_path.insert(0, Slow())
rb = ReplayBuffer(100)
rb.extend({"x": torch.arange(50)})
"""


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", BEGIN + program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize(
    "first", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["again", "first time"]
)
def test_the_interpreter_may_end_in_the_middle_of_the_loading(tmp_path: Path, first: bool) -> None:
    """Also where nothing is in Numba's cache yet, so that it takes long."""
    ended = run("for _ in range(5): rb.sample(4)\n", **({"NUMBA_CACHE_DIR": str(tmp_path)} if first else {}))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "loading\n"


def test_when_the_interpreter_ends_nothing_begins() -> None:
    ended = run(
        "import atexit\n"
        "def late():\n"
        "    for _ in range(5): rb.sample(4)\n"
        "    print(threading.active_count(), kernels.request())\n"
        "atexit.register(late)\n"
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "1 None\n"


def test_where_numba_compiles_nothing_all_goes_on() -> None:
    """NUMBA_DISABLE_JIT is for whoever debugs kernels; ours cannot be run so."""
    pytest.importorskip("numba")
    ended = run(
        "for _ in range(5): rb.sample(4); kernels.wait()\n"
        "rb.extend({'x': torch.arange(4)})\n"
        "print(type(rb._local.engine.fast_path).__name__, rb.stats()['sample_calls'])\n",
        NUMBA_DISABLE_JIT="1",
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "LaterFastPath 5\n"


BUILT_ON = {
    "gather": ["compile"],
    "tree": ["compile"],
    "ring": ["compile", "gather", "tree"],
}


@pytest.mark.parametrize("name", BUILT_ON)
def test_a_change_of_what_is_inlined_changes_the_file_that_numbas_cache_looks_at(name: str) -> None:
    """Else kernels would go on as they were compiled before that change, here and where millpond is upgraded."""
    folder = Path(kernels.__file__).parent
    source = (folder / f"{name}.py").read_text()
    imported = re.findall(r"^from millpond\.replay\.kernels\.(\w+) import", source, re.MULTILINE)
    assert imported == BUILT_ON[name]
    digest = hashlib.sha256(b"".join((folder / f"{other}.py").read_bytes() for other in imported)).hexdigest()[:16]
    assert f'SOURCES = "{digest}"\n' in source, f'write SOURCES = "{digest}" into {name}.py'


def test_words_of_32_bits_have_neighbours() -> None:
    numba = pytest.importorskip("numba")
    from millpond.replay.kernels.compile import load, load_half, store, store_half

    def exchange(at: int, value: int) -> tuple[int, int]:
        before = load_half(at)
        store_half(at, value)
        store(at + 8, load(at + 8) + 1)
        return before, load_half(at + 4)

    memory = np.array([0xFFFFFFFE, 7, 0xFFFFFFFF, 1, 5], np.uint32)
    found = numba.njit(exchange)(memory.ctypes.data, 2**40 + 3)
    assert found == (0xFFFFFFFE, 7)
    assert memory.tolist() == [3, 7, 0, 2, 5]


def test_they_are_what_the_rows_are_gathered_with() -> None:
    assert {"gather", "gather_released"} <= set(vars(compiled()))
