"""Small environments' specs, batches of random transitions, and the four algorithms by name."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from millpond.algos.ddpg import DDPG, DDPGConfig
from millpond.algos.dqn import DQN, DQNConfig
from millpond.algos.sac import SAC, SACConfig
from millpond.algos.td3 import TD3, TD3Config
from millpond.core.spec import BoxAction, DiscreteAction, EnvSpec

OBSERVATION = 5
LOW, HIGH = (-2.0, -1.0, 0.0), (2.0, 3.0, 0.5)
CONTINUOUS = EnvSpec.vector(OBSERVATION, action=BoxAction(LOW, HIGH))
DISCRETE = EnvSpec.vector(OBSERVATION, action=DiscreteAction(4))
KINDS: dict[str, tuple[Any, Any, EnvSpec]] = {
    "sac": (SAC, SACConfig, CONTINUOUS),
    "td3": (TD3, TD3Config, CONTINUOUS),
    "ddpg": (DDPG, DDPGConfig, CONTINUOUS),
    "dqn": (DQN, DQNConfig, DISCRETE),
}
NAMES = tuple(KINDS)


def make(name: str, *, seed: int = 0, spec: EnvSpec | None = None, **config: Any) -> Any:
    algorithm, config_type, usual = KINDS[name]
    return algorithm(spec or usual, config_type(**{"hidden": (16, 24), **config}), seed=seed)


def transitions(spec: EnvSpec, rows: int = 32, *, seed: int = 0) -> TensorDict:
    """Random transitions; one in four terminated, another one in four truncated."""
    g = torch.Generator().manual_seed(seed)
    if isinstance(spec.action, BoxAction):
        low, high = torch.tensor(spec.action.low), torch.tensor(spec.action.high)
        action = low + (high - low) * torch.rand(rows, spec.action.size, generator=g)
    else:
        action = torch.randint(spec.action.n, (rows,), generator=g)
    ended = torch.randint(4, (rows, 1), generator=g)
    observation = {f.key: torch.randn(rows, *f.shape, generator=g).to(f.dtype) for f in spec.observation}
    batch = TensorDict({"action": action}, [rows])
    for key, value in observation.items():
        batch[key] = value
        batch["next", *key] = torch.randn(value.shape, generator=g).to(value.dtype)
    batch["next", "reward"] = torch.randn(rows, 1, generator=g)
    batch["next", "terminated"] = ended == 0
    batch["next", "truncated"] = ended == 1
    batch["next", "done"] = ended <= 1
    return batch


def batch_for(name: str, rows: int = 32, *, seed: int = 0) -> TensorDict:
    return transitions(KINDS[name][2], rows, seed=seed)


def snapshot(algorithm: Any) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in algorithm.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
