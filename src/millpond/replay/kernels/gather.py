"""Gathering packed rows from memory far larger than the caches, for Numba. Imported at the first use only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.replay.kernels.compile import announce, compiled, inlined

Ints = NDArray[np.int64]

#: What this is compiled together with (`tests/replay/test_kernels.py` knows): Numba's cache looks at this file alone.
SOURCES = "a18e814740f7a3db"
AHEAD, SOON = 24, 12  # rows: with two to four cache lines each, about what a core can have under way
LINE = 8  # 64-bit words
_SIGNATURE = "void(int64[::1], int64[::1], int64[:, ::1])"


@inlined
def copy_rows(words: Ints, slots: Ints, out: Ints) -> None:
    """Row i of ``out`` becomes row ``slots[i]`` of ``words``, unchecked."""
    n, width = out.shape
    for i in range(min(AHEAD, n)):
        announce(words, slots[i] * width)
    for i in range(n):
        if i + AHEAD < n:
            announce(words, slots[i + AHEAD] * width)
        if i + SOON < n:  # the first line brought the page's address near, too
            at = slots[i + SOON] * width
            for word in range(LINE, width, LINE):
                announce(words, at + word)
            announce(words, at + width - 1)
        at = slots[i] * width
        for word in range(width):
            out[i, word] = words[at + word]


@compiled(_SIGNATURE)
def gather(words: Ints, slots: Ints, out: Ints) -> None:
    """`copy_rows`; the caller knows that the slots are in range. Keeps the GIL."""
    copy_rows(words, slots, out)


@compiled(_SIGNATURE, nogil=True)
def gather_released(words: Ints, slots: Ints, out: Ints) -> None:
    """`gather`, letting go of the GIL: for many rows."""
    copy_rows(words, slots, out)
