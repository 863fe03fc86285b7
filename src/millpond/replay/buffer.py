"""The replay buffer: the public face of the engine."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from millpond.core.errors import (
    BufferClosed,
    InvalidArgument,
    InvalidType,
    NonFinite,
    NotReady,
    NotShareable,
    SchemaMismatch,
)
from millpond.core.schema import Batch, Schema
from millpond.flow.limiter import Flow
from millpond.replay import checkpoint
from millpond.replay import rules as rulebook
from millpond.replay.ahead import Ahead
from millpond.replay.belonging import claim, release
from millpond.replay.desk import Desk
from millpond.replay.drawing import Ints, Sampler
from millpond.replay.editing import Editor
from millpond.replay.engine import Engine, find
from millpond.replay.memory import Memory, give_up, read_rules
from millpond.replay.rules import Rules
from millpond.replay.samplers import RandomSampler, SamplerWithoutReplacement
from millpond.replay.state import CLOSED, LIVE, RECEIPT_LINES, RESERVED, STORED, WRITES
from millpond.replay.storage import MappedStorage, Storage, TensorStorage, check_capacity
from millpond.replay.summary import stats
from millpond.replay.taken import Taken, Tray
from millpond.replay.taking import Taker
from millpond.replay.waiting import check_cancel, check_timeout
from millpond.replay.writing import Writer


@dataclass(frozen=True)
class Handle:
    """Picklable: how another process on this host finds a shared buffer. Give it to `ReplayBuffer.attach`."""

    path: str
    rules: Rules


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
        seed: int | torch.Generator | None = None,
        shared: bool = False,
    ) -> None:
        kept: Any = storage
        if not isinstance(storage, Storage):
            capacity = check_capacity(storage)
            kept = MappedStorage(capacity) if shared else TensorStorage(capacity)
        rules = Rules(
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
        ).checked()
        if schema is not None and not isinstance(schema, Schema):
            raise InvalidType(f"schema is a Schema, not {type(schema).__name__}")
        draws = rulebook.generator(seed)
        claim(self, (*rulebook.layers(rules.sampler), kept))
        try:
            self._build(rules, kept, draws, shared)
        except BaseException:
            release(self)
            raise
        if schema is not None:
            try:
                self._bind(schema)
            except BaseException:
                self.close()
                raise

    def _build(self, rules: Rules, storage: Storage, generator: torch.Generator, shared: bool) -> None:
        """Make the engine over fresh memory."""
        path = storage.path if isinstance(storage, MappedStorage) else None
        if shared and type(storage) is TensorStorage:
            raise InvalidArgument(
                "a TensorStorage is private memory; for shared=True give a capacity or a MappedStorage"
            )

        def make(sizes: dict[str, int], recover: Any) -> Memory:
            if not shared and path is None:
                return Memory.private(sizes, recover)
            return Memory.create(sizes, recover, rules.to_json(), path)

        self._start(rules, storage, generator, make)
        if isinstance(storage, MappedStorage) and storage.path is None and self._engine.memory.path is not None:
            storage.path = self._engine.memory.path

    def _start(self, rules: Rules, storage: Storage, generator: torch.Generator, make: Any) -> None:
        self._rules = rules
        self._closed = False
        self._final: dict[str, Any] = {}
        self._engine = Engine(storage, rules.sampler, rules.flow, rules.deliveries, generator, make)
        self._engine.find_rows = self._find_rows
        self._writer, self._taker = Writer(self._engine), Taker(self._engine)
        self._editor = Editor(self._engine)
        epochs = find(SamplerWithoutReplacement, rules.sampler) is not None
        self._ahead = Ahead(self._engine, self._taker, rules.prefetch, self._editor.epoch_over if epochs else None)
        self._schema: Schema | None = None
        self._plainly = rules.device is None and rules.transform is None and not rules.contiguous
        self._directly = self._plainly and not rules.prefetch
        self._desk = Desk()
        memory = self._engine.memory  # not for the finalizer: it leads back here, so this buffer would live for ever
        self._finalizer = weakref.finalize(self, _remove, memory.path if memory.mine else None, os.getpid())
        _buffers.add(self)

    # ------------------------------------------------------------------ writing
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

        Args:
            items: a TensorDict, a nested dict of tensors or arrays, or one tensor. Its leading dimension counts items.
                Of a sampled batch, what tells how it was drawn is left out, where the schema has no such field:
                ``index``, ``generation``, ``priority_weight``, ``buffer_id``, ``relabelled``.
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
        schema = self._schema or self._known()
        if schema is None:
            schema = self._bind(Schema.from_example(rulebook.without_draw(items, None, dims=1)))
        try:
            tensors = schema.check(items)
        except SchemaMismatch as problem:
            tensors = schema.check(rulebook.undrawn(items, schema, problem, dims=1))
        staging = self._desk.take(schema, tensors[0].shape[0])
        staging.fill(tensors)
        slots = self._put(staging.rows, priority, timeout, cancel_event, receipt)
        self._desk.give(staging)
        return _NO_SLOTS if slots is None else torch.from_numpy(slots)

    def add(self, item: Batch, *, priority: Any = None, timeout: float | None = None, cancel_event: Any = None) -> int:
        """Write one item, without a leading dimension. Returns its slot, -1 where it was dropped. As `extend` else."""
        schema = self._schema
        if schema is None:
            check_timeout(timeout)
            check_cancel(cancel_event)
            schema = self._known() or self._bind(Schema.from_item(rulebook.without_draw(item, None, dims=0)))
        staging = self._desk.take(schema, 1)
        try:
            schema.fill_item(staging, item)
        except SchemaMismatch as problem:
            schema.fill_item(staging, rulebook.undrawn(item, schema, problem, dims=0))
        slots = self._put(staging.rows, priority, timeout, cancel_event, None)
        self._desk.give(staging)
        return -1 if slots is None else int(slots[0])

    def _put(self, rows: torch.Tensor, priority: Any, timeout: Any, cancel: Any, receipt: Any) -> Ints | None:
        n = rows.shape[0]
        if n == 0:
            return None
        leaves = None
        if priority is not None:
            if self._engine.priorities is None:
                raise InvalidArgument(f"priority= needs a PrioritizedSampler, this buffer has {self._rules.sampler!r}")
            leaves = self._engine.priorities.leaves(priority, n)
        if self._rules.check_finite:
            self._refuse_nonfinite(rows)
        if receipt is not None and not (0 <= receipt[0] < RECEIPT_LINES and 0 <= receipt[1] < 1 << 64):
            raise InvalidArgument(
                f"a receipt is a line from 0 to {RECEIPT_LINES - 1} and a number of 64 bits, not {receipt}"
            )
        if n > self._rules.capacity:
            self._engine.refuse_impossible(insert=n)
        return self._writer.put(rows, leaves, timeout=timeout, cancel=cancel, receipt=receipt)

    def receipt(self, line: int) -> int:
        """The number of the latest write that left a receipt on this line, 0 before the first. Exact after any
        death."""
        if not 0 <= line < RECEIPT_LINES:
            raise InvalidArgument(f"a receipt's line is 0 to {RECEIPT_LINES - 1}, got {line}")
        return self._engine.receipt(line)

    # ------------------------------------------------------------------ sampling
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
        """
        n = self._batch_size(batch_size)
        if timeout is not None or cancel_event is not None:
            check_timeout(timeout)
            check_cancel(cancel_event)
        if self._directly and not return_info and cancel_event is None and self._ahead.idle:
            picked = self._engine.shortcut.sample(n)
            if picked is not None:
                try:
                    return picked.unpacked(self._schema or self._known_schema())
                except BaseException:
                    self._ahead.take_back([([picked.taken()._replace(asked=n)], 1)])
                    raise
        prepare = self._tray if self._plainly and not return_info else None
        taken = self._ahead.take(n, wait=wait, timeout=timeout, cancel=cancel_event, prepare=prepare)
        if taken.data is not None:
            return taken.data
        try:
            return self._dress(taken, return_info)
        except BaseException:
            self._ahead.take_back([([taken._replace(asked=n)], 1)])
            raise

    def _tray(self, n: int) -> Tray | None:
        schema = self._schema
        if schema is None:
            return None
        tray = Tray(n, schema.row_nbytes // 8)
        tray.data = tray.unpacked(schema)
        return tray

    def _dress(self, taken: Taken, return_info: bool) -> Any:
        if self._rules.transform is not None:
            taken = self._ahead.lent(taken)
        rows, index, generation = taken.rows, torch.from_numpy(taken.slots), torch.from_numpy(taken.numbers)
        extra = taken.extra
        if self._plainly and self._schema is not None and not return_info:
            return self._schema.unpack(rows, extra, {"index": index, "generation": generation})
        if self._rules.device is not None:
            rows, index, generation, extra = rulebook.to_device(self._rules.device, rows, index, generation, extra)
        return rulebook.dress(self._known_schema(), self._rules, rows, index, generation, extra, return_info)

    def peek(self, n: int) -> Any:
        """A uniform look at n items (with replacement): consumes nothing, and moves no counter and no generator.

        Raises ``NotReady`` where there is no item at all.
        """
        rows, slots, numbers = self._editor.peek(self._batch_size(n))
        return self._dress(Taken(rows, slots, numbers, {}, 0), False)

    def __getitem__(self, which: Any) -> Any:
        """Items by age, 0 the oldest that a sample may return: an index, a slice, or a mask or tensor of indices."""
        rows, single = self._editor.pick(which)
        found = self._known_schema().unpack(rows)
        return found[0] if single else found

    def __iter__(self) -> Iterator[Any]:
        """Batches, waiting for each; ends with the sampler's epoch, if it has any, or when the buffer is closed."""
        while True:
            try:
                batch = self.sample(wait=True)
            except BufferClosed:
                return
            yield batch
            if self._editor.epoch_over(self._batch_size(None)) and not self._ahead:
                return

    # ------------------------------------------------------------------ waiting
    def can_sample(self, batch_size: int | None = None) -> bool:
        """Would ``sample(batch_size)`` succeed now?"""
        n = self._batch_size(batch_size)
        if self._closed:
            return False
        state = self._engine.control.peek()
        if state[CLOSED]:
            return False
        if self._ahead:
            served = self._ahead.could_serve(n)
            if not served:  # batches of another size are given back first
                state[RESERVED] -= self._ahead.items
            n -= served
        return n <= 0 or self._engine.sample_block(state, n) is None

    def wait_until_sampleable(
        self, num_items: int | None = None, *, timeout: float | None = None, cancel_event: Any = None
    ) -> bool:
        """Wait until ``sample(num_items)`` may proceed; somebody else may still be faster. False on timeout."""
        n = self._batch_size(num_items)
        self._engine.refuse_impossible(batch=n)
        return self._engine.wait_until("sample", n, timeout, cancel_event)

    def wait_until_writable(
        self, num_items: int = 1, *, timeout: float | None = None, cancel_event: Any = None
    ) -> bool:
        """Wait until ``extend`` of so many items may proceed; somebody else may still be faster. False on timeout."""
        n = rulebook.check_batch_size(num_items, "num_items")
        self._engine.refuse_impossible(insert=n)
        return self._engine.wait_until("extend", n, timeout, cancel_event)

    @contextlib.contextmanager
    def unlimited(self) -> Iterator[Self]:
        """What this process does inside is left out of ``samples_per_insert`` and ``max_debt``: for offline prefill."""
        self._engine.unlimited += 1
        try:
            yield self
        finally:
            self._engine.unlimited -= 1

    # ------------------------------------------------------------------ changing what is there
    def update_priority(self, index_or_sample: Any, priority: Any) -> int:
        """Give sampled items new priorities. Returns how many were applied.

        Args:
            index_or_sample: a sampled batch, its info, or slots. From a batch, items whose slots were rewritten since
                are left out and counted as ``stale_updates``. Of an item named twice the last priority counts.
            priority: one for each, finite and not negative.

        Raises ``InvalidArgument`` or ``InvalidType``, before anything was changed.
        """
        return self._editor.update_priority(index_or_sample, priority)

    def update(self, index_or_sample: Any, patch: Batch) -> int:
        """Write some fields of sampled items back. Returns how many were; slots rewritten since are left out."""
        return self._editor.update(index_or_sample, patch)

    def empty(self) -> None:
        """Drop all items, for everybody who shares the buffer. ``write_count`` and the other counters stay."""
        self._ahead.refund()
        self._engine.empty()

    # ------------------------------------------------------------------ figures
    def stats(self) -> dict[str, Any]:
        """The counters of the design, the same keys from every kind of buffer."""
        return dict(self._final) if self._closed else stats(self._engine, self._schema)

    def explain(self, op: str = "sample", n: int | None = None) -> str:
        """One line: why ``sample(n)`` or ``extend(n)`` cannot proceed now, or that it can."""
        if op not in ("sample", "extend"):
            raise InvalidArgument(f'op is "sample" or "extend", not {op!r}')
        count = self._batch_size(n) if op == "sample" else rulebook.check_batch_size(1 if n is None else n, "n")
        if self._closed or self._engine.control.peek()[CLOSED]:
            return f"{op}({count}) cannot proceed: the buffer was closed"
        state, engine = self._engine.control.peek(), self._engine
        block = engine.sample_block(state, count) if op == "sample" else engine.insert_block(state, count)
        return f"{op}({count}) can proceed" if block is None else engine.explain_block(op, count, block)

    @property
    def capacity(self) -> int:
        """In items."""
        return self._rules.capacity

    @property
    def schema(self) -> Schema | None:
        """None until the first write, in whichever process, unless it was given."""
        if self._schema is None and not self._closed:
            self._find_rows()
        return self._schema

    @property
    def batch_size(self) -> int | None:
        return self._rules.batch_size

    @property
    def sampler(self) -> Sampler:
        sampler: Sampler = self._rules.sampler
        return sampler

    @property
    def flow(self) -> Flow:
        return self._rules.flow

    @property
    def write_count(self) -> int:
        """Items ever written."""
        return int(self._final["write_count"]) if self._closed else self._engine.control.peek()[WRITES]

    @property
    def storage_size(self) -> int:
        """Slots physically occupied."""
        return int(self._final["storage_size"]) if self._closed else self._engine.control.peek()[STORED]

    @property
    def sampleable_size(self) -> int:
        """Items that a sample may return now."""
        return int(self._final["size"]) if self._closed else self._engine.control.peek()[LIVE]

    def __len__(self) -> int:
        return self.sampleable_size

    # ------------------------------------------------------------------ sharing
    def share(self) -> Self:
        """Move into shared memory, with all that it holds, so that other processes can use it. Returns itself."""
        if not self._engine.memory.shared:
            checkpoint.move_to_shared(self)
        return self

    @property
    def shared(self) -> bool:
        return self._engine.memory.shared

    def handle(self) -> Handle:
        """Raises ``NotShareable`` where the buffer is not shared."""
        path = self._engine.memory.path
        if path is None:
            raise NotShareable("this buffer lies in private memory: call share() first, or dumps(path) to save a copy")
        return Handle(str(path), self._rules)

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
            rules = Rules.from_json(read_rules(path), sampler, path)
        self = cls.__new__(cls)
        self._start(
            rules, rules.storage_at(path), rulebook.generator(None), lambda sizes, rec: Memory.attach(sizes, rec, path)
        )
        if self._engine.memory.mine:
            self._editor.reopen()
        self._find_rows()
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).attach, (self.handle(),)

    # ------------------------------------------------------------------ saving
    def state_dict(self) -> dict[str, Any]:
        """Contents, counters, sampler, generator, and the batches drawn ahead, as tensors, numbers and strings."""
        return checkpoint.state_dict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace what the buffer holds by what `state_dict` gave. Raises ``CheckpointError`` before anything
        changed."""
        checkpoint.load_state_dict(self, state)

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Save to a file: versioned, checksummed, whole or not at all."""
        checkpoint.dumps(self, path)

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Replace what the buffer holds by a saved file. Raises ``CheckpointError`` before anything changed."""
        checkpoint.loads(self, path)

    def close(self) -> None:
        """In the process that made the buffer: close it for everybody. In one that attached: leave it.

        Its memory is given back once no call of another thread is inside; `stats` keeps answering with the last
        figures.
        """
        if self._closed:
            return
        self._final = self.stats()
        self._closed = True
        self._ahead.close()
        engine = self._engine
        engine.close(everybody=engine.memory.mine)
        if engine.memory.mine:
            engine.memory.remove()
        self._finalizer.detach()
        release(self)
        self._rules = self._rules.unbound()
        gone: Any = Gone()
        self._engine = self._writer = self._taker = self._editor = gone
        self._ahead = Ahead(gone, gone, 0)
        self._desk = Desk()
        engine.let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ inside
    def _after_fork(self) -> None:
        """A child draws other numbers than its parent, and what the parent drew ahead is the parent's."""
        if self._closed:
            return
        self._ahead.forget()
        self._engine.memory.turnstile = threading.RLock()
        self._engine.random.torch = rulebook.generator(None)

    def _batch_size(self, n: int | None) -> int:
        if n is None:
            n = self._rules.batch_size
            if n is None:
                raise InvalidArgument("no batch_size: give it to sample(), or to the buffer")
            return n
        return n if type(n) is int and n > 0 else rulebook.check_batch_size(n)

    def _known(self) -> Schema | None:
        return self.schema

    def _known_schema(self) -> Schema:
        schema = self.schema
        if schema is None:
            raise NotReady("nothing was written yet, and no schema was given")
        return schema

    def _bind(self, schema: Schema) -> Schema:
        """Allocate the rows, once, in whichever process comes first."""
        if self._schema is not None:
            return self._schema
        memory = self._engine.memory
        self._engine.refuse_closed(self._engine.control.peek(), "extend", 0)
        with memory.binding():
            if self._find_rows() and self._schema is not None:
                if self._schema != schema:
                    raise SchemaMismatch(f"another schema is bound: {self._schema.difference(schema)}")
                return self._schema
            rulebook.refuse_own_names(schema)
            check = getattr(self._engine.sampler, "check_schema", None)
            if check is not None:
                check(schema)
            self._engine.storage.bind(schema)
            if memory.shared:
                memory.write_schema(schema)
            self._engine.bind(schema)
            self._schema = schema
            return schema

    def _find_rows(self) -> bool:
        """Use the rows that another process bound. False where nobody has."""
        engine = self._engine
        if self._schema is None and engine.memory.shared and engine.bound():
            schema = engine.memory.read_schema()
            engine.storage.bind(schema)
            engine.bind(schema)
            self._schema = schema
        return self._schema is not None

    def _refuse_nonfinite(self, rows: torch.Tensor) -> None:
        schema = self._known_schema()
        for field in schema.fields:
            if field.dtype.is_floating_point or field.dtype.is_complex:
                finite = torch.isfinite(schema.column(rows, field.key)).reshape(len(rows), -1).all(1)
                if not bool(finite.all()):
                    raise NonFinite(
                        f"{field.name}: NaN or infinite in item {int((~finite).nonzero()[0])} of {len(rows)}"
                    )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.sampleable_size}/{self.capacity} items, {self._rules.sampler!r})"


class Gone:
    """In the place of a closed buffer's engine: whatever is asked of it raises ``BufferClosed``."""

    deliveries = None

    def __getattr__(self, name: str) -> Any:
        raise BufferClosed("the buffer was closed")


def _remove(path: Path | None, pid: int) -> None:
    """For a buffer that nobody closed. A forked child's copy must not remove its parent's files."""
    if path is not None and os.getpid() == pid:
        give_up(path)


_NO_SLOTS = torch.empty(0, dtype=torch.int64)
_buffers: weakref.WeakSet[ReplayBuffer] = weakref.WeakSet()


def _after_fork() -> None:
    for buffer in list(_buffers):
        buffer._after_fork()


os.register_at_fork(after_in_child=_after_fork)
