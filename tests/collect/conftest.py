"""The environments of tests/envs serve here too, and one fork server, with all imports made, serves every test."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "envs"))
multiprocessing.set_forkserver_preload(["millpond.collect.workers"])
