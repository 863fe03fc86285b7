"""What the settings of all algorithms share: how optimizers step, and checks that name the setting that is wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from millpond.core.errors import InvalidArgument

SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How each optimizer of an algorithm steps; the same for all of its optimizers."""

    max_grad_norm: float | None = None
    """An optimizer's gradient is scaled down to this norm where it is larger; None never does."""
    lr_schedule: str = "constant"
    """How learning rates fall with the number of updates: ``constant``, ``linear`` or ``cosine``."""
    lr_end: float = 0.0
    """The share of each rate that is left at the schedule's end, and from there on."""
    lr_updates: int | None = None
    """Updates until that end; `millpond train` counts those of the run where it is None."""

    def lr_share(self, update: int) -> float:
        """The share of its learning rate that an optimizer uses in update number ``update``, from 0.

        It depends on nothing but that number, so a run that is resumed goes on where it was. The values are those of
        ``torch.optim.lr_scheduler.LinearLR`` and ``CosineAnnealingLR`` (arXiv:1608.03983, without restarts).
        """
        if self.lr_schedule == "constant":
            return 1.0
        assert self.lr_updates is not None
        done = min(1.0, update / self.lr_updates)
        left = 1 - done if self.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.lr_end + (1 - self.lr_end) * left


def check_optimizer(config: OptimizerConfig) -> None:
    """Check the settings of ``OptimizerConfig``.

    Raises:
        InvalidArgument: one is out of its bounds, or a schedule does not know its end.
    """
    if config.max_grad_norm is not None:
        check_positive(config, "max_grad_norm")
    if config.lr_schedule not in SCHEDULES:
        raise InvalidArgument(f"lr_schedule must be {', '.join(SCHEDULES)}, got {config.lr_schedule!r}")
    check_between(config, "lr_end", 0.0, 1.0)
    if config.lr_updates is not None:
        check_positive(config, "lr_updates")
    elif config.lr_schedule != "constant":
        raise InvalidArgument(f"lr_schedule={config.lr_schedule} needs lr_updates, the number of updates until its end")


def check_common(config: Any) -> None:
    """Check the settings that every algorithm has: ``hidden``, ``gamma``, ``tau``, and how its optimizers step.

    Raises:
        InvalidArgument: one is out of its bounds.
    """
    if not config.hidden or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in config.hidden):
        raise InvalidArgument(f"hidden must be the widths of at least one layer, got {config.hidden}")
    # A frozen dataclass; YAML and JSON give lists.
    object.__setattr__(config, "hidden", tuple(config.hidden))
    check_between(config, "gamma", 0.0, 1.0)
    check_between(config, "tau", 0.0, 1.0)
    check_optimizer(config)


def check_between(config: Any, name: str, low: float, high: float) -> None:
    """Check that ``low <= config.name <= high``; NaN is outside."""
    value = getattr(config, name)
    if not low <= value <= high:
        raise InvalidArgument(f"{name} must be between {low:g} and {high:g}, got {value}")


def check_positive(config: Any, *names: str) -> None:
    """Check that each of ``names`` is finite and above zero."""
    for name in names:
        value = getattr(config, name)
        if not 0 < value < math.inf:
            raise InvalidArgument(f"{name} must be above 0, got {value}")
