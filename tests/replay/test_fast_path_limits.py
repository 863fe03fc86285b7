"""Where the fast path must leave the work to the ordinary way; what others do meanwhile; and whom it wakes."""

from __future__ import annotations

import collections
import contextlib
import random
import threading
from collections.abc import Callable
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
    die,
    forked,
    from_the_start,
    install,
    made,
    numbers,
    rows,
    seen,
    was_killed,
    whole,
)

from millpond import Flow, ReplayBuffer
from millpond.core.errors import BufferClosed, NotReady, Unsatisfiable
from millpond.core.schema import Schema
from millpond.flow.limiter import Counts, insert_block, sample_block
from millpond.replay import (
    ConsumingSampler,
    HindsightSampler,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorStorage,
)
from millpond.replay import state as words
from millpond.replay import update as editing
from millpond.replay.kernels import binding as fast_path
from millpond.replay.kernels import loading as kernels
from millpond.replay.kernels.binding import CompiledFastPath, LaterFastPath, NoFastPath
from millpond.replay.rows import Rows
from millpond.replay.samplers.prioritized import Weighed


def weighed(*leaves: float) -> Weighed:
    """Leaves as they are, of the settings that a sampler is built with."""
    return Weighed(np.array(leaves), np.array(leaves), 2)


# ---------------------------------------------------------------------- what must be mended, or asked about, first
def refuses(rb: ReplayBuffer, short: Counted) -> None:
    before = seen(rb)
    packed = torch.from_numpy(rows(500, 2)["row"].numpy().copy()).view(torch.uint8)
    for _ in range(2):  # the first may find, and note, that a holder died
        assert short.sample(2) is None
        assert short.set_leaves(np.array([1, 2]), np.array([1, 2]), weighed(3.0, 4.0)) is None
        if rb._local.engine.priorities is None:
            assert short.put(packed, (1, 5)) is None
        assert seen(rb) == before
        assert not rb._local.engine.control.mutex.held()
    assert not short.done


def goes_on(rb: ReplayBuffer, short: Counted) -> None:
    """The ordinary way mends it, and then the fast path is one again."""
    before = rb.write_count
    rb.extend(rows(rb.write_count, 2))
    assert rb.write_count == before + 2
    batch = rb.sample(2)
    assert whole(batch)
    assert numbers(batch) == batch["generation"].tolist()
    done = short.done["sample"]
    assert rb.sample(2) is not None
    assert short.done["sample"] == done + 1
    assert whole(rb[:])


def died(rb: ReplayBuffer, action: Callable[[Any], None]) -> None:
    """Somebody took the lock, did something, and was killed."""

    def child() -> None:
        action(rb._local.engine)
        die()

    assert was_killed(forked(child))


def half_written(engine: Any) -> None:
    state = engine.load()
    engine.control.begin(state, 3, state[words.HEAD])
    engine.rows._words[state[words.HEAD] % CAPACITY : state[words.HEAD] % CAPACITY + 2] = -1


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("how", ["holding the lock", "with half a row written", "and somebody has seen it"])
def test_where_a_holder_died(way: Any, how: str, kind: str) -> None:
    with made(kind, shared=True) as rb:
        short = install(rb, way)
        died(rb, half_written if "half" in how else lambda engine: engine.load())
        if "seen" in how:
            rb._local.engine.control.mutex.lock()
            rb._local.engine.control.mutex.unlock()
        refuses(rb, short)
        assert rb._local.engine.control.mutex.lock()  # the news is kept
        rb._local.engine.control.mutex.unlock()
        rb.stats()  # mends it
        assert short.sample(2) is not None  # and what was noted then is copied on
        goes_on(rb, short)
        stats = rb.stats()
        assert (stats["recoveries"], stats["discarded_writes"]) == (1, int("half" in how))


@pytest.mark.parametrize("kind", SAMPLERS)
def test_where_a_change_was_left_by_an_exception(way: Any, kind: str) -> None:
    with made(kind) as rb:
        short = install(rb, way)
        try:
            half_written(rb._local.engine)
        finally:
            rb._local.engine.control.mutex.unlock()
        refuses(rb, short)
        goes_on(rb, short)
        assert rb.stats()["discarded_writes"] == 1


@pytest.mark.parametrize("kind", SAMPLERS)
def test_where_rows_were_being_rewritten(way: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal is what finishes that. Also where the lock is free and the intent is settled."""
    with made(kind, shared=True) as rb:
        short = install(rb, way)
        batch = rb.peek(2)
        changed = {"row": altered(batch["row"])}
        with monkeypatch.context() as patch:
            patch.setattr(editing.Journal, "apply", lambda *_: die())
            assert was_killed(forked(lambda: rb.update(batch, changed)))
        assert rb._local.engine.control.peek()[words.REWRITES] == 1
        refuses(rb, short)
        rb.stats()
        assert rb._local.engine.control.peek()[words.REWRITES] == 2
        goes_on(rb, short)
        amend(rb, words.REWRITES, 3)
        short.done.clear()
        refuses(rb, short)


@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
def test_where_a_redo_log_is_to_be_applied(way: Any, kind: str) -> None:
    with made(kind) as rb:
        short = install(rb, way)
        amend(rb, words.REDO, 1)
        refuses(rb, short)
        goes_on(rb, short)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_where_the_buffer_is_closed(way: Any, kind: str) -> None:
    with made(kind) as rb:
        short = install(rb, way)
        rb._local.engine.close(everybody=True)
        refuses(rb, short)
        with pytest.raises(BufferClosed):
            rb.sample(2)
        with pytest.raises(BufferClosed):
            rb.extend(rows(0, 2))


@pytest.mark.parametrize("kind", SAMPLERS)
def test_where_the_lock_is_taken(way: Any, kind: str) -> None:
    with made(kind) as rb:
        short = install(rb, way)
        held, let_go = threading.Event(), threading.Event()

        def hold() -> None:
            try:
                rb._local.engine.load()
                held.set()
                assert let_go.wait(20)
            finally:
                rb._local.engine.control.mutex.unlock()

        thread = threading.Thread(target=hold)
        thread.start()
        assert held.wait(20)
        refuses(rb, short)
        let_go.set()
        thread.join()
        goes_on(rb, short)


# ---------------------------------------------------------------------- where there is none
class Mine(RandomSampler):
    """A user's."""


class MinePrioritized(PrioritizedSampler):
    """A user's, that does something of its own with priorities."""

    def set_leaves(self, slots: Any, weighed: Any) -> None:
        super().set_leaves(slots, weighed._replace(leaves=weighed.leaves * 2))


class Lists:
    """A user's storage."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.schema = capacity, None

    def bind(self, schema: Any) -> None:
        if self.schema is None:
            self.schema = schema
            self._rows = torch.zeros(self.capacity, schema.row_nbytes, dtype=torch.uint8)

    def write(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        self._rows[slots] = rows

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        return self._rows[slots]

    def close(self) -> None:
        return


NONE: dict[str, dict[str, Any]] = {
    "a high watermark": {"flow": Flow(admission="raise", high_watermark=9)},
    "a low watermark": {"sampler": ConsumingSampler(1), "flow": Flow(admission="block", low_watermark=3)},
    "a pool": {"consume_after_n_samples": 1},
    "a pool of priorities": {"sampler": PrioritizedSampler(), "consume_after_n_samples": 2},
    "two deliveries": {"sampler": ConsumingSampler(2)},
    "a storage of the user's": {"storage": Lists(CAPACITY)},
    "a large rate": {"flow": Flow(samples_per_insert=float((1 << 20) + 1))},
    "a small rate": {"flow": Flow(samples_per_insert=1e-7)},
    "a large debt": {"flow": Flow(samples_per_insert=1 / 3, max_debt=1 << 20)},
    "a huge min_size": {"flow": Flow(min_size=1 << 70)},
}


def built(options: dict[str, Any]) -> ReplayBuffer:
    return ReplayBuffer(**{"storage": CAPACITY, "schema": ROW, "seed": 0, **options})


@pytest.mark.parametrize("what", NONE)
def test_there_is_none_where_there_is(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from_the_start(monkeypatch, slow_kernels)
    with built(dict(NONE[what])) as rb:
        assert isinstance(rb._local.engine.fast_path, NoFastPath)
        rb.extend(rows(0, 4))
        with contextlib.suppress(NotReady):
            assert whole(rb.sample(2))


def test_there_is_none_with_fallback_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPOND_LOCK", "fallback")
    with made() as rb:
        assert isinstance(rb._local.engine.fast_path, NoFastPath)
        assert whole(rb.sample(2))


def test_there_is_none_where_loads_are_not_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_path, "ORDERED", False)
    with made() as rb:
        assert isinstance(rb._local.engine.fast_path, NoFastPath)


@pytest.mark.parametrize(
    "flow",
    [
        Flow(samples_per_insert=float(1 << 20)),
        Flow(samples_per_insert=1 / (1 << 20)),
        Flow(samples_per_insert=1.0, max_debt=1 << 20),
        Flow(min_size=1 << 40),
    ],
    ids=str,
)
def test_up_to_there_it_is_one(way: Any, flow: Flow) -> None:
    with made(n=0, flow=flow) as rb:
        assert isinstance(rb._local.engine.fast_path, LaterFastPath)
        short = install(rb, way)
        rb.extend(rows(0, 4))
        rb.extend(rows(4, 4))
        assert short.done["put"] >= 1


OTHERS: dict[str, Callable[[], Any]] = {
    "epochs": SamplerWithoutReplacement,
    "n-step": lambda: NStep(2, gamma=0.9),
    "slices": lambda: SliceSampler(slice_len=2),
    "hindsight": lambda: HindsightSampler(lambda achieved, desired: achieved[..., 0] - desired[..., 0]),
    "one of the user's": Mine,
}
STEPS = 12


def transitions() -> dict[str, Any]:
    number = torch.arange(STEPS)
    flags = {name: torch.zeros(STEPS, 1, dtype=torch.bool) for name in ("terminated", "truncated", "done")}
    goals = {"achieved_goal": number.float()[:, None], "desired_goal": number.float()[:, None]}
    return {
        "observation": {"observation": number.float()[:, None], **goals},
        "next": {
            "observation": {"observation": number.float()[:, None], **goals},
            "reward": torch.ones(STEPS, 1),
            **flags,
        },
        "episode_id": torch.zeros(STEPS, dtype=torch.int64),
        "step": number,
    }


@pytest.mark.parametrize("what", OTHERS)
def test_other_samplers_draw_for_themselves(way: Any, what: str) -> None:
    """Writing is the same for all of them."""
    items = transitions()
    if what in ("n-step", "slices"):
        items["observation"] = items["observation"]["observation"]
        items["next"]["observation"] = items["next"]["observation"]["observation"]
    with ReplayBuffer(CAPACITY, sampler=OTHERS[what](), seed=0) as rb:
        rb.extend(items)
        short = install(rb, way)
        rb.extend(items)
        assert rb.sample(4).shape == (4,)
        assert short.done == {"put": 1}
        assert short.sample(4) is None


def test_what_a_subclass_does_with_priorities_is_done(way: Any) -> None:
    with ReplayBuffer(CAPACITY, sampler=MinePrioritized(alpha=1.0, eps=0.0), schema=ROW) as rb:
        rb.extend(rows(0, 4))
        short = install(rb, way)
        batch = rb.sample(2)
        assert rb.update_priority(batch, 5.0) == 2
        assert rb.sampler.tree.leaf(batch["index"].numpy()).tolist() == [10.0, 10.0]
        assert not short.done


def test_around_priorities_updates_take_it(way: Any) -> None:
    """Where another sampler is around the one that knows priorities, drawing is its own, changing priorities is not."""
    items = transitions()
    items["observation"] = items["observation"]["observation"]
    items["next"]["observation"] = items["next"]["observation"]["observation"]
    with ReplayBuffer(CAPACITY, sampler=NStep(2, gamma=0.9, base=PrioritizedSampler()), seed=0) as rb:
        rb.extend(items)
        short = install(rb, way)
        batch = rb.sample(3)
        assert rb.update_priority(batch, 4.0) == 3
        assert short.done == {"set_leaves": 1}


def test_what_is_written_with_priorities_goes_the_ordinary_way(way: Any) -> None:
    with made("prioritized") as rb:
        short = install(rb, way)
        rb.extend(rows(10, 2), priority=[3.0, 4.0])
        rb.extend(rows(12, 2))
        assert not short.done
        assert rb.sampler.tree.count == 14


def test_batches_ahead_are_reserved_the_ordinary_way(way: Any) -> None:
    with made(prefetch=2) as rb:
        short = install(rb, way)
        for calls in (1, 2, 3):
            assert whole(rb.sample(3))
            assert short.done == {"sample": 1}  # the first, which nothing was ahead of
            stats = rb.stats()
            assert (stats["prefetched"], stats["reserved"], stats["sample_calls"]) == (2, 6, calls)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_batch_that_does_not_reach_its_caller_is_not_lost(
    way: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is raised after it was counted: what was consumed comes back, the rest counts as never drawn."""

    def fail(*_: Any) -> None:
        raise MemoryError

    with made(kind) as rb:
        short = install(rb, way)
        for emptied in (0, 1):
            with monkeypatch.context() as patch:
                patch.setattr(Schema, "unpack", fail)
                with pytest.raises(MemoryError):
                    rb.sample(3)
            assert short.done["sample"] > emptied
            stats = rb.stats()
            assert (stats["samples_returned"], stats["sample_calls"]) == (3 * emptied, emptied)
            batch = rb.sample(3)
            assert numbers(batch) == batch["generation"].tolist()
            if kind == "oldest":
                assert numbers(batch) == [10 * emptied + i for i in range(3)]
            assert rb.stats()["samples_returned"] == 3 + 3 * emptied
            rb.empty()
            rb.extend(rows(10, 6))


def test_inside_unlimited_nothing_counts_for_the_ratio(way: Any) -> None:
    with made(flow=Flow(samples_per_insert=1.0)) as rb:
        rb.sample(2)
        short = install(rb, way)
        with rb.unlimited():
            assert rb.sample(2).shape == (2,)  # the ratio would allow it
            assert rb._local.engine.control.peek()[words.EXEMPT_SAMPLES] == 2
            assert rb.sample(200).shape == (200,)
            rb.extend(rows(10, 2))
        assert not short.done
        rb.sample(2)
        assert short.done == {"sample": 1}


def test_rows_beyond_a_megabyte_are_left_to_those_that_let_go_of_the_gil(
    way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_path, "MOST_BYTES", 4 * ROW.row_nbytes)
    with made("prioritized") as rb, made() as plain:
        short, other = install(rb, way), install(plain, way)
        few, many = rb.sample(4), rb.sample(5)
        assert short.done == {"sample": 1}
        rb.update_priority(few, 1.0)
        rb.update_priority(many, 1.0)
        assert short.done == {"sample": 1, "set_leaves": 1}
        plain.extend(rows(10, 4))
        plain.extend(rows(14, 5))
        assert other.done == {"put": 1}


@pytest.mark.parametrize("number", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_receipts_of_any_number(way: Any, number: int) -> None:
    """The kernels' numbers have a sign. What stands there already is copied, whatever it is."""
    with made() as rb:
        short = install(rb, way)
        rb.extend(rows(10, 2), receipt=(63, number))
        assert short.done["put"] == (number < 2**63)
        rb.extend(rows(12, 2))
        rb.extend(rows(14, 2), receipt=(0, 9))
        assert short.done["put"] == 2 + (number < 2**63)
        assert (rb.receipt(63), rb.receipt(0), rb.receipt(1)) == (number, 9, 0)


def test_more_than_fit_are_refused_before_a_byte_is_written(way: Any) -> None:
    """Nobody asks for that, except where another thread leaves `unlimited` just then."""
    with made() as rb:
        short = install(rb, way)
        before = seen(rb)
        packed = rows(100, CAPACITY + 1)["row"].view(torch.uint8)
        assert short.put(packed, None) is None
        assert seen(rb) == before


def test_slots_outside_are_refused_before_a_leaf_is_written(way: Any) -> None:
    with made("prioritized") as rb:
        short, before = install(rb, way), seen(rb)
        for slot in (-1, CAPACITY, 2**40):
            assert short.set_leaves(np.array([1, slot]), np.array([1, 2]), weighed(1.0, 1.0)) is None
        for number in (-1, 10, 2**40):  # none of these is there
            assert short.set_leaves(np.array([1, 2]), np.array([1, number]), weighed(1.0, 1.0)) is None
        assert seen(rb) == before


def test_what_tests_stop_at_is_passed(way: Any) -> None:
    """``hook`` is for kills at named steps of the ordinary way."""
    with made("prioritized") as rb, made() as plain:
        short, other = install(rb, way), install(plain, way)
        steps: list[str] = []
        for buffer in (rb, plain):
            buffer._local.engine.control.hook = steps.append
        batch = rb.sample(2)
        rb.update_priority(batch, 1.0)
        plain.extend(rows(10, 2))
        plain._local.engine.control.hook = None
        assert isinstance(plain._local.engine.rows, Rows)
        plain._local.engine.rows.hook = steps.append
        plain.extend(rows(12, 2))
        assert not short.done
        assert not other.done
        assert steps.count("committed") == 3
        assert "half copied" in steps


def test_the_first_sample_of_many_rows_begins_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(kernels, "request", lambda: asked.append(1))
    with made() as rb, built({"storage": TensorStorage(1 << 19)}) as vast:
        assert vast._local.engine.rows is not None
        assert vast._local.engine.rows.vast
        vast.extend(rows(0, 30))
        rb.sample(2)
        assert not asked
        vast.sample(20)
        assert asked


# ---------------------------------------------------------------------- how it judges
def test_sizes_that_can_never_go_on_are_refused(way: Any) -> None:
    """The ordinary way judges whatever is blocked; what may proceed does."""
    with made(flow=Flow(samples_per_insert=1.0, max_debt=12.0)) as rb:
        rb.sample(4)
        short = install(rb, way)
        rb.sample(6)
        rb.extend(rows(10, 3))
        assert short.done == {"sample": 1, "put": 1}
        with pytest.raises(Unsatisfiable, match=r"inserts of 3 and samples of 11.*at least 13"):
            rb.sample(11)
        with pytest.raises(Unsatisfiable, match="insert of 13 items alone"):
            rb.extend(rows(13, 13))
        assert (rb.write_count, rb.stats()["samples_returned"]) == (13, 10)


def test_what_is_done_inside_unlimited_says_nothing_of_the_sizes_in_use(way: Any) -> None:
    with made(flow=Flow(samples_per_insert=0.5, admission="raise"), n=2) as rb:
        with rb.unlimited():
            rb.sample(12)
            rb.extend(rows(2, 5))
        short = install(rb, way)
        rb.extend(rows(7, 3))
        assert short.done == {"put": 1}
        state = rb._local.engine.control.peek()
        assert (state[words.LAST_INSERT], state[words.LAST_SAMPLE]) == (3, 0)


def test_it_counts_as_the_limiter_does() -> None:
    """In all states, also those that no buffer of 16 items comes to."""
    draw, kernel = random.Random(1), slow_kernels._ring
    answers: collections.Counter[Any] = collections.Counter()
    plan, record = planned(), np.zeros(len(words.NAMES), np.int64)
    for _ in range(4000):
        rate = draw.choice([None, 1 / 3, 0.5, 1.0, 2.5, 1000.0])
        debt = None if rate is None or draw.random() < 0.3 else rate * draw.randint(1, 40)
        flow = Flow(min_size=draw.choice([0, 3, 10]), samples_per_insert=rate, max_debt=debt)
        plan[kernel.MIN_SIZE], plan[kernel.RATE_ABOVE], plan[kernel.RATE_BELOW] = (
            flow.min_size,
            flow.rate_above,
            flow.rate_below,
        )
        plan[kernel.DEBT_LIMIT] = -1 if flow.debt_limit is None else flow.debt_limit
        scale, n = draw.choice([1, 1, 10**9]), draw.randint(1, 12)
        for word in (words.WRITES, words.RETURNED, words.RESERVED, words.EXEMPT_WRITES, words.EXEMPT_SAMPLES):
            record[word] = draw.randint(0, 40 if word in (words.WRITES, words.RETURNED) else 9) * scale
        returned = record[words.RETURNED] - record[words.EXEMPT_SAMPLES]
        figures = map(int, (record[words.WRITES], record[words.EXEMPT_WRITES], returned))
        counts = Counts(CAPACITY, 1, *figures, False, True, False, int(record[words.RESERVED]))
        may_sample = sample_block(flow, counts, n, need=1) is None
        may_insert = insert_block(flow, counts, n) is None
        assert bool(kernel._may_sample(plan, record.ctypes.data, n)) == may_sample
        assert bool(kernel._may_insert(plan, record.ctypes.data, n)) == may_insert
        answers[may_sample, may_insert, debt is None] += 1
    assert min(answers[a, b, False] for a in (True, False) for b in (True, False)) > 50


def planned() -> Any:
    """A plan, to be changed."""
    with made() as rb:
        return CompiledFastPath(rb._local.engine, slow_kernels)._plan


def test_a_leaf_of_minus_zero_is_zero(way: Any) -> None:
    """As `SumTree.update` has it: the bytes of equal trees are equal."""
    with made("prioritized") as rb:
        short = install(rb, way)
        assert short.set_leaves(np.array([1]), np.array([1]), weighed(-0.0)) == 1
        assert not np.signbit(rb.sampler.tree.leaves[1])
        assert not np.signbit(rb.sampler.tree.values[1])
