"""What one buffer consists of in one process, put together."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from millpond.core.errors import BufferClosed, Cancelled, InvalidArgument, NotReady, PeerLost, SchemaMismatch
from millpond.core.schema import Schema
from millpond.replay import config as rulebook
from millpond.replay.batch import BatchMemory
from millpond.replay.config import BufferConfig
from millpond.replay.engine import Engine, MakeMemory, find
from millpond.replay.insert import Writer
from millpond.replay.memory import Memory, give_up
from millpond.replay.prefetch import Prefetch
from millpond.replay.sample import Reader
from millpond.replay.samplers.prioritized import Weighed
from millpond.replay.samplers.protocol import Ints
from millpond.replay.samplers.uniform import SamplerWithoutReplacement
from millpond.replay.staging import StagingPool
from millpond.replay.stats import stats
from millpond.replay.storage import MappedStorage, Storage, TensorStorage
from millpond.replay.update import Updater
from millpond.shm.interrupts import defer_interrupts


class LocalReplay:
    """The engine, and what works on it. `ReplayBuffer` is the public face of one, and of another once it was moved to
    shared memory. Made by `made` or by `attached`."""

    def __init__(self, rules: BufferConfig, storage: Storage, generator: torch.Generator, make: MakeMemory) -> None:
        self.rules = rules
        self.engine = Engine(storage, rules.sampler, rules.flow, rules.deliveries, generator, make, rules.num_envs)
        self.engine.find_rows = self.find_rows
        self.writer, self.reader = Writer(self.engine), Reader(self.engine)
        self.updater = Updater(self.engine, check_finite=rules.check_finite)
        epochs = find(SamplerWithoutReplacement, rules.sampler) is not None
        self.ahead = Prefetch(self.engine, self.reader, rules.prefetch, self.updater.epoch_over if epochs else None)
        self.staging_pool = StagingPool()
        self.schema: Schema | None = None  # as far as this process knows; see `known`
        self.plain = rules.device is None and rules.transform is None and not rules.contiguous  # samples are views
        self.closed = False
        self.final: dict[str, Any] = {}  # the figures of a closed buffer
        self.watched = None if self.engine.memory.mine else self.engine.memory  # its owner may die
        defer_interrupts()
        memory = self.engine.memory  # not for the finalizer: it leads back here, so these works would live for ever
        self._finalizer = weakref.finalize(self, _remove, memory.path if memory.mine else None, os.getpid())
        _all.add(self)

    @classmethod
    def made(cls, rules: BufferConfig, storage: Storage, generator: torch.Generator, *, shared: bool) -> Self:
        """Over fresh memory."""
        path = storage.path if isinstance(storage, MappedStorage) else None
        if shared and type(storage) is TensorStorage:
            raise InvalidArgument(
                "a TensorStorage is private memory; for shared=True give a capacity or a MappedStorage"
            )

        def make(sizes: dict[str, int], recover: Any) -> Memory:
            if not shared and path is None:
                return Memory.private(sizes, recover)
            return Memory.create(sizes, recover, rules.to_json(), path)

        local = cls(rules, storage, generator, make)
        if isinstance(storage, MappedStorage) and storage.path is None and local.engine.memory.path is not None:
            storage.path = local.engine.memory.path
        return local

    @classmethod
    def attached(cls, rules: BufferConfig, path: Path) -> Self:
        """Over what another process made. Raises ``NotShareable`` and ``PeerLost`` as `ReplayBuffer.attach` does."""
        local = cls(rules, rules.storage_at(path), rulebook.generator(None), lambda s, r: Memory.attach(s, r, path))
        try:
            local.find_rows()
            if local.engine.memory.mine:
                local.updater.reopen()
                if local.engine.order is not None:
                    local.engine.order.loaded()
        except BaseException:
            local.give_up()
            raise
        return local

    # ------------------------------------------------------------------ the schema
    def known(self) -> Schema | None:
        """The bound schema. None until the first write, in whichever process, unless it was given."""
        if self.schema is None and not self.closed:
            self.find_rows()
        return self.schema

    def known_schema(self) -> Schema:
        """The same. Raises ``NotReady`` where there is none."""
        schema = self.schema or self.known()
        if schema is None:
            raise NotReady("nothing was written yet, and no schema was given")
        return schema

    def bind(self, schema: Schema, first: int | None = None) -> Schema:
        """Allocate the rows, once, in whichever process comes first, for a write of so many.

        Raises ``SchemaMismatch`` where another schema is bound, and ``InvalidArgument`` where that write is refused.
        """
        if self.schema is not None:
            return self.schema
        engine = self.engine
        engine.refuse_closed(engine.control.peek(), "extend", 0)
        with engine.memory.binding():
            if self.find_rows() and self.schema is not None:
                if self.schema != schema:
                    raise SchemaMismatch(f"another schema is bound: {self.schema.difference(schema)}")
                return self.schema
            rulebook.refuse_own_names(schema)
            check = getattr(engine.sampler, "check_schema", None)
            if check is not None:
                check(schema)
            order = engine.order_of(schema)
            if order is not None and first is not None:
                order.admit(first)
            engine.storage.bind(schema)
            if engine.memory.shared:
                engine.memory.write_schema(schema)
            engine.bind(schema)
            if engine.order is not None:
                engine.order.loaded()
            self.schema = schema
            return schema

    def find_rows(self) -> bool:
        """Use the rows that another process bound. False where nobody has."""
        engine = self.engine
        if self.schema is None and engine.memory.shared and engine.bound():
            use: Any = getattr(engine.storage, "map", engine.storage.bind)
            with engine.memory.files():
                schema = engine.memory.read_schema()
                use(schema)
            engine.bind(schema)
            self.schema = schema
        return self.schema is not None

    # ------------------------------------------------------------------ in and out
    def put(
        self,
        rows: torch.Tensor,
        priority: Any,
        timeout: Any,
        cancel: Any,
        receipt: Any,
        who: int | None = None,
        first: Schema | None = None,
    ) -> Ints | None:
        """Write packed rows of the bound schema. Their slots; None where there are none, or they were dropped.

        ``who`` writes, if not this thread. ``first`` is their schema where none was bound: it is bound once nothing
        else can be wrong with them. Raises as `ReplayBuffer.extend` does.
        """
        if self.watched is not None:
            self.watched.look("extend")
        if first is not None:
            if len(rows):
                self._judged(first, rows, priority, receipt)
                self._refuse_first(len(rows), cancel)
            self.bind(first, len(rows))
        order = self.engine.order
        if order is None or not len(rows):
            return self._put(rows, priority, timeout, cancel, receipt, None)
        order.admit(len(rows))
        slots = None
        try:
            slots = self._put(rows, priority, timeout, cancel, receipt, who)
        finally:
            if slots is None:
                order.missed(who)
        if who is None:
            order.warn()
        return slots

    def _put(
        self, rows: torch.Tensor, priority: Any, timeout: Any, cancel: Any, receipt: Any, who: int | None
    ) -> Ints | None:
        n = rows.shape[0]
        weighed = self._judged(None, rows, priority, receipt)
        if n == 0:
            return None
        if receipt is not None:
            receipt = rulebook.check_receipt(receipt)
        slots = self.writer.put(rows, weighed, timeout=timeout, cancel=cancel, receipt=receipt, who=who)
        if slots is None or len(slots) == n:
            return slots
        return slots[np.arange(-n, 0) % len(slots)]  # those of the first ones, which others of this write have now

    def _judged(self, schema: Schema | None, rows: torch.Tensor, priority: Any, receipt: Any) -> Weighed | None:
        """The priorities. Raises where something is wrong with the rows or with what comes with them."""
        n, weighed = rows.shape[0], None
        if priority is not None:
            if self.engine.priorities is None:
                raise InvalidArgument(f"priority= needs a PrioritizedSampler, this buffer has {self.rules.sampler!r}")
            weighed = self.engine.priorities.weigh(priority, n)
        if n == 0:
            return None
        if self.rules.check_finite:
            schema = schema or self.known_schema()
            rulebook.refuse_nonfinite({field.key: schema.column(rows, field.key) for field in schema.fields})
        if receipt is not None:
            rulebook.check_receipt(receipt)
        return weighed

    def _refuse_first(self, n: int, cancel: Any) -> None:
        """A write that can come to nothing binds no schema."""
        if cancel is not None and cancel.is_set():
            raise Cancelled(f"extend({n}): the cancel event is set")
        state = self.engine.control.peek()
        block = self.engine.insert_block(state, n)
        if block is not None:
            self.engine.refuse_impossible("extend", n, state, block)

    def into(self, n: int) -> BatchMemory | None:
        """Memory for a batch of n, laid out for its caller; None as long as no schema is known."""
        if self.schema is None:
            return None
        into = BatchMemory(n, self.schema.row_nbytes // 8)
        into.data = into.unpacked(self.schema)
        return into

    # ------------------------------------------------------------------ the end
    def close(self) -> None:
        """See `ReplayBuffer.close`."""
        self.final = stats(self.engine, self.schema)
        self.closed, self.watched = True, None
        with contextlib.suppress(PeerLost):  # nobody else will come
            self.ahead.close()
        engine = self.engine
        engine.close(everybody=engine.memory.mine)
        self.give_up()
        self.rules = self.rules.unbound()
        gone: Any = Closed()
        self.engine = self.writer = self.reader = self.updater = gone
        self.ahead = Prefetch(gone, gone, 0)
        self.staging_pool = StagingPool()
        engine.let_go()

    def give_up(self) -> None:
        """Remove the files, if they are this process's."""
        if self.engine.memory.mine:
            self.engine.memory.remove()
        self._finalizer.detach()

    def after_fork(self) -> None:
        """A child draws other numbers than its parent, and what the parent drew ahead is the parent's."""
        if self.closed:
            return
        self.ahead.forget()
        self.watched = self.engine.memory if self.engine.memory.shared else None
        self.engine.memory.turnstile = threading.RLock()
        self.engine.random.torch = rulebook.generator(None)


class Closed:
    """In the place of a closed buffer's engine: whatever is asked of it raises ``BufferClosed``."""

    deliveries = None

    def __getattr__(self, name: str) -> Any:
        raise BufferClosed("the buffer was closed")


def _remove(path: Path | None, pid: int) -> None:
    """For works that nobody closed. A forked child's copy must not remove its parent's files."""
    if path is not None and os.getpid() == pid:
        give_up(path)


_all: weakref.WeakSet[LocalReplay] = weakref.WeakSet()


def _after_fork() -> None:
    for local in list(_all):
        local.after_fork()


os.register_at_fork(after_in_child=_after_fork)
