"""One run from settings to ``summary.json`` and ``report.html``, whatever happens in between."""

from __future__ import annotations

import contextlib
import logging
import shutil
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from millpond.core.errors import OutOfDisk
from millpond.learn.acceleration import check_acceleration
from millpond.train import fork_server, machine
from millpond.train.assembly import Parts, look_at_world
from millpond.train.checkpoint import read_parts
from millpond.train.checks import Check, clean_shutdown, failed, run_checks
from millpond.train.compose import changed_settings, save_settings
from millpond.train.evaluator import Evaluator
from millpond.train.filming import allow_headless_rendering
from millpond.train.leftovers import alone, left_behind, of_ray, one_run, processes, segments
from millpond.train.log import logging_to
from millpond.train.loggers import EventsFile, Logger, Loggers, MetricsFile
from millpond.train.plan import plan_run
from millpond.train.progress import Progress, make_progress
from millpond.train.replay import check_replay
from millpond.train.report import write_report
from millpond.train.reporting import Reporter
from millpond.train.run_state import Checkpoints, RunDirectory, default_run_directory, write_json, write_text
from millpond.train.settings import Settings
from millpond.train.supervise import Interrupted, StopSignal
from millpond.train.surroundings import check_films, check_loggers
from millpond.train.trainer import Trainer
from millpond.train.wandb_run import WandbRun

logger = logging.getLogger("millpond.train")
_EVALUATION_SEED = 1_000_003  # added to the run's, so that no collector meets the same episodes


@dataclass(slots=True)
class Outcome:
    """How a run ended. ``status`` is completed, stopped (by ``StopSignal.request``), interrupted (by a signal) or
    failed; ``problem`` says why, in one line."""

    run: RunDirectory
    settings: Settings
    command: str
    status: str = "failed"
    problem: str | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    checks: dict[str, Check] = field(default_factory=dict)
    error: BaseException | None = None
    changes: list[dict[str, Any]] = field(default_factory=list)
    """Which settings were changed when the run was resumed, and at which frame."""

    @property
    def resumable(self) -> bool:
        """It did not complete, and left a checkpoint to go on from."""
        return self.status != "completed" and bool(Checkpoints(self.run.checkpoints).all())

    @property
    def exit_code(self) -> int:
        """0 completed, 1 failed, 130 stopped or interrupted."""
        return {"completed": 0, "failed": 1}.get(self.status, 130)


def train(
    settings: Settings,
    *,
    stop: StopSignal | None = None,
    progress: Progress | None = None,
    command: str | None = None,
) -> Outcome:
    """Train as ``settings`` say. Returns how it ended; a run that fails does not raise, its outcome tells.

    ``command`` is what the summary calls the command; the program's own command line by default.

    Raises:
        InvalidArgument, OutOfMemory: the run could not begin. Nothing was written and nothing is left behind.
        Interrupted: the second request to stop, before the run could begin.
    """
    stop = stop or StopSignal()
    check_loggers(settings.logger)
    allow_headless_rendering()
    fork_server.start()
    with ExitStack() as closing, _torch_threads(settings.learner.threads), one_run() as me:
        before = segments() | processes()
        parts, run, restored = _prepare(settings, closing)
        run, settings = run or _new_run(settings, closing), parts.settings
        outcome = Outcome(run, settings, command or machine.command_line())
        if restored:
            outcome.changes = [*restored.state["changes"], *_changes(run, settings, frames=parts.frames)]
        progress, parts_processes = progress or make_progress(), processes()
        loggers = _first_files(parts, run, progress, closing, after_frames=parts.frames if restored else None)
        # What a logger keeps beside itself ends with the program. Ray starts processes whenever it likes.
        before |= {one for one in processes() - parts_processes if not of_ray(one)}
        _run(outcome, parts, loggers, stop, progress, restored)
        left = _close(parts)
        if outcome.checks:
            outcome.checks["clean_shutdown"] = clean_shutdown(
                [*left, *left_behind(before, ray_stays=not parts.ray_is_ours)] if alone(me) else None
            )
        _finish(outcome)
    return outcome


@dataclass(frozen=True, slots=True)
class Restored:
    """What a checkpoint says beside what went into the parts: its ``run.json``, and the state of the meter."""

    state: dict[str, Any]
    meter: dict[str, Any]


def _prepare(settings: Settings, closing: ExitStack) -> tuple[Parts, RunDirectory | None, Restored | None]:
    """The parts, ready to run; and, where one is resumed, its directory, in which nobody else may run now."""
    run = latest = restored = None
    if settings.resume is not None:
        run = RunDirectory.open(Path(settings.resume))
        closing.enter_context(run.held())
        latest = Checkpoints(run.checkpoints).latest()
    parts = Parts.make(settings)
    closing.callback(parts.close)
    parts.settings = check_films(settings)
    if latest is not None:
        restored = Restored(*read_parts(latest, parts))
    else:
        parts.collect()
    return parts, run, restored


def _new_run(settings: Settings, closing: ExitStack) -> RunDirectory:
    path = settings.run_dir or default_run_directory(settings.algorithm["name"], settings.env.id, settings.seed)
    run = RunDirectory.create(Path(path))
    try:
        closing.enter_context(run.held())
    except OSError as error:
        raise OutOfDisk(error.errno, f"{error.strerror}: {run.path}") from None
    return RunDirectory.create(run.path)  # somebody may have run there since


def _changes(run: RunDirectory, settings: Settings, *, frames: int) -> list[dict[str, Any]]:
    changed = changed_settings(run.config, settings)
    for name, (before, now) in changed.items():
        logger.info("%s was %s and is %s from frame %d on", name, before, now, frames)
    return [{"frames": frames, "settings": changed}] if changed else []


def _first_files(
    parts: Parts, run: RunDirectory, progress: Progress, closing: ExitStack, *, after_frames: int | None
) -> Loggers:
    """Open what is written during a run. A disk that takes nothing shows here, and then nothing stays."""
    settings = parts.settings
    try:
        save_settings(settings, run.config)
        write_text(run.live_replay, parts.live_replay)
        closing.enter_context(logging_to(run.log, progress))
        loggers = _make_loggers(settings, run, after_frames=after_frames)
    except BaseException as error:
        if settings.resume is None:
            shutil.rmtree(run.path, ignore_errors=True)
        if isinstance(error, OSError):
            raise OutOfDisk(error.errno, f"{error.strerror}: {run.path}") from None
        raise
    closing.callback(loggers.close)
    return loggers


def _run(
    outcome: Outcome,
    parts: Parts,
    loggers: Loggers,
    stop: StopSignal,
    progress: Progress,
    restored: Restored | None,
) -> None:
    """Everything between the first process and the last."""
    settings, run = parts.settings, outcome.run
    reporter = trainer = None
    with ExitStack() as closing:
        closing.callback(progress.close)
        try:
            evaluator = Evaluator(
                parts.algorithm.evaluation_policy(),
                device=settings.learner.device,
                env=settings.env,
                settings=settings.eval,
                seed=settings.seed + _EVALUATION_SEED,
                version=parts.algorithm.steps,
            )
            closing.callback(evaluator.close)
            reporter = Reporter(parts, loggers, progress, evaluator)
            if restored:
                reporter.go_on(restored.state, restored.meter)
            trainer = Trainer(
                parts,
                run,
                reporter=reporter,
                evaluator=evaluator,
                checkpoints=Checkpoints(run.checkpoints, keep=settings.checkpoint.keep),
                stop=stop,
                restored=restored.state if restored else None,
                changes=outcome.changes,
            )
            logger.info("started: %s", outcome.command)
            trainer.run()
            stop.shield()
            outcome.checks = run_checks(trainer.facts(not_finite=loggers.not_finite))
            outcome.status = "completed" if trainer.ended else "interrupted" if stop.signal else "stopped"
        except Interrupted as error:
            outcome.status, outcome.error = "interrupted", error
        except Exception as error:  # noqa: BLE001  # whatever ends a run is told in its summary
            outcome.status, outcome.error = "failed", error
            logger.debug("%s", traceback.format_exc())
            if trainer is not None:
                with contextlib.suppress(Interrupted):
                    trainer.rescue()
        finally:
            stop.shield()
    outcome.summary = _summarize(outcome, parts, reporter)


def _close(parts: Parts) -> list[str]:
    """Close them; what kept that from being done, in words."""
    try:
        parts.close()
    except Exception as error:
        logger.exception("closing failed")
        return [f"what was not closed: {type(error).__name__}: {error}"]
    return []


def _finish(outcome: Outcome) -> None:
    """Judge, write what remains, and say it in one line where it is not well."""
    summary, run = outcome.summary, outcome.run
    broken = failed(outcome.checks)
    summary["checks"] = {name: asdict(check) for name, check in outcome.checks.items()}
    if broken:
        outcome.status = summary["status"] = "failed"
        summary["error_type"], summary["error"] = "RunFailed", "; ".join(broken)
    if "error" in summary:
        words = " ".join(summary["error"].partition("\n\n")[0].split())  # a worker's traceback comes behind
        outcome.problem = f"{summary['error_type']}: {words} (more in {run.log})"
        logger.error("%s: %s", summary["error_type"], summary["error"])
    try:
        write_json(run.summary, summary)
        write_report(run, outcome.settings.to_dict())
    except OSError as error:
        outcome.status, outcome.problem = "failed", f"{run.path} cannot be written: {error}"
        logger.exception("summary.json or report.html could not be written")
    except Exception:  # the run and its numbers are there, and worth more than the page about them
        logger.exception("report.html could not be written")


def _summarize(outcome: Outcome, parts: Parts, reporter: Reporter | None) -> dict[str, Any]:
    settings, steps, frames = parts.settings, parts.algorithm.steps, parts.frames
    wall_s = reporter.wall_s if reporter else 0.0
    summary: dict[str, Any] = {
        "status": outcome.status,
        "algorithm": settings.algorithm["name"],
        "env": settings.env.id,
        "total_frames": settings.total_frames,
        "collected_frames": frames,
        "written_frames": parts.written_frames,
        "write_count": parts.write_count,
        "optimizer_steps": steps,
        "published_version": parts.published_version,
        "eval_return_first": reporter.first_return if reporter else None,
        "eval_return_last": reporter.last_return if reporter else None,
        "wall_s": round(wall_s, 3),
        "frames_per_s": round(frames / wall_s, 2) if wall_s else 0.0,
        "updates_per_s": round(steps / wall_s, 2) if wall_s else 0.0,
        "restarts": reporter.restarts if reporter else 0,
        "peak_rss_mb": round(reporter.memory.peak_mb, 1) if reporter else 0.0,
        "checks": {},
        "changes": outcome.changes,
        "command": outcome.command,
        "git_commit": machine.git_commit(),
        "versions": machine.versions(),
    }
    if outcome.error is not None and outcome.status == "failed":
        summary["error_type"], summary["error"] = type(outcome.error).__name__, str(outcome.error)
    return summary


def dry_run(settings: Settings) -> str:
    """Check everything that can be checked without starting anything; tell the settings and the plan.

    A new run takes no memory for its replay and touches no GPU, so that a plan for a larger machine can be made here:
    it tells what does not fit. One that is resumed is loaded.

    Raises:
        InvalidArgument, Unsatisfiable: what the run itself would raise anywhere.
    """
    from omegaconf import OmegaConf

    check_loggers(settings.logger)
    allow_headless_rendering()
    with ExitStack() as closing:
        if settings.resume is not None:
            world = _prepare(settings, closing)[0].world
        else:
            world = look_at_world(settings.env)
            check_replay(settings)
            learner = settings.learner
            if learner.device == "cpu":  # of a GPU only its own machine can tell
                check_acceleration(compiled=learner.compile, amp=learner.amp, device=learner.device)
            check_films(settings)
            if settings.run_dir is not None:
                RunDirectory.check_free(Path(settings.run_dir))
        plan = plan_run(settings, world)
    return f"{OmegaConf.to_yaml(OmegaConf.create(settings.to_dict()))}{plan}\n# nothing was started"


# ---------------------------------------------------------------------- surroundings


def _make_loggers(settings: Settings, run: RunDirectory, *, after_frames: int | None) -> Loggers:
    destinations: list[Logger] = []
    if settings.logger.wandb:  # first: it may refuse
        destinations.append(WandbRun(run.path, settings.logger, config=settings.to_dict()))
    destinations.append(MetricsFile(run.metrics, after_frames=after_frames))
    if settings.logger.tensorboard:
        destinations.append(EventsFile(run.path, after_frames=after_frames))
    return Loggers(destinations)


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
