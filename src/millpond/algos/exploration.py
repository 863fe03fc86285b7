"""Policies, and the exploration that is part of them.

Exploration never ends: the module that collectors run, and that is published, contains it. Evaluation runs the same
weights without it. Noise comes from a generator of the policy's own, which ``reseed`` restarts.
"""

from __future__ import annotations

import io
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from millpond.algos.nets import ActionScale, flat_observation
from millpond.core.errors import InvalidArgument
from millpond.core.spec import DiscreteAction, EnvSpec


class Exploration(Protocol):
    """Turns what a network says, ``[B, out]``, into flat actions ``[B, size]`` in the units and the type of the
    environment, or into choices ``[B]``, numbered from 0."""

    generator: torch.Generator

    def explore(self, output: Tensor) -> Tensor: ...

    def exploit(self, output: Tensor) -> Tensor: ...


class Policy(nn.Module):
    """Reads the observation fields of a TensorDict, sets ``"action"``, returns the same TensorDict. No gradients.

    It pickles by value and alone: neither shared memory, nor the learner's gradients or critics go along. A copy wakes
    on the CPU, wherever the learner is.
    """

    exploration: Exploration

    def __init__(self, spec: EnvSpec, network: nn.Module, exploration: Exploration, *, exploring: bool = True) -> None:
        super().__init__()
        self.spec = spec
        self.exploring = exploring
        self.network = network
        self.exploration = exploration

    @torch.no_grad()
    def forward(self, data: TensorDictBase) -> TensorDictBase:
        output = self.network(flat_observation(self.spec, data))
        action = self.exploration.explore(output) if self.exploring else self.exploration.exploit(output)
        if isinstance(self.spec.action, DiscreteAction):
            return data.set("action", action.reshape(data.batch_size) + self.spec.action.start)
        return data.set("action", action.reshape(data.batch_size + self.spec.action.shape))

    def evaluation(self) -> Policy:
        """The same weights and buffers (shared, not copied), never exploring."""
        return Policy(self.spec, self.network, self.exploration, exploring=False)

    def at_frame(self, frame: int) -> None:
        """Say that frame number ``frame`` of all comes next: exploration schedules follow it."""
        if isinstance(self.exploration, EpsilonGreedy):
            self.exploration.frames.fill_(frame)

    @property
    def generator(self) -> torch.Generator:
        """Where all noise comes from."""
        return self.exploration.generator

    def reseed(self, seed: int) -> None:
        """Restart the noise from ``seed``, on the device where the policy is now."""
        device = next(self.parameters()).device
        self.exploration.generator = torch.Generator(device).manual_seed(seed)

    def __reduce__(self) -> tuple[Any, ...]:
        # torch.save writes every storage once and by value; multiprocessing's own pickler would share the memory.
        file = io.BytesIO()
        torch.save((self.spec, self.network, self.exploration, self.exploring), file)
        return _unpickle, (file.getvalue(),)


def _unpickle(data: bytes) -> Policy:
    spec, network, exploration, exploring = torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    return Policy(spec, network, exploration, exploring=exploring)


def normal_noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal noise of the shape and on the device of ``like``, drawn where ``generator`` lives."""
    return torch.randn(like.shape, generator=generator, device=generator.device).to(like.device)


class GaussianNoise(nn.Module):
    """Adds normal noise to an action in ``[-1, 1]``, clips it there, and scales it to the environment.

    ``sigma`` is the standard deviation before clipping, in halves of each action's range: 0.1 with bounds ±2 is 0.2.
    """

    def __init__(self, scale: ActionScale, *, sigma: float, generator: torch.Generator) -> None:
        super().__init__()
        if not 0 < sigma < float("inf"):
            raise InvalidArgument(f"the standard deviation of exploration noise must be above 0, got {sigma}")
        self.scale = scale
        self.sigma = sigma
        self.generator = generator

    def explore(self, output: Tensor) -> Tensor:
        noise = normal_noise(output, self.generator)
        return self.scale.to_env(torch.add(output, noise, alpha=self.sigma).clamp_(-1, 1))

    def exploit(self, output: Tensor) -> Tensor:
        return self.scale.to_env(output)


class EpsilonGreedy(nn.Module):
    """The action with the largest value, or with probability ε a uniformly random one. Takes values ``[B, n]``.

    ε falls linearly from ``start`` to ``end`` over the first ``anneal_frames`` frames. The frame count is a buffer: a
    learner sets it, and so does each worker before each step, by what all workers together have reserved.
    """

    frames: Tensor

    def __init__(self, *, start: float, end: float, anneal_frames: int, generator: torch.Generator) -> None:
        super().__init__()
        if not 0 <= end <= start <= 1 or anneal_frames < 1:
            raise InvalidArgument(
                f"epsilon must fall within [0, 1] over at least one frame, got {start} to {end} over {anneal_frames}"
            )
        self.start, self.end, self.anneal_frames = start, end, anneal_frames
        self.generator = generator
        self.register_buffer("frames", torch.zeros((), dtype=torch.int64))

    @property
    def epsilon(self) -> float:
        done = min(1.0, self.frames.item() / self.anneal_frames)
        return self.start + (self.end - self.start) * done

    def explore(self, output: Tensor) -> Tensor:
        rows, n, device = output.shape[0], output.shape[1], self.generator.device
        random = torch.randint(n, (rows,), generator=self.generator, device=device)
        dice = torch.rand(rows, generator=self.generator, device=device)
        return torch.where((dice < self.epsilon).to(output.device), random.to(output.device), output.argmax(-1))

    def exploit(self, output: Tensor) -> Tensor:
        return output.argmax(-1)
