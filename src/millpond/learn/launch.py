"""Where the other ranks of a group run: processes of this machine, Ray actors, or what ``torchrun`` has started."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from millpond.core.errors import InvalidArgument, WorkerFailed
from millpond.learn.collective import PrefixStore, Store, TCPStore
from millpond.learn.rank import RankSpec, run
from millpond.remote import cluster
from millpond.shm import identity
from millpond.shm.directory import make_directory, remove_directory

_END_S = 5.0  # how long a rank may take to end when it was asked to
_STACK_S = 0.5
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Ranks(Protocol):
    """The ranks other than 0."""

    def prepare(self, spec: RankSpec) -> tuple[RankSpec, Store]:
        """``spec`` with the place where the ranks find each other, and rank 0's own way there."""

    def start(self, specs: Sequence[RankSpec]) -> None:
        """Start them, without waiting for them."""

    def dead(self) -> dict[int, str]:
        """Those that have ended without being asked to, and how, as "was killed by signal 9"."""

    def stacks(self, ranks: Iterable[int]) -> dict[int, str]:
        """Where these ranks are, as tracebacks; without those that cannot say."""

    def close(self, *, kill: bool) -> None:
        """Wait until they have ended, or end them. Twice is fine."""


class ProcessRanks:
    """Processes of this machine, which end with this one."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def prepare(self, spec: RankSpec) -> tuple[RankSpec, Store]:
        self._folder = make_directory("ranks")
        spec = replace(spec, file=str(self._folder / "store"), owner=identity.me())
        return spec, spec.store()

    def start(self, specs: Sequence[RankSpec]) -> None:
        import cloudpickle

        command = [sys.executable, "-c", "from millpond.learn.rank import main; main()"]
        for spec in specs:  # all begin to load before any is told what to do
            self._processes[spec.rank] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        for spec in specs:
            pipe = self._processes[spec.rank].stdin
            assert pipe is not None
            told = replace(spec, stacks=str(self._stack_file(spec.rank)))
            try:
                pipe.write(pickle.dumps((sys.path, cloudpickle.dumps(told))))
                pipe.close()
            except BrokenPipeError as problem:
                raise WorkerFailed(f"rank {spec.rank} ended as soon as it was started") from problem

    def dead(self) -> dict[int, str]:
        ended = {rank: process.poll() for rank, process in self._processes.items()}
        return {rank: _how(status) for rank, status in ended.items() if status is not None}

    def stacks(self, ranks: Iterable[int]) -> dict[int, str]:
        asked = [rank for rank in ranks if rank in self._processes]
        for rank in asked:
            self._processes[rank].send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + _STACK_S
        found: dict[int, str] = {}
        while len(found) < len(asked) and time.monotonic() < deadline:
            time.sleep(0.05)  # a stopped process answers nothing, so there is nothing else to wait for
            texts = {rank: self._stack_file(rank) for rank in asked}
            found = {rank: file.read_text() for rank, file in texts.items() if file.exists() and file.stat().st_size}
        return found

    def close(self, *, kill: bool) -> None:
        deadline = time.monotonic() + (0.0 if kill else _END_S)
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _kill_group(process)
                process.wait()
        self._processes.clear()
        folder, self._folder = self._folder, None
        if folder is not None:
            remove_directory(folder)

    def _stack_file(self, rank: int) -> Path:
        assert self._folder is not None
        return self._folder / f"stack-{rank}"


class RayRanks:
    """One Ray actor for each rank."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = {"num_cpus": 0, **options}
        self._actors: dict[int, Any] = {}
        self._runs: dict[int, Any] = {}

    def prepare(self, spec: RankSpec) -> tuple[RankSpec, Store]:
        cluster.join(None)
        host = cluster.ray().util.get_node_ip_address()
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return replace(spec, address=(host, store.port), host=host), store

    def start(self, specs: Sequence[RankSpec]) -> None:
        import cloudpickle

        actor = cluster.ray().remote(_RankActor).options(**self._options)
        for spec in specs:
            self._actors[spec.rank] = actor.remote()
            self._runs[spec.rank] = self._actors[spec.rank].run.remote(cloudpickle.dumps(spec))

    def dead(self) -> dict[int, str]:
        ray, dead = cluster.ray(), {}
        for rank, running in self._runs.items():
            if ray.wait([running], timeout=0)[0]:
                try:
                    ray.get(running)
                    dead[rank] = "ended"
                except ray.exceptions.RayActorError as problem:
                    dead[rank] = f"died: {str(problem).splitlines()[0]}"
                except ray.exceptions.RayError as problem:
                    dead[rank] = f"failed: {problem}"
        return dead

    def stacks(self, ranks: Iterable[int]) -> dict[int, str]:
        return {}

    def close(self, *, kill: bool) -> None:
        ray = cluster.ray()
        if not kill and self._runs:
            ray.wait(list(self._runs.values()), num_returns=len(self._runs), timeout=_END_S)
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors.clear()
        self._runs.clear()


class _RankActor:
    """A rank in a Ray actor."""

    def run(self, spec_bytes: bytes) -> None:
        import cloudpickle

        spec: RankSpec = cloudpickle.loads(spec_bytes)
        run(replace(spec, host=cluster.ray().util.get_node_ip_address()), spec.store())


class TorchrunEnvironment(NamedTuple):
    """What ``torchrun`` says to each of its processes."""

    rank: int
    local_rank: int
    world_size: int
    host: str
    port: int
    served: bool
    """The store at ``host`` and ``port`` is torchrun's own; otherwise rank 0 serves it."""
    restarts: str


def torchrun_environment() -> TorchrunEnvironment:
    """Raises ``InvalidArgument`` where the process was not started by ``torchrun``."""
    try:
        rank, world_size, host, port = (os.environ[name] for name in _TORCHRUN)
        return TorchrunEnvironment(
            rank=int(rank),
            local_rank=int(os.environ.get("LOCAL_RANK", rank)),
            world_size=int(world_size),
            host=host,
            port=int(port),
            served=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            restarts=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )
    except (KeyError, ValueError) as problem:
        raise InvalidArgument(
            f"launch='torchrun' reads {', '.join(_TORCHRUN)}, and {problem} is missing or no number: start the program"
            " with `torchrun --nproc-per-node=N`"
        ) from None


class Torchrun:
    """The ranks were started by ``torchrun``, which also ends them."""

    def prepare(self, spec: RankSpec) -> tuple[RankSpec, Store]:
        given = torchrun_environment()
        if given.world_size != spec.world_size:
            raise InvalidArgument(
                f"world_size={spec.world_size}, but torchrun started {given.world_size} processes: say the same"
            )
        served_here = spec.rank == 0 and not given.served
        wait = timedelta(seconds=spec.start_timeout_s)
        store = TCPStore(given.host, given.port, is_master=served_here, wait_for_workers=False, timeout=wait)
        return replace(spec, host=_own_host(given.host)), PrefixStore(f"millpond/{given.restarts}", store)

    def start(self, specs: Sequence[RankSpec]) -> None:
        del specs

    def dead(self) -> dict[int, str]:
        return {}

    def stacks(self, ranks: Iterable[int]) -> dict[int, str]:
        return {}

    def close(self, *, kill: bool) -> None:
        del kill


def _own_host(master: str) -> str | None:
    """The address of this machine from which ``master`` is reached; None where that is this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # sends nothing; it only chooses the way
        own = str(probe.getsockname()[0])
    return None if own.startswith("127.") else own


def _how(status: int) -> str:
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # it has no group of its own yet
        process.kill()
