from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.collect import FrameBudget
from millpond.collect.budget import WORKERS
from millpond.core.errors import BufferClosed, Cancelled, InvalidArgument, InvalidType, Unsatisfiable
from tests.replay.interrupts import Interrupt, interrupted

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def budget() -> Iterator[FrameBudget]:
    made = FrameBudget(100)
    yield made
    made.close()


def counts(budget: FrameBudget) -> tuple[int, int, int | None]:
    return budget.collected, budget.reserved, budget.remaining


def test_the_last_reservation_shrinks_and_nothing_goes_past_the_total(budget: FrameBudget) -> None:
    """Case unit-1."""
    assert [budget.reserve(30, worker=i) for i in range(5)] == [30, 30, 30, 10, 0]
    assert counts(budget) == (0, 100, 0)
    budget.commit(3, frames=10)
    assert counts(budget) == (10, 90, 0)
    assert budget.reserve(1, worker=3) == 0
    for worker in range(3):
        budget.commit(worker, frames=30)
    assert counts(budget) == (100, 0, 0)
    assert budget.finished


def test_what_is_refunded_is_somebody_elses(budget: FrameBudget) -> None:
    """Case flow-11."""
    budget.reserve(100, worker=0)
    budget.commit(0, frames=40)
    assert budget.refund(0, frames=10) == 10
    assert budget.reserve(50, worker=1) == 10
    assert budget.refund(0) == 50
    assert counts(budget) == (40, 10, 50)
    assert budget.reserve_span(60, worker=2) == (50, 50)


def test_a_total_of_minus_one_has_no_end() -> None:
    budget = FrameBudget(-1)
    assert budget.reserve(10**9, worker=1) == 10**9
    budget.commit(1, frames=10**9)
    assert counts(budget) == (10**9, 0, None)
    assert budget.total == -1
    assert not budget.finished
    budget.close()


def test_items_of_several_frames_are_reserved_whole(budget: FrameBudget) -> None:
    assert budget.reserve(50, worker=0, multiple_of=20) == 40
    assert budget.reserve(50, worker=1, multiple_of=20) == 40
    assert budget.reserve(50, worker=2, multiple_of=20) == 20
    assert budget.remaining == 0


def test_frames_of_an_earlier_part_of_the_run_count() -> None:
    budget = FrameBudget(100, collected=70)
    assert budget.reserve(50) == 30
    with pytest.raises(InvalidArgument, match="while others are collected"):
        budget.restore(0)
    budget.refund()
    budget.restore(90)
    assert budget.reserve(50) == 10
    budget.close()
    with pytest.raises(InvalidArgument, match="more than total_frames"):
        FrameBudget(10, collected=11)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda b: b.reserve(0), InvalidArgument),
        (lambda b: b.reserve(-1), InvalidArgument),
        (lambda b: b.reserve(True), InvalidType),
        (lambda b: b.reserve(1.5), InvalidType),
        (lambda b: b.reserve(1, worker=-1), InvalidArgument),
        (lambda b: b.reserve(1, worker=WORKERS), InvalidArgument),
        (lambda b: b.commit(0, frames=1), InvalidArgument),
        (lambda b: b.refund(0, frames=1), InvalidArgument),
        (lambda b: b.intend(0, frames=1, receipt=1), InvalidArgument),
        (lambda b: b.commit(0, frames=-1), InvalidArgument),
        (lambda b: b.claim(WORKERS + 1), Unsatisfiable),
        (lambda b: FrameBudget(-2), InvalidArgument),
        (lambda b: FrameBudget("100"), InvalidType),
    ],
)
def test_bad_values_change_nothing(budget: FrameBudget, call: Callable[[Any], Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        call(budget)
    assert counts(budget) == (0, 0, 100)


def test_a_line_belongs_to_one_process(budget: FrameBudget) -> None:
    budget.reserve(10, worker=5)
    child = os.fork()
    if child == 0:
        try:
            budget.reserve(10, worker=5)
        except InvalidArgument as problem:
            os._exit(7 if str(os.getppid()) in str(problem) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert budget.reserve(10, worker=5) == 10


def test_lines_are_claimed_and_released(budget: FrameBudget) -> None:
    """Case unit-5."""
    assert budget.claim(3) == [0, 1, 2]
    assert budget.claim(2, avoid={3, 5}) == [4, 6]
    budget.reserve(10, worker=4)
    budget.commit(4, frames=4)
    budget.release(4)
    assert counts(budget) == (4, 0, 96)
    assert budget.claim(1) == [3]
    assert budget.claim(1) == [4]
    assert budget.collected_by(4) == 0


def test_closed(budget: FrameBudget) -> None:
    budget.close()
    budget.close()
    with pytest.raises(BufferClosed, match="frame budget"):
        budget.reserve(1)
    assert "closed" in repr(budget)


# ------------------------------------------------------------------------------------------------ against a model
OPERATIONS = st.lists(
    st.tuples(st.sampled_from("reserve commit refund write die".split()), st.integers(0, 3), st.integers(1, 60)),
    max_size=60,
)


@given(total=st.integers(-1, 200), operations=OPERATIONS)
@settings(max_examples=60)
def test_against_a_model(total: int, operations: list[tuple[str, int, int]]) -> None:
    """Frames written and frames collected stay equal, whatever happens in which order."""
    budget = FrameBudget(total)
    reserved, receipts, written, numbers = [0] * 4, [0] * 4, 0, [0] * 4
    for what, worker, n in operations:
        if what == "reserve":
            room = n if total < 0 else min(n, total - written - sum(reserved))
            assert budget.reserve(n, worker=worker) == room
            reserved[worker] += room
        elif what == "commit":
            n = min(n, reserved[worker])
            budget.commit(worker, frames=n)
            reserved[worker] -= n
            written += n
        elif what == "refund":
            assert budget.refund(worker) == reserved[worker]
            reserved[worker] = 0
        elif reserved[worker]:
            n = min(n, reserved[worker])
            numbers[worker] += 1
            budget.intend(worker, frames=n, receipt=numbers[worker])
            if what == "write":  # and the worker dies between the write and the commit
                receipts[worker] = numbers[worker]
                written += n
                reserved[worker] -= n
            else:
                numbers[worker] -= 1  # it dies before the write
            assert budget.reclaim(worker, receipt=receipts[worker]) == reserved[worker]
            assert budget.reclaim(worker, receipt=receipts[worker]) == 0
            reserved[worker] = 0
        assert (budget.collected, budget.reserved) == (written, sum(reserved))
        assert total < 0 or budget.collected + budget.reserved <= total
    budget.close()


# ------------------------------------------------------------------------------------------------------- processes
def _spend(budget: FrameBudget, worker: int) -> None:
    rng = random.Random(worker)
    while not budget.finished:
        granted = budget.reserve(rng.randint(1, 9), worker=worker)
        if granted and rng.random() < 0.2:
            budget.refund(worker)
        elif granted:
            budget.commit(worker, frames=granted)


def test_many_processes_spend_exactly_the_total() -> None:
    """Case unit-1."""
    budget = FrameBudget(5003)
    spenders = [FORK.Process(target=_spend, args=(budget, i)) for i in range(4)]
    for spender in spenders:
        spender.start()
    for spender in spenders:
        spender.join(60)
        spender.close()
    assert counts(budget) == (5003, 0, 0)
    assert sum(budget.collected_by(i) for i in range(4)) == 5003
    budget.close()


@pytest.mark.parametrize("step", ["record written", "committed"])
@pytest.mark.parametrize("operation", ["reserve", "intend", "commit", "refund", "release"])
def test_killed_at_every_named_instant(budget: FrameBudget, operation: str, step: str) -> None:
    """The lock is held, half is written: what was committed is there, what was not never was, and others go on."""
    budget.reserve(40, worker=1)
    before, change = counts(budget), (0, 0, 0) if operation == "intend" else None

    def die(here: str) -> None:
        if here == step:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        block = budget._block()
        block.hook = die
        {
            "reserve": lambda: budget.reserve(40, worker=2),
            "intend": lambda: budget.intend(1, frames=5, receipt=1),
            "commit": lambda: budget.commit(1, frames=5),
            "refund": lambda: budget.refund(1),
            "release": lambda: budget.release(1),
        }[operation]()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    after = {"reserve": (0, 80, 20), "intend": before, "commit": (5, 35, 60)}.get(operation, (0, 0, 100))
    assert counts(budget) == (before if step == "record written" else after)
    assert change is None or after == before
    budget.reclaim(1)
    budget.reclaim(2)
    assert budget.reserve(200, worker=3) == 100 - budget.collected


def _reserve_and_commit_for_ever(budget: FrameBudget) -> None:
    while True:
        budget.commit(0, frames=budget.reserve(7, worker=0))


OPERATIONS: dict[str, Callable[[FrameBudget], Any]] = {
    "claim": lambda budget: budget.claim(2, avoid=[0]),
    "reserve": lambda budget: budget.reserve(10, worker=1),
    "intend": lambda budget: budget.intend(0, frames=5, receipt=3),
    "commit": lambda budget: budget.commit(0, frames=5),
    "refund": lambda budget: budget.refund(0, frames=5),
    "reclaim": lambda budget: budget.reclaim(0),
    "release": lambda budget: budget.release(0),
    "wait": lambda budget: budget.wait_until(lambda: True),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_interrupted_anywhere_it_holds_no_lock(operation: str) -> None:
    """Ctrl-C: a change is made or is not, and the others go on."""
    for place in itertools.count():
        with FrameBudget(100) as budget:
            budget.reserve(10, worker=0)
            try:
                with interrupted(place, "collect/"):
                    OPERATIONS[operation](budget)
            except Interrupt:
                assert budget.reserve(100, worker=2) in (80, 85, 90, 95, 100)  # while the traceback is there
                assert budget.reserved + budget.collected == 100
            else:
                break
    assert place > 1


def test_killed_at_random_instants_the_sums_stay_whole() -> None:
    budget = FrameBudget(-1)
    for attempt in range(15):
        spender = FORK.Process(target=_reserve_and_commit_for_ever, args=(budget,))
        before = budget.collected
        spender.start()
        assert budget.wait_until(lambda before=before: budget.collected > before + 70, timeout=30)  # type: ignore[misc]
        time.sleep(attempt * 2e-4)
        os.kill(spender.pid or 0, signal.SIGKILL)
        spender.join(10)
        spender.close()
        assert budget.reclaim(0) in (0, 7)
        assert budget.collected % 7 == 0
        assert budget.reserved == 0
    budget.close()


def _count_elsewhere(budget: FrameBudget, out: Any) -> None:
    out.send((budget.reserve(30, worker=9), budget.collected))


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_it_travels(method: str) -> None:
    """Case proc-9."""
    context: Any = multiprocessing.get_context(method)
    here, there = context.Pipe()
    budget = FrameBudget(20, collected=1)
    child = context.Process(target=_count_elsewhere, args=(budget, there))
    child.start()
    child.join(60)
    assert here.recv() == (19, 1)
    here.close()
    there.close()
    child.close()
    attached = pickle.loads(pickle.dumps(budget))
    attached.close()
    assert budget.reserved == 19
    budget.close()


# --------------------------------------------------------------------------------------------------------- waiting
def test_a_wait_is_woken_by_a_change(budget: FrameBudget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond.collect.budget._SLICE_S", 100.0)  # looking by itself would come too late
    done: list[bool] = []
    waiter = threading.Thread(target=lambda: done.append(budget.wait_until(lambda: budget.finished)))
    waiter.start()
    budget.commit(0, frames=budget.reserve(100))
    waiter.join(30)
    assert done == [True]


def test_a_wait_ends(budget: FrameBudget) -> None:
    assert not budget.wait_until(lambda: budget.finished, timeout=0.01)
    stop = threading.Event()
    stop.set()
    with pytest.raises(Cancelled, match="total 100"):
        budget.wait_until(lambda: budget.finished, cancel_event=stop)
