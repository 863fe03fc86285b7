"""Flow-controlled experience replay for PyTorch, and the off-policy training system built on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millpond.flow.limiter import Flow
from millpond.replay import BlockingReplayBuffer, RateLimitedReplayBuffer, ReplayBuffer, ReplayBufferEnsemble

if TYPE_CHECKING:
    from millpond.train.policy import load_policy as load_policy

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


def __getattr__(name: str) -> Any:
    """Training needs more packages than replay; they are imported when somebody asks for a trained policy."""
    if name == "load_policy":
        from millpond.train.policy import load_policy

        return load_policy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
