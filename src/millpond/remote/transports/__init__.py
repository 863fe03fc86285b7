"""How rows travel between an owner and its clients."""

from __future__ import annotations
