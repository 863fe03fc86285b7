"""The one place that knows where episodes end.

Each process that needs it derives the index from the rows, a little with every look, and keeps it to itself: no death
can harm it, and nothing has to be shared. What left the buffer is recognised by its number.

A *chain* is what is known of one episode: its items in the order of their steps. Where items carry ``episode_id`` and
``step``, a chain holds the steps of one episode that follow each other, however writers interleave them. Without
these, items written one after the other are one stream of steps, which is cut where an episode ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from millpond.replay.drawing import Bools, Ints, Randomness

Alive = Callable[[Ints, Ints], Bools]
_STREAM = -1  # the one open episode of items without episode ids


class EpisodeStats(NamedTuple):
    """Episodes of which at least one item is live."""

    episodes: int
    complete: int  # ended, and all of their items are live
    shortest: int  # live items of the episode that has the fewest
    longest: int
    mean: float


@dataclass(slots=True)
class _Chain:
    """Slots and numbers of successive steps, in arrays that grow."""

    slots: Ints
    numbers: Ints
    length: int = 0
    ended: bool = False

    def append(self, slots: Ints, numbers: Ints) -> None:
        needed = self.length + len(slots)
        if needed > len(self.slots):
            room = max(needed, 2 * len(self.slots))
            self.slots, self.numbers = np.resize(self.slots, room), np.resize(self.numbers, room)
        self.slots[self.length : needed] = slots
        self.numbers[self.length : needed] = numbers
        self.length = needed


class SequenceIndex:
    """Which item follows which, for one process. ``capacity`` is the buffer's."""

    def __init__(self, capacity: int) -> None:
        self._number = np.full(capacity, -1)
        self._next_slot = np.full(capacity, -1)
        self._next_number = np.full(capacity, -1)
        self._chain = np.full(capacity, -1)
        self._rank = np.full(capacity, -1)
        self._chains: dict[int, _Chain] = {}
        self._open: dict[int, tuple[int, int]] = {}  # episode → its chain, the step of its last item
        self._made = self._stream_end = 0
        self._prune_at = 1024

    def append(self, numbers: Ints, slots: Ints, episode: Ints | None, step: Ints | None, done: Bools) -> None:
        """Take in newly written items, int64 ``[n]`` and bool ``[n]``, in the order of their numbers."""
        if not len(numbers):
            return
        if episode is None or step is None:
            if numbers[0] != self._stream_end:
                self._open.pop(_STREAM, None)
            self._stream_end = int(numbers[-1]) + 1
            # steps are numbers, and every end begins another episode for the sorting below
            step, episode = numbers, np.concatenate([[0], np.cumsum(done[:-1])])
            cut = np.flatnonzero(np.diff(numbers) != 1)
            names = np.full(int(episode[-1]) + 1, _STREAM)
        else:
            order = np.lexsort((step, episode))
            numbers, slots, episode, step, done = numbers[order], slots[order], episode[order], step[order], done[order]
            cut, names = np.flatnonzero((np.diff(step) != 1) & (np.diff(episode) == 0)), None
        self._number[slots] = numbers
        self._next_number[slots] = -1
        edges = np.flatnonzero((np.diff(episode) != 0) | done[:-1])
        edges = np.union1d(edges, cut) + 1
        for a, b in zip(np.append(0, edges).tolist(), np.append(edges, len(numbers)).tolist(), strict=True):
            name = int(episode[a]) if names is None else _STREAM
            self._append_run(name, int(step[a]), slots[a:b], numbers[a:b], bool(done[b - 1]))
        if len(self._chains) > self._prune_at:
            self._prune()

    def _append_run(self, name: int, step: int, slots: Ints, numbers: Ints, ended: bool) -> None:
        """Successive steps of one episode, the first of which is ``step``."""
        where = self._open.get(name)
        if where is not None and where[1] + 1 == step:
            number = where[0]
            chain = self._chains[number]
            self._link(chain.slots[chain.length - 1 : chain.length], slots[:1], numbers[:1], chain)
        else:
            number, self._made = self._made, self._made + 1
            chain = self._chains[number] = _Chain(np.empty(0, np.int64), np.empty(0, np.int64))
        self._next_slot[slots[:-1]] = slots[1:]
        self._next_number[slots[:-1]] = numbers[1:]
        self._chain[slots] = number
        self._rank[slots] = np.arange(chain.length, chain.length + len(slots))
        chain.append(slots, numbers)
        if chain.length > 2 * len(self._number) + 1024:
            self._shorten(number, chain)
        chain.ended = ended
        if ended:
            self._open.pop(name, None)
        else:
            self._open[name] = number, step + len(slots) - 1

    def _shorten(self, number: int, chain: _Chain) -> None:
        """Forget the beginning of an episode that never ends: more items than the buffer holds are gone for sure."""
        cut = chain.length - len(self._number)
        chain.slots, chain.numbers = chain.slots[cut : chain.length].copy(), chain.numbers[cut : chain.length].copy()
        chain.length -= cut
        self._rank[self._chain == number] -= cut

    def _link(self, last: Ints, slot: Ints, number: Ints, chain: _Chain) -> None:
        """The chain's last item is followed by this one, unless its slot holds another by now."""
        if self._number[last[0]] == chain.numbers[chain.length - 1]:
            self._next_slot[last] = slot
            self._next_number[last] = number

    def _prune(self) -> None:
        """Forget chains whose items are all gone."""
        gone = [n for n, c in self._chains.items() if self._number[c.slots[c.length - 1]] != c.numbers[c.length - 1]]
        for number in gone:
            del self._chains[number]
        self._open = {name: where for name, where in self._open.items() if where[0] in self._chains}
        self._prune_at = max(1024, 2 * len(self._chains))

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
            going = going & self._known(after, its_number, alive)
            window[:, j] = np.where(going, after, slots)
            members[:, j] = np.where(going, its_number, numbers)
            lengths += going
        return window, members, lengths

    def _live(self, alive: Alive) -> tuple[Ints, Ints]:
        slots = np.flatnonzero(self._number >= 0)
        mask = alive(slots, self._number[slots])
        return slots[mask], self._number[slots[mask]]

    def starts(self, length: int, alive: Alive) -> tuple[Ints, Ints, int]:
        """Slots and numbers of all items from which a slice of ``length`` can go on, and how many live items are in
        none."""
        slots, numbers = self._live(alive)
        if not len(slots):
            return slots, numbers, 0
        if int(numbers.max() - numbers.min()) + 1 == len(slots):  # only the oldest left: chains are alive to the end
            names, inverse = np.unique(self._chain[slots], return_inverse=True)
            ends = np.array([self._chains[name].length for name in names.tolist()])
            rank = self._rank[slots]
            whole = ends[inverse] - rank >= length
            first = np.full(len(names), np.iinfo(np.int64).max)
            np.minimum.at(first, inverse, rank)
            stubs = int((ends[inverse] - first[inverse] < length).sum())
            return slots[whole], numbers[whole], stubs
        window, _, lengths = self.follow(slots, numbers, length, alive)
        whole = lengths == length
        covered = np.unique(window[whole])
        return slots[whole], numbers[whole], len(slots) - len(covered)

    def future(
        self, slots: Ints, numbers: Ints, alive: Alive, random: Randomness, *, holes: bool = False
    ) -> tuple[Ints, Ints]:
        """For each item one of its episode, uniformly: itself or a later one up to the first that is not there.

        ``holes`` says that items may leave from the middle of an episode. An item that is gone gives itself.
        """
        found, its_numbers = slots.copy(), numbers.copy()
        picks = random.uniform(len(slots)).tolist()
        known = self._known(slots, numbers, alive).tolist()
        for i, (slot, pick) in enumerate(zip(slots.tolist(), picks, strict=True)):
            chain = self._chains.get(int(self._chain[slot])) if known[i] else None
            if chain is not None:
                rank = int(self._rank[slot])
                length = chain.length - rank
                if holes:
                    rest = slice(rank, chain.length)
                    there = self._known(chain.slots[rest], chain.numbers[rest], alive)
                    length = int(there.argmin()) or length  # the first is there; 0 means that all are
                later = rank + int(pick * length)
                found[i], its_numbers[i] = chain.slots[later], chain.numbers[later]
        gone = ~self._known(found, its_numbers, alive)
        found[gone], its_numbers[gone] = slots[gone], numbers[gone]
        return found, its_numbers

    def episodes(self, alive: Alive) -> EpisodeStats:
        """Figures for a reader."""
        slots, _ = self._live(alive)
        if not len(slots):
            return EpisodeStats(0, 0, 0, 0, 0.0)
        names, counts = np.unique(self._chain[slots], return_counts=True)
        chains = [self._chains[name] for name in names.tolist()]
        complete = sum(c.ended and c.length == n for c, n in zip(chains, counts.tolist(), strict=True))
        return EpisodeStats(len(names), complete, int(counts.min()), int(counts.max()), float(counts.mean()))
