"""Payloads through Ray's object store: each batch one array of bytes, copied in once and read where it lies."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from millpond.remote.cluster import DATA, ray
from millpond.remote.connection import ANSWER_S, Connection, Slot, Unanswered
from millpond.remote.messages import Message, decode, encode
from millpond.shm.interrupts import due

Bytes = NDArray[np.uint8]
SLICE_S = 0.5


def to_array(payload: torch.Tensor | None) -> Bytes | None:
    """A payload as Ray takes it. No copy."""
    return None if payload is None else payload.cpu().numpy()


def to_tensor(array: Bytes | None) -> torch.Tensor | None:
    """A payload as Ray gives it. No copy, unless it lies askew.

    Ray marks what it hands out as read-only, because several may have got the same. This array was made for one
    reader, who may do with it what he likes.
    """
    if array is None:
        return None
    if array.ctypes.data % 64:
        return torch.from_numpy(array.copy())
    memory = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
    memory._array = array  # type: ignore[attr-defined]  # keeps it, and with it Ray's object, for as long as a view lives
    return torch.frombuffer(memory, dtype=torch.uint8)


class RayWire:
    """A client's way to its owner: heads and payloads by calls of the actor, any number at a time."""

    transport = "ray"

    def __init__(self, actor: Any, line: Connection) -> None:
        self._ray = ray()
        self._call = actor.exchange.options(concurrency_group=DATA)
        self._line = line

    def exchange(self, request: Message, slot: Slot) -> tuple[Message, bool]:
        """The answer. The second part is for wires on which a pending answer may be told of before.

        Raises ``ConnectionError`` where it is not known whether the request arrived: repeat it, or find the line ended.
        """
        errors = self._ray.exceptions
        head, payload = encode(request)
        try:
            reference = self._call.remote(self._line.id, head, to_array(payload))
            while True:
                try:
                    head, array = self._ray.get(reference, timeout=SLICE_S)
                    return decode(head, to_tensor(array)), False
                except errors.GetTimeoutError:
                    if self._line.look() is not None:
                        raise ConnectionError("the line has ended") from None
                    if due(ANSWER_S):
                        raise Unanswered from None
        except errors.RayError as problem:
            raise ConnectionError(f"{type(problem).__name__}: {problem}") from problem

    def tell(self, request: Message) -> None:
        """Send a request, and do not wait for the answer."""
        self._call.remote(self._line.id, encode(request)[0], None)

    def close(self) -> None:
        """Nothing is held."""
