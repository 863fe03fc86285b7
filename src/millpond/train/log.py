"""``run.log``, and the warnings that the person who watches sees."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from millpond.train.progress import Progress


class _Say(logging.Handler):
    """Warnings go to the progress line's stream, without disturbing the line. Errors are told once, at the end."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.WARNING)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.ERROR:
            self._progress.say(f"{record.levelname.lower()}: {record.getMessage()}")


class _File(logging.FileHandler):
    """A log that its disk does not take is lost, and no reason to end a run or to print tracebacks."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


@contextlib.contextmanager
def logging_to(path: Path, progress: Progress) -> Iterator[None]:
    """While it is entered, everything that millpond logs goes to ``path``, and its warnings to ``progress``.

    Raises:
        OSError: the file cannot be opened.
    """
    root = logging.getLogger("millpond")
    file = _File(path, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handlers = [file, _Say(progress)]
    level, propagate = root.level, root.propagate
    root.setLevel(logging.DEBUG)
    root.propagate = False
    for handler in handlers:
        root.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
        root.setLevel(level)
        root.propagate = propagate
