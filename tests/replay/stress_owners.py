"""SIGKILLs the process that a buffer belongs to, at random instants, and checks what its users see and what is left.

``python tests/replay/stress_owners.py METHOD memory|disk KILLS [SEED [MODE]]`` prints one JSON line, and exits with 1
on any violation. Three processes use the buffers of one owner after another. In ``memory`` each of them is told that
the owner is gone, and the next start frees its memory. On ``disk`` the next owner takes the buffer over, at once or
after its users left: its rows are whole, and its counters are those of all who ever wrote and sampled, but for what
somebody was doing when it was killed.
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

import torch
from stress import HANG, WRITER, tree_problems
from stress_work import (
    CALLS,
    CHANGING,
    GETTING,
    GOT,
    LOGGED,
    PROBLEMS,
    STALE,
    TORN,
    WORST_US,
    WRITING,
    WRITTEN,
    Job,
    Ledger,
    Worker,
    buffer_for,
    torn,
)

from millpond.core.errors import BufferClosed, NotShareable, PeerLost
from millpond.replay import ReplayBuffer

USERS = "wru"


def own(pipe: Any, mode: str, path: Path | None, job: Job) -> None:
    """Make the buffer, or take it over, say where it is, and use it."""
    torch.set_num_threads(1)
    ledger = Ledger(job.ledger)
    try:
        if path is not None and path.exists():
            rb = ReplayBuffer.attach(path)
            while not rb._local.engine.memory.mine:  # a user was faster, and is about to close it
                rb.close()
                time.sleep(0.01)
                rb = ReplayBuffer.attach(path)
        else:
            rb = buffer_for(mode, path)
        pipe.send(rb.handle() if path is None else path)
        working = Worker(rb, job)
        kinds = [working.write, working.sample] if mode != "fifo" else [working.write]  # it would wait for ever longer
        while True:
            working.stop_at_steps(rb)
            working.rnd.choice(kinds if len(rb) else kinds[:1])(rb)
            ledger.head[CALLS] += 1
    except BaseException:
        ledger.head[PROBLEMS] += 1
        raise


def use(pipe: Any, job: Job) -> None:
    """Use one buffer after the other. Of each: say when its end was noticed, and how."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    ledger = Ledger(job.ledger)
    batch = 0
    try:
        while (where := pipe.recv()) is not None:
            rb = None
            ledger.head[LOGGED] = 0
            try:
                rb = ReplayBuffer.attach(where)
                if rb._local.engine.memory.mine:
                    raise PeerLost("the owner is gone, and this process took the buffer over: it closes it")
                working = Worker(rb, job)
                working.batch = batch
                while True:
                    time.sleep(0.0005)
                    batch = working.batch + 1
                    working.act(rb)
                    ledger.head[CALLS] += 1
            except (PeerLost, BufferClosed, NotShareable) as lost:
                if isinstance(lost, NotShareable) and (rb is not None or Path(where.path).exists()):
                    raise  # only who attaches may find no trace of a buffer: the next start on this host removed it
                noticed = type(lost).__name__, time.monotonic()
            ledger.head[[WRITING, GETTING, CHANGING]] = 0  # what was refused was not done
            if rb is not None:
                rb.close()
            pipe.send(noticed)
    except BaseException:
        ledger.head[PROBLEMS] += 1
        raise


class User:
    """A process that outlives the owners."""

    def __init__(self, context: Any, job: Job) -> None:
        self.kind, self.ledger = job.kind, Ledger(job.ledger, create=True)
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=use, args=(theirs, job), daemon=True)
        self.process.start()
        theirs.close()
        self.busy, self._calls = False, 0

    def give(self, where: Any) -> None:
        """Unless it still uses what it has."""
        self._calls = int(self.ledger.head[CALLS])
        if not self.busy:
            self._pipe.send(where)
        self.busy = True

    def local(self) -> bool:
        return int(self.ledger.head[CALLS]) > self._calls + 1

    def noticed(self, timeout: float) -> tuple[str, float] | None:
        """How it noticed the end of the buffer, and when. None: not yet."""
        if not self._pipe.poll(timeout):
            return None
        self.busy = False
        answer: tuple[str, float] = self._pipe.recv()
        return answer

    def end(self) -> int | None:
        self._pipe.send(None)
        self.process.join(HANG)
        code: int | None = self.process.exitcode
        if code is None:
            self.process.kill()
            self.process.join()
        self.process.close()
        self._pipe.close()
        return code


class Owners:
    """One run: the owners, one after the other, and their users."""

    def __init__(self, method: str, mode: str, seed: int, folder: Path, *, disk: bool) -> None:
        self.mode, self.folder, self.rnd = mode, folder, random.Random(seed)
        self.path = folder / "buffer" if disk else None
        self.context: Any = mp.get_context(method)
        self.slow = method != "fork"
        self.where: collections.Counter[str] = collections.Counter()
        self.noticed: collections.Counter[str] = collections.Counter()
        self.worst_notice = self.worst_start = 0.0
        self.checked = self.count = 0
        self.problems: list[str] = []
        self.graves: list[Path] = []
        self.ledgers: list[tuple[Ledger, bool]] = []  # and whether its process was killed
        self.users = [User(self.context, self._job(kind, 16, place)) for place, kind in enumerate(USERS)]
        self.ledgers = [(user.ledger, False) for user in self.users]

    def _job(self, kind: str, n: int, place: int, suicide: Any = None) -> Job:
        self.count += 1
        return Job(kind, self.count, place, n, place >= len(USERS), suicide, False, self.folder, self.path is not None)

    def kill_one(self) -> None:
        suicide = (self.rnd.choice(WRITER), self.rnd.randint(1, 30)) if self.rnd.random() < 0.4 else None
        job = self._job("w", self.rnd.choice([1, 7, 64, 300]), len(USERS), suicide)
        self.ledgers.append((Ledger(job.ledger, create=True), True))
        mine, theirs = self.context.Pipe()
        owner = self.context.Process(target=own, args=(theirs, self.mode, self.path, job), daemon=True)
        began = time.monotonic()
        owner.start()
        theirs.close()
        if suicide is None and self.rnd.random() < 0.2:
            time.sleep(self.rnd.random() * (3.0 if self.slow else 0.05))
            how = "starting"
        elif not mine.poll(3 * HANG):
            self.problems.append("an owner never had its buffer")
            how = "stuck"
        else:
            where = mine.recv()
            self.worst_start = max(self.worst_start, time.monotonic() - began)
            how = self._used(where, owner, suicide)
        if owner.is_alive():
            os.kill(owner.pid, signal.SIGKILL)
        died = time.monotonic()
        owner.join()
        if owner.exitcode != -signal.SIGKILL:
            self.problems.append(f"an owner ended with {owner.exitcode}")
        if how == "starting" and mine.poll(0):
            with contextlib.suppress(EOFError):
                self._bury(mine.recv())
        owner.close()
        mine.close()
        self.where[how] += 1
        if self.path is None or self.rnd.random() < 0.6:
            self._leave(died)
            if self.path is not None and self.path.exists():
                self._check()

    def _used(self, where: Any, owner: Any, suicide: Any) -> str:
        """Let everybody use the buffer; until when, and what the owner does then."""
        if self.path is None:
            left = [path for path in self.graves if path.exists()]
            if left:
                self.problems.append(f"the memory of dead owners was not freed: {left}")
            self.graves.clear()
            self._bury(where)
        for user in self.users:
            user.noticed(0)
            user.give(where)
        end = time.monotonic() + 3 * HANG
        while owner.is_alive() and not all(user.local() for user in self.users):
            for user in self.users:
                if user.noticed(0.001) and owner.is_alive():  # that of the owner before
                    user.give(where)
            if time.monotonic() > end:
                self.problems.append(f"users are stuck: {[user.kind for user in self.users if not user.local()]}")
                break
        if not owner.is_alive():
            return f"step {suicide[0]}" if suicide else "by itself"
        policy = self.rnd.choice(["random", "holder", "waiter"])
        until = time.monotonic() + self.rnd.random() * (1.0 if suicide else 0.1)
        try:
            rb = ReplayBuffer.attach(where)
        except (PeerLost, NotShareable):
            return f"step {suicide[0]}" if suicide else "by itself"
        try:
            control = rb._local.engine.control
            while not rb._local.engine.memory.mine and owner.is_alive() and time.monotonic() < until:
                if policy == "holder" and not suicide and control.mutex.holder == owner.pid:
                    break
                if policy == "waiter" and not suicide and any(w.pid == owner.pid for w in control.waiting()):
                    break
                if suicide or policy == "random":
                    time.sleep(0.001)
            if not owner.is_alive():
                return f"step {suicide[0]}" if suicide else "by itself"
            holder = control.mutex.holder == owner.pid
            os.kill(owner.pid, signal.SIGKILL)
            return "holder" if holder else "random"
        finally:
            rb.close()

    def _bury(self, where: Any) -> None:
        if self.path is None:
            self.graves.append(Path(where.path))

    def _leave(self, died: float) -> None:
        """Every user notices, in time."""
        for user in self.users:
            if not user.busy:
                continue
            noticed = user.noticed(3 * HANG)
            if noticed is None:
                self.problems.append(f"{user.kind} never noticed that the owner died")
                continue
            how, when = noticed
            self.noticed[how] += 1
            self.worst_notice = max(self.worst_notice, when - died)

    def _check(self) -> None:
        """Nobody uses the buffer: take it over, and look."""
        assert self.path is not None
        with ReplayBuffer.attach(self.path) as rb:
            stats = rb.stats()
            if torn(rb[:]) if rb.schema is not None else 0:
                self.problems.append("torn after the owner died")
            for counter, done, doing in (
                ("write_count", WRITTEN, WRITING),
                ("samples_returned", GOT, GETTING),
                ("stale_updates", STALE, CHANGING),
            ):
                finished = sum(int(ledger.head[done]) for ledger, _ in self.ledgers)
                pending = sum(int(ledger.head[doing]) for ledger, killed in self.ledgers if killed)
                if not 0 <= stats[counter] - finished <= pending:
                    self.problems.append(f"{counter} {stats[counter]}, finished {finished}, pending {pending}")
            if stats["write_count"] != stats["size"] + stats["consumed"] + stats["overwritten"]:
                self.problems.append(f"the counters do not add up: {stats}")
            self.problems += tree_problems(rb)
        making = [file.name for file in [*self.path.iterdir(), *self.folder.iterdir()] if ".making" in file.name]
        if making:
            self.problems.append(f"files of killed owners are left: {making}")
        self.checked += 1

    def finish(self) -> dict[str, Any]:
        self._leave(time.monotonic())
        if self.path is None:
            buffer_for(self.mode).close()
            self.problems += [f"{path} was never freed" for path in self.graves if path.exists()]
        worst = max(int(user.ledger.head[WORST_US]) for user in self.users) / 1e6
        codes = [user.end() for user in self.users]
        if any(codes):
            self.problems.append(f"users ended with {codes}")
        for word, says in ((TORN, "torn rows were sampled"), (PROBLEMS, "somebody raised")):
            if any(int(ledger.head[word]) for ledger, _ in self.ledgers):
                self.problems.append(says)
        return {
            "mode": self.mode,
            "role": "owner" + (" on disk" if self.path else ""),
            "kills": sum(self.where.values()),
            "where": dict(self.where),
            "noticed": dict(self.noticed),
            "worst_notice_s": round(self.worst_notice, 3),
            "worst_operation_s": round(worst, 3),
            "worst_start_s": round(self.worst_start, 3),
            "taken_over_and_checked": self.checked,
            "calls_of_users": sum(int(user.ledger.head[CALLS]) for user in self.users),
            "problems": self.problems,
        }


def run(method: str, place: str, kills: int, seed: int = 1, mode: str = "prioritized") -> dict[str, Any]:
    torch.set_num_threads(1)
    if method == "forkserver":
        mp.set_forkserver_preload(["millpond.replay"])
    with tempfile.TemporaryDirectory() as folder:
        owners = Owners(method, mode, seed, Path(folder), disk=place == "disk")
        for _ in range(kills):
            owners.kill_one()
        return {"method": method, **owners.finish()}


if __name__ == "__main__":
    method, place, kills, *more = sys.argv[1:]
    result = run(method, place, int(kills), int(more[0]) if more else 1, *more[1:])
    print(json.dumps(result), flush=True)
    sys.exit(bool(result["problems"]))
