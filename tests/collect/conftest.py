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
multiprocessing.set_forkserver_preload(["millpond.collect.worker"])
PATIENCE_S = 30.0


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
