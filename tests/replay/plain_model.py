"""A replay buffer in plain Python, slow and obvious: what the real one is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction


@dataclass
class PlainModel:
    """Items are their own numbers: the n-th item ever written holds the value n."""

    capacity: int
    deliveries: int | None
    samples_per_insert: float | None
    min_size: int
    needs_batch: bool  # a batch of n needs n live items
    prefetch: int = 0
    live: dict[int, int] = field(default_factory=dict)  # number → deliveries so far, oldest first
    written: int = 0
    overwritten: int = 0
    consumed: int = 0
    returned: int = 0
    calls: int = 0
    ahead: list[list[int]] = field(default_factory=list)

    def extend(self, n: int) -> None:
        excess = len(self.live) + n - self.capacity
        for number in list(self.live)[: max(0, excess)]:
            del self.live[number]
            self.overwritten += 1
        for number in range(self.written, self.written + n):
            self.live[number] = 0
        self.written += n

    def ready(self, n: int) -> bool:
        if self.written < self.min_size:
            return False
        if len(self.live) < (n if self.needs_batch else 1):
            return False
        if self.samples_per_insert is None:
            return True
        reserved = sum(map(len, self.ahead))
        allowed = Fraction(self.samples_per_insert).limit_denominator(1000) * max(0, self.written - self.min_size)
        return self.returned + reserved + n <= allowed

    def take(self, numbers: list[int]) -> None:
        """Some batch was drawn: it must be one that may be drawn."""
        assert set(numbers) <= self.live.keys(), "an item that is not live was drawn"
        if self.deliveries is None:
            return
        assert len(set(numbers)) == len(numbers), "a batch that is consumed holds an item twice"
        for number in numbers:
            self.live[number] += 1
            if self.live[number] == self.deliveries:
                del self.live[number]
                self.consumed += 1

    def returns(self, numbers: list[int]) -> None:
        self.returned += len(numbers)
        self.calls += 1

    def serve(self, n: int) -> None:
        """n items that were drawn ahead are returned; a batch may be cut."""
        while n and self.ahead:
            first = self.ahead.pop(0)
            if len(first) > n:
                self.ahead.insert(0, first[n:])
            n -= min(n, len(first))

    def could_sample(self, n: int) -> bool:
        if not self.ahead:
            return self.ready(n)
        if self.deliveries is not None:
            missing = n - sum(map(len, self.ahead))
            return missing <= 0 or self.ready(missing)
        if len(self.ahead[0]) == n:
            return True
        ahead, self.ahead = self.ahead, []  # batches of another size are given back first
        ready = self.ready(n)
        self.ahead = ahead
        return ready

    def figures(self) -> dict[str, int]:
        return {
            "size": len(self.live),
            "write_count": self.written,
            "overwritten": self.overwritten,
            "consumed": self.consumed,
            "samples_returned": self.returned,
            "sample_calls": self.calls,
            "prefetched": len(self.ahead),
            "reserved": sum(map(len, self.ahead)),
        }
