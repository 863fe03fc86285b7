"""From settings to an algorithm. A new one: a file in ``millpond.algos``, one in ``conf/algorithm``, a line here."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from millpond.core.errors import InvalidArgument
from millpond.core.roles import Algorithm
from millpond.core.spec import EnvSpec
from millpond.learn.acceleration import accelerate, check_acceleration
from millpond.train.settings import LearnerSettings, build

_ALGORITHMS = {
    "sac": ("millpond.algos.sac", "SAC", "SACConfig"),
    "dqn": ("millpond.algos.dqn", "DQN", "DQNConfig"),
    "ddpg": ("millpond.algos.ddpg", "DDPG", "DDPGConfig"),
    "td3": ("millpond.algos.td3", "TD3", "TD3Config"),
}


def make_learning_algorithm(
    settings: Mapping[str, Any], learner: LearnerSettings, spec: EnvSpec, *, seed: int, device: str
) -> Algorithm:
    """The algorithm as ``make_algorithm`` makes it, as fast as ``learner`` asks for.

    Raises:
        InvalidArgument: what ``make_algorithm`` raises; or what was asked for cannot be had on ``device``.
    """
    algorithm = make_algorithm(settings, spec, seed=seed, device=device)
    check_acceleration(compiled=learner.compile, amp=learner.amp, device=device)
    accelerate(algorithm, compiled=learner.compile, amp=learner.amp, device=device)
    return algorithm


def make_algorithm(settings: Mapping[str, Any], spec: EnvSpec, *, seed: int, device: str = "cpu") -> Algorithm:
    """The algorithm that ``settings["name"]`` names, with the rest of ``settings`` as its own.

    Raises:
        InvalidArgument: no such algorithm, a setting that it does not have or admit, or an environment that it does
            not fit.
    """
    values = dict(settings)
    name = values.pop("name")
    if values.get("target_entropy") == "auto":
        values["target_entropy"] = None
    if name not in _ALGORITHMS:
        raise InvalidArgument(f"algorithm.name={name} is unknown; there are: {', '.join(_ALGORITHMS)}")
    module_name, algorithm_name, config_name = _ALGORITHMS[name]
    module = importlib.import_module(module_name)
    config = build(getattr(module, config_name), values, "algorithm")
    algorithm: Algorithm = getattr(module, algorithm_name)(spec, config, seed=seed, device=_checked(device))
    return algorithm


def _checked(device: str) -> str:
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise InvalidArgument(f"learner.device={device} is no device; say cpu or cuda") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise InvalidArgument(f"learner.device={device}: this machine, or this build of PyTorch, has no CUDA")
    return device
