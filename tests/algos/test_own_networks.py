"""Networks of the user's own in the place of an algorithm's perceptrons."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from batches import KINDS, NAMES, batch_for, same, snapshot
from torch import nn

from millpond.core.errors import InvalidArgument, InvalidType


def two_layers(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, outputs))


def make_with(name: str, networks: dict[str, Any], *, seed: int = 0, **settings: Any) -> Any:
    algorithm, config, spec = KINDS[name]
    return algorithm(spec, config(hidden=(16,), **settings), seed=seed, networks=networks)


def roles(name: str) -> dict[str, Any]:
    return {"critic": two_layers} if name == "dqn" else {"actor": two_layers, "critic": two_layers}


@pytest.mark.parametrize("name", NAMES)
def test_an_algorithm_learns_with_them_and_goes_on_from_a_checkpoint(name: str) -> None:
    # Without a discount what the critic should say stays, so that its error can only fall.
    algorithm, other = (make_with(name, roles(name), seed=seed, gamma=0.0) for seed in (0, 5))
    before = snapshot(algorithm)
    errors = [float(algorithm.update(batch_for(name))["td_error"].abs().mean()) for _ in range(200)]
    assert errors[-1] < 0.8 * errors[0]
    assert not same(before, snapshot(algorithm))
    other.load_state_dict(algorithm.state_dict())
    algorithm.update(batch_for(name))
    other.update(batch_for(name))
    assert same(snapshot(algorithm), snapshot(other))


@pytest.mark.parametrize("name", NAMES)
def test_their_first_numbers_come_from_the_seed_and_the_global_generator_is_left(name: str) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = make_with(name, roles(name))
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    assert same(snapshot(first), snapshot(make_with(name, roles(name))))
    assert not same(snapshot(first), snapshot(make_with(name, roles(name), seed=1)))


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_with_one_acts_within_bounds_and_its_copies_act_alike(name: str) -> None:
    policy, batch = make_with(name, roles(name)).evaluation_policy(), batch_for(name)
    actions = policy(batch.clone())["action"]
    for again in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        assert torch.equal(actions, again(batch.clone())["action"])
    if name != "dqn":
        low, high = KINDS[name][2].action.bounds()
        assert ((actions >= low) & (actions <= high)).all()


def test_both_critics_of_a_pair_are_different_and_targets_begin_equal() -> None:
    algorithm = make_with("td3", {"critic": two_layers})
    one, two = algorithm.critics.parts
    assert not torch.equal(one[0].weight, two[0].weight)
    for mine, target in zip(algorithm.critics.parameters(), algorithm.target_critics.parameters(), strict=True):
        assert torch.equal(mine, target)
        assert mine.data_ptr() != target.data_ptr()


def test_the_gradient_of_the_actor_loss_does_not_reach_the_critics() -> None:
    algorithm = make_with("sac", {"critic": two_layers})
    x = torch.randn(4, algorithm.critics.parts[0][0].in_features, requires_grad=True)
    frozen, plain = algorithm.critics(x, frozen=True), algorithm.critics(x)
    assert torch.equal(frozen, plain)
    algorithm.critic_adam.zero_grad()
    frozen.sum().backward()
    assert x.grad is not None
    assert x.grad.any()
    assert not algorithm.critic_adam.gradients.any()


shared = two_layers(8, 1)  # td3 and ddpg: five numbers of observation and three of action


@pytest.mark.parametrize(
    ("networks", "error", "words"),
    [
        ({"value": two_layers}, InvalidArgument, "no network 'value'; it has: actor, critic"),
        ({"critic": two_layers(8, 1)}, InvalidType, "must be a class or function"),
        ({"critic": "mlp"}, InvalidType, "must be a class or function"),
        ({"critic": lambda inputs, outputs: 3}, InvalidType, "made a int, not an nn.Module"),
        ({"critic": lambda inputs, outputs: shared}, InvalidArgument, "must make a new module"),
        ({"critic": lambda inputs, outputs: two_layers(inputs, 2)}, InvalidArgument, r"gave \[2, 2\]"),
        ({"critic": lambda inputs, outputs: two_layers(3, outputs)}, InvalidArgument, "it raised RuntimeError"),
        ({"critic": lambda inputs, outputs: nn.BatchNorm1d(inputs)}, InvalidArgument, "has buffers"),
        ({"critic": lambda inputs, outputs: nn.Flatten()}, InvalidArgument, "no parameters"),
        ({"critic": lambda inputs, outputs: two_layers(inputs, outputs).double()}, InvalidArgument, "float32"),
    ],
)
def test_what_cannot_be_a_network_is_refused(networks: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make_with("td3", networks)
