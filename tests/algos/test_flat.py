"""Flat parameters mean what separate ones mean: views, gradients, one Adam, one Polyak step."""

from __future__ import annotations

import copy

import pytest
import torch
from batches import NAMES, batch_for, make, same, snapshot
from torch import nn

from millpond.algos.flat import FlatAdam, FlatParameters, Shard
from millpond.algos.nets import MLP
from millpond.core.errors import CheckpointError, InvalidArgument


def net(seed: int = 0) -> MLP:
    return MLP([3, 8, 2], generator=torch.Generator().manual_seed(seed))


def test_parameters_are_views_in_order_and_keep_their_values() -> None:
    module = net()
    before = [p.detach().clone() for p in module.parameters()]
    flat = FlatParameters(module.parameters())
    assert flat.values.is_contiguous()
    assert torch.equal(flat.values, torch.cat([p.reshape(-1) for p in before]))
    flat.values.mul_(2)
    for parameter, old in zip(module.parameters(), before, strict=True):
        assert torch.equal(parameter, 2 * old)
    with torch.no_grad():
        next(module.parameters()).zero_()
    assert not flat.values[:24].any()


def test_autograd_accumulates_into_the_flat_gradient() -> None:
    module, reference = net(), net()
    flat = FlatParameters(module.parameters())
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    for times in (1, 2):
        module(x).square().sum().backward()
        reference(x).square().sum().backward()
        expected = torch.cat([p.grad.reshape(-1) for p in reference.parameters() if p.grad is not None])
        torch.testing.assert_close(flat.gradients, expected, msg=f"after {times} backward passes")


@pytest.mark.parametrize("detach", [False, True], ids=["own", "module.zero_grad"])
def test_zero_grad_keeps_or_restores_the_views(detach: bool) -> None:
    module = net()
    flat = FlatParameters(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    if detach:
        module.zero_grad()  # sets the gradients to None
    flat.zero_grad()
    assert not flat.gradients.any()
    module(torch.ones(1, 3)).sum().backward()
    assert flat.gradients[-2:].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("lr", [1e-3, 0.3])
def test_one_fused_adam_equals_one_per_parameter(lr: float) -> None:
    module, reference = net(), net()
    flat = FlatAdam(module.parameters(), lr=lr)
    adam = torch.optim.Adam(reference.parameters(), lr=lr, fused=False, foreach=False)
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    for _ in range(10):
        flat.zero_grad()
        module(x).square().sum().backward()
        flat.step(0)
        adam.zero_grad()
        reference(x).square().sum().backward()
        adam.step()
    for a, b in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert next(module.parameters()).data_ptr() == flat.values.data_ptr(), "the step must be in place"


def test_parameters_of_another_type_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="float32"):
        FlatParameters(nn.Linear(2, 2).double().parameters())
    with pytest.raises(InvalidArgument, match="at least one"):
        FlatParameters([])


@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(4, 1), (4, 7, 1), (4, 7, 5, 3)])
def test_stacked_networks_equal_their_parts(copies: int, sizes: tuple[int, ...]) -> None:
    """Each copy, with gradients for input and weights, against torch's own linear layers."""
    stack = MLP(sizes, generator=torch.Generator().manual_seed(0), copies=copies)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
    y = x.detach().clone().requires_grad_()
    stacked = stack(x)
    assert stacked.shape == (copies, 6, sizes[-1])
    single = []
    for i in range(copies):
        out = y
        for number in range(len(sizes) - 1):
            weight, bias = getattr(stack, f"weight_{number}")[i], getattr(stack, f"bias_{number}")[i, 0]
            out = nn.functional.linear(out, weight.T, bias)
            out = out.relu() if number < len(sizes) - 2 else out
        single.append(out)
    torch.testing.assert_close(stacked, torch.stack(single))
    stacked.square().sum().backward()
    mine = [p.grad.clone() for p in stack.parameters() if p.grad is not None]
    stack.zero_grad()
    torch.stack(single).square().sum().backward()
    theirs = [p.grad for p in stack.parameters()]
    torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(x.grad, y.grad)


def test_frozen_networks_pass_gradients_on_and_keep_none() -> None:
    module = net()
    x = torch.ones(1, 3, requires_grad=True)
    module(x, frozen=True).sum().backward()
    assert x.grad is not None
    assert x.grad.any()
    assert all(p.grad is None for p in module.parameters())


# -------------------------------------------------------------------------------------------------------- save and load
@pytest.mark.parametrize("name", NAMES)
def test_a_loaded_state_continues_bit_for_bit(name: str) -> None:
    """ckpt-1, the learner's part: updates and actions after a resume are those of the uninterrupted run."""
    straight, first, second = make(name), make(name), make(name, seed=99)
    for k in range(3):
        straight.update(batch_for(name, seed=k))
        first.update(batch_for(name, seed=k))
    for algorithm in (straight, first):
        algorithm.advance(4000)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.steps == 3
    for k in range(3, 6):
        a, b = (algorithm.update(batch_for(name, seed=k)) for algorithm in (straight, second))
        assert same(a, b)
        seen = batch_for(name).select("observation")
        assert torch.equal(straight.policy(seen.clone())["action"], second.policy(seen.clone())["action"])
    assert same(straight.state_dict(), second.state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_state_is_a_copy(name: str) -> None:
    algorithm = make(name)
    saved = algorithm.state_dict()
    kept = {key: value.clone() for key, value in saved.items()}
    algorithm.update(batch_for(name))
    assert same(saved, kept)


@pytest.mark.parametrize("damage", ["missing", "surplus", "shape", "type"])
@pytest.mark.parametrize("name", NAMES)
def test_a_state_that_does_not_fit_loads_nothing(name: str, damage: str) -> None:
    """ckpt-3, the learner's part."""
    algorithm, other = make(name), make(name, seed=1)
    state = other.state_dict()
    last = list(state)[-3]
    if damage == "missing":
        del state[last]
    elif damage == "surplus":
        state["surplus"] = torch.zeros(1)
    elif damage == "shape":
        state["target" if "target" in state else "target_actor"] = torch.zeros(7)
    else:
        state["target" if "target" in state else "target_actor"] = state[
            "target" if "target" in state else "target_actor"
        ].double()
    before = snapshot(algorithm)
    with pytest.raises(CheckpointError):
        algorithm.load_state_dict(state)
    assert same(before, snapshot(algorithm))


# ---------------------------------------------------------------------------------------------------------------- seeds
@pytest.mark.parametrize("name", NAMES)
def test_the_seed_decides_and_the_global_generator_does_not(name: str) -> None:
    """seed-1: weights, updates and actions; and the global generator is left as it was."""

    def run(seed: int, other_seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        torch.manual_seed(other_seed)
        untouched = torch.get_rng_state()
        algorithm = make(name, seed=seed)
        for k in range(3):
            algorithm.update(batch_for(name, seed=k))
        action = algorithm.policy(batch_for(name).select("observation"))["action"]
        assert torch.equal(untouched, torch.get_rng_state())
        return algorithm.state_dict(), action

    (a, action_a), (b, action_b), (c, action_c) = run(5, 0), run(5, 1), run(6, 0)
    assert same(a, b)
    assert torch.equal(action_a, action_b)
    assert not torch.equal(action_a, action_c)
    assert not any(torch.equal(a[key], c[key]) for key in a if a[key].is_floating_point() and a[key].numel() > 1)


# ---------------------------------------------------------------------------------------------------------------- ranks
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_averaged_gradients_of_parts_equal_the_whole_batch(name: str, world_size: int) -> None:
    """rank-1: ranks on parts of the batch, gradients averaged, against one process on the whole; relative 1e-4."""
    whole, k_steps, rows = make(name), 4, 32
    ranks = [make(name) for _ in range(world_size)]
    for k in range(k_steps):
        batch = batch_for(name, rows, seed=k)
        batch["priority_weight"] = torch.rand(rows, generator=torch.Generator().manual_seed(k))
        whole.update(batch)
        update_together(ranks, batch.split(rows // world_size))
    for rank in ranks:
        assert same(rank.state_dict(), ranks[0].state_dict())
    for key, value in whole.state_dict().items():
        torch.testing.assert_close(ranks[0].state_dict()[key], value, rtol=1e-4, atol=1e-5, msg=key)


def update_together(ranks: list, parts: tuple) -> None:  # type: ignore[type-arg]
    """One update on every rank. A first pass per rank collects gradients; then all ranks really step, with the mean."""
    collected: list[list[torch.Tensor]] = []
    for number, (rank, part) in enumerate(zip(ranks, parts, strict=True)):
        mine: list[torch.Tensor] = []
        before = rank.state_dict()
        rank.shard = Shard(number, len(ranks), lambda g, mine=mine: mine.append(g.clone()))
        rank.update(part)
        rank.load_state_dict(before)
        collected.append(mine)
    means = [torch.stack(same_call).mean(0) for same_call in zip(*collected, strict=True)]
    for number, (rank, part) in enumerate(zip(ranks, parts, strict=True)):
        left = list(means)
        rank.shard = Shard(number, len(ranks), lambda g, left=left: g.copy_(left.pop(0)))
        rank.update(part)
        assert not left


def test_a_rank_outside_its_group_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="rank 2"):
        Shard(2, 2)
