"""A replay buffer that lives elsewhere: in a process that Ray runs, reached by whatever way is shortest."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch

from millpond.core.errors import BufferClosed, InvalidArgument, MillpondError, NotShareable
from millpond.core.schema import Batch, Schema
from millpond.flow.limiter import Flow
from millpond.remote.address import OwnerAddress, check_transport, this_host
from millpond.remote.backend import RemoteBackend
from millpond.remote.connecting import Backend, check_schema, choose, listening, reach, unreachable
from millpond.replay.buffer import Handle, ReplayBuffer
from millpond.replay.engine import find
from millpond.replay.samplers.prioritized import PrioritizedSampler
from millpond.replay.samplers.protocol import Sampler
from millpond.replay.waiting import check_timeout
from millpond.shm.interrupts import defer_interrupts, interruptible, uninterrupted


class ReplayClient:
    """A buffer that another process owns, with the methods of `ReplayBuffer` and their meaning. Picklable.

    It connects at its first use, in whichever process that is: through shared memory on the owner's host, through
    the network elsewhere (see ``transport``). Any number of threads may use it; a forked child gets a
    connection of its own. Made by ``RayReplayBuffer.client()``, or by `connect` from a name.

    Besides what the methods of `ReplayBuffer` raise, each raises ``PeerLost``, naming the owner, within 5 s of its
    death.
    """

    def __init__(
        self,
        owner: OwnerAddress,
        *,
        transport: str | None = None,
        host: str | None = None,
        schema: Schema | None = None,
        seed: int | None = None,
        connect_timeout: float = 60.0,
    ) -> None:
        self._owner = owner
        self._wanted = owner.transport if transport is None else check_transport(transport)
        self._host, self._offered, self._seed = host, schema, seed
        self._timeout = check_timeout(connect_timeout)
        self._lock = threading.Lock()
        self._backend: Backend | None = None
        self._taken: str | None = None  # the transport of the backend, or of the last one
        self._leave: Callable[[], Any] = lambda: None
        self._closed = False
        self._final: dict[str, Any] | None = None
        defer_interrupts()
        _clients.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        how = (self._owner, self._wanted, self._host, self._offered, self._seed, self._timeout)
        return _client, how

    @property
    def _buffer(self) -> Backend:
        backend = self._backend
        if backend is None or (type(backend) is RemoteBackend and backend.lost):
            return self._connected()
        return backend

    @interruptible
    def _connected(self) -> Backend:
        with self._lock:
            if self._closed:
                raise BufferClosed("this client was closed")
            if type(self._backend) is RemoteBackend and self._backend.lost:
                self._leave()  # the network failed for a while, perhaps: see whether the owner is there
                self._backend = None
            if self._backend is None:
                try:
                    transport = self.transport
                except NotShareable as problem:
                    raise unreachable(self._owner, problem) from problem
                if transport != "shm":
                    self._owner = listening(self._owner, self._timeout)
                backend = reach(self._owner, transport, seed=self._seed, timeout=self._timeout)
                try:
                    if self._offered is not None:
                        check_schema(backend, self._offered)
                except BaseException:
                    backend.close()
                    raise
                self._backend, self._taken = backend, transport
                self._leave = weakref.finalize(self, _leave, backend, os.getpid())
            return self._backend

    def here(self) -> ReplayBuffer:
        """The buffer itself, in the memory of this host. Raises ``NotShareable`` where it lies on another one, or is
        reached another way."""
        backend = self._buffer
        if isinstance(backend, ReplayBuffer):
            return backend
        raise NotShareable(
            f"{self!r} has no part in the buffer's memory: a step that takes from several buffers at once, such as an "
            "ensemble's sample, needs their locks. Sample from it alone, or make the ensemble on the owner's host"
        )

    @property
    def transport(self) -> str:
        """How this process reaches the buffer: ``shm``, ``gloo`` or ``ray``."""
        return choose(self._owner, self._wanted, this_host() if self._host is None else self._host)

    # ------------------------------------------------------------------ writing
    @uninterrupted
    def extend(
        self,
        items: Batch,
        *,
        priority: Any = None,
        timeout: float | None = None,
        cancel_event: Any = None,
        receipt: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """As ``ReplayBuffer.extend``. After ``PeerLost`` it is not known whether the items were written."""
        return self._buffer.extend(
            items, priority=priority, timeout=timeout, cancel_event=cancel_event, receipt=receipt
        )

    @uninterrupted
    def add(self, item: Batch, *, priority: Any = None, timeout: float | None = None, cancel_event: Any = None) -> int:
        """As ``ReplayBuffer.add``."""
        return self._buffer.add(item, priority=priority, timeout=timeout, cancel_event=cancel_event)

    def receipt(self, line: int) -> int:
        """As ``ReplayBuffer.receipt``."""
        return self._buffer.receipt(line)

    # ------------------------------------------------------------------ sampling
    @uninterrupted
    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        *,
        wait: bool = False,
        timeout: float | None = None,
        cancel_event: Any = None,
    ) -> Any:
        """As ``ReplayBuffer.sample``. The transform runs, and the batch moves to the device, in this process."""
        return self._buffer.sample(batch_size, return_info, wait=wait, timeout=timeout, cancel_event=cancel_event)

    def peek(self, n: int) -> Any:
        """As ``ReplayBuffer.peek``."""
        return self._buffer.peek(n)

    def __getitem__(self, which: Any) -> Any:
        return self._buffer[which]

    def __iter__(self) -> Iterator[Any]:
        try:
            return iter(self._buffer)
        except BufferClosed:
            return iter(())

    # ------------------------------------------------------------------ waiting
    def can_sample(self, batch_size: int | None = None) -> bool:
        """As ``ReplayBuffer.can_sample``: False also where the buffer was closed."""
        try:
            return self._buffer.can_sample(batch_size)
        except BufferClosed:
            return False

    def wait_until_sampleable(
        self, num_items: int | None = None, *, timeout: float | None = None, cancel_event: Any = None
    ) -> bool:
        """As ``ReplayBuffer.wait_until_sampleable``."""
        return self._buffer.wait_until_sampleable(num_items, timeout=timeout, cancel_event=cancel_event)

    def wait_until_writable(
        self, num_items: int = 1, *, timeout: float | None = None, cancel_event: Any = None
    ) -> bool:
        """As ``ReplayBuffer.wait_until_writable``."""
        return self._buffer.wait_until_writable(num_items, timeout=timeout, cancel_event=cancel_event)

    @contextlib.contextmanager
    def unlimited(self) -> Iterator[Self]:
        """As ``ReplayBuffer.unlimited``: what this client does inside."""
        with self._buffer.unlimited():
            yield self

    # ------------------------------------------------------------------ changing what is there
    @uninterrupted
    def update_priority(self, index_or_sample: Any, priority: Any) -> int:
        """As ``ReplayBuffer.update_priority``."""
        return self._buffer.update_priority(index_or_sample, priority)

    @uninterrupted
    def update(self, index_or_sample: Any, patch: Batch) -> int:
        """As ``ReplayBuffer.update``."""
        return self._buffer.update(index_or_sample, patch)

    @uninterrupted
    def empty(self) -> None:
        """As ``ReplayBuffer.empty``."""
        self._buffer.empty()

    # ------------------------------------------------------------------ figures
    def stats(self) -> dict[str, Any]:
        """As ``ReplayBuffer.stats``. Calls that wait at the owner count among those that wait."""
        return dict(self._final) if self._final is not None else self._buffer.stats()

    def explain(self, op: str = "sample", n: int | None = None) -> str:
        """As ``ReplayBuffer.explain``."""
        try:
            return self._buffer.explain(op, n)
        except BufferClosed as closed:
            return f"{op} cannot proceed: {closed}"

    @property
    def capacity(self) -> int:
        """In items."""
        return self._owner.rules.capacity

    @property
    def batch_size(self) -> int | None:
        return self._owner.rules.batch_size

    @property
    def flow(self) -> Flow:
        return self._owner.rules.flow

    @property
    def sampler(self) -> Sampler:
        """The buffer's own on the owner's host, else one like it: what is assigned there is refused."""
        if isinstance(self._backend, ReplayBuffer):
            return self._backend.sampler
        sampler: Sampler = self._owner.rules.sampler
        priorities = find(PrioritizedSampler, sampler)
        if priorities is not None:
            priorities.change_locked = _refuse_change
        return sampler

    @property
    def schema(self) -> Schema | None:
        """As ``ReplayBuffer.schema``."""
        return self._buffer.schema

    @property
    def write_count(self) -> int:
        """Items ever written."""
        return self._figure("write_count") if self._final is not None else self._buffer.write_count

    @property
    def storage_size(self) -> int:
        """Slots physically occupied."""
        return self._figure("storage_size") if self._final is not None else self._buffer.storage_size

    @property
    def sampleable_size(self) -> int:
        """Items that a sample may return now."""
        return self._figure("size") if self._final is not None else self._buffer.sampleable_size

    def _figure(self, name: str) -> int:
        assert self._final is not None
        return int(self._final[name])

    def __len__(self) -> int:
        return self.sampleable_size

    # ------------------------------------------------------------------ sharing and saving
    @property
    def shared(self) -> bool:
        return True

    def share(self) -> Self:
        """It is shared already. Returns itself."""
        return self

    def handle(self) -> Handle:
        """As ``ReplayBuffer.handle``, for processes on the owner's host. Raises ``NotShareable`` elsewhere."""
        choose(self._owner, "shm", this_host() if self._host is None else self._host)
        assert self._owner.handle is not None
        return self._owner.handle

    def state_dict(self) -> dict[str, Any]:
        """As ``ReplayBuffer.state_dict``. From another host it comes in pieces, between which others are served."""
        return self._buffer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As ``ReplayBuffer.load_state_dict``."""
        self._buffer.load_state_dict(state)

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """As ``ReplayBuffer.dumps``: to a file of this process's host."""
        self._buffer.dumps(path)

    def loads(self, path: str | os.PathLike[str]) -> None:
        """As ``ReplayBuffer.loads``: from a file of this process's host."""
        self._buffer.loads(path)

    def client(
        self,
        *,
        transport: str | None = None,
        host: str | None = None,
        schema: Schema | None = None,
        seed: int | None = None,
    ) -> ReplayClient:
        """One more client, to be given to another process. Picklable.

        Args:
            transport: ``auto``, ``shm``, ``gloo``, ``ray`` or ``nccl``; the buffer's own by default.
            host: the name of the host that it counts as being on, instead of ``$MILLPOND_HOST``.
            schema: what it will write; another than the bound one is refused, with the difference, when it connects.
            seed: of what it draws where it draws itself, that is on the owner's host.
        """
        wanted = self._owner.transport if transport is None else check_transport(transport)
        if self._owner.line is None and wanted not in ("auto", "shm"):  # it may go to where there is no Ray
            with contextlib.suppress(MillpondError):
                self._owner = listening(self._owner, self._timeout)
        return ReplayClient(
            self._owner, transport=transport, host=host, schema=schema, seed=seed, connect_timeout=self._timeout
        )

    def close(self) -> None:
        """Leave the buffer. It goes on for the others."""
        with self._lock:
            self._closed = True
            backend, self._backend = self._backend, None
        if backend is not None:
            self._leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        """Which way it takes, or would take, and how full the buffer is, where that can be known without a call."""
        backend, size = self._backend, f"{self.capacity} items at most"
        if self._closed:
            size += ", closed"
        elif backend is None:
            size += ", not connected"
        elif isinstance(backend, ReplayBuffer):
            size = f"{len(backend)} of {self.capacity} items"
        return f"{type(self).__name__}({self._owner.name!r}, {self._way()} by {self._wanted!r}; {size})"

    def _way(self) -> str:
        transport = self._taken
        if transport is None:
            try:
                transport = self.transport
            except NotShareable:
                return "no way"
        return self._owner.reached_by(transport) + ","


def _refuse_change(_: Any) -> None:
    raise InvalidArgument(
        "this sampler is a copy of the one that draws, which is in the owner's process: change it there, or through a "
        "client on the owner's host that has been used"
    )


def _client(
    owner: OwnerAddress, transport: str, host: str | None, schema: Schema | None, seed: int | None, timeout: float
) -> ReplayClient:
    return ReplayClient(owner, transport=transport, host=host, schema=schema, seed=seed, connect_timeout=timeout)


def _leave(backend: Backend, pid: int) -> None:
    """For a client that nobody closed. A forked child's copy must not hang up for its parent."""
    if os.getpid() == pid:
        backend.close()


_clients: weakref.WeakSet[ReplayClient] = weakref.WeakSet()
_inherited: list[Backend] = []  # of the parent: never used here, and never taken apart, which would need its threads


def _after_fork() -> None:
    for client in list(_clients):
        client._lock = threading.Lock()
        if isinstance(client._backend, RemoteBackend):
            _inherited.append(client._backend)
            client._backend = None


os.register_at_fork(after_in_child=_after_fork)
