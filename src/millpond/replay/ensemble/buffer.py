"""Several buffers sampled as one."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDict

from millpond.core.errors import BufferClosed, InvalidArgument, InvalidType, NotReady
from millpond.core.schema import Batch, Schema
from millpond.replay import checkpoint, container
from millpond.replay.buffer import Handle, ReplayBuffer
from millpond.replay.config import check_batch_size, generator, picked
from millpond.replay.ensemble import saving as saved_together
from millpond.replay.ensemble.joint import Joint, rank
from millpond.replay.ensemble.mixture import Mix, shares_of, unit_of
from millpond.replay.ensemble.parts import put_together, schema_of, split
from millpond.replay.samplers.prioritized import real_numbers
from millpond.replay.samplers.protocol import Generator
from millpond.replay.update import index_of, positions_of
from millpond.replay.waiting import check_cancel, check_timeout
from millpond.shm.interrupts import uninterrupted

_SUMS = (
    "capacity size storage_size nbytes write_count sample_calls samples_returned prefetched reserved overwritten "
    "consumed dropped stale_updates producer_blocks consumer_blocks waiting_producers waiting_consumers "
    "high_watermark recoveries discarded_writes"
).split()


@dataclass(frozen=True)
class EnsembleHandle:
    """Picklable: how another process on this host finds an ensemble. Give it to `ReplayBufferEnsemble.attach`."""

    members: tuple[Any, ...]
    weights: tuple[float, ...]
    batch_size: int | None


class ReplayBufferEnsemble:
    """Writes go to one member; a batch is drawn from all, each item from a member chosen by ``weights``.

    A batch carries ``buffer_id`` (int64 ``[n]``). It is taken from all members in one step, or from none: their
    locks are taken together, in an order that all ensembles of all processes share, so that ensembles of the same
    members do not lock each other out. Each member keeps its own sampler and flow. What the methods of `ReplayBuffer`
    promise holds for those of the same name here.

    With prioritized members ``priority_weight`` undoes the bias of the whole mix: item i of member m, whose share is s
    and whose sampler draws it with probability P, has ``(N s P)^-beta`` over the largest such weight of any live item.
    A sampler without priorities counts as uniform over its live items, with the largest beta of the others.

    Members whose sampler returns slices give whole ones: a batch is a multiple of their length, or other members take
    what is left over.

    Args:
        buffers: at least one; they must hold items of one schema. A client of a buffer that another process owns may be
            a member on its owner's host.
        weights: expected share of each member in a batch; equal by default. May be assigned later.
        batch_size: items of a ``sample()`` that does not say otherwise. May be assigned later.
        seed: of the choice of members.

    Raises:
        InvalidArgument, InvalidType: no member, a member twice, members that put their batches on different devices,
            weights that are none, a sampler whose counts cannot be divided.
        NotShareable: a client on another host than its owner: one step over all members needs their memory.
    """

    def __init__(
        self,
        *buffers: Any,
        weights: Sequence[float] | None = None,
        batch_size: int | None = None,
        seed: int | torch.Generator | None = None,
    ) -> None:
        if not buffers:
            raise InvalidArgument("an ensemble needs at least one buffer")
        for buffer in buffers:
            if not isinstance(buffer, ReplayBuffer) and not callable(getattr(buffer, "here", None)):
                raise InvalidType(f"a member is a ReplayBuffer or a client of one, not {type(buffer).__name__}")
        self._members = buffers
        here = self._here()
        if len({rank(b._local.engine) for b in here}) < len(buffers):
            raise InvalidArgument("a buffer is a member twice")
        devices = {b._local.rules.device for b in here}
        if len(devices) > 1:
            raise InvalidArgument("the members put their batches on different devices, so one batch cannot hold both")
        self._device = devices.pop()
        self._units = [unit_of(b.sampler) for b in here]
        self.weights = weights
        self.batch_size = batch_size
        self._random = Generator(generator(seed))
        self._look = np.random.default_rng()

    # ------------------------------------------------------------------ settings
    @property
    def buffers(self) -> tuple[Any, ...]:
        """The members."""
        return self._members

    @property
    def weights(self) -> Any:
        """The expected share of each member, float64, of sum 1; read-only. Assign others to change them."""
        return self._shares

    @weights.setter
    def weights(self, weights: Sequence[float] | None) -> None:
        shares = shares_of(weights, len(self._members))
        self._shares, self._mix = shares, Mix(shares, self._units)

    @property
    def batch_size(self) -> int | None:
        return self._batch_size

    @batch_size.setter
    def batch_size(self, n: int | None) -> None:
        self._batch_size = None if n is None else check_batch_size(n)

    # ------------------------------------------------------------------ writing
    @uninterrupted
    def extend(self, items: Batch, *, member: int = 0, **options: Any) -> torch.Tensor:
        """Write to one member; further arguments and errors are those of ``ReplayBuffer.extend``."""
        slots: torch.Tensor = self._member(member).extend(items, **options)
        return slots

    @uninterrupted
    def add(self, item: Batch, *, member: int = 0, **options: Any) -> int:
        """Write one item to one member; further arguments and errors are those of ``ReplayBuffer.add``."""
        return int(self._member(member).add(item, **options))

    # ------------------------------------------------------------------ sampling
    @uninterrupted
    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        *,
        wait: bool = False,
        timeout: float | None = None,
        cancel_event: Any = None,
    ) -> Any:
        """A batch of all members, with ``buffer_id``. Arguments and errors are those of ``ReplayBuffer.sample``.

        Raises ``SchemaMismatch`` where the members hold items of different schemas, ``Unsatisfiable`` where a member
        can never give what this batch asks of it, and ``InvalidArgument`` where no choice of members makes a batch of
        this size.
        """
        n = self._size(batch_size)
        check_timeout(timeout)
        check_cancel(cancel_event)
        here = self._here()
        schema_of(here)
        before = self._random.torch.get_state()
        joint = Joint([b._local for b in here], self._mix.counts(n, self._random), self._shares)
        try:
            taken = joint.take(n, wait=wait, timeout=timeout, cancel=cancel_event)
            parts = {i: here[i]._dress(part, return_info) for i, part in zip(joint.numbers, taken, strict=True)}
            ids = torch.from_numpy(np.repeat(joint.numbers, [len(t.slots) for t in taken]))
            ids = ids if self._device is None else ids.to(self._device)
            if not return_info:
                return put_together(parts, ids)
            info: TensorDict = torch.cat([part[1] for part in parts.values()])  # type: ignore[assignment]
            return put_together({i: part[0] for i, part in parts.items()}), info.set("buffer_id", ids)
        except BaseException:  # also of a transform: nothing was delivered, by any member
            joint.take_back()
            self._random.torch.set_state(before)  # the next call asks the same of each
            raise

    def peek(self, n: int) -> Any:
        """A uniform look at n items of all members: consumes nothing, and moves no counter and no generator."""
        n = self._size(n)
        sizes = np.array([len(b) for b in self._members], np.float64)
        if not sizes.any():
            raise NotReady("there is no item to look at")
        counts = self._look.multinomial(n, sizes / sizes.sum())
        parts = {i: self._members[i].peek(int(count)) for i, count in enumerate(counts) if count}
        ids = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
        return put_together(parts, ids if self._device is None else ids.to(self._device))

    def __getitem__(self, which: Any) -> Any:
        """Items by member and then by age: an index, a slice, a mask, or several indices, as for one buffer."""
        here, index = self._here(), index_of(which)
        schema = schema_of(here)
        sizes = [len(b) for b in here]
        positions = positions_of(index, sum(sizes))
        if schema is None:
            raise NotReady("nothing was written yet, and no schema was given")
        found = torch.empty(len(positions), schema.row_nbytes, dtype=torch.uint8)
        edges = np.cumsum([0, *sizes])
        for buffer, first, last in zip(here, edges[:-1], edges[1:], strict=True):
            mine = (positions >= first) & (positions < last)
            if mine.any():
                rows, _ = buffer._local.updater.pick(torch.from_numpy(positions[mine] - first))
                found[torch.from_numpy(mine)] = rows.view(torch.uint8)
        own_shape = not isinstance(index, slice) and index.dtype != np.bool_
        return picked(schema, found, index.shape if own_shape else found.shape[:1])  # type: ignore[union-attr]

    @uninterrupted
    def __iter__(self) -> Iterator[Any]:
        """Batches, waiting for each; ends with the first epoch of a member that ends, or when a member is closed."""
        with contextlib.suppress(BufferClosed):
            while True:
                yield self.sample(wait=True)
                most = self._mix.most(self._size(None))
                for buffer, n in zip(self._here(), most, strict=True):
                    if n and buffer._local.updater.epoch_over(n) and not buffer._local.ahead:
                        return

    # ------------------------------------------------------------------ waiting
    def can_sample(self, batch_size: int | None = None) -> bool:
        """Could every member give as many items as any batch of this size may ask of it?"""
        return all(b.can_sample(n) for b, n in self._asked(self._size(batch_size)))

    def wait_until_sampleable(
        self, num_items: int | None = None, *, timeout: float | None = None, cancel_event: Any = None
    ) -> bool:
        """Wait until `can_sample`; somebody else may still be faster. False on timeout."""
        asked = self._asked(self._size(num_items))
        end = time.monotonic() + check_timeout(timeout)
        while True:
            for buffer, n in asked:
                left = None if end == math.inf else max(0.0, end - time.monotonic())
                if not buffer.wait_until_sampleable(n, timeout=left, cancel_event=cancel_event):
                    return False
            if all(buffer.can_sample(n) for buffer, n in asked):
                return True

    def wait_until_writable(
        self, num_items: int = 1, *, member: int = 0, timeout: float | None = None, cancel_event: Any = None
    ) -> bool:
        """Wait until ``extend`` of so many items to this member may proceed. False on timeout."""
        one = self._member(member)
        return bool(one.wait_until_writable(num_items, timeout=timeout, cancel_event=cancel_event))

    @contextlib.contextmanager
    def unlimited(self) -> Iterator[Self]:
        """What this process does inside is left out of every member's ratio."""
        with contextlib.ExitStack() as stack:
            for member in self._members:
                stack.enter_context(member.unlimited())
            yield self

    # ------------------------------------------------------------------ changing what is there
    @uninterrupted
    def update_priority(self, sample: TensorDict, priority: Any) -> int:
        """As ``ReplayBuffer.update_priority``, for a batch of this ensemble, or its info. Members without priorities
        are left out.

        Raises ``InvalidArgument`` or ``InvalidType``, before anything was changed; also where no member has priorities.
        """
        here = self._here()
        prioritized = [b._local.engine.priorities for b in here]
        if not any(prioritized):
            raise InvalidArgument("update_priority needs a member with a PrioritizedSampler")
        parts = split(sample, here)
        n = sum(len(part) for _, part, _ in parts)
        values = torch.from_numpy(real_numbers(priority))
        if values.numel() == 1:
            values = values.expand(n)
        if len(values) != n:
            raise InvalidArgument(f"{len(values)} priorities for {n} items")
        for i, part, mine in parts:
            judge = prioritized[i] or next(filter(None, prioritized))
            judge.weigh(values[mine], len(part))  # refuses what is no priority
        return sum(here[i].update_priority(part, values[mine]) for i, part, mine in parts if prioritized[i])

    @uninterrupted
    def update(self, sample: TensorDict, patch: Batch) -> int:
        """As ``ReplayBuffer.update``, for a batch of this ensemble, or its info."""
        here = self._here()
        schema, parts = schema_of(here), split(sample, here)
        if schema is None:
            raise NotReady("there is no item to update")
        fields = schema.check_patch(patch, sum(len(part) for _, part, _ in parts))
        applied = 0
        for i, part, mine in parts:
            own = TensorDict(batch_size=[len(part)])
            for key, value in fields.items():
                if key:
                    own[key] = value[mine]
            applied += here[i].update(part, fields[()][mine] if schema.plain else own)
        return applied

    @uninterrupted
    def empty(self) -> None:
        """Empty every member."""
        for member in self._members:
            member.empty()

    # ------------------------------------------------------------------ figures
    def stats(self) -> dict[str, Any]:
        """The keys of ``ReplayBuffer.stats``, summed, and each member's under ``members``."""
        members = [b.stats() for b in self._members]
        total: dict[str, Any] = {key: sum(m[key] for m in members) for key in _SUMS}
        lows = [m["low_watermark"] for m in members]
        total["low_watermark"] = None if None in lows else sum(lows)
        total["under_pressure"] = any(m["under_pressure"] for m in members)
        total["lock"] = "robust" if all(m["lock"] == "robust" for m in members) else "fallback"
        return total | {"members": members}

    def explain(self, op: str = "sample", n: int | None = None) -> str:
        """One line for each member; of a sample those that may be asked for something, and for how much at most."""
        if op != "sample":
            return "\n".join(f"member {i}: {b.explain(op, n)}" for i, b in enumerate(self._members))
        most = enumerate(self._mix.most(self._size(n)))
        return "\n".join(f"member {i}: {self._members[i].explain(op, size)}" for i, size in most if size)

    @property
    def capacity(self) -> int:
        """Of all members."""
        return sum(b.capacity for b in self._members)

    @property
    def schema(self) -> Schema | None:
        """None until the first write to a member, unless it was given."""
        return schema_of(self._here())

    @property
    def write_count(self) -> int:
        """Items ever written, to all members."""
        return sum(b.write_count for b in self._members)

    @property
    def storage_size(self) -> int:
        """Slots physically occupied, in all members."""
        return sum(b.storage_size for b in self._members)

    @property
    def sampleable_size(self) -> int:
        """Items of all members that a sample may return now."""
        return sum(b.sampleable_size for b in self._members)

    def __len__(self) -> int:
        return self.sampleable_size

    # ------------------------------------------------------------------ sharing and saving
    def share(self) -> Self:
        """Move every member into shared memory. Returns itself."""
        for member in self._members:
            member.share()
        return self

    @property
    def shared(self) -> bool:
        """Can other processes use all members?"""
        return all(member.shared for member in self._members)

    def handle(self) -> EnsembleHandle:
        """Raises ``NotShareable`` where a member is not shared."""
        members = tuple(m.handle() if isinstance(m, ReplayBuffer) else m for m in self._members)
        return EnsembleHandle(members, tuple(self._shares.tolist()), self.batch_size)

    @classmethod
    def attach(cls, handle: EnsembleHandle) -> Self:
        """An ensemble of the same members in this process, which chooses among them by numbers of its own."""
        members = [ReplayBuffer.attach(m) if isinstance(m, Handle) else m for m in handle.members]
        return cls(*members, weights=handle.weights, batch_size=handle.batch_size)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).attach, (self.handle(),)

    def state_dict(self) -> dict[str, Any]:
        """Every member's, of one moment, and the generator of the choice of members."""
        with saved_together.frozen(self._here(), self._random) as state:
            copied: dict[str, Any] = checkpoint.whole(state)
        return copied

    def load_state_dict(self, state: Any) -> None:
        """Replace what the members hold by what `state_dict` gave. Raises ``CheckpointError`` before anything
        changed."""
        saved_together.load(self._here(), self._random, state)

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Save to one file: versioned, checksummed, whole or not at all."""
        with container.replacing(path) as file, saved_together.frozen(self._here(), self._random) as state:
            container.write(file, state)

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Replace what the members hold by a saved file. Raises ``CheckpointError`` before anything changed."""
        with container.opened(path) as saved:
            self.load_state_dict(saved)

    def close(self) -> None:
        """Close, or leave, every member."""
        for member in self._members:
            member.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._members)} members, weights {self._shares.round(4).tolist()})"

    # ------------------------------------------------------------------ inside
    def _here(self) -> list[ReplayBuffer]:
        """The members as this process reaches them."""
        return [m if isinstance(m, ReplayBuffer) else m.here() for m in self._members]

    def _member(self, member: int) -> Any:
        if isinstance(member, bool) or not isinstance(member, (int, np.integer)):
            raise InvalidType(f"member is a number, not {member!r}")
        if not 0 <= member < len(self._members):
            raise InvalidArgument(f"member {member} of {len(self._members)}")
        return self._members[member]

    def _size(self, n: int | None) -> int:
        if n is None and self.batch_size is None:
            raise InvalidArgument("no batch_size: give it to sample(), or to the ensemble")
        return check_batch_size(self.batch_size if n is None else n)

    def _asked(self, n: int) -> list[tuple[Any, int]]:
        """Members, and what a batch of n may ask of each at most."""
        return [(b, most) for b, most in zip(self._members, self._mix.most(n), strict=True) if most]
