"""The replay buffer: the public face of the engine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from millpond.core.errors import (
    BufferClosed,
    InvalidArgument,
    InvalidType,
    NotShareable,
    SchemaMismatch,
)
from millpond.core.schema import Batch, Schema
from millpond.flow.limiter import Flow
from millpond.replay import checkpoint
from millpond.replay import config as rulebook
from millpond.replay.batch import SampledBatch
from millpond.replay.config import BufferConfig
from millpond.replay.local import LocalReplay
from millpond.replay.memory import opening, read_rules
from millpond.replay.ownership import claim, release
from millpond.replay.samplers.protocol import Sampler
from millpond.replay.samplers.uniform import RandomSampler
from millpond.replay.state import CLOSED, LIVE, RECEIPT_LINES, STORED, WRITES
from millpond.replay.stats import stats
from millpond.replay.storage import MappedStorage, Storage, TensorStorage, check_capacity
from millpond.replay.waiting import check_cancel, check_timeout
from millpond.shm.holding import describe
from millpond.shm.interrupts import uninterrupted


@dataclass(frozen=True)
class Handle:
    """Picklable: how another process on this host finds a shared buffer. Give it to `ReplayBuffer.attach`."""

    path: str
    rules: BufferConfig


class ReplayBuffer:
    """Stores items and lets them out at the rate that its rules allow.

    Threads may use one buffer at once; so may processes, once it is shared. A sampled row is never torn, and a
    process that is killed at any instant leaves a buffer that the others go on using, with exact counters.

    Args:
        storage: a capacity in items, or a storage.
        sampler: chooses the items; uniform with replacement by default.
        batch_size: items of a ``sample()`` that does not say otherwise.
        flow: when writing and sampling may proceed.
        schema: the fields of an item; otherwise the first write binds it.
        prefetch: batches that ``sample`` draws and gathers ahead, at the end of the call before.
        consume_after_n_samples: deliveries after which an item is gone and its slot free. None: never.
        transform: called with each sampled batch; what it returns is returned. What it raises comes out of ``sample``,
            and the batch counts as not delivered: where its items could not be drawn again, because they are consumed
            or each is drawn once in an epoch, the next ``sample`` of the same size gets it, as it was. The same holds
            where the copy to ``device`` fails.
        device: where sampled batches go, as one copy.
        contiguous: give each field of a batch its own memory instead of a view of the packed batch.
        check_finite: refuse NaN and infinities in floating-point fields.
        num_envs: for items without ``episode_id``: each write holds one row of each of so many environments, always in
            the same order, or several such steps one after the other. Samplers that look along episodes need this
            where ``extend`` writes several rows and the items have no ids. One by one, with ``add``, and without
            ``num_envs``, the items of each writer are one stream.
        seed: of this process's draws: a number, or a generator to draw from. None: a random one.
        shared: lie in shared memory, for other processes, from the start.

    Raises:
        InvalidArgument, InvalidType: bad values, or a combination that cannot mean anything.
        OutOfMemory, OutOfDisk: also from the first write, which allocates the rows; both numbers are named.
    """

    def __init__(
        self,
        storage: int | Storage,
        *,
        sampler: Sampler | None = None,
        batch_size: int | None = None,
        flow: Flow | None = None,
        schema: Schema | None = None,
        prefetch: int = 0,
        consume_after_n_samples: int | None = None,
        transform: Callable[[Any], Any] | None = None,
        device: torch.device | str | None = None,
        contiguous: bool = False,
        check_finite: bool = False,
        num_envs: int | None = None,
        seed: int | torch.Generator | None = None,
        shared: bool = False,
    ) -> None:
        kept: Any = storage
        if not isinstance(storage, Storage):
            capacity = check_capacity(storage)
            kept = MappedStorage(capacity) if shared else TensorStorage(capacity)
        rules = BufferConfig(
            capacity=check_capacity(kept.capacity),
            sampler=RandomSampler() if sampler is None else sampler,
            flow=Flow() if flow is None else flow,
            storage=kept,
            batch_size=batch_size,
            prefetch=prefetch,
            deliveries=consume_after_n_samples,
            transform=transform,
            device=None if device is None else str(device),
            contiguous=contiguous,
            check_finite=check_finite,
            num_envs=num_envs,
        ).checked()
        if schema is not None and not isinstance(schema, Schema):
            raise InvalidType(f"schema is a Schema, not {type(schema).__name__}")
        draws = rulebook.generator(seed)
        claim(self, (*rulebook.layers(rules.sampler), kept))
        try:
            self._local = LocalReplay.made(rules, kept, draws, shared=shared)
        except BaseException:
            release(self)
            raise
        if schema is not None:
            try:
                self._local.bind(schema)
            except BaseException:
                self.close()
                raise

    # ------------------------------------------------------------------ writing
    @uninterrupted
    def extend(
        self,
        items: Batch,
        *,
        priority: Any = None,
        timeout: float | None = None,
        cancel_event: Any = None,
        receipt: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """Write a batch: all of its items, or none. Returns their slots, int64 ``[n]``; none where it was dropped.

        Where old items are overwritten, a batch may have more items than the capacity. It is as if they were written
        one after the other: all count as written, the last ones stay, and a slot is returned for each that got it.

        Args:
            items: a TensorDict, a tensorclass, a nested dict of tensors or arrays, or one tensor. Its leading dimension
                counts items. A list of these is stacked. What cannot be stored is refused, by its name: text and
                objects, empty groups, other fields than the bound ones, other types (NumPy's float64 goes where float32
                is bound, and Python's numbers where they fit) and other shapes, fields that only some of a stack have.
                Of a sampled batch, what tells how it was drawn is left out, where the schema has no such field:
                ``index``, ``generation``, ``priority_weight``, ``buffer_id``, ``relabelled``, and a ``mask``
                without padding. ``steps_to_next_obs`` stays: it belongs to the reward.
            priority: one for each item, or one for all; needs a prioritized sampler.
            timeout: seconds to wait for space or for the ratio; 0 tries once. None waits without end.
            cancel_event: anything with ``is_set()``; once set, the call raises ``Cancelled``.
            receipt: ``(line, number)``, recorded together with the write; `receipt` reads it, whoever was killed since.

        Raises:
            SchemaMismatch, NonFinite, InvalidArgument: nothing was written.
            DeadlineExceeded, Cancelled, BufferFull, BufferClosed, PeerLost: nothing was written.
            Unsatisfiable: it can never fit.
        """
        if timeout is not None or cancel_event is not None:
            check_timeout(timeout)
            check_cancel(cancel_event)
        local, first = self._local, None
        schema = local.schema or local.known()
        if schema is None:
            schema = first = Schema.from_example(rulebook.without_draw(items, None, dims=1))
        try:
            tensors = schema.check(items)
        except SchemaMismatch as problem:
            tensors = schema.check(rulebook.undrawn(items, schema, problem, dims=1))
        staging = local.staging_pool.take(schema, tensors[0].shape[0])
        staging.fill(tensors)
        slots = local.put(staging.rows, priority, timeout, cancel_event, receipt, first=first)
        local.staging_pool.give(staging)
        return _NO_SLOTS if slots is None else torch.from_numpy(slots)

    @uninterrupted
    def add(self, item: Batch, *, priority: Any = None, timeout: float | None = None, cancel_event: Any = None) -> int:
        """Write one item, without a leading dimension. Returns its slot, -1 where it was dropped. As `extend` else."""
        local, first = self._local, None
        schema = local.schema
        if schema is None:
            check_timeout(timeout)
            check_cancel(cancel_event)
            schema = local.known()
            if schema is None:
                schema = first = Schema.from_item(rulebook.without_draw(item, None, dims=0))
        staging = local.staging_pool.take(schema, 1)
        try:
            schema.fill_item(staging, item)
        except SchemaMismatch as problem:
            schema.fill_item(staging, rulebook.undrawn(item, schema, problem, dims=0))
        slots = local.put(staging.rows, priority, timeout, cancel_event, None, first=first)
        local.staging_pool.give(staging)
        return -1 if slots is None else int(slots[0])

    def receipt(self, line: int) -> int:
        """The number of the latest write that left a receipt on this line, 0 before the first. Exact after any
        death."""
        if not 0 <= line < RECEIPT_LINES:
            raise InvalidArgument(f"a receipt's line is 0 to {RECEIPT_LINES - 1}, got {line}")
        return self._local.engine.receipt(line)

    # ------------------------------------------------------------------ sampling
    @uninterrupted
    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        *,
        wait: bool = False,
        timeout: float | None = None,
        cancel_event: Any = None,
    ) -> Any:
        """A batch: the item's fields, ``index`` and ``generation`` (int64 ``[n]``), and what the sampler adds.

        Args:
            batch_size: items; the buffer's own by default.
            return_info: return ``(data, info)``, with what is not stored apart.
            wait: wait until the batch can be had, and take it in the same step; otherwise raise ``NotReady`` at once.
            timeout, cancel_event: as in `extend`.

        Raises:
            NotReady, DeadlineExceeded, Cancelled, BufferClosed, PeerLost: with what is missing, in numbers.
            Unsatisfiable: such a batch can never be had.
            OutOfMemory: it does not fit into what memory is free.
        """
        n = self._batch_size(batch_size)
        if n > rulebook.FREELY:
            rulebook.check_room(n, self.schema)
        if timeout is not None or cancel_event is not None:
            check_timeout(timeout)
            check_cancel(cancel_event)
        local = self._local
        if local.watched is not None:
            local.watched.look("sample")
        plain = local.plain and not return_info
        cancelled = cancel_event is not None and cancel_event.is_set()
        asked = plain and not local.rules.prefetch and not cancelled and local.ahead.idle
        if asked:
            picked = local.engine.fast_path.sample(n)
            if picked is not None:
                try:
                    return picked.unpacked(local.schema or local.known_schema())
                except BaseException:
                    local.ahead.take_back([([picked.taken()._replace(asked=n)], 1)])
                    raise
        prepare = local.into if plain else None
        taken = local.ahead.take(n, wait=wait, timeout=timeout, cancel=cancel_event, prepare=prepare, asked=asked)
        if taken.data is not None:
            return taken.data
        try:
            return self._dress(taken, return_info)
        except BaseException:
            local.ahead.take_back([([taken._replace(asked=n)], 1)])
            raise

    def _dress(self, taken: SampledBatch, return_info: bool) -> Any:
        rules, schema = self._local.rules, self._local.known_schema()
        if rules.transform is not None:
            taken = self._local.ahead.lent(taken)
        rows, index, generation = taken.rows, torch.from_numpy(taken.slots), torch.from_numpy(taken.numbers)
        extra = taken.extra
        if self._local.plain and not return_info:
            return schema.unpack(rows, extra, {"index": index, "generation": generation})
        if rules.device is not None:
            rows, index, generation, extra = rulebook.to_device(rules.device, rows, index, generation, extra)
        return rulebook.dress(schema, rules, rows, index, generation, extra, return_info)

    def peek(self, n: int) -> Any:
        """A uniform look at n items (with replacement): consumes nothing, and moves no counter and no generator.

        Raises ``NotReady`` where there is no item at all, ``OutOfMemory`` where n items do not fit into what is free.
        """
        n = self._batch_size(n)
        if n > rulebook.FREELY:
            rulebook.check_room(n, self.schema)
        rows, slots, numbers = self._local.updater.peek(n)
        return self._dress(SampledBatch(rows, slots, numbers, {}, 0), False)

    def __getitem__(self, which: Any) -> Any:
        """Items by age, 0 the oldest that a sample may return: an index, a slice, a mask, or several indices, and then
        the batch has their shape. Raises ``OutOfRange``, an ``IndexError``."""
        rows, shape = self._local.updater.pick(which)
        return rulebook.picked(self._local.known_schema(), rows, shape)

    @uninterrupted
    def __iter__(self) -> Iterator[Any]:
        """Batches, waiting for each; ends with the sampler's epoch, if it has any, or when the buffer is closed."""
        with contextlib.suppress(BufferClosed):
            while True:
                yield self.sample(wait=True)
                if self._local.updater.epoch_over(self._batch_size(None)) and not self._local.ahead:
                    return

    # ------------------------------------------------------------------ waiting
    def can_sample(self, batch_size: int | None = None) -> bool:
        """Would ``sample(batch_size)`` succeed now?"""
        n, local = self._batch_size(batch_size), self._local
        if local.closed:
            return False
        state = local.engine.control.peek()
        if state[CLOSED]:
            return False
        return local.ahead.block(state, n) is None

    def wait_until_sampleable(
        self, num_items: int | None = None, *, timeout: float | None = None, cancel_event: Any = None
    ) -> bool:
        """Wait until ``sample(num_items)`` may proceed; somebody else may still be faster. False on timeout."""
        n, local = self._batch_size(num_items), self._local
        return local.engine.wait_until("sample", n, timeout, cancel_event, local.ahead.block)

    def wait_until_writable(
        self, num_items: int = 1, *, timeout: float | None = None, cancel_event: Any = None
    ) -> bool:
        """Wait until ``extend`` of so many items may proceed; somebody else may still be faster. False on timeout."""
        n, engine = rulebook.check_batch_size(num_items, "num_items"), self._local.engine
        return engine.wait_until("extend", n, timeout, cancel_event, engine.insert_block)

    @contextlib.contextmanager
    def unlimited(self) -> Iterator[Self]:
        """What this process does inside is left out of ``samples_per_insert`` and ``max_debt``: for offline prefill."""
        self._local.engine.unlimited += 1
        try:
            yield self
        finally:
            if not self._local.closed:
                self._local.engine.unlimited -= 1

    # ------------------------------------------------------------------ changing what is there
    @uninterrupted
    def update_priority(self, index_or_sample: Any, priority: Any) -> int:
        """Give sampled items new priorities. Returns how many were applied.

        Args:
            index_or_sample: a sampled batch, its info, or slots. From a batch, items whose slots were rewritten since
                are left out and counted as ``stale_updates``. Of an item named twice the last priority counts.
            priority: one for each, finite and not negative.

        Raises ``InvalidArgument`` or ``InvalidType``, before anything was changed.
        """
        if self._local.watched is not None:
            self._local.watched.look("update_priority")
        return self._local.updater.update_priority(index_or_sample, priority)

    @uninterrupted
    def update(self, index_or_sample: Any, patch: Batch) -> int:
        """Write some fields of sampled items back. Returns how many were; slots rewritten since are left out.

        Args:
            index_or_sample: as in `update_priority`.
            patch: some of the schema's fields, ``[n, …]``, for each of the items.

        Raises ``SchemaMismatch`` or ``NonFinite``, before anything was changed.
        """
        if self._local.watched is not None:
            self._local.watched.look("update")
        return self._local.updater.update(index_or_sample, patch)

    @uninterrupted
    def empty(self) -> None:
        """Drop all items, for everybody who shares the buffer. ``write_count`` and the other counters stay."""
        self._local.ahead.refund()
        self._local.engine.empty()

    # ------------------------------------------------------------------ figures
    def stats(self) -> dict[str, Any]:
        """The counters of the design, the same keys from every kind of buffer."""
        local = self._local
        return dict(local.final) if local.closed else stats(local.engine, local.schema)

    def explain(self, op: str = "sample", n: int | None = None) -> str:
        """One line: why ``sample(n)`` or ``extend(n)`` cannot proceed now, or that it can."""
        if op not in ("sample", "extend"):
            raise InvalidArgument(f'op is "sample" or "extend", not {op!r}')
        count = self._batch_size(n) if op == "sample" else rulebook.check_batch_size(1 if n is None else n, "n")
        if self._local.closed or self._local.engine.control.peek()[CLOSED]:
            return f"{op}({count}) cannot proceed: the buffer was closed"
        engine = self._local.engine
        state = engine.control.peek()
        block = self._local.ahead.block(state, count) if op == "sample" else engine.insert_block(state, count)
        if block is not None:
            return engine.explain_block(op, count, block)
        holder = engine.stopped_holder()
        if holder:
            return f"{op}({count}) cannot proceed: the lock is held by {describe(holder)}; SIGCONT lets it go on"
        return f"{op}({count}) can proceed"

    @property
    def capacity(self) -> int:
        """In items."""
        return self._local.rules.capacity

    @property
    def schema(self) -> Schema | None:
        """None until the first write, in whichever process, unless it was given."""
        return self._local.known()

    @property
    def batch_size(self) -> int | None:
        return self._local.rules.batch_size

    @property
    def sampler(self) -> Sampler:
        sampler: Sampler = self._local.rules.sampler
        return sampler

    @property
    def flow(self) -> Flow:
        return self._local.rules.flow

    @property
    def write_count(self) -> int:
        """Items ever written."""
        return (
            int(self._local.final["write_count"]) if self._local.closed else self._local.engine.control.peek()[WRITES]
        )

    @property
    def storage_size(self) -> int:
        """Slots physically occupied."""
        return (
            int(self._local.final["storage_size"]) if self._local.closed else self._local.engine.control.peek()[STORED]
        )

    @property
    def sampleable_size(self) -> int:
        """Items that a sample may return now."""
        return int(self._local.final["size"]) if self._local.closed else self._local.engine.control.peek()[LIVE]

    def __len__(self) -> int:
        return self.sampleable_size

    # ------------------------------------------------------------------ sharing
    def share(self) -> Self:
        """Move into shared memory, with all that it holds, so that other processes can use it. Returns itself."""
        if not self._local.engine.memory.shared:
            self._local = checkpoint.moved_to_shared(self._local)
        return self

    @property
    def shared(self) -> bool:
        return self._local.engine.memory.shared

    def handle(self) -> Handle:
        """Raises ``NotShareable`` where the buffer is not shared."""
        path = self._local.engine.memory.path
        if path is None:
            raise NotShareable("this buffer lies in private memory: call share() first, or dumps(path) to save a copy")
        return Handle(str(path), self._local.rules)

    @classmethod
    def attach(cls, handle_or_path: Handle | str | os.PathLike[str], *, sampler: Sampler | None = None) -> Self:
        """The same buffer, with the same rules, in this process.

        A path on disk whose owner is gone is reopened, and this process becomes its owner. A buffer with a sampler
        that is not millpond's needs it once more, unless a handle is given.

        Raises:
            NotShareable: there is no buffer, or it is another container's.
            PeerLost: it lay in shared memory, and its owner is gone.
        """
        if isinstance(handle_or_path, Handle):
            path, rules = Path(handle_or_path.path), handle_or_path.rules.for_another()
        else:
            path = Path(handle_or_path).absolute()
            rules = BufferConfig.from_json(read_rules(path), sampler, path)
        self = cls.__new__(cls)
        with opening(path):
            self._local = LocalReplay.attached(rules, path)
            if self._local.engine.memory.mine:  # taken over: what the files say was not looked at by its owner
                try:
                    checkpoint.refuse_damaged(self._local)
                except BaseException:
                    self._local.give_up()
                    raise
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).attach, (self.handle(),)

    # ------------------------------------------------------------------ saving
    def state_dict(self) -> dict[str, Any]:
        """Contents, counters, sampler, generator, and the batches drawn ahead, as tensors, numbers and strings."""
        return checkpoint.state_dict(self._local)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace what the buffer holds by what `state_dict` gave. Raises ``CheckpointError`` before anything
        changed."""
        checkpoint.load_state_dict(self._local, state)

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Save to a file: versioned, checksummed, whole or not at all."""
        checkpoint.dumps(self._local, path)

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Replace what the buffer holds by a saved file. Raises ``CheckpointError`` before anything changed."""
        checkpoint.loads(self._local, path)

    def close(self) -> None:
        """In the process that made the buffer: close it for everybody. In one that attached: leave it.

        Its memory is given back once no call of another thread is inside; `stats` keeps answering with the last
        figures.
        """
        if not self._local.closed:
            self._local.close()
            release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ inside
    def _batch_size(self, n: int | None) -> int:
        if n is None:
            n = self._local.rules.batch_size
            if n is None:
                raise InvalidArgument("no batch_size: give it to sample(), or to the buffer")
            return n
        return n if type(n) is int and 0 < n < rulebook.MOST_ITEMS else rulebook.check_batch_size(n)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.sampleable_size}/{self.capacity} items, {self._local.rules.sampler!r})"


_NO_SLOTS = torch.empty(0, dtype=torch.int64)
