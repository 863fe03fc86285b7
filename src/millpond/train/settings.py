"""What a run is asked to do: frozen, typed, checked in one place.

The defaults are in ``millpond/conf``; here are the types and the bounds. ``Settings.from_dict`` is the only way in,
so that a command line, a saved ``config.yaml`` and a test all meet the same checks.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import types
import typing
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from millpond.core.errors import InvalidArgument, InvalidType, Unsatisfiable


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSettings:
    """Which environment, and the arguments it is made with."""

    id: str
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """``replay.*``; sizes in items, debt in samples. An item is a transition, or a sequence of some."""

    capacity: int
    batch_size: int
    learning_starts: int
    samples_per_insert: float | None
    max_debt: float | None
    transport: str
    layout: str
    sampler: str = "uniform"
    n_step: int = 1
    alpha: float = 0.6
    alpha_end: float | None = None
    beta: float = 0.4
    beta_end: float | None = None
    hindsight_strategy: str = "future"
    hindsight_fraction: float = 0.8
    prefetch: int = 0
    path: str | None = None
    admission: str = "overwrite"
    high_watermark: int | None = None
    low_watermark: int | None = None
    consume_after_n_samples: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectSettings:
    """``collect.*``; frames."""

    frames_per_batch: int | None
    random_frames: int
    max_restarts: int
    stall_timeout: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """``learner.*``."""

    world_size: int
    backend: str
    device: str
    threads: int
    publish_interval: int
    compile: bool = False
    amp: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSettings:
    """``eval.*``; frames, episodes, environment steps."""

    interval_frames: int
    episodes: int
    max_steps: int
    timeout: float
    video_interval_frames: int | None
    video_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """``checkpoint.*``; frames, seconds."""

    interval_frames: int
    keep: int
    replay: bool
    every_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceSettings:
    """What each actor of one kind asks Ray for. ``resources`` are the cluster's own, by name."""

    num_cpus: float = 0.0
    resources: dict[str, Any] = field(default_factory=dict)

    @property
    def ray_options(self) -> dict[str, Any]:
        """As ``ray.remote`` takes them; what is not asked for is not said."""
        found: dict[str, Any] = {name: value for name, value in dataclasses.asdict(self).items() if value}
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerPlaceSettings(PlaceSettings):
    """``num_gpus``: for each rank."""

    num_gpus: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionSettings:
    """``execution.*``: where things run, and whether they wait for each other. All but the first two are for Ray."""

    name: str
    mode: str
    address: str | None = None
    collector: PlaceSettings = field(default_factory=PlaceSettings)
    replay: PlaceSettings = field(default_factory=PlaceSettings)
    learner: LearnerPlaceSettings = field(default_factory=LearnerPlaceSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerSettings:
    """``logger.*``."""

    interval_frames: int | None
    tensorboard: bool
    wandb: bool
    project: str
    group: str | None
    name: str | None
    mode: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that decides what a run does. ``algorithm`` holds ``name`` and that algorithm's own settings."""

    algorithm: dict[str, Any]
    env: EnvSettings
    total_frames: int
    collectors: int
    envs_per_collector: int
    seed: int
    normalize_observations: bool
    run_dir: str | None
    resume: str | None
    dry_run: bool
    replay: ReplaySettings
    collect: CollectSettings
    learner: LearnerSettings
    eval: EvalSettings
    checkpoint: CheckpointSettings
    execution: ExecutionSettings
    logger: LoggerSettings

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Settings:
        """Build and check settings from plain nested dictionaries.

        Raises:
            InvalidType: a value has another type than its setting; the message names the setting.
            InvalidArgument: an unknown or missing setting, or a value out of its bounds.
        """
        settings: Settings = build(cls, values, "")
        _check(settings)
        return settings._with_end_of_schedule()

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dictionaries that ``from_dict`` takes back."""
        return dataclasses.asdict(self)

    def _with_end_of_schedule(self) -> Settings:
        """Spell out how many updates a schedule of learning rates lasts: a run that is made longer keeps it."""
        algorithm = self.algorithm
        if algorithm.get("lr_schedule", "constant") == "constant" or algorithm.get("lr_updates") is not None:
            return self
        updates = max(1, int(self.all_samples / self.replay.batch_size))
        return dataclasses.replace(self, algorithm={**algorithm, "lr_updates": updates})

    @property
    def synchronous(self) -> bool:
        """Whether collection and learning take turns in one process."""
        return self.execution.mode == "sync"

    @property
    def on_ray(self) -> bool:
        """Whether replay, collectors and the ranks but the first are Ray actors."""
        return self.execution.name == "ray"

    @property
    def workers(self) -> int:
        """How many collector processes run; 0 where environments step in the learner's process."""
        return 0 if self.synchronous else self.collectors

    @property
    def envs_per_worker(self) -> int:
        """In synchronous mode all environments step in one place."""
        return self.envs_per_collector * (self.collectors if self.synchronous else 1)

    @property
    def frames_per_batch(self) -> int:
        """How many frames each worker collects at a time."""
        if self.collect.frames_per_batch is not None:
            return self.collect.frames_per_batch
        return self.envs_per_worker * (1 if self.synchronous else 8)

    @property
    def sequence_length(self) -> int | None:
        """How many transitions an item is: a batch of one environment. None where an item is one transition."""
        return None if self.replay.layout == "transitions" else self.frames_per_batch // self.envs_per_worker

    @property
    def items_per_batch(self) -> int:
        """How many items each worker writes at a time."""
        return self.frames_per_batch // (self.sequence_length or 1)

    @property
    def total_items(self) -> int:
        """How many items are written in all."""
        return self.total_frames // (self.sequence_length or 1)

    @property
    def samples_per_insert(self) -> float | None:
        """Samples for each item written; None where items are consumed, so that this says how often each is drawn."""
        if self.replay.consume_after_n_samples is not None:
            return None
        given = self.replay.samples_per_insert
        return float(self.replay.batch_size) if given is None else given

    @property
    def all_samples(self) -> Fraction:
        """Samples that are drawn in the whole run, if all goes well."""
        ratio = self.samples_per_insert
        if ratio is None:
            return Fraction(self.replay.consume_after_n_samples or 1) * self.total_items
        return Fraction(ratio) * (self.total_items - self.replay.learning_starts)

    @property
    def max_debt(self) -> float | None:
        """How many samples collection may be ahead of learning; None in synchronous mode, where it never is, and where
        items are consumed."""
        ratio = self.samples_per_insert
        if self.synchronous or ratio is None:
            return None
        if self.replay.max_debt is not None:
            return self.replay.max_debt
        return 2 * ratio * self.items_per_batch * self.collectors + self.replay.batch_size

    @property
    def report_interval(self) -> int:
        """Frames between two rows of metrics.csv."""
        return self.logger.interval_frames or max(1, self.total_frames // 200)


def build(kind: type[Any], values: Any, path: str) -> Any:
    """The dataclass ``kind`` from a dictionary with its fields; ``path`` says where in the settings that is. Fields
    that have a default may be missing.

    Raises:
        InvalidType: a value does not have the type of its field.
        InvalidArgument: a field is missing or unknown, or the dataclass itself refuses a value.
    """
    if not isinstance(values, dict):
        raise InvalidType(f"{path or 'settings'}: expected a group of settings, got {values!r}")
    hints = typing.get_type_hints(kind)
    prefix = f"{path}." if path else ""
    optional = {  # what was added since: runs that were saved before do not say it
        one.name
        for one in dataclasses.fields(kind)
        if one.default is not dataclasses.MISSING or one.default_factory is not dataclasses.MISSING
    }
    unknown, missing = sorted(set(values) - set(hints)), sorted(set(hints) - set(values) - optional)
    if unknown:
        raise InvalidArgument(f"unknown setting {prefix}{unknown[0]}")
    if missing:
        raise InvalidArgument(f"missing setting {prefix}{missing[0]}")
    fields = {name: _convert(hint, values[name], prefix + name) for name, hint in hints.items() if name in values}
    try:
        return kind(**fields)
    except InvalidArgument as error:  # an algorithm's own check, which knows the field but not where it is
        raise InvalidArgument(f"{prefix}{error}") from None


def _convert(hint: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return build(hint, value, path)  # type: ignore[arg-type]  # a dataclass, and a type
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        (hint,) = (option for option in typing.get_args(hint) if option is not type(None))
    origin = typing.get_origin(hint)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_convert(typing.get_args(hint)[0], part, path) for part in value)
    if origin is dict and isinstance(value, dict):
        return dict(value)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and (isinstance(value, str) or number):
        return str(value)
    if hint is int and number and float(value).is_integer():
        return int(value)
    if hint is float and number and not math.isnan(value):
        return float(value)
    raise InvalidType(f"{path}: expected {_WORDS.get(hint, 'a list of whole numbers')}, got {value!r}")


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a name"}


# Ways to reach replay, by where the run is executed.
TRANSPORTS = {"local": ("auto", "shm"), "ray": ("auto", "shm", "gloo", "ray")}

# The smallest value that each setting may have; None, where a setting admits it, is not looked at.
_LEAST: dict[str, int] = {
    "total_frames": 1,
    "collectors": 1,
    "envs_per_collector": 1,
    "seed": 0,
    "replay.capacity": 1,
    "replay.batch_size": 1,
    "replay.learning_starts": 0,
    "replay.n_step": 1,
    "replay.prefetch": 0,
    "replay.high_watermark": 1,
    "replay.low_watermark": 0,
    "replay.consume_after_n_samples": 1,
    "collect.frames_per_batch": 1,
    "collect.random_frames": 0,
    "collect.max_restarts": 0,
    "collect.stall_timeout": 1,
    "learner.world_size": 1,
    "learner.threads": 1,
    "learner.publish_interval": 1,
    "eval.interval_frames": 0,
    "eval.episodes": 1,
    "eval.max_steps": 1,
    "eval.timeout": 1,
    "eval.video_interval_frames": 0,
    "eval.video_steps": 1,
    "checkpoint.interval_frames": 0,
    "checkpoint.every_s": 0,
    "checkpoint.keep": 1,
    "logger.interval_frames": 1,
}


def _check(settings: Settings) -> None:
    for name, least in _LEAST.items():
        value = operator.attrgetter(name)(settings)
        if value is not None and value < least:
            raise InvalidArgument(f"{name} must be at least {least}, got {value}")
    ratio = settings.replay.samples_per_insert
    if ratio is not None and not 0 < ratio < math.inf:
        raise InvalidArgument(f"replay.samples_per_insert must be above 0, got {ratio:g}")
    _check_choices(settings)
    _check_execution(settings)
    _check_replay(settings.replay, synchronous=settings.synchronous)
    _check_sizes(settings)


def _check_choices(settings: Settings) -> None:
    if settings.execution.name not in TRANSPORTS:
        raise InvalidArgument(f"execution.name must be {' or '.join(TRANSPORTS)}, got {settings.execution.name!r}")
    for name, value, choices in (
        ("execution.mode", settings.execution.mode, ("async", "sync")),
        ("replay.transport", settings.replay.transport, TRANSPORTS[settings.execution.name]),
        ("replay.layout", settings.replay.layout, ("transitions", "sequences")),
        ("replay.sampler", settings.replay.sampler, SAMPLERS),
        ("replay.admission", settings.replay.admission, ("overwrite", "block")),
        ("replay.hindsight_strategy", settings.replay.hindsight_strategy, ("future", "final", "episode", "random")),
        ("learner.backend", settings.learner.backend, ("gloo", "nccl")),
        ("logger.mode", settings.logger.mode or "online", ("offline", "online", "disabled")),
    ):
        if value not in choices:
            raise InvalidArgument(f"{name} must be {' or '.join(choices)}, got {value!r}")
    if not isinstance(settings.algorithm.get("name"), str):
        raise InvalidArgument("algorithm.name must name an algorithm")
    if settings.synchronous and settings.learner.device != "cpu":
        raise InvalidArgument(f"execution.mode=sync needs learner.device=cpu, got {settings.learner.device!r}")
    if settings.learner.backend == "nccl" and settings.learner.device == "cpu":
        raise InvalidArgument("learner.backend=nccl needs learner.device=cuda: gradients travel between GPUs")


def _check_execution(settings: Settings) -> None:
    """What an execution does not use is refused, not ignored."""
    execution = settings.execution
    if execution.name == "local":
        if execution != ExecutionSettings(name="local", mode=execution.mode):
            raise InvalidArgument("execution.address and the resources of parts are for execution=ray")
        return
    for name, asked, reason in (
        ("execution.mode=sync", settings.synchronous, "takes turns in one process"),
        ("normalize_observations=true", settings.normalize_observations, "keeps what was shown in this host's memory"),
        ("replay.path", settings.replay.path is not None, "is a folder of this host"),
    ):
        if asked:
            raise InvalidArgument(f"{name} {reason}: it needs execution=local")
    for part in ("collector", "replay", "learner"):
        place: PlaceSettings = getattr(execution, part)
        amounts = {"num_cpus": place.num_cpus, "num_gpus": getattr(place, "num_gpus", 0), **place.resources}
        for resource, amount in amounts.items():
            if not isinstance(amount, int | float) or isinstance(amount, bool) or not 0 <= amount < math.inf:
                raise InvalidArgument(f"execution.{part}: {resource} must be a number, at least 0, got {amount!r}")
    if settings.learner.world_size == 1 and execution.learner != LearnerPlaceSettings():
        raise InvalidArgument(
            "execution.learner is for the ranks but the first, which runs in this command, and learner.world_size=1 has"
            " no other"
        )


SAMPLERS = ("uniform", "prioritized", "without_replacement", "hindsight")
# What only some samplers use: anything but its default is refused with the others.
_OF_SAMPLERS = {
    "prioritized": ("alpha", "alpha_end", "beta", "beta_end"),
    "hindsight": ("hindsight_strategy", "hindsight_fraction"),
}


def _check_replay(replay: ReplaySettings, *, synchronous: bool) -> None:
    for sampler, names in _OF_SAMPLERS.items():
        for name in names:
            default = ReplaySettings.__dataclass_fields__[name].default
            if replay.sampler != sampler and getattr(replay, name) != default:
                raise InvalidArgument(f"replay.{name} is of replay.sampler={sampler}, and that is {replay.sampler}")
    for name, most in (("alpha", math.inf), ("alpha_end", math.inf), ("beta", 1), ("beta_end", 1)):
        value = getattr(replay, name)
        if (value is not None and not 0 <= value <= most) or value == math.inf:
            raise InvalidArgument(f"replay.{name} must be {'0 or more' if most > 1 else 'from 0 to 1'}, got {value:g}")
    if not 0 <= replay.hindsight_fraction <= 1:
        raise InvalidArgument(f"replay.hindsight_fraction must be from 0 to 1, got {replay.hindsight_fraction:g}")
    if replay.layout == "sequences" and (replay.n_step > 1 or replay.sampler == "hindsight"):
        wanted = f"replay.n_step={replay.n_step}" if replay.n_step > 1 else "replay.sampler=hindsight"
        raise InvalidArgument(f"{wanted} looks along the steps of an episode: it needs replay.layout=transitions")
    if replay.admission == "overwrite" and (replay.high_watermark is not None or replay.low_watermark is not None):
        raise InvalidArgument(
            "replay.high_watermark and low_watermark say when writers wait: set replay.admission=block"
        )
    _check_consumption(replay, synchronous=synchronous)


def _check_consumption(replay: ReplaySettings, *, synchronous: bool) -> None:
    if replay.admission == "block" and replay.consume_after_n_samples is None:
        raise InvalidArgument(
            "replay.admission=block waits for space, and without replay.consume_after_n_samples none would come"
        )
    if replay.admission == "block" and synchronous:
        raise InvalidArgument("replay.admission=block waits for somebody else: it needs execution.mode=async")
    if replay.consume_after_n_samples is None:
        return
    if replay.samples_per_insert is not None or replay.max_debt is not None:
        raise InvalidArgument(
            "replay.samples_per_insert and max_debt have no meaning with replay.consume_after_n_samples, which says how"
            " often each item is drawn"
        )
    if replay.sampler == "without_replacement":
        raise InvalidArgument("replay.sampler=without_replacement goes through the items in epochs, and consumes none")


def _check_sizes(settings: Settings) -> None:
    replay = settings.replay
    if replay.batch_size % settings.learner.world_size:
        raise InvalidArgument(
            f"replay.batch_size={replay.batch_size} is the batch of all ranks together, and"
            f" learner.world_size={settings.learner.world_size} does not divide it"
        )
    if settings.frames_per_batch % settings.envs_per_worker:
        raise InvalidArgument(
            f"collect.frames_per_batch={settings.frames_per_batch} is not divisible by the"
            f" {settings.envs_per_worker} environments that step together"
        )
    if settings.sequence_length is not None and settings.total_frames % settings.sequence_length:
        raise InvalidArgument(
            f"total_frames={settings.total_frames} is not divisible by the {settings.sequence_length} frames of a"
            " sequence (collect.frames_per_batch for each environment)"
        )
    items, total = _items_of(settings), settings.total_items
    if replay.learning_starts >= total:
        raise InvalidArgument(
            f"replay.learning_starts={replay.learning_starts} leaves no {items} to learn from: lower the one or raise"
            " the other"
        )
    if replay.learning_starts > replay.capacity:
        raise InvalidArgument(
            f"replay.learning_starts={replay.learning_starts} never fit replay.capacity={replay.capacity}"
        )
    if settings.items_per_batch > replay.capacity:
        raise InvalidArgument(
            f"batches of {settings.frames_per_batch} frames (collect.frames_per_batch) never fit"
            f" replay.capacity={replay.capacity}: some would be overwritten before anybody could learn from them"
        )
    samples, ratio = settings.all_samples, settings.samples_per_insert
    if samples < replay.batch_size:
        each = replay.consume_after_n_samples if ratio is None else f"{ratio:g}"
        raise InvalidArgument(
            f"no update would ever be made: {items} after replay.learning_starts={replay.learning_starts}, with {each}"
            f" samples each ({'replay.samples_per_insert' if ratio is not None else 'replay.consume_after_n_samples'}),"
            f" allow {float(samples):g} samples, and an update takes replay.batch_size={replay.batch_size}"
        )
    debt = settings.max_debt
    if (
        debt is not None
        and ratio is not None
        and debt < (batch := settings.items_per_batch * ratio) + replay.batch_size
    ):
        raise Unsatisfiable(
            f"replay.max_debt={debt:g} would let collection and learning wait for each other: a batch of"
            f" {settings.frames_per_batch} frames adds {batch:g} samples and an update takes {replay.batch_size},"
            f" so it must be at least {batch + replay.batch_size:g}"
        )


def _items_of(settings: Settings) -> str:
    """How messages call all items of a run."""
    words = f"frame of total_frames={settings.total_frames}"
    length = settings.sequence_length
    return words if length is None else f"sequence of {length} frames of total_frames={settings.total_frames}"
