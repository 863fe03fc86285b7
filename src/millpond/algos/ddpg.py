"""Deep Deterministic Policy Gradient: a deterministic policy, one critic, Gaussian noise for exploration.

Source: Lillicrap et al., "Continuous control with deep reinforcement learning", 2015 (arXiv:1509.02971). Read from top
to bottom: settings, the update.

Where this differs from the paper:

* Both losses are computed from the parameters as they were before the update, and nothing changes unless both are
  finite. The paper takes the critic's step first.
* The noise is independent Gaussian, not an Ornstein-Uhlenbeck process (as in TD3's authors' DDPG and in CleanRL).
* No weight decay, no batch normalisation; the action enters the critic at the first layer.
* Networks see actions scaled to ``[-1, 1]``, whatever the units of the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from millpond.algos.exploration import GaussianNoise, Policy
from millpond.algos.flat import FlatAdam, FlatParameters, Shard, load_state, save_state
from millpond.algos.nets import ActionScale, box_action
from millpond.algos.own_networks import Networks, check_roles, make_network
from millpond.algos.settings import OptimizerConfig, check_common, check_positive
from millpond.algos.transitions import (
    Transitions,
    per_item,
    read_transitions,
    refuse_huge_gradients,
    refuse_non_finite,
    weighted_mean,
)
from millpond.core.spec import EnvSpec


@dataclass(frozen=True)
class DDPGConfig(OptimizerConfig):
    """What can be set. Raises InvalidArgument for a value out of its bounds."""

    hidden: tuple[int, ...] = (256, 256)
    """Widths of the hidden layers, of the actor and of the critic."""
    gamma: float = 0.99
    tau: float = 0.005
    """How far the target networks move towards the networks in each update."""
    actor_lr: float = 3e-4
    critic_lr: float = 1e-3
    exploration_sigma: float = 0.2
    """Standard deviation of the exploration noise, in halves of the action range."""

    def __post_init__(self) -> None:
        check_common(self)
        check_positive(self, "actor_lr", "critic_lr", "exploration_sigma")


class DDPG:
    """DDPG for one continuous action. ``seed`` decides the initial weights and all noise; no global generator is used.

    ``networks`` may hold networks of the user's own, by role: see ``millpond.algos.own_networks``.

    Raises:
        InvalidArgument: ``spec`` has a discrete action, or an observation that is not made of vectors; or a network
            does not fit.
    """

    def __init__(
        self,
        spec: EnvSpec,
        config: DDPGConfig | None = None,
        *,
        seed: int,
        device: str = "cpu",
        networks: Networks | None = None,
    ) -> None:
        check_roles(networks, ("actor", "critic"), "ddpg")
        self.spec = spec
        self.config = config = config or DDPGConfig()
        self.shard = Shard()
        self.steps = 0
        generator = torch.Generator(device).manual_seed(seed)
        action = box_action(spec, "ddpg")
        inputs, outputs = spec.observation_size, action.size
        self.scale = ActionScale(action).to(device)

        actor_sizes, critic_sizes = [inputs, *config.hidden, outputs], [inputs + outputs, *config.hidden, 1]
        self.actor = make_network(networks, "actor", actor_sizes, generator=generator, tanh_output=True)
        self.critic = make_network(networks, "critic", critic_sizes, generator=generator)
        self.target_actor = make_network(networks, "actor", actor_sizes, generator=generator, tanh_output=True)
        self.target_critic = make_network(networks, "critic", critic_sizes, generator=generator)
        self.actor_adam = FlatAdam(self.actor.parameters(), lr=config.actor_lr, config=config)
        self.critic_adam = FlatAdam(self.critic.parameters(), lr=config.critic_lr, config=config)
        self.actor_target = FlatParameters(self.target_actor.parameters()).freeze()
        self.critic_target = FlatParameters(self.target_critic.parameters()).freeze()
        self.actor_target.values.copy_(self.actor_adam.values)
        self.critic_target.values.copy_(self.critic_adam.values)

        noise = torch.Generator().manual_seed(seed + 1)
        exploration = GaussianNoise(self.scale, sigma=config.exploration_sigma, generator=noise)
        self.policy = Policy(spec, self.actor, exploration)

    def update(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """One step of critic and actor on ``batch [B]``.

        Returns detached scalars, and ``td_error [B]``, the absolute error of each item:

        * ``loss/critic``: mean squared error; ``loss/actor``: minus the mean value of the policy's actions.
        * ``value/q``: mean value of the actions taken; ``value/target``: mean of what the critic should say.

        Raises:
            NonFinite: a loss is not finite. No parameter was changed.
            InvalidArgument: a field is missing or has the wrong shape. Nothing was changed.
        """
        t = read_transitions(batch, spec=self.spec, gamma=self.config.gamma)
        target = self._target(t)
        self.critic_adam.zero_grad()
        self.actor_adam.zero_grad()
        q = self._q(self.critic, t.observation, self.scale.to_unit(t.action))
        error = q - target
        critic_loss = weighted_mean(error.square(), t.weight)
        actor_loss = -self._q(self.critic, t.observation, self.actor(t.observation), frozen=True).mean()
        loss = critic_loss + actor_loss
        parts = {"loss/critic": critic_loss.detach(), "loss/actor": actor_loss.detach()}
        refuse_non_finite(loss, parts, batch, step=self.steps)
        # The critic is frozen in the actor's loss, so one backward pass serves both networks.
        loss.backward()
        self._apply(batch)
        return {
            **parts,
            "value/q": q.detach().mean(),
            "value/target": target.mean(),
            "td_error": per_item(error.detach().abs(), batch),
        }

    @torch.no_grad()
    def _target(self, t: Transitions) -> Tensor:
        """r + γ·Q′(s′, μ′(s′)): ``[B]``."""
        q = self._q(self.target_critic, t.next_observation, self.target_actor(t.next_observation))
        return t.reward + t.discount * q

    def _q(self, critic: nn.Module, observation: Tensor, action: Tensor, *, frozen: bool = False) -> Tensor:
        """The critic on actions in ``[-1, 1]``: ``[B]``."""
        q: Tensor = critic(torch.cat([observation, action], -1), frozen=frozen)
        return q.squeeze(-1)

    @torch.no_grad()
    def _apply(self, batch: TensorDictBase) -> None:
        pairs = ((self.critic_adam, self.critic_target), (self.actor_adam, self.actor_target))
        for adam, _ in pairs:  # all, before any changes: ranks step together or not at all
            self.shard.reduce_gradients(adam.gradients)
        refuse_huge_gradients([adam.gradients for adam, _ in pairs], batch, step=self.steps)
        for adam, target in pairs:
            adam.step(self.steps)
            target.values.lerp_(adam.values, self.config.tau)
        self.steps += 1

    @property
    def published(self) -> nn.Module:
        """The actor; what collectors need to act."""
        return self.policy

    def evaluation_policy(self) -> Policy:
        """Plays the actor's action without noise, on the same weights."""
        return self.policy.evaluation()

    def advance(self, frames: int) -> None:
        """The noise does not depend on how many frames were collected."""

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that an update reads or changes, as tensors."""
        return save_state(self._tensors(), self._generators(), steps=self.steps)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue bit for bit from ``state_dict()``.

        Raises:
            CheckpointError: it is another algorithm's, or of other network sizes. Nothing was loaded.
        """
        self.steps = load_state(state, self._tensors(), self._generators())

    def _tensors(self) -> dict[str, Tensor]:
        return {
            **self.actor_adam.tensors("actor"),
            **self.critic_adam.tensors("critic"),
            "target_actor": self.actor_target.values,
            "target_critic": self.critic_target.values,
        }

    def _generators(self) -> dict[str, torch.Generator]:
        return {"policy": self.policy.exploration.generator}
