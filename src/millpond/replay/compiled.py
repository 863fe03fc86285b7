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
