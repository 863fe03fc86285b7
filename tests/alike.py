"""Of many alike cases some run always, the others with ``--exhaustive``, as `make test-exhaustive` does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def usually(values: Iterable[Any], *chosen: Any) -> list[Any]:
    """Parameters: those not among ``chosen`` are marked ``exhaustive``."""
    return [value if value in chosen else pytest.param(value, marks=pytest.mark.exhaustive) for value in values]
