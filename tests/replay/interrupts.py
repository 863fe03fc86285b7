"""An exception at a chosen one of the places where the interpreter runs signal handlers, as Ctrl-C would raise it."""

from __future__ import annotations

import contextlib
import dis
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import millpond

PACKAGE = str(Path(millpond.__file__).parent)


class Interrupt(BaseException):
    """In the place of KeyboardInterrupt, which would end the tests."""


@contextlib.contextmanager
def interrupted(place: int, within: str = "") -> Iterator[None]:
    """Raise `Interrupt` at the ``place``-th such place, from 0, in the files of millpond whose path has ``within``."""
    left, previous, own, tracer = place, "", f"{PACKAGE}/{within}", sys.gettrace()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left, previous
        file = frame.f_code.co_filename
        if not file.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":  # where a function of Python returns there is no such place: ``previous`` was its last
            if previous.startswith(("CALL", "RESUME", "JUMP_BACKWARD")) and file.startswith(own):
                left -= 1
                if left == -1:
                    raise Interrupt
            previous = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(tracer)
