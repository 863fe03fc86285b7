"""``python -m millpond`` is the command ``millpond``."""

from __future__ import annotations

import sys

from millpond.cli import main

if __name__ == "__main__":
    sys.exit(main())
