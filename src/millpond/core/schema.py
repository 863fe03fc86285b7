"""The packed row: the fields of one item side by side in one run of bytes.

A batch of B items is one ``uint8[B, row_nbytes]`` tensor. Its fields are views of it: nothing is copied on the way
out. Fields are ordered by item size (largest first), then by type and key, so that every field is aligned,
padding stands only at the end of a row, and the same fields give the same layout whatever order they came in.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from millpond.core.errors import InvalidArgument, InvalidType, SchemaMismatch
from millpond.core.intake import NUMPY_OF, described, key_of, leaves_of, name_of, scalar_as, tensor_of
from millpond.core.intake import Batch as Batch
from millpond.core.intake import Key as Key

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*NUMPY_OF, torch.bfloat16)}
_FORMAT = 1
_SCALAR = "one value without a leading dimension is no batch: add() takes one item, extend() several"
FEW = 32  # items up to which NumPy copies them faster than torch, above all just after a sleep


@dataclass(frozen=True, slots=True)
class Field:
    """One named part of a row: ``shape`` elements of ``dtype`` at byte ``offset``."""

    key: Key
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Elements in one item."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in one item."""
        return self.size * self.dtype.itemsize

    @property
    def name(self) -> str:
        """The key as people write it: ``next/reward``."""
        return name_of(self.key)

    def describe(self) -> str:
        """Type and shape of one item, for messages."""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class Schema:
    """Names, types and shapes of an item's fields, and where each lies in the row.

    ``Schema({"observation": (torch.float32, (11,)), ("next", "reward"): (torch.float32, (1,))})``. The key ``()``
    alone stands for an item that is one plain tensor. Equal schemas have equal fingerprints and equal layouts.

    Raises:
        InvalidArgument: no field, a key that is also the prefix of another, a type that has no fixed size.
    """

    def __init__(self, fields: Mapping[Any, tuple[torch.dtype, Sequence[int]]]) -> None:
        wanted = sorted(
            ((key_of(key), dtype, tuple(int(n) for n in shape)) for key, (dtype, shape) in fields.items()),
            key=lambda field: (-_itemsize(field), str(field[1]), field[0]),
        )
        if not wanted:
            raise InvalidArgument("a schema needs at least one field")
        keys = {key for key, _, _ in wanted}
        for key in keys:
            for n in range(len(key)):
                if key[:n] in keys:
                    raise InvalidArgument(f"{'/'.join(key)}: {'/'.join(key[:n]) or '()'} cannot be a field and a group")
        offset, placed = 0, []
        for key, dtype, shape in wanted:
            placed.append(Field(key, dtype, shape, offset))
            offset += placed[-1].nbytes
        self.fields: tuple[Field, ...] = tuple(placed)
        self.used_nbytes = offset
        word = max(8, placed[0].dtype.itemsize)  # whole 64-bit words: what a gather moves fastest
        self.row_nbytes = max(word, -(-offset // word) * word)
        self.plain = self.fields[0].key == ()
        self.by_key: dict[Key, Field] = {field.key: field for field in self.fields}
        self._parts = [(f, f.shape, NUMPY_OF.get(f.dtype)) for f in self.fields]
        self._groups_of_keys, places, self._group_numbers = _places(self.fields)
        self._plan(places)
        self._tree = _nest({f.key: i for i, f in enumerate(self.fields)})
        text = json.dumps(self._spelled(), separators=(",", ":"))
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]

    # ------------------------------------------------------------------ making
    @classmethod
    def from_example(cls, batch: Batch) -> Schema:
        """The schema of the items of ``batch``: its fields without their leading dimension.

        Python numbers count as torch counts them: ``1.0`` is float32. NumPy keeps its own types.

        Raises:
            InvalidType: a field that is no array of numbers, by name.
            InvalidArgument: fields without or with different leading dimensions.
        """
        tensors = {key: tensor_of(key, value) for key, value in leaves_of(batch).items()}
        size: int | None = None
        for key, tensor in tensors.items():
            if tensor.ndim == 0:
                raise InvalidArgument(f"{name_of(key)}: {_SCALAR}")
            if size not in (None, len(tensor)):
                raise SchemaMismatch(f"{name_of(key)}: expected {size} items, got shape {list(tensor.shape)}")
            size = len(tensor)
        return cls({key: (tensor.dtype, tuple(tensor.shape[1:])) for key, tensor in tensors.items()})

    @classmethod
    def from_item(cls, item: Batch) -> Schema:
        """The schema of one item. Raises ``InvalidType`` as `from_example` does."""
        tensors = {key: tensor_of(key, value) for key, value in leaves_of(item).items()}
        return cls({key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()})

    def to_json(self) -> str:
        """A text that `from_json` reads back."""
        return json.dumps({"format": _FORMAT, "fingerprint": self.fingerprint, "fields": self._spelled()})

    @classmethod
    def from_json(cls, text: str) -> Schema:
        """Raises ``InvalidArgument`` where the text is no schema, or is of another version."""
        try:
            data = json.loads(text)
            if data["format"] != _FORMAT:
                raise InvalidArgument(f"schema format {data['format']}, this version reads {_FORMAT}")
            schema = cls({tuple(key): (_DTYPES[dtype], shape) for key, dtype, shape in data["fields"]})
        except (KeyError, TypeError, json.JSONDecodeError) as problem:
            raise InvalidArgument(f"this is no schema: {problem!r}") from problem
        if schema.fingerprint != data["fingerprint"]:
            raise InvalidArgument("the schema's fingerprint does not match its fields: the text was damaged")
        return schema

    def _spelled(self) -> list[Any]:
        return [[list(f.key), str(f.dtype).removeprefix("torch."), list(f.shape)] for f in self.fields]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and other.fingerprint == self.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __reduce__(self) -> tuple[Any, ...]:
        return Schema.from_json, (self.to_json(),)

    def __repr__(self) -> str:
        inside = ", ".join(f"{f.name}: {f.describe()}" for f in self.fields)
        return f"Schema({inside}; {self.row_nbytes} bytes a row)"

    def difference(self, other: Schema) -> str:
        """What ``other`` has otherwise, field by field; empty where nothing."""
        words = []
        for field in self.fields:
            theirs = other.by_key.get(field.key)
            if theirs is None:
                words.append(f"{field.name} is missing")
            elif (theirs.dtype, theirs.shape) != (field.dtype, field.shape):
                words.append(f"{field.name}: expected {field.describe()}, got {theirs.describe()}")
        words += [f"{field.name} is not known" for field in other.fields if field.key not in self.by_key]
        return "; ".join(words)

    # ------------------------------------------------------------------ packing
    def pack(self, batch: Batch) -> torch.Tensor:
        """One copy of ``batch`` as rows, ``uint8[B, row_nbytes]``; padding is zero.

        Raises:
            SchemaMismatch: a missing or unknown key, another type, another shape, fields of different length. NumPy
                float64 is taken for float32; nothing else is converted.
        """
        tensors = self.check(batch)
        staging = Staging(self, tensors[0].shape[0])
        staging.fill(tensors)
        return staging.rows

    def check(self, batch: Batch) -> list[torch.Tensor]:
        """The fields of ``batch`` in the order of `fields`, each of the bound type and shape. Copies nothing else.

        Raises ``SchemaMismatch`` as `pack` does.
        """
        size, tensors = -1, []
        for field, value in zip(self.fields, self._values(batch), strict=True):
            if type(value) is not torch.Tensor or value.layout is not torch.strided or not value.is_cpu:
                value = tensor_of(field.key, value, field.dtype)
            try:
                shape = value.shape
            except RuntimeError:  # a nested tensor has none
                shape = tensor_of(field.key, value).shape
            if value.dtype is not field.dtype or shape[1:] != field.shape or not shape:
                self._refuse(field, value)
            if shape[0] != size:
                if size >= 0:
                    raise SchemaMismatch(f"{field.name}: {shape[0]} items, but {self.fields[0].name} has {size}")
                size = shape[0]
            tensors.append(value)
        return tensors

    def check_patch(self, patch: Batch, n: int) -> dict[Key, torch.Tensor]:
        """Some fields of n items, each of the bound type and shape. Raises ``SchemaMismatch`` as `pack` does."""
        fields = {}
        for key, value in leaves_of(patch).items():
            field = self.by_key.get(key)
            if field is None:
                raise SchemaMismatch(f"{name_of(key)} is unknown. The bound fields are {self._names()}")
            tensor = tensor_of(key, value, field.dtype)
            if tensor.dtype is not field.dtype or tuple(tensor.shape) != (n, *field.shape):
                raise SchemaMismatch(
                    f"{field.name}: expected {field.describe()} for each of {n} items, got {described(tensor)}"
                )
            fields[key] = tensor.detach()
        return fields

    def pack_item(self, item: Batch) -> torch.Tensor:
        """One item as a row, ``uint8[1, row_nbytes]``. Raises ``SchemaMismatch`` as `pack` does."""
        staging = Staging(self, 1)
        self.fill_item(staging, item)
        return staging.rows

    def fill_item(self, staging: Staging, item: Batch) -> None:
        """`pack_item` into memory that is there already."""
        values = self._values(item)
        if staging.views is None:
            tensors = [self._item_tensor(f, value)[None] for f, value in zip(self.fields, values, strict=True)]
            staging.fill(tensors)
            return
        for (field, shape, dtype), view, value in zip(self._parts, staging.views, values, strict=True):
            if type(value) is not np.ndarray or value.shape != shape or value.dtype is not dtype:
                value = self._item_array(field, value)
            view[...] = value

    def unpack(
        self,
        rows: torch.Tensor,
        extra: Mapping[Key, torch.Tensor] | None = None,
        top: Mapping[str, torch.Tensor] | None = None,
    ) -> Any:
        """The fields of ``rows`` as views: a TensorDict of batch size ``[B]``, or one tensor for a plain schema.

        ``extra`` are fields that are added, or stand in place of stored ones; ``top`` are added beside the groups.
        """
        parts = self._cut(rows)
        if self.plain:
            column = parts[self._positions[0]]
            return column if extra is None else extra.get((), column)
        places: list[dict[str, Any]] = [dict(zip(names, pick(parts))) for names, pick in self._nests]  # noqa: B905
        if top is not None:
            places[0].update(top)
        if extra:
            for key, value in extra.items():
                if len(key) == 1:
                    places[0][key[0]] = value
                else:
                    self._place_deep(places, key, value)
        size = torch.Size((rows.shape[0],))
        for i in range(len(places) - 1, 0, -1):  # inner ones first
            parent, name = self._groups_of_keys[i]
            places[parent][name] = tensordict_of(places[i], size)
        return tensordict_of(places[0], size)

    def _place_deep(self, places: list[dict[str, Any]], key: Key, value: torch.Tensor) -> None:
        """Put an extra field into its group, which must be one of the schema's."""
        place = self._group_numbers.get(key[:-1])
        if place is None:
            raise SchemaMismatch(f"{name_of(key)}: the items have no group {name_of(key[:-1])}")
        places[place][key[-1]] = value

    def column(self, rows: torch.Tensor, key: Key) -> torch.Tensor:
        """One field of ``rows`` as a view, ``[B, *shape]``. Raises ``KeyError`` where there is none."""
        field = self.by_key[key]
        if field.size == 0:
            return rows.new_empty((rows.shape[0], *field.shape), dtype=field.dtype)
        flat = rows.view(torch.uint8).narrow(1, field.offset, field.nbytes).view(field.dtype)
        return flat.view(rows.shape[0], *field.shape)

    # ------------------------------------------------------------------ inside
    def _values(self, batch: Batch) -> list[Any]:
        """What stands at each field's key, in the order of `fields`. Raises ``SchemaMismatch``."""
        values: list[Any] = [None] * len(self.fields)
        if not self.plain and _fetch(self._tree, batch, values):
            return values
        leaves = leaves_of(batch)
        if leaves.keys() != self.by_key.keys():
            self._refuse_keys(leaves)
        return [leaves[field.key] for field in self.fields]

    def _plan(self, places: Sequence[tuple[int, str]]) -> None:
        """How `_cut` works: neighbouring fields of one type come from one view of the rows and one split of it; and
        in which group of keys, under which name, each field then goes."""
        self._splits: list[tuple[torch.dtype, list[int]]] = []
        self._positions: list[int] = []  # of the fields, among the parts of all splits
        self._shaped: list[tuple[int, tuple[int, ...]]] = []  # parts that are no vectors, so that a view must follow
        made = 0
        for dtype in dict.fromkeys(f.dtype for f in self.fields):
            fields = [f for f in self.fields if f.dtype is dtype]
            before = fields[0].offset // dtype.itemsize
            sizes = [before] * (before > 0) + [f.size for f in fields]
            rest = self.row_nbytes // dtype.itemsize - sum(sizes)
            positions = range(made + (before > 0), made + (before > 0) + len(fields))
            self._positions += positions
            self._shaped += [(i, f.shape) for i, f in zip(positions, fields, strict=True) if len(f.shape) != 1]
            self._splits.append((dtype, sizes + [rest] * (rest > 0)))
            made += len(self._splits[-1][1])
        nests: list[tuple[list[str], list[int]]] = [([], []) for _ in self._groups_of_keys]
        for (place, name), position in zip(places, self._positions, strict=True):
            nests[place][0].append(name)
            nests[place][1].append(position)
        self._nests = [(tuple(names), _picker(positions)) for names, positions in nests]

    def _cut(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        """Views of the rows: the fields at `_positions`, in between what no field uses."""
        parts: list[torch.Tensor] = []
        for dtype, sizes in self._splits:
            # unsafe: autograd does not know the parts as views of these bytes, which have no gradient anyway
            parts += torch.unsafe_split_with_sizes(rows.view(dtype), sizes, 1)
        for position, shape in self._shaped:
            parts[position] = parts[position].reshape(rows.shape[0], *shape)
        return parts

    def _columns(self, rows: torch.Tensor) -> list[torch.Tensor]:
        parts = self._cut(rows)
        return [parts[i] for i in self._positions]

    def _names(self) -> str:
        return ", ".join(f.name for f in self.fields)

    def _refuse_keys(self, leaves: Mapping[Key, Any]) -> None:
        missing = [f.name for f in self.fields if f.key not in leaves]
        unknown = [name_of(key) for key in leaves if key not in self.by_key]
        words = ([f"missing: {', '.join(missing)}"] if missing else []) + (
            [f"unknown: {', '.join(unknown)}"] if unknown else []
        )
        raise SchemaMismatch(f"{'; '.join(words)}. The bound fields are {self._names()}")

    def _refuse(self, field: Field, value: torch.Tensor) -> None:
        """Raises ``SchemaMismatch`` for one field of a batch."""
        if value.ndim == 0:
            raise SchemaMismatch(f"{field.name}: {_SCALAR}")
        dtype, shape = str(value.dtype).removeprefix("torch."), list(value.shape)
        advice = ": add() takes one item" if tuple(shape) == field.shape else ""
        raise SchemaMismatch(
            f"{field.name}: expected {field.describe()} for each item, got {dtype}{shape[1:]} "
            f"(batch of shape {shape}){advice}"
        )

    def _item_tensor(self, field: Field, value: Any) -> torch.Tensor:
        tensor = tensor_of(field.key, value, field.dtype)
        if tensor.dtype is not field.dtype or tuple(tensor.shape) != field.shape:
            advice = ": extend() takes a batch" if tuple(tensor.shape[1:]) == field.shape and tensor.ndim else ""
            raise SchemaMismatch(f"{field.name}: expected {field.describe()}, got {described(tensor)}{advice}")
        return tensor

    def _item_array(self, field: Field, value: Any) -> np.ndarray[Any, Any]:
        if type(value) in (bool, int, float) and field.shape == ():
            scalar = scalar_as(value, NUMPY_OF[field.dtype])
            if scalar is not None:
                return scalar
        array: np.ndarray[Any, Any] = self._item_tensor(field, value).numpy(force=True)
        return array


class Staging:
    """Memory for ``n`` packed rows outside of any storage, with its columns at hand. Padding is zero, and stays so."""

    def __init__(self, schema: Schema, n: int) -> None:
        self.rows = torch.zeros((n, schema.row_nbytes), dtype=torch.uint8)
        self.columns = schema._columns(self.rows)
        few = 0 < n <= FEW and all(f.dtype in NUMPY_OF for f in schema.fields)
        self._arrays = [column.numpy() for column in self.columns] if few else None
        self.views = [array[0, ...] for array in self._arrays] if self._arrays and n == 1 else None  # of the one item

    def fill(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the fields of a batch, checked by `Schema.check`, into the rows."""
        if self._arrays is None:
            torch._foreach_copy_(self.columns, [t.detach() if t.requires_grad else t for t in tensors])
            return
        for array, tensor in zip(self._arrays, tensors, strict=True):
            array[...] = tensor.numpy(force=True)


def _maker() -> Callable[[dict[str, Any], torch.Size], TensorDict]:
    """The quickest way that this version of TensorDict offers: without checks that our own views cannot fail."""
    unsafe: Any = getattr(TensorDict, "_new_unsafe", None)  # 3 µs instead of 30
    if unsafe is None:
        return TensorDict
    if "nested" in inspect.signature(unsafe).parameters:  # False: there are no dicts among the values
        return functools.partial(unsafe, nested=False)
    return lambda source, batch_size: unsafe(source=source, batch_size=batch_size)


#: A TensorDict of tensors and TensorDicts that are known to share a batch size: ``tensordict_of(source, batch_size)``.
tensordict_of = _maker()


def _picker(positions: Sequence[int]) -> Callable[[Sequence[torch.Tensor]], Iterable[torch.Tensor]]:
    """Takes the elements at ``positions`` out of a sequence."""
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    return lambda parts: [parts[i] for i in positions]


def _places(fields: Sequence[Field]) -> tuple[list[tuple[int, str]], list[tuple[int, str]], dict[Key, int]]:
    """The groups of keys as (parent, name), the root first; where each field goes; and the number of each group."""
    numbers: dict[Key, int] = {(): 0}
    groups: list[tuple[int, str]] = [(0, "")]
    for field in fields:
        for n in range(1, len(field.key)):
            prefix = field.key[:n]
            if prefix not in numbers:
                numbers[prefix] = len(groups)
                groups.append((numbers[prefix[:-1]], prefix[-1]))
    return groups, [(numbers[f.key[:-1]], f.key[-1] if f.key else "") for f in fields], numbers


def _itemsize(field: tuple[Key, torch.dtype, tuple[int, ...]]) -> int:
    key, dtype, shape = field
    if not isinstance(dtype, torch.dtype) or dtype not in _DTYPES.values():
        raise InvalidType(f"{name_of(key)}: {dtype} cannot be stored; known types are {', '.join(_DTYPES)}")
    if any(n < 0 for n in shape):
        raise InvalidArgument(f"{name_of(key)}: negative size in shape {shape}")
    return dtype.itemsize


def _fetch(tree: dict[str, Any], batch: Batch, values: list[Any]) -> bool:
    """Fill ``values`` from a batch that is nested as ``tree`` is; False where it is not."""
    if type(batch) is not dict:
        if type(batch) is not TensorDict:  # others may hold more than they show: `leaves_of` knows
            return False
        batch = dict(batch.items())
    if len(batch) != len(tree):
        return False
    for name, place in tree.items():
        if name not in batch:
            return False
        value = batch[name]
        if type(place) is dict:
            if not _fetch(place, value, values):
                return False
        else:
            values[place] = value
    return True


def _nest(leaves: Mapping[Key, Any]) -> Any:
    if () in leaves:
        return leaves[()]
    root: dict[str, Any] = {}
    for key, value in leaves.items():
        place = root
        for part in key[:-1]:
            place = place.setdefault(part, {})
        place[key[-1]] = value
    return root
