"""Replay that other processes and machines use: owned by a Ray actor, reached by the shortest way there is."""

from __future__ import annotations

from millpond.remote.buffer import RayReplayBuffer, connect
from millpond.remote.client import ReplayClient

__all__ = ["RayReplayBuffer", "ReplayClient", "connect"]
