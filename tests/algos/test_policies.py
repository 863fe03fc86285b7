"""What policies do: distributions, exploration that never ends, evaluation that never explores, and how they travel."""

from __future__ import annotations

import copy
import math
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from batches import CONTINUOUS, DISCRETE, HIGH, KINDS, LOW, NAMES, OBSERVATION, batch_for, make
from tensordict import TensorDict

from millpond.algos.exploration import EpsilonGreedy, GaussianNoise
from millpond.algos.nets import ActionScale
from millpond.algos.sac import sample_tanh_gaussian
from millpond.core.errors import InvalidArgument
from millpond.core.spec import BoxAction, EnvSpec
from millpond.weights import WeightBoard


def seen(rows: int, *, seed: int = 0) -> TensorDict:
    g = torch.Generator().manual_seed(seed)
    return TensorDict({"observation": torch.randn(rows, OBSERVATION, generator=g)}, [rows])


def same_observation(rows: int) -> TensorDict:
    return TensorDict({"observation": torch.full((rows, OBSERVATION), 0.3)}, [rows])


# ------------------------------------------------------------------------------------------------- SAC's distribution
@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (0.7, -1.0), (-1.5, 0.5), (0.2, -3.0), (3.0, 1.0)])
def test_log_probability_equals_the_change_of_variables(mean: float, log_std: float) -> None:
    """The density of a = tanh(u), from the distribution function of u by a finite difference."""
    noise = torch.tensor([[-2.0], [-0.5], [0.0], [0.3], [1.0], [1.7]], dtype=torch.float64)
    output = torch.tensor([[mean, log_std]], dtype=torch.float64).expand(6, 2)
    action, log_prob = sample_tanh_gaussian(output, noise)
    gauss = torch.distributions.Normal(torch.tensor(mean, dtype=torch.float64), math.exp(log_std))
    h = 1e-4 * (1 - action.square()[:, 0])
    upper, lower = torch.atanh(action[:, 0] + h), torch.atanh(action[:, 0] - h)
    density = (gauss.cdf(upper) - gauss.cdf(lower)) / (2 * h)
    torch.testing.assert_close(log_prob, density.log(), rtol=1e-4, atol=1e-4)


def test_the_density_integrates_to_one_in_the_units_of_the_environment() -> None:
    scale = ActionScale(BoxAction((-2.0,), (3.0,)))
    noise = torch.linspace(-6, 6, 20_001, dtype=torch.float64)[:, None]
    action, log_prob = sample_tanh_gaussian(torch.tensor([[0.4, -0.7]], dtype=torch.float64).expand(20_001, 2), noise)
    in_env = scale.to_env(action.float())[:, 0].double()
    density = (log_prob - scale.log_volume()).exp()
    assert torch.trapezoid(density, in_env).item() == pytest.approx(1, abs=1e-3)


def test_dimensions_add_up_and_clipping_holds() -> None:
    output, noise = torch.randn(8, 6), torch.randn(8, 3)
    _, log_prob = sample_tanh_gaussian(output, noise)
    each = [sample_tanh_gaussian(output[:, [i, i + 3]], noise[:, [i]])[1] for i in range(3)]
    torch.testing.assert_close(log_prob, sum(each))
    wild = torch.tensor([[0.0, 50.0]])
    assert torch.equal(
        sample_tanh_gaussian(wild, torch.ones(1, 1))[0], sample_tanh_gaussian(wild * 9, torch.ones(1, 1))[0]
    )


@pytest.mark.parametrize("u", [30.0, -30.0, 200.0])
def test_a_saturated_action_keeps_a_finite_log_probability(u: float) -> None:
    output = torch.tensor([[u, 0.0]], requires_grad=True)
    _, log_prob = sample_tanh_gaussian(output, torch.zeros(1, 1))
    log_prob.sum().backward()
    assert torch.isfinite(log_prob).all()
    assert output.grad is not None
    assert torch.isfinite(output.grad).all()


def test_scaling_reaches_the_bounds_and_comes_back() -> None:
    scale = ActionScale(BoxAction(LOW, HIGH))
    assert torch.equal(scale.to_env(torch.tensor([-1.0, -1, -1])), torch.tensor(LOW))
    assert torch.equal(scale.to_env(torch.tensor([1.0, 1, 1])), torch.tensor(HIGH))
    unit = torch.rand(10, 3) * 2 - 1
    torch.testing.assert_close(scale.to_unit(scale.to_env(unit)), unit)


# ---------------------------------------------------------------------------------------------------------- exploration
@pytest.mark.parametrize(("name", "sigma"), [("ddpg", 0.2), ("ddpg", 0.05), ("td3", 0.1)])
def test_gaussian_exploration_has_the_set_standard_deviation(name: str, sigma: float) -> None:
    """eval-1: noisy in collection, with a standard deviation within 5 % of the setting."""
    algorithm = make(name, exploration_sigma=sigma)
    data = same_observation(20_000)
    noisy = algorithm.policy(data.clone())["action"]
    quiet = algorithm.evaluation_policy()(data.clone())["action"]
    halves = (torch.tensor(HIGH) - torch.tensor(LOW)) / 2
    assert quiet.unique(dim=0).shape[0] == 1
    torch.testing.assert_close((noisy - quiet).std(0) / halves, torch.full((3,), sigma), rtol=0.05, atol=0)
    torch.testing.assert_close(noisy.mean(0), quiet[0], rtol=0, atol=0.02)


def test_sac_explores_by_sampling_its_own_distribution() -> None:
    """eval-1, for SAC: what collectors do is distributed as what the update's entropy is computed from."""
    algorithm = make("sac")
    data = same_observation(40_000)
    taken = algorithm.scale.to_unit(algorithm.policy(data.clone())["action"]).clamp(-1 + 1e-6, 1 - 1e-6)
    mean, log_std = algorithm.actor(data["observation"][:1]).chunk(2, -1)
    torch.testing.assert_close(torch.atanh(taken).std(0), log_std[0].exp(), rtol=0.05, atol=0)
    torch.testing.assert_close(torch.atanh(taken).mean(0), mean[0], rtol=0, atol=0.05)
    quiet = algorithm.evaluation_policy()(data)["action"]
    torch.testing.assert_close(algorithm.scale.to_unit(quiet[0]), mean[0].tanh())


@pytest.mark.parametrize(
    ("frames", "epsilon"), [(0, 1.0), (2500, 0.7625), (5000, 0.525), (10_000, 0.05), (99_999, 0.05)]
)
def test_epsilon_falls_from_one_with_the_frames_collected(frames: int, epsilon: float) -> None:
    """eval-1, for DQN: so many actions are random, uniformly; the others are the best."""
    algorithm = make("dqn", epsilon_frames=10_000)
    algorithm.advance(frames)
    data = same_observation(20_000)
    best = algorithm.evaluation_policy()(data.clone())["action"]
    assert best.unique().numel() == 1
    taken = algorithm.policy(data)["action"]
    share = torch.bincount(taken, minlength=4) / 20_000
    expected = torch.full((4,), epsilon / 4)
    expected[best[0]] += 1 - epsilon
    torch.testing.assert_close(share, expected, rtol=0, atol=0.015)
    assert algorithm.exploration.epsilon == pytest.approx(epsilon)


@pytest.mark.parametrize("name", NAMES)
def test_exploration_goes_on_and_evaluation_never_explores(name: str) -> None:
    """eval-1, for all: two actions for one observation differ in collection and are equal in evaluation."""
    algorithm = make(name, **({"epsilon_end": 0.5} if name == "dqn" else {}))
    algorithm.advance(10**9)
    for k in range(20):
        algorithm.update(batch_for(name, seed=k))
    data = seen(256)
    exploring, evaluating = algorithm.policy, algorithm.evaluation_policy()
    assert not torch.equal(exploring(data.clone())["action"], exploring(data.clone())["action"])
    first = evaluating(data.clone())["action"]
    exploring(data.clone())
    assert torch.equal(first, evaluating(data.clone())["action"])


@pytest.mark.parametrize("name", NAMES)
def test_evaluation_follows_the_learner(name: str) -> None:
    algorithm = make(name, **({"actor_interval": 1} if name == "td3" else {}))
    evaluating = algorithm.evaluation_policy()
    output = evaluating.network(seen(8)["observation"]).clone()
    algorithm.update(batch_for(name))
    assert not torch.equal(output, evaluating.network(seen(8)["observation"]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3)])
def test_actions_have_the_shape_and_the_bounds_of_the_environment(name: str, shape: tuple[int, ...]) -> None:
    algorithm = make(name)
    data = TensorDict({"observation": 10 * torch.randn(*shape, OBSERVATION)}, shape)
    for policy in (algorithm.policy, algorithm.evaluation_policy()):
        answer = policy(data.clone())
        action = answer["action"]
        assert not action.requires_grad
        assert torch.equal(answer["observation"], data["observation"])
        if name == "dqn":
            assert action.shape == shape
            assert action.dtype is torch.int64
            assert ((action >= 0) & (action < 4)).all()
        else:
            assert action.shape == (*shape, 3)
            assert action.dtype is torch.float32
            assert ((action >= torch.tensor(LOW)) & (action <= torch.tensor(HIGH))).all()


@pytest.mark.parametrize("name", NAMES)
def test_reseeding_decides_the_noise(name: str) -> None:
    """seed-1, for workers: each reseeds its copy of the policy with a seed of its own."""
    algorithm = make(name)
    a, b, c = (pickle.loads(pickle.dumps(algorithm.policy)) for _ in range(3))
    for policy, seed in ((a, 1), (b, 1), (c, 2)):
        policy.reseed(seed)
    actions = [policy(seen(64))["action"] for policy in (a, b, c)]
    assert torch.equal(actions[0], actions[1])
    assert not torch.equal(actions[0], actions[2])


def test_noise_settings_that_mean_nothing_are_refused() -> None:
    generator, scale = torch.Generator(), ActionScale(BoxAction((-1.0,), (1.0,)))
    for sigma in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidArgument, match="standard deviation"):
            GaussianNoise(scale, sigma=sigma, generator=generator)
    for start, end, frames in ((0.1, 0.5, 10), (1.5, 0.0, 10), (1.0, -0.1, 10), (1.0, 0.1, 0)):
        with pytest.raises(InvalidArgument, match="epsilon"):
            EpsilonGreedy(start=start, end=end, anneal_frames=frames, generator=generator)


# ------------------------------------------------------------------------------------------------------ how they travel
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", ["pickle", "multiprocessing", "deepcopy"])
def test_a_policy_travels_by_value_and_alone(name: str, way: str) -> None:
    """A copy acts the same, shares no memory with the learner, and carries neither critics nor gradients."""
    algorithm = make(name, hidden=(64, 64))
    algorithm.advance(3000)
    algorithm.update(batch_for(name))
    if way == "deepcopy":
        other = copy.deepcopy(algorithm.policy)
    else:
        pickler: Any = ForkingPickler if way == "multiprocessing" else pickle
        data = bytes(pickler.dumps(algorithm.policy))
        parameters = sum(p.numel() for p in algorithm.policy.parameters())
        assert len(data) < 4 * parameters + 16_000
        assert not next(algorithm.policy.parameters()).is_shared()
        other = pickle.loads(data)
    before = [p.clone() for p in other.parameters()]
    assert torch.equal(algorithm.policy(seen(64))["action"], other(seen(64))["action"])
    algorithm.update(batch_for(name, seed=1))
    assert all(torch.equal(p, q) for p, q in zip(before, other.parameters(), strict=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("evaluating", [False, True], ids=["collector", "evaluator"])
def test_published_weights_reach_a_policy_elsewhere(name: str, evaluating: bool) -> None:
    """Both kinds of copy take what is published, and DQN's frame count comes with it."""
    algorithm = make(name, **({"actor_interval": 1} if name == "td3" else {}))
    policy = algorithm.evaluation_policy() if evaluating else algorithm.policy
    copied: Any = pickle.loads(pickle.dumps(policy))
    with WeightBoard(algorithm.published) as board:
        algorithm.advance(7777)
        algorithm.update(batch_for(name))
        board.publish(algorithm.published, algorithm.steps)
        assert board.pull(copied) == 1
    assert torch.equal(policy(seen(64))["action"], copied(seen(64))["action"])
    if name == "dqn":
        assert copied.exploration.frames == 7777


def test_specs_travel_too() -> None:
    for spec in (CONTINUOUS, DISCRETE, *(spec for _, _, spec in KINDS.values())):
        assert pickle.loads(pickle.dumps(spec)) == spec
    assert EnvSpec.vector(3, action=BoxAction((0.0,), (1.0,))).observation_size == 3
