"""The dueling head of DQN, by value."""

from __future__ import annotations

import pickle

import torch
from batches import batch_for, make
from torch import nn

from millpond.algos.dqn import DQN, DQNConfig, Dueling


def test_the_value_is_that_of_the_paper() -> None:
    """Wang et al. 2016, equation 9, on V = 2 and A = (1, 3, 5, -1), whose mean is 2."""
    head = Dueling(nn.Identity())
    assert head(torch.tensor([[2.0, 1.0, 3.0, 5.0, -1.0]])).tolist() == [[1.0, 3.0, 5.0, -1.0]]
    assert head(torch.tensor([[7.0, 1.0, 3.0, 5.0, -1.0]])).tolist() == [[6.0, 8.0, 10.0, 4.0]]


def test_dqn_learns_with_it_acts_and_goes_on_from_a_checkpoint() -> None:
    first, second = (make("dqn", seed=seed, dueling=True, gamma=0.0) for seed in (0, 1))
    assert isinstance(first.network, Dueling)
    assert isinstance(first.target_network, Dueling)
    errors = [float(first.update(batch_for("dqn"))["td_error"].abs().mean()) for _ in range(200)]
    assert errors[-1] < 0.8 * errors[0]
    second.load_state_dict(first.state_dict())
    first.update(batch_for("dqn"))
    second.update(batch_for("dqn"))
    assert all(torch.equal(value, second.state_dict()[key]) for key, value in first.state_dict().items())
    policy = first.evaluation_policy()
    action = policy(batch_for("dqn"))["action"]
    assert torch.equal(action, pickle.loads(pickle.dumps(policy))(batch_for("dqn"))["action"])
    assert action.max() < 4


def test_an_own_network_has_one_output_more() -> None:
    seen = []

    def critic(inputs: int, outputs: int) -> nn.Module:
        seen.append(outputs)
        return nn.Linear(inputs, outputs)

    DQN(make("dqn").spec, DQNConfig(dueling=True), seed=0, networks={"critic": critic})
    assert set(seen) == {5}
