"""All that millpond asks of a Ray cluster: to be there, to start an owner, and to find it again."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Mapping
from typing import Any

from millpond.core.errors import DeadlineExceeded, InvalidArgument, PeerLost
from millpond.remote.failures import raised
from millpond.remote.messages import Message
from millpond.remote.owner import Owner

NAMESPACE = "millpond"
_GROUPS = {"data": 16, "control": 4}  # calls at a time; none of them waits for the buffer
_CLOSING_S = 10.0


def ensure() -> None:
    """Make sure that this process is connected to a cluster.

    Where the program did not say ``ray.init``, it is said here: to the cluster that ``RAY_ADDRESS`` names, or to a new
    one on this machine; without dashboard, usage statistics and log noise. What the program set is left alone.

    Raises ``InvalidArgument`` where Ray is not installed.
    """
    try:
        import ray
    except ImportError as problem:
        raise InvalidArgument("this needs Ray: pip install 'millpond[ray]' brings it") from problem
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # what Ray will do; it warns until then
    ray.init(include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False, namespace=NAMESPACE)


def start(plan: Any, options: Mapping[str, Any], timeout: float) -> tuple[Any, Owner]:
    """A new owner, and its actor.

    Raises:
        InvalidArgument: the name is taken, or Ray does not know an option.
        DeadlineExceeded: it was not there within ``timeout`` seconds.
        PeerLost: it died on the way.
        And what making the buffer raised.
    """
    import ray

    from millpond.remote.service import ReplayActor

    remote: Any = ray.remote(concurrency_groups=_GROUPS)(ReplayActor)  # type: ignore[call-overload]
    try:
        actor = remote.options(**options).remote()
    except ValueError as problem:
        raise InvalidArgument(f"Ray cannot start the owner: {problem}") from problem
    try:
        said = _get(actor.open, plan, timeout=timeout, name=plan.name)
        if isinstance(said, Message):
            raise raised(said)
    except BaseException:
        _kill(actor)
        raise
    return actor, said


def find(name: str, namespace: str) -> Any:
    """The actor of this name. Raises ``PeerLost`` where there is none."""
    import ray

    ensure()
    try:
        return ray.get_actor(name, namespace=namespace)
    except (ValueError, ray.exceptions.RayError) as problem:
        raise PeerLost(f"there is no replay {name!r} in namespace {namespace!r} of this cluster") from problem


def owner_of(name: str, namespace: str, timeout: float) -> Owner:
    """What a client must know of a live owner. Raises ``PeerLost`` or ``DeadlineExceeded``."""
    owner: Owner = _get(find(name, namespace).owner, timeout=timeout, name=name)
    return owner


def describe(name: str, namespace: str, timeout: float) -> dict[str, Any]:
    """What a live owner says of itself. Raises ``PeerLost`` or ``DeadlineExceeded``."""
    description: dict[str, Any] = _get(find(name, namespace).describe, timeout=timeout, name=name)
    return description


def stop(actor: Any) -> None:
    """Close the buffer, and end the owner's process. Nothing happens where it is gone already."""
    import ray

    if ray.is_initialized():
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(actor.close.options(concurrency_group="control").remote(), timeout=_CLOSING_S)
        _kill(actor)


def _kill(actor: Any) -> None:
    import ray

    with contextlib.suppress(ray.exceptions.RayError, ValueError):
        ray.kill(actor)


def _get(method: Any, *arguments: Any, timeout: float, name: str) -> Any:
    import ray

    try:
        return ray.get(method.options(concurrency_group="control").remote(*arguments), timeout=timeout)
    except ray.exceptions.GetTimeoutError as problem:
        raise DeadlineExceeded(
            f"the owner of replay {name!r} was not there within {timeout:g} s: is there a node that has what "
            "ray_options asks for?"
        ) from problem
    except ray.exceptions.RayTaskError:
        raise
    except ray.exceptions.RayError as problem:
        raise PeerLost(f"the owner of replay {name!r} died: {problem}") from problem


def new_name() -> str:
    """For an owner that was given none."""
    return f"millpond-{secrets.token_hex(4)}"
