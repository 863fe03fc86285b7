"""Deep Q-Network, with the double estimator and a slowly following target network.

Sources: Mnih et al., "Human-level control through deep reinforcement learning", Nature 2015; van Hasselt et al., "Deep
Reinforcement Learning with Double Q-learning", 2016 (arXiv:1509.06461). Read from top to bottom: settings, the update.

Where this differs from the papers:

* The target network moves by ``tau`` in each update (Polyak averaging) in place of a copy every few thousand. For the
  papers' manner set ``tau`` to 1 and ``target_interval`` to the number of updates between copies. Either way values
  reach about ``tau · updates / target_interval`` steps ahead: too few, and the policy cannot see further than that.
* The optimizer is Adam, not RMSProp, and the observation is a vector, not a stack of images.
* The loss is the squared error, not clipped to a linear one. With a reward of one per step a value is near 100, and so
  is the error at the end of an episode; clipped to 1 the rare end is nearly invisible, and policies drift into it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from millpond.algos.exploration import EpsilonGreedy, Policy
from millpond.algos.flat import FlatAdam, FlatParameters, Shard, load_state, save_state
from millpond.algos.own_networks import Networks, check_roles, make_network
from millpond.algos.settings import OptimizerConfig, check_between, check_common, check_positive
from millpond.algos.transitions import (
    Transitions,
    per_item,
    read_transitions,
    refuse_huge_gradients,
    refuse_non_finite,
    weighted_mean,
)
from millpond.core.errors import InvalidArgument
from millpond.core.spec import DiscreteAction, EnvSpec


@dataclass(frozen=True)
class DQNConfig(OptimizerConfig):
    """What can be set. Raises InvalidArgument for a value out of its bounds."""

    hidden: tuple[int, ...] = (120, 84)
    """Widths of the hidden layers."""
    gamma: float = 0.99
    tau: float = 0.02
    """How far the target network moves towards the network when it moves."""
    target_interval: int = 1
    """Updates between two moves of the target network."""
    lr: float = 5e-4
    dueling: bool = False
    """One value of the state and one advantage of each action, instead of a value of each action."""
    double: bool = True
    """Choose the next action by the network and value it by the target network (double Q-learning)."""
    epsilon_start: float = 1.0
    epsilon_end: float = 0.05
    epsilon_frames: int = 10_000
    """Collected frames over which ε falls from start to end."""

    def __post_init__(self) -> None:
        check_common(self)
        check_positive(self, "lr", "target_interval", "epsilon_frames")
        check_between(self, "epsilon_end", 0.0, self.epsilon_start)
        check_between(self, "epsilon_start", self.epsilon_end, 1.0)


class Dueling(nn.Module):
    """Values of actions, from a ``network`` whose first output is the value V of the state, the others advantages A.

    Q(s, a) = V(s) + A(s, a) − mean over a′ of A(s, a′): Wang et al. 2016 (arXiv:1511.06581), equation 9.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """``[B, inputs]`` to ``[B, n]``."""
        value, advantage = self.network(x).tensor_split([1], dim=-1)
        answer: Tensor = value + advantage - advantage.mean(-1, keepdim=True)
        return answer


class DQN:
    """DQN for one discrete action. ``seed`` decides the initial weights and all noise; no global generator is used.

    ``networks`` may hold networks of the user's own, by role: see ``millpond.algos.own_networks``.

    Raises:
        InvalidArgument: ``spec`` has a continuous action, or an observation that is not made of vectors; or a network
            does not fit.
    """

    def __init__(
        self,
        spec: EnvSpec,
        config: DQNConfig | None = None,
        *,
        seed: int,
        device: str = "cpu",
        networks: Networks | None = None,
    ) -> None:
        check_roles(networks, ("critic",), "dqn")
        if not isinstance(spec.action, DiscreteAction):
            raise InvalidArgument(f"dqn needs a discrete action, and this environment has {spec.action}; try sac")
        self.spec = spec
        self.config = config = config or DQNConfig()
        self.shard = Shard()
        self.steps = 0
        generator = torch.Generator(device).manual_seed(seed)
        sizes = [spec.observation_size, *config.hidden, spec.action.n + config.dueling]
        made: list[nn.Module] = [make_network(networks, "critic", sizes, generator=generator) for _ in range(2)]
        if config.dueling:
            made = [Dueling(each) for each in made]
        self.network, self.target_network = made
        self.adam = FlatAdam(self.network.parameters(), lr=config.lr, config=config)
        self.target = FlatParameters(self.target_network.parameters()).freeze()
        self.target.values.copy_(self.adam.values)
        self.exploration = EpsilonGreedy(
            start=config.epsilon_start,
            end=config.epsilon_end,
            anneal_frames=config.epsilon_frames,
            generator=torch.Generator().manual_seed(seed + 1),
        )
        self.policy = Policy(spec, self.network, self.exploration)

    def update(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """One step on ``batch [B]``.

        Returns detached scalars, and ``td_error [B]``, the absolute error of each item:

        * ``loss/q``: mean squared error.
        * ``value/q``: mean value of the actions taken; ``value/target``: mean of what the values should be.
        * ``policy/epsilon``: how often the policy acts at random.

        Raises:
            NonFinite: the loss is not finite. No parameter was changed.
            InvalidArgument: a field is missing or has the wrong shape. Nothing was changed.
        """
        t = read_transitions(batch, spec=self.spec, gamma=self.config.gamma)
        target = self._target(t)
        self.adam.zero_grad()
        q = self.network(t.observation).gather(-1, t.action.unsqueeze(-1)).squeeze(-1)
        loss = weighted_mean((q - target).square(), t.weight)
        value = loss.detach()
        refuse_non_finite(value, {"loss/q": value}, batch, step=self.steps)
        loss.backward()
        self._apply(batch)
        q = q.detach()
        return {
            "loss/q": value,
            "value/q": q.mean(),
            "value/target": target.mean(),
            "policy/epsilon": torch.tensor(self.exploration.epsilon),
            "td_error": per_item((q - target).abs_(), batch),
        }

    @torch.no_grad()
    def _target(self, t: Transitions) -> Tensor:
        """r + γ·Q′(s′, a′), where a′ is the best action by Q (double) or by Q′: ``[B]``."""
        values: Tensor = self.target_network(t.next_observation)
        if self.config.double:
            best = self.network(t.next_observation).argmax(-1, keepdim=True)
            next_value = values.gather(-1, best).squeeze(-1)
        else:
            next_value = values.amax(-1)
        return t.reward + t.discount * next_value

    @torch.no_grad()
    def _apply(self, batch: TensorDictBase) -> None:
        self.shard.reduce_gradients(self.adam.gradients)
        refuse_huge_gradients([self.adam.gradients], batch, step=self.steps)
        self.adam.step(self.steps)
        self.steps += 1
        if self.steps % self.config.target_interval == 0:
            self.target.values.lerp_(self.adam.values, self.config.tau)

    @property
    def published(self) -> nn.Module:
        """The network and the frame count that ε follows; what collectors need to act."""
        return self.policy

    def evaluation_policy(self) -> Policy:
        """Plays the action of largest value, on the same weights."""
        return self.policy.evaluation()

    def advance(self, frames: int) -> None:
        """Set how many frames were collected so far: ε follows, here and, once published, in every worker."""
        self.exploration.frames.fill_(frames)

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
        return {**self.adam.tensors("network"), "target": self.target.values, "frames": self.exploration.frames}

    def _generators(self) -> dict[str, torch.Generator]:
        return {"policy": self.exploration.generator}
