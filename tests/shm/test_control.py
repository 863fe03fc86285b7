from __future__ import annotations

import contextlib
import gc
import mmap
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from shm_children import Child, Starter, die, until

from millpond.core.errors import InvalidArgument, NotShareable
from millpond.shm import identity
from millpond.shm.control import ControlBlock, Intent
from millpond.shm.mapped import allocate, anonymous, map_file
from millpond.shm.participants import LINES, Line

WORDS, EVENTS = 10, 3
SIZE = ControlBlock.size_needed(WORDS, EVENTS)


class Shared:
    """A control block in a file, and what its ``recover`` was called with."""

    def __init__(self, directory: Path) -> None:
        self.path, self.lock_path = directory / "control", directory / "lock"
        self.memory = allocate(self.path, SIZE)
        self.recovered: list[tuple[Intent | None, bool]] = []
        self.block = ControlBlock(
            self.memory, words=WORDS, events=EVENTS, create=True, lock_path=self.lock_path, recover=self.recover
        )

    def recover(self, state: list[int], intent: Intent | None, owner_died: bool) -> None:
        self.recovered.append((intent, owner_died))
        state[9] += 1

    def attach(self, *, words: int = WORDS, events: int = EVENTS) -> ControlBlock:
        return ControlBlock(
            map_file(self.path, SIZE), words=words, events=events, create=False, lock_path=self.lock_path
        )

    def change(self, value: int) -> None:
        """All of words 0 to 7 become ``value``, through an intent, waking the first two events."""
        block = self.block
        try:
            state = block.load(block.mutex.lock(10))
            block.begin(state, count=7, start=value)
            state[:8] = [value] * 8
            block.settle(state)
            block.commit(state, block.events[0], block.events[1])
        finally:
            block.mutex.unlock()

    def look(self) -> list[int]:
        """The state as the next holder finds it, mended."""
        try:
            return self.block.load(self.block.mutex.lock(1))
        finally:
            self.block.mutex.unlock()


@pytest.fixture
def shared(directory: Path, kind: str) -> Iterator[Shared]:
    made = Shared(directory)
    assert made.block.kind == kind
    yield made
    vars(made).clear()


def dying_at(shared: Shared, step: str) -> object:
    def run(child: Child) -> None:
        shared.block.hook = lambda at: die() if at == step else None
        shared.change(1)

    return run


# ----------------------------------------------------------------------------------------------------- one process


def test_what_one_commits_all_see(shared: Shared) -> None:
    other = shared.attach()
    assert other.peek()[:WORDS] == [0] * WORDS
    shared.change(5)
    assert other.peek() == shared.block.peek() == [5] * 8 + [0, 0] + [1, 0, 0]
    try:
        state = other.load(other.mutex.lock())
        assert state == shared.block.peek()
        state[0] = 2**64 - 1
        other.commit(state)
        other.amend(1, 77)
    finally:
        other.mutex.unlock()
    assert shared.block.peek()[:3] == [2**64 - 1, 77, 5]


def test_what_is_not_committed_never_was(shared: Shared) -> None:
    shared.change(5)
    block = shared.block
    try:
        state = block.load(block.mutex.lock())
        state[0] = 6
    finally:
        block.mutex.unlock()
    assert shared.look()[0] == 5


@pytest.mark.parametrize("shape", [{"words": 11}, {"words": 9}, {"events": 2}])
def test_a_block_of_another_shape_is_refused(shared: Shared, shape: dict[str, int]) -> None:
    with pytest.raises(NotShareable, match="words, events"):
        shared.attach(**shape)


@pytest.mark.parametrize("word", range(5))
def test_other_bytes_are_refused(shared: Shared, word: int) -> None:
    memoryview(shared.memory)[:64].cast("Q")[word] ^= 1
    with pytest.raises(NotShareable):
        shared.attach()


def test_shapes_that_cannot_be_are_refused(kind: str) -> None:
    for words, events in ((0, 1), (1, 0), (1, 17), (5000, 1)):
        with pytest.raises(InvalidArgument, match=f"{words} words and {events} events"):
            ControlBlock(anonymous(1 << 20), words=words, events=events, create=True)


def test_memory_that_is_too_small_is_refused(kind: str) -> None:
    for create in (True, False):
        with pytest.raises(NotShareable, match=f"{SIZE} bytes needed, the memory has 8192"):
            ControlBlock(anonymous(8192), words=WORDS, events=EVENTS, create=create)


def test_the_memory_can_be_unmapped_after_close(shared: Shared) -> None:
    block = shared.attach()
    memory = block._view.obj
    with pytest.raises(BufferError):
        memory.close()
    block.close()
    gc.collect()
    memory.close()
    assert memory.closed
    block.close()


# --------------------------------------------------------------------------------------------------- deaths


@pytest.mark.parametrize("step", ["intent", "record written", "signalled"])
def test_killed_before_the_commit_nothing_happened(shared: Shared, start: Starter, step: str) -> None:
    child = start(dying_at(shared, step))
    assert child.join() == -9
    began = time.monotonic()
    assert shared.block.peek()[:8] == [0] * 8
    state = shared.look()
    assert time.monotonic() - began < 1
    assert state == [0] * 8 + [0, 1] + [1, 1, 1]  # settled, discarded, recoveries
    assert shared.recovered == [(Intent(child.pid, 7, 1), True)]
    assert shared.look() == state  # told once
    assert len(shared.recovered) == 1


def test_killed_after_the_commit_all_of_it_happened(shared: Shared, start: Starter) -> None:
    child = start(dying_at(shared, "committed"))
    assert child.join() == -9
    assert shared.block.peek()[:8] == [1] * 8
    assert shared.look() == [1] * 8 + [0, 1] + [1, 0, 1]
    assert shared.recovered == [(None, True)]


def test_killed_without_an_intent_it_is_a_death_but_nothing_was_discarded(shared: Shared, start: Starter) -> None:
    child = start(lambda _: (shared.block.load(shared.block.mutex.lock()), die()))
    child.join()
    assert shared.look()[WORDS:] == [0, 0, 1]
    assert shared.recovered == [(None, True)]


@pytest.mark.parametrize("step", ["recover", "record written", "signalled"])
def test_a_killed_recoverer_leaves_the_work_to_the_next(shared: Shared, start: Starter, step: str) -> None:
    first = start(dying_at(shared, "intent"))
    first.join()
    for _ in range(2):
        start(dying_at(shared, step)).join()
    assert shared.look() == [0] * 8 + [0, 1] + [1, 1, 1]
    assert shared.recovered == [(Intent(first.pid, 7, 1), True)]


def test_an_exception_after_begin_is_found_by_the_next(shared: Shared) -> None:
    """Case rem-7: a write that fails half-way moves no counter."""

    class Problem(Exception):
        pass

    def fail(step: str) -> None:
        if step == "record written":
            raise Problem

    shared.block.hook = fail
    with pytest.raises(Problem):
        shared.change(1)
    shared.block.hook = None
    assert shared.look() == [0] * 8 + [0, 1] + [1, 1, 0]
    assert shared.recovered == [(Intent(os.getpid(), 7, 1), False)]


def test_an_exception_while_mending_leaves_the_work_to_the_next(shared: Shared, start: Starter) -> None:
    """Ctrl-C in ``recover`` must not lose the news of a death."""
    start(lambda _: (shared.block.mutex.lock(), die())).join()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    shared.block.recover = interrupt
    with pytest.raises(KeyboardInterrupt):
        shared.look()
    shared.block.recover = shared.recover
    assert shared.look()[WORDS:] == [0, 0, 1]
    assert shared.recovered == [(None, True)]


def test_a_reader_without_the_lock_never_sees_half_a_change(shared: Shared, start: Starter) -> None:
    def run(child: Child) -> None:
        value = 0
        while True:
            value += 1
            shared.change(value)

    writer, last, seen = start(run), 0, set()
    end = time.monotonic() + 20
    while len(seen) < 50 and time.monotonic() < end:
        state = shared.block.peek()
        assert state[:8] == [state[0]] * 8
        assert state[0] >= last
        last = state[0]
        seen.add(last)
    assert len(seen) == 50
    writer.kill()


# ---------------------------------------------------------------------------------------------------- the GIL


def test_nothing_under_the_lock_lets_go_of_the_gil(robust: None, directory: Path) -> None:
    """Getting it back would cost a switch interval for each busy thread, while everybody waits for the lock."""
    shared = Shared(directory)
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
        line = shared.block.participant()
        before = count[0]
        for value in range(1, 20):
            for event in shared.block.events:
                event.prepare()  # so that there is somebody to wake
            shared.change(value)
            shared.block.waiting()
            assert shared.block.participant() == line
        assert count[0] == before
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
        vars(shared).clear()


# ---------------------------------------------------------------------------------------------------- participants


def enrolled(shared: Shared, role: int, need: int) -> int:
    block = shared.block
    try:
        block.load(block.mutex.lock())
        line = block.participant()
        assert line is not None
        block.participants.begin_wait(line, role, need)
    finally:
        block.mutex.unlock()
    return line


def test_who_waits_is_listed_with_role_and_need_until_it_stops(shared: Shared) -> None:
    before = time.monotonic_ns()
    line = enrolled(shared, 2, 50)
    (waiter,) = shared.block.waiting()
    assert waiter[:4] == (os.getpid(), threading.get_native_id(), 2, 50)
    assert before <= waiter.since_ns <= time.monotonic_ns()
    assert shared.block.waiting(2) == [waiter]
    assert shared.block.waiting(1) == []
    assert enrolled(shared, 1, 3) == line  # one line for each thread
    assert [w[2:4] for w in shared.block.waiting()] == [(1, 3)]
    shared.block.participants.end_wait(line)
    assert shared.block.waiting() == []


def test_a_killed_waiter_is_buried_with_what_it_had_reserved(shared: Shared, start: Starter) -> None:
    """Case flow-11."""
    mine = enrolled(shared, 1, 1)

    def run(child: Child) -> None:
        line = enrolled(shared, 2, 9)
        shared.block.participants.reserve(line, 40, 2)
        child.say(str(line))
        child.ask()

    child = start(run)
    line = int(child.heard() or -1)
    assert shared.block.bury_dead() == []
    assert shared.block.participants.all_reserved() == (40, 2)
    child.kill()  # not reaped: a zombie is dead

    def forget(state: list[int], lines: list[Line]) -> None:
        state[0] = sum(dead.reserved[0] for dead in lines)
        state[1] = sum(dead.reserved[1] for dead in lines)

    (dead,) = shared.block.bury_dead(forget)
    assert (dead.number, dead.pid, dead.role, dead.reserved) == (line, child.pid, 2, (40, 2))
    assert shared.block.peek()[:2] == [40, 2]
    assert [w.pid for w in shared.block.waiting()] == [os.getpid()]
    assert shared.block.bury_dead(forget) == []
    assert shared.block.participants.all_reserved() == (0, 0)
    shared.look()
    assert shared.recovered == []  # nothing is left to mend
    shared.block.participants.end_wait(mine)


def test_a_finished_thread_is_buried_and_its_line_used_again(shared: Shared) -> None:
    lines: list[int] = []
    thread = threading.Thread(target=lambda: lines.append(enrolled(shared, 1, 1)))
    thread.start()
    thread.join()  # returns a moment before the system's thread ends
    until(lambda: len(shared.block.participants.dead()) == 1)
    assert [line.number for line in shared.block.bury_dead()] == lines
    assert enrolled(shared, 1, 1) == lines[0]


def test_whoever_comes_later_to_a_burial_buries_nobody_alive(shared: Shared, start: Starter) -> None:
    """The line was found dead without the lock; before the burial another buried it and a third claimed it."""

    def run(child: Child) -> None:
        child.say(str(enrolled(shared, 2, 9)))
        child.ask()

    children = [start(run), start(run)]
    lines = [int(child.heard() or -1) for child in children]
    for child in children:
        child.kill()
    stale = shared.block.participants.dead()
    assert sorted(line.number for line in stale) == sorted(lines)
    first = min(stale, key=lambda line: line.number)
    shared.block.participants.bury(first)
    assert enrolled(shared, 1, 1) == first.number
    shared.block.participants.dead = lambda among=None: stale  # type: ignore[method-assign]
    assert [line.pid for line in shared.block.bury_dead()] == [line.pid for line in stale if line != first]
    assert [w.pid for w in shared.block.waiting()] == [os.getpid()]
    assert shared.block.bury_dead() == []


def test_a_line_of_another_process_is_not_taken_for_ones_own(shared: Shared) -> None:
    """A forked child remembers the lines of its parent's threads, and may be given the id of one that has ended."""
    mine = enrolled(shared, 1, 1)
    shared.block.participants._table[8 * mine] += 1
    assert enrolled(shared, 1, 1) != mine


def test_a_full_table_gives_no_line_until_the_dead_are_buried(shared: Shared) -> None:
    table = shared.block.participants._table
    for line in range(LINES):
        table[8 * line : 8 * line + 3] = memoryview(b"".join(x.to_bytes(8, "little") for x in (2**22 + 1, 1, 1))).cast(
            "Q"
        )
    assert shared.block.participant() is None
    assert len(shared.block.bury_dead()) == LINES
    assert shared.block.participant() == 0


@pytest.mark.parametrize("step", ["intent", "bury", "record written", "signalled", "committed"])
@pytest.mark.parametrize("cut_off", ["killed", "interrupted"])
def test_a_burial_that_is_cut_off_leaves_the_reservations_right(
    shared: Shared, start: Starter, step: str, cut_off: str
) -> None:
    """Case flow-11. ``recover`` counts them anew, so it does not matter where."""

    def recount(state: list[int], intent: Intent | None, owner_died: bool) -> None:
        state[0] = shared.block.participants.all_reserved()[0]

    def forget(state: list[int], lines: list[Line]) -> None:
        state[0] -= sum(line.reserved[0] for line in lines)

    def reserve(child: Child) -> None:
        line = enrolled(shared, 1, 1)
        try:
            state = shared.block.load(shared.block.mutex.lock())
            shared.block.participants.reserve(line, 40)
            state[0] += 40
            shared.block.commit(state)
        finally:
            shared.block.mutex.unlock()
        child.say("reserved")
        child.ask()

    def cut(at: str) -> None:
        if at == step and cut_off == "killed":
            die()
        if at == step:
            raise KeyboardInterrupt

    def bury(_: Child) -> None:
        shared.block.hook = cut
        with contextlib.suppress(KeyboardInterrupt):
            shared.block.bury_dead(forget)

    shared.block.recover = recount
    dead = [start(reserve), start(reserve)]
    for child in dead:
        child.heard()
        child.kill()
    assert shared.block.peek()[0] == 80
    start(bury).join()
    assert shared.look()[0] == shared.block.participants.all_reserved()[0]
    shared.block.bury_dead(forget)
    assert shared.look()[0] == shared.block.participants.all_reserved()[0] == 0
    assert shared.look()[shared.block.DISCARDED] == 0  # a burial is no write


# ------------------------------------------------------------------------------------------------------ fork, revival


def test_a_forked_child_has_a_line_of_its_own(shared: Shared, start: Starter) -> None:
    mine = enrolled(shared, 1, 1)

    def run(child: Child) -> None:
        child.say(str(enrolled(shared, 2, 2)))
        child.ask()

    child = start(run)
    assert int(child.heard() or -1) != mine
    assert {(w.pid, w.role) for w in shared.block.waiting()} == {(os.getpid(), 1), (child.pid, 2)}
    assert identity.me() == (os.getpid(), identity.start_time(os.getpid()))


def test_a_forked_childs_copy_of_a_private_block_is_its_own(kind: str, start: Starter) -> None:
    block = ControlBlock(anonymous(SIZE), words=WORDS, events=EVENTS, create=True)
    deaths: list[bool] = []
    block.recover = lambda state, intent, died: deaths.append(died)
    line = block.participant()
    assert line is not None
    block.participants.begin_wait(line, 1, 1)
    block.participants.reserve(line, 5)

    def add() -> list[int]:
        try:
            state = block.load(block.mutex.lock(5))
            state[0] += 1
            block.commit(state, *block.events)
            return state
        finally:
            block.mutex.unlock()

    add()

    def run(child: Child) -> None:
        assert block.waiting() == []
        assert add()[0] == 2
        assert deaths == [True]  # what the parent's threads had reserved is counted anew
        assert add()[0] == 3
        assert deaths == [True]

    assert start(run).join() == 0
    assert block.peek()[0] == 1
    assert len(block.waiting()) == 1
    assert deaths == []


def test_a_block_from_before_a_reboot_is_revived_with_its_state(shared: Shared, start: Starter) -> None:
    """Its mutex was held and a write was in progress when the machine went down."""
    shared.change(3)
    enrolled(shared, 1, 1)

    def run(child: Child) -> None:
        def stop(at: str) -> None:
            if at == "intent":
                child.say("holds")
                child.ask()

        shared.block.hook = stop
        shared.change(4)

    child = start(run)
    child.heard()
    copy = mmap.mmap(-1, SIZE)
    copy[:] = shared.memory[:]
    other = shared.lock_path.with_name("lock-2")
    memoryview(copy)[:64].cast("Q")[2] ^= 1
    memoryview(copy)[128:256].cast("I")[2] ^= 1
    with pytest.raises(NotShareable):
        ControlBlock(copy, words=WORDS, events=EVENTS, create=False, lock_path=other)
    with pytest.raises(NotShareable):
        ControlBlock.revive(copy, words=WORDS + 1, events=EVENTS, lock_path=other)
    found: list[tuple[Intent | None, bool]] = []
    block = ControlBlock.revive(
        copy,
        words=WORDS,
        events=EVENTS,
        lock_path=other,
        recover=lambda state, intent, died: found.append((intent, died)),
    )
    assert block.waiting() == []
    try:
        state = block.load(block.mutex.lock(1))
    finally:
        block.mutex.unlock()
    assert state[:8] == [3] * 8
    assert found == [(Intent(child.pid, 7, 4), True)]
    again = ControlBlock(copy, words=WORDS, events=EVENTS, create=False, lock_path=other)
    assert again.peek() == block.peek()
