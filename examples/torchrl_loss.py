"""Batches of a millpond buffer go into TorchRL's loss modules as they are: DQN, and SAC with priorities.

    pip install torchrl
    python examples/torchrl_loss.py

The transitions are random: this shows how the parts fit, not how to learn. Where the installed TorchRL cannot be
imported, or not with this PyTorch, it says so and ends with exit code 3.
"""

from __future__ import annotations

import sys

import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn

from millpond import ReplayBuffer
from millpond.replay import PrioritizedSampler

try:
    from torchrl.data import Bounded, OneHot
    from torchrl.modules import ProbabilisticActor, QValueActor, TanhNormal, ValueOperator
    from torchrl.objectives import DQNLoss, SACLoss
except Exception as problem:  # noqa: BLE001 — a compiled extension for another PyTorch may raise anything
    print(f"TorchRL cannot be imported here: {type(problem).__name__}: {problem}", file=sys.stderr)
    sys.exit(3)

OBSERVATION, ACTIONS = 4, 2


def transitions(n: int, action: torch.Tensor) -> TensorDict:
    """Random transitions with TorchRL's keys, which are millpond's too."""
    done = torch.rand(n, 1) < 0.1
    following = {
        "observation": torch.randn(n, OBSERVATION),
        "reward": torch.randn(n, 1),
        "done": done,
        "terminated": done.clone(),
    }
    return TensorDict({"observation": torch.randn(n, OBSERVATION), "action": action, "next": following}, [n])


def dqn() -> None:
    """Uniform replay, one-hot actions."""
    buffer = ReplayBuffer(1_000, batch_size=32, seed=0)
    buffer.extend(transitions(500, nn.functional.one_hot(torch.randint(ACTIONS, (500,)), ACTIONS)))
    actor = QValueActor(nn.Linear(OBSERVATION, ACTIONS), in_keys=["observation"], spec=OneHot(ACTIONS))
    loss = DQNLoss(actor, action_space="one-hot", delay_value=True)
    loss.make_value_estimator(gamma=0.99)
    losses = loss(buffer.sample())
    losses["loss"].backward()
    print(f"DQN: loss {losses['loss'].item():.3f}")


def sac() -> None:
    """Prioritized replay: the loss writes ``td_error`` into the batch, which then becomes the new priorities."""
    buffer = ReplayBuffer(1_000, batch_size=32, sampler=PrioritizedSampler(), seed=0)
    buffer.extend(transitions(500, torch.rand(500, ACTIONS) * 2 - 1))
    parameters = nn.Sequential(nn.Linear(OBSERVATION, 2 * ACTIONS), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(parameters, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        spec=Bounded(-1, 1, (ACTIONS,)),
    )
    critic = ValueOperator(_Critic(), in_keys=["observation", "action"])
    loss = SACLoss(actor, critic)
    loss.make_value_estimator(gamma=0.99)
    batch = buffer.sample()
    losses = loss(batch)
    sum(value for name, value in losses.items() if name.startswith("loss_")).backward()
    applied = buffer.update_priority(batch, batch["td_error"])
    print(f"SAC: losses of actor {losses['loss_actor'].item():.3f} and critic {losses['loss_qvalue'].item():.3f}")
    print(f"SAC: {applied} priorities updated")


class _Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(OBSERVATION + ACTIONS, 1)

    def forward(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.network(torch.cat([observation, action], -1))
        return value


if __name__ == "__main__":
    torch.manual_seed(0)
    dqn()
    sac()
