"""An exception at a chosen one of the places where the interpreter runs signal handlers, as Ctrl-C would raise it."""

from __future__ import annotations

import contextlib
import dis
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import millpond

PACKAGE = str(Path(millpond.__file__).parent)


class Interrupt(BaseException):
    """In the place of KeyboardInterrupt, which would end the tests."""


class interrupted:  # used as a function
    """Raise `Interrupt` at the ``place``-th such place, from 0, in the files of millpond whose path begins so, or in
    what the standard library does for them in ``with``."""

    def __init__(self, place: int, *within: str) -> None:
        self.left, self.previous = place, ""
        self.own = (*(f"{PACKAGE}/{part}" for part in within), contextlib.__file__)
        self.tracer = sys.gettrace()

    def __enter__(self) -> None:
        sys.settrace(self.trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.tracer)

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith((PACKAGE, contextlib.__file__)):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":  # where a function of Python returns there is no such place: ``previous`` was its last
            place = self.previous.startswith(("CALL", "RESUME", "JUMP_BACKWARD"))
            if place and file.startswith(self.own):
                self.left -= 1
                if self.left == -1:
                    raise Interrupt
            self.previous = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        return self.trace
