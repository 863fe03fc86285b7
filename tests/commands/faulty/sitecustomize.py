"""Python reads this as it starts: a run of a suite has the fault of tests/train/faults.py that it is named after."""

from __future__ import annotations

import sys
from pathlib import Path

if "millpond.suite.child" in sys.orig_argv:
    _named = [Path(word).name for word in sys.orig_argv if word.startswith(("run_dir=", "resume="))]
    import faults
    import pytest

    if _fault := getattr(faults, _named[0] if _named else "", None):
        _fault(pytest.MonkeyPatch())
