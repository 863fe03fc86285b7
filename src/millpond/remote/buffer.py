"""The object that owns a remote buffer: it starts the owner, is a client of it, and ends it."""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from millpond.core.errors import InvalidArgument, InvalidType
from millpond.core.schema import Schema
from millpond.remote import cluster
from millpond.remote.address import check_transport
from millpond.remote.client import ReplayClient
from millpond.remote.server import Plan
from millpond.replay.buffer import ReplayBuffer
from millpond.replay.storage import Storage
from millpond.replay.waiting import check_timeout
from millpond.shm import identity
from millpond.shm.directory import reap
from millpond.shm.ownership import Owner as Creator


class RayReplayBuffer(ReplayClient):
    """A replay buffer in a Ray actor of its own. This object owns it, and is a client of it too.

    Collectors and learners get a ``client()`` each. The buffer ends with ``close()``, with this object, or with this
    process, unless ``ray_options`` says ``lifetime="detached"``. Pickling it gives a client.

    Args:
        storage: a capacity in items, or a storage.
        transport: how clients reach it: ``auto`` (shared memory on the owner's host, ``gloo`` elsewhere), ``shm``,
            ``gloo`` (the network), ``ray``, or ``nccl`` (the network, and samples from the GPU of the storage to that
            of ``device``).
        schema: the fields of an item; otherwise the first write binds it.
        ray_options: of the actor, as ``ray.remote`` takes them: ``resources``, ``name``, ``namespace``, ``lifetime``….
            Without ``num_cpus`` it is 0: a buffer that waits needs no core of its own. Where they ask for no resources
            and no place, the owner starts on this process's node.
        connect_timeout: seconds for the owner to be there, and for a client to reach it.
        kind: ``ReplayBuffer``, or one of its special cases such as ``BlockingReplayBuffer``.
        arguments: those of ``kind``. ``device`` and ``transform`` are applied in the processes that sample.

    Ray is initialised, quietly, where the program has not done so.

    Raises:
        InvalidArgument, InvalidType, Unsatisfiable, OutOfMemory, …: what ``kind`` raises.
        DeadlineExceeded: no owner within ``connect_timeout``.
    """

    def __init__(
        self,
        storage: int | Storage,
        *,
        transport: str = "auto",
        schema: Schema | None = None,
        ray_options: Mapping[str, Any] | None = None,
        connect_timeout: float = 60.0,
        kind: type[ReplayBuffer] = ReplayBuffer,
        **arguments: Any,
    ) -> None:
        check_transport(transport)
        check_timeout(connect_timeout)
        if not (isinstance(kind, type) and issubclass(kind, ReplayBuffer)):
            raise InvalidType(f"kind is ReplayBuffer or a class made from it, not {kind!r}")
        if "shared" in arguments:
            raise InvalidArgument("shared= is not yours to say here: the owner shares its buffer wherever it can")
        if isinstance(arguments.get("seed"), torch.Generator):
            arguments["seed"] = int(torch.randint(2**62, (), generator=arguments["seed"]))
        options = {"name": cluster.new_name(), "namespace": cluster.NAMESPACE, **(ray_options or {})}
        plan = Plan(
            name=options["name"],
            namespace=options["namespace"],
            transport=transport,
            kind=kind,
            storage=storage,
            arguments={**arguments, "schema": schema},
            creator=None if options.get("lifetime") == "detached" else Creator.me(),
        )
        cluster.join(None)
        self._made_in = os.getpid()
        self._actor, owner = cluster.start(plan, options, connect_timeout)
        super().__init__(owner, connect_timeout=connect_timeout, seed=arguments.get("seed"))
        self._stop = weakref.finalize(self, _stop, self._actor, os.getpid())
        self._stop.atexit = False  # see _close_all
        if options.get("lifetime") == "detached":
            self._stop.detach()
        else:
            _to_close.add(self)
            atexit.unregister(_close_all)
            atexit.register(_close_all)  # registered after Ray's own, so called before it

    @property
    def name(self) -> str:
        """Of the owner in Ray: `connect` finds it by this name, in namespace ``millpond`` unless ``ray_options`` says
        another."""
        return self._owner.name

    @property
    def pid(self) -> int | None:
        """The owner's process; None where it is on another machine, or in another container."""
        here = (identity.boot_id(), identity.pid_namespace())
        return self._owner.pid if self._owner.machine == here else None

    def describe(self) -> dict[str, Any]:
        """For people: where the owner is and listens, its clients, traffic and counters."""
        owner = self._owner
        return cluster.describe(owner.name, owner.namespace, owner.cluster, self._timeout)

    def close(self) -> None:
        """Close the buffer for everybody, and end the owner. `stats` keeps answering with the last figures."""
        if self._closed:
            return
        with contextlib.suppress(Exception):  # a dead owner has no last figures
            self._final = self.stats()
        super().close()
        self._stop.detach()
        cluster.stop(self._actor)
        reap()  # an owner that was killed, or cut off, could not remove its files


def connect(
    name: str,
    *,
    namespace: str = cluster.NAMESPACE,
    address: str = "auto",
    transport: str | None = None,
    connect_timeout: float = 60.0,
) -> ReplayClient:
    """A client of a live owner, by the name in its ``ray_options``, from any process that can reach the cluster.

    Where this process is not connected to Ray, it connects to ``address``: a running cluster, by default the one on
    this machine or in ``$RAY_ADDRESS``.

    Raises ``PeerLost`` where there is none, ``DeadlineExceeded`` where it does not answer in time.
    """
    owner = cluster.owner_of(name, namespace, address, connect_timeout)
    return ReplayClient(owner, transport=transport, connect_timeout=connect_timeout)


def _stop(actor: Any, pid: int) -> None:
    if os.getpid() == pid:
        cluster.stop(actor)


_to_close: weakref.WeakSet[RayReplayBuffer] = weakref.WeakSet()


def _close_all() -> None:
    for buffer in list(_to_close):
        if buffer._made_in == os.getpid():
            buffer.close()
