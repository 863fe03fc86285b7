"""Gathering packed rows from memory far larger than the caches, for Numba. Imported at the first use only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.replay.compiled import announce, compiled, inlined

Ints = NDArray[np.int64]

AHEAD = 12  # rows: with two to four cache lines each, about what a core can have under way
LINE = 8  # 64-bit words
_SIGNATURE = "void(int64[::1], int64[::1], int64[:, ::1])"


@inlined
def _announce_row(words: Ints, at: int, width: int) -> None:
    for word in range(0, width, LINE):
        announce(words, at + word)
    announce(words, at + width - 1)


@inlined
def _copy(words: Ints, slots: Ints, out: Ints) -> None:
    n, width = out.shape
    for i in range(min(AHEAD, n)):
        _announce_row(words, slots[i] * width, width)
    for i in range(n):
        if i + AHEAD < n:
            _announce_row(words, slots[i + AHEAD] * width, width)
        at = slots[i] * width
        for word in range(width):
            out[i, word] = words[at + word]


@compiled(_SIGNATURE)
def gather(words: Ints, slots: Ints, out: Ints) -> None:
    """Row i of ``out`` becomes row ``slots[i]`` of ``words``. The caller knows that the slots are in range. Keeps the
    GIL."""
    _copy(words, slots, out)


@compiled(_SIGNATURE, nogil=True)
def gather_released(words: Ints, slots: Ints, out: Ints) -> None:
    """`gather`, letting go of the GIL: for many rows."""
    _copy(words, slots, out)
