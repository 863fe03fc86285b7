"""Soft Actor-Critic: a stochastic policy, two critics, and a temperature that is learned.

Sources: Haarnoja et al., "Soft Actor-Critic Algorithms and Applications", 2018 (arXiv:1812.05905); its manner here owes
much to CleanRL and LeanRL. Read from top to bottom: settings, the distribution, the update.

Where this differs from the paper:

* Both losses are computed from the parameters as they were before the update, and nothing changes unless both are
  finite. The paper takes the critics' step first.
* Entropy is measured on actions scaled to ``[-1, 1]``, whatever the units of the environment, so that the target
  entropy and the size of the bonus do not depend on units. In the environment's units a log-probability is smaller by
  the constant ``ActionScale.log_volume()``.
* The log standard deviation is clipped to [-5, 2].
* The temperature's loss is linear in ``log_alpha`` (as in the authors' code), not in ``alpha``.
* The temperature shares the actor's optimizer, hence its learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn.functional import softplus

from millpond.algos.exploration import Policy, normal_noise
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

LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0


@dataclass(frozen=True)
class SACConfig(OptimizerConfig):
    """What can be set. Raises InvalidArgument for a value out of its bounds."""

    hidden: tuple[int, ...] = (256, 256)
    """Widths of the hidden layers, of the actor and of each critic."""
    gamma: float = 0.99
    tau: float = 0.005
    """How far the target critics move towards the critics in each update."""
    actor_lr: float = 3e-4
    critic_lr: float = 1e-3
    initial_alpha: float = 1.0
    """The temperature to begin with; the weight of entropy against return."""
    learn_alpha: bool = True
    target_entropy: float | None = None
    """The entropy that the temperature is steered to; None is minus the number of action dimensions."""

    def __post_init__(self) -> None:
        check_common(self)
        check_positive(self, "actor_lr", "critic_lr", "initial_alpha")


def sample_tanh_gaussian(output: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """An action in ``[-1, 1]`` and its log-probability density there: ``[B, 2A], [B, A] → [B, A], [B]``.

    With u = mean + std·noise and a = tanh(u): log p(a) = log N(u) − Σ log(1 − tanh²u), and the last term is computed
    as 2·(log 2 − u − softplus(−2u)), which stays finite where tanh has saturated (arXiv:1812.05905, appendix C).
    """
    mean, log_std = output.chunk(2, dim=-1)
    log_std = log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)
    u = mean + log_std.exp() * noise
    log_normal = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    log_slope = 2 * (math.log(2) - u - softplus(-2 * u))
    return u.tanh(), (log_normal - log_slope).sum(-1)


class TanhGaussian(nn.Module):
    """SAC explores by sampling its own distribution; without exploration it plays the mean."""

    def __init__(self, scale: ActionScale, *, generator: torch.Generator) -> None:
        super().__init__()
        self.scale = scale
        self.generator = generator

    def explore(self, output: Tensor) -> Tensor:
        mean, log_std = output.chunk(2, dim=-1)
        noise = normal_noise(mean, self.generator)
        return self.scale.to_env((mean + log_std.clamp(LOG_STD_MIN, LOG_STD_MAX).exp() * noise).tanh_())

    def exploit(self, output: Tensor) -> Tensor:
        return self.scale.to_env(output.chunk(2, dim=-1)[0].tanh())


class SAC:
    """SAC for one continuous action. ``seed`` decides the initial weights and all noise; no global generator is used.

    ``networks`` may hold networks of the user's own, by role: see ``millpond.algos.own_networks``.

    Raises:
        InvalidArgument: ``spec`` has a discrete action, or an observation that is not made of vectors; or a network
            does not fit.
    """

    def __init__(
        self,
        spec: EnvSpec,
        config: SACConfig | None = None,
        *,
        seed: int,
        device: str = "cpu",
        networks: Networks | None = None,
    ) -> None:
        check_roles(networks, ("actor", "critic"), "sac")
        self.spec = spec
        self.config = config = config or SACConfig()
        self.shard = Shard()
        self.steps = 0
        self.generator = torch.Generator(device).manual_seed(seed)
        action = box_action(spec, "sac")
        inputs, outputs = spec.observation_size, action.size
        self.scale = ActionScale(action).to(device)
        self.target_entropy = -float(outputs) if config.target_entropy is None else config.target_entropy

        critic_sizes = [inputs + outputs, *config.hidden, 1]
        self.actor = make_network(networks, "actor", [inputs, *config.hidden, 2 * outputs], generator=self.generator)
        self.critics = make_network(networks, "critic", critic_sizes, generator=self.generator, copies=2)
        self.target_critics = make_network(networks, "critic", critic_sizes, generator=self.generator, copies=2)
        self.log_alpha = nn.Parameter(torch.full((1,), math.log(config.initial_alpha), device=device))

        self.actor_adam = FlatAdam([*self.actor.parameters(), self.log_alpha], lr=config.actor_lr, config=config)
        self.critic_adam = FlatAdam(self.critics.parameters(), lr=config.critic_lr, config=config)
        self.target = FlatParameters(self.target_critics.parameters()).freeze()
        self.target.values.copy_(self.critic_adam.values)

        noise = torch.Generator().manual_seed(seed + 1)
        self.policy = Policy(spec, self.actor, TanhGaussian(self.scale, generator=noise))

    def update(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """One step of critics, actor and temperature on ``batch [B]``.

        Returns detached scalars, and ``td_error [B]``, the mean of both critics' absolute errors:

        * ``loss/critic``: summed squared errors of both critics; ``loss/actor``: α·log π − Q; ``loss/alpha``.
        * ``value/q``: mean of the first critic on the batch; ``value/target``: mean of what the critics should say.
        * ``policy/entropy``: −log π on the batch, in ``[-1, 1]`` units; ``policy/alpha``: the temperature used.

        Raises:
            NonFinite: a loss is not finite. No parameter was changed.
            InvalidArgument: a field is missing or has the wrong shape. Nothing was changed.
        """
        t = read_transitions(batch, spec=self.spec, gamma=self.config.gamma)
        rows = len(t.reward)
        target_noise, noise = self.shard.randn(rows, 2 * len(self.scale.center), self.generator).chunk(2, dim=-1)
        alpha = self.log_alpha.detach().exp()
        target = self._target(t, alpha, target_noise)

        self.critic_adam.zero_grad()
        self.actor_adam.zero_grad()
        q = self._q(self.critics, t.observation, self.scale.to_unit(t.action))
        error = q - target
        critic_loss = weighted_mean(error.square(), t.weight).sum()

        action, log_prob = sample_tanh_gaussian(self.actor(t.observation), noise)
        q_policy = self._q(self.critics, t.observation, action, frozen=True).amin(0)
        actor_loss = (alpha * log_prob - q_policy).mean()
        loss = critic_loss + actor_loss
        parts = {"loss/critic": critic_loss.detach(), "loss/actor": actor_loss.detach()}
        if self.config.learn_alpha:
            alpha_loss = -(self.log_alpha * (log_prob.detach() + self.target_entropy)).mean()
            loss = loss + alpha_loss
            parts["loss/alpha"] = alpha_loss.detach()

        refuse_non_finite(loss, parts, batch, step=self.steps)
        # The critics are frozen in the actor's loss, so one backward pass serves both networks.
        loss.backward()
        self._apply(batch)
        return {
            **parts,
            "value/q": q[0].detach().mean(),
            "value/target": target.mean(),
            "policy/entropy": -log_prob.detach().mean(),
            "policy/alpha": alpha[0],
            "td_error": per_item(error.detach().abs().mean(0), batch),
        }

    @torch.no_grad()
    def _target(self, t: Transitions, alpha: Tensor, noise: Tensor) -> Tensor:
        """r + γ·(min Q(s′, a′) − α·log π(a′|s′)) with a′ from the current policy: ``[B]``."""
        action, log_prob = sample_tanh_gaussian(self.actor(t.next_observation), noise)
        q = self._q(self.target_critics, t.next_observation, action).amin(0)
        return t.reward + t.discount * (q - alpha * log_prob)

    def _q(self, critics: nn.Module, observation: Tensor, action: Tensor, *, frozen: bool = False) -> Tensor:
        """Both critics on actions in ``[-1, 1]``: ``[2, B]``."""
        q: Tensor = critics(torch.cat([observation, action], -1), frozen=frozen)
        return q.squeeze(-1)

    @torch.no_grad()
    def _apply(self, batch: TensorDictBase) -> None:
        for adam in (self.critic_adam, self.actor_adam):  # all, before any changes: ranks step together or not at all
            self.shard.reduce_gradients(adam.gradients)
        refuse_huge_gradients([self.critic_adam.gradients, self.actor_adam.gradients], batch, step=self.steps)
        self.critic_adam.step(self.steps)
        self.actor_adam.step(self.steps)
        self.target.values.lerp_(self.critic_adam.values, self.config.tau)
        self.steps += 1

    @property
    def published(self) -> nn.Module:
        """The actor; what collectors need to act."""
        return self.policy

    def evaluation_policy(self) -> Policy:
        """Plays the mean action, on the same weights."""
        return self.policy.evaluation()

    def advance(self, frames: int) -> None:
        """SAC's exploration does not depend on how many frames were collected."""

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
        return {**self.actor_adam.tensors("actor"), **self.critic_adam.tensors("critics"), "target": self.target.values}

    def _generators(self) -> dict[str, torch.Generator]:
        return {"update": self.generator, "policy": self.policy.exploration.generator}
