"""Where batches are packed before they are written: memory that is used again."""

from __future__ import annotations

from millpond.core.schema import Schema, Staging

KEPT_BYTES = 16 << 20
KEPT_SIZES = 8


class StagingPool:
    """Hands out `Staging` memory by size, and keeps a little of what comes back. Any thread may use it."""

    def __init__(self) -> None:
        self._kept: dict[int, list[Staging]] = {}

    def take(self, schema: Schema, n: int) -> Staging:
        """Memory for n rows that nobody else has."""
        try:
            return self._kept[n].pop()  # one step under the GIL
        except (KeyError, IndexError):
            return Staging(schema, n)

    def give(self, staging: Staging) -> None:
        """It may be handed out again."""
        n = staging.rows.shape[0]
        kept = self._kept.get(n)
        if kept is None:
            if len(self._kept) >= KEPT_SIZES or staging.rows.nbytes > KEPT_BYTES:
                return
            kept = self._kept.setdefault(n, [])
        if len(kept) < 4:
            kept.append(staging)
