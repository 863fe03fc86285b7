"""Payloads from process to process, over process groups of two that belong to one client each.

No group here is, or becomes, the default one of ``torch.distributed``. Gloo does not authenticate who connects: this
transport is for networks whose members are trusted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]

from millpond.core.errors import PeerLost
from millpond.remote.line import COLLECT, FIRST_GROUP, Line, Slot
from millpond.remote.messages import SMALL, Message, decode, encode, is_direct, payload_nbytes
from millpond.remote.transports.nccl import CLIENT, OWNER, Direct, Introduction

_AHEAD = 4  # sizes that are expected at a time
PART = 4 << 20  # bytes that are sent, and waited for, at a time; nothing larger is expected
MEETING_S = 3.0  # for two ends that are there to make a group; nothing else can cut it short
_PATIENCE = timedelta(seconds=4)  # for a part whose other side is ready; nothing else can cut such a wait short


class Group:
    """Two processes that send each other bytes. One thread at a time may use an end.

    A payload bears its size as its tag. So memory can be offered for it before it is announced, which saves a trip, and
    what does not fit is never written anywhere. What fails once is broken for good. Raises ``PeerLost``.
    """

    def __init__(self, meeting: Meeting, rank: int, device: Any) -> None:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._threads = [device], 1
        options._timeout = timedelta(seconds=MEETING_S)
        self._peer = CLIENT if rank == OWNER else OWNER
        self._ahead: dict[int, tuple[Any, torch.Tensor]] = {}
        try:
            self._group: Any = ProcessGroupGloo(meeting, rank, 2, options)
        except RuntimeError as problem:
            raise PeerLost(f"no process group within {MEETING_S:g} s: {_first_line(problem)}") from problem

    def send(self, payload: torch.Tensor) -> None:
        """``payload``: uint8 ``[n]``, n > 0. Returns when the memory may be used again."""
        self.begin(payload)()

    def begin(self, payload: torch.Tensor) -> Callable[[], None]:
        """As `send`, but returns while the last part is underway: what is returned waits for it.

        Not needed where the other end has answered, for then everything has arrived.
        """
        *before, last = payload.split(PART)
        try:
            for part in before:
                self._group.send([part], self._peer, part.numel()).wait(_PATIENCE)
            work = self._group.send([last], self._peer, last.numel())
        except RuntimeError as problem:
            raise self._unsent(payload, problem) from problem

        def finish() -> None:
            try:
                work.wait(_PATIENCE)
            except RuntimeError as problem:
                raise self._unsent(payload, problem) from problem

        return finish

    @staticmethod
    def _unsent(payload: torch.Tensor, problem: RuntimeError) -> PeerLost:
        return PeerLost(f"{payload.numel()} bytes could not be sent: {_first_line(problem)}")

    def expect(self, nbytes: int, *, pinned: bool = False) -> None:
        """Offer memory for a payload of this size, which may come soon, or late, or never."""
        if 0 < nbytes <= PART and nbytes not in self._ahead and len(self._ahead) < _AHEAD:
            try:
                self._ahead[nbytes] = self._offer(torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned))
            except RuntimeError as problem:
                raise PeerLost(f"nothing can come any more: {_first_line(problem)}") from problem

    def receive(self, nbytes: int, *, pinned: bool = False) -> torch.Tensor:
        """The next payload of ``nbytes`` > 0 bytes: uint8 ``[nbytes]``, the caller's own."""
        try:
            if nbytes in self._ahead:
                return self._arrived(nbytes)
            payload = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
            for part in payload.split(PART):
                if part.numel() in self._ahead:
                    part.copy_(self._arrived(part.numel()))
                else:
                    self._offer(part)[0].wait(_PATIENCE)
            return payload
        except RuntimeError as problem:
            raise PeerLost(f"{nbytes} bytes did not come: {_first_line(problem)}") from problem

    def _offer(self, memory: torch.Tensor) -> tuple[Any, torch.Tensor]:
        return self._group.recv([memory], self._peer, memory.numel()), memory

    def _arrived(self, nbytes: int) -> torch.Tensor:
        work, memory = self._ahead.pop(nbytes)
        work.wait(_PATIENCE)
        return memory

    def close(self) -> None:
        """Hang up. What the other end still sends or awaits fails at once."""
        self._ahead.clear()
        self._group = None


class Meeting(Store):
    """Where the two ends of a group learn each other's addresses. It is no server: what one end says, the line carries
    to the other, which is therefore the one that knows the token; and whoever waits here hears of a death."""

    def __init__(self, rank: int, *, say: Callable[[bytes], None], hear: Callable[[], bytes]) -> None:
        super().__init__()
        self._own, self._say, self._hear = str(rank), say, hear
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # bytes come, whatever the stubs say
        """Gloo names its keys by rank, under the index of the device."""
        if key.rpartition("/")[2] == self._own:
            self._known[key] = bytes(value)
            self._say(self._known[key])

    def get(self, key: str) -> bytes:
        if key not in self._known:
            self._known[key] = self._hear()
        return self._known[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)


class Endpoint:
    """An owner's side: it listens before any client comes, so that no payload ever has to go another way."""

    def __init__(self, host: str) -> None:
        self._device = ProcessGroupGloo.create_device(hostname=host)

    def group(self, theirs: bytes, say: Callable[[bytes], None]) -> Group:
        """The owner's end of a new group with the client that said where it listens. Raises ``PeerLost``."""
        return Group(Meeting(OWNER, say=say, hear=lambda: theirs), OWNER, self._device)


class GlooWire:
    """A client's way to its owner: heads by the line, payloads by a group of its own. One exchange at a time.

    ``pinned``: receive into memory from which a GPU copies faster. ``direct``: a GPU to which NCCL brings what lies on
    the owner's. Raises ``PeerLost`` where no group can be made.
    """

    def __init__(self, line: Line, timeout: float, *, pinned: bool = False, direct: str | None = None) -> None:
        self.transport = "gloo" if direct is None else "nccl"
        self._line, self._timeout, self._pinned = line, timeout, pinned
        self._wanted = direct
        self._direct: Direct | None = None
        self._device = ProcessGroupGloo.create_device(hostname=line.local_host)
        self._turn = threading.Lock()
        self._groups = 0
        self._group: Group | None = None
        self._group = self._make_group()

    def exchange(self, request: Message, slot: Slot, expected: int) -> tuple[Message, bool]:
        """The answer, and whether it was already said that the parked answer is there.

        ``expected`` is how many bytes of payload the answer will probably have.

        Raises:
            ConnectionError: it is not known whether the request arrived: repeat it, or find the line ended.
            PeerLost: the line holds, but no group can be made.
        """
        head, payload = encode(request)
        with self._turn:
            if self._group is None:
                self._group = self._make_group()
            self._line.clear(slot)  # what belongs to a try on another group came before that one was made
            try:
                return self._through(self._group, head, payload, slot, expected)
            except PeerLost as problem:
                self.close()
                raise ConnectionError(str(problem)) from problem
            except BaseException:  # Ctrl-C too leaves a group with bytes underway: it is of no use any more
                self.close()
                raise

    def _through(
        self, group: Group, head: bytes, payload: torch.Tensor | None, slot: Slot, expected: int
    ) -> tuple[Message, bool]:
        self._line.ask(head)
        underway = None if payload is None else group.begin(payload.cpu())
        if expected > SMALL:
            group.expect(expected, pinned=self._pinned)
        said, noticed = self._line.wait(slot, None), False
        while said == COLLECT:
            said, noticed = self._line.wait(slot, None), True
        if said is None:
            raise ConnectionError("the line has ended")
        nbytes = payload_nbytes(said)
        direct = self._direct if self._direct is not None and is_direct(said) else None
        answer = decode(said, lambda: direct.receive(nbytes) if direct else group.receive(nbytes, pinned=self._pinned))
        if answer.kind == "broken":
            raise ConnectionError("the group broke")
        if underway is not None:
            underway()  # it has arrived
        return answer, noticed

    def _make_group(self) -> Group:
        """At the same time as the owner, who may be busy for as long as it likes: whether it lives, the line tells."""
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                group = self._meet()
                if self._wanted is not None:
                    self._direct = self._meet_directly(self._wanted)
                return group
            except PeerLost:
                if self._line.look() is not None:
                    raise ConnectionError("the line has ended") from None
                if time.monotonic() > deadline:
                    raise

    def _meet(self) -> Group:
        number, slot = self._wish()
        try:
            say = partial(self._say, number)
            return Group(Meeting(CLIENT, say=say, hear=partial(self._hear, slot)), CLIENT, self._device)
        finally:
            self._line.shut(number)

    def _meet_directly(self, device: str) -> Direct:
        number, slot = self._wish()
        try:
            self._say(number, b"", direct=True)
            return Direct(Introduction(hear=partial(self._hear, slot)), CLIENT, device)
        finally:
            self._line.shut(number)

    def _wish(self) -> tuple[int, Slot]:
        number = FIRST_GROUP - self._groups
        self._groups += 1
        return number, self._line.open(number)

    def _say(self, number: int, address: bytes, *, direct: bool = False) -> None:
        fields = {"address": address.hex(), "direct": direct}
        self._line.ask(encode(Message("group", number, fields))[0])

    def _hear(self, slot: Slot) -> bytes:
        said = self._line.wait(slot, None)
        if said is None:
            raise ConnectionError("the line has ended")
        answer = decode(said, None)
        if answer.kind == "broken":
            raise PeerLost("the owner could not make its end of a group")
        return bytes.fromhex(answer.fields["address"])

    def close(self) -> None:
        """Hang up the group."""
        if self._direct is not None:
            self._direct.close()
            self._direct = None
        if self._group is not None:
            self._group.close()
            self._group = None


def _first_line(problem: Exception) -> str:
    return str(problem).partition("\n")[0]
