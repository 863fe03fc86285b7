"""Batches that were drawn and gathered, and wait for the call that returns them.

They are drawn at the end of a ``sample`` call, a fixed point of the program, so that the same seed gives the same
batches. Until they are handed over they are reserved against the ratio; what a process had reserved returns when it
dies. A batch that did not reach its caller, for whatever exception, comes back here where its items are gone otherwise.

What is kept here and what the table of participants says is reserved are changed one after the other, and an exception
such as Ctrl-C may come in between. A flag that is up meanwhile tells the next call to tell the table anew.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from millpond.core.errors import BufferClosed, Cancelled, DeadlineExceeded, NotReady
from millpond.flow.limiter import Block
from millpond.replay.batch import BatchMemory, SampledBatch
from millpond.replay.engine import Engine
from millpond.replay.sample import Reader
from millpond.replay.samplers.protocol import State
from millpond.replay.state import CALLS, EMPTIED, EXEMPT_SAMPLES, PREFETCHED, RESERVED, RETURNED
from millpond.replay.waiting import Patience

Given = list[tuple[list[SampledBatch], int]]  # batches that were counted as delivered, and as how many calls


class Prefetch:
    """The batches of one process: ``limit`` of them are drawn ahead. Any thread may use it.

    Where the sampler has epochs, ``over(n)`` says whether the one in force is drawn: no batch of the next one is drawn
    ahead.
    """

    def __init__(self, engine: Engine, reader: Reader, limit: int, over: Callable[[int], bool] | None = None) -> None:
        self._engine, self._reader = engine, reader
        self.limit = limit
        self._over = over
        self.keeps = reader.deliveries is not None or over is not None  # what was drawn cannot be drawn again
        self._ready: tuple[SampledBatch, ...] = ()
        self._aside: tuple[tuple[int, SampledBatch], ...] = ()  # for a thread that waits for the rest of its batch
        self._lock = threading.Lock()  # to change these two; taken before the buffer's, and nobody draws with it
        self._filling = threading.Lock()  # taken before the other
        self._moving = False  # up while what is kept and what is reserved may differ, under the first lock
        self._drawing = 0  # of how many items a batch is being drawn, under the second
        self._drawn: SampledBatch | None = None

    def __len__(self) -> int:
        return len(self._ready)

    def __iter__(self) -> Iterator[SampledBatch]:
        aside, ready = self._aside, self._ready
        return iter([*(batch for _, batch in aside), *ready])

    @property
    def idle(self) -> bool:
        """Is nothing here, and nothing to be put right?"""
        return not (self._ready or self._aside or self._moving)

    @property
    def items(self) -> int:
        """Items in all batches that could be handed out."""
        return _items(self._ready)

    def could_serve(self, n: int) -> int:
        """How many of n items `take` would have without drawing."""
        batches = self._ready
        if batches and self._over is not None and (batches[0].asked == n or self._over(n)):
            return n  # the last batch of an epoch may be smaller
        if self.keeps:
            return min(n, _items(batches))
        return n if batches and batches[0].asked == n else 0

    def block(self, state: State, n: int) -> Block | None:
        """Why `take` of n items could not proceed in this state, of which the caller has no other use."""
        served = self.could_serve(n)
        if not served:  # batches of another size are given back first
            state[RESERVED] -= self.items
        return None if served >= n else self._engine.sample_block(state, n - served)

    # ------------------------------------------------------------------ handing out
    def take(
        self,
        n: int,
        *,
        wait: bool,
        timeout: float | None = None,
        cancel: Any = None,
        prepare: Callable[[int], BatchMemory | None] | None = None,
        asked: bool = False,
    ) -> SampledBatch:
        """A batch of n, of what is there or drawn now; then draw ahead. As `Reader.take` else.

        Batches of another size are given back. What cannot be given back (it was consumed, or taken from an epoch) is
        cut and joined to fit instead; and whatever is raised, none of it is lost.
        """
        if self.idle and not self.limit:
            return self._reader.take(n, wait=wait, timeout=timeout, cancel=cancel, prepare=prepare, asked=asked)
        given: Given = []
        patience = None if timeout is None and cancel is None else self._reader.waiting(n, timeout, cancel)
        try:
            self._serve(n, wait, timeout, cancel, given, patience)
            if not given:
                taken = self._reader.take(n, wait=wait, timeout=timeout, cancel=cancel, prepare=prepare)
                given.append(([taken], 1))
            self._fill(n, patience)
            return joined(given)
        except BaseException:
            self.take_back(given)
            raise

    def take_back(self, given: Given) -> None:
        """These did not reach their caller, so they were not delivered after all. Where they cannot be drawn again, the
        next call gets them."""
        batches = [batch._replace(data=None) for some, _ in given for batch in some]
        if not batches:
            return
        kept = batches if self.keeps else []
        with contextlib.suppress(BufferClosed), self._lock:
            moving = self._moving
            if kept:  # first: whatever comes now, they are not lost
                self._ready, self._moving = (*kept, *self._ready), True
            self._uncount(_items(batches), sum([calls for _, calls in given]), kept, batches[0].emptied)
            self._moving = moving

    def lent(self, taken: SampledBatch) -> SampledBatch:
        """The batch for one who may change it in place and then fail: where it would come back, a copy of it."""
        if not self.keeps:
            return taken
        extra = {key: value.clone() for key, value in taken.extra.items()}
        return taken._replace(
            rows=taken.rows.clone(), slots=taken.slots.copy(), numbers=taken.numbers.copy(), extra=extra
        )

    def hand_out(self, n: int, given: Given) -> int:
        """Hand out what there is of n items that cannot be drawn again. Returns how many are missing."""
        had = 0
        while self.keeps and self._ready and not had:
            self._drop_emptied()
            if self._ready:
                parts, left, rest = self._cut(self._ready, n)
                if self._exchange(left, rest, parts=parts, calls=int(_items(parts) == n), given=given):
                    had = _items(parts)
        return n - had

    def _serve(
        self, n: int, wait: bool, timeout: float | None, cancel: Any, given: Given, patience: Patience | None
    ) -> None:
        """Hand out what could serve, if anything."""
        if cancel is not None and cancel.is_set():
            raise Cancelled(f"sample({n}): the cancel event is set")
        self._put_right()
        while self._ready:
            self._drop_emptied()
            ready = self._ready
            if not ready:
                return
            if self.keeps:
                parts, left, rest = self._cut(ready, n)
                missing = n - _items(parts)
                if missing and not (self._over is not None and (parts[0].asked == n or self._over(n))):
                    if self._complete(parts, missing, wait, timeout, cancel, given):
                        return
                    continue
            else:
                others = 0
                while others < len(ready) and ready[others].asked != n:
                    others += 1
                parts, left, rest = list(ready[others : others + 1]), ready[: others + 1], ()
            if self._exchange(left, rest, parts=parts, calls=1, given=given, patience=patience) and parts:
                return

    def _cut(
        self, ready: tuple[SampledBatch, ...], n: int
    ) -> tuple[list[SampledBatch], Sequence[SampledBatch], Sequence[SampledBatch]]:
        """Parts of n items in all, or of all that there are; the batches that they come from; and what is left over."""
        if self._over is not None and ready[0].asked == n:
            return [ready[0]], ready[:1], ()
        parts: list[SampledBatch] = []
        for i, batch in enumerate(ready):
            if n == 0:
                return parts, ready[:i], ()
            if len(batch.slots) > n:
                return [*parts, _part(batch, 0, n)], ready[: i + 1], [_part(batch, n, None)]
            parts.append(batch)
            n -= len(batch.slots)
        return parts, ready, ()

    def _complete(
        self, parts: list[SampledBatch], missing: int, wait: bool, timeout: float | None, cancel: Any, given: Given
    ) -> bool:
        """Draw what is missing, waiting for it, and hand it out with the parts. False: somebody has taken these."""
        me, had = threading.get_ident(), _items(parts)
        try:
            with self._lock:
                ready = _without(self._ready, parts)
                if len(ready) != len(self._ready) - len(parts):
                    return False
                self._aside, self._ready = (*self._aside, *((me, batch) for batch in parts)), ready
            more = self._reader.take(missing, wait=wait, timeout=timeout, cancel=cancel)
            given.append(([more], 1))
            if not self._exchange(parts, parts=parts, calls=0, given=given):  # the buffer was emptied meanwhile
                self._exchange(parts)
                again = self._reader.take(had, wait=wait, timeout=timeout, cancel=cancel)
                given.append(([again], 1))
                with self._lock:  # this is one call
                    self._uncount(0, 1, (), again.emptied)
            return True
        except BaseException:
            self._put_back(me)
            raise

    # ------------------------------------------------------------------ drawing
    def _fill(self, n: int, patience: Patience | None = None) -> None:
        """Draw batches of n until there are enough, until the epoch ends, or until the buffer is not ready for more, or
        whoever holds its lock is slow."""
        if len(self._ready) >= self.limit:
            return
        with self._filling:
            try:
                if self._drawing:
                    self._settle()
                while len(self._ready) < self.limit and not (self._over and self._over(n)):
                    self._drawing = n
                    self._drawn = self._reader.take(n, wait=False, ahead=True, patience=patience)
                    self._keep_drawn()
                    self._drawing = 0
            except (NotReady, BufferClosed, DeadlineExceeded, Cancelled):
                self._drawing = 0
            except BaseException:
                self._settle()
                raise

    def _keep_drawn(self) -> None:
        with self._lock:
            if self._drawn is not None:
                drawn = self._drawn._replace(asked=self._drawing)
                self._ready, self._drawn = (*self._ready, drawn), None

    def restore(self, batches: Iterable[SampledBatch]) -> None:
        """Batches that another process, or an earlier life of this one, had drawn ahead."""
        engine = self._engine
        with self._lock:
            try:
                state = engine.load()
                restored = [batch._replace(emptied=state[EMPTIED]) for batch in batches]
                moving, self._moving = self._moving, True
                self._reader.reserve(state, _items(restored), len(restored))
                engine.commit(state)
                self._ready, self._moving = (*self._ready, *restored), moving
            finally:
                engine.control.mutex.unlock()

    # ------------------------------------------------------------------ giving back
    def refund(self) -> None:
        """Give all reservations back. What the batches consumed stays consumed."""
        with contextlib.suppress(BufferClosed), self._filling:
            self._settle()
            while (gone := list(self)) and not self._exchange(gone):
                pass

    def close(self) -> None:
        """Give all back, and keep nothing from now on."""
        self.limit, self.keeps = 0, False
        self.refund()

    def forget(self) -> None:
        """In a forked child: the batches are the parent's."""
        self._lock, self._filling = threading.Lock(), threading.Lock()
        self._ready, self._aside, self._drawn = (), (), None
        self._moving, self._drawing = False, 0

    def _uncount(self, items: int, calls: int, kept: Sequence[SampledBatch], emptied: int) -> None:
        """With the lock: so many were not delivered after all, and those that are ``kept`` are reserved again."""
        engine = self._engine
        try:
            state = engine.load()
            engine.refuse_closed(state, "sample", items)
            if state[EMPTIED] == emptied:  # else a load may have set the counters
                state[CALLS] = max(0, state[CALLS] - calls)
                state[RETURNED] = max(0, state[RETURNED] - items)
                if engine.unlimited:
                    state[EXEMPT_SAMPLES] = max(0, state[EXEMPT_SAMPLES] - items)
            self._reader.reserve(state, _items(kept), len(kept))
            engine.commit(state, engine.items_event, engine.space_event)
        finally:
            engine.control.mutex.unlock()

    def _put_back(self, thread: int) -> None:
        """What was set aside for this thread is there for all again."""
        with self._lock:
            mine = [batch for keeper, batch in self._aside if keeper == thread]
            aside = tuple(pair for pair in self._aside if pair[0] != thread)
            self._aside, self._ready = aside, (*mine, *self._ready)

    def _drop_emptied(self) -> None:
        """Give back what was drawn before everything was dropped."""
        emptied = self._reader.emptied()
        gone = [batch for batch in self._ready if batch.emptied != emptied]
        if gone:
            self._exchange(gone)

    # ------------------------------------------------------------------ what is kept, and what is reserved
    def _exchange(
        self,
        leaving: Sequence[SampledBatch],
        entering: Sequence[SampledBatch] = (),
        *,
        parts: list[SampledBatch] | None = None,
        calls: int = 0,
        given: Given | None = None,
        patience: Patience | None = None,
    ) -> bool:
        """Keep ``entering`` in the place of ``leaving``, and tell so; ``parts`` are delivered by that, to ``given``.

        False: nothing was changed, as others were faster, or as the buffer was emptied and nothing can be delivered.
        """
        engine = self._engine
        with self._lock:
            ready = (*entering, *_without(self._ready, leaving))
            aside = self._aside
            if aside:
                gone = {id(batch) for batch in leaving}
                aside = tuple(pair for pair in aside if id(pair[1]) not in gone)
            if len(ready) + len(aside) != len(self._ready) + len(self._aside) - len(leaving) + len(entering):
                return False
            try:
                state = engine.load(patience)
                engine.refuse_closed(state, "sample", _items(parts or leaving))
                if parts and parts[0].emptied != state[EMPTIED]:
                    return False
                moving, self._moving = self._moving, True
                if parts:
                    items = _items(parts)
                    state[CALLS] += calls
                    state[RETURNED] += items
                    if engine.unlimited:
                        state[EXEMPT_SAMPLES] += items
                self._reader.reserve(state, _items(entering) - _items(leaving), len(entering) - len(leaving))
                try:
                    engine.commit(state, engine.items_event, engine.space_event)
                except BaseException:  # just before it was in force, or just after
                    if engine.control.load() == state:
                        self._ready, self._aside, self._moving = ready, aside, moving
                        if parts and given is not None:
                            given.insert(0, (parts, calls))
                    raise
                self._ready, self._aside, self._moving = ready, aside, moving
                if parts and given is not None:
                    given.insert(0, (parts, calls))
                return True
            finally:
                engine.control.mutex.unlock()

    def _put_right(self) -> None:
        """Finish what an exception has cut off in an earlier call."""
        if self._aside:
            self._put_back(threading.get_ident())
        if (self._moving and not self._lock.locked()) or (self._drawing and not self._filling.locked()):
            with self._filling:
                self._settle()

    def _settle(self) -> None:
        """While nobody else draws: what is reserved for this process is from now on what is kept here."""
        engine = self._engine
        self._keep_drawn()
        with self._lock:
            if not (self._moving or self._drawing):
                return
            try:
                state = engine.load()
                people, kept = engine.control.participants, list(self)
                line = people.claim_process()
                if line is not None:
                    people.reserve(line, _items(kept), len(kept))
                state[RESERVED], state[PREFETCHED] = people.all_reserved()
                engine.commit(state, engine.items_event, engine.space_event)
                self._moving, self._drawing = False, 0
            finally:
                engine.control.mutex.unlock()


def _items(batches: Sequence[SampledBatch]) -> int:
    if len(batches) == 1:  # the usual case, here and below
        return len(batches[0].slots)
    return sum([len(batch.slots) for batch in batches])


def _without(batches: tuple[SampledBatch, ...], gone: Sequence[SampledBatch]) -> tuple[SampledBatch, ...]:
    if len(gone) == 1 and batches and batches[0] is gone[0]:
        return batches[1:]
    ids = {id(batch) for batch in gone}
    return tuple(batch for batch in batches if id(batch) not in ids)


def _part(taken: SampledBatch, begin: int, end: int | None) -> SampledBatch:
    part = slice(begin, end)
    extra = {key: value[part] for key, value in taken.extra.items()}
    return SampledBatch(taken.rows[part], taken.slots[part], taken.numbers[part], extra, taken.emptied)


def joined(given: Given) -> SampledBatch:
    """All of it as one batch."""
    parts = given[0][0] if len(given) == 1 else [batch for batches, _ in given for batch in batches]
    if len(parts) == 1:
        return parts[0]
    return SampledBatch(
        torch.cat([part.rows.view(torch.uint8) for part in parts]),
        np.concatenate([part.slots for part in parts]),
        np.concatenate([part.numbers for part in parts]),
        {key: torch.cat([part.extra[key] for part in parts]) for key in parts[0].extra},
        parts[0].emptied,
    )
