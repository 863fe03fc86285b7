"""Requests as nobody should send them: every kind, every field and every tensor, spoiled in every way that comes to
mind. Any of them may be told off, or hung up on; none may harm the owner or its other clients."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
from typing import Any

import torch
from remote_children import batch

from millpond.core.schema import Schema
from millpond.remote.address import OwnerAddress
from millpond.remote.connection import REQUEST
from millpond.remote.messages import HEAD, SMALL, Message, encode

SCHEMA = Schema.from_example(batch(1))
ANSWERED_S = 15.0  # every input is answered, or hung up on, within so many seconds
ODD: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 3, 7, 64, 99, 1000, 10**5, 2**31, 2**32, 2**53, 10**10, 10**15, 2**62 - 1),
    *(2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**31), -(2**63), -(2**64), 10**40, 0.5, 1e308, -0.0, "", "x", "sample"),
    *("extend", "../../etc/passwd", "\x00", "é" * 100, [], {}, [[]], [None], [1, 2], [1, 2, 3], [2**70, 1], ["a", "b"]),
    *(
        {"tensor": 0},
        {"tensor": 10**9},
        {"dict": {"a": {"value": 1}}},
        {"list": [{}]},
        {"value": []},
        [["float32", [2]]],
    ),
    *([["uint8", [10**15]]], [["uint8", [-1]]], [["uint8", [2**40, 2**40]]], [["nothing", [1]]], [["a"]], [[[["a"]]]]),
]
DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float16, torch.float32)
DTYPES += (torch.float64, torch.complex64, torch.bfloat16, torch.uint16, torch.float8_e5m2)  # type: ignore[assignment]


class Fuzzer:
    """``stream()`` makes what one connection says. The same seed makes the same. ``state``: a saved one of such a
    buffer."""

    def __init__(self, owner: OwnerAddress, seed: int, state: bytes) -> None:
        self.owner, self.chance, self.state = owner, random.Random(seed), state

    # ------------------------------------------------------------------ as it should be
    def proper(self, kind: str) -> Message:
        chance = self.chance
        n = chance.choice([1, 1, 2, 5, 50, 2000])
        waits = {"n": n, "wait": chance.random() < 0.3, "exempt": chance.random() < 0.2}
        rows, index = torch.zeros(n, SCHEMA.row_nbytes, dtype=torch.uint8), torch.arange(n) % 10
        priority = torch.ones(n, dtype=torch.float64)
        about = {"number": chance.randrange(5), "op": chance.choice(["sample", "extend"]), "n": n}
        fields: dict[str, Any] = {
            "extend": {**waits, "schema": SCHEMA.fingerprint, "who": 7, "receipt": chance.choice([None, [1, 2]])},
            "sample": {**waits, "patient": waits["wait"]},
            "until_sample": waits,
            "until_extend": waits,
            "collect": about,
            "withdraw": about,
            "bind": {"schema": chance.choice([None, self._schema()])},
            "can_sample": {"n": n, "exempt": False},
            "explain": {"op": "sample", "n": n},
            "receipt": {"line": 1},
            "epoch_over": {"n": n},
            "peek": {"n": n},
            "pick": {"slice": chance.choice([None, [None, None, None], [0, 5, 2]])},
            "give_back": {"number": chance.randrange(5)},
            "update": {"keys": [["observation"], ["next", "reward"]]},
            "fetch": {"at": 0},
            "offer": {"nbytes": len(self.state)},
            "bring": {"at": 0},
            "direct": {},
            "group": {"address": bytes(chance.randrange(256) for _ in range(170)).hex(), "direct": False},
        }.get(kind, {})
        tensors: dict[str, torch.Tensor] = {
            "extend": {"rows": rows, **chance.choice([{}, {"priority": priority}])},
            "pick": chance.choice([{"which": index}, {"which": torch.ones(10, dtype=torch.bool)}]),
            "update_priority": {"index": index, "priority": priority, **chance.choice([{}, {"generation": index}])},
            "update": {"index": index, "patch0": torch.zeros(n, 3), "patch1": torch.zeros(n, 1, dtype=torch.float64)},
            "bring": {"piece": torch.frombuffer(self._damaged(), dtype=torch.uint8)},
        }.get(kind, {})
        if kind == "pick" and fields["slice"] is not None:
            tensors = {}
        return Message(kind, chance.randrange(1, 6), fields, tensors, chance.choice([0, 0, 1, 2]))

    def _damaged(self) -> bytearray:
        """A saved state, with a few bits of it the other way round, or as it is."""
        state = bytearray(self.state)
        for _ in range(self.chance.choice([0, 0, 1, 1, 5])):
            state[self.chance.randrange(min(len(state), 4000))] ^= 1 << self.chance.randrange(8)
        return state

    def _schema(self) -> str:
        """The text of a schema: the right one, or one with a part spoiled."""
        said = json.loads(SCHEMA.to_json())
        if self.chance.random() < 0.7:
            place = self.chance.choice(["format", "fingerprint", "fields"])
            said[place] = self.chance.choice(ODD)
            if place == "fields":
                said[place] = [[["a"], self.chance.choice(["float32", "x", None]), self.chance.choice(ODD)]]
        return json.dumps(said)

    # ------------------------------------------------------------------ spoiled
    def spoiled(self, message: Message) -> bytes:
        """Head and payload, with one thing, or a few, as they should not be."""
        chance, fields, tensors = self.chance, dict(message.fields), dict(message.tensors)
        number, settled, kind = message.number, message.settled, message.kind
        way = chance.randrange(12)
        if way == 0 and fields:
            fields[chance.choice(list(fields))] = chance.choice(ODD)
        elif way == 1 and fields:
            del fields[chance.choice(list(fields))]
        elif way == 2:
            fields[chance.choice(["extra", "n", "number", "wait"])] = chance.choice(ODD)
        elif way == 3 and tensors:
            name = chance.choice(list(tensors))
            shape = [chance.choice([0, 1, 2, 9, 70]) for _ in range(chance.randrange(4))]
            tensors[name] = torch.ones(shape).to(chance.choice(DTYPES))
        elif way == 4 and tensors:
            name = chance.choice(list(tensors))
            tensors[chance.choice(["rows", "index", "which", "piece", "more"])] = tensors.pop(name)
        elif way == 5:
            number, settled = chance.choice([0, 2**63, 2**64 - 1, 2**64 - 2]), chance.choice([0, 2**64 - 1])
        elif way == 6 and tensors:
            name = chance.choice(list(tensors))
            with contextlib.suppress(RuntimeError):
                odd = float("nan") if tensors[name].is_floating_point() else chance.choice([-1, 127, 2**31 - 1])
                tensors[name] = torch.full_like(tensors[name], odd)
        head, payload = encode(Message(kind, number, fields, tensors, settled))
        data = bytearray(head + (b"" if payload is None else payload.numpy().tobytes()))
        if way == 7:  # the text lies about its tensors, or is none
            data = self._retold(message, data, len(head))
        elif way == 8:
            data[chance.randrange(min(len(data), 400))] ^= 1 << chance.randrange(8)
        elif way == 9:
            place, size = chance.choice([(4, 4), (8, 8), (16, 8), (24, 8), (32, 4)])
            data[place : place + size] = chance.randbytes(size)
        elif way == 10:
            data = data[: chance.randrange(len(data))]
        length = len(head) if way != 11 else chance.choice([0, 1, 35, 36, 2**26, 2**26 + 1, 2**31, 2**32 - 1])
        return REQUEST.pack(length) + data

    def _retold(self, message: Message, data: bytearray, end: int) -> bytearray:
        chance = self.chance
        magic, version, number, settled, nbytes, length = HEAD.unpack_from(data)
        said = json.loads(data[HEAD.size : HEAD.size + length])
        listed: list[Any] = said["tensors"]
        if listed and chance.random() < 0.8:
            part = chance.choice(listed)
            part[chance.randrange(4)] = chance.choice(
                [*ODD, "float32", "load", "Tensor", "uint8", [10**15], [2**40] * 3]
            )
        else:
            said[chance.choice(["kind", "fields", "tensors", "direct"])] = chance.choice(ODD)
        text = json.dumps(said)
        if chance.random() < 0.2:
            text = chance.choice(["[" * 50_000, '{"kind": NaN}', "1" * 5000, "", "null", "\ud800", text[:-1]])
        raw = text.encode("utf-8", "surrogatepass")
        nbytes = nbytes if chance.random() < 0.7 else chance.choice([0, 1, SMALL, 2**26, 2**40, 2**63, 2**64 - 1])
        head = (
            HEAD.pack(magic, version, number, settled, nbytes, len(raw)) + raw + bytes(data[HEAD.size + length : end])
        )
        return bytearray(head + data[end:])

    # ------------------------------------------------------------------ a connection
    def stream(self) -> bytes:
        """What one connection says: a hello, and up to four requests, of which some are proper."""
        chance = self.chance
        token = self.owner.token if chance.random() < 0.95 else chance.randbytes(16)
        if chance.random() < 0.02:
            return chance.choice(
                [b"", chance.randbytes(chance.randrange(100)), token, token[:5], b"GET / HTTP/1.1\r\n\r\n"]
            )
        parts = [token + chance.randbytes(16)]
        kinds = [chance.choice(KINDS) for _ in range(chance.choice([1, 1, 1, 2, 4]))]
        for kind in chance.choice([kinds, kinds, kinds, ["offer", "bring", "load"], ["state", "fetch", "fetched"]]):
            message = self.proper(kind)
            if chance.random() < 0.25:
                head, payload = encode(message)
                body = head + (b"" if payload is None else payload.numpy().tobytes())
                parts.append(REQUEST.pack(len(head)) + body)
            else:
                parts.append(self.spoiled(message))
        return b"".join(parts)


KINDS = [
    *(
        "extend",
        "sample",
        "until_sample",
        "until_extend",
        "collect",
        "withdraw",
        "bind",
        "counts",
        "can_sample",
        "stats",
    ),
    *("explain", "receipt", "epoch_over", "peek", "pick", "give_back", "empty", "update_priority", "update", "state"),
    *("fetch", "fetched", "offer", "bring", "load", "direct", "group", "nothing of the kind", ""),
]


def say(owner: OwnerAddress, stream: bytes) -> None:
    """Say it, say that this is all, and listen to the end. Fails where that does not come."""
    assert owner.line is not None
    with socket.create_connection(owner.line, timeout=ANSWERED_S) as connection:
        try:
            connection.sendall(stream)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 20):
                pass
        except OSError as problem:
            if isinstance(problem, TimeoutError):  # otherwise it hung up
                raise


def frame(head: bytes, payload: bytes = b"") -> bytes:
    """A request as it stands on the line."""
    return struct.pack("<I", len(head)) + head + payload
