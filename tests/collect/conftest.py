"""One fork server, with all imports made, and one Ray serve every test; and so do the environments of tests/envs."""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from millpond.shm.directory import shared_root

sys.path.insert(0, str(Path(__file__).parent.parent / "envs"))
multiprocessing.set_forkserver_preload(["millpond.collect.workers"])
RAY_IS_BUSY = "Ray starts threads, descriptors and worker processes of its own whenever it likes"
PATIENCE_S = 30.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs on Ray is looked after by `nothing_of_ours` instead of the fixture for all tests."""
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()) and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.leaks(reason=RAY_IS_BUSY))
            item.add_marker(pytest.mark.xdist_group("ray"))  # one cluster at a time is enough


@pytest.fixture
def cluster(ray_session: str) -> Iterator[Any]:
    """Ray; and no thread, actor or segment of millpond's stays."""
    import ray

    before = _ours()
    yield ray
    end = time.monotonic() + PATIENCE_S
    while left := _ours() - before:
        assert time.monotonic() < end, f"the test left behind: {sorted(left)}"
        time.sleep(0.02)


def _ours() -> set[str]:
    family = psutil.Process().children(recursive=True)
    found = {f"thread {t.name}" for t in threading.enumerate() if t.name.startswith("millpond")}
    for process in family:
        try:
            if "CollectActor" in " ".join(process.cmdline()):
                found.add(f"process {process.pid}")
        except psutil.Error:
            continue
    return found | {path.name for path in shared_root().glob("millpond-*")}
