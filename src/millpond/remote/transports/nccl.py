"""Batches from GPU to GPU: from an owner whose storage is on one, to a client whose device is another.

The line carries the heads and what lies in main memory, as in `millpond.remote.transports.network`. NCCL carries the
payloads of answers that lie on the owner's GPU, and nothing else. It takes two GPUs: NCCL refuses two ends on one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store, is_nccl_available  # type: ignore[attr-defined]

from millpond.core.errors import NotShareable, PeerLost

OWNER, CLIENT = 0, 1  # ranks
_PATIENCE_S = 4.0  # for a payload whose other side is ready
_LOOK_S = 5e-5


def why_not(storage: str | None, device: str | None) -> str | None:
    """None where NCCL can go from an owner's storage on a GPU to a client's device: they are types of devices."""
    if not is_nccl_available() or not torch.cuda.is_available():
        return "this process has no NCCL, or no GPU"
    if storage is None or not storage.startswith("cuda"):
        return "the owner's storage is not on a GPU: give it TensorStorage(capacity, device='cuda')"
    if device is None or not device.startswith("cuda"):
        return "the batches do not go to a GPU: give the buffer device='cuda'"
    return None


class Introduction(Store):
    """How the ends of one NCCL connection get to know each other: the owner says one word, its unique id, which the
    line carries to the client. What NCCL notes for itself stays with each end."""

    def __init__(self, *, say: Callable[[bytes], None] | None = None, hear: Callable[[], bytes] | None = None) -> None:
        super().__init__()
        self._say, self._hear = say, hear
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # bytes come, whatever the stubs say
        self._known[key] = bytes(value)
        say, self._say = self._say, None  # the first is the unique id
        if say is not None:
            say(self._known[key])

    def get(self, key: str) -> bytes:
        if key not in self._known:
            hear, self._hear = self._hear, None
            if hear is None:
                raise PeerLost(f"NCCL looks for {key!r}, which the other end will not say")
            self._known[key] = hear()
        return self._known[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._known for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)


class Direct:
    """Two GPUs, from the first to the second. One thread at a time may use an end. Raises ``PeerLost``."""

    def __init__(self, introduction: Introduction, rank: int, device: str) -> None:
        from torch.distributed import ProcessGroupNCCL

        options: Any = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=_PATIENCE_S)
        self._device = torch.device(device)
        try:
            self._group: Any = ProcessGroupNCCL(introduction, rank, 2, options)
            if rank == OWNER:  # the first message makes the connection
                self.send(torch.zeros(1, dtype=torch.uint8, device=self._device))
            else:
                self.receive(1)
        except RuntimeError as problem:
            raise PeerLost(f"no NCCL connection: {problem}") from problem

    def send(self, payload: torch.Tensor) -> None:
        """``payload``: uint8 ``[n]`` on this end's GPU. Returns when its memory may be used again."""
        self._finish(self._group.send([payload], CLIENT, 0))

    def receive(self, nbytes: int) -> torch.Tensor:
        """The next payload: uint8 ``[nbytes]`` on this end's GPU."""
        payload = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._finish(self._group.recv([payload], OWNER, 0))
        return payload

    def _finish(self, work: Any) -> None:
        """Its own ``wait`` would let the GPU wait, and not this thread, for whom nobody could cut it short."""
        deadline = time.monotonic() + _PATIENCE_S
        while not work.is_completed():
            if time.monotonic() > deadline:
                self.close()
                raise PeerLost(f"an NCCL payload was not taken or did not come within {_PATIENCE_S:g} s")
            time.sleep(_LOOK_S)
        work.wait()

    def close(self) -> None:
        """Hang up, whatever is underway."""
        self._group.abort()


def check(storage: str | None, device: str | None) -> None:
    """Raises ``NotShareable``, with the reason, where NCCL cannot be used."""
    reason = why_not(storage, device)
    if reason is not None:
        raise NotShareable(f"transport='nccl': {reason}; transport='gloo' works everywhere")
