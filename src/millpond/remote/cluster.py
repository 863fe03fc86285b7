"""All that millpond asks of a Ray cluster: to be there, to start an owner, and to find it again."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from millpond.core.errors import BufferClosed, DeadlineExceeded, InvalidArgument, NotShareable, PeerLost
from millpond.core.extras import extra
from millpond.remote import cluster
from millpond.remote.address import OwnerAddress
from millpond.remote.messages import Message, raised

if TYPE_CHECKING:
    from millpond.remote.server import Plan

NAMESPACE = "millpond"
CONTROL, DATA = "control", "data"
_GROUPS = {CONTROL: 4, DATA: 16}  # calls at a time; none of them waits for the buffer
_CLOSING_S = 10.0
_WORDS, _WORD_S = b"millpond", 1.0  # where words about owners are kept, and how long one is asked for
# Options by which an owner needs a certain node, or one that has what it needs.
_PLACES = ("scheduling_strategy", "resources", "num_cpus", "num_gpus", "memory", "accelerator_type", "label_selector")


def ray() -> Any:
    """The module, imported when it is first needed. Raises ``MissingExtra`` where it is not installed."""
    with extra("ray"):
        import ray as module
    return module


def join(address: str | None) -> None:
    """Connect this process to a cluster, unless it is connected to one already.

    What the program did with ``ray.init`` is left alone. Where it did nothing, it is done here: without dashboard,
    usage statistics and log noise. ``address`` None means the cluster that ``$RAY_ADDRESS`` names, or else a new one
    on this machine; ``"local"`` a new one in any case.

    Raises ``PeerLost`` where there is no cluster at ``address``.
    """
    module = ray()
    if module.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # what Ray will do some day; it warns until then
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "namespace": NAMESPACE}
    if address in (None, "local"):
        module.init(address=address, include_dashboard=False, **quiet)
        return
    try:
        module.init(address=address, **quiet)
    except ConnectionError as problem:
        raise PeerLost(f"no Ray cluster answers at {address!r}: {problem}") from problem


@contextlib.contextmanager
def joined(address: str | None) -> Iterator[bool]:
    """Be connected to a cluster inside: the one that this process is connected to already, which stays, or else the one
    at ``address`` (``auto``: on this machine, or of ``$RAY_ADDRESS``; None: a new one on this machine, which ends at
    the end). Gives whether it is a new one. What the program does at SIGTERM stays as it is.

    Raises ``PeerLost`` where there is no cluster at ``address``.
    """
    module = ray()
    if module.is_initialized():
        yield False
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        join("local" if address is None else address)
        _restore(handler)
        yield address is None
    finally:
        module.shutdown()
        _restore(handler)


def _restore(handler: Any) -> None:
    """Ray sets a handler of its own, which ends the process."""
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def start(plan: Plan, options: Mapping[str, Any], timeout: float) -> tuple[Any, OwnerAddress]:
    """A new owner, and its actor.

    Raises:
        InvalidArgument: the name is taken, or Ray does not know an option.
        DeadlineExceeded: it was not there within ``timeout`` seconds.
        PeerLost: it died on the way.
        MillpondError: what making the buffer raised.
    """
    from millpond.remote.server import ReplayActor

    address = ray().get_runtime_context().gcs_address
    try:
        actor = ray().remote(concurrency_groups=_GROUPS)(ReplayActor).options(**_placed(options)).remote()
    except ValueError as problem:
        raise InvalidArgument(f"Ray cannot start the owner: {problem}") from problem
    try:
        said = _get(actor.open, plan, address, timeout=timeout, name=plan.name)
        if isinstance(said, Message):
            raise raised(said)
    except BaseException:
        _kill(actor)
        raise
    return actor, said


def _placed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Without need of a core; and beside whoever makes it, where nothing says otherwise: who makes a buffer mostly uses
    it most, and Ray would take any node for an actor that needs nothing."""
    placed = {"num_cpus": 0, **options}
    if not any(option in options for option in _PLACES):
        strategy = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        placed["scheduling_strategy"] = strategy(ray().get_runtime_context().get_node_id(), soft=False)
    return placed


def find(name: str, namespace: str, address: str) -> Any:
    """The actor of this name. Raises ``PeerLost`` where there is none."""
    join(address)
    try:
        return ray().get_actor(name, namespace=namespace)
    except (ValueError, ray().exceptions.RayError) as problem:
        raise PeerLost(f"there is no replay {name!r} in namespace {namespace!r} of this Ray cluster") from problem


def owner_of(name: str, namespace: str, address: str, timeout: float) -> OwnerAddress:
    """What a client must know of a live owner. Raises ``BufferClosed``, ``PeerLost`` or ``DeadlineExceeded``."""
    try:
        owner: OwnerAddress = _get(find(name, namespace, address).owner, timeout=timeout, name=name)
    except PeerLost:
        head = ray().get_runtime_context().gcs_address if ray().is_initialized() else ""
        if _head(head, "internal_kv_get", _name(name, namespace), _WORDS) is not None:
            raise BufferClosed(f"replay {name!r} in namespace {namespace!r} was closed") from None
        raise
    return owner


def listening(owner: OwnerAddress, timeout: float) -> OwnerAddress:
    """The same owner, once it listens. Raises ``PeerLost``, ``DeadlineExceeded``, or what keeps it from listening."""
    actor = find(owner.name, owner.namespace, owner.cluster)
    said = _get(actor.listen, timeout=timeout, name=owner.name)
    if isinstance(said, Message):
        raise raised(said)
    if said.token != owner.token:
        raise PeerLost(f"{owner} is gone; another one has its name")
    made: OwnerAddress = said
    return made


def describe(name: str, namespace: str, address: str, timeout: float) -> dict[str, Any]:
    """What a live owner says of itself. Raises ``PeerLost`` or ``DeadlineExceeded``."""
    description: dict[str, Any] = _get(find(name, namespace, address).describe, timeout=timeout, name=name)
    return description


def inspect(name: str, namespace: str, address: str, *, rows: int, timeout: float) -> dict[str, Any]:
    """A report on a live owner's buffer. Raises ``PeerLost`` or ``DeadlineExceeded``, and what the report raises."""
    report = _get(find(name, namespace, address).inspect, rows, timeout=timeout, name=name)
    if isinstance(report, Message):
        raise raised(report)
    made: dict[str, Any] = report
    return made


def note_closed(owner: OwnerAddress) -> None:
    """Leave a word that this owner closed on purpose, for whoever comes later. It lives as long as the cluster."""
    for key in (_word(owner), _name(owner.name, owner.namespace)):
        _head(owner.cluster, "internal_kv_put", key, b"closed", True, _WORDS)


def note_open(owner: OwnerAddress) -> None:
    """Who asks for this name asks for this owner from now on."""
    _head(owner.cluster, "internal_kv_del", _name(owner.name, owner.namespace), False, _WORDS)


def was_closed(owner: OwnerAddress) -> bool:
    """Did this owner close on purpose? False also where nobody can be asked."""
    return _head(owner.cluster, "internal_kv_get", _word(owner), _WORDS) is not None


def _head(address: str, method: str, *arguments: Any) -> Any:
    """Ask Ray's head, which keeps such words. This process need not be connected to the cluster. None: nobody there.

    Without a word somebody gets another message, and nothing worse: so nothing is raised.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_WORD_S).close()  # Ray itself would try for long
        client = importlib.import_module("ray._raylet").GcsClient(address=address)
        return getattr(client, method)(*arguments, timeout=_WORD_S)
    except Exception as problem:  # noqa: BLE001  # whatever it is, it is no word
        logging.getLogger("millpond").debug("no word at Ray's head %r: %r", address, problem)
        return None


def _word(owner: OwnerAddress) -> bytes:
    return hashlib.sha256(owner.token).hexdigest().encode()


def _name(name: str, namespace: str) -> bytes:
    return f"{namespace}/{name}".encode()


def stop(actor: Any) -> None:
    """Close the buffer, and end the owner's process. Nothing happens where it is gone already."""
    if ray().is_initialized():
        with contextlib.suppress(ray().exceptions.RayError):
            ray().get(actor.close.options(concurrency_group=CONTROL).remote(), timeout=_CLOSING_S)
        _kill(actor)


def _kill(actor: Any) -> None:
    with contextlib.suppress(ray().exceptions.RayError, ValueError):
        ray().kill(actor)


def _get(method: Any, *arguments: Any, timeout: float, name: str) -> Any:
    errors = ray().exceptions
    try:
        return ray().get(method.options(concurrency_group=CONTROL).remote(*arguments), timeout=timeout)
    except errors.GetTimeoutError as problem:
        raise DeadlineExceeded(
            f"the owner of replay {name!r} was not there within {timeout:g} s: is there a node that has what "
            "ray_options asks for?"
        ) from problem
    except errors.RayTaskError:
        raise
    except errors.RayError as problem:
        raise PeerLost(f"the owner of replay {name!r} died: {problem}") from problem


def new_name() -> str:
    """For an owner that was given none."""
    return f"millpond-{secrets.token_hex(4)}"


SCHEME = "ray://"
_TIMEOUT_S = 20.0


def inspect_owner(place: str, *, rows: int = 3) -> dict[str, Any]:
    """What ``millpond.replay.inspection.inspect`` reports, of a buffer that lives in a Ray cluster, and where it is.

    ``place`` is ``ray://NAME`` or ``ray://NAMESPACE/NAME``; the cluster is that of ``$RAY_ADDRESS``, or the one on
    this machine.

    Raises ``NotShareable`` where there is none, and ``InvalidArgument`` for what is no such place.
    """
    namespace, _, name = place.removeprefix(SCHEME).rpartition("/")
    if not place.startswith(SCHEME) or not name:
        raise InvalidArgument(f"{place!r}: a buffer in a Ray cluster is ray://NAME or ray://NAMESPACE/NAME")
    if rows < 0:
        raise InvalidArgument(f"rows is a number of items, 0 or more, not {rows}")
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        return cluster.inspect(name, namespace or cluster.NAMESPACE, "auto", rows=rows, timeout=_TIMEOUT_S)
    except (PeerLost, DeadlineExceeded) as problem:
        raise NotShareable(f"{place}: {problem}") from problem


def spell_remote(remote: dict[str, Any]) -> str:
    """The part of a report that only such buffers have, as lines of text."""
    traffic, parked = remote["traffic"], remote["parked"]
    listens = remote["listens"] or "nowhere yet: no client needed it"
    lines = [
        f"remote     process {remote['process']} on {remote['node']}, transport {remote['transport']}",
        f"           endpoint {remote['endpoints']['extend'] or 'in Ray'}; it listens at {listens}",
        f"           {len(remote['clients'])} clients from elsewhere; of their calls "
        f"{parked['sample']} wait to sample, {parked['extend']} to extend",
        f"           bytes in {traffic['gloo_in']:,} by the network, {traffic['ray_in']:,} by Ray; "
        f"out {traffic['gloo_out']:,} by the network, {traffic['ray_out']:,} by Ray",
        f"           rows in {traffic['gloo_rows_in']:,} and {traffic['ray_rows_in']:,}; "
        f"out {traffic['gloo_rows_out']:,} and {traffic['ray_rows_out']:,}",
    ]
    return "\n".join(lines)
