"""From what is known of an owner to the buffer as this process can use it."""

from __future__ import annotations

from millpond.core.errors import BufferClosed, MillpondError, NotShareable, PeerLost
from millpond.core.schema import Schema
from millpond.remote import cluster
from millpond.remote.address import OwnerAddress
from millpond.remote.backend import RemoteBackend
from millpond.remote.connection import Connection
from millpond.remote.session import Session, Wire
from millpond.remote.transports import nccl, shm
from millpond.remote.transports.network import NetworkWire
from millpond.remote.transports.ray import RayWire
from millpond.replay.buffer import ReplayBuffer
from millpond.replay.config import generator

Backend = ReplayBuffer | RemoteBackend


def choose(owner: OwnerAddress, transport: str, host: str) -> str:
    """``auto``: shared memory on the owner's host, else the network, else Ray.

    Raises ``NotShareable`` where ``shm`` is asked for, and cannot be; the message says why.
    """
    if transport not in ("auto", "shm"):
        return transport
    reason = shm.why_not(owner, host)
    if reason is None:
        return "shm"
    if transport == "shm":
        raise NotShareable(f"transport='shm': {reason}; transport='auto' finds another way")
    return "gloo" if owner.gloo else "ray"


def reach(owner: OwnerAddress, transport: str, *, seed: int | None, timeout: float) -> Backend:
    """The buffer by this transport.

    Raises ``BufferClosed`` where it was closed, ``PeerLost`` where the owner is gone or cannot be reached.
    """
    if transport == "shm":
        try:
            buffer = shm.attach(owner)
        except (NotShareable, PeerLost) as problem:
            raise (
                BufferClosed(f"{owner} has closed the buffer") if cluster.was_closed(owner) else problem
            ) from problem
        if seed is not None:
            buffer._local.engine.random.torch = generator(seed)
        return buffer
    assert owner.line is not None, "listening() comes first"
    try:
        device = owner.rules.device
        pinned = transport == "gloo" and device is not None and device.startswith("cuda")
        line = Connection(owner.line, owner.token, timeout=timeout, pinned=pinned)
    except PeerLost as problem:
        raise _gone(owner, problem) from problem
    try:
        return RemoteBackend(Session(owner, line, _wire(owner, transport, line, timeout)))
    except BaseException as problem:
        line.close()
        if isinstance(problem, ConnectionError):
            raise _gone(owner, problem) from problem
        raise


def listening(owner: OwnerAddress, timeout: float) -> OwnerAddress:
    """The same owner, once it listens: it does as soon as somebody needs it. Raises as `reach` does."""
    if owner.line is not None:
        return owner
    if cluster.was_closed(owner):  # asked first: else this process might connect to a cluster in vain
        raise BufferClosed(f"{owner} has closed the buffer")
    try:
        return cluster.listening(owner, timeout)
    except PeerLost as problem:
        raise _gone(owner, problem) from problem


def unreachable(owner: OwnerAddress, problem: MillpondError) -> MillpondError:
    """Why shared memory cannot be reached, if there is more to say than ``problem`` does."""
    if cluster.was_closed(owner):
        return BufferClosed(f"{owner} has closed the buffer")
    return PeerLost(f"{owner} is gone") if shm.left(owner) else problem


def _gone(owner: OwnerAddress, problem: Exception) -> MillpondError:
    if cluster.was_closed(owner):
        return BufferClosed(f"{owner} has closed the buffer")
    return PeerLost(f"{owner} is gone, or cannot be reached: {problem}")


def _wire(owner: OwnerAddress, transport: str, line: Connection, timeout: float) -> Wire:
    if transport == "ray":
        return RayWire(cluster.find(owner.name, owner.namespace, owner.cluster), line)
    if not owner.gloo:
        raise PeerLost(f"{owner} takes no payloads by the network: it was made with transport={owner.transport!r}")
    if transport == "nccl":
        device = owner.rules.device
        nccl.check(owner.gpu, device)
        return NetworkWire(line, timeout, direct=device)
    return NetworkWire(line, timeout)


def check_schema(backend: Backend, schema: Schema) -> None:
    """Bind what a client says that it will write. Raises ``SchemaMismatch``, naming the difference."""
    if isinstance(backend, RemoteBackend):
        backend.bind(schema)
    else:
        from millpond.remote.packed import Packed

        Packed(backend).bind(schema)
