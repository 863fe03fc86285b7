"""Evaluation beside training, in a process of its own, on an exact snapshot of the weights.

The snapshot travels over a weight board of the evaluator's own: it is published only while the process is idle, so
what it pulls is the version it was asked for. An evaluation that is still running when the next is due makes that one
be skipped and counted; one that fails, is killed or takes too long is reported as failed, and the next one runs.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from torch import nn

from millpond.core.errors import Cancelled, InvalidArgument
from millpond.core.roles import CancelEvent
from millpond.shm import identity
from millpond.shm.family import belong_to, kill_family, start_family
from millpond.train import fork_server
from millpond.train.assembly import acting_copy
from millpond.train.evaluation import Episodes, play
from millpond.train.filming import allow_headless_rendering, film
from millpond.train.settings import EnvSettings, EvalSettings
from millpond.weights import WeightBoard

logger = logging.getLogger("millpond.train")
_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Task:
    """What one evaluation shall do: of which weights, and how old the run was then. ``film`` is where a video goes."""

    frames: int
    version: int
    film: Path | None = None
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a task: episodes, or why there are none. ``film_error`` says why there is no video."""

    task: Task
    episodes: Episodes | None = None
    error: str | None = None
    trace: str = ""
    film_error: str | None = None

    def row(self) -> dict[str, float]:
        """As ``eval/…`` metrics; ``eval/frames`` is when the snapshot was taken."""
        if self.episodes is None:
            return {}
        return {**self.episodes.row(), "eval/frames": self.task.frames, "eval/version": self.task.version}


@dataclass(frozen=True, slots=True)
class _Work:
    """What the process is started with."""

    policy: nn.Module
    board: WeightBoard
    env: EnvSettings
    settings: EvalSettings
    seed: int
    owner: tuple[int, int]


class Evaluator:
    """Evaluates snapshots of ``policy``, one at a time. Close it.

    ``policy`` must not explore, and is read when a snapshot is taken, on the ``device`` where it is; it acts on the
    CPU. ``version`` is the version that it has now.
    """

    def __init__(
        self,
        policy: nn.Module,
        *,
        env: EnvSettings,
        settings: EvalSettings,
        seed: int,
        version: int = 0,
        device: str = "cpu",
    ) -> None:
        self._policy = policy
        self._board = WeightBoard(policy, version=version)
        self._work = _Work(acting_copy(policy, device=device), self._board, env, settings, seed, identity.me())
        self._timeout_s = settings.timeout
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self._task: Task | None = None
        self._deadline = 0.0
        self.skipped = 0
        self.failed = 0

    @property
    def busy(self) -> bool:
        return self._task is not None

    @property
    def task(self) -> Task | None:
        """What it is working on."""
        return self._task

    @property
    def pid(self) -> int | None:
        """Of the process, where one is running."""
        return self._process.pid if self._process is not None else None

    def submit(self, task: Task) -> bool:
        """Take a snapshot and start on it; False, and counted as skipped, where the last one is not done yet."""
        if self._task is not None:
            self.skipped += 1
            logger.info("no evaluation at frame %d: that of frame %d is not done", task.frames, self._task.frames)
            return False
        if task.version > self._board.version:
            self._board.publish(self._policy, task.version)
        if self._process is None:
            self._start()
        assert self._connection is not None
        self._task, self._deadline = task, time.monotonic() + self._timeout_s
        with contextlib.suppress(OSError):  # it died since; `poll` finds out
            self._connection.send(task)
        return True

    def poll(self) -> Result | None:
        """The result of the task, where there is one by now."""
        return self._receive(0.0)

    def wait(self, cancel_event: CancelEvent | None = None) -> Result | None:
        """The result of the task, waited for as long as one may take; None where nothing runs, or on cancellation."""
        while self.busy and not (cancel_event is not None and cancel_event.is_set()):
            result = self._receive(0.1)
            if result is not None:
                return result
        return None

    def close(self) -> None:
        """End the process, whatever it is doing, and forget the task. Closing twice is fine."""
        self._stop(_CLOSE_S)
        self._task = None
        self._board.close()

    # ------------------------------------------------------------------ the process
    def _start(self) -> None:
        context = fork_server.start()
        connection, theirs = context.Pipe()
        read, lifeline = context.Pipe(duplex=False)
        process = context.Process(
            target=_serve, args=(theirs, read, self._work), name="millpond-evaluator", daemon=True
        )
        start_family(process)
        theirs.close()
        read.close()
        self._process, self._connection, self._lifeline = process, connection, lifeline

    def _receive(self, timeout_s: float) -> Result | None:
        if self._task is None or self._connection is None or self._process is None:
            return None
        ready = wait([self._connection, self._process.sentinel], timeout_s)
        try:
            if self._connection in ready:
                return self._done(self._connection.recv())
        except (EOFError, OSError):
            pass  # it died, perhaps in the middle of its answer
        if ready:
            self._process.join(1.0)
            return self._lost(f"the evaluator died ({_how(self._process.exitcode)})")
        if time.monotonic() > self._deadline:
            return self._lost(f"it took more than {self._timeout_s:g} s (eval.timeout)")
        return None

    def _lost(self, reason: str) -> Result:
        assert self._task is not None
        self._stop(0.0)
        return self._done(Result(self._task, error=reason))

    def _done(self, result: Result) -> Result:
        self._task = None
        if result.error is not None:
            self.failed += 1
            logger.warning("the evaluation at frame %d failed: %s", result.task.frames, result.error)
            logger.debug(result.trace)
        if result.film_error is not None:
            logger.warning("no video at frame %d: %s", result.task.frames, result.film_error)
        return result

    def _stop(self, patience_s: float) -> None:
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if process is None or connection is None:
            return
        connection.close()  # which it notices between two steps
        process.join(patience_s)
        kill_family(process)  # also what its environments have left
        process.join(_CLOSE_S)
        process.close()
        self._lifeline.close()


def _how(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"


# ---------------------------------------------------------------------- in the process


def _serve(connection: Connection, lifeline: Connection, work: _Work) -> None:
    """Work on tasks until the other side closes the connection, or is gone."""
    belong_to(work.owner, lifeline.fileno())
    torch.set_num_threads(1)
    allow_headless_rendering()
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            return
        try:
            connection.send(_evaluate(task, work, connection.poll))
        except (Cancelled, BrokenPipeError):
            return


def _evaluate(task: Task, work: _Work, cancelled: Callable[[], bool]) -> Result:
    """Nothing is ever sent while a task runs: a readable connection is one that was closed."""
    settings, seed = work.settings, work.seed
    try:
        version = work.board.pull(work.policy)
        if version != task.version:
            return Result(task, error=f"asked for version {task.version}, found {version}")
        episodes = play(
            work.policy,
            work.env,
            episodes=settings.episodes,
            max_steps=settings.max_steps,
            seed=seed,
            cancelled=cancelled,
        )
    except Cancelled:
        raise
    except Exception as error:  # noqa: BLE001  # whatever the environment or the policy raises is the answer
        return Result(task, error=f"{type(error).__name__}: {error}", trace=traceback.format_exc())
    film_error = None
    if task.film is not None:
        try:
            task.film.parent.mkdir(exist_ok=True)
            film(work.policy, work.env, task.film, steps=settings.video_steps, seed=seed, cancelled=cancelled)
        except (InvalidArgument, OSError) as error:
            film_error = str(error)
    return Result(task, episodes, film_error=film_error)
