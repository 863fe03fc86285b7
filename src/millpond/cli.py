"""The command line: finds the sub-command, and turns every error into one line and an exit code.

Exit codes: 0 done, 1 a run or the program failed, 2 the user asked for something that cannot be, 130 interrupted.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from millpond import __version__
from millpond.core.errors import InvalidArgument, MillpondError, NotShareable, OutOfDisk, OutOfMemory

# Each is a module of millpond.commands, imported when it is called: the others' imports take seconds.
COMMANDS = {
    "train": "train a policy, in one process or with worker processes",
    "suite": "train with each algorithm, each run in a fresh process, and check every one",
    "eval": "play episodes with the policy of a run, without exploration",
    "inspect": "show what a replay buffer holds, and who waits for what",
}

_USERS = (InvalidArgument, NotShareable, OutOfDisk, OutOfMemory)  # what the user can put right


def main(words: Sequence[str] | None = None) -> int:
    """Run ``millpond WORDS`` and return its exit code. Without ``words``: as the program, whose process this is."""
    if words is not None:
        return _main(words)
    signal.signal(signal.SIGINT, _end_at_once)
    if not sys.flags.safe_path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: environments of one's own; workers have the same path
    try:
        return _main(sys.argv[1:])
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # it ends as it is
        if "millpond.train.fork_server" in sys.modules:
            sys.modules["millpond.train.fork_server"].end()


def _end_at_once(*_: object) -> None:
    """For Ctrl-C while modules are imported, which may turn it into anything: nothing was begun."""
    os.write(2, b"millpond: interrupted\n")
    os._exit(128 + signal.SIGINT)


def _interrupt(*_: object) -> None:
    """For Ctrl-C while a command runs: it clears up, unless a second one comes."""
    signal.signal(signal.SIGINT, _end_at_once)
    raise KeyboardInterrupt


def _main(words: Sequence[str]) -> int:
    name = words[0] if words else ""
    if name in ("", "-h", "--help", "help"):
        print(_usage(), file=sys.stdout if name else sys.stderr)
        return 0 if name else 2
    if name in ("-V", "--version"):
        print(f"millpond {__version__}")
        return 0
    if name not in COMMANDS:
        return _complain("millpond", f"unknown command {name!r}; there are: {', '.join(COMMANDS)}", 2)
    try:
        command = _load(name)
        if signal.getsignal(signal.SIGINT) is _end_at_once:
            signal.signal(signal.SIGINT, _interrupt)
        return command.main(words[1:])  # type: ignore[no-any-return]
    except _USERS as error:
        return _complain(f"millpond {name}", str(error), 2)
    except MillpondError as error:
        words = str(error).partition("\n\n")[0]  # a worker's traceback comes behind
        return _complain(f"millpond {name}", f"{type(error).__name__}: {words}", 1)
    except KeyboardInterrupt:
        return _complain(f"millpond {name}", "interrupted", 128 + signal.SIGINT)
    except BrokenPipeError:  # the reader of our output, such as `head`, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _load(name: str) -> Any:
    try:
        return importlib.import_module(f"millpond.commands.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "millpond":
            raise
        raise InvalidArgument(
            f"the package {error.name!r} is not installed: pip install 'millpond[train]' brings it"
        ) from None


def _usage() -> str:
    lines = "\n".join(f"  {name:<8} {text}" for name, text in COMMANDS.items())
    return f"usage: millpond COMMAND …\n\n{lines}\n\n`millpond COMMAND --help` tells more about one of them."


def _complain(who: str, text: str, code: int) -> int:
    print(f"{who}: {' '.join(text.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
