"""The parts of a run, made in the order in which a mistake shows soonest, and taken apart in the opposite one."""

from __future__ import annotations

import contextlib
import functools
import pickle
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from millpond.collect import Collector, FrameBudget, MultiCollector
from millpond.collect.rollout_storage import transition_fields
from millpond.core.errors import PeerLost
from millpond.core.roles import Algorithm
from millpond.core.schema import Schema
from millpond.core.spec import EnvSpec
from millpond.envs import Stepper, env_spec, make
from millpond.envs.normalize import ObservedEnv, RunningStatistics
from millpond.learn.group import LearnerGroup
from millpond.remote import RayReplayBuffer, cluster
from millpond.train.algorithms import make_learning_algorithm
from millpond.train.normalizing import normalized, statistics_size
from millpond.train.replay import Replay, make_replay
from millpond.train.settings import EnvSettings, Settings
from millpond.weights import WeightBoard


@dataclass(frozen=True, slots=True)
class World:
    """What an environment tells before anything is made for it."""

    spec: EnvSpec
    schema: Schema


def look_at_world(env: EnvSettings) -> World:
    """Make the environment once, and read from it what networks and replay must know.

    Raises:
        InvalidArgument: it is unknown, cannot be made, or has a space that is not supported.
    """
    world = make(env.id, kwargs=env.kwargs)
    try:
        stepper = Stepper(world)
        fields = transition_fields(stepper.observation_leaves, stepper.action_leaves)
        types = {f.key: (torch.from_numpy(np.empty(0, f.dtype)).dtype, f.shape) for f in fields}
        return World(env_spec(world), Schema(types))
    finally:
        world.close()


@dataclass(slots=True)
class Parts:
    """What a run is made of. ``collect`` makes the collector; ``publish`` hands it new weights."""

    settings: Settings
    world: World
    algorithm: Algorithm
    replay: Replay
    collector: Any = None  # Collector | MultiCollector | RayCollector
    board: WeightBoard | None = None
    budget: FrameBudget | None = None
    group: LearnerGroup | None = None
    """The ranks that learn, where there are several."""
    statistics: RunningStatistics | None = None
    """What all environments have shown, where observations are normalised."""
    ray_is_ours: bool = False
    """Whether the run started Ray, and ends it."""
    lives: int = 1
    """Of the collector: this one, and those that earlier parts of the run had."""
    _write_count: int = 0
    _closing: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def make(cls, settings: Settings) -> Parts:
        """Everything but the collector, which starts from what a checkpoint may change.

        Raises:
            InvalidArgument, OutOfMemory: the settings cannot work. Nothing is left behind.
        """
        world, device = look_at_world(settings.env), settings.learner.device
        with ExitStack() as closing:
            ray_is_ours = settings.on_ray and closing.enter_context(cluster.joined(settings.execution.address))
            statistics = None
            if settings.normalize_observations:
                statistics = closing.enter_context(RunningStatistics(statistics_size(world.spec)))
            group = make_group(settings, world.spec)
            alone = group or _algorithm_on(settings, world.spec, device)
            algorithm = normalized(settings, alone, world.spec, statistics=statistics, device=device)
            parts = cls(settings, world, algorithm, make_replay(settings, world.schema), group=group)
            parts.statistics, parts.ray_is_ours = statistics, ray_is_ours
            closing.callback(parts.replay.close)
            if group is not None:
                closing.callback(group.close)
            parts._closing = closing.pop_all()
        return parts

    # ------------------------------------------------------------------ collecting
    def collect(self, state: dict[str, Any] | None = None) -> None:
        """Make the collector, one that goes on from ``state`` where that is given. It starts when it is first used."""
        settings = self.settings
        budget = self.budget = FrameBudget(settings.total_frames)
        arguments: dict[str, Any] = {
            "frames_per_batch": settings.frames_per_batch,
            "num_envs": settings.envs_per_worker,
            "layout": settings.replay.layout,
            "replay": self.replay,
            "budget": budget,
            "seed": settings.seed,
            "random_frames": settings.collect.random_frames,
        }
        env = _factory(settings.env, settings.envs_per_worker, self.statistics)
        try:
            if settings.synchronous:
                self.collector = Collector(env, self.algorithm.policy, **arguments)
            else:
                self.board = WeightBoard(self.algorithm.published, version=self.algorithm.steps)
                make_collector: Any = MultiCollector
                if settings.on_ray:
                    from millpond.collect import RayCollector

                    options = settings.execution.collector.ray_options
                    make_collector = functools.partial(RayCollector, ray_options=options)
                self.collector = make_collector(
                    env,
                    acting_copy(self.algorithm.policy, device=settings.learner.device),
                    num_workers=settings.collectors,
                    weights=self.board,
                    max_restarts=settings.collect.max_restarts,
                    stall_timeout=settings.collect.stall_timeout,
                    **arguments,
                )
            if state is not None:
                self.collector.load_state_dict(state)
                self.lives = max(state["lives"], default=0) + 1
        except BaseException:
            self.stop_collecting()
            raise

    def publish(self) -> None:
        """Hand the weights as they are now to the collectors, under the number of optimizer steps."""
        steps = self.algorithm.steps
        if self.board is None:
            self.collector.policy_version = steps
        elif steps > self.board.version:
            self.board.publish(self.algorithm.published, steps)

    @property
    def published_version(self) -> int:
        return int(self.collector.policy_version if self.board is None else self.board.version)

    @property
    def frames(self) -> int:
        """Frames collected so far."""
        return self.budget.collected if self.budget is not None else 0

    @property
    def write_count(self) -> int:
        """Items that replay was ever given; where its process has died, as far as was heard."""
        with contextlib.suppress(PeerLost):
            self._write_count = self.replay.write_count
        return self._write_count

    def replay_stats(self) -> dict[str, Any]:
        """Of replay, now."""
        stats = self.replay.stats()
        self._write_count = stats["write_count"]
        return stats

    @property
    def written_frames(self) -> int:
        """Frames that replay was ever given."""
        return self.write_count * (self.settings.sequence_length or 1)

    @property
    def live_replay(self) -> str:
        """Where others find the replay while the run goes on: a directory, or a name in Ray; "": they cannot."""
        if isinstance(self.replay, RayReplayBuffer):
            return f"{cluster.SCHEME}{cluster.NAMESPACE}/{self.replay.name}"
        return "" if self.settings.synchronous else self.replay.handle().path

    @property
    def replay_pid(self) -> int | None:
        """The process on this host, besides this one, that holds the replay."""
        return self.replay.pid if isinstance(self.replay, RayReplayBuffer) else None

    @property
    def payload_bytes_through_ray(self) -> int | None:
        """Bytes of transitions, in and out of replay, that went through Ray; None where they are meant to, or no part
        is on Ray."""
        if not isinstance(self.replay, RayReplayBuffer) or self.settings.replay.transport == "ray":
            return None
        traffic = self.replay.describe()["traffic"]
        return int(traffic["ray_in"] + traffic["ray_out"])

    # ------------------------------------------------------------------ ending
    def stop_collecting(self) -> None:
        """End the collector, with its processes; what it had reserved is given back."""
        collector, board, budget = self.collector, self.board, self.budget
        self.collector = self.board = self.budget = None
        with ExitStack() as closing:
            for part in (budget, board, collector):  # closed from the last to the first
                if part is not None:
                    closing.callback(part.close)

    def close(self) -> None:
        """Release everything. Closing twice is fine."""
        try:
            self.stop_collecting()
        finally:
            self._closing.close()


def make_group(settings: Settings, spec: EnvSpec) -> LearnerGroup | None:
    """Rank 0 of ``learner.world_size``; the others start when the group does. None: there are none."""
    learner = settings.learner
    if learner.world_size == 1:
        return None
    make_one = functools.partial(_algorithm_on, settings, spec)
    return LearnerGroup(
        make_one(learner.device if learner.backend == "gloo" else "cuda:0"),
        make_one,
        world_size=learner.world_size,
        batch_size=settings.replay.batch_size,
        backend="nccl" if learner.backend == "nccl" else "gloo",
        threads=learner.threads,
        launch="ray" if settings.on_ray else "process",
        ray_options=settings.execution.learner.ray_options if settings.on_ray else None,
    )


def _algorithm_on(settings: Settings, spec: EnvSpec, device: str) -> Algorithm:
    return make_learning_algorithm(settings.algorithm, settings.learner, spec, seed=settings.seed, device=device)


def acting_copy(policy: nn.Module, *, device: str) -> nn.Module:
    """``policy`` for processes that act on the CPU: itself, or a copy where the learner's is on another device."""
    if device == "cpu":
        return policy
    copy: nn.Module = pickle.loads(pickle.dumps(policy))  # policies pickle alone and by value
    return copy.to("cpu")


def _factory(env: EnvSettings, num_envs: int, statistics: RunningStatistics | None) -> Any:
    if statistics is not None:
        return functools.partial(_observed, env, num_envs, statistics)
    if not env.kwargs:
        return env.id
    return functools.partial(make, env.id, num_envs=num_envs, kwargs=env.kwargs)


def _observed(env: EnvSettings, num_envs: int, statistics: RunningStatistics) -> ObservedEnv:
    return ObservedEnv(make(env.id, num_envs=num_envs, kwargs=env.kwargs), statistics)
