"""Numbers that change while a buffer is used: schedules, and the settings that all processes of a sampler share."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from millpond.core.errors import InvalidArgument, InvalidType
from millpond.replay.state import RESERVED, RETURNED

STAGES = 100  # an alpha that follows a schedule changes so often


@dataclass(frozen=True)
class LinearSchedule:
    """A setting that goes from ``start`` to ``end`` in a straight line while a buffer gives out ``over`` items.

    It follows the items that were drawn so far: ``samples_returned`` of `ReplayBuffer.stats`, and what lies drawn
    ahead. So it is the same in all processes that share the buffer, and a loaded checkpoint continues it. For so many
    updates of a learner give ``over=updates * batch_size``.
    """

    start: float
    end: float
    over: int = field(kw_only=True)

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            object.__setattr__(self, name, number(name, getattr(self, name)))
        if isinstance(self.over, bool) or not isinstance(self.over, (int, np.integer)):
            raise InvalidType(f"over is a number of items, not {self.over!r}")
        if not 1 <= self.over < 1 << 53:
            raise InvalidArgument(f"over is 1 item or more, got {self.over}")
        object.__setattr__(self, "over", int(self.over))

    def at(self, samples: float) -> float:
        """Its value after so many items."""
        return self.end if samples >= self.over else self.start + (self.end - self.start) * (samples / self.over)

    def staged(self, samples: int) -> float:
        """The same, held for a hundredth of the way at a time."""
        return self.at(samples * STAGES // self.over * self.over / STAGES)


Setting = float | LinearSchedule


def number(name: str, value: Any, *, kind: str = "a number") -> float:
    """Raises ``InvalidType`` or ``InvalidArgument`` for what is no finite number, 0 or more."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating, np.integer)):
        raise InvalidType(f"{name} is {kind}, not {value!r:.60}")
    if not 0 <= value < math.inf:
        raise InvalidArgument(f"{name} is finite and not negative, got {value}")
    return float(value)


def setting(name: str, value: Any, *, most: float = math.inf) -> Setting:
    """The same of what may be a schedule, and is ``most`` at most."""
    if isinstance(value, LinearSchedule):
        for end in (value.start, value.end):
            setting(name, end, most=most)
        return value
    found = number(name, value, kind="a number or a LinearSchedule")
    if found > most:
        raise InvalidArgument(f"{name} is in [0, {most:g}], got {value}")
    return found


def drawn(state: Sequence[int]) -> int:
    """What schedules follow."""
    return state[RETURNED] + state[RESERVED]


class Values(NamedTuple):
    """What is in force. ``exponent`` is the alpha of the leaves in the tree."""

    exponent: float
    eps: float
    alpha: Setting
    beta: Setting

    @property
    def steepest(self) -> float:
        """The largest alpha to come."""
        return max(self.alpha.start, self.alpha.end) if isinstance(self.alpha, LinearSchedule) else self.alpha

    def exponent_at(self, samples: int) -> float:
        """The alpha that the leaves should have after so many items."""
        return self.alpha.staged(samples) if isinstance(self.alpha, LinearSchedule) else self.alpha

    def words(self) -> list[float]:
        """As they lie in memory."""
        return [self.exponent, self.eps, *_spelled(self.alpha), *_spelled(self.beta)]

    @classmethod
    def read(cls, words: Sequence[float]) -> Values:
        """What `words` wrote."""
        return cls(words[0], words[1], _read(words[2:5]), _read(words[5:8]))


def _spelled(value: Setting) -> tuple[float, float, float]:
    return (value.start, value.end, float(value.over)) if isinstance(value, LinearSchedule) else (value, value, 0.0)


def _read(words: Sequence[float]) -> Setting:
    return LinearSchedule(words[0], words[1], over=int(words[2])) if words[2] else float(words[0])


class Settings:
    """The values of a sampler, in memory that its copies share once they are bound to it.

    64-bit words: a version, odd while somebody changes the values, or the leaves that follow from them; which of two
    banks of values is in force; the banks; and what the sampler was built with. A change writes the other bank and
    then the word that names it, so a death leaves the old values or the new ones.
    """

    NBYTES = 256
    _VERSION, _BANK, _BANKS, _WIDTH = 0, 1, 2, 8
    _BUILT = _BANKS + 2 * _WIDTH

    def __init__(self, values: Values) -> None:
        self._use(memoryview(bytearray(self.NBYTES)))
        self._write(self._BANKS, values)
        self._write(self._BUILT, values)
        self._ints[self._VERSION] = 2

    def bind(self, memory: memoryview) -> None:
        """Lie in this memory from now on: with the values that are there, or bringing one's own."""
        if not memory.cast("B").cast("q")[self._VERSION]:
            memory.cast("B")[: self.NBYTES] = self._bytes
        self._use(memory.cast("B"))

    def leave(self) -> None:
        """Lie in memory of one's own from now on."""
        self._use(memoryview(bytearray(self._bytes)))

    def _use(self, memory: memoryview) -> None:
        self._bytes = memory[: self.NBYTES]
        self._ints, self._reals = self._bytes.cast("q"), self._bytes.cast("d")
        self._seen, self._now = 0, Values(0.0, 0.0, 0.0, 0.0)

    @property
    def memory(self) -> memoryview:
        """It begins with the version."""
        return self._bytes

    @property
    def version(self) -> int:
        """Another one after each change; odd while one goes on."""
        return self._ints[self._VERSION]

    def now(self) -> Values:
        """What is in force."""
        version = self._ints[self._VERSION]
        if version != self._seen:
            bank = self._ints[self._BANK] & 1
            self._now = self._read(self._BANKS + self._WIDTH * bank)
            settled = version == self._ints[self._VERSION] and not version & 1
            self._seen = version if settled else 0
        return self._now

    @contextlib.contextmanager
    def changing(self, values: Values) -> Iterator[None]:
        """Under the lock: these are in force from the end of the block on, unless it raises."""
        ints, other = self._ints, 1 - (self._ints[self._BANK] & 1)
        ints[self._VERSION] |= 1
        self._write(self._BANKS + self._WIDTH * other, values)
        yield
        ints[self._BANK] = other
        ints[self._VERSION] += 1

    def settle(self) -> Values:
        """Under the lock, after a change that was cut off: the values in force, for good."""
        self._ints[self._VERSION] |= 1  # whoever read leaves meanwhile reads them again
        self._ints[self._VERSION] += 1
        return self.now()

    def restored(self, saved: bytes) -> Values:
        """The values to go on with after a load: those of the running code, but for what was changed by assigning
        where both were built with the same."""
        theirs = Settings(self._now)
        theirs._bytes[:] = saved
        mine, its, now = self._read(self._BUILT), theirs._read(self._BUILT), theirs.now()
        kept = {
            name: getattr(now, name) if getattr(mine, name) == getattr(its, name) else getattr(mine, name)
            for name in ("eps", "alpha", "beta")
        }
        return self.now()._replace(**kept)

    def _read(self, at: int) -> Values:
        return Values.read(self._reals[at : at + self._WIDTH].tolist())

    def _write(self, at: int, values: Values) -> None:
        for i, word in enumerate(values.words()):
            self._reals[at + i] = word
