"""Checks that the settings of all algorithms share, each naming the setting that is wrong."""

from __future__ import annotations

import math
from typing import Any

from millpond.core.errors import InvalidArgument


def check_common(config: Any) -> None:
    """Check the settings that every algorithm has: ``hidden``, ``gamma``, ``tau``.

    Raises:
        InvalidArgument: one is out of its bounds.
    """
    if not config.hidden or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in config.hidden):
        raise InvalidArgument(f"hidden must be the widths of at least one layer, got {config.hidden}")
    # A frozen dataclass; YAML and JSON give lists.
    object.__setattr__(config, "hidden", tuple(config.hidden))
    check_between(config, "gamma", 0.0, 1.0)
    check_between(config, "tau", 0.0, 1.0)


def check_between(config: Any, name: str, low: float, high: float) -> None:
    """Check that ``low <= config.name <= high``; NaN is outside."""
    value = getattr(config, name)
    if not low <= value <= high:
        raise InvalidArgument(f"{name} must be between {low:g} and {high:g}, got {value}")


def check_positive(config: Any, *names: str) -> None:
    """Check that each of ``names`` is finite and above zero."""
    for name in names:
        value = getattr(config, name)
        if not 0 < value < math.inf:
            raise InvalidArgument(f"{name} must be above 0, got {value}")
