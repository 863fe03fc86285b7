"""Two special cases of the replay buffer, each one line of rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from millpond.core.errors import InvalidArgument
from millpond.flow.limiter import Flow
from millpond.replay.buffer import ReplayBuffer
from millpond.replay.samplers.protocol import Sampler
from millpond.replay.samplers.uniform import ConsumingSampler
from millpond.replay.storage import Storage


class BlockingReplayBuffer(ReplayBuffer):
    """Every item is delivered ``consume_after_n_samples`` times, and producers wait for space: nothing is lost.

    Without a sampler the items come first in, first out. Above ``high_watermark`` items producers wait until at most
    ``low_watermark`` are left. Further arguments, methods and errors are those of `ReplayBuffer`; a ``flow`` adds its
    own limits.
    """

    def __init__(
        self,
        storage: int | Storage,
        *,
        consume_after_n_samples: int = 1,
        high_watermark: int | None = None,
        low_watermark: int | None = None,
        sampler: Sampler | None = None,
        flow: Flow | None = None,
        **more: Any,
    ) -> None:
        if sampler is None:
            sampler = ConsumingSampler(consume_after_n_samples)
        if flow is not None and flow.admission not in ("overwrite", "block"):
            raise InvalidArgument(f"a BlockingReplayBuffer blocks; its flow says admission={flow.admission!r}")
        given = Flow() if flow is None else flow
        rules = replace(
            given,
            admission="block",
            high_watermark=given.high_watermark if high_watermark is None else high_watermark,
            low_watermark=given.low_watermark if low_watermark is None else low_watermark,
        )
        super().__init__(storage, sampler=sampler, flow=rules, consume_after_n_samples=consume_after_n_samples, **more)


class RateLimitedReplayBuffer(ReplayBuffer):
    """Samples and inserts are tied by ``samples_per_insert``: never more samples, and with ``max_debt`` never many
    fewer.

    Further arguments, methods and errors are those of `ReplayBuffer`; a ``flow`` adds its admission and watermarks.
    """

    def __init__(
        self,
        storage: int | Storage,
        *,
        samples_per_insert: float,
        min_size: int = 0,
        max_debt: float | None = None,
        flow: Flow | None = None,
        **more: Any,
    ) -> None:
        rules = replace(
            Flow() if flow is None else flow,
            samples_per_insert=samples_per_insert,
            min_size=min_size,
            max_debt=max_debt,
        )
        super().__init__(storage, flow=rules, **more)
