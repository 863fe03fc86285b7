"""What a process does to the shared buffer of a stress run, until it is killed or the buffer is closed; and the ledger
that tells afterwards what it did."""

from __future__ import annotations

import collections
import mmap
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import fast_paths
import numpy as np
import slow_kernels
import torch

from millpond.core.errors import BufferClosed
from millpond.flow.limiter import Flow
from millpond.replay import (
    ConsumingSampler,
    MappedStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    rows,
    slots,
    waiting,
)
from millpond.replay import engine as engine_module
from millpond.shm import futex

CAPACITY, WORDS, LOG, PLACES = 512, 14, 1 << 20, 6
WRITTEN, WRITING, GOT, GETTING, STALE, CHANGING, SAVED, CALLS, WORST_US, TORN, LOGGED, PROBLEMS, SHORT, STAMP = range(
    14
)
Words = np.ndarray[Any, np.dtype[np.int64]]


def buffer_for(mode: str, path: Path | None = None, *, shared: bool = True) -> ReplayBuffer:
    """In shared memory, on disk at ``path``, or private."""
    block = Flow(admission="block")
    made: dict[str, Any] = {
        "overwrite": {},
        "prioritized": {"sampler": PrioritizedSampler()},
        "fifo": {"sampler": ConsumingSampler(1), "flow": block},
        "fifo2": {"sampler": ConsumingSampler(2), "flow": block},
        "pool": {"sampler": RandomSampler(), "consume_after_n_samples": 1, "flow": block},
        "pool2": {"sampler": PrioritizedSampler(), "consume_after_n_samples": 2, "flow": block},
        "epoch": {"sampler": SamplerWithoutReplacement(), "consume_after_n_samples": 1, "flow": block},
    }[mode]
    return ReplayBuffer(CAPACITY if path is None else MappedStorage(CAPACITY, path), shared=shared, **made)


def deliveries(mode: str) -> int:
    return {"overwrite": 0, "prioritized": 0, "fifo2": 2, "pool2": 2}.get(mode, 1)


# ---------------------------------------------------------------------- rows that tell whether they are whole
def rows_for(writer: int, batch: int, n: int, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """Fields of rows that nobody else writes: who, which batch, which of it, ten random words, and their checksum."""
    a = np.empty((n, WORDS), np.int64)
    a[:, 0], a[:, 1], a[:, 2] = writer, batch, np.arange(n)
    return patch_for(a, 0, rng)


def patch_for(a: Words, stamp: int, rng: np.random.Generator | None) -> dict[str, torch.Tensor]:
    """Other fields for the same rows: a stamp in ``note``, and with ``rng`` other words in ``data``, which ``note``
    knows the checksum of."""
    patch = {}
    if rng is not None:
        a = a.copy()
        a[:, 3:13] = rng.integers(-(2**62), 2**62, (len(a), 10))
        a[:, 13] = checksum(a)
        patch["data"] = torch.from_numpy(a)
    note = np.stack([np.full(len(a), stamp), a[:, 13], 3 * stamp + 5 * a[:, 13] + 7 * names(a)], 1)
    return {"note": torch.from_numpy(note), **patch}


def checksum(a: Words) -> Words:
    total: Words = (a[:, :13] * np.arange(1, 14)).sum(1)  # wraps
    return total


def names(a: Words) -> Words:
    """One number for each row, its own for ever."""
    return (a[:, 0] << 40) | (a[:, 1] << 12) | a[:, 2]


def torn(batch: Any) -> int:
    """How many rows are not whole."""
    a, note = batch["data"].numpy(), batch["note"].numpy()
    whole = (checksum(a) == a[:, 13]) & (note[:, 1] == a[:, 13])
    return int((~whole | (note[:, 2] != 3 * note[:, 0] + 5 * a[:, 13] + 7 * names(a))).sum())


class Ledger:
    """What one worker did, in a file that outlives it."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        if create:
            with open(path, "wb") as file:
                file.truncate(128 + 8 * LOG)
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.head = np.frombuffer(self._map, np.int64, 16)
        self.log = np.frombuffer(self._map, np.int64, LOG, 128)


def give_fast_path(rb: ReplayBuffer, kernels: Any, head: Any) -> None:
    """From the first call on, also where the rows are not bound yet. ``head`` counts what it did."""
    made = fast_paths.at_once(kernels)

    def counted(engine: Any) -> Any:
        short = made(engine)
        if isinstance(short, fast_paths.Counted):
            short.done = Told(head)
        return short

    engine_module.fast_path_for = counted
    if rb._local.engine.rows is not None:
        rb._local.engine.fast_path = counted(rb._local.engine)


class Told(collections.Counter[str]):
    """Counts in a ledger, too."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self._head = head

    def __setitem__(self, key: str, value: int) -> None:
        super().__setitem__(key, value)
        self._head[SHORT] += 1


class Job(NamedTuple):
    """Who does what. Of an item only the worker at its own ``place`` changes the fields, so that it knows them."""

    kind: str
    ident: int
    place: int
    n: int
    victim: bool
    suicide: tuple[str, int] | None
    short: bool
    folder: Path
    on_disk: bool = False

    @property
    def ledger(self) -> Path:
        return self.folder / f"ledger{self.ident}"

    @property
    def saved(self) -> Path:
        return self.folder / f"saved{self.place}"


class Worker:
    """One process at work: ``w`` writes, ``r`` samples, ``u`` samples and updates, ``c`` saves checkpoints, ``a``
    attaches, does something, and leaves."""

    def __init__(self, rb: ReplayBuffer, job: Job) -> None:
        self.rb, self.job = rb, job
        self.rng, self.rnd = np.random.default_rng(job.ident + 1000), random.Random(job.ident + 1000)
        self.ledger = Ledger(job.ledger)
        self.head = self.ledger.head
        self.seen: collections.Counter[str] = collections.Counter()
        self.stamps: dict[int, int] = {}
        self.batch = self.changes = 0
        kinds = {"w": self.write, "r": self.sample, "u": self.update, "c": self.save, "a": self.attach}
        self.act: Callable[[ReplayBuffer], Any] = kinds[job.kind]
        self.stops = not job.short or job.suicide is not None
        if not self.stops:
            give_fast_path(rb, slow_kernels if job.victim else fast_paths.compiled(), self.head)

    def hook(self, step: str) -> None:
        self.seen[step] += 1
        if self.job.suicide and self.job.suicide[0] == step and self.seen[step] >= self.job.suicide[1]:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.rnd.random() < (0.10 if self.job.victim else 0.01):
            time.sleep(self.rnd.random() * 0.004)

    def stop_at_steps(self, rb: ReplayBuffer) -> None:
        engine = rb._local.engine
        if self.stops and engine.rows is not None and engine.rows.hook is None:
            engine.control.hook = engine.rows.hook = self.hook

    def go(self) -> None:
        while True:
            self.stop_at_steps(self.rb)
            phase = int(time.monotonic() / 0.15) % 2  # writers ahead, then samplers ahead
            if (phase == 0) == (self.job.kind == "w"):
                time.sleep(0.002)
            self.act(self.rb)
            self.head[CALLS] += 1

    def timed(self, call: Callable[[], Any]) -> Any:
        began = time.monotonic()
        answer = call()
        self.head[WORST_US] = max(int(self.head[WORST_US]), int((time.monotonic() - began) * 1e6))
        return answer

    # ------------------------------------------------------------------ what they do
    def write(self, rb: ReplayBuffer) -> None:
        head, n = self.head, self.job.n
        data = rows_for(self.job.ident, self.batch, n, self.rng)
        head[WRITING] = n
        self.timed(lambda: rb.extend(data))
        self.batch += 1
        head[WRITTEN] += n
        head[WRITING] = 0

    def sample(self, rb: ReplayBuffer) -> Any:
        head, n = self.head, self.job.n
        head[STAMP], head[GETTING] = 0, n
        batch = self.timed(lambda: rb.sample(n, wait=True))
        head[TORN] += torn(batch)
        n = len(batch)  # the last one of an epoch may be smaller
        if rb._local.engine.deliveries:
            k = int(head[LOGGED])
            self.ledger.log[k : k + n] = names(batch["data"].numpy())
            head[LOGGED] = k + n
        head[GOT] += n
        head[GETTING] = 0
        if rb._local.engine.priorities is not None and not (self.job.kind == "r" and rb._local.engine.deliveries):
            self.change(n, lambda: rb.update_priority(batch, torch.rand(n)))
        return batch

    def change(self, n: int, call: Callable[[], int]) -> None:
        self.head[CHANGING] = n
        self.head[STALE] += n - self.timed(call)
        self.head[CHANGING] = 0

    def update(self, rb: ReplayBuffer) -> None:
        batch = self.sample(rb)
        mine = batch[batch["data"][:, 2] % PLACES == self.job.place]
        a, stamps = mine["data"].numpy(), mine["note"][:, 0].tolist()
        for name, stamp in zip(names(a).tolist(), stamps, strict=True):
            if self.stamps.get(name, stamp) != stamp:
                raise RuntimeError(f"an update was lost: {stamp:#x} instead of {self.stamps[name]:#x}")
        self.changes += 1
        stamp = (self.job.ident << 32) | self.changes
        patch = patch_for(a, stamp, self.rng if self.changes % 2 else None)
        if len(a):
            self.ledger.log[-len(a) :], self.head[STAMP] = names(a), stamp
            self.change(len(a), lambda: rb.update(mine, patch))
        self.stamps.update(dict.fromkeys(names(a).tolist(), stamp))

    def save(self, rb: ReplayBuffer) -> None:
        written = rb.write_count
        self.timed(lambda: rb.dumps(self.job.saved))
        self.head[SAVED] = written

    def attach(self, rb: ReplayBuffer) -> None:
        path = rb._local.engine.memory.path
        other = ReplayBuffer.attach(path if self.job.on_disk and path is not None else rb.handle())
        try:
            assert other.schema is not None or other.write_count == 0
            self.stop_at_steps(other)
            act: Any = self.rnd.choice([self.write, self.sample, self.update, ReplayBuffer.stats, lambda rb: None])
            act(other)
        finally:
            other.close()


def worker(rb: ReplayBuffer, job: Job) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    rows.CHUNK = slots.CHUNK = 8  # so that chunks have middles
    futex.WAIT_SLICE = 30.0  # a lost wake-up must show, not heal
    waiting.OWNER_SLICE = 30.0
    working = Worker(rb, job)
    try:
        working.go()
    except BufferClosed:
        pass
    except BaseException:
        working.head[PROBLEMS] += 1
        raise
