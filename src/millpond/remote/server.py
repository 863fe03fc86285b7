"""The process that owns the buffer: an ordinary shared `ReplayBuffer`, and the ways by which clients reach it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from millpond.core.errors import BufferClosed, InvalidArgument, MillpondError, PeerLost
from millpond.remote.address import OwnerAddress, this_host
from millpond.remote.allowance import Allowance
from millpond.remote.caller import Caller
from millpond.remote.cluster import note_closed, note_open, ray
from millpond.remote.handlers import Client, Handlers
from millpond.remote.listener import TOKEN, Listener
from millpond.remote.messages import Message, decode, encode, failed, head_of, payload_of
from millpond.remote.packed import Packed
from millpond.remote.transports import nccl
from millpond.remote.transports.nccl import Direct, Introduction
from millpond.remote.transports.ray import Bytes, to_array, to_tensor
from millpond.replay.buffer import ReplayBuffer
from millpond.replay.config import spell
from millpond.replay.inspection import describe_schema, inspect
from millpond.replay.storage import TensorStorage
from millpond.shm.directory import reap
from millpond.shm.identity import boot_id, pid_namespace, when_gone
from millpond.shm.ownership import Owner as Creator

UNDERWAY = 1 << 28  # bytes of all requests that are being received
PIECES = 1 << 26  # bytes that a payload may have in any case; else twice what the buffer holds
# Bytes and rows by the way they took, as the owner sees it. Bytes are all that was said: heads, answers, notices.
TRAFFIC = (
    *("gloo_in", "gloo_out", "gloo_rows_in", "gloo_rows_out"),
    *("ray_in", "ray_out", "ray_rows_in", "ray_rows_out", "nccl_out"),
)

log = logging.getLogger("millpond")


@dataclass(frozen=True)
class Plan:
    """What an owner is to be. ``arguments`` are those of ``kind``, a `ReplayBuffer` or one of its special cases."""

    name: str
    namespace: str
    transport: str
    kind: type[ReplayBuffer]
    storage: Any
    arguments: Mapping[str, Any]
    creator: Creator | None = None  # with whom the owner ends, if it is a process of the same host


class Server:
    """One owned buffer, and who uses it. Needs no Ray; `ReplayActor` puts it into an actor.

    Each client on a line has one thread here, which ends with the line. Nothing waits for the buffer: see `Handlers`.

    Raises what making the buffer raises; then nothing is left behind.
    """

    def __init__(self, plan: Plan, *, node: str, cluster: str) -> None:
        reap()  # what a killed owner left in shared memory on this host
        shared = type(plan.storage) is not TensorStorage  # that one is private memory, on a GPU perhaps
        self._packed = Packed(plan.kind(plan.storage, shared=shared, **plan.arguments))
        self._lock = threading.Lock()
        self._listening = threading.Lock()
        self._clients: dict[bytes, Client] = {}
        self._callers: dict[Caller, tuple[int, int]] = {}  # bytes heard and said, as they were counted last
        self._by_ray: set[bytes] = set()
        self._directs: dict[Caller, Direct] = {}
        self.traffic = dict.fromkeys(TRAFFIC, 0)
        self._listener: Listener | None = None
        self._closed = False
        with contextlib.ExitStack() as undo:
            undo.callback(self._packed.close)
            self._gpu = gpu_of(plan.storage)
            if plan.transport == "nccl":
                nccl.check(self._gpu, self._packed.buffer._local.rules.device)
            self._answers = Handlers(self._packed)
            undo.callback(self._answers.close)
            buffer = self._packed.buffer
            self.owner = OwnerAddress(
                name=plan.name,
                namespace=plan.namespace,
                pid=os.getpid(),
                node=node,
                host=this_host(),
                machine=(boot_id(), pid_namespace()),
                transport=plan.transport,
                line=None,
                token=secrets.token_bytes(TOKEN),
                cluster=cluster,
                gloo=plan.transport in ("auto", "gloo", "nccl"),
                gpu=self._gpu,
                handle=buffer.handle() if buffer.shared else None,
                rules=buffer._local.rules.unbound(),
            )
            if plan.transport not in ("auto", "shm"):
                self.listen()  # all clients need it
            undo.pop_all()

    def listen(self) -> OwnerAddress:
        """Where the line is, from now on: nothing listens before somebody needs it."""
        with self._listening:
            if self._closed:
                raise BufferClosed("the buffer was closed")
            if self._listener is None:
                self._listener = Listener(
                    self.owner.node,
                    token=self.owner.token,
                    allowance=Allowance(UNDERWAY),
                    came=self._came,
                    serve=self._serve,
                    left=self._left,
                )
                self.owner = dataclasses.replace(self.owner, line=self._listener.address)
            return self.owner

    # ------------------------------------------------------------------ lines
    def _came(self, caller: Caller) -> None:
        with self._lock:
            if caller.id in self._clients:
                raise ConnectionError("a client of this number is here already")
            self._clients[caller.id] = Client(caller.id, notify=caller.notify)
            self._callers[caller] = 0, 0

    def _left(self, caller: Caller) -> None:
        with self._lock:
            client = self._clients.pop(caller.id)
            self._count_line(caller)
            del self._callers[caller]
            self._by_ray.discard(caller.id)
        self._hang_up_directly(caller)
        self._answers.forget(client)

    def _serve(self, caller: Caller, head: bytearray) -> None:
        """A request on the line, and its answer."""
        client = self._clients[caller.id]
        longest = max(PIECES, 2 * self._packed.nbytes) if self.owner.gloo else 0
        payload = caller.payload(head, longest)
        try:
            request = decode(head, payload)
        except InvalidArgument as problem:
            raise ConnectionError(str(problem)) from problem
        if request.kind == "direct":
            self._meet_directly(caller, request.number)
            return
        answer = self._answers.answer(client, request)
        self._count_rows("gloo", request, answer)
        self._tell(caller, answer)

    def _tell(self, caller: Caller, answer: Message) -> None:
        payload, direct = payload_of(answer), self._directs.get(caller)
        if payload is None or not payload.is_cuda or direct is None:
            caller.answer(answer.number, head_of(answer, payload), None if payload is None else payload.cpu())
            return
        self._count("nccl_out", payload.numel())
        caller.answer(answer.number, head_of(answer, payload, direct=True))
        try:
            direct.send(payload)
        except PeerLost as problem:  # while the line holds: the client wishes for another connection, and repeats
            log.info("%s: %s", self.owner, str(problem))
            self._hang_up_directly(caller)

    def _meet_directly(self, caller: Caller, number: int) -> None:
        """The client makes its end of a connection from GPU to GPU at the same time."""

        def say(address: bytes) -> None:
            caller.answer(number, head_of(Message("done", number, {"address": address.hex()}), None))

        self._hang_up_directly(caller)
        if self._gpu is None or self.owner.transport != "nccl":
            problem = InvalidArgument("this owner's rows do not lie on a GPU from which NCCL could send them")
            caller.answer(number, head_of(failed(number, problem), None))
            return
        try:
            self._directs[caller] = Direct(Introduction(say=say), nccl.OWNER, self._gpu)
        except PeerLost as problem:
            log.info("%s: %s", self.owner, str(problem))
            caller.answer(number, head_of(failed(number, problem), None))

    def _hang_up_directly(self, caller: Caller) -> None:
        direct = self._directs.pop(caller, None)
        if direct is not None:
            direct.close()

    # ------------------------------------------------------------------ Ray
    def exchange(self, identity: bytes, head: bytes, array: Bytes | None) -> tuple[bytes, Bytes | None]:
        """A request whose payload, and that of the answer, go through Ray."""
        client = self._clients.get(identity)
        self._count("ray_in", len(head) + (0 if array is None else array.nbytes))
        try:
            request = decode(head, to_tensor(array))
            if client is None:
                raise ConnectionError("the line of this client has ended")
            self._by_ray.add(identity)
            answer = self._answers.answer(client, request)
            self._count_rows("ray", request, answer)
        except (MillpondError, OSError) as problem:
            answer = failed(0, problem)
        head, payload = encode(answer)
        self._count("ray_out", len(head) + (0 if payload is None else payload.numel()))
        return head, to_array(payload)

    # ------------------------------------------------------------------ figures
    def _count(self, name: str, number: int) -> None:
        with self._lock:
            self.traffic[name] += number

    def _count_line(self, caller: Caller) -> None:
        """What this caller said and heard since it was last looked at. Under the lock."""
        way = "ray" if caller.id in self._by_ray else "gloo"
        before, now = self._callers[caller], (caller.heard, caller.said)
        self.traffic[f"{way}_in"] += now[0] - before[0]
        self.traffic[f"{way}_out"] += now[1] - before[1]
        self._callers[caller] = now

    def _count_rows(self, way: str, request: Message, answer: Message) -> None:
        for direction, message in (("in", request), ("out", answer)):
            rows = message.tensors.get("rows")
            if rows is not None and message.kind in ("extend", "done"):
                self._count(f"{way}_rows_{direction}", len(rows))

    # ------------------------------------------------------------------ the rest
    def describe(self) -> dict[str, Any]:
        """For people: where this is and listens, who is there, what waits, and what has passed, in bytes."""
        owner = self.owner
        with self._lock:
            clients = [identity.hex()[:8] for identity in self._clients]
            for caller in list(self._callers):
                self._count_line(caller)
        gloo = f"gloo://{owner.node}" if owner.gloo else None
        listens = None if owner.line is None else f"{owner.line[0]}:{owner.line[1]}"
        return {
            "name": owner.name,
            "namespace": owner.namespace,
            "process": owner.pid,
            "node": owner.node,
            "transport": owner.transport,
            "endpoints": {"extend": gloo, "sample": gloo},
            "listens": listens,
            "shared_memory": None if owner.handle is None else owner.handle.path,
            "clients": clients,
            "parked": self._answers.parked,
            "traffic": dict(self.traffic),
        }

    def inspect(self, rows: int) -> dict[str, Any]:
        """What `millpond.replay.inspection.inspect` reports of the buffer, and `describe` under ``remote``."""
        owner, remote = self.owner, self.describe()
        if owner.handle is None:
            report = self._report_private()
        else:
            report = inspect(owner.handle.path, rows=rows)
        for figure, waiting in self._answers.blocked.items():
            report["counters"][figure] = report["counters"].get(figure, 0) + waiting
        return report | {"path": f"ray://{owner.namespace}/{owner.name}", "remote": remote}

    def _report_private(self) -> dict[str, Any]:
        buffer = self._packed.buffer
        return {
            "kind": "private memory",
            "schema": None if buffer.schema is None else describe_schema(buffer.schema),
            "counters": buffer.stats(),
            "sampler": spell(buffer.sampler),
            "episodes": None,
            "rows": [],
        }

    def close(self) -> None:
        """Close the buffer for everybody. Whoever waits hears ``BufferClosed``."""
        with self._listening:
            if self._closed:
                return
            self._closed = True
        self._packed.close()
        self._answers.close()
        if self._listener is not None:
            self._listener.close()


def gpu_of(storage: Any) -> str | None:
    """The device of a storage, where it is a GPU."""
    device = str(storage.device) if type(storage) is TensorStorage else ""
    return device if device.startswith("cuda") else None


class ReplayActor:
    """`Server` as an actor. All calls are short; what a client waits for is pending outside of the actor's slots."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._service: Server | None = None

    def open(self, plan: Plan, cluster: str) -> OwnerAddress | Message:
        """Make the buffer. What goes wrong comes back as a message, to be raised where it is understood."""
        try:
            self._service = Server(plan, node=ray().util.get_node_ip_address(), cluster=cluster)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is the creator's to see
            return failed(0, error)
        note_open(self._service.owner)
        if plan.creator is not None and plan.creator.boot == boot_id() and plan.creator.namespace == pid_namespace():
            # Ray notices a killed driver by who adopts its children, which not every system lets it see.
            when_gone(plan.creator.pid, plan.creator.started, self._end)
        return self._service.owner

    def _end(self) -> None:
        try:
            self.close()
        finally:
            os._exit(0)

    def owner(self) -> OwnerAddress:
        """For a client that knows a name only."""
        return self._ready.owner

    def listen(self) -> OwnerAddress | Message:
        """For a client that needs a line."""
        try:
            return self._ready.listen()
        except (MillpondError, OSError) as error:
            return failed(0, error)

    def exchange(self, identity: bytes, head: bytes, array: Bytes | None) -> tuple[bytes, Bytes | None]:
        return self._ready.exchange(identity, head, array)

    def describe(self) -> dict[str, Any]:
        return self._ready.describe()

    def inspect(self, rows: int) -> dict[str, Any] | Message:
        try:
            return self._ready.inspect(rows)
        except MillpondError as error:
            return failed(0, error)

    def close(self) -> None:
        if self._service is not None:
            note_closed(self._service.owner)
            self._service.close()
            self._service = None

    @property
    def _ready(self) -> Server:
        if self._service is None:
            raise RuntimeError("this owner was not opened")
        return self._service
