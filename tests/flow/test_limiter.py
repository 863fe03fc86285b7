"""The limiter as arithmetic: limits that hold exactly, refusals that equal an exhaustive search, and every sentence."""

from __future__ import annotations

import json
import math
import pickle
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from millpond.core.errors import InvalidArgument, InvalidType
from millpond.flow.limiter import Counts, Flow, insert_block, pressure, sample_block, unsatisfiable

# ---------------------------------------------------------------------------------------------------------------- Flow


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"min_size": -1}, InvalidArgument, "min_size must not be negative, got -1"),
        ({"min_size": True}, InvalidType, "min_size must be a number of items, got True"),
        ({"min_size": 1.0}, InvalidType, "min_size must be a number of items, got 1.0"),
        ({"min_size": None}, InvalidType, "min_size must be a number of items, got None"),
        ({"samples_per_insert": 0}, InvalidArgument, "samples_per_insert must be finite and above 0, got 0"),
        ({"samples_per_insert": -2}, InvalidArgument, "samples_per_insert must be finite and above 0, got -2"),
        ({"samples_per_insert": math.nan}, InvalidArgument, "samples_per_insert must be finite and above 0, got nan"),
        ({"samples_per_insert": math.inf}, InvalidArgument, "None means no limit"),
        ({"samples_per_insert": 1e-12}, InvalidArgument, "samples_per_insert must be at least 1e-9"),
        ({"samples_per_insert": True}, InvalidType, "samples_per_insert must be a number, got True"),
        ({"samples_per_insert": "4"}, InvalidType, "samples_per_insert must be a number, got '4'"),
        ({"max_debt": 5}, InvalidArgument, "samples_per_insert, which is not given: give both"),
        ({"samples_per_insert": 1, "max_debt": 0}, InvalidArgument, "max_debt must be finite and above 0, got 0"),
        ({"samples_per_insert": 1, "max_debt": math.nan}, InvalidArgument, "max_debt must be finite and above 0"),
        ({"samples_per_insert": 1, "max_debt": False}, InvalidType, "max_debt must be a number, got False"),
        ({"samples_per_insert": 8, "max_debt": 7}, InvalidArgument, "max_debt=7 is less than what one item owes"),
        ({"admission": "drop"}, InvalidArgument, "overwrite, block, drop_newest, raise; got 'drop'"),
        ({"admission": None}, InvalidType, "admission must be a string, got None"),
        ({"admission": "block", "high_watermark": 0}, InvalidArgument, "high_watermark must be at least 1 item"),
        ({"admission": "block", "high_watermark": -1}, InvalidArgument, "high_watermark must not be negative"),
        ({"admission": "block", "low_watermark": True}, InvalidType, "low_watermark must be a number of items"),
        (
            {"admission": "block", "high_watermark": 3, "low_watermark": 4},
            InvalidArgument,
            "low_watermark=4 must not be above high_watermark=3",
        ),
        ({"high_watermark": 3}, InvalidArgument, "high_watermark=3 makes producers wait for space"),
        ({"low_watermark": 3}, InvalidArgument, "low_watermark=3 makes producers wait for space"),
    ],
)
def test_rules_that_mean_nothing_are_refused(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        Flow(**arguments)
    assert words in str(caught.value)


FLOWS = st.builds(
    lambda size, rate, debt, admission, high, low: Flow(
        min_size=size,
        samples_per_insert=rate,
        max_debt=None if rate is None or debt is None else rate * debt,
        admission=admission,
        high_watermark=None if admission == "overwrite" or high is None else high,
        low_watermark=None if admission == "overwrite" or low is None else min(low, high or low),
    ),
    st.integers(0, 30),
    st.none() | st.sampled_from([1, 2, 3, 0.5, 1.5, 0.1, 0.25, 1 / 3]),
    st.none() | st.integers(1, 12) | st.floats(1, 12),
    st.sampled_from(["overwrite", "block", "block", "drop_newest", "raise"]),
    st.none() | st.integers(1, 24),
    st.none() | st.integers(0, 24),
)


@given(FLOWS)
def test_a_flow_survives_json_pickle_and_replace(flow: Flow) -> None:
    assert Flow.from_dict(json.loads(json.dumps(flow.to_dict()))) == flow
    other = pickle.loads(pickle.dumps(flow))
    assert (other, hash(other), repr(other)) == (flow, hash(flow), repr(flow))
    assert replace(flow, min_size=flow.min_size) == flow
    free = replace(flow, samples_per_insert=None, max_debt=None)
    assert sample_block(free, counts(live=50, written=50), 10**6, need=1) is None


def test_numbers_of_numpy_become_plain_ones() -> None:
    flow = Flow(min_size=np.int64(3), samples_per_insert=np.float32(0.5), max_debt=np.int32(4))  # type: ignore[arg-type]
    assert json.loads(json.dumps(flow.to_dict()))["samples_per_insert"] == 0.5
    assert (type(flow.min_size), type(flow.samples_per_insert), type(flow.max_debt)) == (int, float, int)


def test_from_dict_refuses_what_it_does_not_know() -> None:
    with pytest.raises(InvalidArgument, match="a flow has no 'minimum'; it has min_size, samples_per_insert"):
        Flow.from_dict({"minimum": 3})
    with pytest.raises(InvalidType, match="read from a dict"):
        Flow.from_dict([3])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="min_size must not be negative"):
        Flow.from_dict({"min_size": -3})


# ------------------------------------------------------------------------------------------------------ exact limits


def counts(
    *,
    capacity: int = 100,
    live: int = 0,
    written: int | None = None,
    exempt: int = 0,
    samples: int = 0,
    pressed: bool = False,
    evictable: bool = True,
    consuming: bool = False,
) -> Counts:
    return Counts(capacity, live, live if written is None else written, exempt, samples, pressed, evictable, consuming)


@pytest.mark.parametrize(
    ("rate", "written", "allowed"),
    [
        (0.1, 10, 1),
        (0.1, 9, 0),
        (0.3, 10, 3),
        (1 / 3, 3, 1),
        (2 / 3, 3, 2),
        (1.1, 10, 11),
        (0.7, 100, 70),
        (8, 2**40, 2**43),
    ],
)
def test_the_ratio_is_exact_where_floats_are_not(rate: float, written: int, allowed: int) -> None:
    flow = Flow(samples_per_insert=rate)
    for done in (0, allowed):
        state = counts(capacity=2**41, live=written, samples=done)
        if done < allowed:
            assert sample_block(flow, state, allowed - done, need=1) is None
        assert sample_block(flow, state, allowed - done + 1, need=1) is not None


def test_filling_up_to_min_size_owes_nothing_and_starts_no_burst() -> None:
    """unit-8: the first sample as soon as one item lies beyond it."""
    flow = Flow(min_size=50, samples_per_insert=1, max_debt=1)
    assert insert_block(flow, counts(), 50) is None
    assert sample_block(flow, counts(live=50), 1, need=1) is not None
    assert insert_block(flow, counts(live=50), 1) is None
    assert sample_block(flow, counts(live=51), 1, need=1) is None
    assert sample_block(flow, counts(live=51), 2, need=1) is not None
    assert insert_block(flow, counts(live=51), 1) is not None
    assert insert_block(flow, counts(live=51, samples=1), 1) is None


def test_the_first_item_of_min_size_is_the_last_that_is_waited_for() -> None:
    assert sample_block(Flow(min_size=50), counts(live=49), 4, need=1) is not None
    assert sample_block(Flow(min_size=50), counts(live=50), 4, need=4) is None
    assert (
        sample_block(Flow(min_size=50), counts(live=4, written=60), 4, need=4) is None
    )  # evicted or consumed: written once


def test_exempt_writes_owe_nothing_but_count_for_min_size() -> None:
    flow = Flow(min_size=10, samples_per_insert=2, max_debt=8)
    state = counts(live=60, exempt=50)
    assert sample_block(flow, state, 1, need=1) is not None
    assert sample_block(flow, state._replace(exempt_writes=49), 2, need=1) is None
    assert insert_block(flow, state, 4) is None
    assert insert_block(flow, state, 5) is not None


@given(FLOWS, st.integers(1, 30), st.booleans(), st.data())
def test_no_order_and_no_sizes_break_a_limit(flow: Flow, capacity: int, consuming: bool, data: st.DataObject) -> None:
    rate, state = Fraction(flow.rate_above, flow.rate_below), start(flow, capacity, consuming)
    for op, n in data.draw(st.lists(st.tuples(st.sampled_from("is"), st.integers(1, 12)), max_size=60)):
        if op == "i":
            after = inserted(flow, state, n)
            state = pressed_by(flow, state, n) if after is None else after
        else:
            state = sampled(flow, state, n, consuming) or state
        owed = rate * max(0, state.write_count - flow.min_size)
        assert 0 <= state.live <= capacity
        if flow.samples_per_insert is not None:
            assert state.samples <= owed
        if flow.max_debt is not None:
            assert owed - state.samples <= Fraction(flow.max_debt).limit_denominator(10**9)
        if state.samples:
            assert state.write_count >= flow.min_size


# -------------------------------------------------------------------------------------------------- space, watermarks


def test_an_insert_waits_until_it_fits_as_a_whole() -> None:
    """flow-2."""
    flow = Flow(admission="block")
    assert insert_block(flow, counts(live=97, evictable=False), 3) is None
    block = insert_block(flow, counts(live=97, evictable=False), 4)
    assert block is not None
    assert "until at most 96 are left" in block.reason


def test_between_the_watermarks_producers_wait_only_on_the_way_down() -> None:
    flow = Flow(admission="block", high_watermark=8, low_watermark=3)
    state = counts(capacity=10, evictable=False, consuming=True)
    for live, n, waits in [(0, 8, False), (4, 4, False), (8, 1, True), (5, 4, True), (3, 7, False), (3, 8, True)]:
        assert (insert_block(flow, state._replace(live=live), n) is not None) is waits
    assert not pressure(flow, state._replace(live=8), 0)
    assert pressure(flow, state._replace(live=8), 1)  # an insert of 1 was refused
    for live, waits in [(7, True), (4, True), (3, False), (0, False)]:
        falling = state._replace(live=live, under_pressure=True)
        assert pressure(flow, falling, 0) is waits
        assert (insert_block(flow, falling, 1) is not None) is waits
    assert pressure(flow, state._replace(live=9), 0)  # an insert from below the low watermark went above the high one


@given(st.integers(1, 30), st.integers(0, 30), st.integers(1, 30), st.integers(1, 30), st.booleans())
def test_without_a_low_watermark_each_insert_waits_until_it_fits(
    capacity: int, live: int, high: int, n: int, pressed: bool
) -> None:
    assume(live <= capacity)
    flow = Flow(admission="block", high_watermark=high)
    state = counts(capacity=capacity, live=live, pressed=pressed, evictable=False)
    fits = live + n <= min(high, capacity) or (live == 0 and n <= capacity)
    assert (insert_block(flow, state, n) is None) is fits


# ---------------------------------------------------------------------------------------------------------- sentences


@pytest.mark.parametrize(
    ("flow", "state", "n", "need", "reason", "waits_for"),
    [
        (
            Flow(min_size=100),
            counts(live=8),
            4,
            1,
            "8 of 100 items written: a sample waits until min_size=100 are",
            "inserts",
        ),
        (
            Flow(),
            counts(live=0, written=9),
            4,
            1,
            "0 items can be sampled: a sample of 4 waits until 1 item is there",
            "inserts",
        ),
        (
            Flow(),
            counts(live=3),
            4,
            4,
            "3 items can be sampled: a sample of 4 waits until 4 items are there",
            "inserts",
        ),
        (
            Flow(min_size=10, samples_per_insert=4),
            counts(live=12, samples=8),
            5,
            1,
            "samples_per_insert=4 allows 8 samples for the 2 items beyond min_size=10, and 8 were drawn: a sample of 5 "
            "waits until 2 more items are written",
            "inserts",
        ),
        (
            Flow(samples_per_insert=0.3),
            counts(live=5),
            2,
            1,
            "samples_per_insert=0.3 allows 1.5 samples for the 5 items beyond min_size=0, and 0 were drawn: a "
            "sample of 2 "
            "waits until 2 more items are written",
            "inserts",
        ),
        (
            Flow(samples_per_insert=1),
            counts(live=7, samples=7),
            1,
            1,
            "samples_per_insert=1 allows 7 samples for the 7 items beyond min_size=0, and 7 were drawn: a "
            "sample of 1 waits "
            "until 1 more item is written",
            "inserts",
        ),
        (
            Flow(),
            counts(capacity=10, live=10),
            11,
            11,
            "a sample of 11 needs 11 items at once: it waits until the capacity of 10 is raised",
            "nobody",
        ),
    ],
)
def test_why_a_sample_waits(flow: Flow, state: Counts, n: int, need: int, reason: str, waits_for: str) -> None:
    """flow-1, flow-10."""
    assert sample_block(flow, state, n, need=need) == (reason, waits_for)


FULL = counts(live=97, evictable=False, consuming=True)


@pytest.mark.parametrize(
    ("flow", "state", "n", "reason", "waits_for"),
    [
        (
            Flow(min_size=10, samples_per_insert=2, max_debt=8),
            counts(live=13, samples=1),
            3,
            "11 samples would be owed after 3 more items, above max_debt=8: an insert waits until 3 more items "
            "are sampled",
            "samples",
        ),
        (
            Flow(samples_per_insert=0.5, max_debt=1.2),
            counts(live=2),
            1,
            "1.5 samples would be owed after 1 more items, above max_debt=1.2: an insert waits until 1 more "
            "item is sampled",
            "samples",
        ),
        (
            Flow(admission="block"),
            FULL,
            4,
            "97 items are stored and 4 more would go above the capacity of 100: an insert waits until at most "
            "96 are left",
            "space",
        ),
        (
            Flow(admission="block"),
            FULL._replace(consuming=False),
            4,
            "97 items are stored and 4 more would go above the capacity of 100: an insert waits until at most "
            "96 are left; "
            "this buffer never consumes, so only empty() frees space",
            "space",
        ),
        (
            Flow(admission="raise", high_watermark=98),
            FULL,
            2,
            "97 items are stored and 2 more would go above high_watermark=98: an insert waits until at most 96 "
            "are left",
            "space",
        ),
        (
            Flow(admission="block", high_watermark=98, low_watermark=20),
            FULL,
            2,
            "97 items are stored and 2 more would go above high_watermark=98: an insert waits until at most "
            "low_watermark=20 are left",
            "space",
        ),
        (
            Flow(admission="block", low_watermark=20),
            FULL._replace(live=30, under_pressure=True),
            2,
            "30 items are stored after the capacity of 100 was reached: an insert waits until at most "
            "low_watermark=20 are "
            "left",
            "space",
        ),
        (
            Flow(admission="block", low_watermark=20),
            FULL._replace(live=30, under_pressure=True),
            90,
            "30 items are stored after the capacity of 100 was reached: an insert waits until at most 10 are left",
            "space",
        ),
        (
            Flow(admission="raise"),
            counts(evictable=False),
            101,
            "an insert of 101 items never fits: it waits until the capacity of 100 is raised",
            "nobody",
        ),
        (
            Flow(admission="block"),
            FULL,
            101,
            "an insert of 101 items never fits: it waits until the capacity of 100 is raised",
            "nobody",
        ),
    ],
)
def test_why_an_insert_waits(flow: Flow, state: Counts, n: int, reason: str, waits_for: str) -> None:
    """flow-2, flow-6, flow-10."""
    assert insert_block(flow, state, n) == (reason, waits_for)


def test_where_the_oldest_are_overwritten_any_number_of_items_has_room() -> None:
    assert insert_block(Flow(), counts(live=100), 101) is None


# ---------------------------------------------------------------------------------------------------------- deadlocks


def start(flow: Flow, capacity: int, consuming: bool) -> Counts:
    return counts(capacity=capacity, evictable=flow.admission == "overwrite", consuming=consuming)


def inserted(flow: Flow, state: Counts, n: int) -> Counts | None:
    """The state after an insert, or None where it must wait."""
    if insert_block(flow, state, n) is not None:
        return None
    live = min(state.capacity, state.live + n)
    state = state._replace(live=live, write_count=state.write_count + n)
    return state._replace(under_pressure=pressure(flow, state, 0))


def pressed_by(flow: Flow, state: Counts, n: int) -> Counts:
    """The state after an insert was refused."""
    return state._replace(under_pressure=pressure(flow, state, n))


def sampled(flow: Flow, state: Counts, n: int, distinct: bool) -> Counts | None:
    """The state after a sample, or None where it must wait; in a consuming buffer an item leaves when it is sampled."""
    if sample_block(flow, state, n, need=n if distinct else 1) is not None:
        return None
    state = state._replace(samples=state.samples + n, live=state.live - n * state.consuming)
    return state._replace(under_pressure=pressure(flow, state, 0))


def search(flow: Flow, state: Counts, batch: int, insert: int, distinct: bool) -> tuple[Counts | None, bool]:
    """Every order of inserts and samples: a state in which both wait for ever, if there is one, and was "
    "anything sampled?"""
    rate, capacity = Fraction(flow.rate_above, flow.rate_below), state.capacity
    far = 10 * batch + 3 * math.ceil(rate * capacity) + 10  # more debt than that holds nobody back

    def essence(state: Counts) -> tuple[Any, ...]:
        beyond = state.write_count - flow.min_size - state.exempt_writes
        debt = rate * max(0, beyond) - state.samples
        if flow.max_debt is None:
            debt = min(debt, Fraction(far)) if rate else Fraction(0)
        return debt, min(beyond, 0), state.live, state.under_pressure

    todo, seen, ever = deque([state]), {essence(state)}, False
    stuck = None
    while todo:
        state = todo.popleft()
        more = inserted(flow, state, insert)
        fewer = sampled(flow, state, batch, distinct)
        pressed = pressed_by(flow, state, insert) if more is None else state
        ever = ever or fewer is not None
        if more is None and fewer is None and pressed == state:
            stuck = state
        for after in (more, fewer, pressed):
            if after is not None and essence(after) not in seen:
                seen.add(essence(after))
                todo.append(after)
    return stuck, ever


@st.composite
def situations(draw: st.DrawFn) -> tuple[Flow, int, bool, bool, int, int]:
    flow = draw(FLOWS)
    capacity = draw(st.integers(1, 24))
    consuming = draw(st.booleans())
    distinct = consuming or draw(st.booleans())
    insert = draw(st.integers(1, min(8, capacity)))
    batch = draw(st.integers(1, min(10, capacity) if distinct else 10))
    if flow.high_watermark is not None and flow.high_watermark > capacity:
        low = flow.low_watermark
        flow = replace(flow, high_watermark=capacity, low_watermark=None if low is None else min(low, capacity))
    return flow, capacity, consuming, distinct, batch, insert


@settings(max_examples=400)
@given(situations())
@example((Flow(admission="block", high_watermark=80, low_watermark=20), 100, True, True, 32, 10))
@example(
    (Flow(admission="block", samples_per_insert=1, min_size=2, max_debt=9, high_watermark=16), 24, True, True, 2, 3)
)
@example((Flow(samples_per_insert=0.5, max_debt=3), 3, True, True, 3, 2))
@example((Flow(min_size=5, samples_per_insert=1.5, admission="block", low_watermark=7), 11, True, True, 3, 8))
@example((Flow(samples_per_insert=10, max_debt=100), 200, False, True, 100, 1))
@example((Flow(min_size=13, samples_per_insert=3, admission="block", low_watermark=11), 16, True, True, 8, 8))
@example((Flow(9, 1.5, admission="block", high_watermark=14, low_watermark=10), 23, True, True, 7, 1))
@example((Flow(min_size=4, samples_per_insert=1, admission="block"), 12, True, True, 6, 4))
def test_refused_is_what_deadlocks_in_some_order_and_nothing_else(
    situation: tuple[Flow, int, bool, bool, int, int],
) -> None:
    """flow-7 and its whole kind, equal to an exhaustive search over the limiter itself."""
    flow, capacity, consuming, distinct, batch, insert = situation
    state = start(flow, capacity, consuming)
    while state.write_count <= flow.min_size and flow.min_size:  # sizes are judged beyond min_size
        after = inserted(flow, state, insert)
        if after is None:
            return
        state = after
    stuck, ever = search(flow, state, batch, insert, distinct)
    said = unsatisfiable(flow, capacity, distinct, batch, insert, counts=state, deliveries=1 if consuming else None)
    if not consuming and flow.admission != "overwrite" and ever:
        return  # such a buffer stops for good once it is full, and is warned about elsewhere
    assert (said is not None) == (stuck is not None), (said, stuck)


@given(
    st.sampled_from([1, 2, 3, 0.5, 0.25, 0.1, 1.5, 1 / 3]),
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(1, 6),
    st.fractions(0, 2, max_denominator=8),
    st.integers(0, 8),
)
def test_the_debt_formula_equals_the_walk(
    rate: float, insert: int, batch: int, unit: int, short: Fraction, shift: int
) -> None:
    """flow-7: below a + b the walk has no choice, so one schedule decides; with a debt at the start that shifts it."""
    exact = Fraction(rate).limit_denominator(1000)
    insert, batch = insert * unit * exact.denominator, batch * unit
    debt = max(exact, exact * insert + batch - short * unit)
    flow = Flow(samples_per_insert=rate, max_debt=float(debt))
    state = counts(capacity=10**9, live=10**6, samples=math.floor(exact * 10**6) - min(shift, math.floor(debt)))
    said = unsatisfiable(flow, 10**9, False, batch, insert, counts=state)
    for _ in range(3 * (insert + batch) * exact.denominator * exact.numerator):
        after = inserted(flow, state, insert) or sampled(flow, state, batch, False)
        if after is None:
            assert said is not None
            return
        state = after
    assert said is None


PRODUCE_FIRST: Callable[[int], bool] = lambda step: True  # noqa: E731
CONSUME_FIRST: Callable[[int], bool] = lambda step: False  # noqa: E731


@pytest.mark.parametrize("prefer_insert", [PRODUCE_FIRST, CONSUME_FIRST, lambda step: (step * 2654435761) >> 7 & 1])
@pytest.mark.parametrize(
    ("flow", "capacity", "batch", "insert"),
    [
        (Flow(min_size=1000, samples_per_insert=8, max_debt=4096), 10**6, 256, 64),
        (Flow(min_size=1000, samples_per_insert=0.1, max_debt=600), 10**5, 256, 1000),
        (Flow(admission="block", low_watermark=64), 1024, 64, 96),
        (Flow(admission="block", high_watermark=900, low_watermark=300), 1024, 256, 96),
        (Flow(admission="block", samples_per_insert=1, min_size=200, max_debt=300), 1024, 100, 96),
        (Flow(samples_per_insert=1, max_debt=5000), 1024, 100, 96),
    ],
)
def test_what_is_not_refused_goes_on_at_full_size(
    flow: Flow, capacity: int, batch: int, insert: int, prefer_insert: Callable[[int], bool]
) -> None:
    consuming = flow.samples_per_insert is None or flow.samples_per_insert == 1
    state = start(flow, capacity, consuming)
    said = unsatisfiable(flow, capacity, consuming, batch, insert, deliveries=1 if consuming else None)
    assert said is None
    for step in range(20_000):
        moves = [inserted(flow, state, insert), sampled(flow, state, batch, consuming)]
        if moves[0] is None:
            state = pressed_by(flow, state, insert)
        after = moves[0] if (moves[0] is not None and (prefer_insert(step) or moves[1] is None)) else moves[1]
        assert after is not None, (step, state)
        state = after


def test_a_prefill_is_not_taken_for_the_size_of_all_inserts() -> None:
    """An insert that owes nothing may be large; the same size beyond min_size may not."""
    flow = Flow(min_size=1000, samples_per_insert=1, max_debt=100)
    assert unsatisfiable(flow, 10_000, False, 32, 1000) is None
    assert unsatisfiable(flow, 10_000, False, 32, 1000, counts=counts(capacity=10_000)) is None
    assert unsatisfiable(flow, 10_000, False, 32, 1000, counts=counts(capacity=10_000, live=1001)) is not None
    assert unsatisfiable(flow, 10_000, False, 32, 4, counts=counts(capacity=10_000, live=1001)) is None
    assert unsatisfiable(flow, 10_000, False, 32, 1001) is not None


@pytest.mark.parametrize(
    ("flow", "capacity", "distinct", "batch", "insert", "deliveries", "words"),
    [
        (Flow(), 100, True, 101, 0, None, "a batch of 101 distinct items never fits the capacity of 100"),
        (Flow(), 100, False, 101, 101, None, None),
        (Flow(admission="raise"), 100, False, 101, 101, None, "an insert of 101 items never fits the capacity of 100"),
        (
            Flow(admission="block", high_watermark=101),
            100,
            False,
            0,
            0,
            None,
            "high_watermark=101 is above the capacity of 100",
        ),
        (
            Flow(min_size=101, admission="block"),
            100,
            False,
            0,
            0,
            None,
            "producers stop at 100 items (a capacity of 100), before min_size=101 are written",
        ),
        (
            Flow(admission="block", high_watermark=50),
            100,
            True,
            64,
            10,
            1,
            "producers stop at 50 items (high_watermark=50) with inserts of 10, and a sample of 64 distinct "
            "items needs as "
            "many",
        ),
        (
            Flow(min_size=90, samples_per_insert=0.5, admission="block"),
            100,
            False,
            32,
            0,
            None,
            "producers stop at 100 items (a capacity of 100), which allows 5 samples: a sample of 32 could "
            "never proceed. "
            "Lower min_size, or raise the capacity",
        ),
        (
            Flow(samples_per_insert=4, max_debt=16),
            100,
            False,
            32,
            0,
            None,
            "producers stop after 4 items (max_debt=16), which allows 16 samples: a sample of 32 could never "
            "proceed. Raise "
            "max_debt=16, or lower batch_size",
        ),
        (
            Flow(samples_per_insert=10, max_debt=100),
            200,
            True,
            100,
            1,
            None,
            "producers stop after 10 items (max_debt=100) with inserts of 1, and a sample of 100 distinct "
            "items needs as many",
        ),
        (
            Flow(samples_per_insert=1, max_debt=7),
            100,
            False,
            6,
            4,
            None,
            "max_debt=7 is too small for inserts of 4 and samples of 6 at samples_per_insert=1: at 4 samples "
            "owed, a sample of "
            "6 waits for an insert, which would leave 8 owed. Raise max_debt to at least 8",
        ),
        (
            Flow(admission="block", samples_per_insert=1),
            100,
            True,
            6,
            4,
            2,
            "samples_per_insert=1 is less than the 2 samples after which an item leaves: the buffer fills up",
        ),
        (
            Flow(samples_per_insert=3, max_debt=100),
            100,
            True,
            6,
            4,
            2,
            "samples_per_insert=3 is more than the 2 samples after which an item leaves: the debt grows beyond "
            "max_debt=100",
        ),
        (
            Flow(admission="block"),
            11,
            True,
            8,
            8,
            1,
            None,
        ),
        (
            Flow(admission="block"),
            9,
            True,
            7,
            4,
            1,
            "inserts of 4 and samples of 7 come to rest at 6 items, where a capacity of 9 hold",
        ),
        (
            Flow(admission="block", high_watermark=80, low_watermark=10),
            100,
            True,
            32,
            10,
            1,
            "come to rest at 16 items, where high_watermark=80 and low_watermark=10 hold",
        ),
        (
            Flow(samples_per_insert=1, max_debt=100),
            10,
            True,
            10,
            3,
            1,
            "evicted items leave their debt behind, so max_debt=100 can stop producers while only 9 items are left",
        ),
        (
            Flow(admission="block", samples_per_insert=2, min_size=16),
            18,
            True,
            2,
            17,
            1,
            "at 17 items written producers wait until at most 1 are left, and samples_per_insert=2 with "
            "min_size=16 holds "
            "samples of 2 back at 15",
        ),
    ],
)
def test_why_sizes_are_refused(
    flow: Flow, capacity: int, distinct: bool, batch: int, insert: int, deliveries: int | None, words: str | None
) -> None:
    """flow-6, flow-7."""
    said = unsatisfiable(flow, capacity, distinct, batch, insert, deliveries=deliveries)
    if words is None:
        assert said is None
    else:
        assert said is not None
        assert words in said
