"""Taking from several buffers in one step: from all, or from none."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from millpond.core.errors import DeadlineExceeded, NotReady, SchemaMismatch
from millpond.flow.limiter import Block
from millpond.replay.batch import SampledBatch
from millpond.replay.engine import Engine
from millpond.replay.ensemble.mixture import Odds, corrections, odds_of
from millpond.replay.local import LocalReplay
from millpond.replay.prefetch import Given, joined
from millpond.replay.samplers.protocol import Draw, Floats, State, Stream
from millpond.replay.state import CLOSED, CONSUMER, CONSUMER_BLOCKS
from millpond.replay.waiting import Wait

_WEIGHT = ("priority_weight",)


class Joint:
    """One batch of several members: ``counts`` says how many items of each. Until it is handed over, `take_back` undoes
    it."""

    def __init__(self, members: Sequence[LocalReplay], counts: Sequence[int], shares: Floats) -> None:
        self._members, self._counts, self._shares = members, counts, shares
        self._given: dict[int, Given] = {i: [] for i, count in enumerate(counts) if count}
        self._weighed = any(local.engine.priorities is not None for local in members)
        self._odds: list[Odds | None] = [None] * len(members)

    @property
    def numbers(self) -> list[int]:
        """Of the members that give something."""
        return list(self._given)

    def take(self, n: int, *, wait: bool, timeout: float | None, cancel: Any) -> list[SampledBatch]:
        """Their parts, in their order, with importance weights of the mix. Raises as ``ReplayBuffer.sample`` does."""
        missing = {i: self._members[i].ahead.hand_out(self._counts[i], its) for i, its in self._given.items()}
        asked = {i: size for i, size in missing.items() if size}
        began = time.monotonic()
        waits: dict[int, Wait] = {}  # this call waits for one member at a time, in that member's table
        with contextlib.ExitStack() as stack:
            while asked:
                blocked = self._first_blocked(asked)
                if blocked is None:
                    if self._take_all(asked):
                        break
                    continue
                i, block = blocked
                engine = self._members[i].engine
                engine.refuse_impossible("sample", asked[i], engine.control.peek(), block)
                text = f"member {i}: {engine.explain_block('sample', asked[i], block)}"
                if not wait:
                    raise NotReady(text)
                if i not in waits:
                    waits[i] = stack.enter_context(
                        Wait(engine.memory, f"sample({n})", CONSUMER, asked[i], timeout, cancel, since=began)
                    )
                if waits[i].timeout == 0:
                    raise DeadlineExceeded(text)
                _sleep(engine, asked[i], waits[i], text)
        if self._weighed:
            self._look({i: local.engine.control.peek() for i, local in enumerate(self._members) if i not in asked})
        return self._corrected([joined(its) for its in self._given.values()])

    def take_back(self) -> None:
        """Nothing was delivered, by any member."""
        for i, its in self._given.items():
            self._members[i].ahead.take_back(its)

    # ------------------------------------------------------------------ inside
    def _first_blocked(self, asked: dict[int, int]) -> tuple[int, Block] | None:
        for i, size in asked.items():
            engine = self._members[i].engine
            state = engine.control.peek()
            engine.refuse_closed(state, "sample", size)
            block = engine.sample_block(state, size)
            if block is not None:
                return i, block
            engine.keep_pace(state)
        return None

    def _take_all(self, asked: dict[int, int]) -> bool:
        """Under all locks, taken in their order: from every member, or from none (False) where one changed since."""
        streams = {i: Stream(self._members[i].engine.random.seed()) for i in asked}
        states: dict[int, State] = {}

        def take() -> bool:
            draws: dict[int, Draw] = {}
            for i, size in asked.items():
                engine = self._members[i].engine
                engine.refuse_closed(states[i], "sample", size)
                if engine.sample_block(states[i], size, locked=True) is not None:
                    return False
            for i, size in asked.items():
                draw = self._members[i].reader.draw_locked(states[i], size, streams[i])
                if draw is None:
                    return False
                draws[i] = draw
            _refuse_different(draws)
            if self._weighed:
                self._look(states)
            for i, draw in draws.items():
                taken = self._members[i].reader.deliver_locked(states[i], draw)
                assert taken is not None
                self._given[i].append(([taken], 1))
            return True

        engines = {i: self._members[i].engine for i in asked}
        return _locked(sorted(engines.items(), key=lambda pair: rank(pair[1])), states, take)

    def _look(self, states: dict[int, State]) -> None:
        """Note what the members' draws in these states go by."""
        for i, state in states.items():
            if self._shares[i] > 0:
                self._odds[i] = odds_of(self._members[i].engine, state)

    def _corrected(self, parts: list[SampledBatch]) -> list[SampledBatch]:
        """With importance weights that are normalised over the mix. An item of a member without priorities has one too:
        all batches have the same fields."""
        if not self._weighed and not any(_WEIGHT in part.extra for part in parts):
            return parts
        factors = corrections(self._odds, self._shares) if self._weighed else [1.0] * len(self._counts)
        found = []
        for i, part in zip(self._given, parts, strict=True):
            weights = part.extra.get(_WEIGHT, torch.ones(len(part.slots)))
            found.append(part._replace(extra={**part.extra, _WEIGHT: weights * factors[i]}))
        return found


def rank(engine: Engine) -> tuple[bool, str, int]:
    """Where a lock stands in the order in which locks are taken: the same in every process that can take it."""
    path = engine.memory.path
    return (True, "", id(engine)) if path is None else (False, str(path), 0)


def _refuse_different(draws: dict[int, Draw]) -> None:
    """Raises ``SchemaMismatch`` where the samplers add fields that cannot be made up. Nothing was taken yet."""
    keys = set().union(*(draw.extra for draw in draws.values())) - {_WEIGHT}
    for i, draw in draws.items():
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


def _locked(engines: Sequence[tuple[int, Engine]], loaded: dict[int, State], then: Callable[[], bool]) -> bool:
    """What ``then`` returns under the locks of all. One call for each: Ctrl-C may come after any of the unlocks."""
    if not engines:
        return then()
    (i, engine), others = engines[0], engines[1:]
    try:
        loaded[i] = engine.load()
        return _locked(others, loaded, then)
    finally:
        engine.control.mutex.unlock()
