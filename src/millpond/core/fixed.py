"""Objects whose settings are what they were built with."""

from __future__ import annotations

from typing import Any, ClassVar

from millpond.core.errors import InvalidArgument


class Fixed:
    """Assigning one of the settings named in ``FIXED`` once more raises ``InvalidArgument``: others have derived from
    it what would not change with it."""

    FIXED: ClassVar[tuple[str, ...]] = ()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.FIXED and name in self.__dict__:
            kind = type(self).__name__
            raise InvalidArgument(
                f"{kind}.{name} stays {self.__dict__[name]!r:.60}, with which this {kind} was built; make another one "
                f"to have {value!r:.60}"
            )
        object.__setattr__(self, name, value)
