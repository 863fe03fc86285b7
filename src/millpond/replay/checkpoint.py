"""Saving a buffer and reading it back: contents, counters, sampler, generator, and the batches drawn ahead.

A file is, without pickle::

    "MILLPOND"  version (u32)  length of the header (u64)  crc32 of the header (u32)
    header      JSON: schema, capacity, sampler, state, and for each section its length and crc32
    sections    raw bytes

It is written under a temporary name and renamed, so a kill at any instant leaves the last good one.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from millpond.core.errors import BufferClosed, CheckpointError, InvalidArgument, NotShareable
from millpond.core.schema import Schema
from millpond.replay import state as words
from millpond.replay.prioritized import PrioritizedSampler
from millpond.replay.rules import spell
from millpond.replay.storage import MappedStorage, TensorStorage
from millpond.replay.taken import Taken
from millpond.replay.works import Works

MAGIC = b"MILLPOND"
VERSION = 1
_HEAD = struct.Struct("<8sIQI")
_MADE_ANEW = ("redo", "tree")  # of what else is saved, at a load
_KEPT = {  # of the running buffer, whatever a checkpoint says
    words.CLOSED,
    words.BOUND,
    words.REDO,
    words.REWRITES,
    words.EMPTIED,
    words.RESERVED,
    words.PREFETCHED,
    words.RECEIPT_LINE,
    words.RECEIPT_NUMBER,
}


def state_dict(works: Works) -> dict[str, Any]:
    """Everything that a buffer needs to go on: tensors, numbers and strings. Copies under the lock, for one moment's
    sake."""
    engine = works.engine
    names = [*engine.slots.memory(), *engine.sampler.memory(engine.capacity)]
    schema = works.known()
    try:
        state = engine.load()
        engine.refuse_closed(state, "state_dict", 0)
        slots, _ = engine.slots.since(state, 0)
        rows = None if engine.rows is None else engine.rows.read(slots)
        ahead = list(works.ahead)
        arrays = {name: _bytes(engine.memory.array(name)) for name in names if not name.startswith(_MADE_ANEW)}
    finally:
        engine.control.mutex.unlock()
    return {
        "format": VERSION,
        "capacity": engine.capacity,
        "schema": None if schema is None else schema.to_json(),
        "sampler": json.dumps(spell(engine.sampler)),
        "deliveries": engine.deliveries or 0,
        "state": dict(zip(words.NAMES, state, strict=False)),
        "slots": torch.from_numpy(slots.copy()),
        "rows": torch.empty(0, 0, dtype=torch.uint8) if rows is None else rows.view(torch.uint8),
        "arrays": arrays,
        "generator": engine.random.torch.get_state(),
        "ahead": [_spell_taken(taken) for taken in ahead],
    }


def load_state_dict(works: Works, saved: dict[str, Any]) -> None:
    """Replace what the buffer holds. Its limits, batch size and the like stay those of the running code.

    Raises:
        CheckpointError: another version, capacity, schema or sampler. Nothing was changed.
    """
    engine = works.engine
    schema, ahead = _check(works, saved)
    if schema is not None:
        works.bind(schema)
    works.ahead.refund()
    slots = saved["slots"].numpy()
    try:
        state = engine.load()
        engine.refuse_closed(state, "load_state_dict", 0)
        engine.drop(state)  # a death from here to the end leaves an empty buffer
        if engine.rows is not None and len(slots):
            engine.rows.write_at(slots, saved["rows"].contiguous())
        for name, values in saved["arrays"].items():
            if name != "priority_settings":  # of the running sampler, as far as it says
                np.frombuffer(engine.memory.array(name), np.uint8)[:] = values.numpy()
        for i, name in enumerate(words.NAMES):
            if i not in _KEPT and name in saved["state"]:
                state[i] = saved["state"][name]
        if engine.priorities is not None:
            engine.priorities.restore(saved["arrays"], _prioritized(saved["sampler"]), state, slots)
        engine.control.settle(state)
        engine.commit(state, *engine.control.events)
    finally:
        engine.control.mutex.unlock()
    engine.random.torch.set_state(saved["generator"])
    if ahead:
        works.ahead.restore(ahead)


def _check(works: Works, saved: dict[str, Any]) -> tuple[Schema | None, list[Taken]]:
    engine = works.engine
    try:
        if saved["format"] != VERSION:
            raise CheckpointError(f"checkpoint format {saved['format']}; this version reads {VERSION}")
        if saved["capacity"] != engine.capacity:
            raise CheckpointError(
                f"the checkpoint has a capacity of {saved['capacity']} items, this buffer {engine.capacity}"
            )
        theirs, mine = _kinds(json.loads(saved["sampler"])), _kinds(spell(engine.sampler))
        if theirs != mine or saved["deliveries"] != (engine.deliveries or 0):
            raise CheckpointError(
                f"the checkpoint was made by {theirs or 'a sampler of your own'} with consumption after "
                f"{saved['deliveries'] or 'no'} samples, this buffer has {mine} and {engine.deliveries or 'no'}"
            )
        schema = None if saved["schema"] is None else Schema.from_json(saved["schema"])
        sizes = {**engine.slots.memory(), **engine.sampler.memory(engine.capacity)}
        for name, values in saved["arrays"].items():
            if sizes.get(name) != values.numel():
                raise CheckpointError(f"array {name!r} has {values.numel()} bytes, {sizes.get(name)} are expected")
        if schema is not None and tuple(saved["rows"].shape) != (len(saved["slots"]), schema.row_nbytes):
            raise CheckpointError(f"{len(saved['slots'])} items, but rows of shape {list(saved['rows'].shape)}")
        _check_words(saved, engine.capacity)
        torch.Generator().set_state(saved["generator"])
        ahead = [_read_taken(taken) for taken in saved["ahead"]]
    except (CheckpointError, BufferClosed):
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, InvalidArgument) as problem:
        raise CheckpointError(f"this is no checkpoint of a replay buffer: {problem!r}") from problem
    bound = works.known()
    if schema is not None and bound is not None and bound != schema:
        raise CheckpointError(f"the checkpoint is of another schema: {bound.difference(schema)}")
    return schema, ahead


def _check_words(saved: dict[str, Any], capacity: int) -> None:
    """Slots are written, and words are trusted, without another look: here is the last one."""
    state, slots = saved["state"], saved["slots"]
    for name, value in state.items():
        if type(value) is not int or not 0 <= value < 1 << 64:
            raise CheckpointError(f"the counter {name!r} is {value!r}, not a number of 64 bits")
    if slots.dtype is not torch.int64 or saved["rows"].dtype is not torch.uint8:
        raise CheckpointError(f"slots of type {slots.dtype} and rows of type {saved['rows'].dtype}")
    live = state["live"]
    whole = slots.dim() == 1 and len(slots) == live == len(slots.unique()) and state["stored"] <= capacity
    if not whole or (live and not (int(slots.min()) >= 0 and int(slots.max()) < capacity)):
        raise CheckpointError(f"{live} live items in {len(slots)} slots do not fit a capacity of {capacity}")
    if not state["epoch_cursor"] <= state["epoch_size"] <= capacity or state["epoch_half"] > 1:
        raise CheckpointError(f"an epoch of {state['epoch_size']} items at {state['epoch_cursor']} is none")


def _prioritized(spelled: str) -> dict[str, Any]:
    """The arguments of the prioritized sampler that a checkpoint names, if any."""
    at = json.loads(spelled)
    while at is not None and at["name"] != PrioritizedSampler.__name__:
        at = at["config"].get("base")
    return {} if at is None else dict(at["config"])


def _kinds(spelled: Any) -> str:
    if spelled is None:
        return ""
    inner = _kinds(spelled["config"].get("base"))
    name: str = spelled["name"]
    return f"{name}({inner})" if inner else name


def _bytes(view: memoryview) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(view, np.uint8).copy())


def _spell_taken(taken: Taken) -> dict[str, Any]:
    return {
        "rows": taken.rows.view(torch.uint8).clone(),  # the batch itself goes to whoever samples next
        "slots": torch.from_numpy(taken.slots.copy()),
        "numbers": torch.from_numpy(taken.numbers.copy()),
        "extra": {"/".join(key): value.clone() for key, value in taken.extra.items()},
        "asked": taken.asked,
    }


def _read_taken(spelled: dict[str, Any]) -> Taken:
    extra = {tuple(key.split("/")): value.clone() for key, value in spelled["extra"].items()}
    slots, numbers = spelled["slots"].numpy().copy(), spelled["numbers"].numpy().copy()
    return Taken(spelled["rows"].clone(), slots, numbers, extra, 0, asked=spelled.get("asked", len(slots)))


# ---------------------------------------------------------------------- files
def dumps(works: Works, path: str | os.PathLike[str]) -> None:
    """Write a checkpoint: whole, or not at all. Raises ``OSError`` where the disk does not take it."""
    check_path(path)
    write(state_dict(works), path)


def check_path(path: str | os.PathLike[str]) -> None:
    """Raises ``InvalidArgument`` where there is no directory for such a file."""
    if not Path(path).parent.is_dir():
        raise InvalidArgument(f"{Path(path).parent} is no directory")


def write(saved: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a state to a file: whole, or not at all."""
    path = Path(path)
    sections: list[tuple[dict[str, Any], memoryview]] = []
    tree = lift(saved, sections)
    index = [{"nbytes": len(view), "crc32": zlib.crc32(view), **about} for about, view in sections]
    header = json.dumps({"tree": tree, "sections": index}).encode()
    making = path.with_name(f".{path.name}.making.{os.getpid()}")
    try:
        with open(making, "wb") as file:
            file.write(_HEAD.pack(MAGIC, VERSION, len(header), zlib.crc32(header)))
            file.write(header)
            file.writelines(view for _, view in sections)
            file.flush()
            os.fsync(file.fileno())
        os.replace(making, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(making)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the new name too survives a power cut
    finally:
        os.close(directory)


def loads(works: Works, path: str | os.PathLike[str]) -> None:
    """Read a checkpoint into a buffer. Raises ``CheckpointError``, naming what is wrong, before anything was
    changed."""
    load_state_dict(works, read(path))


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The state in a checkpoint file, every byte checked. Raises ``CheckpointError``."""
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as problem:
        raise CheckpointError(f"{path} cannot be read: {problem.strerror}") from problem
    if len(data) < _HEAD.size or not data.startswith(MAGIC):
        raise CheckpointError(f"{path} is no checkpoint of a replay buffer")
    _, version, length, crc = _HEAD.unpack_from(data)
    if version != VERSION:
        raise CheckpointError(f"{path} is of checkpoint format {version}; this version reads {VERSION}")
    at = _HEAD.size + length
    header = data[_HEAD.size : at]
    if len(header) != length or zlib.crc32(header) != crc:
        raise CheckpointError(f"{path} is damaged in its header")
    content = json.loads(header)
    sections = []
    for about in content["sections"]:
        view = memoryview(data)[at : at + about["nbytes"]]
        at += about["nbytes"]
        if len(view) != about["nbytes"]:
            raise CheckpointError(f"{path} is cut off: {len(data)} bytes, at least {at} expected")
        if zlib.crc32(view) != about["crc32"]:
            raise CheckpointError(f"{path} is damaged: a section of {len(view)} bytes has another checksum")
        array = torch.frombuffer(bytearray(view), dtype=torch.uint8) if len(view) else torch.empty(0, dtype=torch.uint8)
        sections.append(array.view(getattr(torch, about["dtype"])).view(about["shape"]))
    if at != len(data):
        raise CheckpointError(f"{path} has {len(data) - at} bytes too many")
    state: dict[str, Any] = lower(content["tree"], sections)
    return state


def lift(node: Any, sections: list[tuple[dict[str, Any], memoryview]]) -> Any:
    """A state without its tensors, which go to ``sections``."""
    if isinstance(node, torch.Tensor):
        flat = node.contiguous()
        about = {"dtype": str(flat.dtype).removeprefix("torch."), "shape": list(flat.shape)}
        raw = (flat if flat.numel() else flat.new_empty(0)).reshape(-1).view(torch.uint8)
        sections.append((about, memoryview(raw.reshape(-1).numpy().data)))
        return {"tensor": len(sections) - 1}
    if isinstance(node, dict):
        return {"dict": {key: lift(value, sections) for key, value in node.items()}}
    if isinstance(node, list):
        return {"list": [lift(value, sections) for value in node]}
    return {"value": node}


def lower(node: Any, sections: list[torch.Tensor]) -> Any:
    """What `lift` took apart."""
    if "tensor" in node:
        return sections[node["tensor"]]
    if "dict" in node:
        return {key: lower(value, sections) for key, value in node["dict"].items()}
    if "list" in node:
        return [lower(value, sections) for value in node["list"]]
    return node["value"]


# ---------------------------------------------------------------------- sharing
def moved_to_shared(old: Works) -> Works:
    """The same in shared memory, with all that it holds. No other thread may use it meanwhile. Whatever is raised, the
    old works stay as they are."""
    engine = old.engine
    if isinstance(engine.storage, TensorStorage) and engine.storage.device.type != "cpu":
        raise NotShareable(
            f"rows on {engine.storage.device} cannot be shared between processes; keep the storage on the CPU"
        )
    saved, own, new = state_dict(old), old.rules.storage, None
    storage = MappedStorage(engine.capacity) if own is None else own
    try:
        new = Works.made(old.rules, storage, engine.random.torch, shared=True)
        load_state_dict(new, saved)
    except BaseException:
        if new is not None:
            new.give_up()
            new.engine.let_go(storage=storage is not engine.storage)
        engine.slots.bind(engine.memory.array, create=False)
        engine.bind_sampler()
        raise
    new.engine.unlimited = engine.unlimited
    engine.let_go(storage=engine.storage is not storage)  # else the buffer would take twice its memory
    return new
