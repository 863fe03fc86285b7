"""What a run would be, before anything of it is made: its processes, where they run, and the bytes of each part."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from millpond.shm.free_memory import available_memory, readable
from millpond.train.algorithms import make_algorithm
from millpond.train.assembly import World
from millpond.train.replay import of_sequences
from millpond.train.settings import PlaceSettings, Settings


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Lines of text for people. ``not_here`` says what of the run this machine cannot hold, and the setting to change;
    with ``execution=ray``, or on another machine, it may fit."""

    lines: tuple[str, ...]
    not_here: tuple[str, ...] = ()

    def __str__(self) -> str:
        found = [*self.lines]
        found += [f"does not fit here: {line}" for line in self.not_here] or ["fits on this machine"]
        return "\n".join(f"# {line}" for line in found)


def plan_run(settings: Settings, world: World) -> RunPlan:
    """Arithmetic on the settings, and on the weights of one copy of the networks on the CPU. Takes no other memory, and
    looks at no GPU but to count them."""
    length = settings.sequence_length
    schema = world.schema if length is None else of_sequences(world.schema, length)
    row, replay = schema.row_nbytes, settings.replay
    held, batch = row * replay.capacity, row * replay.batch_size
    rollout = row * settings.items_per_batch
    algorithm = make_algorithm(settings.algorithm, world.spec, seed=settings.seed, device="cpu")
    weights = sum(value.nbytes for value in algorithm.published.state_dict().values())
    state = sum(value.nbytes for value in algorithm.state_dict().values())
    ranks = settings.learner.world_size
    lines = (
        *_processes(settings),
        f"replay: {row} bytes per item, {readable(held)} for {replay.capacity:,} items; batches of {readable(batch)}",
        f"rollouts: {settings.frames_per_batch:,} frames and {readable(rollout)} at a time, from each of"
        f" {max(1, settings.workers)}",
        f"weights: {readable(weights)} for each publication; what a rank learns with, {readable(state)}",
        f"batch of each rank: {replay.batch_size // ranks:,} of {replay.batch_size:,} items",
        *_updates(settings),
    )
    return RunPlan(lines, tuple(_not_here(settings, held, rollout)))


def _processes(settings: Settings) -> list[str]:
    place, execution = "Ray actor" if settings.on_ray else "process of this machine", settings.execution
    home = "this command" if settings.synchronous else "shared memory of this machine"
    where = {
        "replay": f"a Ray actor{_asked(execution.replay)}, reached by {settings.replay.transport}"
        if settings.on_ray
        else home,
        "collectors": f"{settings.workers} × a {place}{_asked(execution.collector)}"
        if settings.workers
        else "this command",
        "learner": "this command",
        "evaluation": "a process of this machine",
    }
    if (others := settings.learner.world_size - 1) > 0:
        where["learner"] += f" and {others} × a {place}{_asked(execution.learner)}"
    envs = settings.envs_per_worker * max(1, settings.workers)
    return [*(f"{name}: {words}" for name, words in where.items()), f"environments: {envs:,}"]


def _asked(place: PlaceSettings) -> str:
    amounts = {name: value for name, value in place.ray_options.items() if name != "resources"} | place.resources
    return f" ({', '.join(f'{name} {amount:g}' for name, amount in amounts.items())})" if amounts else ""


def _updates(settings: Settings) -> list[str]:
    ratio, batch = settings.samples_per_insert, settings.replay.batch_size
    if ratio is None:
        return [f"updates: each item is drawn {settings.replay.consume_after_n_samples} times"]
    return [
        f"updates: {ratio / batch:g} for each item, {int(settings.all_samples / batch):,} in all, the first after"
        f" {settings.replay.learning_starts:,} items"
    ]


def _not_here(settings: Settings, held: int, rollout: int) -> list[str]:
    found, free = [], available_memory()
    needed = (0 if settings.replay.path is not None else held) + rollout * max(1, settings.workers)
    if needed > free:
        most = max(0, (free - (needed - held)) * settings.replay.capacity // held)
        found.append(
            f"replay and rollouts need {readable(needed)}, and {readable(free)} are free: replay.capacity={most} would"
        )
    gpus = torch.cuda.device_count()
    wanted = settings.learner.world_size if settings.learner.backend == "nccl" else 1
    if settings.learner.device != "cpu" and gpus < wanted:
        found.append(
            f"learner.device={settings.learner.device} with learner.world_size={settings.learner.world_size} needs"
            f" {wanted} GPUs, and there are {gpus}: learner.device=cpu with learner.backend=gloo needs none"
        )
    return found
