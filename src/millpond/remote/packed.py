"""A replay buffer by its packed rows: what crosses the wire goes in, and comes out, as it lies in storage."""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections.abc import Iterator
from typing import Any, BinaryIO, Literal, cast

import torch
from tensordict import TensorDict

from millpond.core.errors import BufferClosed, InvalidArgument, NotShareable, SchemaMismatch
from millpond.core.intake import described
from millpond.core.schema import Schema
from millpond.replay.batch import SampledBatch
from millpond.replay.buffer import ReplayBuffer
from millpond.replay.samplers.protocol import Ints
from millpond.replay.state import CONSUMER_BLOCKS, PRODUCER_BLOCKS

Side = Literal["sample", "extend"]


class Packed:
    """The owner's way to its buffer. Nothing here waits for the buffer to become ready. Any thread may use it.

    ``exempt`` means: left out of the ratio, as inside ``buffer.unlimited()``.
    """

    def __init__(self, buffer: ReplayBuffer) -> None:
        self.buffer = buffer
        self.consuming = buffer._local.rules.deliveries is not None
        self._ahead = threading.Lock()  # batches drawn ahead are one queue, for all clients
        self._making = threading.Lock()
        self._twin: ReplayBuffer | None = None

    def put(
        self,
        rows: torch.Tensor,
        fingerprint: str,
        *,
        priority: Any,
        receipt: tuple[int, int] | None,
        exempt: bool,
        who: int | None = None,
    ) -> Ints | None:
        """Write rows that ``who`` sent, or raise as ``extend(timeout=0)`` does. None: dropped."""
        schema = self.buffer.schema
        whole = rows.dtype is torch.uint8 and rows.is_contiguous()
        if not whole or schema is None or schema.fingerprint != fingerprint or rows.shape[1:] != (schema.row_nbytes,):
            raise SchemaMismatch(f"rows of schema {fingerprint}, {described(rows)}; bound is {schema!r}")
        return self.chosen(exempt)._local.put(rows, priority, 0, None, receipt, who)

    def take(self, n: int, *, wait: bool, exempt: bool) -> SampledBatch:
        """Draw n items, or raise as ``sample(wait=wait, timeout=0)`` does."""
        buffer = self.chosen(exempt)
        patience: Any = {"wait": wait, "timeout": 0 if wait else None, "cancel": None}
        if not buffer._local.rules.prefetch:
            return buffer._local.ahead.take(n, **patience)
        with self._ahead:
            return buffer._local.ahead.take(n, **patience)

    def noted(self, taken: SampledBatch, n: int) -> SampledBatch:
        """What to keep of a batch of n that was handed out, so that `give_back` can take it back."""
        if not self.buffer._local.ahead.keeps:  # it would be drawn again
            taken = taken._replace(rows=torch.empty(0, dtype=torch.uint8))
        return taken._replace(asked=n, data=None)

    def give_back(self, noted: SampledBatch, *, exempt: bool) -> None:
        """A batch did not reach whoever asked for it."""
        self.chosen(exempt)._local.ahead.take_back([([noted], 1)])

    @property
    def row_nbytes(self) -> int:
        """Bytes of an item; 1 where no schema is bound yet."""
        schema = self.buffer.schema
        return 1 if schema is None else schema.row_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all items that fit."""
        return self.buffer.capacity * self.row_nbytes

    def peek(self, n: int) -> SampledBatch:
        """As ``ReplayBuffer.peek``."""
        return SampledBatch(*self.buffer._local.updater.peek(n), {}, 0)

    def pick(self, which: Any) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Rows of the items that ``which`` names by age, and the shape of the index."""
        return self.buffer._local.updater.pick(which)

    def epoch_over(self, n: int) -> bool:
        """Was the last batch of the epoch drawn, and handed over?"""
        return self.buffer._local.updater.epoch_over(n) and not self.buffer._local.ahead

    def bind(self, schema: Schema) -> Schema:
        """The bound schema, which is this one where none was bound. Raises ``SchemaMismatch``, with the difference."""
        bound = self.buffer.schema or self.buffer._local.bind(schema)
        if bound != schema:
            raise SchemaMismatch(f"another schema is bound: {bound.difference(schema)}")
        return bound

    def named(self, index: torch.Tensor, generation: torch.Tensor | None) -> Any:
        """What ``update`` and ``update_priority`` take, from what a client sends of it."""
        if generation is None:
            return index
        return TensorDict({"index": index, "generation": generation}, [len(index)])

    def count_block(self, side: Side) -> None:
        """One more call had to wait."""
        engine = self.buffer._local.engine
        try:
            state = engine.load()
            state[CONSUMER_BLOCKS if side == "sample" else PRODUCER_BLOCKS] += 1
            engine.commit(state)
        finally:
            engine.control.mutex.unlock()

    def changes(self, side: Side) -> Changes:
        """How pending calls learn that the buffer changed."""
        return Changes(self.buffer, side)

    def close(self) -> None:
        """The buffer closes for everybody."""
        with self._making:
            if self._twin is not None:
                self._twin.close()
        self.buffer.close()

    def chosen(self, exempt: bool) -> ReplayBuffer:
        """The buffer; or the same one as another process would see it, which counts nothing against the ratio."""
        if not exempt:
            return self.buffer
        with self._making:
            if self._twin is None:
                if not self.buffer.shared:
                    raise NotShareable("unlimited() from another process needs a buffer in shared memory")
                self._twin = ReplayBuffer.attach(self.buffer.handle())
                self._twin._local.engine.unlimited = 1
            return self._twin


class Changes:
    """The buffer's event count of one side, as `millpond.remote.pending.Tickets`."""

    def __init__(self, buffer: ReplayBuffer, side: Side) -> None:
        self._buffer = buffer
        self._name = "items_event" if side == "sample" else "space_event"

    def prepare(self) -> int:
        try:
            engine, mutex = self._buffer._local.engine, self._buffer._local.engine.control.mutex
        except BufferClosed:
            return -1
        try:
            engine.load()
            ticket: int = getattr(engine, self._name).prepare()
            return ticket
        finally:
            mutex.unlock()

    def wait(self, ticket: int, seconds: float) -> bool:
        if ticket < 0:
            return True
        try:
            moved: bool = getattr(self._buffer._local.engine, self._name).wait(ticket, seconds)
            return moved
        except BufferClosed:
            return True


PIECE = 16 << 20  # bytes


class Spool:
    """A checkpoint on its way, in a file without a name in the directory for temporary files (``TMPDIR``).

    ``expected``: bytes that will be `put` into it.
    """

    def __init__(self, expected: int = 0) -> None:
        self.file = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115  # closed with this object
        weakref.finalize(self, self.file.close)
        self._expected = expected

    @property
    def nbytes(self) -> int:
        return os.fstat(self.file.fileno()).st_size

    def put(self, at: Any, piece: torch.Tensor) -> None:
        """A piece has come. Raises ``InvalidArgument`` where it is none of this file."""
        put(self.file, at, piece, self._expected)

    def piece(self, at: Any) -> torch.Tensor:
        """The bytes from ``at`` on."""
        if type(at) is not int or not 0 <= at < self.nbytes:
            raise InvalidArgument(f"a file of {self.nbytes} bytes has no piece at {at!r:.40}")
        return piece(self.file, at)


def put(file: BinaryIO, at: Any, piece: torch.Tensor, nbytes: int) -> None:
    """Write a piece into a file that will have ``nbytes``. Raises ``InvalidArgument`` where it does not fit in."""
    if type(at) is not int or piece.dtype is not torch.uint8 or not 0 <= at <= nbytes - piece.numel():
        raise InvalidArgument(f"{piece.numel()} {piece.dtype} at {at!r:.40} do not fit into {nbytes} bytes")
    view, done = piece.contiguous().reshape(-1).numpy().data, 0
    while done < len(view):
        done += os.pwrite(file.fileno(), view[done:], at + done)


def piece(file: BinaryIO, at: int) -> torch.Tensor:
    """Up to 16 MiB of a file from ``at`` on."""
    return torch.frombuffer(bytearray(os.pread(file.fileno(), PIECE, at)), dtype=torch.uint8)


def places(nbytes: int) -> Iterator[int]:
    """Where each piece of so many bytes begins."""
    return iter(range(0, nbytes, PIECE))
