"""Must producers and consumers with these batch sizes end up waiting for each other? Then refuse at once.

The model: every insert brings ``insert`` items and every sample takes ``batch``; each side goes on whenever it may. A
configuration is refused where some order of these leads to a state in which neither side may go on, ever.

**The debt.** Let ``a = samples_per_insert * insert``, ``b = batch``, ``M = max_debt``, and let ``g = gcd(a, b)`` be
the largest rational of which both are whole multiples. The debt starts at ``r`` modulo ``g`` (0 unless ``min_size``
or earlier writes of other sizes shift it), moves by ``+a`` while it is at most ``M - a``, and by ``-b`` while it is
at least ``b``. So it runs through ``{r, r + g, r + 2g, …}``, and a debt ``d`` stops both sides if and only if
``M - a < d < b``.

    A deadlock exists if and only if M < a + b - g + r.

*Enough.* The largest possible value below ``b`` is ``b - g + r``. If ``M >= a + b - g + r``, then
``b - g + r <= M - a``, so no possible value lies between ``M - a`` and ``b``. *Needed.* If ``M < a + b``, the two moves
exclude each other (``d <= M - a < b``), so the walk has no choice. Modulo ``a + b`` both moves are ``+a``, so a walk
that never stops visits every residue that is ``r`` modulo ``gcd(a, a + b) = g``, among them ``a + b - g + r``, which
has no representative in ``[0, M]`` where ``M`` is less. Hence the walk stops, whatever the two sides do. (For
``M >= a + b`` nothing can stop it, since ``r < g``.)

**Batches drawn ahead** do not change the walk of the debt. They are reserved, and leave the debt when they are
returned: an insert is judged by the debt ``d``, a draw by ``d`` less what is reserved. While something is reserved, its
holder's next sample returns it and needs no draw; while nothing is, the two are the same. So some sample may proceed if
and only if ``d >= b``, as long as each holder goes on sampling.

**The fill** of a buffer whose items leave when they are sampled walks in the same way, with the high watermark in the
place of ``M`` and ``insert`` in that of ``a``. With a low watermark there is a second way to stop: the fill ``p`` at
which producers begin to wait falls by whole batches to ``p mod batch`` and no further, which must not be above the
low watermark.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import gcd

from millpond.flow.terms import Counts, Flow, words

_SEARCH_LIMIT = 100_000  # states; more only where watermarks are close to huge, awkward sizes


def unsatisfiable(
    flow: Flow,
    capacity: int,
    consuming: bool,
    batch: int,
    insert: int,
    *,
    counts: Counts | None = None,
    deliveries: int | None = None,
) -> str | None:
    """Why a buffer of these rules can never go on with these sizes; None where it can.

    Args:
        consuming: a sample needs ``batch`` distinct items at once: it consumes, or draws without replacement.
        batch, insert: items for each sample and each insert; 0 where that is not known yet.
        counts: the state to start from. Without it the buffer counts as empty, and an insert of at most ``min_size``
            may be a prefill that nobody repeats: what depends on its size is not judged.
        deliveries: after so many samples an item leaves the buffer; None where it does not, or where that is unknown.

    A buffer that neither consumes nor evicts stops for good once it is full. That is not refused here.
    """
    evicts = flow.admission == "overwrite"
    if consuming and batch > capacity:
        return f"a batch of {batch} distinct items never fits the capacity of {capacity}: lower batch_size"
    if insert > capacity and not evicts:
        return f"an insert of {insert} items never fits the capacity of {capacity}: insert fewer at a time"
    if flow.high_watermark is not None and flow.high_watermark > capacity:
        return f"high_watermark={flow.high_watermark} is above the capacity of {capacity}"
    if counts is None:
        counts = Counts(capacity, 0, 0, 0, 0, False, evicts, deliveries is not None)
        insert = insert if insert > flow.min_size else 0
    elif counts.write_count < flow.min_size:  # nothing is sampled until min_size is reached, and then it may change
        filling = _Case(flow, capacity, consuming, batch, insert, counts).never_filled()
        if filling is not None:
            return filling
        insert = 0
    case = _Case(flow, capacity, consuming, batch, insert, counts)
    both = bool(batch and case.insert)
    reasons = [case.rates(deliveries), case.debt() if both else None, case.never_starts()]
    if both and (deliveries is not None or counts.consuming):
        reasons.append(case.debt_of_evicted(deliveries) if evicts else case.fill(deliveries))
    return next((reason for reason in reasons if reason is not None), None)


@dataclass(frozen=True)
class _Case:
    """One question. Each method gives one kind of deadlock, in words, or None."""

    flow: Flow
    capacity: int
    distinct: bool
    batch: int
    insert: int  # 0: not known
    counts: Counts

    @property
    def high(self) -> int:
        mark = self.flow.high_watermark
        return self.capacity if mark is None else mark

    @property
    def low(self) -> int:
        mark = self.flow.low_watermark
        return max(0, self.high - self.insert) if mark is None else mark

    @property
    def beyond(self) -> int:
        """Items that owe samples; below 0 while min_size is not reached."""
        return self.counts.write_count - self.flow.min_size - self.counts.exempt_writes

    def rates(self, deliveries: int | None) -> str | None:
        """An item brings ``samples_per_insert`` samples and takes ``deliveries`` to leave: these must meet."""
        flow = self.flow
        if deliveries is None or not flow.rate_above:
            return None
        if flow.admission != "overwrite" and flow.rate_above < deliveries * flow.rate_below:
            return (
                f"samples_per_insert={flow.samples_per_insert} is less than the {deliveries} samples after which an "
                f"item leaves: the buffer fills up, and then producers wait for samples that the ratio forbids. Raise "
                f"samples_per_insert to {deliveries}, or let admission be 'overwrite'"
            )
        if flow.debt_limit is not None and flow.rate_above > deliveries * flow.rate_below:
            return (
                f"samples_per_insert={flow.samples_per_insert} is more than the {deliveries} samples after which an "
                f"item leaves: the debt grows beyond max_debt={flow.max_debt} and can never be paid. Lower "
                f"samples_per_insert to {deliveries}, or drop max_debt"
            )
        return None

    def never_filled(self) -> str | None:
        """With inserts of this size alone: is ``min_size`` ever reached?"""
        room = self._room_by_space()
        if not self.insert or room is None or self.counts.write_count + room >= self.flow.min_size:
            return None
        return (
            f"producers stop at {self.counts.live + room} items ({self._mark()}) with inserts of {self.insert}, before "
            f"min_size={self.flow.min_size} are written: no sample could ever proceed"
        )

    def never_starts(self) -> str | None:
        """Inserts alone, as many as may be: may a sample proceed then? Each insert only helps it."""
        flow, counts = self.flow, self.counts
        by_debt, by_space = self._room_by_debt(), self._room_by_space()
        if by_debt is None and by_space is None:
            return None  # producers never stop
        more = min(room for room in (by_debt, by_space) if room is not None)
        written, live = counts.write_count + more, min(self.capacity, counts.live + more)
        if by_space is not None and more == by_space:
            stop = f"producers stop at {live} items ({self._mark()})"
        else:
            stop = f"producers stop after {written} items (max_debt={flow.max_debt})"
        size = f" with inserts of {self.insert}" if self.insert else ""
        if written < flow.min_size:
            return f"{stop}{size}, before min_size={flow.min_size} are written: no sample could ever proceed"
        if self.distinct and live < self.batch:
            return f"{stop}{size}, and a sample of {self.batch} distinct items needs as many: it could never proceed"
        batch = max(self.batch, 1)
        if flow.rate_above:
            allowed = Fraction(flow.rate_above, flow.rate_below) * max(0, self.beyond + more)
            if counts.samples + batch > allowed:
                drawn = f", {counts.samples} of which were drawn" if counts.samples else ""
                return (
                    f"{stop}{size}, which allows {words(allowed)} samples{drawn}: a sample of {batch} could never "
                    f"proceed. {self._remedy()}"
                )
        return None

    def debt(self) -> str | None:
        """The first theorem above."""
        flow = self.flow
        if flow.debt_limit is None:
            return None
        a, b, limit = flow.rate_above * self.insert, flow.rate_below * self.batch, flow.debt_limit
        g = gcd(a, b)
        least = a + b - g + self._debt_at_start() % g
        if limit >= least:
            return None
        stop = Fraction(b - g + self._debt_at_start() % g, flow.rate_below)
        return (
            f"max_debt={flow.max_debt} is too small for inserts of {self.insert} and samples of {self.batch} at "
            f"samples_per_insert={flow.samples_per_insert}: at {words(stop)} samples owed, a sample of {self.batch} "
            f"waits for an insert, which would leave {words(stop + Fraction(a, flow.rate_below))} owed. Raise max_debt "
            f"to at least {words(Fraction(least, flow.rate_below))}, or make the sizes smaller"
        )

    def fill(self, deliveries: int | None) -> str | None:
        """The second theorem. With ``samples_per_insert=1`` the fill is the debt plus a constant, ``base``.

        Where an item takes several samples to leave, the sampler decides which leave when: then only rest itself is
        refused, by `never_starts`.
        """
        if deliveries not in (None, 1):
            return None
        flow, base, limit = self.flow, 0, self.capacity
        prefill = 0 if self.beyond >= 0 else -self.beyond + self.beyond % self.insert
        start = self.counts.live + prefill
        if flow.rate_above > flow.rate_below:  # more samples than an item gives: in the long run the ratio stops nobody
            reason = self._ratio_holds_back()
            if reason is not None:
                return reason
        elif flow.rate_above:
            if flow.rate_above < flow.rate_below:
                return None
            base = start - self._debt_at_start()
            limit = self.capacity if flow.debt_limit is None else base + flow.debt_limit
        walk = _Walk(
            self.insert, self.batch, high=self.high - base, low=self.low - base, most=min(self.capacity, limit) - base
        )
        stop = walk.stop(start - base, self.counts.under_pressure, hysteresis=flow.low_watermark is not None)
        if stop is None:
            return None
        low = "" if flow.low_watermark is None else f" and low_watermark={flow.low_watermark}"
        return (
            f"inserts of {self.insert} and samples of {self.batch} come to rest at {stop + base} items, where "
            f"{self._mark()}{low} hold back the one and the other finds too few. {self._remedy_fill()}"
        )

    def debt_of_evicted(self, deliveries: int | None) -> str | None:
        """Items that were evicted leave their debt behind: it can stop producers while fewer than a batch are left.

        After an eviction the fill is the capacity C. Then ``fill + (max_debt - debt) / samples_per_insert`` never
        falls: inserts leave it, and each sample, of which there must be one for a fill below C, raises it by
        ``batch / samples_per_insert - batch``. Where producers stop, the second term is less than an insert.
        """
        flow = self.flow
        if flow.debt_limit is None or not self.distinct or deliveries not in (None, 1):
            return None
        slack = flow.debt_limit // flow.rate_above + flow.min_size
        if flow.rate_above == flow.rate_below and slack <= self.capacity:
            return None  # max_debt stops producers before they evict anything
        fullest = self.batch - 1 - (self.batch - 1 - self.capacity) % gcd(self.batch, self.insert)
        gain = Fraction(self.batch * flow.rate_below, flow.rate_above) - self.batch
        if fullest <= self.capacity - self.insert + gain:
            return None
        return (
            f"the capacity of {self.capacity} is too small for inserts of {self.insert} and samples of {self.batch} "
            f"that consume: evicted items leave their debt behind, so max_debt={flow.max_debt} can stop producers "
            f"while only {fullest} items are left. Raise the capacity to {self.insert + self.batch}"
        )

    def _ratio_holds_back(self) -> str | None:
        """Where producers were stopped, the fill must fall to a mark; does the ratio allow so many samples by then?"""
        flow, room = self.flow, self._room_by_space()
        assert room is not None
        rate = Fraction(flow.rate_above, flow.rate_below)
        beyond, live, drawn = self.beyond + room, self.counts.live + room, self.counts.samples
        wanted = min(self.low, self.capacity - self.insert)
        top = min(self.capacity, max(self.high, self.low + self.insert))  # the fullest at which producers may stop
        for _ in range(_SEARCH_LIMIT):
            allowed = max(Fraction(0), rate * beyond - drawn)
            if allowed >= live:
                return None
            rest = live - int(allowed // self.batch) * self.batch
            peak = live if live <= top else top - (top - live) % self.batch
            if rest > wanted and peak > self.high - self.insert:
                return (
                    f"at {live + drawn} items written producers wait until at most {wanted} are left, and "
                    f"samples_per_insert={flow.samples_per_insert} with min_size={flow.min_size} holds samples of "
                    f"{self.batch} back at {rest}. Lower min_size, or raise the capacity"
                )
            beyond, live = beyond + self.insert, live + self.insert
        return None

    def _room_by_debt(self) -> int | None:
        """Items that can be inserted before the debt stops producers; None where it never does."""
        flow = self.flow
        if flow.debt_limit is None:
            return None
        items = (flow.debt_limit + self.counts.samples * flow.rate_below) // flow.rate_above - self.beyond
        return max(0, items // self.insert * self.insert if self.insert else items)

    def _room_by_space(self) -> int | None:
        """Items that can be inserted before space stops producers; None where it never does."""
        if self.flow.admission == "overwrite":
            return None
        live, insert = self.counts.live, self.insert
        if not insert:  # one insert of the right size takes all that is left, where it may
            return max(0, self.capacity - live)
        if self.counts.under_pressure and live > self.low:
            return 0
        room = max(0, self.high - live) // insert * insert
        if live + room <= self.low and live + room + insert <= self.capacity:
            room += insert
        return room

    def _debt_at_start(self) -> int:
        """The debt from which the walk starts, where inserts of this size pass min_size. In units of 1 / rate_below."""
        beyond = self.beyond if self.beyond >= 0 else self.beyond % self.insert
        return beyond * self.flow.rate_above - self.counts.samples * self.flow.rate_below

    def _mark(self) -> str:
        mark = self.flow.high_watermark
        return f"a capacity of {self.capacity}" if mark is None else f"high_watermark={mark}"

    def _remedy(self) -> str:
        if self.flow.max_debt is None:
            return "Lower min_size, or raise the capacity"
        return f"Raise max_debt={self.flow.max_debt}, or lower batch_size"

    def _remedy_fill(self) -> str:
        if self.flow.low_watermark is None:
            return f"Let there be room for {self.insert + self.batch} items, or make the sizes smaller"
        return f"Let low_watermark be at least {self.batch}, or make the batch smaller"


@dataclass(frozen=True)
class _Walk:
    """A fill that inserts raise and samples lower, and where it may come to rest."""

    insert: int
    batch: int
    high: int
    low: int
    most: int  # neither the capacity nor the debt allows more

    def stop(self, start: int, pressed: bool, *, hysteresis: bool) -> int | None:
        """The fill at which both sides wait, if some order of inserts and samples leads to one."""
        g = gcd(self.insert, self.batch)
        r = start % g
        if min(self.high, self.most) < self.insert + self.batch - g + r:
            return self._search(start, pressed, hysteresis)
        if not hysteresis:
            return None
        # Every value r, r + g, … up to the high watermark is reached. Producers may begin to wait at any of the peaks.
        first, last = self.high - self.insert + 1, min(self.most, max(self.high, self.low + self.insert))
        first, last = first + (r - first) % g, last - (last - r) % g
        if first > last:
            return None
        rest = self.batch - g + r if first // self.batch != last // self.batch else last % self.batch
        return rest if rest > self.low else None

    def _search(self, start: int, pressed: bool, hysteresis: bool) -> int | None:
        todo, seen = [(start, pressed)], {(start, pressed)}
        while todo and len(seen) < _SEARCH_LIMIT:
            fill, pressed = todo.pop()
            after = []
            if fill + self.insert <= self.most and (
                fill <= self.low or (not pressed and fill + self.insert <= self.high)
            ):
                after.append((fill + self.insert, hysteresis and (pressed or fill + self.insert > self.high)))
            elif hysteresis and not pressed and fill + self.insert > self.high:
                after.append((fill, True))
            if fill >= self.batch:
                left = fill - self.batch
                after.append((left, pressed and left > self.low))
            if not after:
                return fill
            for state in after:
                if state not in seen:
                    seen.add(state)
                    todo.append(state)
        return None
