"""What runs in a rank other than 0: take what rank 0 sends, learn from it, say what came of it."""

from __future__ import annotations

import faulthandler
import json
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from millpond.algos.flat import Shard
from millpond.core.errors import InvalidArgument, MillpondError
from millpond.core.schema import Schema
from millpond.learn.collective import Broken, Collective, FileStore, Store, TCPStore, await_keys, from_bytes
from millpond.shm.family import belong_to

STATE, SCHEMA, STEP, END = 1, 2, 3, 4  # what an order asks for
TIMES = 3  # seconds of waiting, computing and reducing, before the metrics of a step
MakeAlgorithm = Callable[[str], Any]  # from a device to an algorithm


@dataclass(frozen=True, slots=True)
class RankSpec:
    """All that a rank must know to join its group. ``file`` or ``address`` says where the ranks find each other."""

    rank: int
    world_size: int
    batch_size: int
    make_algorithm: MakeAlgorithm
    device: str
    nccl: bool
    threads: int | None
    timeout_s: float
    start_timeout_s: float
    host: str | None = None
    file: str | None = None
    address: tuple[str, int] | None = None
    owner: tuple[int, int] | None = None
    stacks: str | None = None

    def store(self) -> Store:
        """Where the ranks of this group find each other."""
        if self.file is not None:
            return FileStore(self.file, -1)
        assert self.address is not None
        return TCPStore(*self.address, wait_for_workers=False, timeout=timedelta(seconds=self.start_timeout_s))

    def meet(self, store: Store, watch: Callable[[], None] = lambda: None) -> Collective:
        """Join the others. ``watch`` is called while they are waited for, and may raise.

        Raises:
            InvalidArgument: another rank has other sizes.
            DeadlineExceeded: somebody did not come.
        """
        mine = {"world_size": self.world_size, "batch_size": self.batch_size}
        store.set(f"sizes/{self.rank}", json.dumps(mine))
        others = range(1, self.world_size) if self.rank == 0 else (0,)
        await_keys(store, [f"sizes/{other}" for other in others], self.start_timeout_s, watch)
        for other in others:
            theirs = json.loads(store.get(f"sizes/{other}"))
            if theirs != mine:
                raise InvalidArgument(
                    f"rank {self.rank} has {mine}, but rank {other} has {theirs}: all must say the same"
                )
        return Collective(
            store,
            rank=self.rank,
            world_size=self.world_size,
            host=self.host,
            timeout_s=self.timeout_s,
            start_timeout_s=self.start_timeout_s,
            nccl=torch.device(self.device) if self.nccl else None,
            watch=watch,
        )


class RankLoop:
    """Carries out rank 0's orders until it says that this was all."""

    def __init__(self, spec: RankSpec, algorithm: Any, collective: Collective) -> None:
        self._spec, self._algorithm, self._collective = spec, algorithm, collective
        self._schema: Schema | None = None

    def run(self) -> None:
        """Returns at the end. Whatever it raises is the end of the group."""
        collective = self._collective
        self._algorithm.shard = Shard(self._spec.rank, self._spec.world_size, collective.mean)
        while True:
            began = time.perf_counter()
            kind, rows, frames, _ = collective.receive_order()
            if kind == END:
                return
            if kind == STATE:
                self._algorithm.load_state_dict(from_bytes(collective.receive_rows((rows,))))
                continue
            if kind == SCHEMA:
                self._schema = Schema.from_json(bytes(collective.receive_rows((rows,)).numpy()).decode())
                continue
            assert self._schema is not None
            packed = collective.receive_rows((rows, self._schema.row_nbytes))
            waited = time.perf_counter() - began
            self._algorithm.advance(frames)
            metrics = timed_update(self._algorithm, self._schema.unpack(packed).to(self._spec.device), collective)
            collective.send_result(as_numbers(metrics, waited))
            collective.settle()


def timed_update(algorithm: Any, batch: Any, collective: Collective) -> dict[str, Tensor]:
    """``algorithm.update``, with the seconds of computing and of reducing among the metrics."""
    began, reduced = time.perf_counter(), collective.reduce_s
    metrics: dict[str, Tensor] = algorithm.update(batch)
    reduced = collective.reduce_s - reduced
    metrics["compute_s"] = torch.tensor(time.perf_counter() - began - reduced)
    metrics["reduce_s"] = torch.tensor(reduced)
    return metrics


def as_numbers(metrics: dict[str, Tensor], waited: float) -> Tensor:
    """The times, the scalars by name, and the TD errors, as one float64 vector. Rank 0 has the same names."""
    times = torch.tensor([waited, float(metrics.pop("compute_s")), float(metrics.pop("reduce_s"))], dtype=torch.float64)
    errors = metrics.pop("td_error", torch.empty(0)).reshape(-1).double().cpu()
    scalars = [metrics[name].double().reshape(1).cpu() for name in sorted(metrics)]
    return torch.cat([times, *scalars, errors])


def run(spec: RankSpec, store: Store) -> None:
    """A whole rank, from its algorithm to its last step. What goes wrong is told to rank 0, and raised."""
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    if spec.device.startswith("cuda"):
        torch.cuda.set_device(spec.device)
    collective = None
    try:
        algorithm = spec.make_algorithm(spec.device)
        collective = spec.meet(store)
        RankLoop(spec, algorithm, collective).run()
    except BaseException as problem:
        tell_failure(store, spec.rank, problem)
        raise
    finally:
        if collective is not None:
            collective.close()


def tell_failure(store: Store, rank: int, problem: BaseException) -> None:
    """Leave word for rank 0 of what ended this rank."""
    kind = "Broken" if isinstance(problem, Broken) else type(problem).__name__
    known = kind if isinstance(problem, MillpondError | Broken) else ""
    told = {"kind": known, "text": f"{kind}: {problem}", "trace": "".join(traceback.format_exception(problem))}
    try:
        store.set(f"failure/{rank}", json.dumps(told))
    except RuntimeError:  # rank 0, and with it the store, has gone
        return


def main() -> None:
    """The entry of a process that `ProcessRanks` starts: its spec comes through standard input."""
    path, spec_bytes = pickle.load(sys.stdin.buffer)  # from the process that started this one
    sys.path[:] = path
    import cloudpickle

    spec: RankSpec = cloudpickle.loads(spec_bytes)
    _belong_to(spec)
    try:
        run(spec, spec.store())
    except BaseException:  # noqa: BLE001  # rank 0 tells it, with the traceback
        sys.exit(1)


def _belong_to(spec: RankSpec) -> None:
    """End with the owner; leave Ctrl-C to it; on SIGUSR1 write where every thread is."""
    assert spec.owner is not None and spec.stacks is not None
    belong_to(spec.owner)
    faulthandler.register(signal.SIGUSR1, file=open(spec.stacks, "w"), all_threads=True)  # noqa: SIM115  # kept open
