from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.core.errors import InvalidArgument, InvalidType
from millpond.envs.streams import Streams

seeds = st.integers(0, 2**33) | st.integers(2**64 - 10_000, 2**64 - 100) | st.integers(0, 2**63)


def numpy_streams(seed: int, num_envs: int) -> list[np.random.Generator]:
    return [np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed + i))) for i in range(num_envs)]


@settings(max_examples=40)
@given(
    seed=seeds,
    draws=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30), st.booleans()), min_size=1, max_size=4),
    data=st.data(),
)
def test_each_environment_has_the_stream_that_gymnasium_gives_it(seed: int, draws: Any, data: Any) -> None:
    """Few environments and many take different ways, and must leave the streams in the same states."""
    streams, expected = Streams(40), numpy_streams(seed, 40)
    streams.seed(seed, np.arange(40))
    for how_many, count, normal in draws:
        chosen = data.draw(st.sets(st.integers(0, 39), min_size=how_many, max_size=how_many))
        ids = np.array(sorted(chosen))
        if normal:
            wanted = [expected[i].standard_normal(count) for i in ids]
            np.testing.assert_array_equal(streams.normal(ids, count), wanted)
        else:
            wanted = [expected[i].uniform(-0.3, 0.7, count) for i in ids]
            np.testing.assert_array_equal(streams.uniform(ids, -0.3, 0.7, count), wanted)


def test_bounds_may_differ_between_the_numbers_of_one_draw() -> None:
    low, high = np.array([-0.3, -0.2]), np.array([0.0, 0.2])
    streams, expected = Streams(20), numpy_streams(5, 20)
    streams.seed(5, np.arange(20))
    drawn = streams.uniform(np.arange(20), low, high, 2)
    np.testing.assert_array_equal(drawn, [one.uniform(low, high) for one in expected])


def test_more_environments_than_are_drawn_at_once() -> None:
    streams, ids = Streams(10_000), np.arange(10_000)
    streams.seed(1, ids)
    drawn = streams.uniform(ids, 0, 1, 3)
    for i in (0, 4095, 4096, 9_999):
        np.testing.assert_array_equal(drawn[i], np.random.Generator(np.random.PCG64(1 + i)).random(3))


def test_a_list_seeds_only_where_it_names_a_seed() -> None:
    streams = Streams(3)
    before = streams.state.copy()
    streams.seed([7, None, 9], np.arange(3))
    assert (streams.state[1] == before[1]).all()
    drawn = streams.uniform(np.array([0, 2]), 0, 1, 4)
    np.testing.assert_array_equal(drawn, [np.random.Generator(np.random.PCG64(seed)).random(4) for seed in (7, 9)])


def test_unseeded_streams_differ_from_each_other_and_from_run_to_run() -> None:
    first, second = (Streams(100).uniform(np.arange(100), 0, 1, 1) for _ in range(2))
    assert len(np.unique(np.concatenate((first, second)))) == 200


@pytest.mark.parametrize("seed", [-1, 2**64 - 1, 2**200, [1, 2], [1, -2, 3]])
def test_a_seed_out_of_range_changes_nothing(seed: Any) -> None:
    streams = Streams(3)
    before = streams.state.copy()
    with pytest.raises(InvalidArgument):
        streams.seed(seed, np.arange(3))
    assert (streams.state == before).all()


@pytest.mark.parametrize("seed", [1.5, True, [1, 2.5, 3]])
def test_a_seed_is_an_int(seed: Any) -> None:
    with pytest.raises(InvalidType):
        Streams(3).seed(seed, np.arange(3))
