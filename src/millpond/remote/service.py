"""The process that owns the buffer: an ordinary shared `ReplayBuffer`, and the ways by which clients reach it."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from millpond.core.errors import MillpondError, PeerLost
from millpond.remote.answering import Answers, Client
from millpond.remote.cluster import ray
from millpond.remote.failures import failed
from millpond.remote.messages import Message, decode, encode, head_of, number_of, payload_nbytes, payload_of
from millpond.remote.owner import Owner, this_host
from millpond.remote.packed import Packed
from millpond.remote.switchboard import Caller, Switchboard
from millpond.remote.transports import nccl
from millpond.remote.transports.gloo import Endpoint, Group
from millpond.remote.transports.nccl import Direct, Introduction
from millpond.remote.transports.ray import Bytes, to_array, to_tensor
from millpond.replay.buffer import ReplayBuffer
from millpond.replay.inspection import describe_schema, inspect
from millpond.replay.rules import spell
from millpond.replay.storage import TensorStorage
from millpond.shm.directory import Owner as Creator
from millpond.shm.identity import boot_id, pid_namespace, when_gone
from millpond.shm.reaper import reap

log = logging.getLogger("millpond")
Part = TypeVar("Part", Group, Endpoint, str)


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


class Service:
    """One owned buffer, and who uses it. Needs no Ray; `ReplayActor` puts it into an actor.

    Each client on a line has one thread here, which ends with the line. Nothing waits for the buffer: see `Answers`.

    Raises what making the buffer raises; then nothing is left behind.
    """

    def __init__(self, plan: Plan, *, node: str, cluster: str) -> None:
        reap()  # what a killed owner left in shared memory on this host
        shared = type(plan.storage) is not TensorStorage  # that one is private memory, on a GPU perhaps
        self._packed = Packed(plan.kind(plan.storage, shared=shared, **plan.arguments))
        self._lock = threading.Lock()
        self._clients: dict[bytes, Client] = {}
        self._groups: dict[Caller, Group] = {}
        self._directs: dict[Caller, Direct] = {}
        self.traffic = {
            "ray_in": 0,
            "ray_out": 0,
            "gloo_in": 0,
            "gloo_out": 0,
            "nccl_out": 0,
        }  # bytes; by Ray the heads too
        self._closed = False
        with contextlib.ExitStack() as undo:
            undo.callback(self._packed.close)
            self._answers = Answers(self._packed)
            self._gpu = gpu_of(plan.storage)
            if plan.transport == "nccl":
                nccl.check(self._gpu, self._packed.buffer._works.rules.device)
            self._endpoint = Endpoint(node) if plan.transport in ("auto", "gloo", "nccl") else None
            self._switchboard = Switchboard(node, came=self._came, serve=self._serve, left=self._left)
            undo.pop_all()
        buffer = self._packed.buffer
        self.owner = Owner(
            name=plan.name,
            namespace=plan.namespace,
            pid=os.getpid(),
            node=node,
            host=this_host(),
            transport=plan.transport,
            line=self._switchboard.address,
            token=self._switchboard.token,
            cluster=cluster,
            gloo=self._endpoint is not None,
            gpu=self._gpu,
            handle=buffer.handle() if buffer.shared else None,
            rules=buffer._works.rules.unbound(),
        )

    # ------------------------------------------------------------------ lines
    def _came(self, caller: Caller) -> None:
        with self._lock:
            self._clients[caller.id] = Client(caller.id, notify=caller.send)

    def _left(self, caller: Caller) -> None:
        with self._lock:
            client = self._clients.pop(caller.id, None)
            self._groups.pop(caller, None)
        self._hang_up_directly(caller)
        if client is not None:
            self._answers.forget(client)

    def _serve(self, caller: Caller, head: bytearray) -> None:
        """A request on the line: its payload, and that of the answer, go through the client's group."""
        client = self._clients[caller.id]
        try:
            nbytes = payload_nbytes(head)
        except MillpondError as problem:  # another version of millpond, or no millpond at all
            raise ConnectionError(str(problem)) from problem
        group = self._groups.get(caller)

        def arrived() -> torch.Tensor:
            received = self._in_use(group).receive(nbytes)
            self._count("gloo_in", nbytes)
            return received

        try:
            request = decode(head, arrived)
            if request.kind == "group":
                self._make_group(caller, request)
                return
            answer = self._answers.answer(client, request)
            self._tell(caller, group, answer)
            if nbytes:
                self._in_use(group).expect(nbytes)  # the next batch is probably as large
        except PeerLost as problem:  # the group broke, while the line holds: the client makes another and repeats
            log.info("%s: %s", self.owner, str(problem))
            self._groups.pop(caller, None)
            self._hang_up_directly(caller)
            caller.send(number_of(head), encode(Message("broken", number_of(head)))[0])

    def _tell(self, caller: Caller, group: Group | None, answer: Message) -> None:
        """Send an answer: the head first, which the client reads while the payload is on its way."""
        payload, direct = payload_of(answer), self._directs.get(caller)
        if payload is None:
            caller.send(answer.number, head_of(answer, None))
        elif payload.is_cuda and direct is not None:
            self._count("nccl_out", payload.numel())
            caller.send(answer.number, head_of(answer, payload, direct=True))
            direct.send(payload)
        else:
            self._count("gloo_out", payload.numel())  # before its client can know
            caller.send(answer.number, head_of(answer, payload))
            self._in_use(group).send(payload.cpu())

    @staticmethod
    def _in_use(part: Part | None) -> Part:
        if part is None:
            raise PeerLost("this owner has no endpoint, or a payload came before its group")
        return part

    def _make_group(self, caller: Caller, request: Message) -> None:
        """The client makes its end at the same time."""
        number = request.number

        def say(address: bytes) -> None:
            caller.send(number, encode(Message("done", number, {"address": address.hex()}))[0])

        if request.fields["direct"]:
            self._directs[caller] = Direct(Introduction(say=say), nccl.OWNER, self._in_use(self._gpu))
            return
        self._groups.pop(caller, None)
        self._hang_up_directly(caller)
        theirs = bytes.fromhex(request.fields["address"])
        self._groups[caller] = self._in_use(self._endpoint).group(theirs, say)

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
            answer = self._answers.answer(client, request)
        except (MillpondError, OSError) as problem:
            answer = failed(0, problem)
        head, payload = encode(answer)
        self._count("ray_out", len(head) + (0 if payload is None else payload.numel()))
        return head, to_array(payload)

    # ------------------------------------------------------------------ the rest
    def describe(self) -> dict[str, Any]:
        """For people: where this is and listens, who is there, what waits, and what has passed, in bytes."""
        owner = self.owner
        with self._lock:
            clients = [identity.hex()[:8] for identity in self._clients]
        gloo = f"gloo://{owner.node}" if owner.gloo else None
        return {
            "name": owner.name,
            "namespace": owner.namespace,
            "process": owner.pid,
            "node": owner.node,
            "transport": owner.transport,
            "endpoints": {"extend": gloo, "sample": gloo},
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
        for figure, side in (("waiting_consumers", "sample"), ("waiting_producers", "extend")):
            report["counters"][figure] = report["counters"].get(figure, 0) + remote["parked"][side]
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
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._packed.close()
        self._answers.close()
        self._switchboard.close()

    def _count(self, name: str, nbytes: int) -> None:
        with self._lock:
            self.traffic[name] += nbytes


def gpu_of(storage: Any) -> str | None:
    """The device of a storage, where it is a GPU."""
    device = str(storage.device) if type(storage) is TensorStorage else ""
    return device if device.startswith("cuda") else None


class ReplayActor:
    """`Service` as an actor. All calls are short; what a client waits for is parked outside of the actor's slots."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._service: Service | None = None

    def open(self, plan: Plan, cluster: str) -> Owner | Message:
        """Make the buffer. What goes wrong comes back as a message, to be raised where it is understood."""
        try:
            self._service = Service(plan, node=ray().util.get_node_ip_address(), cluster=cluster)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is the creator's to see
            return failed(0, error)
        if plan.creator is not None and plan.creator.boot == boot_id() and plan.creator.namespace == pid_namespace():
            # Ray notices a killed driver by who adopts its children, which not every system lets it see.
            when_gone(plan.creator.pid, plan.creator.started, self._end)
        return self._service.owner

    def _end(self) -> None:
        try:
            self.close()
        finally:
            os._exit(0)

    def owner(self) -> Owner:
        """For a client that knows a name only."""
        return self._ready.owner

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
            self._service.close()
            self._service = None

    @property
    def _ready(self) -> Service:
        if self._service is None:
            raise RuntimeError("this owner was not opened")
        return self._service
