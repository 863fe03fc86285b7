"""What the child processes of these tests run: owners of buffers, and their clients, in processes of their own."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch
from tensordict import TensorDict

from millpond import Flow, ReplayBuffer
from millpond.remote import connection as line
from millpond.remote.address import OwnerAddress
from millpond.remote.client import ReplayClient
from millpond.remote.server import Plan, Server

CONTEXT = multiprocessing.get_context("forkserver")
HERE = "127.0.0.1"


def plan(storage: Any, *, kind: type[ReplayBuffer] = ReplayBuffer, transport: str = "auto", **arguments: Any) -> Plan:
    name = arguments.pop("name", "pond")
    return Plan(name, "tests", transport, kind, storage, arguments)


class Child:
    """A process that obeys: ``ask(function, …)`` runs a function in it, with what earlier ones left in ``state``."""

    def __init__(self) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_obey, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self._begun = 0

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def begin(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Ask, and do not wait for the answer."""
        self._pipe.send((function, arguments))
        self._begun += 1

    def answer(self, timeout: float = 60.0) -> Any:
        """The next answer. Raises what the child raised."""
        assert self._pipe.poll(timeout), "the child does not answer"
        self._begun -= 1
        fine, value = self._pipe.recv()
        if not fine:
            raise value
        return value

    def answered(self, timeout: float) -> bool:
        return self._pipe.poll(timeout)

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.begin(function, *arguments)
        return self.answer()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.join(10)

    def end(self) -> None:
        if self.process.is_alive() and not self._begun:
            self._pipe.send(None)
            self.process.join(20)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(10)
        self._pipe.close()
        self.process.close()


def _obey(pipe: Connection) -> None:
    torch.set_num_threads(1)
    state: dict[str, Any] = {}
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            asked = None
        if asked is None:
            close_all(state)
            return
        function, arguments = asked
        try:
            pipe.send((True, function(state, *arguments)))
        except Exception as error:
            error.add_note(traceback.format_exc())
            pipe.send((False, error))


# ---------------------------------------------------------------------- as an owner
def open_service(state: dict[str, Any], asked: Plan, node: str = HERE) -> OwnerAddress:
    service = Server(asked, node=node, cluster="")
    state.setdefault("services", {})[asked.name] = service
    return service.listen()


def describe(state: dict[str, Any], name: str = "pond") -> dict[str, Any]:
    return state["services"][name].describe()


def close_service(state: dict[str, Any], name: str = "pond") -> None:
    state["services"].pop(name).close()


def close_all(state: dict[str, Any]) -> None:
    for service in state.pop("services", {}).values():
        service.close()
    for client in state.pop("clients", {}).values():
        client.close()


def enter(state: dict[str, Any], namespace: str) -> None:
    """Live in another network from now on, as this whole process does while it has one thread."""
    with open(f"/run/netns/{namespace}", "rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000):
            raise OSError(ctypes.get_errno(), "setns")


# ---------------------------------------------------------------------- as a client
def use(state: dict[str, Any], client: ReplayClient, name: str = "client") -> None:
    state.setdefault("clients", {})[name] = client


def write(state: dict[str, Any], n: int, start: int) -> list[int]:
    """Items are made where they are needed: tensors that cross a pipe leave threads behind."""
    return state["clients"]["client"].extend(batch(n, start=start)).tolist()


def read(state: dict[str, Any], n: int) -> list[int]:
    return ids_of(state["clients"]["client"].sample(n, wait=True))


def interrupted_write(state: dict[str, Any], n: int, start: int) -> str:
    try:
        write(state, n, start)
    except KeyboardInterrupt:
        return "interrupted"
    return "written"


def write_count(state: dict[str, Any]) -> int:
    return int(state["clients"]["client"].write_count)


def crowd(state: dict[str, Any], size: int) -> None:
    """Many threads, each blocked in a call of the one client."""
    client, got = state["clients"]["client"], []
    threads = [threading.Thread(target=lambda: got.extend(ids_of(client.sample(wait=True)))) for _ in range(size)]
    for thread in threads:
        thread.start()
    state["crowd"] = (threads, got)


def disperse(state: dict[str, Any]) -> list[int]:
    """What the crowd got."""
    threads, got = state.pop("crowd")
    for thread in threads:
        thread.join(60)
    return list(got)


def die_within(state: dict[str, Any], instant: str) -> None:
    """Be killed at an instant of a request."""
    client = state["clients"]["client"]
    items = batch(5000, start=5000)
    client.stats()  # the group is there

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if instant != "before the answer's payload":
        send, most = line.Connection._send, 0 if instant == "before the payload" else 99_999

        def some(ends: line.Connection, parts: list[memoryview]) -> int:
            if len(parts) == 1:
                return send(ends, parts)
            ends._socket.sendmsg([parts[0], parts[1][:most]])
            return int(die())

        line.Connection._send = some  # type: ignore[method-assign]
    else:
        line.Connection._heard = die  # type: ignore[method-assign]
        client.sample()
    client.extend(items)


def write_and_sample(state: dict[str, Any], line: int, n: int) -> None:
    client, number = state["clients"]["client"], 0
    while True:
        number += 1
        client.extend(batch(n, start=number * n), receipt=(line, number))
        ids_of(client.sample(wait=True))


def extend_once(client: ReplayClient, n: int, start: int) -> None:
    """The target of a process: no `Child` is around it."""
    torch.set_num_threads(1)
    client.extend(batch(n, start=start))
    client.close()


def possessions(state: dict[str, Any]) -> tuple[int, int]:
    """Threads and descriptors of this process."""
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


# ---------------------------------------------------------------------- here
def wait_for(true: Callable[[], Any], what: str | Callable[[], str], timeout: float = 20.0) -> None:
    """Look until it is true. Fails where it does not become so."""
    end = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < end, f"waited {timeout} s for {what if isinstance(what, str) else what()}"
        time.sleep(0.01)


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """A machine goes with everything on it."""
    if process.poll() is None:
        for each in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
            each.kill()
        process.wait(10)


def batch(n: int, *, start: int = 0) -> dict[str, Any]:
    """n items that tell what they are: all fields say the number of the item."""
    ids = torch.arange(start, start + n)
    return {
        "observation": ids[:, None].float().repeat(1, 3),
        "action": ids.to(torch.int32)[:, None].repeat(1, 2),
        "next": {"reward": ids[:, None].double(), "done": (ids % 2 == 0)[:, None]},
    }


def ids_of(found: Any) -> list[int]:
    """The numbers of the items of a batch; fails where the fields of one disagree."""
    ids = found["action"][:, 0].long()
    assert torch.equal(found["observation"], ids[:, None].float().repeat(1, 3))
    assert torch.equal(found["next", "reward"], ids[:, None].double())
    assert torch.equal(found["next", "done"], (ids % 2 == 0)[:, None])
    return [int(i) for i in ids]


def episodes(n: int, *, length: int = 7) -> TensorDict:
    """n steps of episodes of that length, with goals."""
    number, step = torch.arange(n) // length, torch.arange(n) % length
    place = (number * 100 + step)[:, None].float()
    last = (step == length - 1)[:, None]
    here, there = ({"place": p, "achieved_goal": p, "desired_goal": -torch.ones(n, 1)} for p in (place, place + 1))
    following = {"observation": there, "reward": place / 9, "done": last, "terminated": last, "truncated": ~last & last}
    return TensorDict({"observation": here, "episode_id": number, "step": step, "next": following}, [n])


def distance(achieved: torch.Tensor, desired: torch.Tensor) -> torch.Tensor:
    return -(achieved - desired).abs()


# ---------------------------------------------------------------------- producers on Ray
BLOCK = Flow(admission="block")


def numbered(n: int, start: int) -> TensorDict:
    """n items of 64 bytes that differ in every field."""
    ids = torch.arange(start, start + n)
    noise = (ids[:, None] * torch.tensor([2654435761, 40503, 97, 1])) % 2**31
    return TensorDict({"id": ids, "noise": noise, "value": noise.float() / 2**31}, [n])


def checksum(items: TensorDict) -> int:
    """Of every bit of every item, in any order: the sum of a mixed sum of the 64-bit words of each."""
    words = torch.cat(
        [items["id"][:, None], items["noise"], items["value"].contiguous().view(torch.int64).reshape(len(items), -1)], 1
    )
    mixed = words * torch.arange(1, 2 * words.shape[1], 2)
    return int((mixed.sum(1) * -7046029254386353131 ^ mixed.prod(1)).sum()) % 2**64


def _produce(client: ReplayClient, producer: int, batches: int) -> int:
    """Write batches of 1,000 items; the checksum of all that was written."""
    torch.set_num_threads(1)
    total = 0
    for i in range(batches):
        items = numbered(1000, 1_000_000 * producer + 1000 * i)
        client.extend(items)
        total += checksum(items)
    client.close()
    return total


try:
    import ray
except ImportError:
    pass
else:
    produce = ray.remote(num_cpus=0)(_produce)
