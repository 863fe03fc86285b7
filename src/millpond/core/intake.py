"""What people give as data, taken apart into named tensors. What cannot be stored is refused by its name.

Nothing is dropped, repeated or reordered on the way in. Two kinds of numbers are converted, within the range of their
new type: NumPy's float64 where float32 is bound, since NumPy makes float64 unasked, and Python's numbers, which have no
type of a tensor's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_non_tensor, is_tensorclass

from millpond.core.errors import InvalidArgument, InvalidType, SchemaMismatch

Key = tuple[str, ...]
Batch = Any  # see `leaves_of`

NUMPY_OF: dict[torch.dtype, np.dtype[Any]] = {
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.uint16: np.dtype(np.uint16),
    torch.int32: np.dtype(np.int32),
    torch.uint32: np.dtype(np.uint32),
    torch.int64: np.dtype(np.int64),
    torch.uint64: np.dtype(np.uint64),
    torch.float16: np.dtype(np.float16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
}
_TORCH_OF = {array: tensor for tensor, array in NUMPY_OF.items()}
_NUMBERS = (bool, int, float, complex)  # Python's own, each of which the next ones can hold
_USUAL: dict[type, torch.dtype] = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float32,
    complex: torch.complex64,
}
_WIDE = {bool: np.dtype(bool), int: np.dtype(np.int64), float: np.dtype(np.float64), complex: np.dtype(np.complex128)}


def name_of(key: Key) -> str:
    """The key as people write it: ``next/reward``."""
    return "/".join(key) or "(the tensor)"


def key_of(key: Any) -> Key:
    """A key as a tuple. Raises ``InvalidType`` for what is none."""
    parts = (key,) if isinstance(key, str) else tuple(key) if isinstance(key, (tuple, list)) else None
    if parts is None or not all(isinstance(part, str) and part for part in parts):
        raise InvalidType(f"a key is a string or a tuple of strings, not {key!r}")
    return parts


def described(value: torch.Tensor) -> str:
    """Type and shape, for messages."""
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


# ---------------------------------------------------------------------- groups
def leaves_of(batch: Batch) -> dict[Key, Any]:
    """The fields of a batch, or of an item, by key: each a tensor, an array, a number, or a list of these.

    ``batch`` is one of these itself, or a group: a TensorDict, a tensorclass, a mapping or a namedtuple, nested at
    will; or a list of groups, or a lazy stack, whose fields are stacked. What is None in a tensorclass is not there.

    Raises:
        InvalidType: text or an object.
        SchemaMismatch: an empty group; a key that is given twice, or that only some members of a stack have; members of
            different types or shapes.
    """
    found: dict[Key, Any] = {}
    _find(batch, (), found)
    return found


def _find(value: Any, key: Key, found: dict[Key, Any]) -> None:
    parts = _parts(value, key)
    if parts is None:
        if key in found:
            raise SchemaMismatch(f"{name_of(key)} is given twice")
        found[key] = value
        return
    before = len(found)
    for name, part in parts:
        _find(part, key + key_of(name), found)
    if len(found) == before:
        what = f"{name_of(key)}: an empty group cannot be stored: leave it out"
        raise SchemaMismatch(what if key else "no field at all")


def _parts(value: Any, key: Key) -> Iterable[tuple[Any, Any]] | None:
    """What stands in a group, by key; None for what is no group."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return None  # the usual ones first
    if is_non_tensor(value):
        raise InvalidType(f"{name_of(key)}: text and objects cannot be stored, only tensors, arrays and numbers can")
    if is_tensorclass(value):
        value = value._tensordict  # a lazy stack of tensorclasses is one of these too
    if isinstance(value, LazyStackedTensorDict):
        return _stacked(value.tensordicts, value.stack_dim, key).items()
    if isinstance(value, (TensorDictBase, Mapping)):
        return value.items()
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        parts: Mapping[str, Any] = value._asdict()
        return parts.items()
    return _stacked(value, 0, key).items() if _holds_groups(value) else None


def _holds_groups(value: Any) -> bool:
    if not isinstance(value, (list, tuple)) or not value:
        return False
    first = value[0]
    group = isinstance(first, (Mapping, TensorDictBase)) or is_tensorclass(first) or hasattr(first, "_asdict")
    return group or _holds_groups(first)


def _stacked(members: Sequence[Any], dim: int, key: Key) -> dict[Key, Any]:
    """The fields of members that make up one group. Their keys are without ``key``."""
    all_leaves: list[dict[Key, Any]] = []
    for member in members:
        found: dict[Key, Any] = {}
        _find(member, key, found)
        all_leaves.append(found)
    for i, leaves in enumerate(all_leaves):
        odd = leaves.keys() ^ all_leaves[0].keys()
        if odd:
            has, lacks = (i, 0) if min(odd) in leaves else (0, i)
            raise SchemaMismatch(
                f"{name_of(min(odd))}: of {len(members)} members number {has} has it and number {lacks} does not; "
                "all must have the same fields"
            )
    paths = all_leaves[0] if all_leaves else ()
    return {path[len(key) :]: _stack(path, [leaves[path] for leaves in all_leaves], dim) for path in paths}


def _stack(key: Key, values: Sequence[Any], dim: int) -> Any:
    """Values of one field as one value of the same kind, with one more dimension."""
    if dim == 0 and _kind(key, list(values)) is not None:
        return list(values)
    own = all(isinstance(value, (np.ndarray, np.generic)) for value in values)  # NumPy's stay so: see `tensor_of`
    parts: list[Any] = [_array(key, v) for v in values] if own else [tensor_of(key, v).detach() for v in values]
    kinds = [(part.dtype, part.shape, None if own else part.device) for part in parts]
    odd = next((i for i, kind in enumerate(kinds) if kind != kinds[0]), None)
    if odd is not None:
        first, other = (f"{described(tensor_of(key, parts[i]))} on {kinds[i][2] or 'cpu'}" for i in (0, odd))
        raise SchemaMismatch(
            f"{name_of(key)}: of {len(parts)} members number 0 is {first}, number {odd} is {other}; "
            "what is stacked must be alike: pad or convert it first"
        )
    return np.stack(parts, dim) if own else torch.stack(parts, dim)


# ---------------------------------------------------------------------- leaves
def tensor_of(key: Key, value: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of ``value``'s own type. A list is stacked.

    Where ``dtype`` is given, Python's numbers are of that type if it can hold them, and NumPy's float64 can be float32.

    Raises:
        InvalidType: it holds no numbers, or not as a dense tensor.
        SchemaMismatch: a number that does not fit the type, or members of a list that are not alike.
    """
    if isinstance(value, torch.Tensor):
        return _plain_tensor(key, value)
    if isinstance(value, (np.ndarray, np.generic)):
        tensor = _from_numpy(key, value)
        narrow = tensor.dtype is torch.float64 and dtype is torch.float32
        return _narrowed(key, tensor, torch.float32) if narrow else tensor
    kind = _kind(key, value)
    if kind is not None:
        return _from_numbers(key, value, kind, dtype)
    if isinstance(value, (list, tuple)):
        if not value:
            raise InvalidType(f"{name_of(key)}: an empty list has no type: give a tensor or an array")
        return tensor_of(key, _stack(key, value, 0), dtype)
    raise InvalidType(
        f"{name_of(key)}: a {type(value).__name__} cannot be stored, only tensors, arrays and numbers can"
    )


def _plain_tensor(key: Key, value: torch.Tensor) -> torch.Tensor:
    kind: Any = type(value)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or torch.nn.parameter.is_lazy(value):
        raise InvalidType(f"{name_of(key)}: a {kind.__name__} cannot be stored: make a plain tensor of it")
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        what = "quantized" if value.is_quantized else "nested" if value.is_nested else str(value.layout)
        raise InvalidType(f"{name_of(key)}: only dense tensors can be stored, not {what} ones")
    if value.is_meta:
        raise InvalidType(f"{name_of(key)}: a tensor on the device 'meta' holds no numbers")
    return value if kind is torch.Tensor else value.as_subclass(torch.Tensor)


def _array(key: Key, value: Any) -> np.ndarray[Any, Any]:
    if isinstance(value, np.ma.MaskedArray):
        raise InvalidType(f"{name_of(key)}: a masked array cannot be stored with its mask: fill it, or store both")
    return np.asarray(value)


def _from_numpy(key: Key, value: Any) -> torch.Tensor:
    array = _array(key, value)
    if array.dtype not in _TORCH_OF:
        native = array.dtype.newbyteorder("=")
        if native not in _TORCH_OF:
            raise InvalidType(f"{name_of(key)}: {array.dtype} cannot be stored, only numbers and booleans can")
        array = array.astype(native)
    odd = any(stride < 0 or stride % array.itemsize for stride in array.strides)
    return torch.from_numpy(array.copy() if odd or not array.flags.writeable else array)  # torch has none of these


def _kind(key: Key, value: Any) -> type | None:
    """The kind of Python's numbers that ``value`` is, or is a nested list of; None for anything else."""
    if type(value) in _NUMBERS:
        return type(value)
    if not isinstance(value, (list, tuple)) or not value:
        return None
    kinds = {_kind(key, part) for part in value}
    if None in kinds:
        return None
    if bool in kinds and len(kinds) > 1:
        raise InvalidType(f"{name_of(key)}: {value!r:.60} holds both booleans and numbers")
    return max((kind for kind in kinds if kind is not None), key=_NUMBERS.index)


def _from_numbers(key: Key, value: Any, kind: type, dtype: torch.dtype | None) -> torch.Tensor:
    """Python's numbers as ``dtype``, or as torch counts them: ``1.0`` is float32."""
    if dtype is None or not _may_become(kind, dtype):
        dtype = _USUAL[kind]
    if kind is not bool:
        _refuse_large(key, [number for number in _flat(value) if type(number) is int], dtype)
    wide = NUMPY_OF[dtype] if kind is int and not (dtype.is_floating_point or dtype.is_complex) else _WIDE[kind]
    try:
        return _narrowed(key, torch.from_numpy(np.asarray(value, wide)), dtype)
    except (TypeError, ValueError) as problem:
        if isinstance(problem, InvalidArgument):
            raise
        raise InvalidType(f"{name_of(key)}: {value!r:.60} cannot be stored: {problem}") from problem


def _flat(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _flat(part)
    else:
        yield value


def _may_become(kind: type, dtype: torch.dtype) -> bool:
    if kind is bool or dtype is torch.bool:
        return kind is bool and dtype is torch.bool
    return dtype.is_complex or (kind is not complex and dtype.is_floating_point) or kind is int


def _refuse_large(key: Key, integers: Sequence[int], dtype: torch.dtype) -> None:
    """Raises ``SchemaMismatch`` for integers that ``dtype`` cannot hold exactly."""
    if dtype.is_floating_point or dtype.is_complex:
        highest = int(2 / torch.finfo(dtype).eps)
        lowest = -highest
    else:
        lowest, highest = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    for number in integers:
        if not lowest <= number <= highest:
            raise SchemaMismatch(f"{name_of(key)}: {number} does not fit {str(dtype).removeprefix('torch.')}")


def _narrowed(key: Key, wide: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As ``dtype``. Raises ``SchemaMismatch`` where a finite number would become infinite."""
    narrow = wide.to(dtype)
    if narrow.dtype is not wide.dtype and (dtype.is_floating_point or dtype.is_complex):
        lost = narrow.isinf() & wide.isfinite()
        if bool(lost.any()):
            raise SchemaMismatch(
                f"{name_of(key)}: {wide[lost][0].item()} does not fit {str(dtype).removeprefix('torch.')}"
            )
    return narrow


def scalar_as(value: Any, array_type: np.dtype[Any]) -> np.ndarray[Any, Any] | None:
    """One of Python's numbers as an array without dimensions; None where that type cannot hold it. The quick way."""
    kind, wanted = type(value), array_type.kind
    if kind is bool or wanted == "b":
        return np.asarray(value, array_type) if kind is bool and wanted == "b" else None
    if kind is int and wanted in "iu":
        limits = np.iinfo(array_type)
        return np.asarray(value, array_type) if limits.min <= value <= limits.max else None
    if kind in (int, float) and wanted == "f":
        limit = np.finfo(array_type)
        fits = abs(value) <= (2 / float(limit.eps) if kind is int else float(limit.max)) or not math.isfinite(value)
        return np.asarray(value, array_type) if fits else None
    return None
