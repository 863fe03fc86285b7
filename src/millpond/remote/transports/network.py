"""Payloads from process to process over the network, behind the heads on the line that a client and its owner share.

The transport is called ``gloo``, after what it was made on once. Gloo ends a process at a malformed byte, keeps what
strangers open, and does not ask who they are, which no owner may do.
"""

from __future__ import annotations

import threading
import time
from functools import partial

from millpond.core.errors import PeerLost
from millpond.remote.connection import COLLECT, Answer, Connection, Slot, Unanswered
from millpond.remote.messages import Message, decode, direct_nbytes, encode
from millpond.remote.transports.nccl import CLIENT, Direct, Introduction
from millpond.shm.interrupts import due

FIRST_WISH = (1 << 64) - 2  # the number of a wish for a connection from GPU to GPU; the next has one less
AGAIN_S = 0.1


class NetworkWire:
    """A client's way to its owner: all by the line, any number of exchanges at a time.

    ``direct``: a GPU to which NCCL brings what lies on the owner's; then one exchange at a time.
    """

    def __init__(self, line: Connection, timeout: float, *, direct: str | None = None) -> None:
        self.transport = "gloo" if direct is None else "nccl"
        self._line, self._timeout, self._wanted = line, timeout, direct
        self._turn = threading.Lock()
        self._wishes = 0
        self._direct = None if direct is None else self._met(direct)

    def exchange(self, request: Message, slot: Slot) -> tuple[Message, bool]:
        """The answer, and whether it was already said that the pending answer is there.

        Raises:
            ConnectionError: it is not known whether the request arrived: repeat it, or find the line ended.
            PeerLost: the line holds, but there is no connection from GPU to GPU.
        """
        if self._wanted is None:
            return self._asked(request, slot, None)
        with self._turn:
            if self._direct is None:
                self._direct = self._met(self._wanted)
            self._line.clear(slot)  # what belongs to a try on another connection came before that one was made
            try:
                return self._asked(request, slot, self._direct)
            except PeerLost as problem:
                self.close()
                raise ConnectionError(str(problem)) from problem
            except BaseException:  # Ctrl-C too leaves a connection with bytes underway: it is of no use any more
                self.close()
                raise

    def tell(self, request: Message) -> None:
        """Send a request, and do not wait for the answer."""
        self._line.ask(encode(request)[0])

    def _asked(self, request: Message, slot: Slot, direct: Direct | None) -> tuple[Message, bool]:
        head, payload = encode(request)
        self._line.ask(head, None if payload is None else payload.cpu())
        said, noticed = self._line.wait(slot, None), False
        while said == COLLECT:
            said, noticed = self._line.wait(slot, None), True
        if not isinstance(said, Answer):
            raise ConnectionError("the line has ended")
        if direct is not None and (nbytes := direct_nbytes(said.head)):
            return decode(said.head, direct.receive(nbytes)), noticed
        return decode(said.head, said.payload), noticed

    # ------------------------------------------------------------------ from GPU to GPU
    def _met(self, device: str) -> Direct:
        """At the same time as the owner, who may be busy for as long as it likes: whether it lives, the line tells."""
        deadline = time.monotonic() + self._timeout
        while True:
            number = FIRST_WISH - self._wishes
            self._wishes += 1
            slot = self._line.open(number)
            try:
                self._line.ask(encode(Message("direct", number))[0])
                return Direct(Introduction(hear=partial(self._hear, slot)), CLIENT, device)
            except PeerLost:
                if self._line.look() is not None:
                    raise ConnectionError("the line has ended") from None
                if time.monotonic() > deadline:
                    raise
                if due():
                    raise Unanswered from None
                time.sleep(AGAIN_S)
            finally:
                self._line.shut(number)

    def _hear(self, slot: Slot) -> bytes:
        said = self._line.wait(slot, None)
        if not isinstance(said, Answer):
            raise ConnectionError("the line has ended")
        answer = decode(said.head, None)
        if answer.kind != "done":
            raise PeerLost("the owner could not make its end of a connection from GPU to GPU")
        return bytes.fromhex(answer.fields["address"])

    def close(self) -> None:
        """Hang up what goes from GPU to GPU."""
        if self._direct is not None:
            self._direct.close()
            self._direct = None
