"""What holds for every test: one torch thread, seeded Hypothesis in CI, and nothing may be left behind."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

# Before torch is imported, here and in every process that a test starts: parallel tests and workers share few cores.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import leaks
import pytest
from hypothesis import settings

settings.register_profile("local", deadline=None)  # no test depends on the speed of the machine
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "local")

failed = pytest.StashKey[bool]()
segments = pytest.StashKey[tuple[str, str | None]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("leak_grace", "seconds: an orderly end may take a moment; a leak does not end", default="2.0")
    help_ray = "run what needs Ray too, alone, or not at all"
    parser.addoption("--ray", choices=("with", "only", "without"), default="with", help=help_ray)
    help_exhaustive = "run the cases marked `exhaustive` too, or alone"
    parser.addoption("--exhaustive", choices=("with", "only", "without"), default="without", help=help_exhaustive)


def pytest_configure(config: pytest.Config) -> None:
    leaks.adopt_orphans()
    # Each session, and each of its workers, has its own place for segments: none is blamed for, or reaps, another's.
    before = os.environ.get("MILLPOND_SHM")
    root = before or ("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir())
    os.environ["MILLPOND_SHM"] = tempfile.mkdtemp(prefix=f"tests-of-millpond-{os.getpid()}-", dir=root)
    config.stash[segments] = os.environ["MILLPOND_SHM"], before
    if not hasattr(config, "workerinput") and config.getoption("--ray") != "only":
        compile_kernels()  # once, not in each worker
    # A shell that runs the tests in the background makes them ignore Ctrl-C, and with them every process they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure(config: pytest.Config) -> None:
    mine, before = config.stash[segments]
    shutil.rmtree(mine, ignore_errors=True)
    if before is None:
        del os.environ["MILLPOND_SHM"]
    else:
        os.environ["MILLPOND_SHM"] = before


def compile_kernels() -> None:
    """Fill Numba's cache, in a process of its own: this one starts the workers."""
    load = "from millpond.replay.kernels import loading; loading.request(); loading.wait()"
    subprocess.run([sys.executable, "-c", load], check=False, timeout=300)


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What runs on Ray comes last, and all of it in one worker: a process can be connected to one cluster only, and
    dies silently when it is connected to one that goes."""
    chosen = {"with": (True, False), "only": (True,), "without": (False,)}
    ray, exhaustive = chosen[config.getoption("--ray")], chosen[config.getoption("--exhaustive")]
    left_out = [
        item
        for item in items
        if on_ray(item) not in ray or bool(list(item.iter_markers("exhaustive"))) not in exhaustive
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]
    for item in items:
        if on_ray(item):
            item.add_marker(pytest.mark.xdist_group("ray"))
            item.add_marker(pytest.mark.leaks(reason="Ray starts threads, descriptors and processes whenever it likes"))
    items.sort(key=on_ray)


def on_ray(item: pytest.Item) -> bool:
    """Does this test need ``ray_session``, by its fixtures or as one of several ways, or a cluster of its own?"""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    needed = "ray_session" in getattr(item, "fixturenames", ()) or parameters.get("way") == "ray"
    return needed or item.get_closest_marker("ray") is not None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    item.stash[failed] = item.stash.get(failed, False) or report.failed
    return report


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread, a process, a descriptor or a segment behind; kill such a process.

    Of a test that failed already only the processes are looked after: its traceback keeps its other objects alive.
    """
    marker = request.node.get_closest_marker("leaks")
    if marker and not marker.kwargs.get("reason"):
        pytest.fail("@pytest.mark.leaks needs reason=...", pytrace=False)
    before = leaks.look()
    yield
    loading = sys.modules.get("millpond.replay.kernels.loading")
    if loading is not None:
        loading.wait()  # one thread for each process, which ends by itself
    if marker:
        return
    left = what_stays(before, grace_s=float(request.config.getini("leak_grace")))
    leaks.kill(left)
    if left and not request.node.stash.get(failed, False):
        pytest.fail("the test left behind:\n  " + "\n  ".join(map(str, sorted(left))), pytrace=False)


def what_stays(before: frozenset[leaks.Trace], *, grace_s: float) -> frozenset[leaks.Trace]:
    """What is there now and was not there `before`, after garbage is collected and the grace has passed."""
    left = leaks.look() - before
    if not left:
        return left
    gc.collect()
    end = time.monotonic() + grace_s
    while (left := leaks.look() - before) and time.monotonic() < end:
        time.sleep(0.01)
    return left


@pytest.fixture(scope="session")
def ray_session() -> Iterator[str]:
    """The address of a Ray cluster of one node, to which this process is connected as any program would be. One for
    all tests."""
    ray = pytest.importorskip("ray")
    environment = {
        "PYTHONPATH": os.pathsep.join(sys.path),  # the workers find what the tests define
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    with tempfile.TemporaryDirectory(prefix="mp-ray-") as directory, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():  # the directory's name is short: sockets are made in it
            patch.setenv(name, value)
        quiet = {"include_dashboard": False, "logging_level": "ERROR", "log_to_driver": False}
        ray.init(num_cpus=2, namespace="tests", _temp_dir=directory, **quiet)
        yield ray.get_runtime_context().gcs_address
        ray.shutdown()
