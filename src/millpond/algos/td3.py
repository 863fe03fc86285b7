"""Twin Delayed DDPG: two critics, a smoothed target action, and an actor that is updated less often.

Source: Fujimoto et al., "Addressing Function Approximation Error in Actor-Critic Methods", 2018 (arXiv:1802.09477).
Read from top to bottom: settings, the update.

Where this differs from the paper:

* Both losses are computed from the parameters as they were before the update, and nothing changes unless both are
  finite. The paper takes the critics' step first.
* Networks see actions scaled to ``[-1, 1]``, whatever the units of the environment.
* Critics and actor have learning rates of their own.
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
class TD3Config(OptimizerConfig):
    """What can be set. Raises InvalidArgument for a value out of its bounds."""

    hidden: tuple[int, ...] = (256, 256)
    """Widths of the hidden layers, of the actor and of each critic."""
    gamma: float = 0.99
    tau: float = 0.005
    """How far the target networks move towards the networks when the actor is updated."""
    actor_lr: float = 3e-4
    critic_lr: float = 1e-3
    actor_interval: int = 2
    """Updates of the critics per update of the actor and of all target networks."""
    exploration_sigma: float = 0.1
    """Standard deviation of the exploration noise, in halves of the action range."""
    target_sigma: float = 0.2
    """Standard deviation of the noise on the target action, in halves of the action range."""
    target_clip: float = 0.5
    """That noise is clipped to ± this."""

    def __post_init__(self) -> None:
        check_common(self)
        check_positive(
            self, "actor_lr", "critic_lr", "actor_interval", "exploration_sigma", "target_sigma", "target_clip"
        )


class TD3:
    """TD3 for one continuous action. ``seed`` decides the initial weights and all noise; no global generator is used.

    ``networks`` may hold networks of the user's own, by role: see ``millpond.algos.own_networks``.

    Raises:
        InvalidArgument: ``spec`` has a discrete action, or an observation that is not made of vectors; or a network
            does not fit.
    """

    def __init__(
        self,
        spec: EnvSpec,
        config: TD3Config | None = None,
        *,
        seed: int,
        device: str = "cpu",
        networks: Networks | None = None,
    ) -> None:
        check_roles(networks, ("actor", "critic"), "td3")
        self.spec = spec
        self.config = config = config or TD3Config()
        self.shard = Shard()
        self.steps = 0
        self.generator = torch.Generator(device).manual_seed(seed)
        action = box_action(spec, "td3")
        inputs, outputs = spec.observation_size, action.size
        self.scale = ActionScale(action).to(device)

        actor_sizes, critic_sizes = [inputs, *config.hidden, outputs], [inputs + outputs, *config.hidden, 1]
        self.actor = make_network(networks, "actor", actor_sizes, generator=self.generator, tanh_output=True)
        self.critics = make_network(networks, "critic", critic_sizes, generator=self.generator, copies=2)
        self.target_actor = make_network(networks, "actor", actor_sizes, generator=self.generator, tanh_output=True)
        self.target_critics = make_network(networks, "critic", critic_sizes, generator=self.generator, copies=2)
        self.actor_adam = FlatAdam(self.actor.parameters(), lr=config.actor_lr, config=config)
        self.critic_adam = FlatAdam(self.critics.parameters(), lr=config.critic_lr, config=config)
        self.actor_target = FlatParameters(self.target_actor.parameters()).freeze()
        self.critic_target = FlatParameters(self.target_critics.parameters()).freeze()
        self.actor_target.values.copy_(self.actor_adam.values)
        self.critic_target.values.copy_(self.critic_adam.values)

        noise = torch.Generator().manual_seed(seed + 1)
        exploration = GaussianNoise(self.scale, sigma=config.exploration_sigma, generator=noise)
        self.policy = Policy(spec, self.actor, exploration)

    def update(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """One step of the critics, and in every ``actor_interval``-th update of the actor, on ``batch [B]``.

        Returns detached scalars, and ``td_error [B]``, the mean of both critics' absolute errors:

        * ``loss/critic``: summed squared errors of both critics.
        * ``loss/actor``: minus the mean value of the policy's actions; only where the actor was updated.
        * ``value/q``: mean of the first critic on the batch; ``value/target``: mean of what the critics should say.

        Raises:
            NonFinite: a loss is not finite. No parameter was changed.
            InvalidArgument: a field is missing or has the wrong shape. Nothing was changed.
        """
        t = read_transitions(batch, spec=self.spec, gamma=self.config.gamma)
        target = self._target(t)
        self.critic_adam.zero_grad()
        q = self._q(self.critics, t.observation, self.scale.to_unit(t.action))
        error = q - target
        critic_loss = weighted_mean(error.square(), t.weight).sum()
        loss, parts = critic_loss, {"loss/critic": critic_loss.detach()}

        actor_too = (self.steps + 1) % self.config.actor_interval == 0
        if actor_too:
            self.actor_adam.zero_grad()
            actor_loss = -self._q(self.critics, t.observation, self.actor(t.observation), frozen=True)[0].mean()
            loss = loss + actor_loss
            parts["loss/actor"] = actor_loss.detach()

        refuse_non_finite(loss, parts, batch, step=self.steps)
        # The critics are frozen in the actor's loss, so one backward pass serves both networks.
        loss.backward()
        self._apply(actor_too, batch)
        return {
            **parts,
            "value/q": q[0].detach().mean(),
            "value/target": target.mean(),
            "td_error": per_item(error.detach().abs().mean(0), batch),
        }

    @torch.no_grad()
    def _target(self, t: Transitions) -> Tensor:
        """r + γ·min Q′(s′, μ′(s′) + clipped noise): ``[B]``."""
        noise = self.shard.randn(len(t.reward), len(self.scale.center), self.generator) * self.config.target_sigma
        noise = noise.clamp(-self.config.target_clip, self.config.target_clip)
        action = (self.target_actor(t.next_observation) + noise).clamp(-1, 1)
        return t.reward + t.discount * self._q(self.target_critics, t.next_observation, action).amin(0)

    def _q(self, critics: nn.Module, observation: Tensor, action: Tensor, *, frozen: bool = False) -> Tensor:
        """Both critics on actions in ``[-1, 1]``: ``[2, B]``."""
        q: Tensor = critics(torch.cat([observation, action], -1), frozen=frozen)
        return q.squeeze(-1)

    @torch.no_grad()
    def _apply(self, actor_too: bool, batch: TensorDictBase) -> None:
        adams = [self.critic_adam, self.actor_adam] if actor_too else [self.critic_adam]
        for adam in adams:  # all, before any changes: ranks step together or not at all
            self.shard.reduce_gradients(adam.gradients)
        refuse_huge_gradients([adam.gradients for adam in adams], batch, step=self.steps)
        for adam in adams:
            adam.step(self.steps)
        if actor_too:
            self.critic_target.values.lerp_(self.critic_adam.values, self.config.tau)
            self.actor_target.values.lerp_(self.actor_adam.values, self.config.tau)
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
            **self.critic_adam.tensors("critics"),
            "target_actor": self.actor_target.values,
            "target_critics": self.critic_target.values,
        }

    def _generators(self) -> dict[str, torch.Generator]:
        return {"update": self.generator, "policy": self.policy.exploration.generator}
