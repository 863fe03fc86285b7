"""A process that holds the lock is stopped: every call ends by its deadline, and says who it was."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from waits import Call, until

from millpond import Flow, ReplayBuffer
from millpond.core.errors import Cancelled, DeadlineExceeded
from millpond.replay import ConsumingSampler, RandomSampler
from millpond.shm import locks

CONTEXT = multiprocessing.get_context("spawn")
LONG = 8.0  # seconds: nothing may take so long


def numbers(n: int) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(n)}


def hold(handle: Any, ready: Any) -> None:
    """Take the lock, say so, and stop."""
    rb = ReplayBuffer.attach(handle)
    rb._local.engine.load()
    ready.set()
    os.kill(os.getpid(), signal.SIGSTOP)
    rb._local.engine.control.mutex.unlock()


@pytest.fixture(params=["robust plain", "robust ahead", "fallback queue"])
def rb(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReplayBuffer]:
    lock, sampling = request.param.split()
    monkeypatch.setenv(locks.VARIABLE, lock)
    sampler = ConsumingSampler(1) if sampling == "queue" else RandomSampler()
    prefetch = 2 if sampling == "ahead" else 0
    with ReplayBuffer(100, sampler=sampler, prefetch=prefetch, batch_size=4, shared=True, seed=0) as rb:
        rb.extend(numbers(60))
        rb.sample()
        yield rb


@pytest.fixture
def stopped(rb: ReplayBuffer) -> Iterator[int]:
    """The process that holds the lock, stopped."""
    ready = CONTEXT.Event()
    child = CONTEXT.Process(target=hold, args=(rb.handle(), ready))
    child.start()
    assert ready.wait(60)
    until(lambda: " T" in stat(child.pid))
    yield child.pid
    os.kill(child.pid, signal.SIGCONT)
    child.join()


def stat(pid: int | None) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read()[:60]


def ends(call: Callable[[], Any], pid: int, *errors: type[Exception]) -> None:
    began = time.monotonic()
    with pytest.raises(errors, match=rf"lock is held by thread {pid} of process {pid}, which is stopped"):
        call()
    assert time.monotonic() - began < LONG


def test_with_a_stopped_holder_looks_answer_and_waits_end_by_their_deadline(rb: ReplayBuffer, stopped: int) -> None:
    looks_do_not_wait_and_tell_who_holds_the_lock(rb, stopped)
    waits_end_by_their_deadline_and_name_the_holder(rb, stopped)


def looks_do_not_wait_and_tell_who_holds_the_lock(rb: ReplayBuffer, stopped: int) -> None:
    began = time.monotonic()
    named = f"thread {stopped} of process {stopped}, which is stopped"
    for op in ("sample", "extend"):
        assert f"{op}(2) cannot proceed: the lock is held by {named}" in rb.explain(op, 2)
    assert rb.stats()["write_count"] == 60
    assert (len(rb), rb.write_count) == (100 - 40 - (4 if isinstance(rb.sampler, ConsumingSampler) else 0), 60)
    attached = ReplayBuffer.attach(rb.handle())
    ends(lambda: attached.sample(5, wait=True, timeout=0), stopped, DeadlineExceeded)
    assert time.monotonic() - began < LONG
    attached.close()


def waits_end_by_their_deadline_and_name_the_holder(rb: ReplayBuffer, stopped: int) -> None:
    for timeout in (0, 0.3):
        ends(lambda: rb.extend(numbers(3), timeout=timeout), stopped, DeadlineExceeded)  # noqa: B023
        ends(lambda: rb.add({"x": torch.tensor(1)}, timeout=timeout), stopped, DeadlineExceeded)  # noqa: B023
        ends(lambda: rb.sample(5, wait=True, timeout=timeout), stopped, DeadlineExceeded)  # noqa: B023
        ends(lambda: rb.sample(wait=True, timeout=timeout), stopped, DeadlineExceeded)  # noqa: B023
        assert not rb.wait_until_sampleable(5, timeout=timeout)
        assert not rb.wait_until_writable(5, timeout=timeout)
    for call in (
        lambda stop: rb.extend(numbers(3), cancel_event=stop),
        lambda stop: rb.sample(5, wait=True, cancel_event=stop),
        lambda stop: rb.wait_until_sampleable(5, cancel_event=stop),
        lambda stop: rb.wait_until_writable(5, cancel_event=stop),
    ):
        stop = threading.Event()
        waiting = Call(lambda: call(stop))  # noqa: B023
        threading.Timer(0.2, stop.set).start()
        with pytest.raises(Cancelled):
            waiting.result(LONG)
    again = Call(lambda: rb.extend(numbers(3)))  # without a limit: as soon as it may
    os.kill(stopped, signal.SIGCONT)
    assert len(again.result()) == 3
    assert rb.write_count == 63
    assert rb.explain("sample", 2) == "sample(2) can proceed"


# ---------------------------------------------------------------------- promises that nobody has to look for
def draw_ahead(handle: Any, ready: Any) -> None:
    rb = ReplayBuffer.attach(handle)
    rb.sample(wait=True)
    ready.set()
    signal.pause()


def want(handle: Any) -> None:
    ReplayBuffer.attach(handle).extend(numbers(6))


SURVIVORS: dict[str, Callable[[ReplayBuffer], Any]] = {
    "sample": lambda rb: rb.sample(10, wait=True),
    "tries": lambda rb: until(lambda: attempt(rb)),
}


def attempt(rb: ReplayBuffer) -> bool:
    try:
        rb.sample(10)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("survivor", SURVIVORS)
def test_what_a_killed_process_had_reserved_comes_back_to_those_who_only_wait(survivor: str) -> None:
    flow = Flow(samples_per_insert=1)
    with ReplayBuffer(100, flow=flow, prefetch=3, batch_size=10, shared=True, seed=0) as rb:
        rb.extend(numbers(40))
        ready = CONTEXT.Event()
        child = CONTEXT.Process(target=draw_ahead, args=(rb.handle(), ready))
        child.start()
        assert ready.wait(60)
        waiting = Call(lambda: SURVIVORS[survivor](rb))
        child.kill()
        child.join()
        waiting.result(LONG)


def test_the_pressure_that_a_killed_producer_began_ends_for_those_who_only_wait() -> None:
    flow = Flow(admission="block", high_watermark=8, low_watermark=2)
    with ReplayBuffer(10, flow=flow, consume_after_n_samples=1, shared=True) as rb:
        rb.extend(numbers(6))
        child = CONTEXT.Process(target=want, args=(rb.handle(),))
        child.start()
        until(lambda: rb.stats()["under_pressure"], 60)
        waiting = Call(lambda: rb.extend(numbers(1)))
        until(lambda: rb.stats()["waiting_producers"] == 2)
        child.kill()
        child.join()
        waiting.result(LONG)
