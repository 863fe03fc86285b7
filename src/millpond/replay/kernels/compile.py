"""How kernels are compiled by Numba. Imported by the kernels only, so that millpond runs without Numba.

Each kernel has explicit signatures, so that nothing is compiled twice, and allocates nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numba.np import arrayobj

_Function = TypeVar("_Function", bound=Callable[..., object])
_arrayobj, _cgutils = cast(Any, arrayobj), cast(Any, cgutils)
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "boundscheck": False}


def compiled(signature: str, *, nogil: bool = False) -> Callable[[_Function], _Function]:
    """Compile now, or load from the cache beside the file (or in NUMBA_CACHE_DIR) where a directory is writable.

    With ``nogil=False`` the kernel keeps the GIL, so that it may run under a lock.
    """

    def decorate(function: _Function) -> _Function:
        made: Any
        try:
            made = numba.njit(signature, cache=True, nogil=nogil, **_OPTIONS)(function)
        except RuntimeError:  # "cannot cache function: no locator available": no directory is writable
            made = numba.njit(signature, nogil=nogil, **_OPTIONS)(function)
        return cast(_Function, made)

    return decorate


def inlined(function: _Function) -> _Function:
    """Becomes part of the kernels that call it; compiled only when one of them is."""
    made: Any = numba.njit(forceinline=True, nogil=False, **_OPTIONS)(function)
    return cast(_Function, made)


def _announce(_: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = signature.args[0]
        made = _arrayobj.make_array(kind)(context, builder, values[0])
        at = _cgutils.get_item_pointer(context, builder, kind, made, values[1:], wraparound=False)
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = _cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [pointer, number, number, number]),
            "llvm.prefetch.p0i8",
        )
        builder.call(function, [builder.bitcast(at, pointer), number(0), number(3), number(1)])  # read, keep, data
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


#: ``announce(array, index)``, in a kernel: bring the cache line of that element of a 1-D array near.
#:
#: Kernels that visit memory in no order spend their time waiting for it. Each place announced some steps ahead lets the
#: processor fetch many at once. The index may be any: this cannot fault.
announce: Callable[[Any, int], None] = cast(Any, intrinsic)(_announce)


def _load(_: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load(builder.inttoptr(values[0], ir.IntType(64).as_pointer()))

    return types.int64(types.int64), generate


def _load_half(_: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.zext(builder.load(builder.inttoptr(values[0], ir.IntType(32).as_pointer())), ir.IntType(64))

    return types.int64(types.int64), generate


def _store(_: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.store(values[1], builder.inttoptr(values[0], ir.IntType(64).as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _store_half(_: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        half = builder.trunc(values[1], ir.IntType(32))
        builder.store(half, builder.inttoptr(values[0], ir.IntType(32).as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _fence(_: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.fence("acq_rel")
        return context.get_dummy_value()

    return types.void(), generate


def _place(_: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


#: In a kernel: the 64-bit, or 32-bit, word at an address; and storing one there.
load: Callable[[int], int] = cast(Any, intrinsic)(_load)
load_half: Callable[[int], int] = cast(Any, intrinsic)(_load_half)
store: Callable[[int, int], None] = cast(Any, intrinsic)(_store)
store_half: Callable[[int, int], None] = cast(Any, intrinsic)(_store_half)

#: In a kernel: what stands before it has been read, or is in memory for all who look, before what stands behind it is;
#: only a read may overtake an earlier write.
fence: Callable[[], None] = cast(Any, intrinsic)(_fence)

#: In a kernel: the pointer that `carray` takes, from an address.
place: Callable[[int], Any] = cast(Any, intrinsic)(_place)


def external(name: str, signature: Any) -> Callable[..., int]:
    """A function of the C library, by its name."""
    return cast(Callable[..., int], cast(Any, types).ExternalFunction(name, signature))


#: In a kernel: ``carray(pointer, shape, dtype)`` is the array that lies there.
carray: Callable[..., Any] = cast(Any, numba).carray
