"""The owner's answers: one function for each thing that a client can ask, whichever way the request came."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from millpond.core.errors import DeadlineExceeded, InvalidArgument, OutOfMemory
from millpond.core.schema import Schema
from millpond.remote import requests
from millpond.remote.messages import Message, failed
from millpond.remote.packed import Packed, Side, Spool
from millpond.remote.pending import Call, Ledger, PendingCalls
from millpond.replay import checkpoint, container
from millpond.replay.batch import SampledBatch
from millpond.replay.config import FREELY, check_room
from millpond.replay.samplers.protocol import Ints

Notify = Callable[[int], None]
NO_SLOTS = torch.empty(0, dtype=torch.int64)
HELD = 1 << 30  # bytes of writes that wait, of all clients together
ANSWER = 1 << 28  # bytes that an answer may have in any case; else as much as the buffer holds
STATE = 1 << 30  # bytes that a checkpoint may have in any case
UNSETTLED = 1 << 16  # batches that a client may have, and not have settled


@dataclass(slots=True)
class Client:
    """One client, as its owner knows it. ``notify(number)`` says that the answer to a pending request is there."""

    id: bytes
    notify: Notify
    ledger: Ledger = field(default_factory=Ledger)
    handed: dict[int, tuple[SampledBatch, bool]] = field(default_factory=dict)  # by request: batches that may come back
    outgoing: Spool | None = None
    incoming: Spool | None = None


class Handlers:
    """Answers requests to one buffer, from any number of clients and threads. Never raises, and never waits for the
    buffer to become ready: a request that would have to is pending, and its client told when it is answered."""

    def __init__(self, packed: Packed) -> None:
        self._packed = packed
        self._lots: dict[Side, PendingCalls] = {
            side: PendingCalls(side, packed.changes(side)) for side in ("sample", "extend")
        }
        self._sides: dict[str, Side] = {
            "extend": "extend",
            "sample": "sample",
            "until_sample": "sample",
            "until_extend": "extend",
        }
        self._held = 0  # bytes of writes that are pending
        self._counting = threading.Lock()
        self._once = {"extend", "give_back", "update", "update_priority", "empty", "load"}  # must not happen twice
        if packed.consuming:
            self._once.add("sample")  # an item that was delivered is gone
        buffer = packed.buffer
        self._kinds: dict[str, Callable[[Client, Message], Message]] = {
            "extend": self._extend,
            "sample": self._sample,
            "until_sample": self._until,
            "until_extend": self._until,
            "bind": self._bind,
            "counts": self._counts,
            "can_sample": self._can_sample,
            "stats": lambda _, asked: _done(stats=self.stats()),
            "explain": lambda _, asked: _done(text=buffer.explain(asked.fields["op"], asked.fields["n"])),
            "receipt": lambda _, asked: _done(receipt=buffer.receipt(asked.fields["line"])),
            "epoch_over": lambda _, asked: _done(over=packed.epoch_over(asked.fields["n"])),
            "peek": self._peek,
            "pick": self._pick,
            "give_back": self._give_back,
            "empty": self._empty,
            "update_priority": self._update_priority,
            "update": self._update,
            "state": self._state,
            "fetch": self._fetch,
            "fetched": self._fetched,
            "offer": self._offer,
            "bring": self._bring,
            "load": self._load,
        }

    # ------------------------------------------------------------------ one request
    def answer(self, client: Client, request: Message) -> Message:
        """The answer, under the number of the request."""
        try:
            requests.check(request)
            for number in list(client.handed):
                if number < request.settled:
                    client.handed.pop(number, None)
            if request.kind in ("collect", "withdraw"):
                return self._about(client, request)
            known = client.ledger.begin(request)
            return self._carried_out(client, request) if known is None else known
        except Exception as error:  # noqa: BLE001  # whatever it is, it is the client's to see
            return failed(request.number, error)

    def _carried_out(self, client: Client, request: Message) -> Message:
        answer = None
        try:
            answer = self._attempt(client, request)
            if answer is None:
                return self._park(client, request)
            return answer
        finally:
            if answer is not None:
                client.ledger.end(request.number, answer if request.kind in self._once else None)
            else:
                client.ledger.leave(request.number)

    def _attempt(self, client: Client, request: Message) -> Message | None:
        """None: not yet, and the client would wait."""
        try:
            answer = self._kinds[request.kind](client, request)
        except DeadlineExceeded as error:
            return None if request.fields.get("wait") else failed(request.number, error)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is the client's to see
            return failed(request.number, error)
        return Message(answer.kind, request.number, answer.fields, answer.tensors)

    def _park(self, client: Client, request: Message) -> Message:
        side, ledger, number = self._sides[request.kind], client.ledger, request.number
        nbytes = sum(tensor.numel() * tensor.itemsize for tensor in request.tensors.values())
        if not self._hold(nbytes):
            raise OutOfMemory(
                f"{request.kind}({request.fields['n']}): writes of {self._held} bytes wait at the owner, and at "
                f"most {HELD} may; wait_until_writable() waits without sending them"
            )
        parked, advisory = False, request.kind.startswith("until")
        try:
            if not advisory:
                self._packed.count_block(side)
            ledger.park(number)
            parked = True
        finally:
            if not parked:
                self._hold(-nbytes)

        def left() -> None:
            self._hold(-nbytes)

        def answered(answer: Message) -> None:
            ledger.end(number, answer)
            client.notify(number)

        need, exempt = request.fields["n"], request.fields["exempt"]
        attempt = functools.partial(self._attempt, client, request)
        self._lots[side].park(Call(client.id, number, need, exempt, attempt, answered, advisory, left))
        return ledger.look(number) or Message("parked", number)

    def _hold(self, nbytes: int) -> bool:
        """Note so many bytes more, or less, of writes that wait. False: that would be too many."""
        with self._counting:
            if nbytes > 0 and self._held + nbytes > HELD:
                return False
            self._held += nbytes
            return True

    def _about(self, client: Client, request: Message) -> Message:
        """Collect the answer to a pending request, or take the request back."""
        number = request.fields["number"]
        if request.kind == "withdraw" and any(pending.withdraw(client.id, number) for pending in self._lots.values()):
            client.ledger.end(number, None)
            return Message("withdrawn", request.number, {"text": self._explained(request)})
        found = client.ledger.look(number)
        if found is None:
            raise InvalidArgument(f"request {number} does not wait here")
        return Message(found.kind, request.number, found.fields, found.tensors)

    def _explained(self, request: Message) -> str:
        try:
            return self._packed.buffer.explain(request.fields["op"], request.fields["n"])
        except Exception as error:  # noqa: BLE001  # an explanation that fails must not hide that the call was withdrawn
            return str(error)

    # ------------------------------------------------------------------ what may have to wait
    def _extend(self, client: Client, asked: Message) -> Message:
        fields, receipt = asked.fields, asked.fields["receipt"]
        slots = self._packed.put(
            asked.tensors["rows"],
            fields["schema"],
            priority=asked.tensors.get("priority"),
            receipt=None if receipt is None else (receipt[0], receipt[1]),
            exempt=fields["exempt"],
            who=fields["who"],
        )
        if slots is None:
            return Message("done", tensors={"slots": NO_SLOTS})
        start = run_of(slots, self._packed.buffer.capacity)
        if start is None:
            return Message("done", tensors={"slots": short(slots)})
        return _done(start=start, n=len(slots))

    def _sample(self, client: Client, asked: Message) -> Message:
        n, exempt = asked.fields["n"], asked.fields["exempt"]
        self._check_size(n)
        if len(client.handed) >= UNSETTLED:
            raise InvalidArgument(f"{len(client.handed)} batches were handed out, and none of them was settled")
        taken = self._packed.take(n, wait=asked.fields["patient"], exempt=exempt)
        client.handed[asked.number] = self._packed.noted(taken, n), exempt
        return _taken(taken)

    def _check_size(self, n: int) -> None:
        """Raises ``OutOfMemory`` for a batch that no answer can hold."""
        if n > FREELY:
            check_room(n, self._packed.buffer.schema)
        most = max(ANSWER, self._packed.nbytes)
        nbytes = n * self._packed.row_nbytes
        if nbytes > most:
            raise OutOfMemory(f"{n} items are {nbytes} bytes; an answer of this owner has at most {most}")

    def _until(self, client: Client, asked: Message) -> Message:
        buffer, n = self._packed.chosen(asked.fields["exempt"]), asked.fields["n"]
        wait = buffer.wait_until_sampleable if asked.kind == "until_sample" else buffer.wait_until_writable
        if not wait(n, timeout=0):
            raise DeadlineExceeded(buffer.explain(asked.kind.removeprefix("until_"), n))
        return _done()

    # ------------------------------------------------------------------ what never waits
    def _bind(self, client: Client, asked: Message) -> Message:
        offered = asked.fields["schema"]
        schema = self._packed.buffer.schema if offered is None else self._packed.bind(Schema.from_json(offered))
        return _done(schema=None if schema is None else schema.to_json())

    def _counts(self, client: Client, asked: Message) -> Message:
        buffer = self._packed.buffer
        return _done(write_count=buffer.write_count, storage_size=buffer.storage_size, size=len(buffer))

    def _can_sample(self, client: Client, asked: Message) -> Message:
        return _done(can=self._packed.chosen(asked.fields["exempt"]).can_sample(asked.fields["n"]))

    def _pick(self, client: Client, asked: Message) -> Message:
        which: Any = asked.tensors.get("which")
        rows, shape = self._packed.pick(slice(*asked.fields["slice"]) if which is None else which)
        return Message("done", fields={"shape": list(shape)}, tensors={"rows": rows})

    def _peek(self, client: Client, asked: Message) -> Message:
        self._check_size(asked.fields["n"])
        return _taken(self._packed.peek(asked.fields["n"]))

    def _give_back(self, client: Client, asked: Message) -> Message:
        handed = client.handed.pop(asked.fields["number"], None)
        if handed is None:
            raise InvalidArgument(f"request {asked.fields['number']} was given no batch that could come back")
        self._packed.give_back(handed[0], exempt=handed[1])
        return _done()

    def _empty(self, client: Client, asked: Message) -> Message:
        self._packed.buffer.empty()
        return _done()

    def _update_priority(self, client: Client, asked: Message) -> Message:
        tensors = asked.tensors
        named = self._packed.named(tensors["index"], tensors.get("generation"))
        return _done(applied=self._packed.buffer.update_priority(named, tensors["priority"]))

    def _update(self, client: Client, asked: Message) -> Message:
        tensors = asked.tensors
        patch: Any = {}
        for i, key in enumerate(asked.fields["keys"]):
            if not key:  # the item is one tensor without a name
                patch = tensors[f"patch{i}"]
                break
            place = patch
            for part in key[:-1]:
                place = place.setdefault(part, {})
            place[key[-1]] = tensors[f"patch{i}"]
        named = self._packed.named(tensors["index"], tensors.get("generation"))
        return _done(applied=self._packed.buffer.update(named, patch))

    def stats(self) -> dict[str, Any]:
        """The buffer's, with the calls that are pending here among those that wait."""
        figures = self._packed.buffer.stats()
        for figure, waiting in self.blocked.items():
            figures[figure] += waiting
        return figures

    @property
    def blocked(self) -> dict[str, int]:
        """What the calls that wait here add to the buffer's counters: those that only ask whether they may, nothing."""
        return {
            "waiting_consumers": self._lots["sample"].blocked,
            "waiting_producers": self._lots["extend"].blocked,
        }

    @property
    def parked(self) -> dict[Side, int]:
        """How many calls wait here, for whatever."""
        return {side: len(pending) for side, pending in self._lots.items()}

    # ------------------------------------------------------------------ checkpoints, piece by piece
    def _state(self, client: Client, asked: Message) -> Message:
        client.outgoing = Spool()
        checkpoint.write(self._packed.buffer._local, client.outgoing.file)
        return _done(nbytes=client.outgoing.nbytes)

    def _fetch(self, client: Client, asked: Message) -> Message:
        if client.outgoing is None:
            raise InvalidArgument("there is no state to fetch from")
        return Message("done", tensors={"piece": client.outgoing.piece(asked.fields["at"])})

    def _fetched(self, client: Client, asked: Message) -> Message:
        client.outgoing = None
        return _done()

    def _offer(self, client: Client, asked: Message) -> Message:
        nbytes, most = asked.fields["nbytes"], max(STATE, 4 * self._packed.nbytes)
        if nbytes > most:
            raise InvalidArgument(f"a state of {nbytes} bytes; one of this buffer has at most {most}")
        client.incoming = Spool(nbytes)
        return _done()

    def _bring(self, client: Client, asked: Message) -> Message:
        if client.incoming is None:
            raise InvalidArgument("no state was offered")
        client.incoming.put(asked.fields["at"], asked.tensors["piece"])
        return _done()

    def _load(self, client: Client, asked: Message) -> Message:
        if client.incoming is None:
            raise InvalidArgument("no state was offered")
        spool, client.incoming = client.incoming, None
        checkpoint.load_state_dict(self._packed.buffer._local, container.read(spool.file, "what was sent"))
        return _done()

    # ------------------------------------------------------------------ ends
    def forget(self, client: Client) -> None:
        """The client is gone: what it waited for is not done any more."""
        for pending in self._lots.values():
            pending.forget(client.id)

    def close(self) -> None:
        """After the buffer was closed: whoever is pending hears it."""
        for pending in self._lots.values():
            pending.close()


def run_of(slots: Ints, capacity: int) -> int | None:
    """Where neighbouring slots begin, going on at 0 behind the last; None where they are no neighbours."""
    start, n = int(slots[0]), len(slots)
    run = np.arange(start, start + n)
    if start + n > capacity:
        run %= capacity
    return start if np.array_equal(slots, run) else None


def short(numbers: Ints) -> torch.Tensor:
    """The same numbers, in half the bytes where they fit."""
    fits = len(numbers) > 0 and int(numbers.max()) < 1 << 31 and int(numbers.min()) >= 0
    return torch.from_numpy(numbers.astype(np.int32) if fits else numbers)


def _done(**fields: Any) -> Message:
    return Message("done", fields=fields)


def _taken(taken: SampledBatch) -> Message:
    tensors = {
        "rows": taken.rows.view(torch.uint8),
        "slots": short(taken.slots),
        "numbers": short(taken.numbers),
    }
    keys = [list(key) for key in taken.extra]
    tensors.update({f"extra{i}": value for i, value in enumerate(taken.extra.values())})
    return Message("done", fields={"extra": keys, "emptied": taken.emptied}, tensors=tensors)
