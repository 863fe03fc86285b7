"""Collection: environments stepped by a policy, their frames counted exactly, in this process or in many."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millpond.collect.budget import FrameBudget
    from millpond.collect.collector import Collector
    from millpond.collect.multi import MultiCollector
    from millpond.collect.ray import RayCollector

__all__ = ["Collector", "FrameBudget", "MultiCollector", "RayCollector"]
_HOMES = {"Collector": "collector", "FrameBudget": "budget", "MultiCollector": "multi", "RayCollector": "ray"}


def __getattr__(name: str) -> Any:
    """Import at first use: counting frames needs no Gymnasium."""
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
