"""The one place that knows where episodes end.

Each process that needs it derives the index from the rows, a little with every look, and keeps it to itself: no death
can harm it, and nothing has to be shared. What left the buffer is recognised by its number.

Where items carry ``episode_id`` and ``step``, an item is followed by the one of its episode with the next step, however
writers interleave them. Without these, items written one after the other are one stream of steps, which is cut where an
episode ends, and where items are missing. Nothing follows an item that is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from millpond.replay.drawing import Bools, Ints, Randomness

Alive = Callable[[Ints, Ints], Bools]


class EpisodeStats(NamedTuple):
    """Episodes of which at least one item is live."""

    episodes: int
    complete: int  # from the first step to the last, all of their items are live
    shortest: int  # live items of the episode that has the fewest
    longest: int
    mean: float


class SequenceIndex:
    """Which item follows which, for one process. ``capacity`` is the buffer's."""

    def __init__(self, capacity: int) -> None:
        self._number = np.full(capacity, -1)  # of the item that was seen last in a slot; -1: none
        self._next_slot, self._next_number = np.full(capacity, -1), np.full(capacity, -1)
        self._episode, self._step = np.zeros(capacity, np.int64), np.zeros(capacity, np.int64)
        self._done, self._begins = np.zeros(capacity, np.bool_), np.zeros(capacity, np.bool_)
        self._places = _Places(self._episode, self._step)
        self._last_step: dict[int, int] = {}  # by episode
        self._forget_at = 1024
        # Without episode ids: the episode and the number of the next item, and whether that is a beginning.
        self._stream, self._expected, self._fresh = 0, 0, True

    def append(self, numbers: Ints, slots: Ints, episode: Ints | None, step: Ints | None, done: Bools) -> None:
        """Take in newly written items, int64 ``[n]`` and bool ``[n]``, in the order of their numbers.

        ``episode`` must differ between episodes, also between those of different writers; ``step`` counts from 0.
        """
        if not len(numbers):
            return
        if episode is None or step is None:
            episode, step, begins = self._cut_stream(numbers, done)
        else:
            order = np.lexsort((step, episode))
            numbers, slots, episode, step, done = numbers[order], slots[order], episode[order], step[order], done[order]
            begins = step == 0
        self._number[slots], self._next_slot[slots] = numbers, -1
        self._episode[slots], self._step[slots] = episode, step
        self._done[slots], self._begins[slots] = done, begins
        self._places.put(slots, self._number)
        follows = (episode[1:] == episode[:-1]) & (step[1:] == step[:-1] + 1) & ~done[:-1]
        self._link(slots[:-1][follows], slots[1:][follows])
        alone = ~np.concatenate([[False], follows, [False]])
        heads = np.flatnonzero(alone[:-1] & ~begins)
        before = self._places.find(episode[heads], step[heads] - 1)
        joins = (before >= 0) & ~self._done[before]
        self._link(before[joins], slots[heads[joins]])
        if self._note_last_steps(episode, step):
            tails = np.flatnonzero(alone[1:] & ~done)
            after = self._places.find(episode[tails], step[tails] + 1)
            self._link(slots[tails[after >= 0]], after[after >= 0])

    def _cut_stream(self, numbers: Ints, done: Bools) -> tuple[Ints, Ints, Bools]:
        """Episodes, steps, and whether an episode surely begins here, for items that do not say."""
        gap = np.concatenate([[numbers[0] != self._expected], np.diff(numbers) != 1])
        ended = np.concatenate([[False], done[:-1]])
        episode: Ints = self._stream + np.cumsum(gap | ended)
        begins: Bools = ended & ~gap
        begins[0] = not gap[0] and self._fresh
        self._stream, self._expected = int(episode[-1]) + int(done[-1]), int(numbers[-1]) + 1
        self._fresh = bool(done[-1])
        return episode, numbers, begins

    def _link(self, slots: Ints, after: Ints) -> None:
        self._next_slot[slots] = after
        self._next_number[slots] = self._number[after]

    def _note_last_steps(self, episode: Ints, step: Ints) -> bool:
        """True where a step may have been written before the one that precedes it. The arrays are sorted."""
        edge = np.flatnonzero(np.diff(episode) != 0)
        firsts, lasts = np.append(0, edge + 1), np.append(edge, len(episode) - 1)
        known, late = self._last_step, False
        for name, first, last in zip(
            episode[firsts].tolist(), step[firsts].tolist(), step[lasts].tolist(), strict=True
        ):
            before = known.get(name)
            if before is None or before < last:
                known[name] = last
            late = late or (before is not None and first <= before)
        if len(known) > self._forget_at:
            there = set(self._episode[self._number >= 0].tolist())
            self._last_step = {name: at for name, at in known.items() if name in there}
            self._forget_at = 1024 + 2 * len(self._last_step)
        return late

    def _known(self, slots: Ints, numbers: Ints, alive: Alive) -> Bools:
        known: Bools = (numbers >= 0) & (self._number[slots] == numbers)
        return known & alive(slots, numbers)

    def follow(self, slots: Ints, numbers: Ints, steps: int, alive: Alive) -> tuple[Ints, Ints, Ints]:
        """The windows of up to ``steps`` items that begin at the given ones.

        Returns slots and numbers ``[n, steps]`` and lengths ``[n]``: a window ends with its episode, or where the next
        item is not, or no longer, there. Behind its end it repeats its last item. An item that is gone has length 0.
        """
        n = len(slots)
        window, members = np.empty((n, steps), np.int64), np.empty((n, steps), np.int64)
        going = self._known(slots, numbers, alive)
        lengths = going.astype(np.int64)
        window[:, 0], members[:, 0] = slots, numbers
        for j in range(1, steps):
            slots, numbers = window[:, j - 1], members[:, j - 1]
            after, its_number = self._next_slot[slots], self._next_number[slots]
            going = going & (after >= 0) & self._known(after, its_number, alive)
            window[:, j] = np.where(going, after, slots)
            members[:, j] = np.where(going, its_number, numbers)
            lengths += going
        return window, members, lengths

    def starts(self, length: int, alive: Alive) -> tuple[Ints, Ints, int]:
        """Slots and numbers of all items from which a slice of ``length`` can go on, and how many live items are in
        none."""
        slots, numbers = self._live(alive)
        after = self._successors(slots)
        nowhere = len(slots)
        there: NDArray[np.int32] = np.arange(nowhere + 1, dtype=np.int32)
        jump, left = after, length - 1
        while left:  # the item that is ``length - 1`` steps on, by doubling
            if left & 1:
                there = jump[there]
            left >>= 1
            if left:
                jump = jump[jump]
        whole = there[:-1] < nowhere
        first = np.ones(nowhere + 1, np.bool_)
        first[after] = False
        stub: NDArray[np.int32] = np.flatnonzero(first[:-1] & ~whole).astype(np.int32)
        stubs = 0
        while len(stub):  # at most ``length - 1`` times
            stubs += len(stub)
            stub = after[stub]
            stub = stub[stub < nowhere]
        return slots[whole], numbers[whole], stubs

    def _live(self, alive: Alive) -> tuple[Ints, Ints]:
        slots = np.flatnonzero(self._number >= 0)
        mask = alive(slots, self._number[slots])
        return slots[mask], self._number[slots[mask]]

    def _successors(self, slots: Ints) -> NDArray[np.int32]:
        """For each of the live ``slots`` the position among them of the item that follows; n for none. ``[n + 1]``."""
        n = len(slots)
        position = np.full(len(self._number), n, np.int32)
        position[slots] = np.arange(n, dtype=np.int32)
        after = self._next_slot[slots]
        same = (after >= 0) & (self._number[after] == self._next_number[slots])
        return np.append(np.where(same, position[after], np.int32(n)), np.int32(n))

    def future(self, slots: Ints, numbers: Ints, alive: Alive, random: Randomness) -> tuple[Ints, Ints]:
        """For each item one of its episode, uniformly over it and the later ones that are live.

        An item that is gone gives itself.
        """
        found, todo = slots.copy(), np.flatnonzero(self._known(slots, numbers, alive))
        names, steps = self._episode[slots], self._step[slots]
        spans = np.ones(len(slots), np.int64)
        lasts = [self._last_step[name] for name in names[todo].tolist()]
        spans[todo] += np.array(lasts, np.int64) - steps[todo]
        for _ in range(8):
            later = steps[todo] + (random.uniform(len(todo)) * spans[todo]).astype(np.int64)
            picked = self._places.find(names[todo], later)
            there = (picked >= 0) & alive(picked, self._number[picked])
            found[todo[there]] = picked[there]
            todo = todo[~there]
            if not len(todo):
                break
        for i, share in zip(todo.tolist(), random.uniform(len(todo)).tolist(), strict=True):  # few are left of many
            later = np.arange(steps[i], steps[i] + spans[i])
            picked = self._places.find(np.full(len(later), names[i]), later)
            picked = picked[(picked >= 0) & alive(picked, self._number[picked])]
            if len(picked):
                found[i] = picked[int(share * len(picked))]
        same = found == slots
        return found, np.where(same, numbers, self._number[found])

    def episodes(self, alive: Alive) -> EpisodeStats:
        """Figures for a reader."""
        slots, _ = self._live(alive)
        if not len(slots):
            return EpisodeStats(0, 0, 0, 0, 0.0)
        slots = slots[np.lexsort((self._step[slots], self._episode[slots]))]
        first = np.flatnonzero(np.append(True, np.diff(self._episode[slots]) != 0))
        last = np.append(first[1:], len(slots)) - 1
        counts = last - first + 1
        complete = self._begins[slots[first]] & self._done[slots[last]]
        complete &= self._step[slots[last]] - self._step[slots[first]] + 1 == counts
        return EpisodeStats(len(first), int(complete.sum()), int(counts.min()), int(counts.max()), float(counts.mean()))


class _Places:
    """Finds the slot of an episode's step: a hash table with linear probing, for whole batches at a time.

    It holds slots only; what they stand for is in the index's columns. An entry whose slot was taken by another item is
    stale: nobody finds it, and it is used again.
    """

    def __init__(self, episode: Ints, step: Ints) -> None:
        self._episode, self._step = episode, step
        self._where = np.full(len(episode), -1)  # the table's entry for a slot
        self._table = np.full(64, -1, np.int32)
        self._used = 0  # entries that were ever set, since the table was made

    def put(self, slots: Ints, number: Ints) -> None:
        """The columns have other items at ``slots`` now."""
        self._where[slots] = -1
        if 2 * (self._used + len(slots)) > len(self._table):
            slots = np.flatnonzero(number >= 0)
            self._table = np.full(1 << (4 * len(slots)).bit_length(), -1, np.int32)
            self._where[:] = -1
            self._used = 0
        at = self._hash(self._episode[slots], self._step[slots])
        while len(slots):
            holder = self._table[at]
            empty = holder < 0
            free = np.flatnonzero(empty | (self._where[holder] != at))
            self._table[at[free]] = slots[free]
            won = free[self._table[at[free]] == slots[free]]
            self._where[slots[won]] = at[won]
            self._used += int(empty[won].sum())
            lost = np.ones(len(slots), np.bool_)
            lost[won] = False
            slots, at = slots[lost], (at[lost] + 1) & (len(self._table) - 1)

    def find(self, episode: Ints, step: Ints) -> Ints:
        """Slots ``[n]``, -1 where there is none."""
        found = np.full(len(episode), -1)
        todo, at = np.arange(len(episode)), self._hash(episode, step)
        while len(todo):
            holder = self._table[at]
            same = (self._episode[holder] == episode) & (self._step[holder] == step) & (holder >= 0)
            found[todo[same]] = holder[same]
            more = (holder >= 0) & ~same
            todo, episode, step, at = todo[more], episode[more], step[more], (at[more] + 1) & (len(self._table) - 1)
        return found

    def _hash(self, episode: Ints, step: Ints) -> Ints:
        """Multiplications and shifts as in SplitMix64 (Steele, Lea, Flood: OOPSLA 2014)."""
        word = episode.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + step.astype(np.uint64)
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((word ^ (word >> np.uint64(31))) & np.uint64(len(self._table) - 1)).astype(np.int64)
