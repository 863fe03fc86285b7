"""JSON that notices any change of its text: an object whose last entry is a checksum of all that stands before it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

_MARK = '"crc32": "'


def seal(values: Mapping[str, Any], *, indent: int | None = None) -> str:
    """A JSON text of ``values``, which must not be empty. Raises ``ValueError`` for NaN and infinities."""
    text = json.dumps({**values, "crc32": ""}, indent=indent, allow_nan=False)
    before = text[: text.rindex(_MARK)]
    return f"{before}{_MARK}{zlib.crc32(before.encode()):08x}{text[len(before) + len(_MARK) :]}\n"


def unseal(text: str) -> dict[str, Any]:
    """The values in it. One without a checksum and of format 1, as earlier versions wrote, is taken as it is.

    Raises ``ValueError``, saying what is wrong.
    """
    try:
        values = json.loads(text)
    except RecursionError as problem:
        raise ValueError("it is nested too deeply") from problem
    if not isinstance(values, dict):
        raise ValueError("it holds no JSON object")
    if "crc32" not in values and values.get("format") == 1:
        return values
    before, mark, rest = text.rpartition(_MARK)
    expected = f'{zlib.crc32(before.encode()):08x}"'
    if not mark or rest not in (expected + "}\n", expected + "\n}\n"):
        raise ValueError("its checksum is not the one that it was written with")
    del values["crc32"]
    return values
