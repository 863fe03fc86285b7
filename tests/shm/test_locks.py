from __future__ import annotations

import ctypes
import dis
import errno
import gc
import mmap
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from counting import count_up
from shm_children import Child, Starter, counters

from millpond.core.errors import DeadlineExceeded, InvalidArgument, NotShareable
from millpond.shm import fallback, futex
from millpond.shm.fallback import FileMutex
from millpond.shm.futex import EventCount, RobustMutex
from millpond.shm.locks import Event, Mutex, make_event, make_lock, preferred
from millpond.shm.mapped import allocate, anonymous

SIZE = 8192
COMMIT_AT = 1536


class Shared:
    """One lock and two events in one mapped file."""

    def __init__(self, directory: Path, kind: str) -> None:
        self.path, self.lock_path = directory / "memory", directory / "lock"
        self.memory = allocate(self.path, SIZE)
        self.mutex, self.kind = make_lock(self.memory, 0, create=True, path=self.lock_path)
        assert self.kind == kind
        self.first, self.second = (make_event(self.memory, at, create=True) for at in (128, 192))
        self.words = counters(self.memory)
        self.commit = memoryview(self.memory)[COMMIT_AT : COMMIT_AT + 4].cast("I")
        self.commit_at = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(self.memory, COMMIT_AT)))

    def attach(self) -> Mutex:
        return make_lock(self.memory, 0, create=False, path=self.lock_path)[0]

    def publish(self, event: Event) -> None:
        event.publish(self.commit, self.commit_at)


@pytest.fixture
def shared(directory: Path, kind: str) -> Iterator[Shared]:
    made = Shared(directory, kind)
    yield made
    vars(made).clear()  # pytest keeps the object for a while; the mapping must go


def hold(mutex: Mutex) -> Callable[[Child], None]:
    """A child that takes the lock, says so, and holds it until it is told to go on."""

    def run(child: Child) -> None:
        child.say(str(mutex.lock()))
        child.ask()
        mutex.unlock()

    return run


# ------------------------------------------------------------------------------------------------------- exclusion


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_processes_exclude_each_other_however_they_were_started(shared: Shared, method: str) -> None:
    """Case proc-9."""
    context: Any = multiprocessing.get_context(method)
    args = (shared.path, shared.lock_path, 3000)
    worker = context.Process(target=count_up, args=args)
    worker.start()
    while worker.is_alive():  # so that both count at the same time, however long the other takes to start
        count_up(shared.path, shared.lock_path, 10)
        shared.words[1] += 10
        worker.join(0.001)
    worker.join(60)
    assert worker.exitcode == 0
    worker.close()
    assert shared.words[0] == 3000 + shared.words[1]


def test_threads_exclude_each_other(shared: Shared) -> None:
    threads = [threading.Thread(target=count_up, args=(shared.path, shared.lock_path, 300)) for _ in range(2)]
    mutex = shared.mutex

    def same_object() -> None:
        for _ in range(300):
            try:
                mutex.lock()
                shared.words[0] += 1
            finally:
                mutex.unlock()

    threads += [threading.Thread(target=same_object) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert shared.words[0] == 1200


def test_a_lock_that_stays_taken_raises_in_time_and_is_not_held(shared: Shared, start: Starter) -> None:
    child = start(hold(shared.mutex))
    assert child.heard() == "False"
    with pytest.raises(DeadlineExceeded, match=f"held by thread {child.pid} of process {child.pid} for 0.05"):
        shared.mutex.lock(0.05)
    with pytest.raises(DeadlineExceeded):
        shared.mutex.lock(0)
    assert not shared.mutex.held()
    assert shared.mutex.holder == child.pid
    child.tell()
    assert shared.mutex.lock(10) is False
    assert shared.mutex.held()
    shared.mutex.unlock()


def test_taking_it_twice_is_an_error_that_leaves_it_held(shared: Shared) -> None:
    shared.mutex.lock()
    with pytest.raises(RecursionError):
        shared.mutex.lock()
    assert shared.mutex.held()
    assert shared.mutex.unlock() == 0
    assert not shared.mutex.held()


def test_unlocking_what_another_holds_does_nothing(shared: Shared, start: Starter) -> None:
    assert shared.mutex.unlock() == errno.EPERM
    child = start(hold(shared.mutex))
    child.heard()
    assert shared.mutex.unlock() == errno.EPERM
    assert shared.mutex.holder == child.pid


def test_a_forked_child_does_not_own_what_its_parent_holds(shared: Shared, start: Starter) -> None:
    shared.mutex.lock()

    def run(child: Child) -> None:
        assert not shared.mutex.held()
        assert shared.mutex.unlock() == errno.EPERM
        with pytest.raises(DeadlineExceeded):
            shared.mutex.lock(0.05)
        child.say("taken")
        child.say(str(shared.mutex.lock(10)))
        shared.mutex.unlock()

    child = start(run)
    assert child.heard() == "taken"
    assert shared.mutex.held()
    shared.mutex.unlock()
    assert child.heard() == "False"
    assert child.join() == 0
    assert shared.mutex.lock(1) is False
    shared.mutex.unlock()


def test_a_child_that_lives_on_does_not_keep_the_lock_of_a_killed_parent(shared: Shared, start: Starter) -> None:
    """An flock belongs to the open file, which a forked child shares with its parent unless it opens its own."""

    def run(child: Child) -> None:
        shared.mutex.lock()
        grandchild = os.fork()
        if grandchild == 0:
            os.write(child._to_child, f"{os.getpid()}\n".encode())
            signal.pause()
        signal.pause()

    child = start(run)
    grandchild = int(child.heard() or 0)
    child.kill()
    try:
        assert shared.mutex.lock(5) is True
        shared.mutex.unlock()
    finally:
        os.kill(grandchild, signal.SIGKILL)
        child.join()
        os.waitpid(grandchild, 0) if _is_my_child(grandchild) else None


def _is_my_child(pid: int) -> bool:
    """Where the test process adopts orphans it must also reap them."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def test_a_forked_childs_copy_of_private_memory_can_be_locked(kind: str, start: Starter) -> None:
    """Another thread of the parent holds the lock at the fork: in the child that thread does not exist."""
    memory = anonymous(SIZE)
    mutex, _ = make_lock(memory, 0, create=True)
    held, done = threading.Event(), threading.Event()

    def run() -> None:
        mutex.lock()
        held.set()
        done.wait(30)
        mutex.unlock()

    thread = threading.Thread(target=run)
    thread.start()
    held.wait(30)
    try:

        def in_child(child: Child) -> None:
            child.say(str(mutex.lock(5)))
            mutex.unlock()
            child.say(str(mutex.lock(5)))

        child = start(in_child)
        assert [child.heard(), child.heard()] == ["True", "False"]
        assert child.join() == 0
        with pytest.raises(DeadlineExceeded):  # the parent's is another lock
            mutex.lock(0.01)
    finally:
        done.set()
        thread.join(30)


# ---------------------------------------------------------------------------------------------------------- deaths


def test_after_a_killed_holder_the_next_is_told_once_and_soon(shared: Shared, start: Starter) -> None:
    """Case proc-1, for the lock alone."""
    child = start(hold(shared.mutex))
    child.heard()
    child.kill()  # a zombie now, not reaped
    began = time.monotonic()
    assert shared.mutex.lock(5) is True
    assert time.monotonic() - began < 1
    shared.mutex.unlock()
    assert shared.mutex.lock(5) is False
    shared.mutex.unlock()


def test_who_already_waits_for_a_killed_holder_gets_the_lock_soon(shared: Shared, start: Starter) -> None:
    holder = start(hold(shared.mutex))
    holder.heard()

    def run(child: Child) -> None:
        child.say("waits")
        child.say(str(shared.mutex.lock(10)))
        shared.mutex.unlock()

    waiters = [start(run), start(run)]
    for waiter in waiters:
        assert waiter.heard() == "waits"
    began = time.monotonic()
    holder.kill()
    assert sorted(str(waiter.heard()) for waiter in waiters) == ["False", "True"]
    assert time.monotonic() - began < 1


def test_a_killed_waiter_for_the_lock_hurts_nobody(shared: Shared, start: Starter) -> None:
    holder = start(hold(shared.mutex))
    holder.heard()

    def run(child: Child) -> None:
        child.say("waits")
        shared.mutex.lock()

    waiter = start(run)
    waiter.heard()
    waiter.kill()
    holder.tell()
    assert holder.join() == 0
    assert shared.mutex.lock(1) is False
    shared.mutex.unlock()


def test_after_a_death_a_sticky_lock_says_so_until_it_is_forgiven(shared: Shared, start: Starter) -> None:
    """An exception between the news and the repair must not lose the news."""
    shared.mutex.sticky = True
    child = start(hold(shared.mutex))
    child.heard()
    child.kill()
    for _ in range(3):
        assert shared.mutex.lock(5) is True
        shared.mutex.unlock()
    other = shared.attach()
    other.sticky = True
    assert other.lock(5) is True
    other.forgive()
    other.unlock()
    assert shared.mutex.lock(5) is False
    shared.mutex.unlock()


def test_a_thread_that_ended_while_it_held_the_lock_counts_as_dead(robust: None, directory: Path) -> None:
    mutex = RobustMutex(allocate(directory / "memory", SIZE), create=True)
    thread = threading.Thread(target=mutex.lock)
    thread.start()
    thread.join()
    assert mutex.lock(5) is True
    mutex.unlock()


def test_a_signal_handler_that_raises_never_leaves_the_lock_taken(
    robust: None, directory: Path, start: Starter
) -> None:
    """Ctrl-C at any instant. With ``with mutex`` it would stay taken now and then: nothing here uses that."""
    mutex = RobustMutex(allocate(directory / "memory", SIZE), create=True)

    class Interrupt(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupt

    def run(child: Child) -> None:  # in a process of its own, whose timer nobody else uses
        gc.disable()  # a callback of the collector would swallow the exception
        rng, interrupted, end = random.Random(0), 0, time.monotonic() + 1
        signal.signal(signal.SIGALRM, interrupt)
        while time.monotonic() < end:
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 60e-6), 1)
                while True:
                    try:
                        mutex.lock()
                    finally:
                        mutex.unlock()
            except Interrupt:
                interrupted += 1
            assert not mutex.held()
        signal.setitimer(signal.ITIMER_REAL, 0)
        child.say(str(interrupted))

    child = start(run)
    assert int(child.heard() or 0) > 100
    assert child.join() == 0


def test_interrupted_anywhere_lock_is_not_held_and_passes_the_news_on(shared: Shared, start: Starter) -> None:
    """Ctrl-C may come after any call, also between taking the lock of a dead holder and saying so."""

    class Interrupt(Exception):
        pass

    def interrupt_after(instructions: int) -> Any:
        left, previous = instructions, ""

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal left, previous
            if not frame.f_code.co_filename.endswith((futex.__file__, fallback.__file__)):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            if event == "opcode":
                name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
                # the only places where the interpreter runs handlers; never between a value and its return
                if previous.startswith(("CALL", "RESUME", "JUMP_BACKWARD")) and name != "RETURN_VALUE":
                    left -= 1
                    if left == -1:
                        raise Interrupt
                previous = name
            return trace

        return trace

    shared.mutex.sticky = True
    tracer, died, instructions = sys.gettrace(), None, 0
    while died is None:
        holder = start(hold(shared.mutex))
        assert holder.heard() == "False"
        holder.kill()
        try:
            sys.settrace(interrupt_after(instructions))
            died = shared.mutex.lock(5)
        except Interrupt:
            sys.settrace(tracer)
            assert not shared.mutex.held()
            assert shared.mutex.lock(5) is True
        finally:
            sys.settrace(tracer)
        shared.mutex.forgive()
        shared.mutex.unlock()
        holder.end()
        instructions += 1
    assert died is True
    assert instructions > 4


# ---------------------------------------------------------------------------------------------------------- events


def test_ping_pong_loses_nothing(shared: Shared, start: Starter, long_slices: None, kind: str) -> None:
    rounds = 3000 if kind == "robust" else 200
    turn = shared.words

    def play(me: int, mine: Event, other: Event) -> None:
        for _ in range(rounds):
            try:
                shared.mutex.lock()
                while turn[0] != me:
                    ticket = mine.prepare()
                    shared.mutex.unlock()
                    assert mine.wait(ticket, 20), "a wake-up was lost"
                    shared.mutex.lock()
                turn[0] = 1 - me
                shared.publish(other)
            finally:
                shared.mutex.unlock()

    child = start(lambda _: play(1, shared.second, shared.first))
    play(0, shared.first, shared.second)
    assert child.join() == 0
    assert shared.commit[0] == 2 * rounds


def test_a_wait_ends_in_time_and_says_that_nothing_came(shared: Shared) -> None:
    ticket = shared.first.prepare()
    assert shared.first.wait(ticket, 0) is False
    assert shared.first.wait(ticket, 0.01) is False
    shared.publish(shared.second)
    assert shared.first.wait(ticket, 0) is False
    shared.publish(shared.first)
    assert shared.first.wait(ticket) is True


def test_every_way_to_wake_wakes_everybody(shared: Shared, start: Starter, long_slices: None) -> None:
    def run(child: Child) -> None:
        for _ in range(3):
            ticket = shared.first.prepare()
            child.say("waits")
            assert shared.first.wait(ticket, 20)
            child.say("woken")
            child.ask()

    waiters = [start(run), start(run)]
    ways = (lambda: shared.publish(shared.first), shared.first.signal, shared.first.notify_all)
    for wake in ways:
        assert [w.heard() for w in waiters] == ["waits"] * 2
        wake()
        assert [w.heard() for w in waiters] == ["woken"] * 2
        for waiter in waiters:
            waiter.tell()
    assert [w.join() for w in waiters] == [0, 0]
    assert shared.commit[0] == 1


def test_a_killed_waiter_costs_nothing_but_a_call(shared: Shared, start: Starter, long_slices: None) -> None:
    def run(child: Child) -> None:
        ticket = shared.first.prepare()
        child.say("waits")
        shared.first.wait(ticket)

    dead, living = start(run), start(run)
    dead.heard()
    living.heard()
    dead.kill()
    shared.publish(shared.first)
    assert living.join() == 0
    shared.publish(shared.first)
    assert shared.commit[0] == 2


def test_without_a_waiter_waking_is_no_system_call(
    robust: None, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = allocate(directory / "memory", SIZE)
    event, commit = EventCount(memory, 0, create=True), memoryview(memory)[1024:1028].cast("I")
    at, calls = ctypes.c_void_p(event.address + 1024), list[object]()
    real = EventCount._wake_op
    monkeypatch.setattr(EventCount, "_wake_op", lambda self, where: (calls.append(where), real(self, where)))
    for wake in (event.signal, lambda: event.publish(commit, at)):
        calls.clear()
        wake()
        assert len(calls) == 0
        event.prepare()
        for _ in range(3):  # the first call pays for a waiter that may be dead, the others do not
            wake()
        assert len(calls) == 1


def test_a_forked_child_draws_other_numbers(start: Starter) -> None:
    """Else both would write the same "random" sequence word."""
    child = start(lambda child: child.say(str(fallback._numbers.getrandbits(64))))
    assert child.heard() != str(fallback._numbers.getrandbits(64))


def test_commit_words_and_sequences_wrap(robust: None, directory: Path) -> None:
    """Case rem-6, for the 32-bit words."""
    memory = allocate(directory / "memory", SIZE)
    event = EventCount(memory, 0, create=True)
    view = memoryview(memory)
    commit, words = view[1024:1028].cast("I"), view[:64].cast("I")
    at = ctypes.c_void_p(event.address + 1024)
    for awaited in (False, True):
        commit[0] = words[EventCount.SEQUENCE] = 0xFFFFFFFF
        ticket = event.prepare() if awaited else 0xFFFFFFFF
        event.publish(commit, at)
        assert (commit[0], words[EventCount.SEQUENCE], words[EventCount.AWAITED]) == (0, 0, 0)
        assert event.wait(ticket, 0)


# ------------------------------------------------------------------------------------------------- identity, choice


@pytest.mark.parametrize(("word", "value"), [(0, 0), (0, 0x12345678), (1, 2), (2, 99)])
def test_other_bytes_are_refused(shared: Shared, word: int, value: int) -> None:
    """Wrong magic, version, and ABI: a mutex of another machine, boot or container is not touched."""
    words = memoryview(shared.memory)[:256].cast("I")
    for offset, attach in ((0, shared.attach), (32, lambda: make_event(shared.memory, 128, create=False))):
        before, words[offset + word] = words[offset + word], value
        with pytest.raises(NotShareable, match="magic, version, ABI"):
            attach()
        words[offset + word] = before
        attach()


def test_memory_that_is_too_small_or_not_aligned_is_refused(kind: str) -> None:
    memory = anonymous(4096)
    with pytest.raises(NotShareable, match="too small"):
        make_lock(memory, 4032, create=True)
    with pytest.raises(NotShareable, match="too small"):
        make_lock(memory, 8192, create=False)
    with pytest.raises(InvalidArgument, match="not 64-byte aligned"):
        make_lock(memory, 8, create=True)


def test_an_existing_lock_decides_its_kind(shared: Shared, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("MILLPOND_LOCK", "robust" if kind == "fallback" else "fallback")
    assert isinstance(shared.attach(), RobustMutex if kind == "robust" else FileMutex)
    assert type(make_event(shared.memory, 128, create=False)) is type(shared.first)


def test_the_variable_accepts_two_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPOND_LOCK", "fast")
    with pytest.raises(InvalidArgument, match="MILLPOND_LOCK='fast'"):
        preferred()
    monkeypatch.delenv("MILLPOND_LOCK")
    assert preferred() == ("robust" if futex.supported() else "fallback")


def test_a_fallback_lock_in_shared_memory_needs_a_file(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    monkeypatch.setenv("MILLPOND_LOCK", "fallback")
    memory = allocate(directory / "memory", SIZE)
    with pytest.raises(InvalidArgument, match="path of a lock file"):
        make_lock(memory, 0, create=True)
    with pytest.raises(NotShareable, match="cannot open the lock file"):
        FileMutex(memory, 0, create=True, path=directory / "missing" / "lock")


def test_a_fallback_lock_works_in_a_child_when_its_file_has_lost_its_name(
    monkeypatch: pytest.MonkeyPatch, directory: Path, start: Starter
) -> None:
    monkeypatch.setenv("MILLPOND_LOCK", "fallback")
    shared = Shared(directory, "fallback")
    shared.lock_path.unlink()
    child = start(hold(shared.mutex))
    assert child.heard() == "False"
    with pytest.raises(DeadlineExceeded):
        shared.mutex.lock(0.02)
    child.tell()
    assert shared.mutex.lock(10) is False
    shared.mutex.unlock()


@pytest.mark.parametrize(
    "pretence",
    [
        "platform.machine = lambda: 'sparc64'",
        "os.confstr = lambda name: None",  # musl
        "sys.maxsize = 2**31 - 1",
    ],
)
def test_elsewhere_the_module_imports_and_the_fallback_is_chosen(pretence: str) -> None:
    code = f"""
import ctypes, os, platform, sys
import slim  # torch would not believe the pretence
maxsize = sys.maxsize
{pretence}
from millpond.shm import futex, locks
from millpond.core.errors import NotShareable
assert not futex.supported()
sys.maxsize = maxsize
import mmap
try:
    futex.RobustMutex(mmap.mmap(-1, 4096), 0, create=True)
except NotShareable as problem:
    assert "64-bit Linux" in str(problem)
else:
    raise SystemExit("made a robust mutex")
from millpond.shm.mapped import anonymous
mutex, kind = locks.make_lock(anonymous(4096), 0, create=True)
assert kind == "fallback" and mutex.lock() is False and mutex.unlock() == 0
"""
    environment = {k: v for k, v in os.environ.items() if k != "MILLPOND_LOCK"} | {
        "PYTHONPATH": os.pathsep.join(sys.path)
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_polled_events_change_even_where_two_notify_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a lock two could both write "the next" value; a ticket taken in between would miss the second."""
    event = fallback.PolledEvent(mmap.mmap(-1, 4096), 0, create=True)
    values = iter([0, 0, 7, 7, 9])
    monkeypatch.setattr(fallback._numbers, "getrandbits", lambda _: next(values))
    seen = []
    for _ in range(2):
        ticket = event.prepare()
        event.notify_all()
        assert event.wait(ticket, 0)
        seen.append(event.prepare())
    assert seen == [7, 9]
