"""Remote replay against what it is made of: the in-process call, a bare Gloo round trip, a bare Ray call.

Batches of Hopper transitions (112 bytes each) to and from a buffer that a Ray actor owns, by a client in another
process on the same host. Each way takes turns with the bare thing that it cannot beat, so the ratios are of one run.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from benchmarks.harness import Cell, compare, report, rows
from millpond import ReplayBuffer
from millpond.core.schema import Schema
from millpond.remote import RayReplayBuffer, ReplayClient

CAPACITY = 100_000
SIZES = (256, 4096)
LIMITS = {"shm": 2, "gloo": 3, "ray": 3}  # times the bare thing, for 4096 rows
SMALL = 64  # bytes of a bare answer
FOREVER = timedelta(days=1)


def transitions(n: int) -> TensorDict:
    """n transitions of Hopper-v5, random."""
    ended = torch.zeros(n, 1, dtype=torch.bool)
    following = {"observation": torch.randn(n, 11), "reward": torch.randn(n, 1)}
    following |= {"done": ended, "terminated": ended, "truncated": ended}
    return TensorDict({"observation": torch.randn(n, 11), "action": torch.rand(n, 3), "next": following}, [n])


# ---------------------------------------------------------------------- a bare Gloo round trip
def _peer(pipe: Connection, nbytes: tuple[int, ...]) -> None:
    """The other end of bare round trips: for each size one group that takes it, and one that gives it."""
    torch.set_num_threads(1)
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    threads = []
    for size in nbytes:
        for taking in (True, False):
            group = _group(store.port, f"{size} {taking}", 0)
            threads.append(threading.Thread(target=_echo, args=(group, size, taking), daemon=True))
            threads[-1].start()
    pipe.recv()  # the end


def _echo(group: Any, size: int, taking: bool) -> None:
    arriving, leaving = (size, SMALL) if taking else (SMALL, size)
    inbox, outbox = torch.zeros(arriving, dtype=torch.uint8), torch.zeros(leaving, dtype=torch.uint8)
    try:
        while True:
            group.recv([inbox], 1, 0).wait(FOREVER)
            group.send([outbox], 1, 0).wait(FOREVER)
    except RuntimeError:
        return  # the other end has gone


def _group(port: int, name: str, rank: int) -> Any:
    from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._threads = [ProcessGroupGloo.create_device(hostname="127.0.0.1")], 1
    options._timeout = timedelta(seconds=60)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    return ProcessGroupGloo(PrefixStore(name, store), rank, 2, options)


@contextmanager
def bare_gloo(nbytes: tuple[int, ...]) -> Iterator[Callable[[int, bool], Callable[[], object]]]:
    """``bare(size, taking)``: a call that sends ``size`` bytes and awaits a small answer, or the other way round."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_peer, args=(theirs, nbytes), daemon=True)
    process.start()
    port = pipe.recv()
    calls: dict[tuple[int, bool], Callable[[], object]] = {}
    for size in nbytes:
        for taking in (True, False):
            calls[size, taking] = _round_trip(_group(port, f"{size} {taking}", 1), size, taking)
    try:
        yield lambda size, taking: calls[size, taking]
    finally:
        pipe.send(None)
        process.join(10)


def _round_trip(group: Any, size: int, taking: bool) -> Callable[[], object]:
    leaving, arriving = (size, SMALL) if taking else (SMALL, size)
    outbox, inbox = torch.zeros(leaving, dtype=torch.uint8), torch.zeros(arriving, dtype=torch.uint8)

    def call() -> None:
        answer = group.recv([inbox], 0, 0)
        group.send([outbox], 0, 0).wait(FOREVER)
        answer.wait(FOREVER)

    return call


# ---------------------------------------------------------------------- a bare Ray call
class Bare:
    """An actor that takes and gives arrays, and does nothing with them."""

    def take(self, array: Any) -> int:
        return len(array)

    def give(self, shape: tuple[int, int]) -> Any:
        return np.ones(shape, np.uint8)


def bare_ray(row_nbytes: int) -> Callable[[int, bool], Callable[[], object]]:
    """As `bare_gloo`, by ``ray.put`` and one actor call; sizes are rows here."""
    import ray

    actor: Any = ray.remote(num_cpus=0)(Bare).remote()

    def made(n: int, taking: bool) -> Callable[[], object]:
        array = np.ones((n, row_nbytes), np.uint8)
        if taking:
            return lambda: ray.get(actor.take.remote(ray.put(array)))
        return lambda: ray.get(actor.give.remote((n, row_nbytes)))

    return made


# ---------------------------------------------------------------------- the table
def main() -> None:
    """Compare, and write the table. Raises ``SystemExit`` where a way is slower than it may be."""
    torch.set_num_threads(1)
    schema = Schema.from_example(transitions(1))
    here = ReplayBuffer(CAPACITY, batch_size=256, schema=schema)
    remote = RayReplayBuffer(CAPACITY, batch_size=256, schema=schema)
    ways: dict[str, ReplayBuffer | ReplayClient] = {
        "in process": here,
        "shm": remote.client(transport="shm"),
        "gloo": remote.client(transport="gloo"),
        "ray": remote.client(transport="ray"),
    }
    for _ in range(0, CAPACITY, 50_000):
        batch = transitions(50_000)
        here.extend(batch)
        remote.extend(batch)
    gc.collect()
    gc.freeze()  # Ray's and torch's own objects need not be looked through after each round
    found: list[dict[str, Cell]] = []
    nbytes = tuple(n * schema.row_nbytes for n in SIZES)
    by_ray = bare_ray(schema.row_nbytes)
    with bare_gloo(nbytes) as by_gloo:
        for n in SIZES:
            batch = transitions(n)
            for op in ("extend", "sample"):
                calls = {name: _call(buffer, op, batch, n) for name, buffer in ways.items()}
                taking = op == "extend"
                bare: dict[str, Callable[[], object]] = {
                    "shm": calls["in process"],
                    "gloo": by_gloo(n * schema.row_nbytes, taking),
                    "ray": by_ray(n, taking),
                }
                for name, call in bare.items():
                    label = "the call in process" if name == "shm" else f"bare {name}"
                    timings = compare({label: call, name: calls[name]}, rounds=int(os.environ.get("ROUNDS", "60")))
                    found += rows(timings, op=op, rows=n)
    for client in list(ways.values())[1:]:
        client.close()
    remote.close()
    report(
        "remote_transports",
        "A remote replay buffer, by each way, against the bare thing that carries it",
        found,
        notes=f"Batches of Hopper transitions, 112 bytes each, to and from a buffer of {CAPACITY:,} items in a Ray "
        "actor on the same host. Each pair took turns in one run; the ratio is to the line above. One thread.",
    )
    slow = [
        f"{row['op']} by {name}: {row['ratio']} times the bare thing, at most {limit} are allowed"
        for row in found
        for name, limit in LIMITS.items()
        if row["variant"] == name and row["rows"] == SIZES[-1] and float(row["ratio"]) > limit
    ]
    if slow:
        raise SystemExit("\n".join(slow))


def _call(buffer: ReplayBuffer | ReplayClient, op: str, batch: TensorDict, n: int) -> Callable[[], object]:
    return (lambda: buffer.extend(batch)) if op == "extend" else (lambda: buffer.sample(n))
