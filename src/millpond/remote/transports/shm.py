"""On the owner's host: the buffer itself, through shared memory. Neither Ray nor the owner takes part in a call."""

from __future__ import annotations

from pathlib import Path

from millpond.core.errors import NotShareable
from millpond.remote.address import OwnerAddress
from millpond.replay.buffer import ReplayBuffer
from millpond.shm import identity
from millpond.shm.ownership import Owner as Mark


def why_not(owner: OwnerAddress, host: str) -> str | None:
    """None where this process is on the owner's host, which it proves by reading what the owner left there.

    The mark holds boot, pid namespace, process and start time; its folder's name holds a random number. So no other
    machine and no other container has it, though a network file system may show it: then the boot differs.
    """
    if owner.handle is None:
        return "the buffer does not lie in shared memory"
    if host != owner.host:
        return f"this process is on host {host!r}, the owner on {owner.host!r}"
    mark = Mark.read(Path(owner.handle.path))
    if mark is None:
        return f"{owner.handle.path} is not on this host"
    if mark.boot != identity.boot_id():
        return f"{owner.handle.path} was made on another machine"
    if mark.namespace != identity.pid_namespace():
        return f"{owner.handle.path} was made in another container"
    if mark.pid != owner.pid:
        return f"{owner.handle.path} belongs to process {mark.pid}"
    return None


def left(owner: OwnerAddress) -> bool:
    """Is this process where the owner was, and nothing of it there any more?"""
    here = (identity.boot_id(), identity.pid_namespace())
    return owner.handle is not None and owner.machine == here and Mark.read(Path(owner.handle.path)) is None


def attach(owner: OwnerAddress) -> ReplayBuffer:
    """The owner's buffer in this process. Raises ``PeerLost`` or ``NotShareable`` where it is gone or not reachable."""
    if owner.handle is None:
        raise NotShareable("the buffer does not lie in shared memory")
    return ReplayBuffer.attach(owner.handle)
