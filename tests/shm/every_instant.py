"""A changer is killed at every instruction of a change, with one sleeping waiter and nobody else to heal what is lost.

A commit must be visible exactly if the waiter was woken, and what the change touched outside the record must be known
to whoever comes next. The same check must notice each of a set of deliberately broken variants, or it proves nothing.

Not a test itself: ``test_every_instant.py`` runs ``main`` in processes of its own, which are small and so fork fast.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from shm_children import Child, counters, die

from millpond.shm import futex
from millpond.shm.control import ControlBlock, Intent
from millpond.shm.fallback import PolledEvent
from millpond.shm.futex import EventCount
from millpond.shm.locks import Event
from millpond.shm.mapped import allocate

VALUE, RECOVERED = 0, 1
SIZE = ControlBlock.size_needed(8, 2)
OURS = f"{os.sep}shm{os.sep}"  # instructions counted are those of src/millpond/shm and of this folder
SOON = 1.0  # seconds; silence for so long is loss, in the variants that are known to lose


class Violation(Exception):
    """A wake-up lost, or a write that left no trace."""


class Pond:
    """A block, a word outside its record that changes with it, and one waiter for one of its two events."""

    def __init__(self, directory: Path, event: int) -> None:
        self.memory = allocate(directory / "control", SIZE + 512)
        self.block = ControlBlock(
            self.memory, words=8, events=2, create=True, lock_path=directory / "lock", recover=self.recover
        )
        self.data = counters(self.memory, SIZE)
        self.seen = self.discarded = 0
        self.patience = 10.0
        self.waiter = Child(lambda child: self.wait(child, self.block.events[event]))
        self.waiter.heard()

    def recover(self, state: list[int], intent: Intent | None, owner_died: bool) -> None:
        self.data[0] = state[VALUE]

    def wait(self, child: Child, event: Event) -> None:
        """Say each value above the last, as soon as the event tells of it. Sleep in between, without looking."""
        block, last = self.block, -1
        while True:
            try:
                state = block.load(block.mutex.lock())
                while state[VALUE] <= last:
                    ticket = event.prepare()
                    block.mutex.unlock()
                    event.wait(ticket)
                    state = block.load(block.mutex.lock())
                last = state[VALUE]
                event.prepare()  # from here on every change is told, also one before it has gone to sleep again
                child.say(str(last))
            finally:
                block.mutex.unlock()

    def change(self) -> None:
        block = self.block
        try:
            state = block.load(block.mutex.lock())
            block.begin(state, 1, state[VALUE])
            self.data[0] = state[VALUE] + 1
            state[VALUE] += 1
            block.settle(state)
            block.commit(state, block.events[0], block.events[1])
        finally:
            block.mutex.unlock()

    def after_death(self) -> None:
        """Check that the commit is visible exactly if it was told, then change again, and check that this is told."""
        committed = self.block.peek()[VALUE] > self.seen
        touched = self.data[0] > self.seen  # unless a waiter was woken before the commit, and has mended it already
        if committed:
            self.expect(self.seen + 1, self.patience, "lost wake-up")
        self.change()  # somebody comes by
        discarded, self.discarded = self.discarded, self.block.peek()[self.block.DISCARDED]
        if touched and not committed and self.discarded == discarded:
            raise Violation("a write that was cut off left no trace")
        self.expect(self.seen + 1, self.patience, "not even the next change woke it")

    def expect(self, value: int, timeout: float, problem: str) -> None:
        if self.waiter.heard(timeout) != str(value):
            raise Violation(problem)
        self.seen = value


def dying_after(instructions: int, change: Callable[[], None]) -> Callable[[Child], None]:
    """A child that runs ``change`` and is killed after so many bytecode instructions of it, or says how many it has."""

    def run(child: Child) -> None:
        done = 0

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal done
            if OURS not in frame.f_code.co_filename:
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            if event == "opcode":
                if done == instructions:
                    die()
                done += 1
            return trace

        sys.settrace(trace)
        change()
        sys.settrace(None)
        child.say(str(done))

    return run


def kill_at_every_instruction(pond: Pond, step: int) -> int:
    """The last instruction first, as most mistakes are near the commit. Returns how many there are."""
    whole = Child(dying_after(-1, pond.change))
    total = int(whole.heard() or -1)
    pond.expect(pond.seen + 1, pond.patience, "lost wake-up without any death")
    for instructions in range(total - 1, -1, -step):
        changer = Child(dying_after(instructions, pond.change))
        killed = changer.join() == -signal.SIGKILL
        changer.end()
        if killed:
            pond.after_death()
        else:  # it had fewer instructions this time, as the lock was free at once
            pond.expect(pond.seen + 1, pond.patience, "lost wake-up without any death")
    return total


def kill_at_random_instants(pond: Pond, times: int) -> int:
    """Also within system calls, where no instruction is counted."""
    random = Random(5)
    for _ in range(times):
        changer = Child(lambda child: (child.say("now"), [pond.change() for _ in range(100)]))
        changer.heard()
        end = time.perf_counter() + random.random() ** 2 * 2.5e-3
        while time.perf_counter() < end:
            pass
        changer.kill()
        changer.end()
        # it may have changed many times; the waiter is told of the last
        while pond.seen < pond.block.peek()[VALUE]:
            pond.seen = pond.block.peek()[VALUE]
            while (said := pond.waiter.heard(pond.patience)) != str(pond.seen):
                if not said:
                    raise Violation("lost wake-up")
        pond.change()
        pond.expect(pond.seen + 1, pond.patience, "not even the next change woke it")
    return times


# ----------------------------------------------------------------------- broken variants, each of which must be noticed


def commit_then_wake(self: Any, commit: memoryview, commit_at: Any) -> None:
    commit[0] += 1
    self.notify_all()


def awaited_cleared_first(self: Any, commit: memoryview, commit_at: Any) -> None:
    awaited = self._words[self.AWAITED]
    self._words[self.SEQUENCE] += 1
    self._words[self.AWAITED] = 0
    if awaited:
        self._wake_op(commit_at)
    else:
        commit[0] += 1


def wake_forgotten(self: Any, commit: memoryview, commit_at: Any) -> None:
    commit[0] += 1


def others_woken_after(self: Any, state: list[int], event: Any = None, *others: Any) -> None:
    committing(self, state, event)
    for other in others:
        other.signal()


def record_in_force_rewritten(self: Any, state: list[int], event: Any = None, *others: Any) -> None:
    self._records[self._commit_word[0] & 1][:8] = memoryview(b"".join(x.to_bytes(8, "little") for x in state[:8])).cast(
        "Q"
    )
    committing(self, state, event, *others)


def intent_forgotten(self: Any, state: list[int], count: int = 0, start: int = 0) -> None:
    """Nothing."""


def mending_forgotten(self: Any, owner_died: bool = False) -> list[int]:
    state: list[int] = self._records[self._commit_word[0] & 1].tolist()
    return state


committing = ControlBlock.commit
# what is replaced by what, with which event's waiter, and what must be said
BROKEN: dict[str, tuple[Any, str, Any, int, str]] = {
    "commit and wake are two calls": (EventCount, "publish", commit_then_wake, 0, "lost wake-up"),
    "commit, then change the polled word": (PolledEvent, "publish", commit_then_wake, 0, "lost wake-up"),
    "awaited is cleared first": (EventCount, "publish", awaited_cleared_first, 0, "not even the next"),
    "the wake-up is forgotten": (PolledEvent, "publish", wake_forgotten, 0, "without any death"),
    "other events are told after the commit": (ControlBlock, "commit", others_woken_after, 1, "lost wake-up"),
    "the record in force is rewritten": (ControlBlock, "commit", record_in_force_rewritten, 0, "lost wake-up"),
    "the intent is forgotten": (ControlBlock, "begin", intent_forgotten, 0, "left no trace"),
    "the mending is forgotten": (ControlBlock, "load", mending_forgotten, 0, "left no trace"),
}


def concerned(variant: str) -> list[str]:
    """The kinds of lock that run the code that the variant replaces."""
    return {EventCount: ["robust"], PolledEvent: ["fallback"]}.get(BROKEN[variant][0], ["robust", "fallback"])


def main(directory: str, event: str, step: str, variant: str) -> None:
    """Print what the check found, for the kind of lock in ``MILLPOND_LOCK``: a violation, or how often it killed."""
    futex.WAIT_SLICE = 60.0  # nobody looks again by himself: a lost wake-up shows, instead of healing
    if variant:
        where, name, replacement, _, _ = BROKEN[variant]
        setattr(where, name, replacement)
    pond = Pond(Path(directory), int(event))
    pond.patience = SOON if variant else pond.patience
    found: dict[str, object] = {}
    try:
        kills = kill_at_every_instruction(pond, int(step)) if int(step) else kill_at_random_instants(pond, 60)
        found["kills"] = kills
    except Violation as violation:
        found["violation"] = str(violation)
    finally:
        pond.waiter.end()
    print(json.dumps(found))
