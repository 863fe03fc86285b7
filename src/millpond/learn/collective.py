"""What the ranks of a group say to each other: orders and rows from rank 0, sums of gradients, results to rank 0.

The process group belongs to the learner group alone; it neither is nor becomes the default one of
``torch.distributed``. Gloo does not authenticate who connects, so it is for networks whose members are trusted.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import (  # type: ignore[attr-defined]  # its stubs leave out what C++ brings
    AllreduceOptions,
    FileStore,
    PrefixStore,
    ProcessGroupGloo,
    ReduceOp,
    Store,
    TCPStore,
)

from millpond.core.errors import DeadlineExceeded

__all__ = [
    "Broken",
    "Collective",
    "FileStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    "await_keys",
    "from_bytes",
    "to_bytes",
]

_LOOK_S = 0.05
_FOR_EVER = timedelta(days=365)  # a rank may wait as long as rank 0 finds nothing to learn from
_ORDER, _ROWS, _RESULT = 1, 2, 3  # tags: what one rank sends another


class Broken(RuntimeError):
    """A rank did not answer, or hung up. The group is of no use any more."""


class Collective:
    """``world_size`` processes in lock step. Every call is made by all ranks, or by the two that it names.

    Args:
        store: where the ranks find each other.
        host: the address of this process that the others reach; None: this machine only.
        timeout_s: how long a rank waits for another one inside of a step; ``start_timeout_s``: before the first one.

    Raises:
        DeadlineExceeded: not all ranks came within ``start_timeout_s`` seconds; the message names who did not.
        Broken: from every call, once any has failed.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        host: str | None,
        timeout_s: float,
        start_timeout_s: float,
        nccl: torch.device | None = None,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._timeout = timedelta(seconds=start_timeout_s)  # also of the first step, in which much is loaded
        self._timeout_s = timeout_s
        store.set(f"here/{rank}", "1")
        await_keys(store, [f"here/{r}" for r in range(world_size)], start_timeout_s, watch)
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=host or "127.0.0.1")]
        options._threads, options._timeout = 2, timedelta(seconds=start_timeout_s)
        self._group: Any = ProcessGroupGloo(store, rank, world_size, options)
        self._nccl: Any = None
        if nccl is not None:
            from torch.distributed import ProcessGroupNCCL

            gpu_options: Any = ProcessGroupNCCL.Options()
            gpu_options._timeout = timedelta(seconds=start_timeout_s)
            self._nccl = ProcessGroupNCCL(store, rank, world_size, gpu_options)
        self.reduce_s = 0.0
        """Seconds that `mean` took so far: computing until the slowest rank has come, and the sum."""

    def settle(self) -> None:
        """The first step is made: from now on a rank that takes longer than ``timeout_s`` hangs."""
        self._timeout = timedelta(seconds=self._timeout_s)

    # ------------------------------------------------------------------ all ranks
    def mean(self, gradients: torch.Tensor) -> None:
        """Replace ``gradients`` by their mean over the ranks, in place. The same bits on each of them."""
        began = time.perf_counter()
        on_cpu = gradients.device.type == "cpu"
        shared = gradients if on_cpu or self._nccl is not None else gradients.cpu()
        options: Any = AllreduceOptions()
        options.reduceOp, options.timeout = ReduceOp.SUM, self._timeout
        with _breaking("the sum of gradients"):
            group = self._group if on_cpu or self._nccl is None else self._nccl
            group.allreduce([shared], options).wait()
        shared /= self.world_size
        if shared is not gradients:
            gradients.copy_(shared)
        self.reduce_s += time.perf_counter() - began

    # ------------------------------------------------------------------ from rank to rank
    def send(self, payload: torch.Tensor, to: int, tag: int) -> Any:
        """Begin to send a contiguous CPU tensor. What is returned has ``wait``; see `wait`."""
        with _breaking(f"sending to rank {to}"):
            return self._group.send([payload], to, tag)

    def wait(self, local: list[Any]) -> None:
        """Until what was sent may be overwritten."""
        with _breaking("sending"):
            for work in local:
                work.wait(self._timeout)

    def receive(self, payload: torch.Tensor, source: int, tag: int, *, patient: bool = False) -> torch.Tensor:
        """Fill a contiguous CPU tensor. ``patient``: rank 0 may have nothing to say for hours."""
        with _breaking(f"what rank {source} sends"):
            self._group.recv([payload], source, tag).wait(_FOR_EVER if patient else self._timeout)
        return payload

    def send_order(self, order: list[int], to: int) -> Any:
        """Rank 0 says what comes next: four numbers."""
        return self.send(torch.tensor(order, dtype=torch.int64), to, _ORDER)

    def receive_order(self) -> list[int]:
        """What rank 0 wants next."""
        numbers: list[int] = self.receive(torch.zeros(4, dtype=torch.int64), 0, _ORDER, patient=True).tolist()
        return numbers

    def send_rows(self, rows: torch.Tensor, to: int) -> Any:
        """Bytes for rank ``to``; it knows how many."""
        return self.send(rows, to, _ROWS)

    def receive_rows(self, shape: tuple[int, ...]) -> torch.Tensor:
        """What `send_rows` sent: uint8 of ``shape``."""
        return self.receive(torch.empty(shape, dtype=torch.uint8), 0, _ROWS)

    def send_result(self, numbers: torch.Tensor) -> None:
        """What came of a step, for rank 0: float64 ``[n]``."""
        self.wait([self.send(numbers, 0, _RESULT)])

    def receive_result(self, size: int, source: int) -> torch.Tensor:
        """What `send_result` of rank ``source`` sent."""
        return self.receive(torch.empty(size, dtype=torch.float64), source, _RESULT)

    def close(self) -> None:
        """Hang up; whoever waits for this rank hears of it."""
        self._group = self._nccl = None


def to_bytes(state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Tensors by name as uint8 ``[n]``."""
    file = io.BytesIO()
    torch.save(dict(state), file)
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


def from_bytes(data: torch.Tensor) -> dict[str, torch.Tensor]:
    """What `to_bytes` packed."""
    state: dict[str, torch.Tensor] = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
    return state


class _breaking:  # reads as a statement
    """A failing call of the process group is `Broken`, and says what it was about."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, problem: BaseException | None, trace: Any) -> None:
        if isinstance(problem, RuntimeError | AttributeError):  # AttributeError: closed in the meantime
            raise Broken(f"{self._what} failed: {str(problem).splitlines()[0] if str(problem) else kind}") from problem


def await_keys(store: Store, keys: list[str], timeout_s: float, watch: Callable[[], None]) -> None:
    """Until each rank has set its key. ``watch`` is called meanwhile, and may raise.

    Raises ``DeadlineExceeded`` with the ranks that did not come.
    """
    deadline = time.monotonic() + timeout_s
    while missing := [key.rpartition("/")[2] for key in keys if not store.check([key])]:
        watch()
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"rank {', '.join(missing)} did not come within {timeout_s:g} s")
        time.sleep(_LOOK_S)
