"""``millpond train``: from words to a run, and what is said at its end."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from typing import TextIO

from millpond.train.compose import describe_settings, settings_from_overrides
from millpond.train.progress import make_progress
from millpond.train.run import Outcome, dry_run, train
from millpond.train.supervise import StopSignal

HELP = """\
usage: millpond train [NAME=VALUE …]

Trains a policy and writes a run directory: config.yaml, metrics.csv, TensorBoard events, checkpoints, summary.json and
report.html, a page with the curves. Ctrl-C once stops with a checkpoint, twice stops at once. Checkpoints are also
written every few minutes, and when a run fails: `resume=` goes on from the newest.

  millpond train profile=demo                   a policy learns to balance, in two minutes
  millpond train algorithm=sac env=Hopper-v5 total_frames=200000
  millpond train algorithm=dqn env=CartPole-v1 collectors=2 seed=3
  millpond train execution.mode=sync            the same numbers for the same seed, in one process
  millpond train resume=runs/… total_frames=400000

Exit codes: 0 done and checked, 1 the run or one of its checks failed, 2 a mistake in the command, 130 interrupted.

Settings and their defaults:
"""


def main(words: Sequence[str]) -> int:
    """Run ``millpond train WORDS``."""
    if {"-h", "--help"} & set(words):
        print(HELP + describe_settings())
        return 0
    settings = settings_from_overrides(words)
    if settings.dry_run:
        print(dry_run(settings))
        return 0
    progress = make_progress()
    with StopSignal(say=progress.say) as stop:
        outcome = train(settings, stop=stop, progress=progress, command=shlex.join(["millpond", "train", *words]))
        _say(closing_words(outcome), sys.stdout)
        if outcome.problem:
            _say(f"millpond train: {outcome.problem}", sys.stderr)
    return outcome.exit_code


def _say(text: str, stream: TextIO) -> None:
    """To a terminal that may be closed since."""
    try:
        print(text, file=stream, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # for what is flushed when the program ends


def closing_words(outcome: Outcome) -> str:
    """Before and after side by side, and where the curves are."""
    summary = outcome.summary
    first, last = summary["eval_return_first"], summary["eval_return_last"]
    lines = [
        "",
        f"{summary['algorithm']} on {summary['env']}: {outcome.status}, {summary['collected_frames']:,} frames,"
        f" {summary['optimizer_steps']:,} updates in {summary['wall_s']:.0f} s",
        f"evaluation return   before {_number(first)}   after {_number(last)}",
        f"curves              {outcome.run.report}",
    ]
    if outcome.resumable:
        lines.append(f"continue            millpond train resume={shlex.quote(str(outcome.run.path))}")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:,.1f}"
