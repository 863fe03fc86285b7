"""From what is known of an owner to the buffer as this process can use it."""

from __future__ import annotations

from millpond.core.errors import NotShareable, PeerLost
from millpond.core.schema import Schema
from millpond.remote import cluster
from millpond.remote.line import Line
from millpond.remote.owner import Owner
from millpond.remote.proxy import Proxy
from millpond.remote.session import Session, Wire
from millpond.remote.transports import nccl, shm
from millpond.remote.transports.gloo import GlooWire
from millpond.remote.transports.ray import RayWire
from millpond.replay.buffer import ReplayBuffer
from millpond.replay.rules import generator

Backend = ReplayBuffer | Proxy


def choose(owner: Owner, transport: str, host: str) -> str:
    """``auto``: shared memory on the owner's host, else its Gloo endpoint, else Ray.

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


def reach(owner: Owner, transport: str, *, seed: int | None, timeout: float) -> Backend:
    """The buffer by this transport. Raises ``PeerLost`` where the owner is gone or cannot be reached."""
    if transport == "shm":
        buffer = shm.attach(owner)
        if seed is not None:
            buffer._works.engine.random.torch = generator(seed)
        return buffer
    try:
        line = Line(owner.line, owner.token, timeout=timeout)
    except PeerLost as problem:
        raise PeerLost(f"{owner} is gone, or cannot be reached: {problem}") from problem
    try:
        return Proxy(Session(owner, line, _wire(owner, transport, line, timeout)))
    except BaseException as problem:
        line.close()
        if isinstance(problem, ConnectionError) and not isinstance(problem, PeerLost):
            raise PeerLost(f"{owner} is gone, or cannot be reached: {problem}") from problem
        raise


def _wire(owner: Owner, transport: str, line: Line, timeout: float) -> Wire:
    if transport == "ray":
        return RayWire(cluster.find(owner.name, owner.namespace, owner.cluster), line)
    if not owner.gloo:
        raise PeerLost(f"{owner} has no Gloo endpoint: it was made with transport={owner.transport!r}")
    device = owner.rules.device
    if transport == "nccl":
        nccl.check(owner.gpu, device)
        return GlooWire(line, timeout, direct=device)
    return GlooWire(line, timeout, pinned=device is not None and device.startswith("cuda"))


def check_schema(backend: Backend, schema: Schema) -> None:
    """Bind what a client says that it will write. Raises ``SchemaMismatch``, naming the difference."""
    if isinstance(backend, Proxy):
        backend.bind(schema)
    else:
        from millpond.remote.packed import Packed

        Packed(backend).bind(schema)
