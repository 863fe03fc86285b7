"""Several buffers sampled as one."""

from __future__ import annotations

from millpond.replay.ensemble.buffer import ReplayBufferEnsemble

__all__ = ["ReplayBufferEnsemble"]
