"""Several buffers sampled as one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from millpond.core.errors import DeadlineExceeded, InvalidArgument, InvalidType, NotReady, SchemaMismatch
from millpond.core.schema import Batch
from millpond.flow.limiter import Block
from millpond.replay.ahead import Given, joined
from millpond.replay.buffer import ReplayBuffer
from millpond.replay.drawing import Draw, Generator, State, Stream
from millpond.replay.engine import Engine
from millpond.replay.prioritized import real_numbers
from millpond.replay.rules import check_batch_size, generator
from millpond.replay.state import CLOSED, CONSUMER, CONSUMER_BLOCKS
from millpond.replay.taken import Taken
from millpond.replay.taking import Taker
from millpond.replay.waiting import Wait, check_cancel, check_timeout

_WEIGHT = ("priority_weight",)
_SUMS = (
    "capacity size storage_size nbytes write_count sample_calls samples_returned prefetched reserved overwritten "
    "consumed dropped stale_updates producer_blocks consumer_blocks waiting_producers waiting_consumers "
    "high_watermark recoveries discarded_writes"
).split()


class ReplayBufferEnsemble:
    """Writes go to one member; a batch is drawn from all, each item from a member chosen by ``weights``.

    A batch carries ``buffer_id`` (int64 ``[n]``). It is taken from all members in one step, or from none: their
    locks are taken together, in an order that all ensembles of all processes share, so that ensembles of the same
    members do not lock each other out. Each member keeps its own sampler and flow.

    Args:
        buffers: at least one; they must hold items of one schema.
        weights: expected share of each member in a batch; equal by default.
        batch_size: items of a ``sample()`` that does not say otherwise.
        seed: of the choice of members.

    Raises:
        InvalidArgument, InvalidType: no member, a member twice, members that put their batches on different devices,
            weights that are none.
    """

    def __init__(
        self,
        *buffers: ReplayBuffer,
        weights: Sequence[float] | None = None,
        batch_size: int | None = None,
        seed: int | torch.Generator | None = None,
    ) -> None:
        if not buffers:
            raise InvalidArgument("an ensemble needs at least one buffer")
        for buffer in buffers:
            if not isinstance(buffer, ReplayBuffer):
                raise InvalidType(f"a member is a ReplayBuffer, not {type(buffer).__name__}")
        if len({_rank(b._works.engine) for b in buffers}) < len(buffers):
            raise InvalidArgument("a buffer is a member twice")
        if len({b._works.rules.device for b in buffers}) > 1:
            raise InvalidArgument("the members put their batches on different devices, so one batch cannot hold both")
        try:
            shares = np.ones(len(buffers)) if weights is None else np.asarray(weights, np.float64)
        except (TypeError, ValueError) as problem:
            raise InvalidType(f"weights are {len(buffers)} numbers, not {weights!r:.60}") from problem
        if (
            shares.shape != (len(buffers),)
            or not np.isfinite(shares).all()
            or (shares < 0).any()
            or not shares.max() > 0
        ):
            raise InvalidArgument(f"weights are {len(buffers)} numbers, not negative and not all zero; got {weights!r}")
        self.buffers = buffers
        shares = shares / shares.max()  # the sum of huge ones would be infinite
        self.weights = shares / shares.sum()
        self.batch_size = None if batch_size is None else check_batch_size(batch_size)
        self._random = Generator(generator(seed))

    def extend(self, items: Batch, *, member: int = 0, **options: Any) -> torch.Tensor:
        """Write to one member; further arguments and errors are those of ``ReplayBuffer.extend``."""
        if isinstance(member, bool) or not isinstance(member, (int, np.integer)):
            raise InvalidType(f"member is a number, not {member!r}")
        if not 0 <= member < len(self.buffers):
            raise InvalidArgument(f"member {member} of {len(self.buffers)}")
        return self.buffers[member].extend(items, **options)

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        *,
        wait: bool = False,
        timeout: float | None = None,
        cancel_event: Any = None,
    ) -> Any:
        """A batch of all members, with ``buffer_id``. Arguments and errors are those of ``ReplayBuffer.sample``.

        Raises ``SchemaMismatch`` where the members hold items of different schemas, and ``Unsatisfiable`` where a
        member can never give what this batch asks of it.
        """
        n = self._size(batch_size)
        check_timeout(timeout)
        check_cancel(cancel_event)
        self._check_schemas()
        counts = np.bincount(self._choose(n), minlength=len(self.buffers))
        members = [i for i, count in enumerate(counts) if count]
        given: dict[int, Given] = {i: [] for i in members}
        try:
            self._take(counts, n, wait, timeout, cancel_event, given)
            taken = _agree([joined(given[i]) for i in members])
            parts = [self.buffers[i]._dress(part, return_info) for i, part in zip(members, taken, strict=True)]
            ids = torch.from_numpy(np.repeat(members, [len(t.slots) for t in taken]))
            data = [part[0] for part in parts] if return_info else parts
            batch = torch.cat(data)
            if not return_info:
                if isinstance(batch, TensorDict):
                    batch.set("buffer_id", ids)
                return batch
            info: TensorDict = torch.cat([part[1] for part in parts])  # type: ignore[assignment]
            return batch, info.set("buffer_id", ids)
        except BaseException:  # also of a transform: nothing was delivered, by any member
            for i, its in given.items():
                self.buffers[i]._works.ahead.take_back(its)
            raise

    def _choose(self, n: int) -> Any:
        edges = np.cumsum(self.weights)
        return np.searchsorted(edges / edges[-1], self._random.uniform(n), side="right")

    def _take(
        self, counts: Any, n: int, wait: bool, timeout: float | None, cancel: Any, given: dict[int, Given]
    ) -> None:
        """Take what ``counts`` says of each member, into ``given``."""
        for i in given:
            self.buffers[i]._works.engine.refuse_impossible(batch=int(counts[i]))
        missing = {i: self.buffers[i]._works.ahead.hand_out(int(counts[i]), given[i]) for i in given}
        members = [i for i in given if missing[i]]
        takers = [self.buffers[i]._works.taker for i in members]
        engines = [self.buffers[i]._works.engine for i in members]
        sizes = [missing[i] for i in members]
        into = [given[i] for i in members]
        began = time.monotonic()
        waits: dict[Engine, Wait] = {}  # this call waits for one member at a time, in that member's table
        with contextlib.ExitStack() as stack:
            while members:
                blocked = self._first_blocked(engines, sizes)
                if blocked is None:
                    if _take_all(takers, engines, sizes, members, into):
                        return
                    continue
                engine, size, block = blocked
                text = f"member {members[engines.index(engine)]}: {engine.explain_block('sample', size, block)}"
                if not wait:
                    raise NotReady(text)
                if engine not in waits:
                    waits[engine] = stack.enter_context(
                        Wait(engine.memory, f"sample({n})", CONSUMER, size, timeout, cancel, since=began)
                    )
                if waits[engine].timeout == 0:
                    raise DeadlineExceeded(text)
                _sleep(engine, size, waits[engine], text)

    def _first_blocked(self, engines: list[Engine], sizes: list[int]) -> tuple[Engine, int, Block] | None:
        for engine, size in zip(engines, sizes, strict=True):
            state = engine.control.peek()
            engine.refuse_closed(state, "sample", size)
            block = engine.sample_block(state, size)
            if block is not None:
                return engine, size, block
        return None

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Could every member with a weight give as many items as any batch of this size may ask of it?"""
        n = self._size(batch_size)
        return all(b.can_sample(n) for b, w in zip(self.buffers, self.weights, strict=True) if w > 0)

    def update_priority(self, sample: TensorDict, priority: Any) -> int:
        """As ``ReplayBuffer.update_priority``, for a batch of this ensemble. Members without priorities are left out.

        Raises ``InvalidArgument``, before anything was changed; also where no member has priorities.
        """
        if not isinstance(sample, TensorDictBase):
            raise InvalidType(f"a batch of this ensemble is a TensorDict, not {type(sample).__name__}")
        if "buffer_id" not in sample.keys():  # noqa: SIM118 — a TensorDict iterates over its items
            raise InvalidArgument("this batch has no buffer_id: is it one that the ensemble's sample() returned?")
        ids = sample["buffer_id"]
        prioritized = [(i, b, b._works.engine.priorities) for i, b in enumerate(self.buffers)]
        members = [(i, b, p) for i, b, p in prioritized if p is not None]
        if not members:
            raise InvalidArgument("update_priority needs a member with a PrioritizedSampler")
        values = torch.from_numpy(real_numbers(priority))
        if values.numel() == 1:
            values = values.expand(len(ids))
        if len(values) != len(ids):
            raise InvalidArgument(f"{len(values)} priorities for {len(ids)} items")
        masks = [(buffer, priorities, (ids == i).cpu()) for i, buffer, priorities in members]
        for _, priorities, mine in masks:
            priorities.weigh(values[mine], int(mine.sum()))  # refuses what is no priority
        return sum(b.update_priority(sample[mine], values[mine]) for b, _, mine in masks if bool(mine.any()))

    def stats(self) -> dict[str, Any]:
        """The keys of ``ReplayBuffer.stats``, summed, and each member's under ``members``."""
        members = [b.stats() for b in self.buffers]
        total: dict[str, Any] = {key: sum(m[key] for m in members) for key in _SUMS}
        lows = [m["low_watermark"] for m in members]
        total["low_watermark"] = None if None in lows else sum(lows)
        total["under_pressure"] = any(m["under_pressure"] for m in members)
        total["lock"] = "robust" if all(m["lock"] == "robust" for m in members) else "fallback"
        return total | {"members": members}

    def explain(self, op: str = "sample", n: int | None = None) -> str:
        """One line for each member."""
        n = self.batch_size if n is None and op == "sample" else n
        return "\n".join(f"member {i}: {b.explain(op, n)}" for i, b in enumerate(self.buffers))

    def __len__(self) -> int:
        return sum(len(b) for b in self.buffers)

    def empty(self) -> None:
        """Empty every member."""
        for buffer in self.buffers:
            buffer.empty()

    def close(self) -> None:
        """Close, or leave, every member."""
        for buffer in self.buffers:
            buffer.close()

    def _size(self, n: int | None) -> int:
        if n is None and self.batch_size is None:
            raise InvalidArgument("no batch_size: give it to sample(), or to the ensemble")
        return check_batch_size(self.batch_size if n is None else n)

    def _check_schemas(self) -> None:
        bound = [(i, b.schema) for i, b in enumerate(self.buffers)]
        known = [(i, s) for i, s in bound if s is not None]
        for i, schema in known[1:]:
            if schema != known[0][1]:
                first, its = known[0]
                raise SchemaMismatch(f"members {first} and {i} hold different items: {its.difference(schema)}")


def _agree(taken: list[Taken]) -> list[Taken]:
    """Batches with the same fields: an item from a member without priorities has the importance weight 1."""
    if not any(_WEIGHT in t.extra for t in taken):
        return taken
    return [t._replace(extra={_WEIGHT: torch.ones(len(t.slots)), **t.extra}) for t in taken]


def _refuse_different(members: list[int], draws: list[Draw]) -> None:
    """Raises ``SchemaMismatch`` where the samplers add fields that cannot be made up. Nothing was taken yet."""
    keys = set().union(*(draw.extra for draw in draws)) - {_WEIGHT}
    for i, draw in zip(members, draws, strict=True):
        for key in sorted(keys - draw.extra.keys()):
            raise SchemaMismatch(f"the sampler of member {i} does not add {'/'.join(key)}, another member's does")


def _sleep(engine: Engine, size: int, waiting: Wait, text: str) -> None:
    """Until something changed in this member. Afterwards another one may be what is waited for."""
    try:
        state = engine.load()
        ticket = engine.count_block(state, waiting, CONSUMER_BLOCKS, engine.items_event)
    finally:
        engine.control.mutex.unlock()
    if not state[CLOSED] and engine.sample_block(state, size) is not None:
        waiting.sleep(engine.items_event, ticket, lambda: text)
    waiting.leave()


def _rank(engine: Engine) -> tuple[bool, str, int]:
    """Where a lock stands in the order in which locks are taken: the same in every process that can take it."""
    path = engine.memory.path
    return (True, "", id(engine)) if path is None else (False, str(path), 0)


def _take_all(
    takers: list[Taker], engines: list[Engine], sizes: list[int], members: list[int], into: list[Given]
) -> bool:
    """Under all locks, taken in their order: from every engine, or from none (False) where one has changed since."""
    streams = [Stream(engine.random.seed()) for engine in engines]
    loaded: dict[Engine, State] = {}

    def take() -> bool:
        states = [loaded[engine] for engine in engines]
        for engine, state, size in zip(engines, states, sizes, strict=True):
            engine.refuse_closed(state, "sample", size)
            if engine.sample_block(state, size, locked=True) is not None:
                return False
        draws: list[Draw] = []
        for taker, state, size, stream in zip(takers, states, sizes, streams, strict=True):
            draw = taker.draw_locked(state, size, stream)
            if draw is None:
                return False
            draws.append(draw)
        _refuse_different(members, draws)
        for taker, state, draw, given in zip(takers, states, draws, into, strict=True):
            taken = taker.deliver_locked(state, draw)
            assert taken is not None
            given.append(([taken], 1))
        return True

    return _locked(sorted(engines, key=_rank), loaded, take)


def _locked(engines: list[Engine], loaded: dict[Engine, State], then: Callable[[], bool]) -> bool:
    """What ``then`` returns under the locks of all. One call for each: Ctrl-C may come after any of the unlocks."""
    if not engines:
        return then()
    try:
        loaded[engines[0]] = engines[0].load()
        return _locked(engines[1:], loaded, then)
    finally:
        engines[0].control.mutex.unlock()
