"""Arithmetic over many environments that gives, bit for bit, what Gymnasium computes for each alone.

NumPy's fast paths for arrays round differently from its scalars in the last bit of a few values in a thousand, and a
chaotic system makes a different episode of that. The tests compare every bit, so that a change in NumPy is noticed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def norm(vectors: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """``numpy.linalg.norm`` of each of ``[n, k]`` alone: the root of a BLAS dot product, not of a sum of squares."""
    return np.asarray(np.sqrt((vectors[:, None, :] @ vectors[:, :, None])[:, 0, 0]))


def square(numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """``x**2`` of each scalar alone, which C's ``pow`` computes; an array would multiply."""
    if numbers.dtype == np.float64:
        return np.asarray(np.float_power(numbers, 2))
    result = np.empty(len(numbers), numbers.dtype)  # backwards, since no vectorised ``pow`` takes negative strides
    np.power(numbers[::-1], np.full(len(numbers), 2, numbers.dtype), out=result[::-1])
    return result
