"""The kernels of `ring` in plain Python: the same source, line by line, with stand-ins for what Numba adds.

`CompiledFastPath(engine, slow_kernels)` then does what the compiled ones do, slowly, so that a test can stop, kill and
look between any two lines. ``FILES`` are the sources whose lines these are.
"""

from __future__ import annotations

import builtins
import ctypes
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

import millpond.replay.kernels

_HERE = Path(millpond.replay.kernels.__file__).parent
_LIBC = ctypes.PyDLL(None)  # keeps the GIL, as the kernels do
_TYPES = {"int32": ctypes.c_int32, "intp": ctypes.c_ssize_t}


def _load(address: int) -> int:
    return ctypes.c_int64.from_address(int(address)).value


def _store(address: int, value: int) -> None:
    assert -(2**63) <= value < 2**63  # where the compiled one would wrap round, the test must know it
    ctypes.c_int64.from_address(int(address)).value = int(value)


def _load_half(address: int) -> int:
    return ctypes.c_uint32.from_address(int(address)).value


def _store_half(address: int, value: int) -> None:
    ctypes.c_uint32.from_address(int(address)).value = int(value) & 0xFFFFFFFF


def _carray(address: int, shape: tuple[int, ...], dtype: Any) -> Any:
    count = int(np.prod(shape))
    memory = (ctypes.c_char * (8 * count)).from_address(int(address))
    return np.frombuffer(memory, dtype, count).reshape(tuple(map(int, shape)))


def _external(name: str, returned: str) -> Callable[..., int]:
    function = _LIBC[name]
    function.restype = _TYPES[returned]

    def call(*arguments: int) -> int:
        return int(function(*[ctypes.c_int64(int(argument)) for argument in arguments]))

    return call


def _compiled(signature: str, *, nogil: bool = False) -> Callable[[Any], Any]:
    return lambda function: function


def _signature(returned: str) -> Callable[..., str]:
    return lambda *arguments: returned


_COMPILED = SimpleNamespace(
    announce=lambda array, index: None,
    carray=_carray,
    compiled=_compiled,
    external=_external,
    fence=lambda: None,
    inlined=lambda function: function,
    load=_load,
    load_half=_load_half,
    place=lambda address: address,
    store=_store,
    store_half=_store_half,
)


class _SignatureTypes:
    """``types.int32(types.intp)`` and the like: what is left is the type that comes back."""

    int32, intp = staticmethod(_signature("int32")), staticmethod(_signature("intp"))


_STAND_INS: dict[str, Any] = {
    "numba": SimpleNamespace(types=_SignatureTypes),
    "millpond.replay.kernels.compile": _COMPILED,
}


def _import(name: str, *more: Any) -> Any:
    return _STAND_INS.get(name) or builtins.__import__(name, *more)


def _read(name: str) -> ModuleType:
    file = _HERE / f"{name}.py"
    module = ModuleType(f"slow_{name}")
    module.__dict__["__builtins__"] = {**vars(builtins), "__import__": _import}
    exec(compile(file.read_text(), str(file), "exec"), module.__dict__)  # the source of the package itself
    _STAND_INS[f"millpond.replay.kernels.{name}"] = module
    return module


_gather, _tree, _ring = map(_read, ("gather", "tree", "ring"))

FILES = frozenset(str(_HERE / f"{name}.py") for name in ("gather", "tree", "ring"))
PLAN = _ring.PLAN
gather, gather_released = _gather.gather, _gather.gather_released
put, set_leaves = _ring.put, _ring.set_leaves
take_oldest, take_prioritized = _ring.take_oldest, _ring.take_prioritized
take_uniform = _ring.take_uniform
