"""The process of one run: ``python -m millpond.suite.child PID STARTED WORDS…`` ends with the suite whose pid that is.

It leads a group of its own, so a terminal's Ctrl-C reaches the suite alone, which then tells the run.
"""

from __future__ import annotations

import sys

from millpond.shm.family import belong_to


def main() -> int:
    """Be ``millpond WORDS…`` as long as the suite lives."""
    from millpond import cli

    owner = (int(sys.argv[1]), int(sys.argv[2]))
    sys.argv = ["millpond", *sys.argv[3:]]
    belong_to(owner)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
