"""Flow-controlled experience replay for PyTorch, and the off-policy training system built on it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millpond.flow.limiter import Flow
    from millpond.replay import BlockingReplayBuffer, RateLimitedReplayBuffer, ReplayBuffer, ReplayBufferEnsemble
    from millpond.train.policy import load_policy

__version__ = "0.1.0"

__all__ = [
    "BlockingReplayBuffer",
    "Flow",
    "RateLimitedReplayBuffer",
    "ReplayBuffer",
    "ReplayBufferEnsemble",
    "__version__",
    "load_policy",
]

# Imported when first asked for: torch takes seconds, and workers that need only a lock or a counter start without it.
_HOMES = {
    "Flow": "millpond.flow.limiter",
    "BlockingReplayBuffer": "millpond.replay",
    "RateLimitedReplayBuffer": "millpond.replay",
    "ReplayBuffer": "millpond.replay",
    "ReplayBufferEnsemble": "millpond.replay",
    "load_policy": "millpond.train.policy",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'millpond' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
