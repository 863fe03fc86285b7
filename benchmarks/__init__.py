"""Benchmarks: `python -m benchmarks` runs all of them, `python -m benchmarks NAME…` some."""

from __future__ import annotations

import os

# Figures are for one thread of torch and BLAS unless a benchmark sets another number itself. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
