"""The compiled fast path does what the ordinary way does, bit for bit, and is used exactly where it may be."""

from __future__ import annotations

import collections
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import slow_kernels
import torch
from fast_paths import either, install, tree_bytes, tree_is_sound

from millpond import BlockingReplayBuffer, Flow, ReplayBuffer
from millpond.core.schema import Schema
from millpond.replay import ConsumingSampler, PrioritizedSampler, SamplerWithoutReplacement
from millpond.replay.kernels.binding import LaterFastPath
from millpond.replay.state import NAMES

CAPACITY, LENGTH = 13, 80
SCHEMA = Schema({"x": (torch.int64, ()), "y": (torch.float32, (3,)), "z": (torch.bool, ())})
Make = Callable[..., ReplayBuffer]


def plain(**options: Any) -> Make:
    def make(**more: Any) -> ReplayBuffer:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "admission='block' on a buffer that never consumes")
            given = {key: value() if key == "sampler" else value for key, value in options.items()}
            return ReplayBuffer(CAPACITY, schema=SCHEMA, seed=7, **given, **more)

    return make


def prioritized(flow: Flow | None = None, **options: Any) -> Make:
    return plain(sampler=lambda: PrioritizedSampler(**options), flow=flow)


def fifo(flow: Flow | None = None) -> Make:
    return plain(sampler=lambda: ConsumingSampler(1), flow=flow)


def blocking(**more: Any) -> ReplayBuffer:
    return BlockingReplayBuffer(CAPACITY, schema=SCHEMA, seed=7, **more)


KINDS: dict[str, Make] = {
    "uniform": plain(),
    "uniform, min_size": plain(flow=Flow(min_size=9)),
    "uniform, few samples": plain(flow=Flow(samples_per_insert=0.75, min_size=3)),
    "uniform, max_debt": plain(flow=Flow(samples_per_insert=2.0, max_debt=40)),
    "uniform, max_debt, min_size": plain(flow=Flow(samples_per_insert=1 / 3, max_debt=12, min_size=4)),
    "uniform, block": plain(flow=Flow(admission="block")),
    "uniform, drop": plain(flow=Flow(admission="drop_newest")),
    "uniform, raise": plain(flow=Flow(admission="raise")),
    "uniform, raise, ratio": plain(flow=Flow(admission="raise", samples_per_insert=2.0)),
    "prioritized": prioritized(),
    "prioritized, proportional": prioritized(alpha=1.0, beta=1.0, eps=0.0),
    "prioritized, as uniform": prioritized(alpha=0.0, beta=0.0),
    "prioritized, independent": prioritized(alpha=0.8, beta=0.5, eps=0.0, stratified=False),
    "prioritized, extreme": prioritized(alpha=7.0, beta=1.0),
    "prioritized, max_debt": prioritized(Flow(samples_per_insert=1.5, max_debt=30)),
    "prioritized, drop": prioritized(Flow(admission="drop_newest", min_size=2)),
    "fifo": fifo(),
    "fifo, block": fifo(Flow(admission="block")),
    "fifo, drop": fifo(Flow(admission="drop_newest")),
    "fifo, ratio": fifo(Flow(samples_per_insert=1.0)),
    "fifo, max_debt": fifo(Flow(samples_per_insert=1.0, max_debt=25)),
    "blocking": blocking,
    "epochs": plain(sampler=SamplerWithoutReplacement),
}
SHARED = ["uniform", "prioritized", "blocking", "uniform, max_debt"]

RARE = "peek empty unlimited keep load share update beta receipts".split()


def steps(seed: int, n: int) -> list[tuple[str, int, int]]:
    """Some program: what is done, with what, and how."""
    draw = random.Random(seed)
    made = []
    for _ in range(n):
        name = draw.choices(["extend", "sample", "update_priority", "add", draw.choice(RARE)], [6, 6, 3, 1, 2])[0]
        size = draw.choice([1, 2, 2, 3, draw.randint(1, CAPACITY + 2)])  # some cannot be had at all
        made.append((name, size, draw.randrange(8)))
    return made


class Twins:
    """One buffer that goes the ordinary way and one that has the fast path, which do the same."""

    def __init__(self, make: Make, kernels: Any, done: collections.Counter[str], **more: Any) -> None:
        self.kernels, self.done = kernels, done
        self.both = [make(**more), make(**more)]
        self.batches: list[list[Any]] = [[], []]
        self.kept: list[list[Any]] = [[], []]
        self.open: list[list[Any]] = [[], []]
        self.written = self.steps = 0
        self.reinstall()

    def reinstall(self) -> None:
        """An engine's fast path begins anew with the engine."""
        assert isinstance(self.both[1]._local.engine.fast_path, LaterFastPath)
        self.counted = install(self.both[1], self.kernels)

    def close(self) -> None:
        for side, rb in enumerate(self.both):
            if self.open[side]:
                self.do_unlimited(side, rb)
            rb.close()

    def step(self, name: str, a: int, b: int) -> None:
        before = self.both[1]._local.engine.control.peek()
        counted, had = self.counted, self.counted.done.copy()
        answers = [self.answer(side, name, a, b) for side in (0, 1)]
        if name in ("extend", "add"):
            self.written += CAPACITY  # no two writes have a row in common
        agree(*answers)
        ordinary, short = self.both
        assert short._local.engine.control.peek() == ordinary._local.engine.control.peek()
        assert events(short) == events(ordinary)
        assert tree_bytes(short) == tree_bytes(ordinary)
        assert torch.equal(
            short._local.engine.random.torch.get_state(), ordinary._local.engine.random.torch.get_state()
        )
        assert not short._local.engine.control.mutex.held()
        self.steps += 1
        if self.steps % 5 == 0:
            self.look()
        done = counted.done - had
        self.done += done
        if usual(short, name, a, before, answers[1]):
            assert sum(done.values()) == 1, (name, a, b)
        if counted is self.counted and short._local.engine.fast_path is not counted:
            self.reinstall()

    def look(self) -> None:
        ordinary, short = self.both
        assert short.stats() == ordinary.stats()
        assert tree_is_sound(short)
        agree(ordinary[:], short[:])
        agree(*[self.do_receipts(side, rb) for side, rb in enumerate(self.both)])

    def answer(self, side: int, name: str, a: int, b: int) -> Any:
        try:
            return getattr(self, f"do_{name}")(side, self.both[side], a, b)
        except Exception as problem:
            return problem

    # ------------------------------------------------------------------ what they do
    def rows(self, n: int) -> dict[str, torch.Tensor]:
        x = torch.arange(self.written, self.written + n)
        return {"x": x, "y": torch.stack([x / 3, x / 7, -x.float()], 1), "z": x % 3 == 0}

    def do_extend(self, side: int, rb: ReplayBuffer, n: int, how: int) -> Any:
        receipt = None if how < 4 else (how % 3, self.written + 1 if how < 7 else 2**63 + self.written)
        rows = self.rows(n)
        priority = None if rb._local.engine.priorities is None or how % 2 else torch.arange(n) % 3
        return rb.extend(rows, timeout=self.patience(rb, how), receipt=receipt, priority=priority)

    def do_add(self, side: int, rb: ReplayBuffer, _: int, how: int) -> int:
        return rb.add({key: value[0] for key, value in self.rows(1).items()}, timeout=self.patience(rb, how))

    def patience(self, rb: ReplayBuffer, how: int) -> float | None:
        """Nobody else could help one that waits."""
        return 0 if how % 2 or rb.flow.admission == "block" or rb.flow.max_debt else None

    def do_sample(self, side: int, rb: ReplayBuffer, n: int, how: int) -> Any:
        if how == 4:
            return rb.sample(n, return_info=True)
        batch = rb.sample(n, wait=True, timeout=0) if how == 5 else rb.sample(n)
        self.batches[side].append(batch)
        return batch

    def do_update_priority(self, side: int, rb: ReplayBuffer, back: int, how: int) -> Any:
        if not self.batches[side]:
            return None
        batch = self.batches[side][-1 - back % len(self.batches[side])]  # an older one may be of items that left
        n = len(batch["index"])
        priority: Any = [
            torch.arange(n) / 7,
            -torch.zeros(n),
            2.5,
            -1.0,
            torch.rand(n, generator=seeded(n)),
            0.0,
            1.0,
            3.0,
        ][how]
        if how == 5:  # slots, whatever is there now
            return rb.update_priority(batch["index"], priority)
        return rb.update_priority(batch[:0] if how == 6 else batch, priority)

    def do_peek(self, side: int, rb: ReplayBuffer, *_: int) -> Any:
        return len(rb.peek(3))  # draws from a generator of its own

    def do_empty(self, side: int, rb: ReplayBuffer, *_: int) -> None:
        rb.empty()

    def do_unlimited(self, side: int, rb: ReplayBuffer, *_: int) -> None:
        if self.open[side]:
            self.open[side].pop().__exit__(None, None, None)
        else:
            self.open[side].append(rb.unlimited())
            self.open[side][0].__enter__()

    def do_keep(self, side: int, rb: ReplayBuffer, *_: int) -> Any:
        state = rb.state_dict()
        self.kept[side].append(state)
        return {key: value for key, value in state.items() if key not in ("arrays", "ahead")}

    def do_load(self, side: int, rb: ReplayBuffer, which: int, _: int) -> None:
        if self.kept[side]:
            rb.load_state_dict(self.kept[side][which % len(self.kept[side])])

    def do_share(self, side: int, rb: ReplayBuffer, *_: int) -> None:
        if not self.open[side]:  # what an engine has open ends with it
            rb.share()

    def do_update(self, side: int, rb: ReplayBuffer, *_: int) -> Any:
        if self.batches[side]:
            batch = self.batches[side][-1]
            return rb.update(batch, {"y": batch["y"] + 1})
        return None

    def do_beta(self, side: int, rb: ReplayBuffer, a: int, b: int) -> None:
        if isinstance(rb.sampler, PrioritizedSampler):
            rb.sampler.beta = a / (a + b + 1)

    def do_receipts(self, side: int, rb: ReplayBuffer, *_: int) -> list[int]:
        return [rb.receipt(line) for line in range(3)]


def events(rb: ReplayBuffer) -> list[list[int]]:
    """What was published so far, and whether somebody is thought to wait for more."""
    return [event._words[4:6].tolist() for event in rb._local.engine.control.events]


def seeded(n: int) -> torch.Generator:
    return torch.Generator().manual_seed(n)


def agree(one: Any, other: Any) -> None:
    """The same, bit for bit."""
    assert type(one) is type(other), (one, other)
    if isinstance(one, torch.Tensor):
        assert one.dtype is other.dtype
        assert one.shape == other.shape
        assert one.numpy().tobytes() == other.numpy().tobytes()
    elif isinstance(one, tuple):
        for mine, theirs in zip(one, other, strict=True):
            agree(mine, theirs)
    elif isinstance(one, dict) or hasattr(one, "keys"):
        assert sorted(map(str, one.keys())) == sorted(map(str, other.keys()))
        for key in one.keys():  # noqa: SIM118 (a TensorDict iterates over its items)
            agree(one[key], other[key])
    elif isinstance(one, Exception):
        assert str(one) == str(other)
    else:
        assert one == other


def usual(rb: ReplayBuffer, name: str, n: int, before: list[int], answer: Any) -> bool:
    """Must the fast path have done this? Where it could not, or did nothing, nobody knows here."""
    if rb._local.engine.unlimited or isinstance(answer, Exception):
        return False
    if name in ("extend", "add"):
        size = n if name == "extend" else 1
        dropped = len(answer) == 0 if name == "extend" else answer == -1
        huge = rb._local.engine.control.peek()[NAMES.index("receipt_number")] >= 2**63
        return rb._local.engine.priorities is None and not dropped and not huge and size <= rb.capacity
    if name == "sample":
        return not isinstance(rb.sampler, SamplerWithoutReplacement)
    return False


def program(make: Make, kernels: Any, programs: int, wanted: collections.Counter[str], **more: Any) -> None:
    done: collections.Counter[str] = collections.Counter()
    for seed in range(programs):
        twins, past = Twins(make, kernels, done, **more), []
        try:
            for step in steps(seed, LENGTH):
                past.append(step)
                twins.step(*step)
            twins.look()
        except AssertionError as problem:
            raise AssertionError(f"program {seed}, after {past}") from problem
        finally:
            twins.close()
    for name, least in wanted.items():
        assert done[name] >= least, done


def wanted(kind: str, programs: int) -> collections.Counter[str]:
    """Of each kind of work so much must have been done by the fast path, or the test would say nothing."""
    names = {"prioritized": ["sample", "set_leaves"], "epochs": ["put"]}
    return collections.Counter(dict.fromkeys(names.get(kind.partition(",")[0], ["sample", "put"]), 2 * programs))


@pytest.mark.parametrize("kind", KINDS)
def test_any_program_does_the_same_with_the_fast_path(kind: str) -> None:
    """Batches, errors, all counters, random numbers and priorities, after every single operation."""
    program(KINDS[kind], either("compiled"), 6, wanted(kind, 6))


@pytest.mark.parametrize("kind", SHARED)
def test_any_program_does_the_same_in_shared_memory(kind: str) -> None:
    program(KINDS[kind], either("compiled"), 4, wanted(kind, 4), shared=True)


@pytest.mark.parametrize(
    "kind", ["uniform, max_debt", "prioritized, proportional", "prioritized, independent", "blocking"]
)
def test_the_slow_kernels_of_the_tests_do_the_same(kind: str) -> None:
    """So that what they show of the source holds."""
    program(KINDS[kind], slow_kernels, 4, wanted(kind, 4))
