"""What a buffer was built with: checked once, written beside a shared buffer, read by whoever attaches."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from millpond.core.errors import (
    InvalidArgument,
    InvalidType,
    NonFinite,
    NotShareable,
    OutOfMemory,
    SchemaMismatch,
    Unsatisfiable,
)
from millpond.core.intake import Key, leaves_of, name_of
from millpond.core.schema import Schema, tensordict_of
from millpond.flow.limiter import Flow, unsatisfiable
from millpond.replay.samplers.episodes import HindsightSampler, NStep
from millpond.replay.samplers.prioritized import PrioritizedSampler
from millpond.replay.samplers.protocol import Sampler
from millpond.replay.samplers.schedules import LinearSchedule
from millpond.replay.samplers.slices import SliceSampler
from millpond.replay.samplers.uniform import ConsumingSampler, RandomSampler, SamplerWithoutReplacement
from millpond.replay.state import RECEIPT_LINES
from millpond.replay.storage import MappedStorage, Storage, TensorStorage, check_capacity
from millpond.shm.free_memory import available_memory, readable
from millpond.shm.interrupts import interruptible

MOST_ITEMS = 1 << 62  # what is asked for, and added to, stays within 64 bits
FREELY = 1 << 20  # items for which nobody looks whether there is room
_BESIDES = 24  # bytes an item takes besides its row, while it is drawn

KNOWN: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        RandomSampler,
        SamplerWithoutReplacement,
        ConsumingSampler,
        PrioritizedSampler,
        SliceSampler,
        NStep,
        HindsightSampler,
    )
}


@dataclass(frozen=True)
class BufferConfig:
    """The arguments of a buffer that outlive its construction."""

    capacity: int
    sampler: Any
    flow: Flow
    storage: Any  # only one of the user's own is kept
    batch_size: int | None
    prefetch: int
    deliveries: int | None
    transform: Callable[[Any], Any] | None
    device: str | None
    contiguous: bool
    check_finite: bool
    num_envs: int | None = None
    frozen: bytes | None = None  # a user's sampler as it was before it was bound to memory

    def checked(self, *, warn: bool = True) -> BufferConfig:
        """The same, with what follows from the sampler.

        Raises:
            InvalidArgument, InvalidType, Unsatisfiable: values or combinations that cannot mean anything.
        """
        if isinstance(self.sampler, type) or not isinstance(self.sampler, Sampler):
            needed = "replacement, memory, bind, ready, draw"
            raise InvalidType(f"{self.sampler!r} is no sampler: it lacks one of {needed}")
        if not isinstance(self.flow, Flow):
            raise InvalidType(f"flow is a Flow, not {self.flow!r}")
        if self.transform is not None and not callable(self.transform):
            raise InvalidType(f"transform is callable, not {self.transform!r}")
        if self.batch_size is not None:
            check_batch_size(self.batch_size)
        if self.device is not None:
            check_device(self.device)
        if isinstance(self.prefetch, bool) or not isinstance(self.prefetch, int) or self.prefetch < 0:
            raise InvalidArgument(f"prefetch is a number of batches, 0 or more, not {self.prefetch!r}")
        if self.num_envs is not None and check_batch_size(self.num_envs, "num_envs") > self.capacity:
            raise Unsatisfiable(
                f"a step of num_envs={self.num_envs} environments never lies whole in {self.capacity} items"
            )
        deliveries = self._deliveries()
        consuming = deliveries is not None
        kinds = list(layers(self.sampler))
        if consuming and self.flow.admission == "block" and any(isinstance(s, SliceSampler) for s in kinds):
            raise InvalidArgument(
                "slices that are consumed leave stubs shorter than a slice, which can never be sampled, so producers "
                "with admission='block' would wait for ever: store sequences as items, or let old items be overwritten"
            )
        self._check_slices(kinds, consuming)
        exact = consuming or not self.sampler.replacement
        reason = unsatisfiable(self.flow, self.capacity, exact, self.batch_size or 0, 0, deliveries=deliveries)
        if reason is not None:
            raise Unsatisfiable(reason)
        if self.flow.admission == "block" and not consuming and warn:
            warnings.warn(
                "admission='block' on a buffer that never consumes: once it is full, only empty() frees space. "
                "Give consume_after_n_samples, or admission='overwrite'",
                stacklevel=4,
            )
        frozen = None
        if any(type(s).__name__ not in KNOWN for s in kinds):
            try:
                frozen = pickle.dumps(self.sampler)
            except Exception:  # noqa: BLE001 — a user's class may raise anything; it matters once shared
                frozen = None
        storage = None if type(self.storage) in (type(None), TensorStorage, MappedStorage) else self.storage
        return replace(self, deliveries=deliveries, storage=storage, frozen=frozen)

    def _check_slices(self, kinds: list[Any], consuming: bool) -> None:
        for sampler in kinds:
            if not isinstance(sampler, SliceSampler):
                continue
            if consuming and sampler.short == "pad":
                raise InvalidArgument(f"{sampler!r} repeats items as padding, and items that are consumed come once")
            refused: Exception | None = sampler.too_long(sampler.slice_len, self.capacity)
            if refused is None and self.batch_size is not None:
                refused = sampler.refusal(self.batch_size, self.capacity)
            if refused is not None:
                raise refused

    def _deliveries(self) -> int | None:
        given = self.deliveries
        if given is not None:
            if isinstance(given, bool) or not isinstance(given, int):
                raise InvalidType(f"consume_after_n_samples is a number of deliveries, not {given!r}")
            if given < 1:
                raise InvalidArgument(f"consume_after_n_samples is at least 1, got {given}")
        for sampler in layers(self.sampler):
            if isinstance(sampler, ConsumingSampler):
                if given not in (None, sampler.n):
                    raise InvalidArgument(
                        f"{sampler!r} consumes after {sampler.n} deliveries, but {given} were asked for"
                    )
                return sampler.n
        return given

    def unbound(self) -> BufferConfig:
        """The same with a sampler that holds no memory, where it is one of millpond's."""
        return replace(self, sampler=copy(self.sampler)) if spell(self.sampler) is not None else self

    def for_another(self) -> BufferConfig:
        """The same for one more buffer object in this process, with a sampler and a storage of its own.

        Raises ``NotShareable`` where a sampler or a storage of the user's cannot be copied by pickling it.
        """
        try:
            own = deepcopy(self.sampler) if self.frozen is None else pickle.loads(self.frozen)
            storage = None if self.storage is None else pickle.loads(pickle.dumps(self.storage))
        except Exception as problem:
            raise NotShareable(f"the buffer's sampler or storage cannot be pickled: {problem}") from problem
        return replace(self, sampler=own, storage=storage)

    def storage_at(self, path: Path) -> Storage:
        """The storage of a shared buffer, in a process that attaches."""
        return MappedStorage(self.capacity, path) if self.storage is None else self.storage

    # ------------------------------------------------------------------ crossing processes
    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if self.frozen is not None:
            state["sampler"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["frozen"] is not None:
            state["sampler"] = pickle.loads(state["frozen"])
        self.__dict__.update(state)

    def to_json(self) -> dict[str, Any]:
        """What stands beside a shared buffer. A device and a transform are each process's own."""
        return {
            "capacity": self.capacity,
            "sampler": spell(self.sampler),
            "flow": self.flow.to_dict(),
            "batch_size": self.batch_size,
            "prefetch": self.prefetch,
            "deliveries": self.deliveries,
            "contiguous": self.contiguous,
            "check_finite": self.check_finite,
            "num_envs": self.num_envs,
            "own_storage": self.storage is not None,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], sampler: Any, path: Path) -> BufferConfig:
        """Raises ``NotShareable`` where ``data`` are no rules, or where the buffer has a storage or a sampler that only
        a handle can bring."""
        if sampler is not None and (isinstance(sampler, type) or not isinstance(sampler, Sampler)):
            raise InvalidType(f"{sampler!r} is no sampler")
        try:
            return cls._read(data, sampler, path)
        except NotShareable:
            raise
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as problem:
            raise NotShareable(f"{path / 'rules.json'} is damaged: {problem!r:.300}") from problem

    @classmethod
    def _read(cls, data: Mapping[str, Any], sampler: Any, path: Path) -> BufferConfig:
        flags = [data[name] for name in ("own_storage", "contiguous", "check_finite")]
        if not all(isinstance(flag, bool) for flag in flags):
            raise TypeError(f"flags that are {flags}")
        if data["own_storage"]:
            raise NotShareable(f"{path} uses a storage of its own: attach with the buffer's handle()")
        if sampler is None:
            sampler = read(data["sampler"])
        if sampler is None:
            raise NotShareable(
                f"{path} uses a sampler that millpond does not know: attach(path, sampler=…), or a handle"
            )
        rules = cls(
            capacity=check_capacity(data["capacity"]),
            sampler=sampler,
            flow=Flow.from_dict(data["flow"]),
            storage=None,
            batch_size=data["batch_size"],
            prefetch=data["prefetch"],
            deliveries=data["deliveries"],
            transform=None,
            device=None,
            contiguous=data["contiguous"],
            check_finite=data["check_finite"],
            num_envs=data.get("num_envs"),
        )
        return rules.checked(warn=False)


def layers(sampler: Any) -> Any:
    """A sampler and those that it is built around."""
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "base", None)


def spell(sampler: Any) -> Any:
    """A sampler as JSON; None for one that is not millpond's, or that holds a function."""
    if type(sampler) is not KNOWN.get(type(sampler).__name__):
        return None
    config = {k: _spelled(k, v) for k, v in sampler.config().items()}
    if ("base" in config and config["base"] is None) or any(callable(value) for value in config.values()):
        return None
    return {"name": type(sampler).__name__, "config": config}


def read(data: Any) -> Any:
    """The sampler that `spell` wrote; None where it could not be."""
    if data is None:
        return None
    config = {k: read(v) if k == "base" else v for k, v in data["config"].items()}
    config = {k: LinearSchedule(**v["schedule"]) if isinstance(v, dict) else v for k, v in config.items()}
    return KNOWN[data["name"]](**config)


def _spelled(name: str, value: Any) -> Any:
    if isinstance(value, LinearSchedule):
        return {"schedule": asdict(value)}
    return spell(value) if name == "base" else value


# What a sample adds that tells how it was drawn, and nothing about its items: type, and shape of each.
DRAWN: dict[str, tuple[str, tuple[int, ...]]] = {
    "index": ("int64", ()),
    "generation": ("int64", ()),
    "priority_weight": ("float32", ()),
    "buffer_id": ("int64", ()),
    "relabelled": ("bool", (1,)),
    "mask": ("bool", ()),
}


def refuse_own_names(schema: Schema) -> None:
    """Raises ``SchemaMismatch`` for a field whose place in a batch is taken by what each batch carries of its own."""
    for field in schema.fields:
        if field.key[:1] in (("index",), ("generation",)):
            raise SchemaMismatch(
                f"{field.name}: a sampled batch has its own {field.key[0]!r}, which would hide this field: rename it "
                "(a sampled batch can be written as it is: it has both, int64, one for each item)"
            )


def without_draw(items: Any, schema: Schema | None, *, dims: int) -> Any:
    """Sampled ``items`` without what tells how they were drawn, but for fields of the schema; any others as they are.

    They were sampled where they carry an ``index`` and a ``generation``. ``dims`` is 1 for a batch, 0 for an item.
    """
    leaves = leaves_of(items)
    found = {key: leaves[key] for key in ((name,) for name in DRAWN) if key in leaves}
    size = tuple(getattr(found.get(("index",)), "shape", ()))
    kinds = {key: (DRAWN[key[0]][0], size + DRAWN[key[0]][1]) for key in found}
    drawn = {key for key, value in found.items() if _described(value) == kinds[key]}
    if len(size) != dims or not {("index",), ("generation",)} <= drawn:
        return leaves
    if ("mask",) in drawn and not bool(found[("mask",)].all()):
        raise InvalidArgument('this batch holds padding, which is no item: write batch[batch["mask"]]')
    known = () if schema is None else schema.by_key
    return {key: value for key, value in leaves.items() if key not in drawn or key in known}


def rows_in(leaves: Mapping[Key, Any]) -> int:
    """How many items a batch holds of which a schema was made."""
    return next(len(value) for value in leaves.values())


def undrawn(items: Any, schema: Schema, problem: SchemaMismatch, *, dims: int) -> Any:
    """`without_draw` of items that ``schema`` refused. Raises the ``problem`` again where that changes nothing."""
    rest = without_draw(items, schema, dims=dims)
    if rest.keys() == leaves_of(items).keys():
        raise problem
    return rest


def _described(value: Any) -> tuple[str, tuple[int, ...]] | None:
    if not isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return None
    return str(value.dtype).removeprefix("torch."), tuple(value.shape)


def refuse_nonfinite(fields: Mapping[Key, torch.Tensor]) -> None:
    """Raises ``NonFinite`` for the first field of items, ``[n, …]``, that holds NaN or infinity."""
    for key, value in fields.items():
        if value.dtype.is_floating_point or value.dtype.is_complex:
            finite = torch.isfinite(value).reshape(len(value), -1).all(1)
            if not bool(finite.all()):
                bad = int((~finite).nonzero()[0])
                raise NonFinite(f"{name_of(key)}: NaN or infinite in item {bad} of {len(value)}")


def check_batch_size(n: Any, name: str = "batch_size") -> int:
    """Raises ``InvalidType`` or ``InvalidArgument`` for what is no number of items."""
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
        raise InvalidType(f"{name} is a number of items, not {n!r}")
    if n < 1:
        raise InvalidArgument(f"{name} is at least 1 item, got {n}")
    if n >= MOST_ITEMS:
        raise InvalidArgument(f"{name} is less than 2**62 items, got one of {int(n).bit_length()} bits")
    return int(n)


def check_room(n: int, schema: Schema | None) -> None:
    """Raises ``OutOfMemory`` where a batch of n items cannot be had. Up to `FREELY` items it need not be asked."""
    nbytes, free = n * (_BESIDES + (0 if schema is None else schema.row_nbytes)), available_memory()
    if nbytes > free:
        text = f"a batch of {n} items takes {readable(nbytes)}, and {readable(free)} are free"
        raise OutOfMemory(f"{text}: ask for fewer at a time")


def check_receipt(receipt: Any) -> tuple[int, int]:
    """Raises ``InvalidType`` or ``InvalidArgument`` for what is no receipt."""
    wanted = f"a receipt is a line from 0 to {RECEIPT_LINES - 1} and a number of 64 bits, not {receipt!r}"
    whole = isinstance(receipt, (tuple, list)) and len(receipt) == 2
    if not whole or any(isinstance(part, bool) or not isinstance(part, (int, np.integer)) for part in receipt):
        raise InvalidType(wanted)
    if not (0 <= receipt[0] < RECEIPT_LINES and 0 <= receipt[1] < 1 << 64):
        raise InvalidArgument(wanted)
    return int(receipt[0]), int(receipt[1])


def check_device(device: str) -> None:
    """Raises ``InvalidArgument`` for what is no device of this PyTorch. Starts no driver: one can fork still."""
    try:
        kind = torch.device(device).type
    except RuntimeError as problem:
        raise InvalidArgument(f"device={device!r}: {str(problem).splitlines()[0]}") from problem
    if kind == "meta" or (kind == "cuda" and not torch.backends.cuda.is_built()):
        reason = "it holds no numbers" if kind == "meta" else "this PyTorch was built without CUDA"
        raise InvalidArgument(f"device={device!r}: {reason}")


def generator(seed: int | torch.Generator | None) -> torch.Generator:
    """Raises ``InvalidType`` for what is no seed."""
    if isinstance(seed, torch.Generator):
        return seed
    made = torch.Generator()
    if seed is None:
        return made.manual_seed(int.from_bytes(os.urandom(8), "little") >> 1)  # the global generator stays as it is
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise InvalidType(f"seed is a number, a torch.Generator or None, not {seed!r}")
    if not -(2**63) <= seed < 2**64:
        raise InvalidArgument(f"seed is a number of 64 bits, got {seed}")
    return made.manual_seed(int(seed))


def to_device(device: str, *parts: Any) -> Any:
    """The parts of a batch on a device: the packed rows are one copy, from pinned memory where that is faster."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if device.startswith("cuda") and tensor.device.type == "cpu":
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    return [{k: move(v) for k, v in part.items()} if isinstance(part, dict) else move(part) for part in parts]


def picked(schema: Schema, rows: torch.Tensor, shape: Sequence[int]) -> Any:
    """Items as ``buffer[index]`` gives them: one alone where ``shape`` is empty, else a batch of that shape."""
    found = schema.unpack(rows)
    if len(shape) == 1:
        return found
    return found.unflatten(0, tuple(shape)) if shape else found[0]


@interruptible
def dress(
    schema: Schema,
    rules: BufferConfig,
    rows: torch.Tensor,
    index: torch.Tensor,
    generation: torch.Tensor,
    extra: dict[Key, torch.Tensor],
    return_info: bool,
) -> Any:
    """What ``sample`` returns, from what the engine took."""
    if schema.plain or return_info:
        own = {key: value for key, value in extra.items() if key in schema.by_key}
        added = {("index",): index, ("generation",): generation, **extra}
        data = schema.unpack(rows, own)
    else:
        data = schema.unpack(rows, extra, {"index": index, "generation": generation})
    if rules.contiguous:
        data = data.contiguous() if schema.plain else data.clone()
    if rules.transform is not None:
        data = rules.transform(data)
    if not return_info:
        return data
    info = {key[0]: value for key, value in added.items() if len(key) == 1 and key not in own}
    return data, tensordict_of(info, torch.Size([len(index)]))
