"""Buffers in four places: this process, this host, behind Gloo, behind Ray. One cluster serves all these tests."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import remote_children as children

from millpond import ReplayBuffer
from millpond.remote.address import OwnerAddress
from millpond.remote.client import ReplayClient
from millpond.shm.directory import reap, shared_root

multiprocessing.set_forkserver_preload(["millpond.remote.server", "millpond.remote.client"])

Make = Callable[..., Any]


@pytest.fixture(scope="package", autouse=True)
def quick_trees() -> Iterator[None]:
    """The same bits, without the seconds that compiling takes in each process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILLPOND_TREE", "numpy")
        yield


@pytest.fixture(autouse=True)
def nothing_of_ours(request: pytest.FixtureRequest) -> Iterator[None]:
    """No thread, segment or actor of millpond's stays, also where Ray's own come and go."""
    if request.node.get_closest_marker("xdist_group"):  # it runs on Ray
        request.getfixturevalue("ray_keeper")  # it stays for others
    before = _ours()
    yield
    children.wait_for(lambda: _ours() <= before, lambda: f"these to go: {sorted(_ours() - before)}")


def _ours() -> set[str]:
    threads = {f"thread {t.name}" for t in threading.enumerate() if t.name.startswith("millpond")}
    actors = set()
    for process in psutil.Process().children(recursive=True):
        try:
            if "Replay" in " ".join(process.cmdline()):
                actors.add(f"process {process.pid}")
        except psutil.Error:
            continue
    return threads | actors | {path.name for path in shared_root().glob("millpond-*-replay-*")}


# ---------------------------------------------------------------------- processes
@pytest.fixture(scope="package")
def keeper() -> Iterator[children.Child]:
    """A process that owns buffers, one test after the other."""
    child = children.Child()
    yield child
    child.end()


@pytest.fixture
def child() -> Iterator[Callable[[], children.Child]]:
    """``child()`` starts a process of this test's own, which may be killed."""
    started: list[children.Child] = []

    def start() -> children.Child:
        started.append(children.Child())
        return started[-1]

    yield start
    for each in started:
        each.end()
    reap()


@pytest.fixture
def pond(keeper: children.Child) -> Iterator[Callable[..., OwnerAddress]]:
    """``pond(capacity, …)`` opens a buffer in another process, and gives what a client must know of it."""
    names: list[str] = []

    def opened(storage: Any, **arguments: Any) -> OwnerAddress:
        names.append(f"pond{len(names)}")
        asked = children.plan(storage, name=names[-1], **arguments)
        return keeper.ask(children.open_service, asked)

    yield opened
    for name in names:
        try:
            keeper.ask(children.close_service, name)
        except KeyError:  # it could not be opened
            continue


@pytest.fixture
def client() -> Iterator[Callable[..., ReplayClient]]:
    """``client(owner, transport="gloo", …)``, left at the end."""
    made: list[ReplayClient] = []

    def make(owner: OwnerAddress, **options: Any) -> ReplayClient:
        made.append(ReplayClient(owner, **{"transport": "gloo", "connect_timeout": 20.0, **options}))
        return made[-1]

    yield make
    for each in made:
        each.close()


# ---------------------------------------------------------------------- Ray
@pytest.fixture(scope="package")
def cluster(ray_session: str) -> str:
    """The address of the cluster."""
    return ray_session


@pytest.fixture
def node(cluster: str) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """``node()`` adds a node that has the resource "far", in a process tree of its own on this machine."""
    import ray

    started: list[subprocess.Popen[bytes]] = []

    def start(*options: str, within: tuple[str, ...] = (), **environment: str) -> subprocess.Popen[bytes]:
        command = [*within, sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={cluster}", "--block"]
        command += ["--num-cpus=1", '--resources={"far": 1}', "--disable-usage-stats", *options]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        started.append(subprocess.Popen(command, env=os.environ | environment, **quiet))
        children.wait_for(lambda: "far" in ray.available_resources(), "the node", 60)
        return started[-1]

    yield start
    for process in started:
        children.kill_tree(process)


@pytest.fixture(scope="package")
def ray_keeper(cluster: str) -> Iterator[Callable[[Any], OwnerAddress]]:
    """An actor that owns buffers, one test after the other: `RayReplayBuffer` starts a new one for each."""
    import ray

    from millpond.remote.server import ReplayActor

    actor = (
        ray.remote(concurrency_groups={"control": 4, "data": 16})(ReplayActor)
        .options(num_cpus=0, name="pond", namespace="tests")
        .remote()
    )

    ray.get(actor.close.remote())  # it is there

    def opened(asked: Any) -> Any:
        ray.get(actor.close.remote())
        return ray.get(actor.open.remote(asked, ray.get_runtime_context().gcs_address))

    yield opened
    ray.get(actor.close.remote())
    ray.kill(actor)


# ---------------------------------------------------------------------- a buffer in each place
@pytest.fixture(params=["local", "shm", "gloo", "ray"])
def way(request: pytest.FixtureRequest) -> str:
    if request.param == "ray":
        pytest.importorskip("ray")
    return str(request.param)


@pytest.fixture
def make(way: str, request: pytest.FixtureRequest, pond: Any, client: Any) -> Iterator[Make]:
    """``make(capacity, kind=…, …)``: a buffer in this process, or a client of one elsewhere."""
    buffers: list[ReplayBuffer] = []

    def made(storage: Any, *, kind: type[ReplayBuffer] = ReplayBuffer, **arguments: Any) -> Any:
        if way == "local":
            buffers.append(kind(storage, **arguments))
            return buffers[-1]
        if way in ("shm", "gloo"):
            return client(pond(storage, kind=kind, **arguments), transport=way, seed=arguments.get("seed"))
        owner = request.getfixturevalue("ray_keeper")(children.plan(storage, kind=kind, **arguments))
        if not isinstance(owner, OwnerAddress):
            from millpond.remote.messages import raised

            raise raised(owner)
        return client(owner, transport="ray")

    yield made
    for buffer in buffers:
        buffer.close()
    if way == "ray":
        import ray

        ray.get(ray.get_actor("pond", namespace="tests").close.remote())
