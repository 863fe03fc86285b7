"""What can be seen of a buffer from outside: a live one, one that its owner left behind, or a saved one.

Looking takes no lock, becomes nobody's owner and changes no counter: a stopped holder does not stop it, and a buffer
whose processes were all killed is shown as they left it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from millpond.core.errors import CheckpointError, InvalidArgument, NotShareable
from millpond.core.schema import Key, Schema
from millpond.replay import container
from millpond.replay import state as words
from millpond.replay.config import BufferConfig
from millpond.replay.container import Column
from millpond.replay.engine import Engine
from millpond.replay.memory import Memory, read_rules
from millpond.replay.order import DONE, TERMINATED, TRUNCATED, Episodes
from millpond.replay.rows import Rows
from millpond.replay.samplers.protocol import Bools, Ints, State
from millpond.replay.samplers.uniform import RandomSampler
from millpond.replay.stats import counted, figures
from millpond.replay.storage import SeenStorage
from millpond.shm import identity
from millpond.shm.directory import PREFIX, is_temporary, shared_root
from millpond.shm.observer import Observer
from millpond.shm.ownership import Owner, lives

Report = dict[str, Any]

TRIES = 50
MANY = 64  # a field of more elements than this is shown by its shape, smallest, largest and mean
_ROLES = {
    words.PRODUCER: "producer",
    words.PRESSING: "producer",
    words.CONSUMER: "consumer",
    words.WRITABLE: "waits until writable",
    words.SAMPLEABLE: "waits until sampleable",
}


def inspect(path: str | os.PathLike[str], *, rows: int = 3) -> Report:
    """A report, as JSON knows it, on the buffer at ``path``, with its ``rows`` youngest items.

    ``path`` is the directory of a buffer in shared memory or on disk (also `Handle.path`), or a checkpoint file.

    Raises:
        NotShareable: there is no buffer at ``path``.
        CheckpointError: it is a file, but no sound checkpoint of a replay buffer.
    """
    place = Path(path).absolute()
    if rows < 0:
        raise InvalidArgument(f"rows is a number of items, 0 or more, not {rows}")
    if place.is_dir():
        return _Look(place).report(rows)
    if not place.exists():
        raise NotShareable(f"{path} is not there")
    return _saved(place, rows)


def shared_buffers(root: Path | None = None) -> list[Path]:
    """The directories of all buffers in shared memory that this user may look at."""
    root = shared_root() if root is None else root
    return sorted(path.parent for path in root.glob(f"{PREFIX}*/rules.json"))


# ---------------------------------------------------------------------- buffers in files
class _Look:
    """One look at a buffer in files."""

    def __init__(self, path: Path) -> None:
        self._path = path
        spelled = read_rules(path)
        self._spelled = spelled
        self._knows = {"sampler": spelled["sampler"] is not None, "storage": not spelled["own_storage"]}
        sampler = None if self._knows["sampler"] else RandomSampler()
        rules = BufferConfig.from_json({**spelled, "own_storage": False}, sampler, path)
        self._engine = Engine(
            SeenStorage(rules.capacity, path),
            rules.sampler,
            rules.flow,
            rules.deliveries,
            torch.Generator(),
            lambda sizes, recover: Memory.observe(sizes, path),
        )
        self._rules = rules
        control: Any = self._engine.control
        self._control: Observer = control
        self._owner = Owner.read(path)
        self._state = self._settled()
        self._schema: Schema | None = None
        if self._state[words.BOUND]:
            self._schema = self._engine.memory.read_schema()
            if self._knows["storage"]:
                self._engine.storage.bind(self._schema)
                self._engine.rows = Rows(self._engine.storage, self._schema)

    def _settled(self) -> State:
        """A committed state whose redo log is applied. One that stays behind its log is somebody's who died there."""
        for _ in range(TRIES):
            state = self._control.peek()
            if not state[words.REDO]:
                return state
            time.sleep(1e-4)
        self._engine.slots.apply_redo(state[words.REDO])  # in this process's copy
        state[words.REDO] = 0
        return state

    def report(self, rows: int) -> Report:
        rules, state = self._rules, self._state
        waiting = [] if self._rebooted() else self._control.waiting()
        living = [w for w in waiting if identity.thread_alive(w.pid, w.tid)]
        return {
            "path": str(self._path),
            "kind": "shared memory" if is_temporary(self._path) else "disk",
            "owner": self._describe_owner(),
            "closed": bool(state[words.CLOSED]),
            "schema": describe_schema(self._schema),
            "counters": figures(self._engine, self._schema, state, living),
            "waiting": [
                {
                    "pid": w.pid,
                    "thread": w.tid,
                    "role": _ROLES.get(w.role, str(w.role)),
                    "need": w.need,
                    "since_s": max(0.0, (time.monotonic_ns() - w.since_ns) / 1e9),
                    "alive": w in living,
                }
                for w in waiting
            ],
            "lock": self._lock(),
            "sampler": self._spelled["sampler"],
            "flow": rules.flow.to_dict(),
            "batch_size": rules.batch_size,
            "prefetch": rules.prefetch,
            "consume_after_n_samples": rules.deliveries,
            "explain": {op: self._explain(op) for op in ("sample", "extend")},
            "episodes": self._episodes(),
            "rows": self._last_rows(rows),
        }

    def _rebooted(self) -> bool:
        return self._owner is not None and self._owner.boot != identity.boot_id()

    def _describe_owner(self) -> Report | None:
        owner = self._owner
        return None if owner is None or not owner.pid else {"pid": owner.pid, "alive": bool(lives(self._path))}

    def _lock(self) -> Report:
        holder = 0 if self._rebooted() else self._control.mutex.holder
        writing = self._control.unfinished()
        return {
            "kind": self._control.kind,
            "holder": {"thread": holder, "pid": _process_of(holder)} if holder else None,
            "writing": {"pid": writing.pid, "items": writing.count, "first": writing.start} if writing else None,
        }

    def _explain(self, op: str) -> str:
        state, engine = self._state, self._engine
        n = (
            (self._rules.batch_size or state[words.LAST_SAMPLE] or 1)
            if op == "sample"
            else state[words.LAST_INSERT] or 1
        )
        if state[words.CLOSED]:
            return f"{op}({n}) cannot proceed: the buffer was closed"
        if self._schema is not None and engine.rows is None:
            return f"{op}({n}): unknown, as the rows lie in a storage of the user's"
        try:
            block = engine.sample_block(state, n) if op == "sample" else engine.insert_block(state, n)
        except InvalidArgument as problem:  # such as a batch size that the sampler refuses
            return f"{op}({n}) cannot proceed: {problem}"
        if block is not None:
            return engine.explain_block(op, n, block)
        doubt = "" if self._knows["sampler"] or op == "extend" else ", unless the sampler, one of the user's, refuses"
        return f"{op}({n}) can proceed{doubt}"

    def _episodes(self) -> Report | None:
        if self._engine.rows is None:
            return None
        return episodes_of(self._engine.view(self._state), self._rules.num_envs)

    def _last_rows(self, n: int) -> list[Report]:
        engine, schema = self._engine, self._schema
        if engine.rows is None or schema is None or n == 0:
            return []
        for _ in range(TRIES):
            slots, numbers = (part[-n:] for part in engine.slots.since(self._state, 0))
            found = engine.rows.read(slots).view(torch.uint8)
            whole = engine.slots.alive(self._control.peek(), slots, numbers)
            if whole.all():
                break
            self._state = self._settled()  # overwritten while they were read
        return [describe_row(schema, found[i], numbers[i], slots[i]) for i in np.flatnonzero(whole)]


def _process_of(thread: int) -> int | None:
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{thread}/status") as file:
        return int(next(line for line in file if line.startswith("Tgid:")).split()[1])
    return None


# ---------------------------------------------------------------------- checkpoints
class _Saved:
    """The items of a checkpoint, as the sequence index wants to see them."""

    def __init__(self, saved: dict[str, Any], schema: Schema) -> None:
        self.state = [saved["state"].get(name, 0) for name in words.NAMES]
        self.capacity, self.schema, self.size = saved["capacity"], schema, len(saved["slots"])
        self.slots: Ints = saved["slots"].whole().numpy()
        self._rows: Column = saved["rows"]
        if self._rows.shape != (self.size, schema.row_nbytes) or self.slots.ndim != 1:
            raise ValueError(f"rows of shape {self._rows.shape}")
        self.numbers = np.arange(self.state[words.HEAD] - self.size, self.state[words.HEAD])
        self._by_age = np.arange(self.size)
        self.distinct = "slots" in saved["arrays"]
        if self.distinct:  # a pool: items left in any order
            self.numbers = saved["arrays"]["slots"].words(2 * self.capacity, 3 * self.capacity)[self.slots]
            self._by_age = np.argsort(self.numbers, kind="stable")
            self.slots, self.numbers = self.slots[self._by_age], self.numbers[self._by_age]

    def since(self, number: int) -> tuple[Ints, Ints]:
        return self.slots, self.numbers

    def alive(self, slots: Ints, numbers: Ints) -> Bools:
        return np.ones(len(slots), bool)

    def read(self, slots: Ints, keys: list[Key]) -> list[torch.Tensor]:
        parts: list[list[torch.Tensor]] = [[] for _ in keys]
        for a, b in list(self._rows.spans()) or [(0, 0)]:
            piece = self._rows.read(a, b)
            for part, key in zip(parts, keys, strict=True):
                part.append(self.schema.column(piece, key).clone())
        return [torch.cat(part)[torch.from_numpy(self._by_age)] for part in parts]

    def youngest(self, n: int) -> list[Report]:
        """Number, slot and values of n items."""
        places = range(max(0, self.size - n), self.size)
        rows = [self._rows.read(int(self._by_age[i]), int(self._by_age[i]) + 1)[0] for i in places]
        found = zip(rows, self.numbers[places], self.slots[places], strict=True)
        return [describe_row(self.schema, row, number, slot) for row, number, slot in found]


def _saved(path: Path, rows: int) -> Report:
    try:
        with container.opened(path) as saved:
            schema = None if saved["schema"] is None else Schema.from_json(saved["schema"])
            state: State = [saved["state"].get(name, 0) for name in words.NAMES]
            items = None if schema is None else _Saved(saved, schema)
            return {
                "path": str(path),
                "kind": "checkpoint",
                "format": saved["format"],
                "nbytes": path.stat().st_size,
                "schema": describe_schema(schema),
                "counters": {"capacity": saved["capacity"], **counted(state)},
                "sampler": json.loads(saved["sampler"]),
                "consume_after_n_samples": saved["deliveries"] or None,
                "episodes": None if items is None else episodes_of(items, saved.get("num_envs")),
                "rows": [] if items is None else items.youngest(rows),
            }
    except container.DAMAGE as problem:
        if isinstance(problem, CheckpointError):
            raise
        raise CheckpointError(f"{path} is no checkpoint of a replay buffer: {problem!r:.200}") from problem


# ---------------------------------------------------------------------- parts of a report
def describe_schema(schema: Schema | None) -> Report | None:
    """Bytes of a row, and type and shape of each field."""
    if schema is None:
        return None
    return {"row_nbytes": schema.row_nbytes, "fields": {field.name: field.describe() for field in schema.fields}}


def episodes_of(items: Any, num_envs: int | None) -> Report | None:
    """`EpisodeStats` of `Items`; None where they do not say where an episode ends, or are sequences."""
    ends = [items.schema.by_key[key] for key in (DONE, TERMINATED, TRUNCATED) if key in items.schema.by_key]
    if not ends or any(field.size != 1 for field in ends):
        return None
    return Episodes(num_envs=num_envs or 1).look(items).episodes(items.alive)._asdict()


def describe_row(schema: Schema, row: torch.Tensor, number: Any, slot: Any) -> Report:
    """Number, slot and values of one item."""
    rows = row.reshape(1, -1)
    values = {field.name: _value(schema.column(rows, field.key)[0]) for field in schema.fields}
    return {"number": int(number), "slot": int(slot), "values": values}


def _value(tensor: torch.Tensor) -> Any:
    """As JSON knows it."""
    if tensor.numel() <= MANY:
        return _plain(tensor.tolist())
    numbers = tensor.abs().double() if tensor.is_complex() else tensor.double()
    figures = {"min": numbers.min().item(), "max": numbers.max().item(), "mean": numbers.mean().item()}
    return {"shape": list(tensor.shape), **{name: _plain(value) for name, value in figures.items()}}


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value
