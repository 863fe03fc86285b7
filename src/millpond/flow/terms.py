"""The words of flow control: the rules, the counters that they are about, and why something may not proceed."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any, Literal, NamedTuple, get_args

from millpond.core.errors import InvalidArgument, InvalidType

Admission = Literal["overwrite", "block", "drop_newest", "raise"]


@dataclass(frozen=True)
class Flow:
    """When inserts and samples may proceed. All rules in one place; one object may serve many buffers.

    Args:
        min_size: nothing is sampled before so many items were written; filling up to it owes nothing.
        samples_per_insert: at most so many samples (items drawn) for each item written beyond ``min_size``; None: no
            limit. A float stands for the nearest fraction with a denominator of at most 10⁹, so 0.1 is a tenth.
        max_debt: an insert waits while it would leave more than so many samples owed; None: producers run free. What
            was drawn ahead is owed until it is returned.
        admission: what becomes of an insert that finds no space, or too much debt. ``"overwrite"`` evicts the oldest
            items for space, and waits where there is too much debt; ``"block"`` waits; ``"drop_newest"`` drops the
            whole insert; ``"raise"`` raises ``BufferFull``.
        high_watermark: items. An insert that would raise the fill above it waits (or is dropped, or raises); by
            default the capacity.
        low_watermark: items. Once an insert had to wait for space, or the fill is above ``high_watermark``, all
            inserts wait until the fill is at most this; by default each waits until it fits below ``high_watermark``.
            An insert that finds the fill at most ``low_watermark`` (or 0) may go above ``high_watermark``.

    Raises:
        InvalidType: a value of the wrong type; booleans are no numbers.
        InvalidArgument: a value, or a combination, that cannot mean anything.
    """

    min_size: int = 0
    samples_per_insert: float | None = None
    max_debt: float | None = None
    admission: Admission = "overwrite"
    high_watermark: int | None = None
    low_watermark: int | None = None

    # samples_per_insert as rate_above / rate_below in lowest terms (0 above: no limit), and max_debt in units of
    # 1 / rate_below, rounded down: so the limits are exact and cost integer arithmetic only.
    rate_above: int = field(init=False, repr=False, compare=False, default=0)
    rate_below: int = field(init=False, repr=False, compare=False, default=1)
    debt_limit: int | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "min_size", _items("min_size", self.min_size))
        if not isinstance(self.admission, str):
            raise InvalidType(f"admission must be a string, got {self.admission!r}")
        if self.admission not in get_args(Admission):
            known = ", ".join(get_args(Admission))
            raise InvalidArgument(f"admission must be one of {known}; got {self.admission!r}")
        self._set_ratio()
        self._set_watermarks()

    def _set_ratio(self) -> None:
        put = object.__setattr__
        if self.samples_per_insert is None:
            if self.max_debt is not None:
                raise InvalidArgument(
                    f"max_debt={self.max_debt} counts samples owed by samples_per_insert, which is not given: give both"
                )
            return
        put(self, "samples_per_insert", _positive("samples_per_insert", self.samples_per_insert))
        rate = as_fraction(self.samples_per_insert)
        if not rate:
            raise InvalidArgument(f"samples_per_insert must be at least 1e-9, got {self.samples_per_insert}")
        put(self, "rate_above", rate.numerator)
        put(self, "rate_below", rate.denominator)
        if self.max_debt is not None:
            put(self, "max_debt", _positive("max_debt", self.max_debt))
            if as_fraction(self.max_debt) < rate:
                raise InvalidArgument(
                    f"max_debt={self.max_debt} is less than what one item owes (samples_per_insert="
                    f"{self.samples_per_insert}): nothing could be written once min_size={self.min_size} is reached"
                )
            put(self, "debt_limit", math.floor(as_fraction(self.max_debt) * rate.denominator))

    def _set_watermarks(self) -> None:
        for name in ("high_watermark", "low_watermark"):
            value = getattr(self, name)
            if value is None:
                continue
            object.__setattr__(self, name, _items(name, value))
            if self.admission == "overwrite":
                raise InvalidArgument(
                    f"{name}={value} makes producers wait for space, and admission='overwrite' never does: "
                    "use admission='block' (or 'drop_newest', 'raise')"
                )
        if self.high_watermark == 0:
            raise InvalidArgument("high_watermark must be at least 1 item, or nothing could be written")
        if (
            self.high_watermark is not None
            and self.low_watermark is not None
            and self.low_watermark > self.high_watermark
        ):
            raise InvalidArgument(
                f"low_watermark={self.low_watermark} must not be above high_watermark={self.high_watermark}"
            )

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` reads; fit for JSON."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Flow:
        """The flow that `to_dict` wrote. Raises as the constructor does, and ``InvalidArgument`` for an unknown key."""
        if not isinstance(data, Mapping):
            raise InvalidType(f"a flow is read from a dict, got {data!r}")
        known = [f.name for f in fields(cls) if f.init]
        unknown = [key for key in data if key not in known]
        if unknown:
            raise InvalidArgument(f"a flow has no {', '.join(map(repr, unknown))}; it has {', '.join(known)}")
        return cls(**data)


class Counts(NamedTuple):
    """What the limiter must know of a buffer."""

    capacity: int
    live: int  # items that a sample may return now
    write_count: int  # items ever written
    exempt_writes: int  # of these, beyond min_size, those that owe nothing
    samples: int  # items returned, without exempt ones
    under_pressure: bool  # what `pressure` said last
    evictable: bool  # admission "overwrite": a write makes its own space
    consuming: bool  # samples free space
    reserved: int = 0  # items drawn ahead, and not yet returned


class Block(NamedTuple):
    """Why an operation may not proceed, and what could change that."""

    reason: str
    waits_for: Literal["inserts", "samples", "space", "nobody"]


def as_fraction(number: float) -> Fraction:
    """A number as people mean it: 0.1 is a tenth."""
    return Fraction(number).limit_denominator(10**9)


def words(amount: Fraction) -> str:
    """A fraction for people: exact where it is a short decimal."""
    return str(amount.numerator) if amount.denominator == 1 else f"{float(amount):.6g}"


def _items(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InvalidType(f"{name} must be a number of items, got {value!r}")
    number = operator.index(value)
    if number < 0:
        raise InvalidArgument(f"{name} must not be negative, got {number}")
    return number


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not (hasattr(value, "__index__") or hasattr(value, "__float__")):
        raise InvalidType(f"{name} must be a number, got {value!r}")
    number = operator.index(value) if hasattr(value, "__index__") else float(value)
    if not (math.isfinite(number) and number > 0):
        raise InvalidArgument(f"{name} must be finite and above 0, got {number}; None means no limit")
    return number
