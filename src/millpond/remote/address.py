"""What a client must know of an owner to reach it, as plain data that travels with the client."""

from __future__ import annotations

import os
from dataclasses import dataclass

from millpond.core.errors import InvalidArgument
from millpond.replay.buffer import Handle
from millpond.replay.config import BufferConfig

HOST = "MILLPOND_HOST"
TRANSPORTS = ("auto", "shm", "ray", "gloo", "nccl")

Address = tuple[str, int]


def this_host() -> str:
    """The name of this process's host, "" by default. Where names differ hosts differ, whatever they share."""
    return os.environ.get(HOST, "")


def check_transport(transport: str) -> str:
    """Raises ``InvalidArgument`` for what is none."""
    if transport not in TRANSPORTS:
        raise InvalidArgument(f"transport is one of {', '.join(TRANSPORTS)}; got {transport!r}")
    return transport


@dataclass(frozen=True)
class OwnerAddress:
    """One owner. ``line`` is where it listens, None where it did not yet, ``gloo`` says whether payloads may come there
    too, ``machine`` is its boot and its namespace of processes, ``gpu`` is the storage's device where it is one,
    ``handle`` is how its own host finds the buffer, and ``cluster`` is the address of Ray's head."""

    name: str
    namespace: str
    pid: int
    node: str
    host: str
    machine: tuple[str, int]
    transport: str
    line: Address | None
    token: bytes
    cluster: str
    gloo: bool
    gpu: str | None
    handle: Handle | None
    rules: BufferConfig

    def reached_by(self, transport: str) -> str:
        """This transport, and where it leads."""
        if transport == "shm" and self.handle is not None:
            return f"shm at {self.handle.path}"
        return f"{transport} at {self.node if self.line is None else f'{self.line[0]}:{self.line[1]}'}"

    def __str__(self) -> str:
        return f"the owner of replay {self.name!r} (process {self.pid} on {self.node})"

    def __repr__(self) -> str:
        return f"Owner({self.name!r}, process {self.pid} on {self.node})"  # the token is nobody's business
