"""The members of an ensemble saved together, and loaded: all of them, or none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from millpond.core.errors import CheckpointError
from millpond.replay import checkpoint
from millpond.replay.buffer import ReplayBuffer
from millpond.replay.container import Column
from millpond.replay.ensemble.joint import rank
from millpond.replay.ensemble.parts import schema_of
from millpond.replay.samplers.protocol import Generator
from millpond.replay.soundness import checked


@contextlib.contextmanager
def frozen(members: Sequence[ReplayBuffer], random: Generator) -> Iterator[dict[str, Any]]:
    """All that is saved, of one moment. No member changes inside the block."""
    schema_of(members)  # before a lock is held, as it may be that another process has bound it
    local = list(enumerate(member._local for member in members))
    with contextlib.ExitStack() as stack:
        ordered = sorted(local, key=lambda pair: rank(pair[1].engine))
        states = {i: stack.enter_context(checkpoint.frozen(its)) for i, its in ordered}
        yield {"members": [states[i] for i, _ in local], "generator": random.torch.get_state()}


def load(members: Sequence[ReplayBuffer], random: Generator, state: Any) -> None:
    """Go on from what `frozen` gave. Raises ``CheckpointError`` before anything changed."""
    saved = state.get("members") if isinstance(state, dict) else None
    if not isinstance(saved, list) or len(saved) != len(members):
        kept = f"{len(saved)} members" if isinstance(saved, list) else "no ensemble"
        raise CheckpointError(f"this is a checkpoint of {kept}; the ensemble has {len(members)}")
    try:
        found = Column.of(state["generator"]).whole()
        torch.Generator().set_state(found)
    except (AttributeError, KeyError, TypeError, RuntimeError) as problem:
        raise CheckpointError(f"this is no checkpoint of an ensemble: {problem!r:.200}") from problem
    for i, (member, its) in enumerate(zip(members, saved, strict=True)):
        try:
            checked(member._local.engine, member.schema, its)
        except CheckpointError as problem:
            raise CheckpointError(f"member {i}: {problem}") from problem
    for member, its in zip(members, saved, strict=True):
        checkpoint.load_state_dict(member._local, its)
    random.torch.set_state(found)
