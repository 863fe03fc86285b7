"""The four updates written as plainly as can be: one module per network, one loop per parameter, one optimizer each.

No flat tensors, no stacked networks, no fused anything. Slow and obvious; the real ones must agree with them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from millpond.algos.nets import MLP


def plain_net(mlp: MLP, copy: int | None = None) -> nn.Sequential:
    """An nn.Sequential with the weights of ``mlp``, or of one of its copies."""
    layers: list[nn.Module] = []
    numbers = sorted(int(n.removeprefix("weight_")) for n, _ in mlp.named_parameters() if n.startswith("weight_"))
    for number in numbers:
        weight, bias = getattr(mlp, f"weight_{number}").detach(), getattr(mlp, f"bias_{number}").detach()
        if copy is not None:
            weight, bias = weight[copy], bias[copy, 0]
        linear = nn.Linear(*weight.shape)
        with torch.no_grad():
            linear.weight.copy_(weight.T)
            linear.bias.copy_(bias)
        layers += [linear, nn.ReLU()]
    layers[-1] = nn.Tanh() if mlp.tanh_output else nn.Identity()
    return nn.Sequential(*layers)


def adam(lr: float, *things: Any) -> torch.optim.Adam:
    parameters = [p for thing in things for p in (thing.parameters() if isinstance(thing, nn.Module) else [thing])]
    return torch.optim.Adam(parameters, lr=lr, fused=False, foreach=False)


def follow(target: nn.Module, source: nn.Module, tau: float) -> None:
    with torch.no_grad():
        for old, new in zip(target.parameters(), source.parameters(), strict=True):
            old.copy_((1 - tau) * old + tau * new)


def unit(action: Tensor, low: Any, high: Any) -> Tensor:
    return 2 * (action - torch.tensor(low)) / (torch.tensor(high) - torch.tensor(low)) - 1


class PlainSAC:
    def __init__(self, real: Any) -> None:
        self.real, self.c = real, real.config
        self.actor = plain_net(real.actor)
        self.critics = [plain_net(real.critics, i) for i in (0, 1)]
        self.targets = [plain_net(real.target_critics, i) for i in (0, 1)]
        self.log_alpha = nn.Parameter(real.log_alpha.detach().clone())
        self.actor_adam = adam(self.c.actor_lr, self.actor, self.log_alpha)
        self.critic_adam = adam(self.c.critic_lr, *self.critics)

    def sample(self, observation: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.actor(observation).chunk(2, -1)
        log_std = log_std.clamp(-5, 2)
        u = mean + log_std.exp() * noise
        log_prob = torch.distributions.Normal(mean, log_std.exp()).log_prob(u)
        log_slope = 2 * (math.log(2) - u - nn.functional.softplus(-2 * u))
        return torch.tanh(u), (log_prob - log_slope).sum(-1)

    def update(self, batch: Any, noise: Tensor, weight: Tensor | float = 1.0) -> None:
        target_noise, actor_noise = noise.chunk(2, -1)
        s, s2 = batch["observation"], batch["next", "observation"]
        a = unit(batch["action"], self.real.spec.action.low, self.real.spec.action.high)
        alpha = self.log_alpha.exp().detach()
        with torch.no_grad():
            a2, log_prob2 = self.sample(s2, target_noise)
            q2 = torch.min(*(t(torch.cat([s2, a2], -1))[:, 0] for t in self.targets)) - alpha * log_prob2
            y = batch["next", "reward"][:, 0] + self.c.gamma * (1 - batch["next", "terminated"].float()[:, 0]) * q2
        critic_loss = sum((weight * (q(torch.cat([s, a], -1))[:, 0] - y) ** 2).mean() for q in self.critics)
        action, log_prob = self.sample(s, actor_noise)
        q = torch.min(*(c(torch.cat([s, action], -1))[:, 0] for c in self.critics))
        actor_loss = (alpha * log_prob - q).mean()
        alpha_loss = -(self.log_alpha * (log_prob.detach() - a.shape[-1])).mean()
        step(self.critic_adam, critic_loss, self.actor_adam, actor_loss + alpha_loss)
        for target, critic in zip(self.targets, self.critics, strict=True):
            follow(target, critic, self.c.tau)

    def compare(self, agree: Any) -> None:
        for i in (0, 1):
            agree(plain_net(self.real.critics, i), self.critics[i])
            agree(plain_net(self.real.target_critics, i), self.targets[i])
        agree(plain_net(self.real.actor), self.actor)
        torch.testing.assert_close(self.real.log_alpha, self.log_alpha)


class PlainTD3:
    def __init__(self, real: Any) -> None:
        self.real, self.c = real, real.config
        self.actor, self.target_actor = plain_net(real.actor), plain_net(real.target_actor)
        self.critics = [plain_net(real.critics, i) for i in (0, 1)]
        self.targets = [plain_net(real.target_critics, i) for i in (0, 1)]
        self.actor_adam, self.critic_adam = adam(self.c.actor_lr, self.actor), adam(self.c.critic_lr, *self.critics)
        self.steps = 0

    def update(self, batch: Any, noise: Tensor, weight: Tensor | float = 1.0) -> None:
        self.steps += 1
        s, s2 = batch["observation"], batch["next", "observation"]
        a = unit(batch["action"], self.real.spec.action.low, self.real.spec.action.high)
        with torch.no_grad():
            wobble = (noise * self.c.target_sigma).clamp(-self.c.target_clip, self.c.target_clip)
            a2 = (self.target_actor(s2) + wobble).clamp(-1, 1)
            q2 = torch.min(*(t(torch.cat([s2, a2], -1))[:, 0] for t in self.targets))
            y = batch["next", "reward"][:, 0] + self.c.gamma * (1 - batch["next", "terminated"].float()[:, 0]) * q2
        critic_loss = sum((weight * (q(torch.cat([s, a], -1))[:, 0] - y) ** 2).mean() for q in self.critics)
        if self.steps % self.c.actor_interval:
            step(self.critic_adam, critic_loss)
            return
        actor_loss = -self.critics[0](torch.cat([s, self.actor(s)], -1)).mean()
        step(self.critic_adam, critic_loss, self.actor_adam, actor_loss)
        for target, critic in zip(self.targets, self.critics, strict=True):
            follow(target, critic, self.c.tau)
        follow(self.target_actor, self.actor, self.c.tau)

    def compare(self, agree: Any) -> None:
        for i in (0, 1):
            agree(plain_net(self.real.critics, i), self.critics[i])
            agree(plain_net(self.real.target_critics, i), self.targets[i])
        agree(plain_net(self.real.actor), self.actor)
        agree(plain_net(self.real.target_actor), self.target_actor)


class PlainDDPG:
    def __init__(self, real: Any) -> None:
        self.real, self.c = real, real.config
        self.actor, self.target_actor = plain_net(real.actor), plain_net(real.target_actor)
        self.critic, self.target = plain_net(real.critic), plain_net(real.target_critic)
        self.actor_adam, self.critic_adam = adam(self.c.actor_lr, self.actor), adam(self.c.critic_lr, self.critic)

    def update(self, batch: Any, noise: Tensor | None, weight: Tensor | float = 1.0) -> None:
        s, s2 = batch["observation"], batch["next", "observation"]
        a = unit(batch["action"], self.real.spec.action.low, self.real.spec.action.high)
        with torch.no_grad():
            q2 = self.target(torch.cat([s2, self.target_actor(s2)], -1))[:, 0]
            y = batch["next", "reward"][:, 0] + self.c.gamma * (1 - batch["next", "terminated"].float()[:, 0]) * q2
        critic_loss = (weight * (self.critic(torch.cat([s, a], -1))[:, 0] - y) ** 2).mean()
        actor_loss = -self.critic(torch.cat([s, self.actor(s)], -1)).mean()
        step(self.critic_adam, critic_loss, self.actor_adam, actor_loss)
        follow(self.target, self.critic, self.c.tau)
        follow(self.target_actor, self.actor, self.c.tau)

    def compare(self, agree: Any) -> None:
        agree(plain_net(self.real.critic), self.critic)
        agree(plain_net(self.real.target_critic), self.target)
        agree(plain_net(self.real.actor), self.actor)
        agree(plain_net(self.real.target_actor), self.target_actor)


class PlainDQN:
    def __init__(self, real: Any) -> None:
        self.real, self.c = real, real.config
        self.network, self.target = plain_net(real.network), plain_net(real.target_network)
        self.adam = adam(self.c.lr, self.network)
        self.steps = 0

    def update(self, batch: Any, noise: Tensor | None, weight: Tensor | float = 1.0) -> None:
        self.steps += 1
        s2 = batch["next", "observation"]
        rows = torch.arange(len(s2))
        with torch.no_grad():
            best = (self.network if self.c.double else self.target)(s2).argmax(-1)
            q2 = self.target(s2)[rows, best]
            y = batch["next", "reward"][:, 0] + self.c.gamma * (1 - batch["next", "terminated"].float()[:, 0]) * q2
        q = self.network(batch["observation"])[rows, batch["action"]]
        step(self.adam, (weight * (q - y) ** 2).mean())
        if self.steps % self.c.target_interval == 0:
            follow(self.target, self.network, self.c.tau)

    def compare(self, agree: Any) -> None:
        agree(plain_net(self.real.network), self.network)
        agree(plain_net(self.real.target_network), self.target)


def step(*optimizers_and_losses: Any) -> None:
    """Compute all gradients from the parameters as they are, each for its own optimizer; then take all steps."""
    pairs = list(zip(optimizers_and_losses[::2], optimizers_and_losses[1::2], strict=True))
    gradients = [
        torch.autograd.grad(loss, opt.param_groups[0]["params"], retain_graph=True, allow_unused=True)
        for opt, loss in pairs
    ]
    for (opt, _), grads in zip(pairs, gradients, strict=True):
        for parameter, gradient in zip(opt.param_groups[0]["params"], grads, strict=True):
            parameter.grad = gradient
        opt.step()


PLAIN: dict[str, Any] = {"sac": PlainSAC, "td3": PlainTD3, "ddpg": PlainDDPG, "dqn": PlainDQN}
