"""Replay: storage, samplers, and the buffer that ties them to a flow."""

from __future__ import annotations

from millpond.replay.annealing import LinearSchedule
from millpond.replay.blocking import BlockingReplayBuffer, RateLimitedReplayBuffer
from millpond.replay.buffer import Handle, ReplayBuffer
from millpond.replay.drawing import Draw, Items, Randomness, Sampler
from millpond.replay.ensemble import ReplayBufferEnsemble
from millpond.replay.prioritized import PrioritizedSampler
from millpond.replay.samplers import ConsumingSampler, RandomSampler, SamplerWithoutReplacement
from millpond.replay.slices import SliceSampler
from millpond.replay.storage import LazyMemmapStorage, LazyTensorStorage, MappedStorage, Storage, TensorStorage
from millpond.replay.windows import HindsightSampler, NStep

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
