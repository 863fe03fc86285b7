"""The parts that the members of an ensemble have in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from millpond.core.errors import InvalidArgument, InvalidType, SchemaMismatch
from millpond.core.schema import Schema
from millpond.replay.buffer import ReplayBuffer


def schema_of(members: Sequence[ReplayBuffer]) -> Schema | None:
    """Of the items of all members; None where none is bound. Raises ``SchemaMismatch`` where they differ."""
    known = [(i, b.schema) for i, b in enumerate(members) if b.schema is not None]
    for i, schema in known[1:]:
        if schema != known[0][1]:
            first, its = known[0]
            assert its is not None
            raise SchemaMismatch(f"members {first} and {i} hold different items: {its.difference(schema)}")
    return known[0][1] if known else None


def split(sample: Any, members: Sequence[ReplayBuffer]) -> list[tuple[int, Any, torch.Tensor]]:
    """For each member in a batch its number, its part, and which items those are. Raises what is wrong with it."""
    if not isinstance(sample, TensorDictBase):
        raise InvalidType(f"a batch of this ensemble is a TensorDict, not {type(sample).__name__}")
    ids = sample.get("buffer_id", None)
    if ids is None:
        raise InvalidArgument("this batch has no buffer_id: is it one that the ensemble's sample() returned?")
    ids = ids.cpu()
    if ids.dtype is not torch.int64 or ids.dim() != 1 or bool(((ids < 0) | (ids >= len(members))).any()):
        raise InvalidArgument(f"buffer_id is a number from 0 to {len(members) - 1} for each item")
    names = [name for name in ("index", "generation") if name in sample.keys()]  # noqa: SIM118  # a TensorDict
    rest = sample.select(*names).cpu()
    parts = [(int(i), rest[ids == i], ids == i) for i in ids.unique()]
    for i, part, _ in parts:
        members[i]._local.updater.named(part)
    return parts


def put_together(parts: dict[int, Any], ids: torch.Tensor | None = None) -> Any:
    """One batch. Raises ``SchemaMismatch`` or ``InvalidType`` where the members' transforms gave what cannot be one."""
    first, *others = parts.items()
    its = _described(*first)
    for i, part in others:
        theirs = _described(i, part)
        if its != theirs:
            name = min(str(key) for key in its.keys() | theirs.keys() if its.get(key) != theirs.get(key))
            raise SchemaMismatch(f"the batches of members {first[0]} and {i} differ in {name}: is it their transforms?")
    batch = torch.cat(list(parts.values())) if others else first[1]
    if ids is not None and isinstance(batch, TensorDictBase):
        batch.set("buffer_id", ids)
    return batch


def _described(i: int, part: Any) -> dict[Any, Any]:
    if isinstance(part, torch.Tensor):
        return {"the tensor": (part.dtype, part.shape[1:])}
    if not isinstance(part, TensorDictBase):
        kind = type(part).__name__
        raise InvalidType(f"the transform of member {i} returned a {kind}: in an ensemble, a TensorDict or a tensor")
    return {key: (value.dtype, value.shape[1:]) for key, value in part.items(True, True)}
