"""Learning rates that fall, gradients that are clipped, networks that are compiled or compute in bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import NAMES, batch_for, make
from torch import nn

from millpond.algos.flat import FlatAdam
from millpond.algos.sac import SACConfig
from millpond.algos.settings import OptimizerConfig
from millpond.core.errors import InvalidArgument
from millpond.learn.acceleration import accelerate, check_acceleration


def adams(algorithm: Any) -> list[FlatAdam]:
    return [value for value in vars(algorithm).values() if isinstance(value, FlatAdam)]


@pytest.mark.parametrize("end", [0.0, 0.25])
@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_the_rate_at_every_update_is_that_of_pytorch(kind: str, end: float) -> None:
    config = OptimizerConfig(lr_schedule=kind, lr_end=end, lr_updates=7)
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.4)
    schedule = (
        torch.optim.lr_scheduler.LinearLR(plain, 1.0, end, total_iters=7)
        if kind == "linear"
        else torch.optim.lr_scheduler.CosineAnnealingLR(plain, T_max=7, eta_min=0.4 * end)
    )
    for update in range(8):
        assert 0.4 * config.lr_share(update) == pytest.approx(plain.param_groups[0]["lr"], abs=1e-12)
        plain.step()
        schedule.step()
    assert config.lr_share(8) == config.lr_share(10**6) == end


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_of_an_algorithm_follows_the_schedule(name: str) -> None:
    algorithm = make(name, lr_schedule="linear", lr_updates=10)
    first = [adam.lr for adam in adams(algorithm)]
    for _ in range(6):
        algorithm.update(batch_for(name))
    assert [adam.lr for adam in adams(algorithm)] == pytest.approx([0.5 * lr for lr in first])


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_goes_on_bit_for_bit_from_a_checkpoint(name: str) -> None:
    settings = {"lr_schedule": "cosine", "lr_updates": 12, "max_grad_norm": 0.5}
    whole, second = make(name, **settings), make(name, seed=9, **settings)
    for number in range(8):
        if number == 3:
            second.load_state_dict(whole.state_dict())
        whole.update(batch_for(name))
        if number >= 3:
            second.update(batch_for(name))
    assert [a.lr for a in adams(whole)] == [b.lr for b in adams(second)]
    assert all(torch.equal(value, second.state_dict()[key]) for key, value in whole.state_dict().items())


@pytest.mark.parametrize("most", [1e-3, 1e6])
def test_the_clipped_gradient_is_that_of_pytorch(most: float) -> None:
    module, plain = (nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)) for _ in range(2))
    plain.load_state_dict(module.state_dict())
    adam = FlatAdam(module.parameters(), lr=1e-3, config=OptimizerConfig(max_grad_norm=most))
    for each in (module, plain):
        each(torch.ones(4, 3)).square().sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), most)
    adam.step(0)
    assert (norm > most) == (most < 1)
    expected = torch.cat([p.grad.reshape(-1) for p in plain.parameters()])  # type: ignore[union-attr]
    torch.testing.assert_close(adam.gradients, expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"max_grad_norm": 0.0}, "max_grad_norm must be above 0"),
        ({"lr_schedule": "steps"}, "constant, linear, cosine"),
        ({"lr_schedule": "linear"}, "lr_updates"),
        ({"lr_end": 1.5}, "lr_end must be between 0 and 1"),
        ({"lr_updates": 0}, "lr_updates must be above 0"),
    ],
)
def test_what_no_optimizer_can_do_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        SACConfig(**wrong)


@pytest.mark.parametrize("name", NAMES)
def test_autocast_computes_layers_in_bfloat16_and_the_rest_in_float32(name: str) -> None:
    """On the CPU, which has the same autocast; runs admit it on GPUs only, where it is faster."""
    exact, fast = make(name), make(name)
    accelerate(fast, compiled=False, amp=True, device="cpu")
    kinds = set()
    network = fast.network if name == "dqn" else fast.actor
    network.register_forward_hook(lambda module, inputs, output: kinds.add(output.dtype))
    for _ in range(2):
        metrics, plain = fast.update(batch_for(name)), exact.update(batch_for(name))
    assert kinds == {torch.float32}
    assert {value.dtype for value in metrics.values()} == {torch.float32}
    for mine, theirs in zip(adams(fast), adams(exact), strict=True):
        assert mine.gradients.dtype is torch.float32
        torch.testing.assert_close(mine.gradients, theirs.gradients, rtol=0.1, atol=0.1)
        assert not torch.equal(mine.gradients, theirs.gradients), "nothing was computed in bfloat16"
        assert mine.gradients.any(), "a gradient was lost"
    assert float(metrics["value/q"]) == pytest.approx(float(plain["value/q"]), abs=0.05)


def test_amp_is_refused_on_a_cpu() -> None:
    with pytest.raises(InvalidArgument, match=r"learner\.amp=true is for GPUs"):
        check_acceleration(compiled=False, amp=True, device="cpu")


@pytest.mark.slow
@pytest.mark.leaks(reason="torch.compile keeps a pool of threads for as long as the process lives")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch.compile itself imports
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch.compile looks at it
def test_a_compiled_algorithm_learns_the_same() -> None:
    plain, compiled = make("td3"), make("td3")
    check_acceleration(compiled=True, amp=False, device="cpu")
    accelerate(compiled, compiled=True, amp=False, device="cpu")
    for _ in range(4):
        plain.update(batch_for("td3"))
        compiled.update(batch_for("td3"))
    for a, b in zip(adams(plain), adams(compiled), strict=True):
        torch.testing.assert_close(a.values, b.values, rtol=1e-4, atol=1e-5)
