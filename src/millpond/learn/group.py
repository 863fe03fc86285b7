"""The data-parallel learner group: several ranks that learn as one process on the whole batch would."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Self

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from millpond.algos.flat import Shard
from millpond.core import errors
from millpond.core.errors import BufferClosed, InvalidArgument, InvalidType, SchemaMismatch, WorkerFailed
from millpond.core.schema import Schema
from millpond.learn.collective import Broken, Collective, Store, to_bytes
from millpond.learn.launch import ProcessRanks, Ranks, RayRanks, Torchrun, torchrun_environment
from millpond.learn.rank import END, SCHEMA, STATE, STEP, TIMES, MakeAlgorithm, RankSpec, as_numbers, run, timed_update

Launch = Literal["process", "ray", "torchrun"]
LAUNCHES = ("process", "ray", "torchrun")
_DIAGNOSIS_S = 1.5  # for the others to say what ended them
_LEFT_OUT = ("index", "generation", "buffer_id")  # who learned from what is rank 0's business


class LearnerGroup:
    """An ``Algorithm`` that ``world_size`` ranks carry out, of which this process is rank 0.

    Rank 0 draws each batch, once and whole, so that replay counts, limits and weighs it as that of one process. Rank r
    gets rows ``r·B/w … (r+1)·B/w-1``; gradients are averaged before any rank applies them, so all ranks make the same
    steps. Rank 0's state is sent to the others at the start.

    A rank that raises, dies, or does not answer for ``timeout`` seconds ends the group: `update` raises on rank 0, and
    the others end. What rank 0 holds then is the result of the last whole step.

    The other ranks begin with `start`, or with the first update.

    Args:
        algorithm: rank 0's; any that has ``shard`` and gives it its gradients, as those of ``millpond.algos`` do.
        make_algorithm: makes the same one on another rank, from a device such as ``"cpu"``; picklable by cloudpickle.
        world_size: how many ranks.
        batch_size: items of the whole batch.
        launch: ``"process"``: on this machine; ``"ray"``: as actors; ``"torchrun"``: they are there already, and each
            but rank 0 calls `serve`.
        backend: ``"gloo"``, or ``"nccl"`` for gradients on GPUs, one for each rank.
        threads: of PyTorch in each other rank.
        timeout: seconds that a rank may take longer than the others in one step, but the first.
        start_timeout: seconds within which all must be there, and for the first step.
        ray_options: of each actor, such as ``{"num_gpus": 1}``.

    Raises:
        InvalidArgument, InvalidType: sizes that do not fit each other, before anything was started.
    """

    def __init__(
        self,
        algorithm: Any,
        make_algorithm: MakeAlgorithm,
        *,
        world_size: int,
        batch_size: int,
        launch: Launch = "process",
        backend: Literal["gloo", "nccl"] = "gloo",
        threads: int | None = 1,
        timeout: float = 7.0,
        start_timeout: float = 120.0,
        ray_options: Mapping[str, Any] | None = None,
    ) -> None:
        _check(world_size, batch_size, launch, backend, timeout, start_timeout)
        if not hasattr(algorithm, "shard"):
            raise InvalidType(
                f"{type(algorithm).__name__} has no attribute `shard`, through which the ranks average their gradients:"
                " see millpond.algos.flat.Shard"
            )
        self.algorithm = algorithm
        self.world_size, self.batch_size = world_size, batch_size
        self.timings: list[dict[str, float]] = []
        """Of the last step, for each rank: seconds of ``wait``, ``compute`` and ``reduce``."""
        self._schema: Schema | None = None
        self._store: Store | None = None
        self._failure: BaseException | None = None
        self._collective: Collective | None = None
        device = "cuda:0" if backend == "nccl" else "cpu"
        self._spec = RankSpec(
            rank=0,
            world_size=world_size,
            batch_size=batch_size,
            make_algorithm=make_algorithm,
            device=device,
            nccl=backend == "nccl",
            threads=threads,
            timeout_s=timeout,
            start_timeout_s=start_timeout,
        )
        self._ranks: Ranks = _launcher(launch, ray_options)
        self._frames = 0
        self._closed = False

    def start(self) -> None:
        """Start the other ranks, with rank 0's state. Started already, nothing happens.

        Raises:
            DeadlineExceeded: not all ranks came within ``start_timeout``.
            WorkerFailed, or an error of millpond's: what a rank raised on its way in.
            BufferClosed: the group was closed.
        """
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise BufferClosed("this learner group was closed")
        if self._collective is not None:
            return
        try:
            self._spec, self._store = self._ranks.prepare(self._spec)
            self._ranks.start([self._of_rank(rank) for rank in range(1, self.world_size)])
            self._collective = self._spec.meet(self._store, self._watch)
            self._send_state()
            self.algorithm.shard = Shard(0, self.world_size, self._collective.mean)
        except Broken as problem:
            self._failure = self._explained(problem)
            self._leave(kill=True)
            raise self._failure from None
        except BaseException:
            self._leave(kill=True)
            raise

    def _send_state(self) -> None:
        state = to_bytes(self.algorithm.state_dict())
        self._tell([STATE, len(state), 0, 0], state)

    def _of_rank(self, rank: int) -> RankSpec:
        device = f"cuda:{rank}" if self._spec.nccl and isinstance(self._ranks, ProcessRanks) else self._spec.device
        return replace(self._spec, rank=rank, device=device)

    # ------------------------------------------------------------------ one step
    def update(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """One update of all ranks on ``batch [B]``.

        Returns the metrics of the whole batch: means over the ranks, and ``td_error [B]`` in the batch's order.

        Raises:
            InvalidArgument: the batch has a length that ``world_size`` does not divide; no rank heard of it.
            NonFinite: a loss on any rank. No parameter was changed; the group has ended.
            WorkerFailed: a rank failed, died or hangs, with its traceback. The group has ended.
            BufferClosed: the group was closed.
        """
        self.start()
        collective = self._usable()
        rows, left = divmod(len(batch), self.world_size)
        if left or not rows:
            raise InvalidArgument(
                f"a batch of {len(batch)} cannot be split evenly over {self.world_size} ranks: choose a batch size that"
                f" {self.world_size} divides, and drop_last=True for a sampler without replacement"
            )
        fields = batch.exclude(*_LEFT_OUT).to("cpu") if self._spec.nccl else batch.exclude(*_LEFT_OUT)
        try:
            began = time.perf_counter()
            sent = self._send(fields, rows)
            shared = time.perf_counter() - began
            mine = timed_update(self.algorithm, fields[:rows].to(self._spec.device), collective)
            collective.wait(sent)
            metrics = self._gather(collective, mine, shared)
            collective.settle()
            return metrics
        except Broken as problem:
            self._failure = self._explained(problem)
            self._leave(kill=True)
            raise self._failure from None
        except BaseException as problem:  # this rank's own: the others must not wait for it
            self._failure = problem
            self._leave(kill=True)
            raise

    def _send(self, fields: Any, rows: int) -> list[Any]:
        collective = self._usable()
        others = fields[rows:]
        try:
            packed = None if self._schema is None else self._schema.pack(others)
        except SchemaMismatch:
            packed = None
        if packed is None:  # the first batch, or one with other fields
            self._schema = Schema.from_example(others)
            spelled = torch.frombuffer(bytearray(self._schema.to_json().encode()), dtype=torch.uint8)
            self._tell([SCHEMA, len(spelled), 0, 0], spelled)
            packed = self._schema.pack(others)
        sent = []
        for rank in range(1, self.world_size):
            sent.append(collective.send_order([STEP, rows, self._frames, 0], rank))
            sent.append(collective.send_rows(packed[(rank - 1) * rows : rank * rows], rank))
        return sent

    def _gather(self, collective: Collective, mine: dict[str, Tensor], shared: float) -> dict[str, Tensor]:
        has_errors = "td_error" in mine
        dtype = mine["td_error"].dtype if has_errors else torch.float32
        numbers = as_numbers(mine, shared)  # takes the times and the errors out
        names = sorted(mine)
        every = [numbers, *(collective.receive_result(len(numbers), rank) for rank in range(1, self.world_size))]
        first = TIMES + len(names)
        self.timings = [dict(zip(("wait", "compute", "reduce"), rank[:TIMES].tolist(), strict=True)) for rank in every]
        means = torch.stack([rank[TIMES:first] for rank in every]).mean(0)
        metrics = {name: means[i].to(torch.float32) for i, name in enumerate(names)}
        if has_errors:
            metrics["td_error"] = torch.cat([rank[first:] for rank in every]).to(dtype)
        return metrics

    def _tell(self, order: list[int], payload: Tensor) -> None:
        collective = self._usable()
        sent = []
        for rank in range(1, self.world_size):
            sent.append(collective.send_order(order, rank))
            sent.append(collective.send_rows(payload, rank))
        collective.wait(sent)

    def _usable(self) -> Collective:
        assert self._collective is not None
        return self._collective

    # ------------------------------------------------------------------ the rest of an algorithm is rank 0's
    @property
    def policy(self) -> nn.Module:
        """Rank 0's."""
        policy: nn.Module = self.algorithm.policy
        return policy

    @property
    def published(self) -> nn.Module:
        """Rank 0's."""
        published: nn.Module = self.algorithm.published
        return published

    @property
    def steps(self) -> int:
        """Updates that were applied, ever; by all ranks."""
        return int(self.algorithm.steps)

    def evaluation_policy(self) -> nn.Module:
        """On rank 0's weights."""
        policy: nn.Module = self.algorithm.evaluation_policy()
        return policy

    def advance(self, frames: int) -> None:
        """All ranks hear of it with the next update."""
        self._frames = frames
        self.algorithm.advance(frames)

    def state_dict(self) -> dict[str, Tensor]:
        """Rank 0's, which is everybody's."""
        state: dict[str, Tensor] = self.algorithm.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """As that of the algorithm; the other ranks get it too."""
        self.algorithm.load_state_dict(state)
        if self._collective is not None:
            self._send_state()

    # ------------------------------------------------------------------ the end
    def _explained(self, problem: BaseException) -> BaseException:
        """Which rank it was, and what it said: the one that failed by itself, died, or hangs."""
        deadline = time.monotonic() + _DIAGNOSIS_S
        others = range(1, self.world_size)
        while True:
            told = self._told()
            causes = {rank: failure for rank, failure in told.items() if failure["kind"] != "Broken"}
            dead = {rank: how for rank, how in self._ranks.dead().items() if rank not in told}
            if causes or dead or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        steps = getattr(self.algorithm, "steps", 0)
        if causes:
            rank, failure = min(causes.items())
            text = (
                f"rank {rank} of {self.world_size} failed after step {steps}: {failure['text']}\n\n{failure['trace']}"
            )
            kind = getattr(errors, failure["kind"], WorkerFailed) if failure["kind"] else WorkerFailed
            return kind(text) if issubclass(kind, InvalidArgument) else WorkerFailed(text)
        if dead:
            words = "; ".join(f"rank {rank} of {self.world_size} {how}" for rank, how in sorted(dead.items()))
            return WorkerFailed(f"{words} after step {steps}; what was learned until then is whole")
        silent = [rank for rank in others if rank not in told]
        if not silent:
            return WorkerFailed(f"the ranks lost each other after step {steps}: {problem}")
        stacks = self._ranks.stacks(silent)
        where = "\n".join(f"\nrank {rank}:\n{text}" for rank, text in sorted(stacks.items()))
        return WorkerFailed(
            f"rank {', '.join(map(str, silent))} of {self.world_size} did not answer for {self._spec.timeout_s:g} s"
            f" after step {steps} ({problem}){where}"
        )

    def _watch(self) -> None:
        if self._told() or self._ranks.dead():
            raise Broken("a rank ended before it could begin")

    def _told(self) -> dict[int, dict[str, str]]:
        store, keys = self._store, {rank: f"failure/{rank}" for rank in range(1, self.world_size)}
        try:
            return {r: json.loads(store.get(key)) for r, key in keys.items() if store.check([key])} if store else {}
        except RuntimeError:  # the store has gone too
            return {}

    def _leave(self, *, kill: bool) -> None:
        collective, self._collective, self._store = self._collective, None, None
        self._closed = True
        self.algorithm.shard = Shard()
        if collective is not None:
            if not kill:
                try:
                    collective.wait([collective.send_order([END, 0, 0, 0], rank) for rank in range(1, self.world_size)])
                except Broken:
                    kill = True
            collective.close()
        self._ranks.close(kill=kill)

    def close(self) -> None:
        """Let the other ranks end, and wait until they have. ``algorithm`` stays usable, alone. Twice is fine."""
        self._closed = True
        if self._collective is not None:
            self._leave(kill=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve(
    make_algorithm: MakeAlgorithm, *, world_size: int, batch_size: int, backend: str = "gloo", **limits: Any
) -> None:
    """Under ``torchrun``, what every rank but 0 does: learn what rank 0 sends, until its group is closed.

    Arguments as those of `LearnerGroup`.

    Raises:
        InvalidArgument: ``world_size`` is not torchrun's, or not that of rank 0; or this is rank 0. What else ends this
            rank is raised as it is.
    """
    timeout, start_timeout = limits.pop("timeout", 7.0), limits.pop("start_timeout", 120.0)
    _check(world_size, batch_size, "torchrun", backend, timeout, start_timeout)
    environment = torchrun_environment()
    if environment.rank == 0:
        raise InvalidArgument("rank 0 makes the LearnerGroup; serve() is for the others")
    spec = RankSpec(
        rank=environment.rank,
        world_size=world_size,
        batch_size=batch_size,
        make_algorithm=make_algorithm,
        device=f"cuda:{environment.local_rank}" if backend == "nccl" else "cpu",
        nccl=backend == "nccl",
        threads=limits.pop("threads", 1),
        timeout_s=timeout,
        start_timeout_s=start_timeout,
    )
    run(*Torchrun().prepare(spec))


def _check(world_size: int, batch_size: int, launch: str, backend: str, timeout: float, start_timeout: float) -> None:
    for name, value in (("world_size", world_size), ("batch_size", batch_size)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidType(f"{name} is a whole number, got {value!r}")
        if value < 1:
            raise InvalidArgument(f"{name} must be at least 1, got {value}")
    if batch_size % world_size:
        lower = batch_size // world_size * world_size
        upper = lower + world_size
        raise InvalidArgument(
            f"batch_size={batch_size} cannot be split evenly over world_size={world_size}:"
            f" {lower or upper} or {upper} can"
        )
    if launch not in LAUNCHES:
        raise InvalidArgument(f"launch must be {' or '.join(LAUNCHES)}, got {launch!r}")
    if backend not in ("gloo", "nccl"):
        raise InvalidArgument(f"backend must be gloo or nccl, got {backend!r}")
    for name, seconds in (("timeout", timeout), ("start_timeout", start_timeout)):
        if not 0 < seconds < math.inf:
            raise InvalidArgument(f"{name} must be a number of seconds above 0, got {seconds!r}")
    if backend == "nccl" and launch == "process" and torch.cuda.device_count() < world_size:
        raise InvalidArgument(
            f"backend='nccl' needs a GPU for each of {world_size} ranks, and there are {torch.cuda.device_count()} here"
        )


def _launcher(launch: Launch, ray_options: Mapping[str, Any] | None) -> Ranks:
    if launch == "ray":
        return RayRanks(ray_options or {})
    if ray_options:
        raise InvalidArgument(f"ray_options are for launch='ray', not for {launch!r}")
    return ProcessRanks() if launch == "process" else Torchrun()
