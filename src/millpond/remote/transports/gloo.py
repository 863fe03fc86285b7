"""Payloads from process to process, over process groups of two that belong to one client each.

No group here is, or becomes, the default one of ``torch.distributed``. Gloo and its store do not authenticate who
connects: this transport is for networks whose members are trusted.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]

from millpond.core.errors import PeerLost
from millpond.remote.line import Line, Slot
from millpond.remote.messages import Message, decode, encode, payload_nbytes

OWNER, CLIENT = 0, 1  # ranks
_TAG = 0
_PART = 4 << 20  # bytes that are sent, and waited for, at a time
_PATIENCE = timedelta(seconds=5)  # for a part whose other side is ready; nothing else can cut such a wait short


class Group:
    """Two processes that send each other bytes, in order. One thread at a time may use an end.

    What fails once is broken for good. Raises ``PeerLost``.
    """

    def __init__(self, store: Store, prefix: str, rank: int, device: Any, timeout: float) -> None:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._threads = [device], 1
        options._timeout = timedelta(seconds=timeout)
        self._peer = CLIENT if rank == OWNER else OWNER
        self.sent = self.received = 0  # bytes
        try:
            self._group: Any = ProcessGroupGloo(PrefixStore(prefix, store), rank, 2, options)
        except RuntimeError as problem:
            raise PeerLost(f"no process group within {timeout:g} s: {_first_line(problem)}") from problem

    def send(self, payload: torch.Tensor) -> None:
        """``payload``: uint8 ``[n]``, n > 0. Returns when the memory may be used again."""
        try:
            for part in payload.split(_PART):
                self._group.send([part], self._peer, _TAG).wait(_PATIENCE)
        except RuntimeError as problem:
            raise PeerLost(f"{payload.numel()} bytes could not be sent: {_first_line(problem)}") from problem
        self.sent += payload.numel()

    def receive(self, nbytes: int, *, pinned: bool = False) -> torch.Tensor:
        """The next ``nbytes`` > 0 bytes: uint8 ``[nbytes]``."""
        payload = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        try:
            for part in payload.split(_PART):
                self._group.recv([part], self._peer, _TAG).wait(_PATIENCE)
        except RuntimeError as problem:
            raise PeerLost(f"{nbytes} bytes did not come: {_first_line(problem)}") from problem
        self.received += nbytes
        return payload

    def close(self) -> None:
        """Hang up. What the other end still sends or awaits fails at once."""
        self._group = None


class Endpoint:
    """An owner's side: open before any client comes, so that no payload ever has to go another way."""

    def __init__(self, host: str) -> None:
        self._lock = threading.Lock()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._device = ProcessGroupGloo.create_device(hostname=host)
        self.address: tuple[str, int] = (host, self._store.port)

    def group(self, prefix: str, timeout: float) -> Group:
        """The owner's end of a new group; the client makes the other end at the same time. Raises ``PeerLost``."""
        store = connect(self.address, timeout)  # one of its own: who waits in a store keeps others out of it
        return Group(store, prefix, OWNER, self._device, timeout)

    def forget(self, prefix: str) -> None:
        """Free what a group left in the store. Only when its client is gone: Gloo crashes over a name that vanishes."""
        with self._lock:
            for rank in (OWNER, CLIENT):
                self._store.delete_key(f"{prefix}/0/{rank}")  # where Gloo puts the address of this rank


def connect(address: tuple[str, int], timeout: float) -> TCPStore:
    """A store at which the two ends of a group find each other. Raises ``PeerLost``."""
    try:
        return TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    except RuntimeError as problem:
        raise PeerLost(f"no endpoint at {address[0]}:{address[1]}: {_first_line(problem)}") from problem


def join(address: tuple[str, int], prefix: str, own_host: str, timeout: float) -> Group:
    """A client's end of a new group. Raises ``PeerLost``."""
    device = ProcessGroupGloo.create_device(hostname=own_host)
    return Group(connect(address, timeout), prefix, CLIENT, device, timeout)


class GlooWire:
    """A client's way to its owner: heads by the line, payloads by a group of its own. One exchange at a time.

    Raises ``PeerLost`` where no group can be made.
    """

    def __init__(self, line: Line, address: tuple[str, int], timeout: float, *, pinned: bool = False) -> None:
        self._line, self._address, self._timeout, self._pinned = line, address, timeout, pinned
        self._turn = threading.Lock()
        self._groups = 0
        self._group: Group | None = None
        self._group = self._make_group()

    def exchange(self, request: Message, slot: Slot) -> tuple[Message, bool]:
        """The answer, and whether it was already said that the parked answer is there.

        Raises ``ConnectionError`` where it is not known whether the request arrived: repeat it, or find the line ended.
        """
        head, payload = encode(request)
        with self._turn:
            if self._group is None:
                self._group = self._make_group()
            group = self._group
            try:
                self._line.ask(head)
                if payload is not None:
                    group.send(payload.cpu())
                said, noticed = slot.get(), False
                while said == b"":
                    said, noticed = slot.get(), True
                if said is None:
                    raise ConnectionError("the line has ended")
                nbytes = payload_nbytes(said)
                answer = decode(said, group.receive(nbytes, pinned=self._pinned) if nbytes else None)
                if answer.kind == "broken":
                    raise ConnectionError("the group broke")
                return answer, noticed
            except BaseException:  # Ctrl-C too leaves a group with bytes underway: it is of no use any more
                self.close()
                raise

    def _make_group(self) -> Group:
        self._groups += 1
        prefix = f"{self._line.id.hex()}-{self._groups}"
        self._line.ask(encode(Message("group", fields={"prefix": prefix}))[0])
        return join(self._address, prefix, self._line.local_host, self._timeout)

    def close(self) -> None:
        """Hang up the group."""
        if self._group is not None:
            self._group.close()
            self._group = None


def _first_line(problem: Exception) -> str:
    return str(problem).partition("\n")[0]
