"""Is what was saved something that a buffer can have been in? Everything is checked against everything else.

A file can have the right checksums and still be wrong: an older bug, a hand edit. What is loaded is used without
another look, by compiled code too, so here is the last one. Nothing is changed, and no whole copy is made: of what
grows with the capacity there is a byte for each slot in memory, and eight for each item of a buffer that consumes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from millpond.core.errors import BufferClosed, CheckpointError
from millpond.core.schema import Key, Schema
from millpond.replay import container
from millpond.replay import state as words
from millpond.replay.batch import SampledBatch
from millpond.replay.config import DRAWN, spell
from millpond.replay.container import VERSION, Column
from millpond.replay.engine import Engine, find
from millpond.replay.order import NAME as ORDER
from millpond.replay.order import REWARD
from millpond.replay.samplers.episodes import HindsightSampler, NStep
from millpond.replay.samplers.prioritized import PrioritizedSampler
from millpond.replay.samplers.protocol import Ints
from millpond.replay.samplers.schedules import number
from millpond.replay.samplers.slices import SliceSampler
from millpond.replay.samplers.uniform import SamplerWithoutReplacement
from millpond.replay.slots import Pool, Queue

KEPT = {  # of the running buffer, whatever a checkpoint says
    words.CLOSED,
    words.BOUND,
    words.REDO,
    words.REWRITES,
    words.EMPTIED,
    words.RESERVED,
    words.PREFETCHED,
    words.RECEIPT_LINE,
    words.RECEIPT_NUMBER,
    words.LAST_INSERT,  # the sizes that the running program uses
    words.LAST_SAMPLE,
}
MADE_ANEW = ("redo", "tree")  # arrays that are not saved: they follow from the others
_MOST = 1 << 48  # of whatever a counter counts: a million a second for nine years
_EPOCH = ("epoch", "epoch_head", "epoch_size", "epoch_cursor", "epoch_half")
_ADDED = {**DRAWN, "steps_to_next_obs": ("int64", (1,))}


class Sound(NamedTuple):
    """A state that was found sound, for one buffer."""

    schema: Schema | None
    state: dict[str, int]
    slots: Column
    rows: Column
    arrays: dict[str, Column]
    generator: torch.Tensor
    ahead: list[SampledBatch]
    priorities: dict[str, Any]  # the arguments of the prioritized sampler that it was made with, if any


def checked(engine: Engine, bound: Schema | None, saved: Any) -> Sound:
    """Raises ``CheckpointError``, naming what does not fit what; nothing was changed."""
    try:
        return _Check(engine, bound, saved).all()
    except (BufferClosed, CheckpointError):
        raise
    except container.DAMAGE as problem:
        raise CheckpointError(f"this is no checkpoint of a replay buffer: {problem!r:.300}") from problem


def kinds(spelled: Any) -> str:
    """The names of a spelled sampler and those that it is built around."""
    if spelled is None:
        return ""
    inner = kinds(spelled["config"].get("base"))
    name: str = spelled["name"]
    return f"{name}({inner})" if inner else name


class _Check:
    """One look at a saved state, for one engine."""

    def __init__(self, engine: Engine, bound: Schema | None, saved: Any) -> None:
        self.engine, self.bound, self.saved = engine, bound, saved
        self.capacity = engine.capacity

    def all(self) -> Sound:
        saved = self.saved
        prioritized = _prioritized(self._same_kind())
        schema = None if saved["schema"] is None else Schema.from_json(saved["schema"])
        if schema is not None and self.bound is not None and self.bound != schema:
            raise CheckpointError(f"the checkpoint is of another schema: {self.bound.difference(schema)}")
        self._same_order(schema)
        self.state = self._words(schema)
        slots, rows = Column.of(saved["slots"]), Column.of(saved["rows"])
        live, width = self.state["live"], 0 if schema is None else schema.row_nbytes
        if slots.dtype is not torch.int64 or slots.shape != (live,):
            raise CheckpointError(f"{live} live items, but slots of type {slots.dtype} and shape {list(slots.shape)}")
        if rows.dtype is not torch.uint8 or rows.shape not in ((live, width), (0, 0) if live == 0 else None):
            raise CheckpointError(f"{live} items of {width} bytes, but rows of shape {list(rows.shape)}")
        arrays = self._arrays()
        lively = self._pool(slots, arrays) if isinstance(self.engine.slots, Pool) else self._ring(slots, arrays)
        self._epoch(arrays)
        self._priorities(arrays, lively, prioritized)
        generator = Column.of(saved["generator"]).whole()
        torch.Generator().set_state(generator)
        return Sound(schema, self.state, slots, rows, arrays, generator, self._ahead(schema), prioritized)

    # ------------------------------------------------------------------ of what buffer
    def _same_kind(self) -> Any:
        saved, engine = self.saved, self.engine
        if type(saved["format"]) is not int or saved["format"] != VERSION:
            raise CheckpointError(f"checkpoint format {saved['format']!r:.20}; this version reads {VERSION}")
        if type(saved["capacity"]) is not int or saved["capacity"] != engine.capacity:
            raise CheckpointError(
                f"the checkpoint has a capacity of {saved['capacity']!r:.40} items, this buffer {engine.capacity}"
            )
        sampler = json.loads(saved["sampler"])
        theirs, mine = kinds(sampler), kinds(spell(engine.sampler))
        if theirs != mine or saved["deliveries"] != (engine.deliveries or 0) or type(saved["deliveries"]) is not int:
            raise CheckpointError(
                f"the checkpoint was made by {theirs or 'a sampler of your own'} with consumption after "
                f"{saved['deliveries'] or 'no'} samples, this buffer has {mine} and {engine.deliveries or 'no'}"
            )
        return sampler

    def _same_order(self, schema: Schema | None) -> None:
        given, mine = self.saved.get("num_envs", 0), self.engine.num_envs
        order = None if schema is None else self.engine.order_of(schema)
        if type(given) is not int or (order is not None and not order.fits(given)):
            raise CheckpointError(
                f"the checkpoint was written with num_envs={given or None!r:.20}, this buffer has num_envs={mine}: its "
                "items would follow one another in another order"
            )

    # ------------------------------------------------------------------ counters
    def _words(self, schema: Schema | None) -> dict[str, int]:
        given = self.saved["state"]
        for name, value in given.items():
            if name not in words.NAMES:
                raise CheckpointError(f"there is no counter {name!r:.40}")
            if type(value) is not int or not 0 <= value < 1 << 64:
                raise CheckpointError(f"the counter {name!r} is {value!r:.40}, not a number of 64 bits")
        state = {name: given.get(name, 0) for name in words.NAMES}
        for name, value in state.items():
            if value >= _MOST and not name.startswith(("user", "receipt")):
                raise CheckpointError(f"the counter {name!r} is {value}: more than can have happened")
        head, tail, live, stored = state["head"], state["tail"], state["live"], state["stored"]
        left = state["overwritten"] + state["consumed"]
        for sound, what in (
            (live <= stored <= self.capacity, f"{live} live items in {stored} of {self.capacity} slots"),
            (stored <= state["writes"], f"{stored} slots hold items, but {state['writes']} were ever written"),
            (head == state["writes"], f"the next item is number {head} after {state['writes']} items"),
            (isinstance(self.engine.slots, Pool) or head - tail == live, f"{live} live items from {tail} to {head}"),
            (live + left <= head, f"{live} items are live and {left} have left, of {head}"),
            (not state["consumed"] or bool(self.engine.deliveries), f"{state['consumed']} items were consumed"),
            (state["exempt_writes"] <= head, f"{state['exempt_writes']} of {head} items are out of the ratio"),
            (state["pressure"] <= 1 and state["closed"] == 0, "a buffer that is neither open nor closed"),
            (state["bound"] == int(schema is not None), "a schema that is neither bound nor missing"),
            (state["epoch_half"] <= 1, f"list {state['epoch_half']} of two of an epoch"),
            (
                state["epoch_cursor"] <= state["epoch_size"] <= self.capacity and state["epoch_head"] <= head,
                f"an epoch of {state['epoch_size']} items, at {state['epoch_cursor']}",
            ),
            (
                self._epochs() or not any(state[name] for name in _EPOCH),
                f"epoch {state['epoch']} of a sampler that has none",
            ),
            (
                not self.engine.trusted or not any(state[f"user{i}"] for i in range(4)),
                "words of a sampler of the user's",
            ),
        ):
            if not sound:
                raise CheckpointError(f"counters that cannot be: {what}")
        return state

    def _epochs(self) -> bool:
        return find(SamplerWithoutReplacement, self.engine.sampler) is not None or not self.engine.trusted

    # ------------------------------------------------------------------ slots
    def _arrays(self) -> dict[str, Column]:
        wanted = {**self.engine.slots.memory(), **self.engine.sampler.memory(self.capacity)}
        if self.engine.priorities is not None and "tree" in self.saved["arrays"]:  # of an earlier version: leaves alone
            wanted = {name: nbytes for name, nbytes in wanted.items() if not name.startswith(("redo", "priorit"))}
        else:
            wanted = {name: nbytes for name, nbytes in wanted.items() if not name.startswith(MADE_ANEW)}
        arrays = {name: Column.of(held) for name, held in self.saved["arrays"].items()}
        if ORDER not in arrays:  # of an earlier version
            wanted.pop(ORDER, None)
        if arrays.keys() != wanted.keys():
            raise CheckpointError(f"arrays {sorted(arrays)!r:.200}, where {sorted(wanted)} are expected")
        for name, column in arrays.items():
            if column.dtype is not torch.uint8 or column.shape != (wanted[name],):
                raise CheckpointError(
                    f"array {name!r}: {column.dtype}{list(column.shape)}, where {wanted[name]} bytes are expected"
                )
        return arrays

    def _ring(self, slots: Column, arrays: dict[str, Column]) -> Any:
        """Slots in the order of the items' numbers. Returns where live items are, uint8 ``[capacity]``."""
        tail, live = self.state["tail"], self.state["live"]
        last = self.engine.deliveries or 0
        for a, b in slots.spans():
            found, expected = slots.read(a, b).numpy(), np.arange(tail + a, tail + b) % self.capacity
            if not np.array_equal(found, expected):
                raise CheckpointError(f"the slots of items {tail + a} to {tail + b - 1} are not those of their numbers")
        lively = np.zeros(self.capacity, np.uint8)
        begin = tail % self.capacity
        lively[begin : begin + live] = 1
        lively[: max(0, begin + live - self.capacity)] = 1
        if isinstance(self.engine.slots, Queue) and "count" in arrays:
            parts = [(begin, min(self.capacity, begin + live)), (0, max(0, begin + live - self.capacity))]
            for a, b in (pair for part in parts for pair in _spans(*part)):
                counts = arrays["count"].words(a, b)
                steps = np.diff(counts, prepend=min(last, self.engine.deliveries or 0))
                if counts.min(initial=0) < 0 or (steps > 0).any() or (counts >= (self.engine.deliveries or 0)).any():
                    raise CheckpointError("deliveries of items that rise from the oldest to the youngest, or are none")
                last = int(counts[-1])
        return lively

    def _pool(self, slots: Column, arrays: dict[str, Column]) -> Any:
        """A permutation of the slots, and its inverse. Returns where live items are, uint8 ``[capacity]``."""
        capacity, live, head, table = self.capacity, self.state["live"], self.state["head"], arrays["slots"]
        deliveries = self.engine.deliveries or 0
        place = np.empty(capacity, np.int64)
        for a, b in _spans(0, capacity):
            place[a:b] = table.words(capacity + a, capacity + b)
        for a, b in _spans(0, capacity):
            order = table.words(a, b)
            _in_range(order, capacity, "slots of the pool")
            if not np.array_equal(place[order], np.arange(a, b)):
                raise CheckpointError("a slot of the pool is not at its place")
        lively = (place < live).astype(np.uint8)
        del place
        numbers, at = np.empty(live, np.int64), 0
        for a, b in _spans(0, capacity):
            mine = lively[a:b] == 1
            count = table.words(3 * capacity + a, 3 * capacity + b)[mine]
            if count.min(initial=0) < 0 or count.max(initial=0) >= deliveries:
                raise CheckpointError(f"items that were delivered {deliveries} times and are there still")
            found = table.words(2 * capacity + a, 2 * capacity + b)
            if found.min() < -1 or found.max() >= max(1, head) or found[mine].min(initial=0) < 0:
                raise CheckpointError(f"numbers of items outside 0 to {head - 1}")
            numbers[at : at + int(mine.sum())] = found[mine]
            at += int(mine.sum())
        numbers.sort()
        if (numbers[1:] == numbers[:-1]).any():
            raise CheckpointError("two items have one number")
        named = np.zeros(capacity, np.uint8)
        for a, b in slots.spans():
            found = slots.read(a, b).numpy()
            _in_range(found, capacity, "slots of live items")
            named[found] = 1
        if not np.array_equal(named, lively):
            raise CheckpointError("slots of live items that hold none, or are named twice")
        return lively

    # ------------------------------------------------------------------ samplers
    def _epoch(self, arrays: dict[str, Column]) -> None:
        if "epoch" not in arrays or find(SamplerWithoutReplacement, self.engine.sampler) is None:
            return
        size, begin = self.state["epoch_size"], self.state["epoch_half"] * self.capacity
        named = np.zeros(self.capacity, np.uint8)
        for a, b in _spans(begin, begin + size):
            order = arrays["epoch"].words(a, b)
            _in_range(order, self.capacity, "slots of an epoch")
            named[order] = 1
        if int(named.sum()) != size:
            raise CheckpointError("an epoch that names an item twice")

    def _priorities(self, arrays: dict[str, Column], lively: Any, config: dict[str, Any]) -> None:
        sampler = self.engine.priorities
        if sampler is None:
            return
        old = "tree" in arrays
        column, highest = arrays["tree" if old else "priorities"], 0.0
        most = sampler.tree.largest_leaf if old else np.finfo(np.float64).max
        for a, b in _spans(0, self.capacity):
            values = column.words(a, b).view(np.float64)
            if not ((values >= 0.0) & (values <= most)).all():
                raise CheckpointError("a priority that is negative or not finite")
            if values[lively[a:b] == 0].any():
                raise CheckpointError("priorities of items that are not there")
            highest = max(highest, float(values.max()))
        if column.words(self.capacity, -(-self.capacity // 8) * 8).any():
            raise CheckpointError("priorities beyond the last slot")
        if old:
            alpha, eps, _ = (
                number("alpha", config["alpha"]),
                number("eps", config["eps"]),
                number("beta", config["beta"]),
            )
            highest = 1.0 if alpha == 0.0 else max(0.0, highest ** (1.0 / alpha) - eps)
        settings = None if old else arrays["priority_settings"].whole().numpy().tobytes()
        sampler.check_saved(settings, config, highest)

    # ------------------------------------------------------------------ batches drawn ahead
    def _ahead(self, schema: Schema | None) -> list[SampledBatch]:
        found = [self._taken(schema, spelled) for spelled in self.saved["ahead"]]
        if found and schema is None:
            raise CheckpointError("batches drawn ahead of a buffer into which nothing was written")
        for one in found:
            self._extra(schema, one)
            if one.extra.keys() != found[0].extra.keys():
                raise CheckpointError("batches drawn ahead with different fields")
        reserved, batches = self.state["reserved"], self.state["prefetched"]
        items = sum(len(one.slots) for one in found)
        if items > reserved or len(found) > batches:
            raise CheckpointError(
                f"{items} items in {len(found)} batches drawn ahead, {reserved} in {batches} reserved"
            )
        if self.state["exempt_samples"] > self.state["returned"] + reserved:
            raise CheckpointError(
                f"{self.state['exempt_samples']} of {self.state['returned']} samples out of the ratio"
            )
        return found

    def _taken(self, schema: Schema | None, spelled: Any) -> SampledBatch:
        rows, slots, numbers = (Column.of(spelled[name]).whole() for name in ("rows", "slots", "numbers"))
        extra: dict[Key, torch.Tensor] = {}
        for key, held in spelled["extra"].items():
            extra[tuple(key.split("/"))] = Column.of(held).whole()
        n, asked = len(slots), spelled.get("asked", len(slots))
        width = 0 if schema is None else schema.row_nbytes
        if n == 0 or slots.shape != (n,) or numbers.shape != (n,) or tuple(rows.shape) != (n, width):
            raise CheckpointError(f"a batch drawn ahead: {n} slots, rows of shape {list(rows.shape)}")
        if {slots.dtype, numbers.dtype} != {torch.int64} or rows.dtype is not torch.uint8:
            raise CheckpointError(f"a batch drawn ahead, of types {rows.dtype}, {slots.dtype} and {numbers.dtype}")
        if type(asked) is not int or not (asked == 0 or n <= asked < _MOST):  # 0: the rest of one that was cut
            raise CheckpointError(f"a batch of {n} items drawn ahead for {asked!r:.40}")
        _in_range(slots.numpy(), self.capacity, "slots of a batch drawn ahead")
        _in_range(numbers.numpy(), self.state["head"], "numbers of a batch drawn ahead")
        return SampledBatch(rows, slots.numpy(), numbers.numpy(), extra, 0, asked=asked)

    def _extra(self, schema: Schema | None, taken: SampledBatch) -> None:
        """What the samplers add to a batch, and no more."""
        assert schema is not None
        needed = self._needed(schema)
        if not needed <= taken.extra.keys():
            raise CheckpointError(f"a batch drawn ahead lacks {sorted(needed - taken.extra.keys())}")
        for key, tensor in taken.extra.items():
            field = schema.by_key.get(key)
            name, shape = "/".join(key), tuple(tensor.shape)
            if field is not None:
                sound = (tensor.dtype, shape) == (field.dtype, (len(taken.slots), *field.shape))
            elif name in _ADDED:
                dtype, its = _ADDED[name]
                sound = (str(tensor.dtype), shape) == (f"torch.{dtype}", (len(taken.slots), *its))
            else:
                sound = not self.engine.trusted and shape[:1] == (len(taken.slots),) and len(key) == 1
            if not sound:
                raise CheckpointError(f"a batch drawn ahead with {name!r:.60}: {tensor.dtype}{list(shape)}")

    def _needed(self, schema: Schema) -> set[Key]:
        """What all batches of this sampler carry beside the stored fields, or in their place."""
        needed: set[Key] = set()
        sampler = self.engine.sampler
        if find(PrioritizedSampler, sampler) is not None:
            needed.add(("priority_weight",))
        if find(NStep, sampler) is not None:
            needed |= {("steps_to_next_obs",), *(key for key in schema.by_key if key[:1] == ("next",))}
        slices = find(SliceSampler, sampler)
        if slices is not None and slices.short == "pad":
            needed |= {("mask",), ("generation",)}
        if find(HindsightSampler, sampler) is not None:
            needed |= {("relabelled",), REWARD}
        return needed


def _prioritized(spelled: Any) -> dict[str, Any]:
    """The arguments of the prioritized sampler that a checkpoint names, if any."""
    while spelled is not None and spelled["name"] != PrioritizedSampler.__name__:
        spelled = spelled["config"].get("base")
    return {} if spelled is None else dict(spelled["config"])


def _spans(begin: int, end: int, step: int = 1 << 20) -> Iterator[tuple[int, int]]:
    return ((a, min(a + step, end)) for a in range(begin, end, step))


def _in_range(numbers: Ints, bound: int, what: str) -> None:
    if len(numbers) and not (int(numbers.min()) >= 0 and int(numbers.max()) < bound):
        raise CheckpointError(f"{what} outside 0 to {bound - 1}")
