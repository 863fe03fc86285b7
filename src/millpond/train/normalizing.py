"""Normalised observations: every network sees them, replay keeps the raw ones.

The environments of all workers feed shared statistics; each update takes what is known by then into buffers of the
policy. From there they go to collectors, evaluations and checkpoints together with the weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor, nn

from millpond.core.errors import CheckpointError, InvalidArgument
from millpond.core.roles import Algorithm
from millpond.core.spec import EnvSpec, ObservationField
from millpond.envs.normalize import NormalizedPolicy, Normalizer, RunningStatistics
from millpond.train.algorithms import make_algorithm
from millpond.train.settings import Settings

_STATISTICS, _NORMALIZER = "statistics.", "normalizer."


def statistics_size(spec: EnvSpec) -> int:
    """How many floating numbers an observation has.

    Raises:
        InvalidArgument: none.
    """
    size = sum(math.prod(field.shape) for field in _floating(spec))
    if not size:
        raise InvalidArgument("normalize_observations=true: no part of this environment's observations is floating")
    return size


def algorithm_of(settings: Settings, spec: EnvSpec, *, statistics: RunningStatistics | None, device: str) -> Algorithm:
    """The algorithm that ``settings`` name; where they say so, with normalised observations.

    ``statistics`` are those that environments feed; None for one that only plays.

    Raises:
        InvalidArgument: what ``make_algorithm`` raises.
    """
    algorithm = make_algorithm(settings.algorithm, spec, seed=settings.seed, device=device)
    return normalized(settings, algorithm, spec, statistics=statistics, device=device)


def normalized(
    settings: Settings, algorithm: Algorithm, spec: EnvSpec, *, statistics: RunningStatistics | None, device: str
) -> Algorithm:
    """``algorithm`` itself; where ``settings`` say so, as one that sees normalised observations only."""
    if not settings.normalize_observations:
        return algorithm
    return NormalizedAlgorithm(algorithm, spec, statistics, device=device)


class NormalizedAlgorithm:
    """An ``Algorithm`` around another one, which never sees a raw observation."""

    def __init__(
        self, algorithm: Algorithm, spec: EnvSpec, statistics: RunningStatistics | None, *, device: str = "cpu"
    ) -> None:
        self._algorithm, self._statistics = algorithm, statistics
        self._normalizers = {field.key: Normalizer(field.shape).to(device) for field in _floating(spec)}
        self._policy = self._normalized(algorithm.policy)

    def _normalized(self, policy: nn.Module) -> nn.Module:
        for key, normalizer in self._normalizers.items():
            policy = NormalizedPolicy(policy, normalizer, key=key)
        return policy

    @property
    def policy(self) -> nn.Module:
        """The exploring policy, on raw observations."""
        return self._policy

    @property
    def published(self) -> nn.Module:
        """The same, with the statistics that it normalises by."""
        return self._policy

    @property
    def steps(self) -> int:
        """Updates that were applied, ever."""
        return self._algorithm.steps

    def evaluation_policy(self) -> nn.Module:
        """On raw observations, too. A copy of it normalises by what was known when it was made."""
        return self._normalized(self._algorithm.evaluation_policy())

    def advance(self, frames: int) -> None:
        """Exploration schedules are the inner algorithm's."""
        self._algorithm.advance(frames)

    def update(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """One step on one batch of raw observations, normalised by what is known now."""
        self._refresh()
        seen = batch.clone(recurse=False)
        for key, normalizer in self._normalizers.items():
            for place in (key, ("next", *key)):
                seen.set(place, normalizer(batch.get(place)))
        return self._algorithm.update(seen)

    def _refresh(self) -> None:
        if self._statistics is None:
            return
        known, at = self._statistics.moments(), 0
        for normalizer in self._normalizers.values():
            part = slice(at, at := at + normalizer.mean.numel())
            normalizer.refresh(known.part(part))

    def state_dict(self) -> dict[str, Tensor]:
        """That of the inner algorithm, the statistics, and what the policy normalises by."""
        state = dict(self._algorithm.state_dict())
        if self._statistics is not None:
            state |= {_STATISTICS + name: value for name, value in self._statistics.state_dict().items()}
        for number, normalizer in enumerate(self._normalizers.values()):
            state |= {f"{_NORMALIZER}{number}.{name}": value for name, value in normalizer.state_dict().items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from ``state_dict()``.

        Raises:
            CheckpointError: it was saved without normalised observations, or is of something else.
        """
        parts: dict[str, dict[str, Any]] = {_STATISTICS: {}, _NORMALIZER: {}, "": {}}
        for name, value in state.items():
            prefix = next(prefix for prefix in parts if name.startswith(prefix))
            parts[prefix][name.removeprefix(prefix)] = value
        if len(parts[_NORMALIZER]) != 2 * len(self._normalizers) or not parts[_STATISTICS]:
            raise CheckpointError("the checkpoint holds no statistics, which normalize_observations=true needs")
        self._algorithm.load_state_dict(parts[""])
        if self._statistics is not None:
            self._statistics.load_state_dict(parts[_STATISTICS])
        for number, normalizer in enumerate(self._normalizers.values()):
            normalizer.load_state_dict({name: parts[_NORMALIZER][f"{number}.{name}"] for name in ("mean", "scale")})


def _floating(spec: EnvSpec) -> list[ObservationField]:
    return [field for field in spec.observation if field.dtype.is_floating_point]
