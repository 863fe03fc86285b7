"""The usual calls, compiled by Numba. Each has a twin in plain Python, which defines it."""
