"""The fast path in many threads and processes: forked, attached, shared later, closed under it."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import slow_kernels
import torch
from fast_paths import ROW, compiled, forked, from_the_start, install, numbers, rows, tree_is_sound, whole
from waits import until

from millpond import Flow, ReplayBuffer
from millpond.core.errors import BufferClosed, DeadlineExceeded
from millpond.replay import ConsumingSampler, PrioritizedSampler, RandomSampler
from millpond.replay import state as words
from millpond.replay.kernels.binding import NoFastPath
from tests.alike import usually

KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "uniform": lambda: {"sampler": RandomSampler()},
    "prioritized": lambda: {"sampler": PrioritizedSampler()},
    "oldest": lambda: {"sampler": ConsumingSampler(1), "flow": Flow(admission="block")},
}


def ask(child: Callable[[], Any]) -> Any:
    """What a forked child answers."""
    reads, writes = os.pipe()

    def answer() -> None:
        os.write(writes, json.dumps(child()).encode())

    try:
        assert forked(answer) == 0
        return json.loads(os.read(reads, 1 << 16))
    finally:
        os.close(reads)
        os.close(writes)


# ---------------------------------------------------------------------- fork
@pytest.mark.parametrize("shared", [False, True])
def test_a_child_draws_other_numbers_than_its_parent(way: Any, shared: bool) -> None:
    with ReplayBuffer(1000, schema=ROW, seed=0, shared=shared) as rb, ReplayBuffer(1000, schema=ROW, seed=0) as twin:
        for buffer in (rb, twin):
            buffer.extend(rows(0, 1000))
        short = install(rb, way)

        def sample() -> list[list[int]]:
            done = short.done["sample"]
            found = [numbers(rb.sample(20)) for _ in range(2)]
            assert short.done["sample"] == done + 2
            return found

        children, mine = [ask(sample), ask(sample)], sample()
        assert mine == [numbers(twin.sample(20)) for _ in range(2)]  # the parent goes on as if there were no child
        assert len({str(found) for found in (*children, mine)}) == 3


def test_a_childs_writes_say_whose_they_are(way: Any) -> None:
    """Whoever mends after a death, or explains, must find the process that it was."""
    for kind in ("uniform", "prioritized"):
        with ReplayBuffer(100, schema=ROW, shared=True, **KINDS[kind]()) as rb:
            rb.extend(rows(0, 9))
            short, control = install(rb, way), rb._local.engine.control

            def change(rb: ReplayBuffer = rb, kind: str = kind, short: Any = short) -> int:
                if kind == "uniform":
                    rb.extend(rows(9, 3))
                else:
                    rb.update_priority(rb.sample(3), 2.0)
                assert short.done["put"] + short.done["set_leaves"] >= 1
                return os.getpid()

            pid = ask(change)
            start = 9 if kind == "uniform" else 0
            assert control._intent[:4].tolist() == [control.peek()[control.SETTLED], pid, 3, start]
            change()
            assert control._intent[1] == os.getpid()


def test_a_childs_copy_of_private_memory_is_its_own(way: Any) -> None:
    with ReplayBuffer(100, schema=ROW, seed=0) as rb:
        rb.extend(rows(0, 9))
        install(rb, way)
        assert ask(lambda: (rb.extend(rows(9, 3)), len(rb))[1]) == 12
        assert len(rb) == 9
        assert whole(rb.sample(5))


# ---------------------------------------------------------------------- share, attach
def test_after_share_it_is_the_shared_memory_that_is_used(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from_the_start(monkeypatch, way)
    for kind in KINDS:
        with ReplayBuffer(100, schema=ROW, **KINDS[kind]()) as rb:
            rb.extend(rows(0, 20))
            private = rb._local.engine
            rb.share()
            assert isinstance(private.fast_path, NoFastPath)
            short: Any = rb._local.engine.fast_path
            assert numbers(rb[:]) == list(range(20))
            rb.add({"row": rows(20, 1)["row"][0]})
            rb.sample(3)
            assert short.done["sample"] == 1
            assert short.done["put"] == (kind != "prioritized")
            assert ask(lambda rb=rb: [rb.write_count, rb.stats()["samples_returned"]]) == [21, 3]


ATTACHED = """
import sys, os, json
sys.path[:0] = json.loads(sys.argv[2])
import numpy as np
from fast_paths import *
from millpond.replay import ReplayBuffer
rb = ReplayBuffer.attach(sys.argv[1])
short = install(rb, compiled())
rb.extend(rows(10, 5), receipt=(7, 1 + os.getpid()))
batch = rb.sample(6)
assert whole(batch) and numbers(batch) == batch["generation"].tolist()
if rb._local.engine.priorities is not None:
    assert rb.update_priority(batch, 9.0) == 6
print(json.dumps([os.getpid(), sorted(short.done)]))
rb.close()
"""


@pytest.mark.parametrize("kind", usually(KINDS, "uniform"))
def test_in_a_process_that_attached(kind: str, tmp_path: Path) -> None:
    compiled()
    with ReplayBuffer(100, schema=ROW, shared=True, **KINDS[kind]()) as rb:
        rb.extend(rows(0, 10))
        short = install(rb, compiled())
        told = subprocess.run(
            [sys.executable, "-c", ATTACHED, rb.handle().path, json.dumps([str(Path(__file__).parent), *sys.path])],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert (told.returncode, told.stderr) == (0, "")
        pid, done = json.loads(told.stdout)
        assert done == (["sample", "set_leaves"] if kind == "prioritized" else ["put", "sample"])
        assert rb.receipt(7) == 1 + pid
        held = rb[:]
        assert numbers(held) == list(range(6 if kind == "oldest" else 0, 15))
        assert whole(held)
        assert whole(rb.sample(6))
        assert short.done["sample"] == 1
        assert tree_is_sound(rb)


# ---------------------------------------------------------------------- closed under it
CLOSING = """
import sys, json
sys.path[:0] = json.loads(sys.argv[1])
import faulthandler, threading, time
faulthandler.enable()
from fast_paths import *
from millpond import *
from millpond.replay import *
from millpond.core.errors import BufferClosed, NotReady
kernels = compiled()
calls, problems = [0], []

def use(rb, first, kind):
    try:
        while True:
            if kind == 0 and rb._local.rules.sampler.__class__ is not ConsumingSampler or kind == 0 and len(rb) < 900:
                rb.extend(rows(first, 5))
            else:
                batch = rb.sample(5)
                assert whole(batch)
                if kind == 2 and rb._local.rules.sampler.__class__ is PrioritizedSampler:
                    rb.update_priority(batch, 2.0)
            calls[0] += 1
    except (BufferClosed, NotReady):
        pass
    except BaseException as problem:
        problems.append(repr(problem))

makers = [RandomSampler, PrioritizedSampler, lambda: ConsumingSampler(1)]
sys.setswitchinterval(1e-5)
for i in range(24):
    rb = ReplayBuffer(1000, sampler=makers[i % 3](), schema=ROW, shared=i % 2 == 0)
    rb.extend(rows(0, 800))
    install(rb, kernels)
    threads = [threading.Thread(target=use, args=(rb, 1000 * j, j % 3)) for j in range(6)]
    for thread in threads:
        thread.start()
    time.sleep(0.003 * (i % 7))
    rb.close()
    del rb
    for thread in threads:
        thread.join()
assert not problems, problems
assert calls[0] > 400, calls
print("well")
"""


def test_a_buffer_may_be_closed_while_calls_are_inside() -> None:
    """The memory goes when the last of them has left, or the process would die."""
    compiled()
    told = subprocess.run(
        [sys.executable, "-c", CLOSING, json.dumps([str(Path(__file__).parent), *sys.path])],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (told.returncode, told.stdout, told.stderr) == (0, "well\n", "")


def test_who_still_has_the_fast_path_of_a_closed_buffer_reads_memory_that_is_there(way: Any) -> None:
    rb = ReplayBuffer(1000, schema=ROW, shared=True)
    rb.extend(rows(0, 1000))
    short, engine = install(rb, way), rb._local.engine
    rb.close()
    assert isinstance(engine.fast_path, NoFastPath)
    del engine
    assert short.sample(4) is None  # closed for everybody
    assert short.put(rows(0, 4)["row"].view(torch.uint8), None) is None


def test_what_its_addresses_point_to_lives_as_long_as_it_does(way: Any) -> None:
    """The sampler of a closed buffer may serve another one, while a call is still inside."""
    sampler = PrioritizedSampler()
    rb = ReplayBuffer(100, schema=ROW, sampler=sampler)
    rb.extend(rows(0, 9))
    used = [weakref.ref(array) for array in sampler.tree.arguments]
    short = install(rb, way)
    rb.close()
    with ReplayBuffer(100, schema=ROW, sampler=sampler):
        gc.collect()
        assert all(array() is not None for array in used)
        assert short.sample(3) is None
    del rb, short
    gc.collect()
    assert all(array() is None for array in used)


# ---------------------------------------------------------------------- many at once
CAPACITY = 64


class Crowd:
    """Threads that write, sample and change priorities, until they are told to stop; and what they did."""

    def __init__(self, rb: ReplayBuffer, threads: int) -> None:
        self.rb, self.stop = rb, threading.Event()
        self.written = self.sampled = self.calls = 0
        self.seen: list[int] = []
        self.problems: list[str] = []
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._go, args=(i,)) for i in range(threads)]

    def run(self, short: Any) -> None:
        """For a while, and until the fast path did enough of it."""
        for thread in self._threads:
            thread.start()
        try:
            time.sleep(0.8)
            changes = "put" if self.rb._local.engine.priorities is None else "set_leaves"
            until(lambda: bool(self.problems) or min(short.done["sample"], short.done[changes]) > 20, 40)
        finally:
            self.stop.set()
            for thread in self._threads:
                thread.join()

    def _go(self, i: int) -> None:
        try:
            (self._write if i % 2 == 0 else self._sample)(1 + i % 5)
        except BufferClosed:
            pass
        except BaseException as problem:
            self.problems.append(repr(problem))

    def _write(self, n: int) -> None:
        first = os.getpid() * 1_000_000_000 + n * 100_000_000
        while not self.stop.is_set():
            try:
                self.rb.extend(rows(first, n), timeout=0.2)
            except DeadlineExceeded:
                continue
            first += n
            with self._lock:
                self.written += n

    def _sample(self, n: int) -> None:
        prioritized = self.rb._local.engine.priorities is not None
        while not self.stop.is_set():
            try:
                batch = self.rb.sample(n, wait=True, timeout=0.2)
            except DeadlineExceeded:
                continue
            assert whole(batch), "torn"
            assert ((batch["generation"] - batch["index"]) % CAPACITY == 0).all(), "not its slot"
            if prioritized:
                assert ((batch["priority_weight"] > 0) & (batch["priority_weight"] <= 1)).all()
                self.rb.update_priority(batch, torch.rand(n))
            with self._lock:
                self.sampled += n
                self.calls += 1
                self.seen += batch["generation"].tolist()


def after(rb: ReplayBuffer, crowds: list[dict[str, Any]]) -> None:
    """Counters, priorities, and that each item was consumed once."""
    assert [crowd["problems"] for crowd in crowds] == [[]] * len(crowds)
    stats, held = rb.stats(), rb[:]
    assert stats["write_count"] == sum(crowd["written"] for crowd in crowds)
    assert stats["samples_returned"] == sum(crowd["sampled"] for crowd in crowds)
    assert stats["sample_calls"] == sum(crowd["calls"] for crowd in crowds)
    assert stats["write_count"] == stats["size"] + stats["consumed"] + stats["overwritten"]
    assert (stats["waiting_producers"], stats["waiting_consumers"], stats["recoveries"]) == (0, 0, 0)
    assert whole(held)
    assert tree_is_sound(rb)
    if rb._local.engine.distinct:
        taken = sorted(number for crowd in crowds for number in crowd["seen"])
        assert taken == list(range(stats["consumed"]))


def told(crowd: Crowd, short: Any) -> dict[str, Any]:
    kept = crowd.seen if crowd.rb._local.engine.distinct else []
    return {
        "written": crowd.written,
        "sampled": crowd.sampled,
        "calls": crowd.calls,
        "problems": crowd.problems,
        "seen": kept,
        "done": dict(short.done),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_many_threads(way: Any, kind: str) -> None:
    interval = sys.getswitchinterval()
    with ReplayBuffer(CAPACITY, schema=ROW, **KINDS[kind]()) as rb:
        short, crowd = install(rb, way), Crowd(rb, 6)
        sys.setswitchinterval(2e-5)  # of the slow kernels each line may be the last of a turn
        try:
            crowd.run(short)
        finally:
            sys.setswitchinterval(interval)
        after(rb, [told(crowd, short)])


@pytest.mark.parametrize("kind", KINDS)
def test_several_processes_of_several_threads(way: Any, kind: str, tmp_path: Path) -> None:
    with ReplayBuffer(CAPACITY, schema=ROW, shared=True, **KINDS[kind]()) as rb:
        short = install(rb, way)
        files = [tmp_path / str(i) for i in range(2)]
        pids = []
        for file in files:
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    crowd = Crowd(rb, 4)
                    crowd.run(short)
                    file.write_text(json.dumps(told(crowd, short)))
                    code = 0
                finally:
                    os._exit(code)
            pids.append(pid)
        crowd = Crowd(rb, 2)
        try:
            crowd.run(short)
        finally:
            end = time.monotonic() + 20
            for pid in pids:
                while os.waitpid(pid, os.WNOHANG)[0] == 0:
                    time.sleep(0.01)
                    if time.monotonic() > end:
                        os.kill(pid, signal.SIGKILL)
        after(rb, [told(crowd, short), *(json.loads(file.read_text()) for file in files)])


def test_a_slow_one_and_a_compiled_one_get_on(tmp_path: Path) -> None:
    """The longest times under the lock on one side, the shortest on the other."""
    with ReplayBuffer(CAPACITY, schema=ROW, shared=True, sampler=PrioritizedSampler()) as rb:
        quick, results = compiled(), []
        reads, writes = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                short, crowd = install(rb, slow_kernels), Crowd(rb, 4)
                crowd.run(short)
                os.write(writes, json.dumps(told(crowd, short)).encode())
                code = 0
            finally:
                os._exit(code)
        try:
            short, crowd = install(rb, quick), Crowd(rb, 4)
            crowd.run(short)
            results = [told(crowd, short), json.loads(os.read(reads, 1 << 16))]
        finally:
            os.close(reads)
            os.close(writes)
            assert os.waitpid(pid, 0)[1] == 0
        after(rb, results)
        assert rb._local.engine.control.peek()[words.REWRITES] == 0
