"""Whatever a policy says: environments get actions of their space, in its type, and these are what is stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from picky_worlds import ACTIONS, Picky
from torch import nn

from millpond.algos.exploration import GaussianNoise
from millpond.algos.nets import ActionScale
from millpond.collect import Collector
from millpond.core.errors import InvalidArgument
from millpond.core.spec import BoxAction
from millpond.envs import env_spec, make


def random_bounds(rng: np.random.Generator, dtype: Any, size: int) -> tuple[Any, Any]:
    """Tiny, huge and lopsided ranges, anywhere; ``low < high`` in ``dtype``."""
    info = np.finfo(dtype)
    low = (rng.choice([-1, 1], size) * 10.0 ** rng.uniform(-30, 30, size)).astype(dtype)
    high = np.where(rng.random(size) < 0.5, np.nextafter(low, dtype(np.inf)), low + np.abs(low) * rng.random(size))
    high = np.maximum(high.astype(dtype), np.nextafter(low, dtype(np.inf)))
    low[: size // 8], high[: size // 8] = info.min, info.max
    low[size // 8 : size // 4], high[size // 8 : size // 4] = dtype(0), info.smallest_subnormal
    return low, high


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_the_ends_of_a_scale_are_the_bounds_and_nothing_is_outside(dtype: Any) -> None:
    rng = np.random.default_rng(5)
    if dtype is np.float16:
        low = rng.uniform(-9, 9, 400).astype(dtype)
        high = np.maximum((low + rng.uniform(0, 3, 400)).astype(dtype), np.nextafter(low, dtype(np.inf)))
    else:
        low, high = random_bounds(rng, dtype, 400)
    kind = torch.from_numpy(low).dtype
    scale = ActionScale(BoxAction(tuple(map(float, low)), tuple(map(float, high)), dtype=kind))
    ends = scale.to_env(torch.stack([-torch.ones(400), torch.ones(400)])).numpy()
    assert ends.dtype == dtype
    np.testing.assert_array_equal(ends, [low, high])
    for unit in (torch.rand(500, 400) * 2 - 1, torch.randn(500, 400) * 3, (torch.randn(500, 400) * 9).tanh()):
        action = scale.to_env(unit).numpy()
        assert (action >= low).all()
        assert (action <= high).all()
    assert scale.to_unit(scale.to_env(torch.zeros(1, 400))).abs().max() <= 1


def test_the_bounds_are_exact_in_float32() -> None:
    scale = ActionScale(BoxAction((-2.3,), (1.1,)))
    assert scale.to_env(torch.ones(1)).item() == np.float32(1.1)
    assert scale.to_env(-torch.ones(1)).item() == np.float32(-2.3)


def test_bounds_that_are_one_number_in_the_type_of_the_action_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="low < high"):
        BoxAction((1.0,), (1.0 + 1e-12,))
    with pytest.raises(InvalidArgument, match="finite"):
        BoxAction((-1e300,), (1e300,))
    BoxAction((-1e300,), (1e300,), dtype=torch.float64)


class Says(nn.Module):
    """Actions around ``amount`` times the bounds, in float64 or float32, sometimes infinite."""

    def __init__(self, space: Any, amount: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.high, self.amount, self.dtype = torch.from_numpy(np.array(space.high)), amount, dtype
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, data: Any) -> Any:
        shape = (*data.batch_size, *self.high.shape)
        noise = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return data.set("action", (self.high * self.amount * (1 + noise)).to(self.dtype))


@pytest.mark.parametrize("name", [name for name, space in ACTIONS.items() if isinstance(space, spaces.Box)])
@pytest.mark.parametrize("policy_type", [torch.float32, torch.float64])
@pytest.mark.parametrize("amount", [1.0, 50.0])
def test_what_a_policy_of_the_users_says_is_clipped_and_stored_as_executed(
    name: str, policy_type: torch.dtype, amount: float
) -> None:
    space = ACTIONS[name]
    env = make(lambda: Picky(action=name), num_envs=3)
    with Collector(env, Says(space, amount, policy_type), frames_per_batch=90, seed=0) as collector:
        batch = next(collector)
    env.close()
    assert batch is not None
    action = batch["action"].numpy()
    assert action.dtype == space.dtype
    assert action.shape == (90, *space.shape)
    assert ((action >= space.low) & (action <= space.high)).all()
    executed = action.reshape(90, -1).astype(np.float64).sum(1).astype(np.float32)  # Picky's reward
    np.testing.assert_allclose(batch["next", "reward"].numpy()[:, 0], executed, rtol=1e-6)


@pytest.mark.parametrize("name", list(ACTIONS))
def test_random_actions_are_inside_and_stored_as_executed(name: str) -> None:
    space = ACTIONS[name]
    with Collector(lambda: Picky(action=name), frames_per_batch=100, num_envs=2, seed=0) as collector:
        batch = next(collector)
    assert batch is not None
    action = batch["action"].numpy()
    assert action.dtype == space.dtype
    assert all(space.contains(np.asarray(one)) for one in action)


def test_whole_numbers_are_clipped_before_they_could_wrap() -> None:
    space = spaces.Box(-3, 5, (2,), np.int8)

    def policy(data: Any) -> Any:
        return data.set("action", torch.tensor([[300, -300]]).expand(*data.batch_size, 2))

    with Collector(lambda: Picky(action=space), policy, frames_per_batch=10, seed=0) as collector:
        batch = next(collector)
    assert batch is not None
    assert batch["action"].tolist() == [[5, -3]] * 10


def test_one_open_bound_is_kept_and_infinity_is_quarantined() -> None:
    space = spaces.Box(np.float32([0, -np.inf]), np.float32([np.inf, 1]), dtype=np.float32)
    calls = iter(range(10**9))

    def policy(data: Any) -> Any:
        value = [[-5.0, 5.0], [1e20, -1e20], [float("inf"), 0.0]][next(calls) % 3]
        return data.set("action", torch.tensor([value]).expand(*data.batch_size, 2))

    with Collector(lambda: Picky(action=space), policy, frames_per_batch=30, seed=0) as collector:
        batch = next(collector)
        stats = collector.stats()
    assert batch is not None
    found = {tuple(row) for row in batch["action"].tolist()}
    assert found == {(0.0, 1.0), tuple(np.float32([1e20, -1e20]).tolist())}
    assert stats["quarantined_rows"] == 14  # every third of 44 steps


def test_a_choice_that_there_is_not_is_an_error_also_after_the_first_one() -> None:
    calls = iter(range(10**9))

    def policy(data: Any) -> Any:
        choice = 7 if next(calls) < 5 else 11
        return data.set("action", torch.full(data.batch_size, choice))

    with Collector(lambda: Picky(action="late"), policy, frames_per_batch=5, seed=0) as collector:
        assert next(collector) is not None
        with pytest.raises(InvalidArgument, match="chose action=11"):
            next(collector)


def test_noise_is_within_the_bounds_too() -> None:
    spec = env_spec(make(lambda: Picky(action="double")))
    assert isinstance(spec.action, BoxAction)
    noise = GaussianNoise(ActionScale(spec.action), sigma=2.0, generator=torch.Generator().manual_seed(0))
    action = noise.explore(torch.zeros(1000, 2))
    assert action.dtype == torch.float64
    assert (action.min().item(), action.max().item()) == (-0.1, 0.3)
