"""The one place that knows where episodes end.

Each process that needs it derives the index from the rows, a little with every look, and keeps it to itself: no death
can harm it, and nothing has to be shared. What left the buffer is recognised by its number.

Where items carry an episode's id and a step, an item is followed by the one of its episode with the next step, however
writers interleave them. With an id alone, it is followed by the next that was written of its episode. Without ids, the
items of ``num_envs`` environments were written in turns, and each is followed by the one written ``num_envs`` later.
Such a stream is cut where an episode ends, where items are missing, and where the writer said so (see `order`).
Nothing follows an item that is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from millpond.replay.samplers.protocol import Bools, Ints, Randomness

Alive = Callable[[Ints, Ints], Bools]
CHUNK = 256


class EpisodeStats(NamedTuple):
    """Episodes of which at least one item is live."""

    episodes: int
    complete: int  # from the first step to the last, all of their items are live
    shortest: int  # live items of the episode that has the fewest
    longest: int
    mean: float


class Open(NamedTuple):
    """The item that was written last of an episode, or of an environment."""

    name: int
    step: int
    number: int
    done: bool
    era: int


class EpisodeIndex:
    """Which item follows which, for one process. ``capacity`` is the buffer's; ``num_envs`` counts without ids;
    ``any_order``: the latest item of an episode may leave before the others."""

    def __init__(self, capacity: int, *, num_envs: int = 1, any_order: bool = False) -> None:
        self._capacity, self._num_envs, self._any_order = capacity, num_envs, any_order
        self._number = np.full(capacity, -1)  # of the item that was seen last in a slot; -1: none
        self._next_slot, self._next_number = np.full(capacity, -1), np.full(capacity, -1)
        self._episode, self._step = np.zeros(capacity, np.int64), np.zeros(capacity, np.int64)
        self._done, self._begins = np.zeros(capacity, np.bool_), np.zeros(capacity, np.bool_)
        self._places = _Places(self._episode, self._step)
        self._spans: dict[
            int, list[int]
        ] = {}  # by episode: first and last step; none before the third is live; slot of the last
        self._forget_at = 1024
        self._expected = 0  # the number of the next item
        self._era = 0  # how often items came that have nothing to do with those before
        self._renamed: dict[int, tuple[int, int]] = {}  # by id: what an episode is called here, and since which era
        self._open: dict[int, Open] = {}  # without steps: by id, or by environment
        self._named = 0  # names given out

    def append(
        self,
        numbers: Ints,
        slots: Ints,
        episode: Ints | None,
        step: Ints | None,
        done: Bools,
        *,
        cut: Bools | None = None,
        new_era: Bools | None = None,
    ) -> None:
        """Take in newly written items, int64 ``[n]`` and bool ``[n]``, in the order of their numbers.

        ``episode`` must differ between episodes, also between those of different writers; ``step`` counts from 0. An
        item that is ``cut`` does not follow the one before it of its environment. With a ``new_era`` nothing that comes
        follows what was there before, except the next step of an episode by its id: ids may be used again. Where items
        leave in any order any later step is taken for one of the same episode: those between may have left.
        """
        if not len(numbers):
            return
        if new_era is None or not new_era.any():
            eras: Ints = np.full(len(numbers), self._era)
        else:
            eras = self._era + np.cumsum(new_era)
        self._era = int(eras[-1])
        if step is None or episode is None:
            order, episode, step, begins = self._counted(numbers, episode, done, cut, eras)
        else:
            episode = self._instances(episode, step, eras)
            order = np.lexsort((step, episode))
            episode, step = episode[order], step[order]
            begins = step == 0
        numbers, slots, done = numbers[order], slots[order], done[order]
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
        if self._note_spans(episode, step, slots):
            tails = np.flatnonzero(alone[1:] & ~done)
            after = self._places.find(episode[tails], step[tails] + 1)
            self._link(slots[tails[after >= 0]], after[after >= 0])

    def _counted(
        self, numbers: Ints, episode: Ints | None, done: Bools, cut: Bools | None, eras: Ints
    ) -> tuple[Ints, Ints, Ints, Bools]:
        """Episodes, steps, and whether an episode surely begins, for items that do not say, sorted so; and the order
        that sorts them."""
        key: Ints = numbers % self._num_envs if episode is None else episode
        order = np.argsort(key, kind="stable")
        key, numbers, done, eras = key[order], numbers[order], done[order], eras[order]
        cut = np.zeros(len(key), np.bool_) if cut is None or episode is not None else cut[order]
        whole = int(numbers.min()) == self._expected  # nothing was missed since the last look
        self._expected = int(numbers.max()) + 1
        if not whole and episode is not None:
            self._open.clear()  # what is missing may have been of any episode
        same = np.concatenate([[False], (key[1:] == key[:-1]) & (eras[1:] == eras[:-1]) & ~cut[1:]])
        if episode is None:
            same[1:] &= numbers[1:] - numbers[:-1] == self._num_envs
        joined = same & np.concatenate([[False], ~done[:-1]])
        begins: Bools = same & ~joined
        firsts = np.flatnonzero(~joined)
        run = np.cumsum(~joined) - 1
        names, offsets = self._named + 1 + np.arange(len(firsts)), np.zeros(len(firsts), np.int64)
        self._named += len(firsts)
        groups = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]]))
        for at in groups.tolist():
            last = self._open.get(int(key[at]))
            if last is None:  # the first item of all of an environment, or of an episode by its id
                begins[at] = whole and (episode is not None or int(numbers[at]) < self._num_envs)
            elif (
                last.era == eras[at]
                and not cut[at]
                and (episode is not None or numbers[at] == last.number + self._num_envs)
            ):
                begins[at] = last.done
                if not last.done:
                    names[run[at]], offsets[run[at]] = last.name, last.step + 1
        name: Ints = names[run]
        step: Ints = np.arange(len(key)) - firsts[run] + offsets[run]
        for at in np.append(groups[1:], len(key)) - 1:
            self._open[int(key[at])] = Open(int(name[at]), int(step[at]), int(numbers[at]), bool(done[at]), self._era)
        if len(self._open) > 1024 + 2 * self._capacity:
            gone = self._expected - self._capacity
            self._open = {key: last for key, last in self._open.items() if last.number >= gone}
        return order, name, step, begins

    def _instances(self, episode: Ints, step: Ints, eras: Ints) -> Ints:
        """What the episodes are called here. An id whose episode begins once more is another episode's, and in a new
        era every id is, unless its episode goes on."""
        ids, which = np.unique(episode, return_inverse=True)
        known = [self._renamed.get(one, (one, 0)) for one in ids.tolist()]
        zeros = np.bincount(which[step == 0], minlength=len(ids))
        first, last = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
        first[which[::-1]], last[which] = eras[::-1], eras  # of several the last assignment counts
        mixed = zip(known, zeros.tolist(), first.tolist(), last.tolist(), strict=True)
        doubtful = []
        for group, ((name, since), beginnings, earlier, later) in enumerate(mixed):
            span = self._spans.get(name)
            again = beginnings > 1 or (beginnings and span is not None and span[0] == 0)
            if again or earlier != later or (later != since and (span is not None or since)):
                doubtful.append(group)
        if not doubtful and not self._renamed:
            return episode
        names: Ints = np.array([name for name, _ in known], np.int64)[which]
        order = np.argsort(which, kind="stable")
        bounds = np.searchsorted(which[order], np.arange(len(ids) + 1))
        for group in doubtful:
            self._split(order[bounds[group] : bounds[group + 1]], int(ids[group]), names, step, eras)
        return names

    def _split(self, places: Ints, one: int, names: Ints, step: Ints, eras: Ints) -> None:
        """Name the items at ``places``, which share an id, one by one."""
        name, since = self._renamed.get(one, (one, 0))
        span = self._spans.get(name)
        first, last = (None, -1) if span is None else (span[0], span[1])
        for at, now, era in zip(places.tolist(), step[places].tolist(), eras[places].tolist(), strict=True):
            goes_on = now > last if self._any_order else now == last + 1
            if first is not None and (not goes_on if era != since else now == first == 0):
                self._named += 1
                name, first, last = -(1 << 62) - self._named, None, -1
            since, first, last = era, now if first is None else min(first, now), max(last, now)
            names[at] = name
        self._renamed[one] = name, since

    def _link(self, slots: Ints, after: Ints) -> None:
        self._next_slot[slots] = after
        self._next_number[slots] = self._number[after]

    def _note_spans(self, episode: Ints, step: Ints, slots: Ints) -> bool:
        """True where a step may have been written before the one that precedes it. The arrays are sorted."""
        edge = np.flatnonzero(np.diff(episode) != 0)
        firsts, lasts = np.append(0, edge + 1), np.append(edge, len(episode) - 1)
        known, late = self._spans, False
        ends = (episode[firsts], step[firsts], step[lasts], slots[lasts])
        for name, first, last, slot in zip(*(values.tolist() for values in ends), strict=True):
            span = known.get(name)
            if span is None:
                known[name] = [first, last, first, slot]
                continue
            late = late or first <= span[1]
            if last >= span[1]:
                span[1], span[3] = last, slot
            span[0], span[2] = min(span[0], first), min(span[2], first)
        if len(known) > self._forget_at:
            there = set(self._episode[self._number >= 0].tolist())
            self._spans = {name: span for name, span in known.items() if name in there}
            self._renamed = {one: since for one, since in self._renamed.items() if since[0] in there}
            self._forget_at = 1024 + 2 * len(self._spans)
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

    def starts(self, length: int, alive: Alive, *, short: bool = False) -> tuple[Ints, Ints, int]:
        """Slots and numbers of all items from which a slice of ``length`` can go on, and how many live items are in
        none. With ``short`` also of those that begin what is left of an episode, where that is shorter."""
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
        if short:
            whole[stub] = True
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

    def later(self, slots: Ints, numbers: Ints, alive: Alive, random: Randomness) -> tuple[Ints, Ints]:
        """For each item one of its episode, uniformly over it and the later ones that are live.

        An item that is gone gives itself.
        """
        todo = np.flatnonzero(self._known(slots, numbers, alive))
        return self._picked(slots, numbers, todo, self._step[slots[todo]], alive, random)

    def any_of(self, slots: Ints, numbers: Ints, alive: Alive, random: Randomness, oldest: int) -> tuple[Ints, Ints]:
        """The same, over all live items of its episode. No item numbered below ``oldest`` is live."""
        todo = np.flatnonzero(self._known(slots, numbers, alive))
        names, which = np.unique(self._episode[slots[todo]], return_inverse=True)
        firsts = np.array([self._first(name, alive, oldest) for name in names.tolist()], np.int64)
        return self._picked(slots, numbers, todo, firsts[which], alive, random)

    def last(self, slots: Ints, numbers: Ints, alive: Alive) -> tuple[Ints, Ints]:
        """For each item the last live one of its episode. An item that is gone gives itself."""
        found, todo = slots.copy(), np.flatnonzero(self._known(slots, numbers, alive))
        names = self._episode[slots[todo]]
        found[todo] = self._places.find(names, self._lasts(names, alive))
        return found, np.where(found == slots, numbers, self._number[found])

    def heads(self, slots: Ints, alive: Alive) -> Bools:
        """Of live items: does none that is live come before it?"""
        before = self._places.find(self._episode[slots], self._step[slots] - 1)
        follows = (
            (before >= 0) & (self._next_slot[before] == slots) & (self._next_number[before] == self._number[slots])
        )
        first: Bools = ~(follows & alive(before, self._number[before]))
        return first

    def _picked(
        self, slots: Ints, numbers: Ints, todo: Ints, firsts: Ints, alive: Alive, random: Randomness
    ) -> tuple[Ints, Ints]:
        """For the items at ``todo`` a live one of the same episode, uniformly over its steps from ``firsts`` on."""
        found, names = slots.copy(), self._episode[slots[todo]]
        spans = self._lasts(names, alive) - firsts + 1
        for _ in range(8):
            steps = firsts + (random.uniform(len(todo)) * spans).astype(np.int64)
            picked = self._places.find(names, steps)
            missed = ~((picked >= 0) & alive(picked, self._number[picked]))
            found[todo[~missed]] = picked[~missed]
            todo, names, firsts, spans = todo[missed], names[missed], firsts[missed], spans[missed]
            if not len(todo):
                break
        for i, share in enumerate(random.uniform(len(todo)).tolist()):  # few are left of many
            picked = self._live_steps(int(names[i]), int(firsts[i]), int(firsts[i] + spans[i]), alive)
            if len(picked):
                found[todo[i]] = picked[int(share * len(picked))]
        return found, np.where(found == slots, numbers, self._number[found])

    def _lasts(self, names: Ints, alive: Alive) -> Ints:
        """The last steps of these episodes that are live: what is drawn depends on nothing that is gone."""
        spans = [self._spans[name] for name in names.tolist()]
        lasts, at = np.array([s[1] for s in spans], np.int64), np.array([s[3] for s in spans], np.int64)
        there = (self._episode[at] == names) & (self._step[at] == lasts) & alive(at, self._number[at])
        found: dict[int, int] = {}
        for i in np.flatnonzero(~there).tolist():
            name = int(names[i])
            if name not in found:
                found[name] = self._last_live(name, alive)
            lasts[i] = found[name]
        return lasts

    def _last_live(self, name: int, alive: Alive) -> int:
        first, last = self._spans[name][2], self._spans[name][1]
        for end in range(last + 1, first, -CHUNK):
            live = self._live_steps(name, max(first, end - CHUNK), end, alive)
            if len(live):
                return int(self._step[live[-1]])
        return last

    def _first(self, name: int, alive: Alive, oldest: int) -> int:
        """The first step of an episode that is live."""
        span = self._spans[name]
        for start in range(span[2], span[1] + 1, CHUNK):
            live = self._live_steps(name, start, min(start + CHUNK, span[1] + 1), alive)
            if len(live):
                return int(self._step[live[0]])
            here = self._places.find(np.full(CHUNK, name), np.arange(start, start + CHUNK))
            if start == span[2] and not (self._number[here[here >= 0]] >= oldest).any():
                span[2] = min(start + CHUNK, span[1])  # these do not come back
        return span[1]

    def _live_steps(self, name: int, start: int, end: int, alive: Alive) -> Ints:
        """Slots of the live items of an episode from one step up to another, in order."""
        steps = np.arange(start, end)
        slots = self._places.find(np.full(len(steps), name), steps)
        slots = slots[slots >= 0]
        live: Ints = slots[alive(slots, self._number[slots])]
        return live

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
