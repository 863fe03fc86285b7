"""``import slim`` before ``millpond`` gives small processes: the package without its ``__init__``, so without torch.

Torch takes seconds to import, makes each of hundreds of forks ten times slower, and is no concern of ``millpond.shm``.
Does nothing where ``millpond`` was imported before.
"""

from __future__ import annotations

import importlib.util
import sys
import types

if "millpond" not in sys.modules:
    spec = importlib.util.find_spec("millpond")
    assert spec is not None
    package = sys.modules["millpond"] = types.ModuleType("millpond")
    package.__path__ = list(spec.submodule_search_locations or [])
