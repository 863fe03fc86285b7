"""The methods of `ReplayBuffer` as requests to its owner: the same arguments, results and errors."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
from collections.abc import Iterator
from typing import Any, BinaryIO, Self

import torch

from millpond.core.errors import BufferClosed, InvalidArgument, NotReady, SchemaMismatch
from millpond.core.schema import Batch, Schema
from millpond.remote.messages import Message
from millpond.remote.packed import Spool, piece, places, put
from millpond.remote.session import Patience, Session
from millpond.replay import checkpoint, container
from millpond.replay import config as rulebook
from millpond.replay.order import this_thread
from millpond.replay.samplers.prioritized import real_numbers
from millpond.replay.staging import StagingPool
from millpond.replay.update import index_of, named
from millpond.shm.interrupts import uninterrupted

_NO_SLOTS = torch.empty(0, dtype=torch.int64)


class RemoteBackend:
    """A buffer that another process owns, through one session. Batches are checked, packed and unpacked here, by the
    code and the schema that the owner uses, so a wrong one is refused in the same words."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._rules = session.owner.rules
        self._schema: Schema | None = None
        self._staging_pool = StagingPool()
        self._exempt = 0

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
        schema = self.schema or self.bind(Schema.from_example(rulebook.without_draw(items, None, dims=1)))
        try:
            tensors = schema.check(items)
        except SchemaMismatch as problem:
            tensors = schema.check(rulebook.undrawn(items, schema, problem, dims=1))
        n = tensors[0].shape[0]
        patience = Patience(f"extend({n})", "extend", n, timeout, cancel_event)
        if n == 0:
            return _NO_SLOTS
        staging = self._staging_pool.take(schema, n)
        staging.fill(tensors)
        slots = self._put(staging.rows, priority, patience, receipt)
        self._staging_pool.give(staging)
        return slots

    def add(self, item: Batch, *, priority: Any = None, timeout: float | None = None, cancel_event: Any = None) -> int:
        patience = Patience("extend(1)", "extend", 1, timeout, cancel_event)
        schema = self.schema or self.bind(Schema.from_item(rulebook.without_draw(item, None, dims=0)))
        staging = self._staging_pool.take(schema, 1)
        try:
            schema.fill_item(staging, item)
        except SchemaMismatch as problem:
            schema.fill_item(staging, rulebook.undrawn(item, schema, problem, dims=0))
        slots = self._put(staging.rows, priority, patience, None)
        self._staging_pool.give(staging)
        return int(slots[0]) if len(slots) else -1

    def _put(
        self, rows: torch.Tensor, priority: Any, patience: Patience, receipt: tuple[int, int] | None
    ) -> torch.Tensor:
        assert self._schema is not None
        tensors = {"rows": rows}
        if priority is not None:
            tensors["priority"] = torch.from_numpy(real_numbers(priority))
        fields = {
            "n": len(rows),
            "schema": self._schema.fingerprint,
            "wait": patience.timeout > 0,
            "exempt": self._exempt > 0,
            "who": this_thread(),
            "receipt": None if receipt is None else rulebook.check_receipt(receipt),
        }
        answer = self._session.call("extend", fields, tensors, patience)
        if "slots" in answer.tensors:
            return answer.tensors["slots"].long()
        start, n = int(answer.fields["start"]), int(answer.fields["n"])
        return torch.arange(start, start + n) % self.capacity

    def receipt(self, line: int) -> int:
        return int(self._ask("receipt", line=operator.index(line)))

    def bind(self, schema: Schema) -> Schema:
        """Bind this schema, or find it bound. Raises ``SchemaMismatch``, with the difference, where another one is."""
        return self._know(self._ask("bind", schema=schema.to_json()))

    def _know(self, text: str) -> Schema:
        self._schema = Schema.from_json(text)
        return self._schema

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
        n = self._batch_size(batch_size)
        patience = Patience(f"sample({n})", "sample", n, timeout, cancel_event)
        fields = {"n": n, "patient": wait, "wait": wait and patience.timeout > 0, "exempt": self._exempt > 0}
        dress = functools.partial(self._dress, return_info=return_info)
        return self._session.call("sample", fields, None, patience, use=dress)

    def peek(self, n: int) -> Any:
        return self._session.call("peek", {"n": self._batch_size(n)}, use=self._dress)

    def _dress(self, answer: Message, return_info: bool = False) -> Any:
        tensors = answer.tensors
        rows, index, generation = tensors["rows"], tensors["slots"].long(), tensors["numbers"].long()
        extra = {tuple(key): tensors[f"extra{i}"] for i, key in enumerate(answer.fields["extra"])}
        if self._rules.device is not None:
            rows, index, generation, extra = rulebook.to_device(self._rules.device, rows, index, generation, extra)
        return rulebook.dress(self._known_schema(), self._rules, rows, index, generation, extra, return_info)

    def __getitem__(self, which: Any) -> Any:
        index = index_of(which)
        if isinstance(index, slice):
            answer = self._session.call("pick", {"slice": [index.start, index.stop, index.step]})
        else:
            answer = self._session.call("pick", {"slice": None}, {"which": torch.from_numpy(index)})
        return rulebook.picked(self._known_schema(), answer.tensors["rows"], answer.fields["shape"])

    @uninterrupted
    def __iter__(self) -> Iterator[Any]:
        n = self._batch_size(None)
        while True:
            try:
                batch = self.sample(wait=True)
            except BufferClosed:
                return
            yield batch
            try:
                if self._ask("epoch_over", n=n):
                    return
            except BufferClosed:
                return

    # ------------------------------------------------------------------ waiting
    def can_sample(self, batch_size: int | None = None) -> bool:
        n = self._batch_size(batch_size)
        try:
            return bool(self._ask("can_sample", n=n, exempt=self._exempt > 0))
        except BufferClosed:
            return False

    def wait_until_sampleable(
        self, num_items: int | None = None, *, timeout: float | None = None, cancel_event: Any = None
    ) -> bool:
        return self._until("sample", self._batch_size(num_items), timeout, cancel_event)

    def wait_until_writable(
        self, num_items: int = 1, *, timeout: float | None = None, cancel_event: Any = None
    ) -> bool:
        return self._until("extend", rulebook.check_batch_size(num_items, "num_items"), timeout, cancel_event)

    def _until(self, op: str, n: int, timeout: float | None, cancel: Any) -> bool:
        patience = Patience(f"wait for {op}({n})", op, n, timeout, cancel)
        fields = {"n": n, "wait": patience.timeout > 0, "exempt": self._exempt > 0}
        try:
            self._session.call(f"until_{op}", fields, None, patience)
        except TimeoutError:
            return False
        return True

    @contextlib.contextmanager
    def unlimited(self) -> Iterator[Self]:
        self._exempt += 1
        try:
            yield self
        finally:
            self._exempt -= 1

    # ------------------------------------------------------------------ changing what is there
    def update_priority(self, index_or_sample: Any, priority: Any) -> int:
        tensors = _named(index_or_sample)
        tensors["priority"] = torch.from_numpy(real_numbers(priority))
        return int(self._session.call("update_priority", None, tensors).fields["applied"])

    def update(self, index_or_sample: Any, patch: Batch) -> int:
        tensors = _named(index_or_sample)
        fields = self._known_schema().check_patch(patch, len(tensors["index"]))
        tensors |= {f"patch{i}": value.cpu() for i, value in enumerate(fields.values())}
        return int(self._session.call("update", {"keys": [list(key) for key in fields]}, tensors).fields["applied"])

    def empty(self) -> None:
        self._session.call("empty")

    # ------------------------------------------------------------------ figures
    def stats(self) -> dict[str, Any]:
        figures: dict[str, Any] = self._session.call("stats").fields["stats"]
        return figures

    def explain(self, op: str = "sample", n: int | None = None) -> str:
        if op not in ("sample", "extend"):
            raise InvalidArgument(f'op is "sample" or "extend", not {op!r}')
        count = self._batch_size(n) if op == "sample" else rulebook.check_batch_size(1 if n is None else n, "n")
        try:
            return str(self._ask("explain", op=op, n=count))
        except BufferClosed as closed:
            return f"{op}({count}) cannot proceed: {closed}"

    @property
    def capacity(self) -> int:
        return self._rules.capacity

    @property
    def schema(self) -> Schema | None:
        if self._schema is None:
            text = self._ask("bind", schema=None)
            if text is not None:
                self._know(text)
        return self._schema

    @property
    def write_count(self) -> int:
        return int(self._session.call("counts").fields["write_count"])

    @property
    def storage_size(self) -> int:
        return int(self._session.call("counts").fields["storage_size"])

    @property
    def sampleable_size(self) -> int:
        return int(self._session.call("counts").fields["size"])

    # ------------------------------------------------------------------ saving
    def state_dict(self) -> dict[str, Any]:
        spool = Spool()
        self._fetch(spool.file)
        state: dict[str, Any] = checkpoint.whole(container.read(spool.file, "what came"))
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        spool = Spool()
        container.write(spool.file, state)
        self._bring(spool.file)

    def dumps(self, path: str | os.PathLike[str]) -> None:
        with container.replacing(path) as file:
            self._fetch(file)

    def loads(self, path: str | os.PathLike[str]) -> None:
        with container.reading(path) as file:
            self._bring(file)

    def _fetch(self, file: BinaryIO) -> None:
        nbytes = self._session.call("state").fields["nbytes"]
        for at in places(nbytes):
            put(file, at, self._session.call("fetch", {"at": at}).tensors["piece"], nbytes)
        self._session.call("fetched")

    def _bring(self, file: BinaryIO) -> None:
        nbytes = os.fstat(file.fileno()).st_size
        self._session.call("offer", {"nbytes": nbytes})
        for at in places(nbytes):
            self._session.call("bring", {"at": at}, {"piece": piece(file, at)})
        self._session.call("load")
        self._schema = None

    @property
    def lost(self) -> bool:
        """Has the connection ended, not on purpose?"""
        return self._session.lost

    def close(self) -> None:
        self._session.close()

    def __repr__(self) -> str:
        owner = self._session.owner
        return (
            f"RemoteBackend({owner.name!r}, {owner.reached_by(self._session.transport)}; {self.capacity} items at most)"
        )

    # ------------------------------------------------------------------ inside
    def _ask(self, kind: str, **fields: Any) -> Any:
        """The one value that the answer holds."""
        (value,) = self._session.call(kind, fields).fields.values()
        return value

    def _batch_size(self, n: int | None) -> int:
        if n is None:
            n = self._rules.batch_size
            if n is None:
                raise InvalidArgument("no batch_size: give it to sample(), or to the buffer")
            return n
        return rulebook.check_batch_size(n)

    def _known_schema(self) -> Schema:
        schema = self.schema
        if schema is None:
            raise NotReady("nothing was written yet, and no schema was given")
        return schema


def _named(index_or_sample: Any) -> dict[str, torch.Tensor]:
    """Which items are meant, as tensors. The owner judges the rest, as for a local buffer."""
    slots, numbers = named(index_or_sample)
    tensors = {"index": torch.from_numpy(slots)}
    return tensors if numbers is None else {**tensors, "generation": torch.from_numpy(numbers)}
