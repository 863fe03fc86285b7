"""Is what a run needs beside itself there? Asked before its first frame, and before anything is written."""

from __future__ import annotations

import dataclasses
import logging

from millpond.core.errors import InvalidArgument
from millpond.core.extras import extra
from millpond.train.filming import check_filming
from millpond.train.settings import LoggerSettings, Settings
from millpond.train.wandb_run import check_wandb

logger = logging.getLogger("millpond.train")


def check_loggers(settings: LoggerSettings) -> None:
    """Is what writes the numbers there?

    Raises:
        MissingExtra: a package is missing; the message has the command that installs it.
        InvalidArgument: W&B would need a key, and finds none.
    """
    if settings.tensorboard:
        with extra("train"):
            import tensorboard  # noqa: F401  # what PyTorch writes events with
    if settings.wandb:
        check_wandb(settings)


def check_films(settings: Settings) -> Settings:
    """The settings that can be followed: without a film that was asked for only where it can be made.

    Raises:
        InvalidArgument: no film can be made of this environment, here; the message says what is missing.
    """
    interval = settings.eval.video_interval_frames
    if interval == 0:
        return settings
    try:
        check_filming(settings.env)
    except InvalidArgument as problem:
        if interval is not None:
            raise InvalidArgument(f"{problem} (eval.video_interval_frames=0 trains without films)") from problem
        logger.warning("there will be no film: %s", problem)
        return dataclasses.replace(settings, eval=dataclasses.replace(settings.eval, video_interval_frames=0))
    return settings
