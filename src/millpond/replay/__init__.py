"""Replay: storage, samplers, and the buffer that ties them to a flow."""

from __future__ import annotations

from millpond.replay.blocking import BlockingReplayBuffer, RateLimitedReplayBuffer
from millpond.replay.buffer import Handle, ReplayBuffer
from millpond.replay.ensemble.buffer import ReplayBufferEnsemble
from millpond.replay.samplers.episodes import HindsightSampler, NStep
from millpond.replay.samplers.prioritized import PrioritizedSampler
from millpond.replay.samplers.protocol import Draw, Items, Randomness, Sampler
from millpond.replay.samplers.schedules import LinearSchedule
from millpond.replay.samplers.slices import SliceSampler
from millpond.replay.samplers.uniform import ConsumingSampler, RandomSampler, SamplerWithoutReplacement
from millpond.replay.storage import LazyMemmapStorage, LazyTensorStorage, MappedStorage, Storage, TensorStorage

__all__ = [
    "BlockingReplayBuffer",
    "ConsumingSampler",
    "Draw",
    "Handle",
    "HindsightSampler",
    "Items",
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "LinearSchedule",
    "MappedStorage",
    "NStep",
    "PrioritizedSampler",
    "RandomSampler",
    "Randomness",
    "RateLimitedReplayBuffer",
    "ReplayBuffer",
    "ReplayBufferEnsemble",
    "Sampler",
    "SamplerWithoutReplacement",
    "SliceSampler",
    "Storage",
    "TensorStorage",
]
