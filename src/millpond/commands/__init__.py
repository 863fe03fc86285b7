"""One module per sub-command of ``millpond``: ``HELP``, one line, and ``main(words) -> exit code``."""

from __future__ import annotations
