"""A wait that can never end is refused before it begins, and no other is: sizes in use, compared with every order."""

from __future__ import annotations

import itertools
import random
import re
import threading
from collections import deque
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
import torch
from waits import Call, until

from millpond import Flow, ReplayBuffer
from millpond.core.errors import DeadlineExceeded, MillpondError, NotReady, Unsatisfiable
from millpond.replay import ConsumingSampler, RandomSampler, SamplerWithoutReplacement
from tests.alike import usually

SOON = 0.002  # seconds: who may wait does so, and then gives up


def numbers(n: int) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(n)}


def words_of(insert: int, batch: int) -> str:
    return rf"inserts of {insert}\b.* of {batch}\b"


# ---------------------------------------------------------------------- what happened inside unlimited() is no size
def test_a_prefill_inside_unlimited_does_not_forbid_waits() -> None:
    flow = Flow(min_size=1000, samples_per_insert=1, max_debt=5000)
    with ReplayBuffer(100_000, flow=flow, seed=0) as rb:
        with rb.unlimited():
            rb.extend(numbers(30_000))
        with pytest.raises(DeadlineExceeded, match="allows 0 samples"):
            rb.sample(256, wait=True, timeout=SOON)
        assert not rb.wait_until_sampleable(256, timeout=SOON)
        with pytest.raises(NotReady):
            rb.sample(256)
        waiting = Call(lambda: rb.sample(256, wait=True))
        until(lambda: rb.stats()["waiting_consumers"] == 1)
        rb.extend(numbers(256))
        assert len(waiting.result()["x"]) == 256


def test_a_draw_inside_unlimited_does_not_forbid_writes() -> None:
    with ReplayBuffer(1000, flow=Flow(samples_per_insert=1, max_debt=20), seed=0) as rb:
        rb.extend(numbers(10))
        with rb.unlimited():
            rb.sample(200)
        rb.extend(numbers(10))
        waiting = Call(lambda: rb.extend(numbers(10)))
        until(lambda: rb.stats()["waiting_producers"] == 1)
        rb.sample(10)
        waiting.result()


def test_filling_up_to_min_size_at_once_is_no_size_in_use() -> None:
    with ReplayBuffer(10_000, flow=Flow(min_size=1000, samples_per_insert=1, max_debt=100)) as rb:
        rb.extend(numbers(1000))
        with pytest.raises(DeadlineExceeded):
            rb.sample(32, wait=True, timeout=SOON)
        rb.extend(numbers(4))
        with pytest.raises(DeadlineExceeded):
            rb.sample(32, wait=True, timeout=SOON)


def test_the_sizes_of_an_earlier_life_are_not_in_use() -> None:
    flow = Flow(samples_per_insert=1, max_debt=300)
    with ReplayBuffer(1000, flow=flow) as rb, ReplayBuffer(1000, flow=flow) as other:
        rb.extend(numbers(200))
        rb.sample(200)
        other.load_state_dict(rb.state_dict())
        with pytest.raises(DeadlineExceeded):
            other.sample(150, wait=True, timeout=SOON)


# ---------------------------------------------------------------------- deadlocks with the sizes in use
BANDS = {
    "watermarks": (64, Flow(admission="block", high_watermark=9, low_watermark=3), 1, 5),
    "eight": (8, Flow(admission="block"), 5, 6),
    "ten": (10, Flow(admission="block"), 6, 7),
    "debt": (100, Flow(admission="block", samples_per_insert=1, max_debt=9), 4, 7),
    "min_size": (8, Flow(admission="block", min_size=7), 5, 2),
}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("sampler", [ConsumingSampler, RandomSampler, SamplerWithoutReplacement])
@pytest.mark.parametrize("band", BANDS)
def test_a_producer_and_a_consumer_that_would_stop_each_other_are_told(band: str, sampler: Any, shared: bool) -> None:
    """Whoever comes second is told; the other goes on waiting for somebody else."""
    capacity, flow, insert, batch = BANDS[band]
    with ReplayBuffer(capacity, sampler=sampler(), consume_after_n_samples=1, flow=flow, shared=shared) as rb:
        told: list[tuple[str, MillpondError]] = []
        stop = threading.Event()

        def work(op: str) -> None:
            try:
                while True:
                    if op == "extend":
                        rb.extend(numbers(insert), cancel_event=stop)
                    else:
                        rb.sample(batch, wait=True, cancel_event=stop)
            except MillpondError as problem:
                told.append((op, problem))

        threads = [threading.Thread(target=work, args=(op,)) for op in ("extend", "sample")]
        for thread in threads:
            thread.start()
        until(lambda: len(told) > 0)
        stop.set()
        for thread in threads:
            thread.join()
        assert isinstance(told[0][1], Unsatisfiable), told
        if band != "min_size":
            assert re.search(words_of(insert, batch), str(told[0][1]))


@pytest.mark.parametrize("band", ["eight", "ten", "debt", "watermarks"])
def test_it_is_found_before_waiting_as_soon_as_both_sizes_are_known(band: str) -> None:
    capacity, flow, insert, batch = BANDS[band]
    with ReplayBuffer(capacity, consume_after_n_samples=1, flow=flow) as rb:
        rb.extend(numbers(insert))
        with pytest.raises(Unsatisfiable, match=words_of(insert, batch)):
            rb.sample(batch, wait=True)
        with pytest.raises(Unsatisfiable, match=words_of(insert, batch)):
            rb.wait_until_sampleable(batch)
    with ReplayBuffer(capacity, consume_after_n_samples=1, flow=flow) as rb:
        waiting = Call(lambda: rb.sample(batch, wait=True))
        until(lambda: rb.stats()["waiting_consumers"] == 1)
        rb.extend(numbers(insert))
        with pytest.raises(Unsatisfiable, match=words_of(insert, batch)):
            waiting.result()


def test_a_consumer_that_waits_is_seen_by_the_producer_that_comes_second() -> None:
    with ReplayBuffer(10, consume_after_n_samples=1, flow=Flow(admission="block")) as rb:
        with rb.unlimited():
            rb.extend(numbers(6))
        waiting = Call(lambda: rb.sample(7, wait=True, timeout=30))
        until(lambda: rb.stats()["waiting_consumers"] == 1)
        with pytest.raises(Unsatisfiable, match=words_of(6, 7)):
            rb.extend(numbers(6))
        rb.extend(numbers(1))
        waiting.result()


def test_other_sizes_on_one_side_may_resolve_it_so_it_waits() -> None:
    with ReplayBuffer(10, consume_after_n_samples=1, flow=Flow(admission="block")) as rb:
        small = Call(lambda: [rb.sample(n, wait=True) for n in (1, 3)])
        until(lambda: rb.stats()["waiting_consumers"] == 1)
        rb.extend(numbers(6))
        until(lambda: not small.waits)
        rb.extend(numbers(6))
        with pytest.raises(DeadlineExceeded):  # 8 are stored: another sample of 3 would make room
            rb.extend(numbers(6), timeout=SOON)
        large = Call(lambda: rb.sample(9, wait=True))
        until(lambda: rb.stats()["waiting_consumers"] == 1)
        assert large.waits
        rb.extend(numbers(1))
        large.result()


def test_a_first_write_that_holds_a_batch_may_be_a_prefill() -> None:
    with ReplayBuffer(100, consume_after_n_samples=1, flow=Flow(admission="block")) as rb:
        rb.extend(numbers(100))
        for _ in range(3):
            rb.sample(30, wait=True)
        waiting = Call(lambda: rb.sample(30, wait=True))
        until(lambda: rb.stats()["waiting_consumers"] == 1)
        for _ in range(2):
            rb.extend(numbers(10))
        waiting.result()


def test_a_try_is_refused_only_for_what_no_size_could_change() -> None:
    with ReplayBuffer(8, consume_after_n_samples=1, flow=Flow(admission="block")) as rb:
        rb.extend(numbers(5))
        with pytest.raises(NotReady):
            rb.sample(6)
        with pytest.raises(DeadlineExceeded):
            rb.sample(6, wait=True, timeout=0)
        with pytest.raises(Unsatisfiable):
            rb.sample(9)
        with pytest.raises(Unsatisfiable):
            rb.extend(numbers(9), timeout=0)


# ---------------------------------------------------------------------- every order
class World(NamedTuple):
    """A buffer as it is told from outside: how often each live item was delivered, oldest first, and the counters."""

    items: tuple[int, ...]
    written: int
    drawn: int
    pressed: bool


class Rules(NamedTuple):
    capacity: int
    flow: Flow
    deliveries: int | None  # first in, first out; None: nothing is consumed
    insert: int
    batch: int

    @property
    def high(self) -> int:
        return self.capacity if self.flow.high_watermark is None else self.flow.high_watermark

    def inserted(self, world: World) -> World | None:
        """Straight from the words of `Flow`."""
        flow, n = self.flow, self.insert
        rate = Fraction(flow.samples_per_insert or 0)
        written, fill = world.written + n, len(world.items) + n
        if flow.max_debt is not None and rate * max(0, written - flow.min_size) - world.drawn > flow.max_debt:
            return None
        low = flow.low_watermark
        if flow.admission != "overwrite":
            free = len(world.items) <= (0 if low is None else low)
            if fill > self.capacity or not (free or (fill <= self.high and not world.pressed)):
                return None
        items = (*world.items, *([0] * n))[-self.capacity :]
        return self.settled(World(items, written, world.drawn, world.pressed))

    def sampled(self, world: World) -> World | None:
        flow, n = self.flow, self.batch
        if world.written < flow.min_size or len(world.items) < (n if self.deliveries else 1):
            return None
        rate = flow.samples_per_insert
        if rate is not None and world.drawn + n > Fraction(rate) * max(0, world.written - flow.min_size):
            return None
        items = world.items
        if self.deliveries:
            chosen = sorted(range(len(items)), key=lambda at: items[at])[:n]
            counts = [count + (at in chosen) for at, count in enumerate(items)]
            items = tuple(count for count in counts if count < self.deliveries)
        return self.settled(World(items, world.written, world.drawn + n, world.pressed))

    def settled(self, world: World) -> World:
        """Pressure ends at the low watermark, and begins above the high one."""
        low = self.flow.low_watermark
        fill = len(world.items)
        return world._replace(pressed=low is not None and fill > low and (world.pressed or fill > self.high))

    def waiting(self, world: World) -> World:
        """An insert begins to wait for space."""
        low = self.flow.low_watermark
        if low is None or self.flow.admission != "block" or len(world.items) <= low:
            return world
        return world._replace(pressed=world.pressed or len(world.items) + self.insert > self.high)

    def essence(self, world: World) -> Any:
        rate = Fraction(self.flow.samples_per_insert or 0)
        beyond = world.written - self.flow.min_size
        debt = min(rate * max(0, beyond) - world.drawn, Fraction(200)) if rate else Fraction(0)
        return world.items, min(beyond, 0), debt, world.pressed

    def comes_to_rest(self, world: World) -> bool:
        """Is there an order of inserts and samples after which neither may go on?"""
        todo, seen = deque([world]), {self.essence(world)}
        while todo:
            world = todo.popleft()
            more, fewer = self.inserted(world), self.sampled(world)
            pressed = self.waiting(world) if more is None else world
            if more is None and fewer is None and pressed == world:
                return True
            for after in (more, fewer, pressed):
                if after is not None and self.essence(after) not in seen:
                    seen.add(self.essence(after))
                    todo.append(after)
        return False

    def rests(self, world: World, op: str) -> bool:
        """Neither may go on now, or after as many inserts as may be."""
        after = world
        while op == "sample" and (more := self.inserted(after)) is not None and self.sampled(more) is None:
            after = more
        return self.sampled(after) is None and self.inserted(after) is None


def some_rules(draw: random.Random) -> Rules:
    capacity = draw.randint(2, 12)
    deliveries = draw.choice([1, 1, 1, 2, None])
    admission: Any = draw.choice(["block", "block", "overwrite", "drop_newest"]) if deliveries else "overwrite"
    ratio = draw.choice([None, None, 1, 0.5, 2]) if deliveries in (1, None) else None
    marks: dict[str, int] = {}
    if admission == "block" and draw.random() < 0.5:
        marks["high_watermark"] = draw.randint(1, capacity)
        if draw.random() < 0.7:
            marks["low_watermark"] = draw.randint(0, marks["high_watermark"])
    flow = Flow(
        min_size=draw.choice([0, 0, draw.randint(1, capacity)]),
        samples_per_insert=ratio,
        max_debt=draw.choice([None, ratio * draw.randint(1, 12)]) if ratio else None,
        admission=admission,
        **marks,
    )
    return Rules(capacity, flow, deliveries, draw.randint(1, capacity), draw.randint(1, capacity))


def verdict(rb: ReplayBuffer, op: str, n: int) -> bool | None:
    """Is a wait for this refused? None: it did not have to wait."""
    try:
        if op == "sample":
            rb.sample(n, wait=True, timeout=SOON)
        else:
            rb.extend(numbers(n), timeout=SOON)
    except Unsatisfiable:
        return True
    except DeadlineExceeded:
        return False
    return None


@pytest.mark.parametrize("seed", usually(range(12), 0, 1, 2))
def test_waits_are_refused_exactly_where_some_order_comes_to_rest(seed: int) -> None:
    """Both sizes are in use; then each call that would wait is judged, at each step of a random order."""
    draw = random.Random(seed)
    seen: dict[tuple[str, bool], int] = dict.fromkeys(itertools.product(("sample", "extend"), (True, False)), 0)
    for _ in range(250):
        rules = some_rules(draw)
        sampler = ConsumingSampler(rules.deliveries) if rules.deliveries else RandomSampler()
        try:
            rb = ReplayBuffer(rules.capacity, sampler=sampler, flow=rules.flow, seed=0)
        except Unsatisfiable:
            continue
        with rb:
            walk(rb, rules, draw, seen)
    assert min(seen.values()) > 3, seen


def walk(rb: ReplayBuffer, rules: Rules, draw: random.Random, seen: dict[tuple[str, bool], int]) -> None:
    world = World((), 0, 0, False)
    inserts = samples = 0
    for _ in range(12):
        op = draw.choice(["extend", "sample"])
        after = rules.inserted(world) if op == "extend" else rules.sampled(world)
        if op == "extend" and after is None and rules.flow.admission == "drop_newest":
            continue  # dropped, not waited for
        known = (samples > 0) if op == "extend" else inserts > 1
        in_use = world.written > rules.flow.min_size
        if after is None and not (known and in_use):
            continue
        said = verdict(rb, op, rules.insert if op == "extend" else rules.batch)
        assert (said is None) == (after is not None), (rules, world, op)
        if after is not None:
            world, inserts, samples = after, inserts + (op == "extend"), samples + (op == "sample")
            continue
        truth = rules.comes_to_rest(world) if rules.deliveries != 2 else rules.rests(world, op)
        assert said == truth, (rules, world, op)
        seen[op, truth] += 1
        if truth:
            return
