"""Which runs a suite consists of. All of them are checked before the first one starts."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from millpond.core.errors import InvalidArgument
from millpond.train.compose import choices, settings_from_overrides

# Of each mode: its profiles, and the seconds that a run of each may take.
MODES: dict[str, dict[str, float]] = {
    "smoke": {"smoke": 300.0},
    "full": {"default": 4 * 3600.0},
    "all": {"smoke": 300.0, "default": 4 * 3600.0, "scale": 4 * 3600.0},
}
_OWN = ("mode", "algorithm", "execution", "suite_dir", "resume", "timeout", "dry_run")
_CHOSEN_HERE = ("run_dir", "profile")


@dataclass(frozen=True, slots=True)
class Planned:
    """One run: its name, the settings as words of a command line, and how many seconds it may take."""

    name: str
    words: tuple[str, ...]
    timeout_s: float

    @property
    def command(self) -> str:
        """What a person would type for it."""
        return shlex.join(["millpond", "train", *self.words])


@dataclass(frozen=True, slots=True)
class Plan:
    """What was asked for. ``resume`` is the directory of a suite to go on with; then there are no ``runs``."""

    mode: str
    directory: Path
    runs: tuple[Planned, ...]
    resume: bool
    timeout_s: float | None
    dry_run: bool


def plan_suite(words: Sequence[str]) -> Plan:
    """From ``mode=smoke algorithm=sac,td3 …`` to a plan. What is not the suite's own is a setting of every run.

    Raises:
        InvalidArgument: an unknown mode, algorithm or setting; or settings that one of the runs could not have.
    """
    own: dict[str, str] = {}
    settings: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise InvalidArgument(f"{word!r} is no setting: write name=value")
        if name in _CHOSEN_HERE:
            raise InvalidArgument(f"{word}: a suite chooses the {name} of each run (mode= says which profiles)")
        if name in _OWN:
            own[name] = value
        else:
            settings.append(word)
    timeout_s = _seconds(own["timeout"]) if "timeout" in own else None
    dry_run = _truth("dry_run", own.get("dry_run", "false"))
    if "resume" in own:
        if settings or {"mode", "algorithm", "execution", "suite_dir"} & set(own):
            raise InvalidArgument(
                f"resume={own['resume']} goes on with the suite that is there, as it was planned: only timeout= and"
                " dry_run= can stand beside it"
            )
        return Plan("", Path(own["resume"]), (), True, timeout_s, dry_run)
    mode = own.get("mode", "smoke")
    if mode not in MODES:
        raise InvalidArgument(f"mode must be {', '.join(MODES)}, got {mode!r}")
    executions = _chosen("execution", own.get("execution", "local"))
    algorithms = _chosen("algorithm", own.get("algorithm", "all"))
    runs = tuple(
        Planned(f"{profile}-{algorithm}-{execution}", _words(profile, algorithm, execution, settings), limit)
        for profile, limit in MODES[mode].items()
        if profile in choices("profile")
        for execution in executions
        for algorithm in algorithms
    )
    if not runs:
        raise InvalidArgument(f"mode={mode} has no run: there is no profile {', '.join(MODES[mode])} here")
    if timeout_s is not None:
        runs = tuple(Planned(run.name, run.words, timeout_s) for run in runs)
    for run in runs:
        try:
            settings_from_overrides(run.words)
        except InvalidArgument as error:
            raise InvalidArgument(f"{run.name}: {error}") from None
    directory = own.get("suite_dir") or _free_directory(mode)
    return Plan(mode, Path(directory), runs, False, timeout_s, dry_run)


def _words(profile: str, algorithm: str, execution: str, settings: Sequence[str]) -> tuple[str, ...]:
    return (f"profile={profile}", f"algorithm={algorithm}", f"execution={execution}", *settings)


def _chosen(group: str, asked: str) -> list[str]:
    known = choices(group)
    if asked == "all":
        return known
    names = list(dict.fromkeys(name.strip() for name in asked.split(",")))
    for name in names:
        if name not in known:
            raise InvalidArgument(f"{group} must be all, or one or more of {','.join(known)}; got {name!r}")
    return names


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidArgument(f"timeout must be a number of seconds above 0, got {text!r}")
    return seconds


def _truth(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise InvalidArgument(f"{name} must be true or false, got {text!r}")
    return text.lower() == "true"


def _free_directory(mode: str) -> str:
    base = Path("runs") / f"suite-{mode}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = base, 1
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return str(path)
