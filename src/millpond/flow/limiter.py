"""May this insert, or this sample, proceed? Arithmetic only: no clock, no lock, no thread, no torch.

    owed = samples_per_insert * max(0, write_count - min_size - exempt_writes)
    debt = owed - samples

A sample may never make the debt less than what is reserved: what was drawn ahead is as good as sampled here. An insert
waits while it would make the debt larger than ``max_debt``, by what was really returned.
Beside that, a sample needs live items, and an insert needs space.
"""

from __future__ import annotations

from fractions import Fraction

from millpond.flow.deadlock import unsatisfiable
from millpond.flow.terms import Block, Counts, Flow, words

__all__ = ["Block", "Counts", "Flow", "insert_block", "pressure", "sample_block", "unsatisfiable"]


def sample_block(flow: Flow, counts: Counts, n: int, *, need: int) -> Block | None:
    """Why ``n`` items may not be sampled now; None where they may.

    Args:
        need: live items that the sampler needs for it: 1 with replacement, ``n`` without, or where items are consumed.
    """
    written, live, above = counts.write_count, counts.live, flow.rate_above
    if written >= flow.min_size and live >= need:
        if not above:
            return None
        beyond = written - flow.min_size - counts.exempt_writes
        if (counts.samples + counts.reserved + n) * flow.rate_below <= above * beyond:
            return None
    return _why_no_sample(flow, counts, n, need)


def insert_block(flow: Flow, counts: Counts, n: int) -> Block | None:
    """Why ``n`` items may not be inserted now; None where they may.

    What then happens (waiting, dropping, raising) is the admission's affair, as is eviction. Where the admission
    waits for space and there is a low watermark, store what `pressure` says when an insert was refused.
    """
    limit = flow.debt_limit
    if limit is not None:
        beyond = counts.write_count + n - flow.min_size - counts.exempt_writes
        if beyond > 0 and flow.rate_above * beyond - counts.samples * flow.rate_below > limit:
            return _why_no_insert(flow, counts, n)
    if counts.evictable:
        return None
    fill, high = counts.live + n, flow.high_watermark
    if fill > counts.capacity:
        return _why_no_insert(flow, counts, n)
    if fill <= (counts.capacity if high is None else high) and not counts.under_pressure:
        return None
    return None if counts.live <= _low(flow, counts.capacity, n) else _why_no_insert(flow, counts, n)


def pressure(flow: Flow, counts: Counts, n: int) -> bool:
    """Do producers wait until the fill is down at the low watermark? The value to keep as ``counts.under_pressure``.

    Pressure begins when an insert of ``n`` would raise the fill above the high watermark, so ask with the size of an
    insert that was refused, and with 0 after each write and each sample. It ends when the fill is at most the low
    watermark.
    """
    high = _high(flow, counts.capacity)
    return counts.live + n > high or (counts.under_pressure and counts.live > _low(flow, counts.capacity, n))


def _high(flow: Flow, capacity: int) -> int:
    return capacity if flow.high_watermark is None else min(flow.high_watermark, capacity)


def _low(flow: Flow, capacity: int, n: int) -> int:
    """The fill at which an insert of ``n`` needs to wait no longer for a watermark."""
    return max(0, _high(flow, capacity) - n) if flow.low_watermark is None else flow.low_watermark


def _why_no_sample(flow: Flow, counts: Counts, n: int, need: int) -> Block:
    if need > counts.capacity:
        reason = (
            f"a sample of {n} needs {need} items at once: it waits until the capacity of {counts.capacity} is raised"
        )
        return Block(reason, "nobody")
    if counts.write_count < flow.min_size:
        reason = (
            f"{counts.write_count} of {flow.min_size} items written: a sample waits until min_size={flow.min_size} are"
        )
        return Block(reason, "inserts")
    if counts.live < need:
        unit = "item is" if need == 1 else "items are"
        return Block(f"{counts.live} items can be sampled: a sample of {n} waits until {need} {unit} there", "inserts")
    rate = Fraction(flow.rate_above, flow.rate_below)
    beyond = max(0, counts.write_count - flow.min_size - counts.exempt_writes)
    missing = -(-(counts.samples + counts.reserved + n) // rate) - beyond
    more = f"{missing} more {'item is' if missing == 1 else 'items are'} written"
    return Block(
        f"samples_per_insert={flow.samples_per_insert} allows {words(rate * beyond)} samples for the {beyond} items "
        f"beyond min_size={flow.min_size}, and {counts.samples + counts.reserved} were drawn: a sample of {n} waits "
        f"until {more}",
        "inserts",
    )


def _why_no_insert(flow: Flow, counts: Counts, n: int) -> Block:
    if n > counts.capacity and not counts.evictable:
        reason = f"an insert of {n} items never fits: it waits until the capacity of {counts.capacity} is raised"
        return Block(reason, "nobody")
    if flow.debt_limit is not None:
        rate = Fraction(flow.rate_above, flow.rate_below)
        limit = Fraction(flow.debt_limit, flow.rate_below)
        debt = rate * max(0, counts.write_count + n - flow.min_size - counts.exempt_writes) - counts.samples
        least = rate * min(n, counts.write_count + n - flow.min_size - counts.exempt_writes)  # all else is sampled
        if least > limit:
            return Block(
                f"an insert of {n} items alone would owe {words(least)} samples, above max_debt={flow.max_debt}: "
                "insert fewer at a time, or raise max_debt",
                "nobody",
            )
        if debt > limit:
            drawn = -(-(debt - limit) // 1)
            return Block(
                f"{words(debt)} samples would be owed after {n} more items, above max_debt={flow.max_debt}: "
                f"an insert waits until {drawn} more {'item is' if drawn == 1 else 'items are'} sampled",
                "samples",
            )
    wanted = min(_low(flow, counts.capacity, n), counts.capacity - n)
    high = _high(flow, counts.capacity)
    mark = f"the capacity of {high}" if flow.high_watermark is None else f"high_watermark={high}"
    if counts.under_pressure and flow.low_watermark is not None:
        why = f"{counts.live} items are stored after {mark} was reached"
    else:
        why = f"{counts.live} items are stored and {n} more would go above {mark}"
    if flow.low_watermark is not None and wanted == flow.low_watermark:
        until = f"until at most low_watermark={wanted} are left"
    else:
        until = f"until at most {wanted} are left"
    who = "" if counts.consuming else "; this buffer never consumes, so only empty() frees space"
    return Block(f"{why}: an insert waits {until}{who}", "space")
