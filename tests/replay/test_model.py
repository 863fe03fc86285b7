"""Every sampler × storage × {prefetch, consumption, ratio} against a buffer in plain Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_model import PlainModel

from millpond import Flow
from millpond.core.errors import NotReady
from millpond.replay import ConsumingSampler, PrioritizedSampler, RandomSampler, ReplayBuffer, SamplerWithoutReplacement

CAPACITY = 13
SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "prioritized": PrioritizedSampler,
    "fifo 1": lambda: ConsumingSampler(1),
    "fifo 3": lambda: ConsumingSampler(3),
}
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.integers(1, CAPACITY)),
        st.tuples(st.just("sample"), st.integers(1, 6)),
        st.tuples(st.just("empty"), st.just(0)),
        st.tuples(st.just("sample"), st.just(4)),
    ),
    max_size=25,
)


@pytest.fixture(params=[False, True], ids=["private", "shared"])
def shared(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def cases() -> Iterator[Any]:
    for name in SAMPLERS:
        for deliveries in (None, 1, 3):
            if name.startswith("fifo") and deliveries is not None:
                continue
            for ratio in (None, 2.0):
                for prefetch in (0, 2):
                    words = [name] + [f"consume {deliveries}"] * (deliveries is not None)
                    words += [f"ratio {ratio}"] * (ratio is not None) + [f"prefetch {prefetch}"] * bool(prefetch)
                    yield pytest.param(name, deliveries, ratio, prefetch, id=", ".join(words))


@pytest.mark.parametrize(("name", "deliveries", "ratio", "prefetch"), list(cases()))
def test_it_does_what_a_plain_buffer_does(
    name: str, deliveries: int | None, ratio: float | None, prefetch: int, shared: bool
) -> None:
    """Contents, counters, and what may be sampled next, after any sequence of operations."""

    @settings(max_examples=12 if shared else 25, deadline=None, derandomize=True, database=None)
    @given(OPERATIONS)
    def run(operations: list[tuple[str, int]]) -> None:
        sampler = SAMPLERS[name]()
        eats = sampler.n if isinstance(sampler, ConsumingSampler) else deliveries
        flow = Flow(min_size=3, samples_per_insert=ratio)
        rb = ReplayBuffer(
            CAPACITY,
            sampler=sampler,
            flow=flow,
            prefetch=prefetch,
            consume_after_n_samples=deliveries,
            shared=shared,
            seed=0,
        )
        model = PlainModel(CAPACITY, eats, ratio, 3, eats is not None or not sampler.replacement, prefetch)
        try:
            for operation, n in operations:
                STEPS[operation](rb, model, n)
                compare(rb, model)
        finally:
            rb.close()

    run()


def extend(rb: ReplayBuffer, model: PlainModel, n: int) -> None:
    slots = rb.extend({"number": torch.arange(model.written, model.written + n)})
    model.extend(n)
    assert len(set(slots.tolist())) == n


def empty(rb: ReplayBuffer, model: PlainModel, n: int) -> None:
    rb.empty()
    model.live.clear()
    model.ahead.clear()


def sample(rb: ReplayBuffer, model: PlainModel, n: int) -> None:
    epochs = isinstance(rb.sampler, SamplerWithoutReplacement)
    if epochs and model.ahead:
        sample_from_an_epoch(rb, model, n)
        return
    if model.deliveries is None:
        while model.ahead and len(model.ahead[0]) != n:  # drawn ahead for another size: given back
            model.ahead.pop(0)
    drawn = [number for batch in model.ahead for number in batch]
    missing = n - len(drawn)
    if model.ahead and missing > 0 and not model.ready(missing):
        with pytest.raises(NotReady):
            rb.sample(n)
        return
    if model.ahead:
        batch = rb.sample(n)
        numbers = batch["number"].tolist()
        assert numbers[: len(drawn)] == drawn[:n]
        if missing > 0:
            model.take(numbers[len(drawn) :])
        model.returns(numbers)
        model.serve(n)
    elif model.ready(n):
        batch = rb.sample(n)
        numbers = batch["number"].tolist()
        assert len(numbers) == n or (epochs and 0 < len(numbers) < n)
        assert numbers == batch["generation"].tolist()
        if isinstance(rb.sampler, ConsumingSampler):
            by_age = list(model.live.items())
            least_first = sorted(by_age, key=lambda item: item[1])  # stable: the oldest first among equals
            assert numbers == [number for number, _ in least_first[:n]]
        model.take(numbers)
        model.returns(numbers)
    else:
        with pytest.raises(NotReady):
            rb.sample(n)
        return
    refill(rb, model, n)


def sample_from_an_epoch(rb: ReplayBuffer, model: PlainModel, n: int) -> None:
    """What is ahead was taken from the epoch: it is never given back. The epoch's last batch may be smaller."""
    first = next(iter(rb._local.ahead)).asked
    drawn = [number for batch in model.ahead for number in batch]
    if first == n:
        drawn, missing = model.ahead[0], 0
    else:
        drawn = drawn[:n]
        missing = 0 if rb._local.updater.epoch_over(n) else n - len(drawn)
    if missing and not model.ready(missing):
        with pytest.raises(NotReady):
            rb.sample(n)
        return
    numbers = rb.sample(n)["number"].tolist()
    assert numbers[: len(drawn)] == drawn
    assert len(numbers) <= len(drawn) + missing
    if missing:
        model.take(numbers[len(drawn) :])
    model.returns(numbers)
    if first == n:
        model.ahead.pop(0)
    else:
        model.serve(len(drawn))
    refill(rb, model, n)


def refill(rb: ReplayBuffer, model: PlainModel, n: int) -> None:
    """Whatever was drawn ahead now must have been possible, and nothing possible was left out."""
    for taken in list(rb._local.ahead)[len(model.ahead) :]:
        drawn = taken.numbers.tolist()
        assert model.ready(n)
        model.take(drawn)
        model.ahead.append(drawn)
    over = rb._local.updater.epoch_over(n)  # nothing of the next epoch is drawn ahead
    assert len(model.ahead) == model.prefetch or over or not model.ready(n)


STEPS = {"extend": extend, "sample": sample, "empty": empty}


def compare(rb: ReplayBuffer, model: PlainModel) -> None:
    stats = rb.stats()
    assert {key: stats[key] for key in model.figures()} == model.figures()
    if model.live:
        assert rb[:]["number"].tolist() == list(model.live)
    for n in (1, 4, CAPACITY):
        if isinstance(rb.sampler, SamplerWithoutReplacement) and model.ahead:
            missing = n - sum(map(len, model.ahead))
            enough = next(iter(rb._local.ahead)).asked == n or rb._local.updater.epoch_over(n)
            expected = enough or missing <= 0 or model.ready(missing)
        else:
            expected = model.could_sample(n)
        assert rb.can_sample(n) == expected, n
