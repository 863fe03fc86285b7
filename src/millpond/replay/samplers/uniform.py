"""Samplers that know no priorities and no episodes: uniform, without replacement, first in first out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from millpond.core.errors import InvalidArgument, InvalidType
from millpond.core.fixed import Fixed
from millpond.replay.samplers.protocol import Draw, Generator, Items, Randomness, State, distinct
from millpond.replay.slots import Queue, successive
from millpond.replay.state import EPOCH, EPOCH_CURSOR, EPOCH_HALF, EPOCH_HEAD, EPOCH_SIZE, HEAD, LIVE, TAKES

Arrays = Callable[[str], Any]


def made(kind: type[Any], config: dict[str, Any]) -> Any:
    """A sampler as it was built: what it shares between processes comes back when it is bound."""
    return kind(**config)


class RandomSampler:
    """Uniform over the live items, with replacement; each item at most once in a batch that is consumed."""

    replacement = True

    def memory(self, capacity: int) -> dict[str, int]:
        return {}

    def bind(self, arrays: Arrays) -> None:
        return

    def ready(self, items: Items, n: int) -> str | None:
        return None

    def draw(self, items: Items, n: int, random: Randomness) -> Draw | None:
        size = items.size
        positions = distinct(n, size, random) if items.distinct else random.below(n, size)
        return Draw(*items.at(positions))

    def config(self) -> dict[str, Any]:
        return {}

    def __reduce__(self) -> tuple[Any, ...]:
        return made, (type(self), self.config())

    def __repr__(self) -> str:
        return "RandomSampler()"


class SamplerWithoutReplacement(Fixed):
    """Each item once in an epoch, in random order.

    An epoch holds the items that are live when it begins: what is written meanwhile waits for the next, what is evicted
    is left out. All processes that share the buffer share the epoch. ``sample`` goes on into the next epoch, iterating
    the buffer ends with it. The last batch of an epoch may be smaller, or is left out with ``drop_last=True``.
    """

    replacement = False
    FIXED = ("drop_last",)

    def __init__(self, *, drop_last: bool = False) -> None:
        if not isinstance(drop_last, bool):
            raise InvalidType(f"drop_last is True or False, not {drop_last!r}")
        self.drop_last = drop_last

    def memory(self, capacity: int) -> dict[str, int]:
        return {"epoch": 2 * 8 * capacity}

    def bind(self, arrays: Arrays) -> None:
        self._lists = np.frombuffer(arrays("epoch"), np.int64).reshape(2, -1)

    def ready(self, items: Items, n: int) -> str | None:
        return None

    def remaining(self, items: Items) -> int:
        """Items of the epoch in force that were not returned yet; some may have been evicted."""
        return items.state[EPOCH_SIZE] - items.state[EPOCH_CURSOR]

    def draw(self, items: Items, n: int, random: Randomness) -> Draw | None:
        state = items.state
        epoch, cursor, size = state[EPOCH], state[EPOCH_CURSOR], state[EPOCH_SIZE]
        order = self._lists[state[EPOCH_HALF], :size]
        slots, numbers, cursor = self._next(items, order, cursor, n, state[EPOCH_HEAD])
        started = None
        if len(slots) == 0 or (self.drop_last and len(slots) < n):
            if items.size < n:
                return None
            order = self._shuffled(items, random)
            slots, numbers, cursor = self._next(items, order, 0, n, state[HEAD])
            started = order
        before = state[EPOCH_CURSOR]

        def apply(now: State) -> bool:
            if now[EPOCH] != epoch or now[EPOCH_CURSOR] != before:
                return False
            if started is not None:
                half = 1 - now[EPOCH_HALF]
                self._lists[half, : len(started)] = started  # one contiguous copy
                now[EPOCH], now[EPOCH_HALF] = epoch + 1, half
                now[EPOCH_SIZE], now[EPOCH_HEAD] = len(started), state[HEAD]
            now[EPOCH_CURSOR] = cursor
            return True

        return Draw(slots, numbers, apply=apply)

    def _next(self, items: Items, order: Any, cursor: int, n: int, head: int) -> tuple[Any, Any, int]:
        """Up to n items of the epoch from ``cursor`` on, without those that left; and the cursor behind them."""
        chosen: list[Any] = []
        wanted = n
        while wanted and cursor < len(order):
            slots = order[cursor : cursor + min(wanted, 256)].copy()
            cursor += len(slots)
            numbers = items.number(slots)
            slots = slots[(numbers >= 0) & (numbers < head)]
            chosen.append(slots)
            wanted -= len(slots)
        slots = np.concatenate(chosen) if chosen else np.empty(0, np.int64)
        return slots, items.number(slots), cursor

    def _shuffled(self, items: Items, random: Randomness) -> Any:
        if isinstance(random, Generator):
            positions = torch.randperm(items.size, generator=random.torch).numpy()
        else:
            positions = distinct(items.size, items.size, random)
        return items.at(positions)[0]

    def config(self) -> dict[str, Any]:
        return {"drop_last": self.drop_last}

    def __reduce__(self) -> tuple[Any, ...]:
        return made, (type(self), self.config())

    def __repr__(self) -> str:
        return f"SamplerWithoutReplacement(drop_last={self.drop_last})"


class ConsumingSampler(Fixed):
    """First in, first out: each item is returned ``n`` times, then it is gone and its slot is free.

    Of items that were returned equally often the oldest come first, and those returned least come before the others.
    For consumption in another order give any sampler and the buffer's ``consume_after_n_samples``.
    """

    replacement = False
    FIXED = ("n",)

    def __init__(self, n: int = 1) -> None:
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
            raise InvalidType(f"n is a number of deliveries, not {n!r}")
        if n < 1:
            raise InvalidArgument(f"each item is delivered at least once, got n={n}")
        self.n = int(n)
        self.queue: Queue | None = None  # set by the engine

    def memory(self, capacity: int) -> dict[str, int]:
        return {}

    def bind(self, arrays: Arrays) -> None:
        return

    def ready(self, items: Items, n: int) -> str | None:
        return None

    def draw(self, items: Items, n: int, random: Randomness) -> Draw | None:
        state, queue = items.state, self.queue
        assert queue is not None
        parts: list[Any] = []
        missing, upper = n, state[LIVE]
        for times in range(self.n):  # those delivered exactly this often: positions [lower, upper)
            lower = queue.delivered(state, times + 1)
            if lower > upper:
                return None  # without the lock: somebody counts deliveries meanwhile
            take = min(missing, upper - lower)
            parts.append(successive(lower, take))
            missing -= take
            upper = lower
            if not missing:
                break
        positions = np.concatenate(parts) if len(parts) > 1 else parts[0]
        takes = state[TAKES]
        return Draw(*queue.at(state, positions), apply=lambda now: now[TAKES] == takes)

    def config(self) -> dict[str, Any]:
        return {"n": self.n}

    def __reduce__(self) -> tuple[Any, ...]:
        return made, (type(self), self.config())

    def __repr__(self) -> str:
        return f"ConsumingSampler({self.n})"
