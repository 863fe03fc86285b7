"""A look at a buffer in a Ray cluster, for ``millpond inspect ray://NAME``."""

from __future__ import annotations

import logging
from typing import Any

from millpond.core.errors import DeadlineExceeded, InvalidArgument, NotShareable, PeerLost
from millpond.remote import cluster

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
