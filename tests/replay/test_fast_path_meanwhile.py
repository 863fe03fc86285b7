"""What others do while the fast path is at work; and whom it wakes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import slow_kernels
import torch
from fast_paths import (
    CAPACITY,
    ROW,
    SAMPLERS,
    Counted,
    altered,
    amend,
    install,
    made,
    numbers,
    rows,
    seen,
    whole,
)
from waits import Call, until

from millpond import BlockingReplayBuffer, Flow, ReplayBuffer
from millpond.core.errors import NotReady
from millpond.replay import (
    PrioritizedSampler,
    waiting,
)
from millpond.replay import state as words
from millpond.replay.kernels import binding as fast_path
from millpond.replay.kernels.binding import CompiledFastPath, NoFastPath
from millpond.shm import futex


# ---------------------------------------------------------------------- what others do meanwhile
class Meanwhile:
    """The slow kernels. Once, before the lock is taken or before a kernel begins, somebody else does something."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any], *, before: str) -> None:
        self._act, self._before = act, before
        self.acted = self.calls = 0
        enter = slow_kernels._ring._enter
        if before == "lock":
            monkeypatch.setattr(slow_kernels._ring, "_enter", lambda plan: self._once() or enter(plan))

    def _once(self) -> None:
        if not self.acted:
            self.acted = 1
            self._act()

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(slow_kernels, name)
        if not callable(kernel):
            return kernel

        def call(*arguments: Any) -> Any:
            self.calls += 1
            if self._before == "kernel":
                self._once()
            return kernel(*arguments)

        return call


def rewritten(rb: ReplayBuffer) -> None:
    rb.update(torch.arange(10), {"row": altered(rows(0, 10)["row"])})


ACTS: dict[str, Callable[[ReplayBuffer], Any]] = {
    "all is overwritten": lambda rb: rb.extend(rows(10, CAPACITY)),
    "half is overwritten": lambda rb: rb.extend(rows(10, 11)),
    "something is added": lambda rb: rb.extend(rows(10, 2)),
    "it is emptied": lambda rb: (rb.empty(), rb.extend(rows(10, 4))),
    "rows are rewritten": rewritten,
    "an older state is loaded": lambda rb: rb.load_state_dict(rb.state_dict()),
    "others sample": lambda rb: rb.sample(3),
}
#: What makes a batch be drawn anew; else it is as good as it was.
ANEW = {
    "uniform": {"all is overwritten", "it is emptied", "rows are rewritten", "an older state is loaded"},
    "prioritized": {"all is overwritten", "it is emptied", "rows are rewritten", "an older state is loaded"},
    "oldest": {*ACTS} - {"something is added"},
}


@pytest.mark.parametrize("what", ACTS)
@pytest.mark.parametrize("kind", SAMPLERS)
def test_what_others_do_between_the_gathering_and_the_lock(
    monkeypatch: pytest.MonkeyPatch, kind: str, what: str
) -> None:
    """ring-9: no batch holds a row that is not its item's, and each is counted once."""
    with made(kind) as rb:
        meanwhile = Meanwhile(monkeypatch, lambda: ACTS[what](rb), before="lock")
        engine = rb._local.engine
        engine.fast_path, short = NoFastPath(), Counted(engine, meanwhile)
        before = rb.stats()
        into = short.sample(3)
        assert into is not None
        assert meanwhile.acted
        if what != "half is overwritten":
            assert (meanwhile.calls == 2) == (what in ANEW[kind])
        batch = into.unpacked(ROW)
        check(rb, kind, what, batch, before, into.emptied)


def check(rb: ReplayBuffer, kind: str, what: str, batch: Any, before: dict[str, Any], emptied: int) -> None:
    state, found = rb._local.engine.control.peek(), batch["generation"].tolist()
    assert whole(batch)
    assert numbers(batch) == found
    assert batch["index"].tolist() == [number % CAPACITY for number in found]
    lowest = state[words.TAIL] - 3 * (kind == "oldest")
    assert all(lowest <= number < state[words.HEAD] for number in found)
    if what == "rows are rewritten":
        assert batch["row"][:, 1].tolist() == (rows(0, 10)["row"][found, 1] + 1).tolist()
    if kind == "oldest":
        assert found == list(range(lowest, lowest + 3))
    assert emptied == state[words.EMPTIED]
    others = 1 if what == "others sample" else 0
    after = rb.stats()
    assert after["sample_calls"] == before["sample_calls"] + 1 + others
    assert after["samples_returned"] == before["samples_returned"] + 3 + 3 * others
    assert after["consumed"] == (3 + 3 * others if kind == "oldest" else 0)
    dropped = 10 if what == "it is emptied" else 0
    assert after["write_count"] == after["size"] + after["consumed"] + after["overwritten"] + dropped


@pytest.mark.parametrize("what", ACTS)
@pytest.mark.parametrize("kind", SAMPLERS)
def test_what_others_do_between_the_drawing_and_the_look(monkeypatch: pytest.MonkeyPatch, kind: str, what: str) -> None:
    """The positions were drawn for so many items: for another number of them they would not be uniform."""
    with made(kind) as rb:
        meanwhile = Meanwhile(monkeypatch, lambda: ACTS[what](rb), before="kernel")
        engine = rb._local.engine
        engine.fast_path, short = NoFastPath(), Counted(engine, meanwhile)
        before, live = rb.stats(), len(rb)
        into = short.sample(3)
        assert into is not None
        assert meanwhile.acted
        assert (meanwhile.calls == 2) == (kind == "uniform" and len(rb) != live)
        check(rb, kind, what, into.unpacked(ROW), before, into.emptied)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_the_ratio_is_asked_again_under_the_lock(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Two never both pass where one may."""
    with made(kind, flow=Flow(samples_per_insert=0.75)) as rb:
        rb.sample(3)
        meanwhile = Meanwhile(monkeypatch, lambda: rb.sample(3), before="lock")
        short, rb._local.engine.fast_path = Counted(rb._local.engine, meanwhile), NoFastPath()
        assert short.sample(3) is None
        assert rb.stats()["samples_returned"] == 6
        with pytest.raises(NotReady):
            rb.sample(3)
        assert not rb._local.engine.control.mutex.holder


@pytest.mark.parametrize("kind", SAMPLERS)
def test_the_closed_and_the_spent_are_seen_under_the_lock(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """What changed nothing of the items, but everything else."""
    for act in (lambda rb: amend(rb, words.RESERVED, 8), lambda rb: rb._local.engine.close(everybody=True)):
        with made(kind, flow=Flow(samples_per_insert=1.0)) as rb, monkeypatch.context() as patch:
            rb.sample(3)
            meanwhile = Meanwhile(patch, lambda rb=rb, act=act: act(rb), before="lock")
            assert Counted(rb._local.engine, meanwhile).sample(3) is None
            assert meanwhile.calls == 1
            assert rb._local.engine.control.peek()[words.RETURNED] == 3
            assert not rb._local.engine.control.mutex.holder


def test_a_leaf_without_an_item_is_not_drawn(way: Any) -> None:
    """Priorities are changed a moment before the state is, or after it."""
    with made("prioritized", n=4) as rb:
        short = install(rb, way)
        rb.sampler.tree.update(np.array([9]), np.array([1e12]))
        before = seen(rb)
        assert short.sample(8) is None
        assert seen(rb) == before
        assert not rb._local.engine.control.mutex.holder
        rb.sampler.tree.update(np.array([9]), np.array([0.0]))
        assert short.sample(8) is not None


def test_where_others_are_always_faster_the_ordinary_way_is_gone() -> None:
    with made() as rb:
        short, before = install(rb, slow_kernels), rb._local.engine.control.peek()
        inner = short._inner
        tries: list[int] = []

        def take(n: int, live: int, into: Any) -> int:
            tries.append(n)
            return fast_path.AGAIN

        inner._take = take
        assert inner.sample(3) is None
        assert len(tries) == fast_path.TRIES
        assert rb._local.engine.control.peek() == before
        assert whole(rb.sample(3))


def test_a_commit_between_two_looks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of one state and half of the next are none."""
    for kind in SAMPLERS:
        with made(kind) as rb, monkeypatch.context() as patch:
            short, looks = CompiledFastPath(rb._local.engine, slow_kernels), []
            in_force = slow_kernels._ring._in_force

            def look(plan: Any, rb: ReplayBuffer = rb, looks: list[int] = looks, in_force: Any = in_force) -> int:
                record: int = in_force(plan)
                looks.append(record)
                if len(looks) == 1:
                    rb.extend(rows(10, 1))  # this record is now the old one, and the next change writes into it
                    rb.extend(rows(11, 1))
                return record

            patch.setattr(slow_kernels._ring, "_in_force", look)
            into = short.sample(3)
            assert into is not None
            batch = into.unpacked(ROW)
            assert whole(batch)
            assert numbers(batch) == batch["generation"].tolist()
            assert len(looks) == 3  # two of the second try


# ---------------------------------------------------------------------- whom it wakes
@pytest.fixture
def soundly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sleeps is woken, or sleeps on: a lost wake-up must show."""
    monkeypatch.setattr(futex, "WAIT_SLICE", 60.0)
    monkeypatch.setattr(waiting, "OWNER_SLICE", 60.0)


@contextlib.contextmanager
def waiters(rb: ReplayBuffer, n: int, call: Callable[[], Any], how: str) -> Iterator[list[Any]]:
    """So many threads, or processes, that wait in a call. Inside they are asleep; afterwards they have returned."""
    key = "waiting_producers" if "extend" in call.__name__ else "waiting_consumers"
    results: list[Any] = []
    if how == "threads":
        calls = [Call(call) for _ in range(n)]
        until(lambda: rb.stats()[key] == n)
        yield results
        results += [waiting_call.result(20) for waiting_call in calls]
    else:
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=call) for _ in range(n)]
        for process in processes:
            process.start()
        until(lambda: rb.stats()[key] == n)
        yield results
        for process in processes:
            process.join(20)
            results.append(process.exitcode)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
    assert rb.stats()[key] == 0


@pytest.mark.usefixtures("soundly")
@pytest.mark.parametrize("how", ["threads", "processes"])
@pytest.mark.parametrize("n", [1, 3])
class TestItWakes:
    def test_those_that_wait_for_items(self, way: Any, n: int, how: str) -> None:
        with made(n=0, shared=True) as rb:
            short = install(rb, way)

            def sample() -> None:
                assert rb.sample(2, wait=True, timeout=50).shape == (2,)

            with waiters(rb, n, sample, how) as results:
                rb.extend(rows(0, 4))
                assert short.done["put"] == 1
            assert results == [None if how == "threads" else 0] * n
            assert rb.stats()["sample_calls"] == n

    def test_those_that_wait_for_space(self, way: Any, n: int, how: str) -> None:
        with BlockingReplayBuffer(CAPACITY, schema=ROW, shared=True) as rb:
            rb.extend(rows(0, CAPACITY))
            short = install(rb, way)

            def extend() -> None:
                assert rb.extend(rows(100 + os.getpid(), 2), timeout=50).shape == (2,)

            with waiters(rb, n, extend, how) as results:
                assert numbers(rb.sample(6)) == list(range(6))
                assert short.done["sample"] == 1
            assert results == [None if how == "threads" else 0] * n
            assert rb.write_count == CAPACITY + 2 * n

    @pytest.mark.parametrize("kind", ["uniform", "prioritized"])
    def test_those_that_wait_for_samples(self, way: Any, n: int, how: str, kind: str) -> None:
        flow = Flow(samples_per_insert=1.0, max_debt=12.0)
        with made(kind, shared=True, flow=flow) as rb:
            rb.sample(4)
            rb.extend(rows(10, 4))
            rb.extend(rows(14, 2))
            short = install(rb, way)

            def extend() -> None:
                assert rb.extend(rows(100 + os.getpid(), 1), timeout=50).shape == (1,)

            with waiters(rb, n, extend, how) as results:
                assert rb.sample(4).shape == (4,)
                assert short.done["sample"] == 1
            assert results == [None if how == "threads" else 0] * n
            assert rb.write_count == 16 + n

    def test_those_that_wait_for_priorities(self, way: Any, n: int, how: str) -> None:
        sampler = PrioritizedSampler(eps=0.0, alpha=1.0)
        with ReplayBuffer(CAPACITY, sampler=sampler, schema=ROW, shared=True) as rb:
            rb.extend(rows(0, 4))
            batch = rb.sample(4)
            assert rb.update_priority(torch.arange(4), 0.0) == 4
            short = install(rb, way)

            def sample() -> None:
                assert rb.sample(2, wait=True, timeout=50).shape == (2,)

            with waiters(rb, n, sample, how) as results:
                assert rb.update_priority(batch, torch.ones(4)) == 4
                assert short.done["set_leaves"] == 1
            assert results == [None if how == "threads" else 0] * n

    def test_and_those_that_it_woke_use_it_too(self, way: Any, n: int, how: str) -> None:
        """Into the memory that was laid out before the sleep."""
        with made(n=0, shared=True) as rb:
            short = install(rb, way)

            def sample() -> None:
                batch = rb.sample(2, wait=True, timeout=50)
                assert whole(batch)
                assert numbers(batch) == batch["generation"].tolist()
                assert short.done["sample"] >= 1

            with waiters(rb, n, sample, how):
                rb.extend(rows(0, 4))


def test_no_more_than_there_is_leaves_though_the_oldest_is_still_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    rb = made("oldest", 10)
    counted = install(rb, Meanwhile(monkeypatch, lambda: amend(rb, words.LIVE, 3), before="lock"))
    assert counted.sample(7) is None
    state = rb._local.engine.control.peek()
    assert (state[words.LIVE], state[words.TAIL], state[words.CONSUMED]) == (3, 0, 0)
    amend(rb, words.LIVE, 10)
    rb.close()
