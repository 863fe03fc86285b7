"""Which slots hold live items. Two ways, one interface.

`Ring`: items lie in the order of their numbers, slot = number mod capacity, and an item is live exactly if
tail <= number < head. It needs no memory of its own, and serves buffers in which the oldest leave first, by being
overwritten. `Queue` is a ring whose items leave first in, first out.

`Pool`: any item may leave. ``order[:live]`` are the live slots, ``order[live:]`` the free ones; ``place`` is its
inverse. An item leaves by swapping, and the swaps are written to a redo log before they are committed: absolute
values, so that applying the log twice, or half and then again, is right.

All methods run under the lock and keep the GIL (NumPy keeps it for 1-D indexing of up to 500 elements, hence the
chunks), except those named so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from millpond.replay.samplers.protocol import Bools, Ints, State
from millpond.replay.state import CONSUMED, HEAD, LIVE, OVERWRITTEN, REDO, STORED, TAIL, WRITES

CHUNK = 256


_STEPS = np.arange(CHUNK)


def successive(start: int, n: int) -> Ints:
    """``numpy.arange(start, start + n)``, which lets go of the GIL whatever its size; this does not."""
    if n == 1:
        return np.array((start,))
    out = np.empty(n, np.int64)
    for a in range(0, n, len(_STEPS)):
        part = out[a : a + len(_STEPS)]
        np.add(_STEPS[: len(part)], start + a, out=part)
    return out


class Slots(Protocol):
    """Where items are, come and go."""

    def memory(self) -> dict[str, int]:
        """Names and bytes of the zeroed memory that it shares between processes."""

    def bind(self, arrays: Callable[[str], Any], *, create: bool) -> None: ...

    def place(self, state: State, n: int) -> Ints:
        """The slots that the next n items will get."""

    def add(self, state: State, slots: Ints, n: int) -> None:
        """n new items stand in ``slots``: make them live with the next commit."""

    def skip(self, state: State, n: int) -> None:
        """n items come and go with the next commit, while nothing is live: they are counted, and get no slot."""

    def evict(self, state: State, n: int) -> bool:
        """The n oldest items cease to be live with the next commit. False: `prepare_eviction` must be called first."""

    def consume(self, state: State, slots: Ints) -> Ints:
        """``slots`` were delivered once more. Those whose last delivery this was leave with the next commit."""

    def at(self, state: State, positions: Ints) -> tuple[Ints, Ints]: ...

    def number(self, state: State, slots: Ints) -> Ints: ...

    def alive(self, state: State, slots: Ints, numbers: Ints) -> Bools: ...

    def since(self, state: State, number: int) -> tuple[Ints, Ints]: ...

    def apply_redo(self, count: int) -> None: ...

    def reset(self) -> None:
        """No item is live: make the arrays sound, whatever they hold."""


def _skip(state: State, n: int) -> None:
    for word in (HEAD, WRITES, OVERWRITTEN):
        state[word] += n


class Ring:
    """Slots in the order of writing."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    def memory(self) -> dict[str, int]:
        return {}

    def bind(self, arrays: Callable[[str], Any], *, create: bool) -> None:
        return

    def place(self, state: State, n: int) -> Ints:
        start = state[HEAD] % self.capacity
        before = self.capacity - start
        if before >= n:
            return successive(start, n)
        return np.concatenate([successive(start, before), successive(0, n - before)])

    def add(self, state: State, slots: Ints, n: int) -> None:
        state[HEAD] += n
        state[WRITES] += n
        state[LIVE] += n
        state[STORED] = min(self.capacity, state[STORED] + n)

    def skip(self, state: State, n: int) -> None:
        state[TAIL] += n
        _skip(state, n)

    def evict(self, state: State, n: int) -> bool:
        state[TAIL] += n
        state[LIVE] -= n
        state[OVERWRITTEN] += n
        return True

    def prepare_eviction(self, state: State) -> None:
        return

    def consume(self, state: State, slots: Ints) -> Ints:
        """First in, first out: ``slots`` are the oldest."""
        state[TAIL] += len(slots)
        state[LIVE] -= len(slots)
        state[CONSUMED] += len(slots)
        return slots

    def at(self, state: State, positions: Ints) -> tuple[Ints, Ints]:
        tail, capacity = state[TAIL], self.capacity
        start = tail % capacity
        if start + state[LIVE] <= capacity:
            return positions + start, positions + tail
        slots = positions + (start - capacity)
        wrapped = slots >> 63  # all bits set where it is below 0: quicker than a mask
        wrapped &= capacity
        slots += wrapped
        return slots, positions + tail

    def number(self, state: State, slots: Ints) -> Ints:
        last = state[HEAD] - 1
        numbers: Ints = last - (last - slots) % self.capacity
        numbers[numbers < state[TAIL]] = -1
        return numbers

    def alive(self, state: State, slots: Ints, numbers: Ints) -> Bools:
        return (numbers >= state[TAIL]) & (numbers < state[HEAD])

    def since(self, state: State, number: int) -> tuple[Ints, Ints]:
        numbers = np.arange(max(number, state[TAIL]), state[HEAD])
        return numbers % self.capacity, numbers

    def apply_redo(self, count: int) -> None:
        return

    def reset(self) -> None:
        return


class Queue(Ring):
    """First in, first out, with ``deliveries`` deliveries of each item.

    Whoever was delivered least comes first, the oldest of these first: so the counts never rise from the oldest item
    to the youngest, and `ConsumingSampler` finds its place by bisection.
    """

    def __init__(self, capacity: int, deliveries: int) -> None:
        super().__init__(capacity)
        self.deliveries = deliveries

    def memory(self) -> dict[str, int]:
        if self.deliveries == 1:
            return {}
        return {"count": 8 * self.capacity, "redo_at": 8 * self.capacity, "redo_value": 8 * self.capacity}

    def bind(self, arrays: Callable[[str], Any], *, create: bool) -> None:
        if self.deliveries > 1:
            self._count = np.frombuffer(arrays("count"), np.int64)
            self._redo_at = np.frombuffer(arrays("redo_at"), np.int64)
            self._redo_value = np.frombuffer(arrays("redo_value"), np.int64)

    def add(self, state: State, slots: Ints, n: int) -> None:
        if self.deliveries > 1:
            for a in range(0, n, CHUNK):
                self._count[slots[a : a + CHUNK]] = 0
        super().add(state, slots, n)

    def delivered(self, state: State, times: int) -> int:
        """How many live items, the oldest ones, were delivered at least ``times`` times."""
        if self.deliveries == 1 or times == 0:
            return 0 if times else state[LIVE]
        low, high, tail = 0, state[LIVE], state[TAIL]
        while low < high:
            middle = (low + high) // 2
            if self._count[(tail + middle) % self.capacity] >= times:
                low = middle + 1
            else:
                high = middle
        return low

    def consume(self, state: State, slots: Ints) -> Ints:
        if self.deliveries == 1:
            return super().consume(state, slots)
        counts, last = np.empty(len(slots), np.int64), []
        for a in range(0, len(slots), CHUNK):
            part = slots[a : a + CHUNK]
            counts[a : a + CHUNK] = self._count[part] + 1
            last.append(part[counts[a : a + CHUNK] >= self.deliveries])
        n = state[REDO] = len(slots)
        self._redo_at[:n] = slots
        self._redo_value[:n] = counts
        return super().consume(state, np.concatenate(last))

    def apply_redo(self, count: int) -> None:
        for a in range(0, count, CHUNK):
            b = min(a + CHUNK, count)
            self._count[self._redo_at[a:b]] = self._redo_value[a:b]


class Pool:
    """Slots in any order; each item leaves after ``deliveries`` deliveries."""

    def __init__(self, capacity: int, deliveries: int) -> None:
        self.capacity = capacity
        self.deliveries = deliveries
        self._aging: tuple[Ints, Ints, int] | None = (
            None  # live slots by age, when that was looked up; and how far used
        )

    def memory(self) -> dict[str, int]:
        word = 8 * self.capacity  # one array of four, so that a redo entry can address any of them
        return {"slots": 4 * word, "redo_at": 5 * word, "redo_value": 5 * word}

    def bind(self, arrays: Callable[[str], Any], *, create: bool) -> None:
        self._all = np.frombuffer(arrays("slots"), np.int64)
        self._order, self._place, self._number, self._count = self._all.reshape(4, self.capacity)
        self._redo_at = np.frombuffer(arrays("redo_at"), np.int64)
        self._redo_value = np.frombuffer(arrays("redo_value"), np.int64)
        if create:
            self.reset()

    def reset(self) -> None:
        self._order[:] = self._place[:] = np.arange(self.capacity)
        self._number[:] = -1

    def place(self, state: State, n: int) -> Ints:
        return self._order[state[LIVE] : state[LIVE] + n].copy()

    def add(self, state: State, slots: Ints, n: int) -> None:
        for a in range(0, n, CHUNK):  # not live yet: nobody trusts these entries before the commit
            b = min(a + CHUNK, n)
            self._number[slots[a:b]] = successive(state[HEAD] + a, b - a)
            self._count[slots[a:b]] = 0
        state[HEAD] += n
        state[WRITES] += n
        state[LIVE] += n
        state[STORED] = max(state[STORED], state[LIVE])

    def skip(self, state: State, n: int) -> None:
        _skip(state, n)

    def evict(self, state: State, n: int) -> bool:
        oldest = self._oldest(state, n)
        if oldest is None:
            return False
        self._remove(state, oldest)
        state[OVERWRITTEN] += n
        return True

    def prepare_eviction(self, state: State) -> None:
        """Look up the live items by age. Without the lock: it sorts, and lets go of the GIL."""
        slots = self._order[: state[LIVE]].copy()
        numbers = self._number[slots]
        by_age = np.argsort(numbers, kind="stable")
        self._aging = slots[by_age], numbers[by_age], 0

    def _oldest(self, state: State, n: int) -> Ints | None:
        """The n oldest live slots from what `prepare_eviction` found. Items written since are all younger."""
        if self._aging is None:
            return None
        slots, numbers, used = self._aging
        found: list[Ints] = []
        missing = n
        while missing and used < len(slots):
            b = min(used + min(missing, CHUNK), len(slots))
            alive = self.alive(state, slots[used:b], numbers[used:b])
            found.append(slots[used:b][alive])
            missing -= len(found[-1])
            used = b
        if missing:
            self._aging = None
            return None
        self._aging = slots, numbers, used
        return np.concatenate(found)

    def consume(self, state: State, slots: Ints) -> Ints:
        if self.deliveries == 1:
            leaving = slots
        else:
            counts = np.empty(len(slots), np.int64)
            last: list[Ints] = []
            for a in range(0, len(slots), CHUNK):
                part = slots[a : a + CHUNK]
                counts[a : a + CHUNK] = self._count[part] + 1
                last.append(part[counts[a : a + CHUNK] >= self.deliveries])
            self._log(state, 3 * self.capacity + slots, counts)
            leaving = np.concatenate(last)
        if len(leaving):
            self._remove(state, leaving)
        state[CONSUMED] += len(leaving)
        return leaving

    def _remove(self, state: State, slots: Ints) -> None:
        """Swap ``slots`` (distinct, live) behind the live ones, by way of the redo log."""
        n, live, order = len(slots), state[LIVE], self._order
        if n == live:  # none stays: whatever the order, all are free now
            state[LIVE] = 0
            return
        kept = live - n
        stays = np.ones(n, bool)  # of order[kept:live]: which stay, and so move into the gaps
        gaps: list[Ints] = []
        for a in range(0, n, CHUNK):
            places = self._place[slots[a : a + CHUNK]]
            inside = places < kept
            gaps.append(places[inside])
            stays[places[~inside] - kept] = False
        moved = [order[kept + a : min(kept + a + CHUNK, live)][stays[a : a + CHUNK]] for a in range(0, n, CHUNK)]
        into, movers = np.concatenate(gaps), np.concatenate(moved)
        behind = successive(kept, n)
        capacity = self.capacity
        self._log(state, into, movers)
        self._log(state, capacity + movers, into)
        self._log(state, behind, slots)
        self._log(state, capacity + slots, behind)
        state[LIVE] = kept

    def _log(self, state: State, at: Ints, values: Ints) -> None:
        a = state[REDO]
        b = state[REDO] = a + len(at)
        self._redo_at[a:b] = at
        self._redo_value[a:b] = values

    def apply_redo(self, count: int) -> None:
        for a in range(0, count, CHUNK):
            b = min(a + CHUNK, count)
            self._all[self._redo_at[a:b]] = self._redo_value[a:b]

    def at(self, state: State, positions: Ints) -> tuple[Ints, Ints]:
        slots, numbers = np.empty(len(positions), np.int64), np.empty(len(positions), np.int64)
        for a in range(0, len(positions), CHUNK):
            part = slots[a : a + CHUNK] = self._order[positions[a : a + CHUNK]]
            numbers[a : a + CHUNK] = self._number[part]
        return slots, numbers

    def number(self, state: State, slots: Ints) -> Ints:
        numbers = np.empty(len(slots), np.int64)
        for a in range(0, len(slots), CHUNK):
            part = slots[a : a + CHUNK]
            numbers[a : a + CHUNK] = np.where(self._place[part] < state[LIVE], self._number[part], -1)
        return numbers

    def alive(self, state: State, slots: Ints, numbers: Ints) -> Bools:
        alive = np.empty(len(slots), bool)
        for a in range(0, len(slots), CHUNK):
            part = slots[a : a + CHUNK]
            alive[a : a + CHUNK] = (self._place[part] < state[LIVE]) & (self._number[part] == numbers[a : a + CHUNK])
        return alive

    def since(self, state: State, number: int) -> tuple[Ints, Ints]:
        """Sorts: without the lock where it matters."""
        slots = self._order[: state[LIVE]].copy()
        numbers = self._number[slots]
        young = numbers >= number
        slots, numbers = slots[young], numbers[young]
        by_age = np.argsort(numbers, kind="stable")
        return slots[by_age], numbers[by_age]
