"""SIGKILLs writers and samplers of one shared buffer, at random instants and at named steps, and checks what is left.

``python tests/replay/stress.py METHOD MODE KILLS [SEED [short]]`` prints one JSON line, and exits with 1 on any
violation. Modes: overwrite, prioritized, fifo, fifo2, pool, pool2 (items leave in random order, after 1 or 2
deliveries), epoch.

With ``short`` the workers have the compiled shortcut from the first call. Of the victims those that die at a named step
go the ordinary way, as that is where the steps are; the others have the same shortcut in plain Python, which takes long
enough under the lock to be killed there.
"""

from __future__ import annotations

import collections
import contextlib
import json
import mmap
import multiprocessing as mp
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import shortcuts
import slow_kernels
import torch

from millpond.core.errors import BufferClosed, NotReady
from millpond.flow.limiter import Flow
from millpond.replay import (
    ConsumingSampler,
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

CAPACITY, WORDS, LOG = 512, 14, 1 << 20
COMMON = ["record written", "committed", "recover"]
WRITER = [*COMMON, "intent", "half copied", "half copied"]
FINISHED, PENDING, CALLS, WORST_US, TORN, LOGGED, PROBLEMS, SHORT = range(8)


def buffer_for(mode: str) -> ReplayBuffer:
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
    return ReplayBuffer(CAPACITY, shared=True, **made)


def deliveries(mode: str) -> int:
    return {"overwrite": 0, "prioritized": 0, "fifo2": 2, "pool2": 2}.get(mode, 1)


def rows_for(writer: int, batch: int, n: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    a = np.empty((n, WORDS), np.int64)
    a[:, 0], a[:, 1], a[:, 2] = writer, batch, np.arange(n)
    a[:, 3:13] = rng.integers(-(2**62), 2**62, (n, 10))
    a[:, 13] = (a[:, :13] * np.arange(1, 14)).sum(1)  # wraps
    return a


def torn(a: np.ndarray[Any, Any]) -> int:
    return int(((a[:, :13] * np.arange(1, 14)).sum(1) != a[:, 13]).sum())


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


def give_shortcut(rb: ReplayBuffer, kernels: Any, head: Any) -> None:
    """From the first call on, also where the rows are not bound yet. ``head`` counts what it did."""
    made = shortcuts.at_once(kernels)

    def counted(engine: Any) -> Any:
        short = made(engine)
        if isinstance(short, shortcuts.Counted):
            short.done = Told(head)
        return short

    engine_module.shortcut_for = counted
    if rb._works.engine.rows is not None:
        rb._works.engine.shortcut = counted(rb._works.engine)


class Told(collections.Counter[str]):
    """Counts in a ledger, too."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self._head = head

    def __setitem__(self, key: str, value: int) -> None:
        super().__setitem__(key, value)
        self._head[SHORT] += 1


def worker(
    rb: ReplayBuffer,
    path: Path,
    kind: str,
    ident: int,
    n: int,
    victim: bool,
    suicide: Any,
    seed: int,
    short: bool,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    rows.CHUNK = slots.CHUNK = 8  # so that chunks have middles
    futex.WAIT_SLICE = 30.0  # a lost wake-up must show, not heal
    waiting.OWNER_SLICE = 30.0
    rng, rnd = np.random.default_rng(seed), random.Random(seed)
    ledger = Ledger(path)
    head = ledger.head
    seen: collections.Counter[str] = collections.Counter()

    def hook(step: str) -> None:
        seen[step] += 1
        if suicide and suicide[0] == step and seen[step] >= suicide[1]:
            os.kill(os.getpid(), signal.SIGKILL)
        if rnd.random() < (0.10 if victim else 0.01):
            time.sleep(rnd.random() * 0.004)

    stops = not short or suicide is not None
    if not stops:
        give_shortcut(rb, slow_kernels if victim else shortcuts.compiled(), head)
    batch = 0
    try:
        while True:
            if stops and rb._works.engine.rows is not None and rb._works.engine.rows.hook is None:
                rb._works.engine.control.hook = rb._works.engine.rows.hook = hook
            phase = int(time.monotonic() / 0.15) % 2  # writers ahead, then samplers ahead
            if (phase == 0) == (kind == "w"):
                time.sleep(0.002)
            head[PENDING] = n
            if kind == "w":
                data = {"data": torch.from_numpy(rows_for(ident, batch, n, rng))}
                began = time.monotonic()
                rb.extend(data)
                spent = time.monotonic() - began
                batch += 1
            else:
                began = time.monotonic()
                sample = rb.sample(n, wait=True)
                spent = time.monotonic() - began
                a = sample["data"].numpy()
                head[TORN] += torn(a)
                if rb._works.engine.deliveries:
                    k = int(head[LOGGED])
                    ledger.log[k : k + len(a)] = (a[:, 0] << 40) | (a[:, 1] << 12) | a[:, 2]
                    head[LOGGED] = k + len(a)
            head[FINISHED] += n if kind == "w" else len(a)
            head[PENDING] = 0
            head[CALLS] += 1
            if kind == "r" and not rb._works.engine.deliveries and rb._works.engine.priorities is not None:
                rb.update_priority(sample, torch.rand(len(a)))
            head[WORST_US] = max(int(head[WORST_US]), int(spent * 1e6))
    except BufferClosed:
        pass
    except BaseException:
        head[PROBLEMS] += 1
        raise


class Run:
    """One stress run: four survivors, and two victims at a time."""

    def __init__(self, method: str, mode: str, seed: int, folder: Path, *, short: bool = False) -> None:
        self.short = short
        self.mode, self.method, self.folder, self.rnd = mode, method, folder, random.Random(seed)
        self.context: Any = mp.get_context(method)
        self.rb = buffer_for(mode)
        self.everyone: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.where: collections.Counter[str] = collections.Counter()
        self.max_gap = 0.0
        self._last = (-1, time.monotonic())
        self._looked = time.monotonic()
        self.survivors = [self.start(kind, victim=False) for kind in "wwrr"]
        self.victims = [self.victim("w"), self.victim("r")]

    def start(self, kind: str, *, victim: bool, suicide: Any = None) -> dict[str, Any]:
        ident = len(self.everyone)
        n = self.rnd.choice([1, 7, 64, 64, 300] if victim else [7, 32])
        path = self.folder / f"{kind}{ident}"
        ledger = Ledger(path, create=True)
        arguments = (self.rb, path, kind, ident, n, victim, suicide, ident + 1000, self.short)
        process = self.context.Process(target=worker, args=arguments, daemon=True)
        process.start()
        made = {"kind": kind, "process": process, "n": n, "suicide": suicide, "ledger": ledger, "killed": False}
        self.everyone.append(made)
        return made

    def victim(self, kind: str) -> dict[str, Any]:
        steps = WRITER if kind == "w" else COMMON
        suicide = (self.rnd.choice(steps), self.rnd.randint(1, 6)) if self.rnd.random() < 0.6 else None
        return self.start(kind, victim=True, suicide=suicide)

    def progress(self) -> None:
        """Note the longest time in which nobody committed anything."""
        last, at = self._last
        now = time.monotonic()
        unseen, self._looked = now - self._looked > 0.2, now  # busy starting a process, or starved: not their doing
        if not all(int(one["ledger"].head[CALLS]) for one in self.survivors):
            self._last = (last, now)  # still starting
            return
        commit = int(self.rb._works.engine.control._commit_word[0])
        if commit != last or unseen:
            self.max_gap = max(self.max_gap, now - at) if last >= 0 and not unseen else self.max_gap
            self._last = (commit, now)
        elif now - at > 10:
            raise SystemExit(
                f"HANG: holder {self.rb._works.engine.control.mutex.holder}, {self.rb._works.engine.control.waiting()}"
            )

    def kill_one(self) -> None:
        i = self.rnd.randrange(2)
        victim = self.victims[i]
        process, head, suicide = victim["process"], victim["ledger"].head, victim["suicide"]
        policy = self.rnd.choice(["random", "holder", "waiter"])
        ready = time.monotonic() + (20 if self.method == "spawn" else 10)
        while head[CALLS] < 2 and process.is_alive() and time.monotonic() < ready:
            time.sleep(0.002)
            self.progress()
        until = time.monotonic() + self.rnd.random() * (0.5 if suicide else 0.15)
        control = self.rb._works.engine.control
        while time.monotonic() < until and process.is_alive():
            self.progress()
            if not suicide and policy == "holder" and control.mutex.holder == process.pid:
                break
            if not suicide and policy == "waiter" and any(w.pid == process.pid for w in control.waiting()):
                break
            if suicide or policy == "random":
                time.sleep(0.001)
        how = "random"
        if process.is_alive():
            if control.mutex.holder == process.pid:
                how = "holder"
            elif any(w.pid == process.pid for w in control.waiting()):
                how = "waiter"
            os.kill(process.pid, signal.SIGKILL)
        elif suicide:
            how = f"step {suicide[0]}"
        process.join()
        victim["killed"] = True
        if process.exitcode != -signal.SIGKILL:
            self.problems.append(f"a victim ended with {process.exitcode}")
        self.where[how] += 1
        with contextlib.suppress(NotReady):  # look before survivors write over it; they may have taken it all
            if torn(self.rb.peek(2000)["data"].numpy()):
                self.problems.append(f"torn after a kill ({how})")
        self.victims[i] = self.victim(victim["kind"])

    def finish(self) -> dict[str, Any]:
        time.sleep(0.3)
        self.progress()
        rb, everyone = self.rb, self.everyone
        alive = {one["process"].pid for one in everyone if not one["killed"]}
        rb.stats()  # clears the lines of the dead
        if any(w.pid not in alive for w in rb._works.engine.control.waiting()):
            self.problems.append("a dead waiter is listed")
        stats, rest = self._drain()
        for one in everyone:
            if not one["killed"]:
                one["process"].join(10)
                if one["suicide"] and one["process"].exitcode == -signal.SIGKILL:
                    one["killed"] = True
                elif one["process"].exitcode != 0:
                    self.problems.append(f"{one['kind']} ended with {one['process'].exitcode}")
        stats["write_count"] = self.rb._works.engine.control.peek()[4]
        self._check(stats, rest)
        idle = [one["kind"] for one in self.survivors if not one["ledger"].head[SHORT]]
        if self.short and [kind for kind in idle if (kind, self.mode) != ("w", "prioritized")]:
            self.problems.append(f"survivors never took the shortcut: {idle}")
        worst = max(int(one["ledger"].head[WORST_US]) for one in self.survivors) / 1e6
        if worst > 1.0:
            self.problems.append(f"a survivor's operation took {worst:.2f} s")
        if self.max_gap > 1.0:
            self.problems.append(f"nobody committed for {self.max_gap:.2f} s")
        rb.close()
        for one in everyone:
            one["process"].close()
        return {
            "method": self.method,
            "mode": self.mode,
            "kills": sum(self.where.values()),
            "where": dict(self.where),
            "worst_operation_s": round(worst, 3),
            "longest_gap_s": round(self.max_gap, 3),
            "write_count": stats["write_count"],
            "recoveries": stats["recoveries"],
            "discarded": stats["discarded_writes"],
            "short": sum(int(one["ledger"].head[SHORT]) for one in self.everyone),
            "problems": self.problems,
        }

    def _drain(self) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
        """Close for everybody, then look at what is left."""
        engine = self.rb._works.engine
        assert self.rb.schema is not None  # and maps the rows, if this process never looked at them before
        engine.close(everybody=True)
        for one in self.everyone:
            one["process"].join(10)
        try:
            state = engine.load()
            found, _ = engine.slots.since(state, 0)
            assert engine.rows is not None
            left = engine.rows.gather(found)
        finally:
            engine.control.mutex.unlock()
        data = engine.rows.schema.unpack(left)["data"].numpy()
        if torn(data):
            self.problems.append("torn at the end")
        return self.rb.stats(), data

    def _check(self, stats: dict[str, Any], left: np.ndarray[Any, Any]) -> None:
        writers = [one for one in self.everyone if one["kind"] == "w"]
        readers = [one for one in self.everyone if one["kind"] == "r"]
        problems = self.problems
        if any(one["ledger"].head[TORN] for one in readers):
            problems.append("torn rows were sampled")
        if any(one["ledger"].head[PROBLEMS] for one in self.everyone):
            problems.append("a worker raised")
        finished = sum(int(one["ledger"].head[FINISHED]) for one in writers)
        pending = sum(int(one["ledger"].head[PENDING]) for one in writers if one["killed"])
        if not 0 <= stats["write_count"] - finished <= pending:
            problems.append(f"write_count {stats['write_count']}, finished {finished}, pending {pending}")
        got = sum(int(one["ledger"].head[FINISHED]) for one in readers)
        lost = sum(int(one["ledger"].head[PENDING]) for one in readers if one["killed"])
        if not 0 <= stats["samples_returned"] - got <= lost:
            problems.append(f"samples_returned {stats['samples_returned']}, got {got}, pending {lost}")
        if stats["write_count"] != stats["size"] + stats["consumed"] + stats["overwritten"]:
            problems.append(f"the counters do not add up: {stats}")
        self._check_deliveries(stats, left, readers, lost)
        self._check_tree()

    def _check_deliveries(self, stats: Any, left: np.ndarray[Any, Any], readers: Any, pending: int) -> None:
        times = deliveries(self.mode)
        if not times:
            return
        logs = [one["ledger"].log[: int(one["ledger"].head[LOGGED])] for one in readers]
        names, counts = np.unique(np.concatenate(logs), return_counts=True)
        if counts.max() > times:
            self.problems.append("an item was delivered too often")
        still = (left[:, 0] << 40) | (left[:, 1] << 12) | left[:, 2]
        gone = counts[np.isin(names, still)]
        if gone.size and gone.max() >= times:
            self.problems.append("an item was delivered for the last time and is still there")
        missing = stats["samples_returned"] - int(counts.sum())
        if not 0 <= missing <= pending:
            self.problems.append(f"{missing} deliveries are missing, at most {pending} died with their consumers")

    def _check_tree(self) -> None:
        engine = self.rb._works.engine
        if engine.priorities is None:
            return
        tree, state = engine.priorities.tree, engine.control.peek()
        live = np.zeros(CAPACITY, bool)
        live[engine.slots.since(state, 0)[0]] = True
        if not ((tree.leaves > 0) == live).all():
            self.problems.append("priorities and live items differ")
        before = (tree.total, tree.count, tree.max, tree.min_positive)
        tree.rebuild()
        if before != (tree.total, tree.count, tree.max, tree.min_positive):
            self.problems.append("the tree's inner nodes were wrong")


def run(method: str, mode: str, kills: int, seed: int = 1, *, short: bool = False) -> dict[str, Any]:
    torch.set_num_threads(1)
    if short:
        shortcuts.compiled()  # so that forked workers have it
    if method == "forkserver":
        mp.set_forkserver_preload(["millpond.replay"])
    with tempfile.TemporaryDirectory() as folder:
        stress = Run(method, mode, seed, Path(folder), short=short)
        for _ in range(kills):
            stress.kill_one()
        return stress.finish()


if __name__ == "__main__":
    more = [*sys.argv[4:], "1"]
    result = run(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(more[0]), short="short" in more)
    print(json.dumps(result), flush=True)
    sys.exit(bool(result["problems"]))
