"""Over a real network interface: the owner lives in a network namespace of its own, behind a pair of virtual cards.

Skipped where the system does not let a test make one (that takes root, and Linux's ``ip``).
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import remote_children as children
from remote_children import batch, ids_of, wait_for
from test_gloo import WITHIN_S, Waiting, waiters

from millpond.core.errors import PeerLost
from millpond.core.schema import Schema
from millpond.remote import RayReplayBuffer
from millpond.remote.address import HOST


@dataclass
class Network:
    """A namespace, the card that leads to it, and the addresses of both ends."""

    namespace: str
    card: str
    near: str
    far: str

    def received(self) -> int:
        """Bytes that came from there."""
        return int(Path(f"/sys/class/net/{self.card}/statistics/rx_bytes").read_text())

    def sent(self) -> int:
        return int(Path(f"/sys/class/net/{self.card}/statistics/tx_bytes").read_text())


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@pytest.fixture
def network() -> Iterator[Network]:
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("making a network namespace takes root, and `ip`")
    token, number = secrets.token_hex(3), 4 * secrets.randbelow(60)
    made = Network(f"millpond-{token}", f"mp{token}", f"10.213.77.{number + 1}", f"10.213.77.{number + 2}")
    try:
        ip("netns", "add", made.namespace)
    except subprocess.CalledProcessError as problem:
        pytest.skip(f"no network namespaces here: {problem.stderr.decode().strip()}")
    try:
        ip("link", "add", made.card, "type", "veth", "peer", "name", "there", "netns", made.namespace)
        ip("addr", "add", f"{made.near}/30", "dev", made.card)
        ip("link", "set", made.card, "up")
        for words in (["addr", "add", f"{made.far}/30", "dev", "there"], ["link", "set", "there", "up"]):
            ip("-n", made.namespace, *words)
        ip("-n", made.namespace, "link", "set", "lo", "up")
        ip("-n", made.namespace, "route", "add", "default", "via", made.near)
        yield made
    finally:
        subprocess.run(["ip", "netns", "del", made.namespace], capture_output=True, timeout=20)
        subprocess.run(["ip", "link", "del", made.card], capture_output=True, timeout=20)


def test_batches_cross_the_wire_and_a_silent_host_is_noticed(network, child, client):
    """Payloads pass the card; and when the cable is cut, nobody says goodbye, but every waiter is told within 5 s."""
    owning = child()
    owning.ask(children.enter, network.namespace)
    schema = Schema.from_example(batch(1))
    plan = children.plan(50_000, batch_size=20_000, schema=schema)
    owner = owning.ask(children.open_service, plan, network.far)
    far = client(owner, transport="auto", host="near")
    assert far.transport == "gloo"
    sent, payload = network.sent(), 20_000 * schema.row_nbytes
    far.extend(batch(20_000))
    assert network.sent() - sent > payload
    received = network.received()
    assert len(set(ids_of(far.sample()))) > 10_000
    assert network.received() - received > payload
    far.empty()
    waiting = Waiting(far.sample, 1, wait=True)
    wait_for(lambda: waiters(far, "consumers") == 1, "the waiter")
    far.extend(batch(1))
    assert ids_of(waiting.join()) == [0]
    far.empty()
    waiting = Waiting(far.sample, 1, wait=True)
    wait_for(lambda: waiters(far, "consumers") == 1, "the waiter")
    start = time.monotonic()
    ip("link", "set", network.card, "down")
    with pytest.raises(PeerLost, match=f"process {owning.pid} on {network.far}"):
        waiting.join()
    assert waiting.ended_at - start < WITHIN_S
    ip("link", "set", network.card, "up")
    wait_for(lambda: far.write_count == 20_001, "the client to find its owner again")


@pytest.mark.slow
def test_a_cable_that_is_cut_within_a_transfer(network, child, client):
    """The bytes underway are lost; the call is told within seconds, and the owner forgets the client."""
    owning = child()
    owning.ask(children.enter, network.namespace)
    owner = owning.ask(children.open_service, children.plan(3_000_000), network.far)
    far = client(owner)
    far.extend(batch(10))
    sent = network.sent()
    writing = Waiting(lambda: [far.extend(batch(1_000_000)) for _ in range(100)])
    wait_for(lambda: network.sent() - sent > 40_000_000, "the transfer to begin")
    start = time.monotonic()
    ip("link", "set", network.card, "down")
    with pytest.raises(PeerLost, match=f"process {owning.pid}"):
        writing.join()
    assert writing.ended_at - start < 2 * WITHIN_S  # what was on its way is waited for
    wait_for(lambda: owning.ask(children.describe)["clients"] == [], "the owner to forget the client", 40)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.exhaustive
def test_a_node_of_ray_s_in_another_network(network, cluster, node):
    """``auto`` on two hosts: shared memory would work, for both are this machine; the hosts' names say otherwise."""
    within = ("ip", "netns", "exec", network.namespace)
    node(f"--node-ip-address={network.far}", within=within, **{HOST: "far"})
    options = {"resources": {"far": 0.1}}
    with RayReplayBuffer(20_000, batch_size=5000, schema=Schema.from_example(batch(1)), ray_options=options) as rb:
        assert rb.transport == "gloo"
        assert rb.describe()["node"] == network.far
        sent = network.sent()
        rb.extend(batch(20_000))
        assert network.sent() - sent > 20_000 * rb.schema.row_nbytes
        assert len(ids_of(rb.sample())) == 5000
        assert rb.describe()["traffic"]["ray_in"] == 0
        with RayReplayBuffer(10) as near:  # where no place is named the owner is beside whoever made it
            assert near.transport == "shm"
