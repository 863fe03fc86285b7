"""``millpond suite``: many runs, one after the other, and one answer."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from millpond.suite.plan import MODES, plan_suite
from millpond.suite.record import FAILED, INTERRUPTED, PASSED, SuiteRecord
from millpond.suite.running import run_suite
from millpond.suite.table import make_table
from millpond.train.compose import choices
from millpond.train.supervise import Interrupted, StopSignal

HELP = """\
usage: millpond suite [mode={modes}] [algorithm=A,B|all] [execution=E,F|all] [NAME=VALUE …]

Trains with each algorithm, each run in a fresh process, and says which of them passed the checks at its end. A run that
fails, hangs or dies is recorded, and the others go on. Writes suite.json and suite.html beside the runs.

  millpond suite mode=smoke                     every algorithm once, in minutes
  millpond suite mode=full algorithm=sac,td3    runs that learn
  millpond suite mode=smoke execution=local seed=3 replay.batch_size=32
  millpond suite resume=runs/suite-…            what is not done of a suite that was stopped

  mode        smoke: profile=smoke, full: profile=default, all: both, and profile=scale        (smoke)
  algorithm   {algorithms}, several with commas, or all (all)
  execution   {executions}, several with commas, or all (local)
  suite_dir   where all of it is written (runs/suite-MODE-TIME)
  timeout     seconds after which a run is killed, with all its processes ({limits})
  resume      the directory of a suite to go on with; what has passed or failed is not done again
  dry_run     true: check the settings of every run and print the commands, start nothing

Everything else is a setting of every run: see `millpond train --help`.

Exit codes: 0 all passed, 1 one or more failed, 2 a mistake in the command, 130 interrupted.
"""


def main(words: Sequence[str]) -> int:
    """Run ``millpond suite WORDS``."""
    if {"-h", "--help"} & set(words):
        limits = ", ".join(f"{name}: {limit:g}" for name, limit in MODES["all"].items())
        texts = {"modes": "|".join(MODES), "algorithms": ", ".join(choices("algorithm")), "limits": limits}
        print(HELP.format(executions=", ".join(choices("execution")), **texts), end="")
        return 0
    plan = plan_suite(words)
    if plan.dry_run:
        runs = SuiteRecord.open(plan.directory).planned if plan.resume else plan.runs
        for run in runs:
            print(f"{run.name} ({run.timeout_s:g} s): {run.command}")
        print(f"{len(runs)} runs; nothing was started")
        return 0
    if plan.resume:
        record = SuiteRecord.open(plan.directory, timeout_s=plan.timeout_s)
    else:
        record = SuiteRecord.new(plan, command=shlex.join(["millpond", "suite", *words]))
    with record.held():
        table = make_table(record)
        with StopSignal(say=table.say) as stop:
            try:
                run_suite(record, table=table, stop=stop)
            except Interrupted:
                pass  # it is recorded
            finally:
                stop.shield()
            print(closing_words(record), flush=True)
    return {PASSED: 0, FAILED: 1, INTERRUPTED: 130}[record.status]


def closing_words(record: SuiteRecord) -> str:
    """How many passed, why the others did not, and where to read more."""
    told = ", ".join(f"{count} {status}" for status, count in record.counts().items() if count)
    lines = [f"suite {record.status}: {told} of {len(record.runs)} in {record.wall_s:.0f} s"]
    lines += [f"  {run.name}: {run.status}: {run.problem}" for run in record.runs if run.problem]
    lines.append(f"summary   {record.directory / 'suite.html'}")
    if record.status == INTERRUPTED:
        lines.append(f"continue  millpond suite resume={shlex.quote(str(record.directory))}")
    return "\n".join(lines)
