"""Every error that millpond raises on purpose. Each also is the built-in that people expect.

MillpondError
├── InvalidArgument (ValueError)      a value that no call can accept; nothing was changed
│   ├── InvalidType (TypeError)       a value of the wrong type
│   ├── OutOfRange (IndexError)       an index or a mask of items that are not there
│   ├── SchemaMismatch                data that does not fit the bound schema, with the field named
│   ├── Unsatisfiable                 no wait could help: fix the sizes or the limits
│   ├── NonFinite                     NaN or infinity where the caller asked that they be refused
│   ├── MissingExtra (ImportError)    a package is not installed; the message names the extra that brings it
│   └── CheckpointError               a file that is damaged, of another version or of another schema
├── NotReady (RuntimeError)           the buffer cannot answer now; the message says what is missing
│   └── BufferFull                    no space, and the admission policy is "raise"
├── DeadlineExceeded (TimeoutError)   a wait ran past its timeout
├── Cancelled (RuntimeError)          the caller's cancel event was set
├── BufferClosed (RuntimeError)       somebody closed it on purpose
├── PeerLost (ConnectionError)        the process on the other side died
├── NotShareable (TypeError)          this object, or this memory, cannot cross a process boundary
├── OutOfMemory (MemoryError)         the memory that was asked for is not there; nothing was allocated
├── OutOfDisk (OSError)               the disk space that was asked for is not there; nothing was allocated
├── WorkerFailed (RuntimeError)       a worker raised, or died more often than allowed; carries its traceback
└── RunFailed (RuntimeError)          a training run ended, and one of its own checks failed
"""

from __future__ import annotations


class MillpondError(Exception):
    """The root of the tree."""


class InvalidArgument(MillpondError, ValueError):
    """A value that no call can accept. Nothing was changed."""


class InvalidType(InvalidArgument, TypeError):
    """A value of the wrong type. Nothing was changed."""


class OutOfRange(InvalidArgument, IndexError):
    """An index, or a mask, of items that are not there."""


class SchemaMismatch(InvalidArgument):
    """Data that does not fit the bound schema. The message names the field, what was expected and what came."""


class Unsatisfiable(InvalidArgument):
    """What was asked for can never be met, however long one waits."""


class NonFinite(InvalidArgument):
    """NaN or infinity in a buffer with ``check_finite=True``, or in a loss. The message names the field."""


class MissingExtra(InvalidArgument, ImportError):
    """A package is not installed. The message names the extra that brings it."""


class CheckpointError(InvalidArgument):
    """A checkpoint that is damaged, of an unknown version, or of another schema. Nothing was loaded."""


class NotReady(MillpondError, RuntimeError):
    """The buffer cannot answer now. The message says what is missing, with numbers."""


class BufferFull(NotReady):
    """There is no space and the admission policy is ``"raise"``. Nothing was written."""


class DeadlineExceeded(MillpondError, TimeoutError):
    """A wait ran past its timeout. The message names the unmet condition."""


class Cancelled(MillpondError, RuntimeError):
    """The caller's cancel event was set while, or before, the call waited."""


class BufferClosed(MillpondError, RuntimeError):
    """The buffer was closed on purpose."""


class PeerLost(MillpondError, ConnectionError):
    """The process on the other side died. The message names it."""


class NotShareable(MillpondError, TypeError):
    """This object, or this memory, cannot cross a process boundary. The message says what can."""


class OutOfMemory(MillpondError, MemoryError):
    """The memory that was asked for is not there. Nothing was allocated."""


class OutOfDisk(MillpondError, OSError):
    """The disk space that was asked for is not there. Nothing was allocated."""


class WorkerFailed(MillpondError, RuntimeError):
    """A worker raised, or died more often than allowed. Carries the remote traceback where there is one."""


class RunFailed(MillpondError, RuntimeError):
    """A training run ended, and one of its own checks failed. The message names the check."""
