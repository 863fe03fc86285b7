"""Packages that an extra brings."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from millpond.core.errors import MissingExtra


@contextlib.contextmanager
def extra(name: str) -> Iterator[None]:
    """What the body imports comes with ``pip install 'millpond[name]'``.

    Raises:
        MissingExtra: a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as problem:
        if (problem.name or "").partition(".")[0] == "millpond":
            raise
        raise MissingExtra(
            f"the package {problem.name!r} is not installed: pip install 'millpond[{name}]' brings it"
        ) from problem
