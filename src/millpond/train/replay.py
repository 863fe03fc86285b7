"""The replay buffer of a run, from its settings: any sampler, any flow, in memory or on disk."""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Callable
from pathlib import Path

from tensordict import TensorDict, TensorDictBase

from millpond.core.errors import InvalidArgument, OutOfDisk, OutOfMemory
from millpond.core.schema import Schema
from millpond.flow.limiter import Flow
from millpond.remote import RayReplayBuffer
from millpond.replay import (
    HindsightSampler,
    LinearSchedule,
    MappedStorage,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    Sampler,
    SamplerWithoutReplacement,
)
from millpond.shm.ownership import lives
from millpond.train.goals import GoalFunction, goal_function
from millpond.train.settings import Settings

Replay = ReplayBuffer | RayReplayBuffer


def make_replay(settings: Settings, schema: Schema) -> Replay:
    """The buffer of a run, in this host's memory or in a Ray actor, for transitions of ``schema``; its memory is
    allocated, so that too little of it shows now.

    Raises:
        OutOfMemory, OutOfDisk: there is no room for ``replay.capacity`` items.
        Unsatisfiable: batches of the sizes that are set could never be written, or never be sampled.
        InvalidArgument: something is at ``replay.path`` already, or the environment has no goals for hindsight.
    """
    try:
        replay = _make_replay(settings, schema)
    except OutOfMemory as error:
        raise OutOfMemory(f"replay.capacity={settings.replay.capacity}: {error}") from None
    try:
        _check_waits(replay, settings)
    except BaseException:
        replay.close()
        raise
    return replay


def check_replay(settings: Settings) -> None:
    """As `make_replay`, without the memory: raises Unsatisfiable and InvalidArgument as that does."""
    replay = settings.replay
    if replay.path is not None:
        _check_free(Path(replay.path))
    with ReplayBuffer(
        replay.capacity,
        sampler=make_sampler(settings),
        batch_size=replay.batch_size,
        flow=_flow(settings),
        consume_after_n_samples=replay.consume_after_n_samples,
    ) as buffer:
        _check_waits(buffer, settings)


def _check_waits(replay: Replay, settings: Settings) -> None:
    """Neither waits; both refuse what no wait could help."""
    replay.wait_until_sampleable(timeout=0)
    replay.wait_until_writable(settings.items_per_batch, timeout=0)


def _flow(settings: Settings) -> Flow:
    replay = settings.replay
    return Flow(
        min_size=replay.learning_starts,
        samples_per_insert=settings.samples_per_insert,
        max_debt=settings.max_debt,
        admission="block" if replay.admission == "block" else "overwrite",
        high_watermark=replay.high_watermark,
        low_watermark=replay.low_watermark,
    )


def _make_replay(settings: Settings, schema: Schema) -> Replay:
    replay = settings.replay
    on_cpu = settings.learner.device == "cpu" or settings.learner.world_size > 1
    make: Callable[..., Replay] = functools.partial(ReplayBuffer, shared=not settings.synchronous)
    if settings.on_ray:
        place = settings.execution.replay.ray_options
        make = functools.partial(RayReplayBuffer, transport=replay.transport, ray_options=place)
    return make(
        replay.capacity if replay.path is None else _storage_on_disk(settings, Path(replay.path)),
        sampler=make_sampler(settings),
        batch_size=replay.batch_size,
        flow=_flow(settings),
        schema=schema if settings.sequence_length is None else of_sequences(schema, settings.sequence_length),
        prefetch=replay.prefetch,
        consume_after_n_samples=replay.consume_after_n_samples,
        device=None if on_cpu else settings.learner.device,
        seed=settings.seed,
    )


def of_sequences(schema: Schema, time: int) -> Schema:
    """The schema of items that are sequences of so many transitions."""
    return Schema({field.key: (field.dtype, (time, *field.shape)) for field in schema.fields})


def _storage_on_disk(settings: Settings, path: Path) -> MappedStorage:
    """A run that goes on makes its buffer anew, as its checkpoint says what is in it: what a death left goes first."""
    if settings.resume is not None and (path / "rules.json").is_file():
        if lives(path):
            raise InvalidArgument(f"replay.path={path}: a living process uses that buffer")
        shutil.rmtree(path)
    _check_free(path)
    with contextlib.suppress(FileExistsError):
        try:
            path.parent.mkdir(parents=True)
        except OSError as error:
            if isinstance(error, FileExistsError):
                raise
            raise OutOfDisk(error.errno, f"{error.strerror}: replay.path={path}") from None
    return MappedStorage(settings.replay.capacity, path)


def _check_free(path: Path) -> None:
    if path.exists():
        raise InvalidArgument(f"replay.path={path} exists already: remove it, or name another place")


def make_sampler(settings: Settings) -> Sampler | None:
    """Which items are sampled, and what is made of them; None: uniformly, as they are, or as consumption says.

    Raises:
        InvalidArgument: hindsight in an environment without goals.
    """
    replay = settings.replay
    sampler: Sampler | None = None
    if replay.sampler == "prioritized":
        alpha, beta = (_schedule(settings, name) for name in ("alpha", "beta"))
        sampler = PrioritizedSampler(alpha=alpha, beta=beta)
    elif replay.sampler == "without_replacement":
        sampler = SamplerWithoutReplacement(drop_last=True)  # each update has a whole batch
    elif replay.sampler == "hindsight":
        sampler = HindsightSampler(
            GoalFunction(settings.env.id, settings.env.kwargs, "compute_reward"),
            fraction=replay.hindsight_fraction,
            strategy=replay.hindsight_strategy,
            terminated=goal_function(settings.env.id, settings.env.kwargs, "compute_terminated"),
            base=RandomSampler(),
        )
    return sampler if replay.n_step == 1 else NStep(replay.n_step, settings.algorithm["gamma"], base=sampler)


def _schedule(settings: Settings, name: str) -> float | LinearSchedule:
    """``replay.NAME``, or a straight line from it to ``replay.NAME_end`` over all samples of the run."""
    start, end = getattr(settings.replay, name), getattr(settings.replay, f"{name}_end")
    if end is None or end == start:
        return float(start)
    return LinearSchedule(start, end, over=max(1, int(settings.all_samples)))


def as_transitions(items: TensorDictBase, time: int | None) -> TensorDictBase:
    """``[items]`` sequences of ``time`` transitions as ``[items * time]`` of these; others as they are."""
    if time is None:
        return items
    leaves = {key: items.get(key) for key in items.keys(include_nested=True, leaves_only=True)}
    flat = {key: value.flatten(0, 1) for key, value in leaves.items() if value.ndim > 1 and value.shape[1] == time}
    return TensorDict(flat, batch_size=[len(items) * time])
