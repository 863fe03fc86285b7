"""The two ways to have the fast path."""

from __future__ import annotations

from typing import Any

import pytest
from fast_paths import either


@pytest.fixture(params=["compiled", "slow"])
def way(request: pytest.FixtureRequest) -> Any:
    """The kernels: compiled, and the same source in plain Python."""
    return either(request.param)
