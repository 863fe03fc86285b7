"""SIGKILL between any two lines of the fast path: the others go on, and what was done was done whole, or not at all."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
import slow_kernels
import torch
from fast_paths import ROW, forked, install, numbers, rows, tree_bytes, tree_is_sound, was_killed, whole
from tensordict import TensorDict
from waits import Call

from millpond import Flow, ReplayBuffer
from millpond.replay import ConsumingSampler, PrioritizedSampler
from millpond.replay import state as words
from millpond.replay.kernels.binding import NoFastPath
from millpond.shm import futex

CAPACITY = 9
NOBODY = -1
BLOCK = Flow(admission="block")
DEBT = Flow(samples_per_insert=1.0, max_debt=60)


def put(n: int, receipt: tuple[int, int] | None = None) -> Callable[[ReplayBuffer], Any]:
    return lambda rb: rb.extend(rows(100, n), receipt=receipt)


def take(n: int) -> Callable[[ReplayBuffer], Any]:
    return lambda rb: rb.sample(n)


def reprioritize(rb: ReplayBuffer) -> Any:
    """One of them twice."""
    batch = {"index": torch.tensor([2, 0, 5, 2, 8]), "generation": torch.tensor([11, 9, 5, 11, 8])}
    return rb.update_priority(TensorDict(batch, [5]), torch.arange(1.0, 6.0))


#: Name → what the buffer is, how many items were written one after the other, what is done, and which event it tells.
CASES: dict[str, tuple[dict[str, Any], list[int], Callable[[ReplayBuffer], Any], int]] = {
    "put": ({}, [3], put(2), words.ITEMS),
    "put, wrapping and evicting": ({}, [5, 3], put(4), words.ITEMS),
    "put, a receipt": ({}, [3], put(2, (3, 77)), words.ITEMS),
    "put, a receipt after others, evicting": ({}, [9, 2], put(3, (5, 77)), words.ITEMS),
    "put, max_debt": ({"flow": DEBT}, [2, 2], put(2), words.ITEMS),
    "take uniform": ({}, [5, 8], take(3), NOBODY),
    "take uniform, max_debt": ({"flow": DEBT}, [5, 2], take(3), words.SPACE),
    "take oldest": ({"sampler": ConsumingSampler, "flow": BLOCK}, [4, 5], take(3), words.SPACE),
    "take prioritized": ({"sampler": PrioritizedSampler}, [5, 7], take(3), NOBODY),
    "take prioritized, max_debt": ({"sampler": PrioritizedSampler, "flow": DEBT}, [5, 7], take(3), words.SPACE),
    "set leaves": ({"sampler": PrioritizedSampler}, [5, 7], reprioritize, words.ITEMS),
}


RECEIPTS = {"put, a receipt": 3, "put, a receipt after others, evicting": 5}

#: Where somebody waits, too: the other cases tell it by the same lines.
WAITED = ["put", "put, a receipt after others, evicting", "take uniform, max_debt", "take oldest", "set leaves"]
#: Which between them run through every line.
USUAL = ["put, a receipt after others, evicting", "take uniform, max_debt", "take prioritized", "set leaves"]
#: These change nothing that others see, so a death in them is one at the line that follows.
READING = set("copy_rows walk _gather _word _in_force _ints _floats _may_sample _may_insert _drawn _all_live".split())
READING |= {"_lower", "_higher", "_or_inf"}


class Killer:
    """Counts the lines of the kernels, each at most twice so that loops end soon, and kills before a chosen one."""

    def __init__(self, at: int) -> None:
        self.left, self.seen = at, Counter[tuple[Any, int]]()

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in slow_kernels.FILES or frame.f_code.co_name in READING:
            return None
        if event == "line":
            place = frame.f_code, frame.f_lineno
            self.seen[place] += 1
            if self.seen[place] <= 2:
                self.left -= 1
                if self.left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        return self


def made(name: str) -> ReplayBuffer:
    how, writes, _, _ = CASES[name]
    how = {key: value() if key == "sampler" else value for key, value in how.items()}
    rb = ReplayBuffer(CAPACITY, schema=ROW, shared=True, seed=3, **how)
    for i, n in enumerate(writes):
        rb.extend(rows(rb.write_count, n), receipt=(4, i + 1) if "receipt" in name else None)
    if "max_debt" in name or "take" in name:
        rb.sample(2 if "put" in name else 3)
    return rb


def committed(rb: ReplayBuffer) -> list[int]:
    """The state, with what tells whether something was settled, and without how often something was mended."""
    control = rb._local.engine.control
    state: list[int] = control.peek()
    return state[: control.SETTLED + 1]


def outcomes(name: str) -> tuple[list[list[int]], bytes, bytes]:
    """The states before, in the middle (where old items left, and no new ones came) and after; the tree before and
    after. All the ordinary way."""
    with made(name) as rb:
        before, tree = committed(rb), tree_bytes(rb)
        CASES[name][2](rb)
        after = committed(rb)
        middle = list(before)
        for word in (words.TAIL, words.LIVE, words.OVERWRITTEN):
            gone = after[words.OVERWRITTEN] - before[words.OVERWRITTEN]
            middle[word] += -gone if word == words.LIVE else gone
        return [before, middle, after], tree, tree_bytes(rb)


def items(state: list[int]) -> list[int]:
    """What lies in the buffer, by the numbers in the rows: those before a put count from 0, those of it from 100."""
    return list(range(state[words.TAIL], state[words.HEAD]))


@pytest.mark.parametrize(
    ("name", "waits"),
    [
        *(pytest.param(name, False, marks=[] if name in USUAL else pytest.mark.exhaustive) for name in CASES),
        *(pytest.param(name, True, marks=[] if name == "take oldest" else pytest.mark.exhaustive) for name in WAITED),
    ],
    ids=lambda value: value if isinstance(value, str) else "somebody waits" if value else "nobody waits",
)
def test_killed_anywhere(monkeypatch: pytest.MonkeyPatch, name: str, waits: bool) -> None:
    """proc-1 for the fast path."""
    _, _, act, event = CASES[name]
    monkeypatch.setattr(futex, "WAIT_SLICE", 30.0)  # a lost wake-up must show, not heal
    states, *trees = outcomes(name)
    found: Counter[str] = Counter()
    for at in range(1000):
        with made(name) as rb:
            short = install(rb, slow_kernels)
            assert committed(rb) == states[0]
            for word in (1, 2, 3):
                rb._local.engine.control._intent[word] = (
                    0  # what an earlier change left there must not be taken for this one
                )
            waiter = Waiter(rb, event) if waits else None

            def child(rb: ReplayBuffer = rb, at: int = at, short: Any = short) -> None:
                sys.settrace(Killer(at))
                act(rb)
                sys.settrace(None)
                assert short.done
                assert not short.left

            status = forked(child)
            assert status == 0 or was_killed(status)
            if status == 0 and waits:
                assert rb._local.engine.control.events[event]._words[futex.EventCount.AWAITED] == 0
            found[look(rb, name, states, trees, waiter, at)] += 1
        if status == 0:
            break
    assert found["after"] > 1, found  # also between the commit and the end
    assert found["before"] > 10, found
    assert bool(found["middle"]) == (states[1] != states[0]), found
    assert at > 40


class Waiter:
    """A thread that sleeps until an event is told."""

    def __init__(self, rb: ReplayBuffer, event: int) -> None:
        control = rb._local.engine.control
        chosen = control.events[event]
        try:
            control.mutex.lock()
            ticket = chosen.prepare()
        finally:
            control.mutex.unlock()
        self.call = Call(lambda: chosen.wait(ticket, 10.0))

    def woken(self) -> bool:
        return bool(self.call.result(5.0))


def look(rb: ReplayBuffer, name: str, states: list[list[int]], trees: Any, waiter: Waiter | None, at: int) -> str:
    """What is left behind, and that it is sound. Which of the states it is."""
    control, engine = rb._local.engine.control, rb._local.engine
    left = committed(rb)
    assert left in states
    place = max(i for i in range(3) if left == states[i])  # without eviction the middle is the beginning
    where = "after" if place == 2 else "middle" if states[1] != states[0] and place == 1 else "before"
    if waiter is not None and where == "after":
        assert waiter.woken()  # before anybody else does anything
    begun = control._intent[0] != left[control.SETTLED]
    if begun:
        assert control._intent[1] not in (0, os.getpid())
        assert control._intent[2] >= 2
        assert control._intent[3] == (left[words.HEAD] if "put" in name else 0)
    if at % 2:
        engine.fast_path = type(engine.fast_path)(engine, slow_kernels)  # those who go on have it, too
    else:
        engine.fast_path = NoFastPath()
    began = time.monotonic()
    if name.startswith("put") and at % 3 == 0:
        rb.sample(1)  # whoever samples first finds it so, too
    stats = rb.stats()
    assert committed(rb)[: words.TAKES] == left[: words.TAKES]  # whoever mends takes nothing back
    assert stats["discarded_writes"] == begun
    assert stats["waiting_producers"] == stats["waiting_consumers"] == stats["reserved"] == stats["prefetched"] == 0
    for line in (3, 5):
        assert rb.receipt(line) == (77 if where == "after" and RECEIPTS.get(name) == line else 0)
    assert rb.receipt(4) == (len(CASES[name][1]) if "receipt" in name else 0)
    held = rb[:]
    assert whole(held)
    first = states[0][words.HEAD]
    assert numbers(held) == [number if number < first else number - first + 100 for number in items(left)]
    assert tree_is_sound(rb)
    check_leaves(rb, trees, where, begun)
    if len(rb) + 2 > CAPACITY and rb.flow.admission == "block":
        rb.sample(2)
    rb.extend(rows(50, 2))
    assert whole(rb.sample(2))
    assert time.monotonic() - began < 1.0
    assert rb.write_count == left[words.WRITES] + 2
    assert rb.stats()["recoveries"] <= 1
    assert not control.mutex.holder
    if waiter is not None:
        assert waiter.woken()
    return where


def check_leaves(rb: ReplayBuffer, trees: Any, where: str, begun: bool) -> None:
    """Half-way some leaves are new already, or, of an item named twice, what it was given first."""
    if not begun or rb._local.engine.priorities is None:
        assert tree_bytes(rb) == trees[where == "after"]
        return
    old, new, now = (np.frombuffer(tree)[:CAPACITY] for tree in (*trees, tree_bytes(rb)))
    first = rb._local.engine.priorities.weigh(1.0, 1).leaves[0]
    assert all(now[i] in (old[i], new[i], first) for i in range(CAPACITY))
