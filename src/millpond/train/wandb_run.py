"""A run's numbers and films at Weights & Biases, which may be absent, locked, or out of reach."""

from __future__ import annotations

import contextlib
import importlib
import logging
import netrc
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from millpond.core.errors import InvalidArgument, MissingExtra
from millpond.train.run_state import read_json, write_json
from millpond.train.settings import LoggerSettings

logger = logging.getLogger("millpond.train")
_ID = "wandb.json"
_HELP = "logger.mode=offline needs neither key nor network (`wandb sync` sends it later), logger=local leaves W&B out"


def check_wandb(settings: LoggerSettings) -> Any:
    """The module ``wandb``, ready to begin a run as ``settings`` say. Nothing is begun, and nobody is asked.

    Raises:
        MissingExtra: it is not installed.
        InvalidArgument: it would need a key and finds none.
    """
    try:
        wandb = importlib.import_module("wandb")
    except ModuleNotFoundError as error:
        raise _missing(error.name) from None
    if getattr(wandb, "__file__", None) is None:  # a folder that runs have left here
        raise _missing("wandb")
    with _in_words():
        known = wandb.setup().settings
    mode, key = _mode(settings) or known.mode, known.api_key
    if mode not in ("online", "shared") or key or has_key(os.environ, host=urlsplit(known.base_url).netloc):
        return wandb
    raise InvalidArgument(
        f"logger.wandb=true: no key for Weights & Biases was found. `wandb login` or WANDB_API_KEY gives one; {_HELP}"
    )


def _mode(settings: LoggerSettings) -> Any:
    return settings.mode or os.environ.get("WANDB_MODE")  # wandb itself looks at it once in a process


def has_key(environment: Mapping[str, str], *, host: str) -> bool:
    """Whether a key lies in the environment, or in the user's netrc for ``host`` or another host of W&B."""
    if environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    home = Path(environment.get("HOME") or Path.home())
    for path in (environment.get("NETRC"), home / ".netrc", home / "_netrc"):
        with contextlib.suppress(OSError, netrc.NetrcParseError, UnicodeDecodeError):
            if path and any(name == host or "wandb" in name for name in netrc.netrc(path).hosts):
                return True
    return False


def _missing(package: str | None) -> MissingExtra:
    return MissingExtra(f"logger.wandb=true needs the package {package!r}: pip install 'millpond[wandb]' brings it")


@contextlib.contextmanager
def _in_words() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        words = " ".join(str(error).split())
        raise InvalidArgument(
            f"logger.wandb=true: Weights & Biases cannot begin: {type(error).__name__}: {words}. {_HELP}"
        ) from error


class WandbRun:
    """The W&B run of a run directory, which is gone on with when the directory is. A wandb that fails later is let go.

    Raises:
        InvalidArgument: it cannot begin; the message says why, and what to do.
    """

    def __init__(self, directory: Path, settings: LoggerSettings, *, config: Mapping[str, Any]) -> None:
        wandb = self._wandb = check_wandb(settings)
        found = read_json(directory / _ID) if (directory / _ID).exists() else {}
        known = found.get("project") == settings.project
        with _in_words():
            self._run: Any = wandb.init(
                dir=str(directory),
                config=dict(config),
                project=settings.project,
                group=settings.group,
                name=settings.name or directory.name,
                mode=_mode(settings),
                id=found["id"] if known else secrets.token_hex(4),
                resume="allow" if known else None,
                settings=wandb.Settings(silent=True, console="off"),
            )
            self._run.define_metric("frames")
            self._run.define_metric("*", step_metric="frames")  # evaluations come behind rows of later frames
        write_json(directory / _ID, {"id": self._run.id, "project": settings.project})

    def write(self, frames: int, row: Mapping[str, float]) -> None:
        self._try(lambda run: run.log({**row, "frames": frames}))

    def film(self, frames: int, path: Path) -> None:
        video = self._wandb.Video
        self._try(lambda run: run.log({"eval/video": video(str(path), format="mp4"), "frames": frames}))

    def close(self) -> None:
        self._try(lambda run: run.finish())

    def _try(self, what: Callable[[Any], Any]) -> None:
        """A run that may have gone on for days does not end because a service does."""
        if self._run is None:
            return
        try:
            what(self._run)
        except Exception as error:  # noqa: BLE001  # of its service, its files, its network
            self._run = None
            logger.warning("no more is logged to Weights & Biases: %s: %s", type(error).__name__, error)
