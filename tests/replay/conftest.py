"""The two ways to have the shortcut."""

from __future__ import annotations

from typing import Any

import pytest
from shortcuts import either


@pytest.fixture(params=["compiled", "slow"])
def way(request: pytest.FixtureRequest) -> Any:
    """The kernels: compiled, and the same source in plain Python."""
    return either(request.param)
