"""SIGKILLs the processes that share one buffer, at random instants and at named steps, and checks what is left.

``python tests/replay/stress.py METHOD MODE KILLS [SEED] [short] [updater|checkpointer|attacher] [disk]`` prints one
JSON line, and exits with 1 on any violation. Modes: overwrite, prioritized, fifo, fifo2, pool, pool2 (items leave in
random order, after 1 or 2 deliveries), epoch. Writers and samplers are killed, or those of the role that is named. With
``disk`` the buffer lies in files on disk.

With ``short`` the workers have the compiled fast path from the first call, in the modes that have one: overwrite,
prioritized and fifo. Of the victims those that die at a named step go the ordinary way, as that is where the steps are;
the others have the same fast path in plain Python, which takes long enough under the lock to be killed there.

``stress_owners.py`` kills the process that a buffer belongs to.
"""

from __future__ import annotations

import collections
import contextlib
import json
import multiprocessing as mp
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import fast_paths
import numpy as np
import torch
from stress_work import (
    CALLS,
    CAPACITY,
    CHANGING,
    GETTING,
    GOT,
    LOGGED,
    PROBLEMS,
    SAVED,
    SHORT,
    STALE,
    STAMP,
    TORN,
    WORST_US,
    WRITING,
    WRITTEN,
    Job,
    Ledger,
    buffer_for,
    deliveries,
    names,
    torn,
    worker,
)

from millpond.core.errors import CheckpointError, NotReady
from millpond.replay import ReplayBuffer
from millpond.replay.slots import Ring

COMMON = ["record written", "committed", "recover"]
WRITER = [*COMMON, "intent", "half copied", "half copied"]
#: Role → survivors, and victims at a time.
ROLES = {"": ("wwrr", "wr"), "updater": ("wwru", "uu"), "checkpointer": ("wwrc", "cc"), "attacher": ("wwra", "aa")}
HAVE_SHORT = ("overwrite", "prioritized", "fifo")
HANG = 10.0  # seconds; whoever is not woken sleeps for 30


class Run:
    """One stress run: four survivors, and two victims at a time."""

    def __init__(
        self,
        method: str,
        mode: str,
        seed: int,
        folder: Path,
        *,
        short: bool = False,
        role: str = "",
        disk: bool = False,
    ) -> None:
        self.short, self.role, self.disk = short, role, disk
        self.mode, self.method, self.folder, self.rnd = mode, method, folder, random.Random(seed)
        self.context: Any = mp.get_context(method)
        self.rb = buffer_for(mode, folder / "buffer" if disk else None)
        self.everyone: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.where: collections.Counter[str] = collections.Counter()
        self.loaded = 0
        self.max_gap = 0.0
        self._last = (-1, time.monotonic())
        self._looked = time.monotonic()
        survive, die = ROLES[role]
        self.survivors = [self.start(kind, place, victim=False) for place, kind in enumerate(survive)]
        self.victims = [self.victim(kind, len(survive) + i) for i, kind in enumerate(die)]

    def start(self, kind: str, place: int, *, victim: bool, suicide: Any = None) -> dict[str, Any]:
        n = self.rnd.choice([1, 7, 64, 64, 300] if victim else [7, 32])
        job = Job(kind, len(self.everyone), place, n, victim, suicide, self.short, self.folder, self.disk)
        ledger = Ledger(job.ledger, create=True)
        process = self.context.Process(target=worker, args=(self.rb, job), daemon=True)
        process.start()
        made = {"kind": kind, "process": process, "job": job, "suicide": suicide, "ledger": ledger, "killed": False}
        self.everyone.append(made)
        return made

    def victim(self, kind: str, place: int) -> dict[str, Any]:
        steps = COMMON if kind == "r" else WRITER
        chance = 0.0 if kind == "c" else 0.6  # a save goes through none of the steps
        suicide = (self.rnd.choice(steps), self.rnd.randint(1, 6)) if self.rnd.random() < chance else None
        return self.start(kind, place, victim=True, suicide=suicide)

    def progress(self) -> None:
        """Note the longest time in which nobody committed anything."""
        last, at = self._last
        now = time.monotonic()
        unseen, self._looked = now - self._looked > 0.2, now  # busy starting a process, or starved: not their doing
        if not all(int(one["ledger"].head[CALLS]) for one in self.survivors):
            self._last = (last, now)  # still starting
            return
        commit = int(self.rb._local.engine.control._commit_word[0])
        if commit != last or unseen:
            self.max_gap = max(self.max_gap, now - at) if last >= 0 and not unseen else self.max_gap
            self._last = (commit, now)
        elif now - at > HANG:
            raise SystemExit(
                f"HANG: holder {self.rb._local.engine.control.mutex.holder}, {self.rb._local.engine.control.waiting()}"
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
        control = self.rb._local.engine.control
        while time.monotonic() < until and process.is_alive():
            self.progress()
            if not suicide and policy == "holder" and control.mutex.holder == process.pid:
                break
            if not suicide and policy == "waiter" and any(w.pid == process.pid for w in control.waiting()):
                break
            if policy != "random" and self._saves(process.pid):
                break
            if suicide or policy == "random":
                time.sleep(0.001)
        how = "random"
        if process.is_alive():
            if control.mutex.holder == process.pid:
                how = "holder"
            elif any(w.pid == process.pid for w in control.waiting()):
                how = "waiter"
            elif self._saves(process.pid):
                how = "saving"
            os.kill(process.pid, signal.SIGKILL)
        elif suicide:
            how = f"step {suicide[0]}"
        process.join()
        victim["killed"] = True
        if process.exitcode != -signal.SIGKILL:
            self.problems.append(f"a victim ended with {process.exitcode}")
        self.where[how] += 1
        with contextlib.suppress(NotReady):  # look before survivors write over it; they may have taken it all
            if torn(self.rb.peek(2000)):
                self.problems.append(f"torn after a kill ({how})")
        if victim["kind"] == "u" and head[CHANGING] and head[STAMP]:
            self._check_updated(victim["ledger"])
        if victim["kind"] == "c":
            self._check_saved(victim["job"].saved, int(head[SAVED]))
        self.victims[i] = self.victim(victim["kind"], victim["job"].place)

    def _check_updated(self, ledger: Ledger) -> None:
        """So few rows are updated together, or not at all."""
        n, stamp = int(ledger.head[CHANGING]), int(ledger.head[STAMP])
        items = self.rb[:]
        stamps = items["note"][:, 0].numpy()[np.isin(names(items["data"].numpy()), ledger.log[-n:])]
        if 0 < (stamps == stamp).sum() < len(stamps):
            self.problems.append(f"{(stamps == stamp).sum()} rows of an update of {n} were updated")

    def finish(self) -> dict[str, Any]:
        time.sleep(0.3)
        self.progress()
        rb, everyone = self.rb, self.everyone
        alive = {one["process"].pid for one in everyone if not one["killed"]}
        rb.stats()  # clears the lines of the dead
        if any(w.pid not in alive for w in rb._local.engine.control.waiting()):
            self.problems.append("a dead waiter is listed")
        stats, rest = self._drain()
        for one in everyone:
            if not one["killed"]:
                one["process"].join(10)
                if one["suicide"] and one["process"].exitcode == -signal.SIGKILL:
                    one["killed"] = True
                elif one["process"].exitcode != 0:
                    self.problems.append(f"{one['kind']} ended with {one['process'].exitcode}")
        stats["write_count"] = self.rb._local.engine.control.peek()[4]
        self._check(stats, rest)
        idle = [one["kind"] for one in self.survivors if one["kind"] != "c" and not one["ledger"].head[SHORT]]
        if self.short and [kind for kind in idle if (kind, self.mode) != ("w", "prioritized")]:
            self.problems.append(f"survivors never took the fast path: {idle}")
        worst = max(int(one["ledger"].head[WORST_US]) for one in self.survivors) / 1e6
        if worst > HANG:
            self.problems.append(f"a survivor's operation took {worst:.2f} s")
        rb.close()
        if self.role == "checkpointer":
            self._check_nothing_left()
        for one in everyone:
            one["process"].close()
        return {
            "method": self.method,
            "mode": self.mode,
            "role": (self.role or "writer, sampler") + (" on disk" if self.disk else ""),
            "kills": sum(self.where.values()),
            "where": dict(self.where),
            "worst_operation_s": round(worst, 3),
            "longest_gap_s": round(self.max_gap, 3),
            "write_count": stats["write_count"],
            "recoveries": stats["recoveries"],
            "discarded": stats["discarded_writes"],
            "short": sum(int(one["ledger"].head[SHORT]) for one in self.everyone),
            "loaded": self.loaded,
            "problems": self.problems,
        }

    def _drain(self) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
        """Close for everybody, then look at what is left."""
        engine = self.rb._local.engine
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
        items = engine.rows.schema.unpack(left)
        if torn(items):
            self.problems.append("torn at the end")
        return self.rb.stats(), names(items["data"].numpy())

    def _check(self, stats: dict[str, Any], left: np.ndarray[Any, Any]) -> None:
        problems = self.problems
        if self._sum(TORN):
            problems.append("torn rows were sampled")
        if self._sum(PROBLEMS):
            problems.append("a worker raised")
        for counter, done, doing in (
            ("write_count", WRITTEN, WRITING),
            ("samples_returned", GOT, GETTING),
            ("stale_updates", STALE, CHANGING),
        ):
            finished, pending = self._sum(done), self._sum(doing, killed=True)
            if not 0 <= stats[counter] - finished <= pending:
                problems.append(f"{counter} {stats[counter]}, finished {finished}, pending {pending}")
        if stats["write_count"] != stats["size"] + stats["consumed"] + stats["overwritten"]:
            problems.append(f"the counters do not add up: {stats}")
        self._check_deliveries(stats, left)
        self.problems += tree_problems(self.rb)

    def _sum(self, word: int, *, killed: bool = False) -> int:
        return sum(int(one["ledger"].head[word]) for one in self.everyone if one["killed"] or not killed)

    def _check_deliveries(self, stats: Any, left: np.ndarray[Any, Any]) -> None:
        times = deliveries(self.mode)
        if not times:
            return
        logs = [one["ledger"].log[: int(one["ledger"].head[LOGGED])] for one in self.everyone]
        found, counts = np.unique(np.concatenate(logs), return_counts=True)
        if counts.max() > times:
            self.problems.append("an item was delivered too often")
        gone = counts[np.isin(found, left)]
        if gone.size and gone.max() >= times:
            self.problems.append("an item was delivered for the last time and is still there")
        missing, pending = stats["samples_returned"] - int(counts.sum()), self._sum(GETTING, killed=True)
        if not 0 <= missing <= pending:
            self.problems.append(f"{missing} deliveries are missing, at most {pending} died with their consumers")

    # ------------------------------------------------------------------ checkpoints
    def _saves(self, pid: int) -> bool:
        """Is it writing a file?"""
        return self.role == "checkpointer" and any(f".making.{pid}-" in name for name in os.listdir(self.folder))

    def _check_saved(self, path: Path, written: int) -> None:
        """The last good file loads: it is of one moment, and not older than the last save that came to its end."""
        making = [one.name for one in self.folder.iterdir() if ".making." in one.name]
        if len(making) > len(self.survivors) + len(self.victims):
            self.problems.append(f"what killed saves left piles up: {making}")
        if not path.exists():
            if written:
                self.problems.append(f"{path.name} is gone")
            return
        with buffer_for(self.mode, shared=False) as rb:
            try:
                rb.loads(path)
            except CheckpointError as problem:
                self.problems.append(f"a checkpoint does not load: {problem}")
                return
            self.loaded += 1
            stats = rb.stats()
            if stats["write_count"] != stats["size"] + stats["consumed"] + stats["overwritten"]:
                self.problems.append(f"the counters of a checkpoint do not add up: {stats}")
            if stats["write_count"] < written:
                self.problems.append(f"a checkpoint of {stats['write_count']} items, {written} were saved before")
            if rb.schema is None or not len(rb):
                return
            items = rb[:]
            if torn(items):
                self.problems.append("torn in a checkpoint")
            if isinstance(rb._local.engine.slots, Ring) or self.mode == "fifo2":
                self._check_one_moment(items["data"].numpy())
            self.problems += tree_problems(rb)

    def _check_one_moment(self, a: np.ndarray[Any, Any]) -> None:
        """Oldest first: each batch is whole, but for the first one, and each writer's batches follow one another."""
        begins = np.flatnonzero(np.r_[True, (a[1:, 0] != a[:-1, 0]) | (a[1:, 1] != a[:-1, 1])])
        sizes = {one["job"].ident: one["job"].n for one in self.everyone}
        latest: dict[int, int] = {}
        for i, (first, last) in enumerate(zip(begins, [*begins[1:], len(a)], strict=True)):
            who, batch, parts = int(a[first, 0]), int(a[first, 1]), a[first:last, 2]
            whole = range(sizes[who] - len(parts), sizes[who]) if i == 0 else range(sizes[who])
            if parts.tolist() != list(whole) or latest.get(who, batch - 1) != batch - 1:
                self.problems.append(f"not of one moment: batch {batch} of {who} has {parts.tolist()}")
            latest[who] = batch

    def _check_nothing_left(self) -> None:
        with buffer_for(self.mode, shared=False) as rb:
            rb.dumps(self.folder / "last")
        left = [one.name for one in self.folder.iterdir() if ".making." in one.name]
        if left:
            self.problems.append(f"the last save left {left}")


def tree_problems(rb: ReplayBuffer) -> list[str]:
    """What is wrong with the priorities of a buffer that nobody else uses now."""
    engine, problems = rb._local.engine, []
    if engine.priorities is not None:
        tree, state = engine.priorities.tree, engine.control.peek()
        live = np.zeros(CAPACITY, bool)
        live[engine.slots.since(state, 0)[0]] = True
        if not ((tree.leaves > 0) == live).all():
            problems.append("priorities and live items differ")
        before = (tree.total, tree.count, tree.max, tree.min_positive)
        tree.rebuild()
        if before != (tree.total, tree.count, tree.max, tree.min_positive):
            problems.append("the tree's inner nodes were wrong")
    return problems


def run(
    method: str, mode: str, kills: int, seed: int = 1, *, short: bool = False, role: str = "", disk: bool = False
) -> dict[str, Any]:
    if short and mode not in HAVE_SHORT:
        raise SystemExit(f"{mode} has no fast path; these have: {', '.join(HAVE_SHORT)}")
    torch.set_num_threads(1)
    if short:
        fast_paths.compiled()  # so that forked workers have it
    if method == "forkserver":
        mp.set_forkserver_preload(["millpond.replay"])
    with tempfile.TemporaryDirectory() as folder:
        stress = Run(method, mode, seed, Path(folder), short=short, role=role, disk=disk)
        for _ in range(kills):
            stress.kill_one()
        return stress.finish()


def main(arguments: list[str]) -> int:
    method, mode, kills, *more = arguments
    seed = int(more.pop(0)) if more and more[0].isdigit() else 1
    roles = [name for name in more if name in ROLES]
    unknown = set(more) - {*ROLES, "short", "disk"}
    if unknown or len(roles) > 1:
        raise SystemExit(__doc__)
    result = run(method, mode, int(kills), seed, short="short" in more, role="".join(roles), disk="disk" in more)
    print(json.dumps(result), flush=True)
    return int(bool(result["problems"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
