"""Errors on the wire: by name and text, so that a remote call raises what a local one would."""

from __future__ import annotations

import traceback

from millpond.core import errors
from millpond.core.errors import MillpondError, OutOfMemory, WorkerFailed
from millpond.remote.messages import Message

_PLAIN: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (IndexError, KeyError, TypeError, ValueError, RuntimeError, OSError)
}


def failed(number: int, error: Exception) -> Message:
    """The answer to a request that raised. What nobody expected carries the owner's traceback."""
    if isinstance(error, MemoryError) and not isinstance(error, MillpondError):
        error = OutOfMemory(f"the owner's memory does not suffice: {error}")
    fields = {"error": type(error).__name__, "text": str(error)}
    if not isinstance(error, MillpondError | IndexError):
        fields["traceback"] = "".join(traceback.format_exception(error))
    return Message("error", number, fields)


def raised(answer: Message) -> Exception:
    """The error in such an answer, to be raised here. One that is unknown here is a ``WorkerFailed``."""
    name, text = str(answer.fields["error"]), str(answer.fields["text"])
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, MillpondError):
        return kind(text)
    trace = answer.fields.get("traceback", "")
    plain = _PLAIN.get(name)
    if plain is not None:
        error = plain(text)
        if trace:
            error.add_note(f"raised in the process that owns the buffer:\n{trace}")
        return error
    return WorkerFailed(f"the owner of the buffer raised {name}: {text}\n{trace}")
