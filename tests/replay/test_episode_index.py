"""Which item follows which, against a list that is searched from end to end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from millpond.replay.samplers.episode_index import EpisodeIndex, EpisodeStats
from millpond.replay.samplers.protocol import Bools, Floats, Ints


@dataclass(frozen=True)
class Item:
    number: int
    slot: int
    episode: int
    step: int
    done: bool


@dataclass
class Model:
    """Items, some of which may have been consumed, and an index that looks at them now and then.

    They lie in a ring, or (``pool``) in whatever slots are free.
    """

    capacity: int
    ids: bool
    pool: bool = False
    index: EpisodeIndex = field(init=False)
    written: list[Item] = field(default_factory=list)
    consumed: set[int] = field(default_factory=set)
    seen: int = 0
    stream: int = 0

    def __post_init__(self) -> None:
        self.index = EpisodeIndex(self.capacity)

    def write(self, steps: list[tuple[int, int, bool]]) -> None:
        free = sorted(set(range(self.capacity)) - {item.slot for item in self.live})
        for episode, step, done in steps:
            number = len(self.written)
            slot = free.pop(number % len(free)) if self.pool else number % self.capacity
            if not self.ids:  # one stream: an episode is what lies between two ends
                episode, step = self.stream, number
                self.stream += done
            self.written.append(Item(number, slot, episode, step, done))

    def look(self) -> None:
        new = [item for item in self.live if item.number >= self.seen]
        self.index.append(
            np.array([item.number for item in new], np.int64),
            np.array([item.slot for item in new], np.int64),
            np.array([item.episode for item in new], np.int64) if self.ids else None,
            np.array([item.step for item in new], np.int64) if self.ids else None,
            np.array([item.done for item in new], np.bool_),
        )
        self.seen = len(self.written)

    @property
    def live(self) -> list[Item]:
        recent = self.written if self.pool else self.written[-self.capacity :]
        return [item for item in recent if item.number not in self.consumed]

    def alive(self, slots: Ints, numbers: Ints) -> Bools:
        there = np.full(self.capacity, -1)
        for item in self.live:
            there[item.slot] = item.number
        live: Bools = (numbers >= 0) & (there[slots] == numbers)
        return live

    def window(self, item: Item, steps: int) -> list[Item]:
        """What `follow` should give."""
        by_step, found = {(i.episode, i.step): i for i in self.live}, [item]
        while len(found) < steps and not found[-1].done:
            following = by_step.get((found[-1].episode, found[-1].step + 1))
            if following is None:
                break
            found.append(following)
        return found


class Recorded:
    """Random numbers that a test has chosen."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)

    def uniform(self, n: int) -> Floats:
        return self.generator.random(n)

    def below(self, n: int, bound: int) -> Ints:
        return self.generator.integers(0, bound, n)


def columns(items: list[Item]) -> tuple[Ints, Ints]:
    return np.array([i.slot for i in items], np.int64), np.array([i.number for i in items], np.int64)


def check(model: Model, length: int, seed: int) -> None:
    """Everything that the index says is what a search says."""
    index, live = model.index, model.live
    slots, numbers = columns(live)
    windows = [model.window(item, length) for item in live]

    got, members, lengths = index.follow(slots, numbers, length, model.alive)
    assert lengths.tolist() == [len(window) for window in windows]
    for row, window in enumerate(windows):
        padded = window + [window[-1]] * (length - len(window))
        assert list(zip(got[row].tolist(), members[row].tolist(), strict=True)) == [(i.slot, i.number) for i in padded]
        assert len({i.episode for i in window}) == 1  # ring-2, ring-3
        assert not any(i.done for i in window[:-1])

    starts, their_numbers, stubs = index.starts(length, model.alive)
    whole = [window for window in windows if len(window) == length]
    assert sorted(their_numbers.tolist()) == [window[0].number for window in whole]
    assert {(s, n) for s, n in zip(starts.tolist(), their_numbers.tolist(), strict=True)} <= {
        (i.slot, i.number) for i in live
    }
    assert stubs == len(live) - len({item for window in whole for item in window})  # ring-4

    later, later_numbers = index.later(slots, numbers, model.alive, Recorded(seed))
    by_number = {item.number: item for item in live}
    for item, slot, number in zip(live, later.tolist(), later_numbers.tolist(), strict=True):
        goal = by_number[number]
        assert goal.slot == slot
        assert (goal.episode, goal.step >= item.step) == (item.episode, True)  # ring-6

    assert index.episodes(model.alive) == statistics(model)


def statistics(model: Model) -> EpisodeStats:
    live = Counter(item.episode for item in model.live)
    if not live:
        return EpisodeStats(0, 0, 0, 0, 0.0)
    counts = list(live.values())
    complete = 0
    for episode, n in live.items():
        everything = [item for item in model.written if item.episode == episode]
        complete += any(item.done for item in everything) and len(everything) == n
    return EpisodeStats(len(live), complete, min(counts), max(counts), sum(counts) / len(counts))


def episodes(lengths: Iterator[int] | list[int], first: int = 0, stride: int = 1) -> Iterator[tuple[int, int, bool]]:
    """The steps of one environment, of which each episode ends after so many."""
    for k, length in enumerate(lengths):
        for step in range(length):
            yield first + stride * k, step, step == length - 1


@st.composite
def rollouts(draw: st.DrawFn) -> list[list[tuple[int, int, bool]]]:
    """What several writers hand in, one list for each write: ``[envs * time]``, either one first, in turns."""
    envs = draw(st.integers(1, 4))
    worlds = [
        episodes(draw(st.lists(st.integers(1, 9), min_size=12, max_size=12)), first=env, stride=envs)
        for env in range(envs)
    ]
    writes = []
    for _ in range(draw(st.integers(1, 8))):
        chosen = draw(st.lists(st.sampled_from(range(envs)), min_size=1, max_size=envs, unique=True))
        time = draw(st.integers(1, 5))
        rollout = [[next(worlds[env], None) for _ in range(time)] for env in chosen]
        if draw(st.booleans()):
            rollout = [list(column) for column in zip(*rollout, strict=True)]
        writes.append([step for row in rollout for step in row if step is not None])
    return writes


@given(rollouts(), st.integers(1, 30), st.integers(1, 6), st.integers(0, 2**32), st.lists(st.booleans(), min_size=8))
@example([[(0, 0, False)], [(0, 1, True)]], 1, 1, 0, [True] * 8)
def test_interleaved_writers_in_a_ring_equal_a_search(
    writes: list[list[tuple[int, int, bool]]], capacity: int, length: int, seed: int, looks: list[bool]
) -> None:
    """ring-2 … ring-6: any number of environments, any capacity, stubs, wrap-around; whenever one looks."""
    model = Model(capacity, ids=True)
    for write, look in zip(writes, looks, strict=False):
        for start in range(0, len(write), capacity):
            model.write(write[start : start + capacity])
        if look:
            model.look()
            check(model, length, seed)
    model.look()
    check(model, length, seed)


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 30), st.integers(1, 6), st.lists(st.integers(1, 9)))
def test_a_stream_without_ids_equals_a_search(
    lengths: list[int], capacity: int, length: int, chunks: list[int]
) -> None:
    """Consecutive numbers are consecutive steps, and done ends an episode."""
    model, steps = Model(capacity, ids=False), list(episodes(lengths))
    while steps:
        chunk = min(capacity, chunks.pop() if chunks else len(steps))  # what nobody saw has a test of its own
        model.write(steps[:chunk])
        del steps[:chunk]
        model.look()
        check(model, length, 3)


@given(rollouts(), st.integers(5, 30), st.integers(1, 6), st.booleans(), st.data())
def test_items_that_left_from_the_middle_end_a_window(
    writes: list[list[tuple[int, int, bool]]], capacity: int, length: int, pool: bool, data: st.DataObject
) -> None:
    """Consumption in any order: a window stops before what is gone, also where another item has its slot."""
    model = Model(capacity, ids=True, pool=pool)
    for step in [step for write in writes for step in write]:
        if len(model.live) == capacity or data.draw(st.booleans()):
            numbers = [item.number for item in model.live]
            model.consumed |= set(
                data.draw(st.lists(st.sampled_from(numbers), min_size=1, max_size=6)) if numbers else []
            )
        model.write([step])
        model.look()
    check(model, length, 5)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 6), st.data())
def test_steps_that_arrive_in_any_order_are_linked_whenever_one_looks(
    lengths: list[int], length: int, data: st.DataObject
) -> None:
    """A data set that was shuffled before it was inserted."""
    steps = data.draw(st.permutations(list(episodes(lengths))))
    model = Model(64, ids=True)
    while steps:
        chunk = data.draw(st.integers(1, len(steps)))
        model.write(steps[:chunk])
        steps = steps[chunk:]
        model.look()
    check(model, length, 1)


def test_three_steps_two_environments_and_a_capacity_that_fits_neither() -> None:
    """ring-5."""
    model, worlds = Model(17, ids=True), [episodes([5, 7, 4] * 4, env, 2) for env in range(2)]
    for _ in range(12):
        model.write([next(world) for world in worlds for _ in range(3)])
        model.look()
        check(model, 3, 0)


def test_a_stub_is_counted_and_not_given_out() -> None:
    """ring-4: of the episodes of 6 and 7 steps, the ring holds the last 2 and all 7."""
    model = Model(9, ids=True)
    model.write(list(episodes([6, 7])))
    model.look()
    _, numbers, stubs = model.index.starts(4, model.alive)
    assert sorted(numbers.tolist()) == [6, 7, 8, 9]
    assert stubs == 2


def test_goals_of_long_episodes_in_a_small_ring() -> None:
    """ring-6: capacity 15, episodes of 10 and 20; each later step is as likely as any other."""
    model = Model(15, ids=True)
    for step in episodes([10, 20]):
        model.write([step])
        model.look()
        check(model, 4, 0)
    slots, numbers = columns([model.live[5]] * 20_000)
    _, later = model.index.later(slots, numbers, model.alive, Recorded(7))
    counts = Counter(later.tolist())
    assert sorted(counts) == [item.number for item in model.live[5:]]
    expected = 20_000 / 10
    assert sum((n - expected) ** 2 / expected for n in counts.values()) < 27.9  # p = 0.001, 9 degrees of freedom


def test_goals_are_uniform_over_what_is_left_of_an_episode() -> None:
    model = Model(400, ids=True)
    model.write(list(episodes([300])))
    model.look()
    model.consumed |= set(range(300)) - {4, 10, 200, 299}
    slots, numbers = columns([model.written[4]] * 8000)
    _, later = model.index.later(slots, numbers, model.alive, Recorded(3))
    counts = Counter(later.tolist())
    assert sorted(counts) == [4, 10, 200, 299]
    assert sum((n - 2000) ** 2 / 2000 for n in counts.values()) < 16.3  # p = 0.001, 3 degrees of freedom


def test_an_item_that_is_gone_has_no_window_and_is_its_own_goal() -> None:
    model = Model(5, ids=True)
    model.write(list(episodes([4, 4])))
    model.look()
    gone = columns(model.written[:3])
    window, members, lengths = model.index.follow(*gone, 3, model.alive)
    assert lengths.tolist() == [0, 0, 0]
    assert window.T.tolist() == [gone[0].tolist()] * 3
    assert members.T.tolist() == [gone[1].tolist()] * 3
    later, its_numbers = model.index.later(*gone, model.alive, Recorded(0))
    assert (later.tolist(), its_numbers.tolist()) == (gone[0].tolist(), gone[1].tolist())


def test_a_window_grows_with_an_episode_that_is_longer_than_a_rollout() -> None:
    """ring-7: 104 steps, of which the first rollout brings 100."""
    model, steps = Model(1000, ids=True), list(episodes([104]))
    model.write(steps[:100])
    model.look()
    at = columns([model.written[98]])
    assert model.index.follow(*at, 10, model.alive)[2].tolist() == [2]
    assert model.index.starts(104, model.alive)[2] == 100
    assert model.index.episodes(model.alive) == EpisodeStats(1, 0, 100, 100, 100.0)
    model.write(steps[100:])
    model.look()
    assert model.index.follow(*at, 10, model.alive)[2].tolist() == [6]
    assert model.index.starts(104, model.alive)[1].tolist() == [0]
    assert model.index.episodes(model.alive) == EpisodeStats(1, 1, 104, 104, 104.0)


def test_what_was_missed_between_two_looks_is_a_gap() -> None:
    """Without ids: nobody knows whether an episode ended among the items that nobody saw."""
    model = Model(4, ids=False)
    model.write([(0, 0, True)])
    model.look()
    model.write([*[(0, 0, False)] * 9, (0, 0, True)])
    model.look()
    lengths = model.index.follow(*columns(model.live), 4, model.alive)[2]
    assert lengths.tolist() == [4, 3, 2, 1]
    assert model.index.episodes(model.alive) == EpisodeStats(1, 0, 4, 4, 4.0)


def test_what_was_consumed_before_the_first_look_is_a_gap() -> None:
    model = Model(10, ids=False)
    model.write(list(episodes([3, 3])))
    model.consumed |= {3}
    model.look()
    assert model.index.follow(*columns(model.live), 4, model.alive)[2].tolist() == [3, 2, 1, 2, 1]
    assert model.index.episodes(model.alive) == EpisodeStats(2, 1, 2, 3, 2.5)


def test_another_item_in_the_slot_of_the_next_step_is_not_the_next_step() -> None:
    model = Model(3, ids=True, pool=True)
    model.write(list(episodes([3])))
    model.look()
    model.consumed |= {1}
    model.write([(9, 0, False)])
    model.look()
    assert model.written[3].slot == model.written[1].slot
    check(model, 2, 0)
    assert len(model.index.starts(2, model.alive)[0]) == 0


def test_what_was_written_since_the_last_look_is_not_known_yet() -> None:
    """An item that is live but new ends a window, and has none: nothing is read from what its slot held before."""
    model = Model(4, ids=True)
    model.write(list(episodes([4])))
    model.look()
    model.write([(1, 0, False), (1, 1, False)])
    lengths = model.index.follow(*columns(model.live), 4, model.alive)[2]
    assert lengths.tolist() == [2, 1, 0, 0]
    new = columns(model.live[2:])
    later, its_numbers = model.index.later(*new, model.alive, Recorded(0))
    assert (later.tolist(), its_numbers.tolist()) == (new[0].tolist(), new[1].tolist())


@pytest.mark.parametrize("looks", [(), (1,), (2,), (1, 2)])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 3, 0, 1), (3, 2, 1, 0)])
def test_nothing_follows_an_item_that_is_done(order: tuple[int, ...], looks: tuple[int, ...]) -> None:
    """ring-3: also where a writer goes on with the same id and the next step."""
    model, steps = Model(10, ids=True), [(7, 0, False), (7, 1, True), (7, 2, False), (7, 3, False)]
    for k, which in enumerate(order):
        if k in looks:
            model.look()
        model.write([steps[which]])
    model.look()
    _, _, lengths = model.index.follow(*columns(sorted(model.live, key=lambda item: item.step)), 4, model.alive)
    assert lengths.tolist() == [2, 1, 2, 1]
    assert model.index.starts(3, model.alive)[2] == 4


def test_hundreds_of_laps_stay_exact_and_bounded() -> None:
    """mem-1: what was overwritten is forgotten, also where its episode never ended."""
    capacity, envs, index = 257, 5, EpisodeIndex(257)
    worlds = [episodes([3, 50, 1, 20] * 400, env, envs) for env in range(envs)]
    model = Model(capacity, ids=True)
    for lap in range(400):
        model.write([next(world) for world in worlds for _ in range(13)])
        model.look()
        if lap % 40 == 39:
            check(model, 4, lap)
    for k in range(20_000):  # each episode has one step, and no end
        index.append(np.array([k]), np.array([k % capacity]), np.array([k]), np.array([0]), np.array([False]))
    for grown in (model.index, index):
        assert len(grown._places._table) <= 16 * capacity
        assert len(grown._spans) <= 1024 + 2 * capacity


def test_ids_may_be_any_integers() -> None:
    model = Model(50, ids=True)
    ids = [-(2**63), 2**63 - 1, -1, 0, 2**40]
    model.write([(ids[k % 5], step, step == 3) for step in range(4) for k in range(5)])
    model.look()
    check(model, 3, 0)


def test_nothing_written_is_nothing_known() -> None:
    model = Model(8, ids=True)
    model.look()
    slots, numbers, stubs = model.index.starts(3, model.alive)
    assert (len(slots), len(numbers), stubs) == (0, 0, 0)
    assert model.index.episodes(model.alive) == EpisodeStats(0, 0, 0, 0, 0.0)
    empty = np.empty(0, np.int64)
    assert model.index.follow(empty, empty, 3, model.alive)[0].shape == (0, 3)
    assert len(model.index.later(empty, empty, model.alive, Recorded(0))[0]) == 0


def test_callers_arrays_are_left_alone() -> None:
    """ring-8."""
    index, numbers = EpisodeIndex(10), np.arange(6)
    arguments = (numbers, numbers + 4, numbers % 2, numbers // 2, np.zeros(6, np.bool_))
    before = [a.copy() for a in arguments]
    index.append(*arguments)
    index.follow(numbers, numbers, 3, lambda s, n: np.ones(len(s), np.bool_))
    index.later(numbers, numbers, lambda s, n: np.ones(len(s), np.bool_), Recorded(0))
    for a, b in zip(arguments, before, strict=True):
        np.testing.assert_array_equal(a, b)
