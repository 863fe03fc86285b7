"""Every update equals the same update written plainly, and does with the ends of episodes what it should."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import CONTINUOUS, DISCRETE, KINDS, NAMES, batch_for, make, same, snapshot, transitions
from plain_algorithms import PLAIN
from tensordict import TensorDict
from torch import nn

from millpond import ReplayBuffer
from millpond.algos.transitions import read_transitions
from millpond.core.errors import InvalidArgument, NonFinite
from millpond.core.spec import BoxAction, EnvSpec, ObservationField

CASES: list[tuple[str, dict[str, Any]]] = [
    ("sac", {}),
    ("sac", {"hidden": (8,), "gamma": 0.9, "tau": 0.5, "initial_alpha": 0.2}),
    ("td3", {}),
    ("td3", {"actor_interval": 1, "target_sigma": 0.7, "target_clip": 0.1}),
    ("ddpg", {}),
    ("dqn", {}),
    ("dqn", {"double": False, "tau": 1.0, "target_interval": 2}),
]


def agree(a: nn.Module, b: nn.Module) -> None:
    for mine, theirs in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def next_noise(algorithm: Any, rows: int) -> torch.Tensor | None:
    """The noise of the next update, from a copy of the generator."""
    if not hasattr(algorithm, "generator"):
        return None
    generator = torch.Generator()
    generator.set_state(algorithm.generator.get_state())
    width = algorithm.spec.action.size * (2 if type(algorithm).__name__ == "SAC" else 1)
    return torch.randn(rows, width, generator=generator)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize(("name", "config"), CASES, ids=lambda x: x if isinstance(x, str) else ",".join(x) or "default")
def test_updates_equal_the_plain_ones(name: str, config: dict[str, Any], weighted: bool) -> None:
    real = make(name, **config)
    plain = PLAIN[name](real)
    for k in range(5):
        batch = batch_for(name, seed=k)
        weight: Any = 1.0
        if weighted:
            weight = batch["priority_weight"] = torch.rand(32, generator=torch.Generator().manual_seed(k))
        plain.update(batch, next_noise(real, 32), weight)
        real.update(batch)
    plain.compare(agree)
    assert real.steps == 5


@pytest.mark.parametrize("name", NAMES)
def test_an_update_moves_every_parameter(name: str) -> None:
    """What the comparison with the plain update rests on: nothing is compared that never changed."""
    algorithm = make(name)
    before = snapshot(algorithm)
    for k in range(2):
        algorithm.update(batch_for(name, seed=k))
    after = snapshot(algorithm)
    unchanged = [key for key in before if torch.equal(before[key], after[key])]
    assert set(unchanged) <= {"generator.policy", "frames"}


# ---------------------------------------------------------------------------------------------------- ends of episodes
@pytest.mark.parametrize("name", NAMES)
def test_only_termination_masks_the_bootstrap(name: str) -> None:
    """end-1: cut by the time limit, the target is r + γ·Q(final observation); terminated, it is r."""
    algorithm = make(name, gamma=0.9)
    batch = batch_for(name, 2)
    batch["next", "observation"][:] = batch["next", "observation"][0]
    batch["next", "terminated"] = torch.tensor([[False], [True]])
    batch["next", "truncated"] = torch.tensor([[True], [False]])
    batch["next", "done"][:] = True
    targets = target_of(algorithm, batch)
    reward = batch["next", "reward"][:, 0]
    assert targets[1] == reward[1]
    assert targets[0] != reward[0]
    going_on = batch.clone()
    going_on["next", "truncated"][0] = going_on["next", "done"][0] = False
    assert torch.equal(target_of(algorithm, going_on), targets)


@pytest.mark.parametrize("name", NAMES)
def test_n_steps_discount_by_the_steps_really_used(name: str) -> None:
    """ring-1, on the learner's side: the exponent of γ is the number of steps that the reward covers."""
    batch = batch_for(name, 4)
    batch["next", "terminated"] = torch.tensor([[False], [False], [True], [False]])
    batch["steps_to_next_obs"] = torch.tensor([[1], [3], [2], [2]])
    spec = KINDS[name][2]
    assert read_transitions(batch, spec=spec, gamma=0.9).discount.tolist() == pytest.approx([0.9, 0.729, 0, 0.81])
    algorithm = make(name, gamma=0.9)
    reward = batch["next", "reward"][:, 0]
    n_step = target_of(algorithm, batch) - reward
    one_step = target_of(algorithm, batch.exclude("steps_to_next_obs")) - reward
    torch.testing.assert_close(n_step, one_step * torch.tensor([1, 0.81, 0.9, 0.9]), rtol=1e-5, atol=1e-6)


def target_of(algorithm: Any, batch: TensorDict) -> torch.Tensor:
    """The targets of one update, which draws the same noise each time it is asked."""
    t = read_transitions(batch, spec=algorithm.spec, gamma=algorithm.config.gamma)
    if type(algorithm).__name__ == "SAC":
        return algorithm._target(t, torch.ones(1), torch.zeros(len(t.reward), algorithm.spec.action.size))
    if type(algorithm).__name__ == "TD3":
        algorithm.generator.manual_seed(0)
    return algorithm._target(t)


@pytest.mark.parametrize("name", NAMES)
def test_autocast_leaves_discount_and_targets_in_float32(name: str) -> None:
    """end-6: γ = 0.99 must not become 0.988 (its bfloat16 neighbour) under autocast."""
    algorithm = make(name)
    batch = batch_for(name, 64)
    batch["next", "reward"].zero_()
    batch["next", "terminated"].zero_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        t = read_transitions(batch, spec=algorithm.spec, gamma=0.99)
        discounted = target_of(algorithm, batch)
        algorithm.config = type(algorithm.config)(**{**vars(algorithm.config), "gamma": 1.0})
        undiscounted = target_of(algorithm, batch)
        assert algorithm.policy.network(t.observation).dtype is torch.float32
    assert t.discount.dtype is discounted.dtype is torch.float32
    assert torch.equal(t.discount, torch.full((64,), 0.99))
    torch.testing.assert_close(discounted / undiscounted, torch.full((64,), 0.99), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_one_autocast_around_many_updates_uses_the_newest_weights(name: str) -> None:
    """Autocast keeps its bfloat16 copies of weights until its outermost context ends; updates must not see old ones."""
    around, inside = make(name), make(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for k in range(4):
            around.update(batch_for(name, seed=k))
    for k in range(4):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside.update(batch_for(name, seed=k))
    assert same(snapshot(around), snapshot(inside))


# ------------------------------------------------------------------------------------------------- shapes that may come
@pytest.mark.parametrize("name", NAMES)
def test_views_of_packed_rows_give_the_same_update(name: str) -> None:
    """Samples are strided views of packed rows; nothing depends on that, and the batch is not written to."""
    with ReplayBuffer(32, batch_size=32, seed=0) as replay:
        replay.extend(batch_for(name))
        packed = replay.sample()
    assert not packed["observation"].is_contiguous()
    plain = packed.clone().contiguous()
    untouched = packed.clone()
    a, b = make(name), make(name)
    for _ in range(3):
        a.update(packed)
        b.update(plain)
    assert same(snapshot(a), snapshot(b))
    assert (packed == untouched).all()


@pytest.mark.parametrize("name", NAMES)
def test_sequences_count_as_their_transitions(name: str) -> None:
    flat = batch_for(name, 24)
    flat["priority_weight"] = torch.arange(1.0, 7).repeat_interleave(4)
    grouped = TensorDict({k: v for k, v in flat.items() if k != "priority_weight"}, [24]).reshape(6, 4)
    grouped = TensorDict(dict(grouped.items()), [6])
    grouped["priority_weight"] = torch.arange(1.0, 7)
    a, b = make(name), make(name)
    errors = a.update(flat)["td_error"]
    per_sequence = b.update(grouped)["td_error"]
    assert same(snapshot(a), snapshot(b))
    torch.testing.assert_close(per_sequence, errors.reshape(6, 4).mean(-1))


@pytest.mark.parametrize("name", NAMES)
def test_dictionaries_of_vectors_are_put_end_to_end(name: str) -> None:
    fields = (
        ObservationField(("observation", "position"), (2,), torch.float64),
        ObservationField(("observation", "id"), (3,), torch.int64),
    )
    spec = EnvSpec(fields, KINDS[name][2].action)
    batch = transitions(spec)
    joined = batch.exclude("observation", ("next", "observation"))
    for place in ((), ("next",)):
        parts = [batch[*place, *f.key].float() for f in fields]
        joined[*place, "observation"] = torch.cat(parts, -1)
    a, b = make(name, spec=spec), make(name)
    a.update(batch)
    b.update(joined)
    assert same(snapshot(a), snapshot(b))


# ------------------------------------------------------------------------------------------------------------ refusals
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("key", "words"), [("observation", "observation"), (("next", "reward"), "reward"), (("next", "terminated"), "term")]
)
def test_a_missing_field_is_named_and_nothing_changes(name: str, key: Any, words: str) -> None:
    algorithm = make(name)
    before = snapshot(algorithm)
    with pytest.raises(InvalidArgument, match=words):
        algorithm.update(batch_for(name).exclude(key))
    assert same(before, snapshot(algorithm))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("name", "key"),
    [
        (name, key)
        for name in NAMES
        for key in ("observation", "action", ("next", "observation"), ("next", "reward"))
        if (name, key) != ("dqn", "action")  # a whole number is finite
    ],
)
def test_a_non_finite_loss_stops_before_the_parameters_change(name: str, value: float, key: Any) -> None:
    """nan-1: a non-finite loss names the field and the row of the batch."""
    batch = batch_for(name)
    batch["index"] = torch.arange(100, 132)
    batch["next", "terminated"][7] = False
    batch[key][7, -1] = value
    algorithm = make(name)
    algorithm.update(batch_for(name, seed=1))
    before = snapshot(algorithm)
    with pytest.raises(NonFinite) as raised:
        algorithm.update(batch)
    message = str(raised.value)
    assert (key if isinstance(key, str) else ".".join(key)) + " at [7, " in message
    assert "row 7 (slot 107)" in message
    after = snapshot(algorithm)
    for state in (before, after):
        state.pop("generator.update", None)  # the noise was drawn
    assert same(before, after)


@pytest.mark.parametrize("name", NAMES)
def test_diverged_parameters_are_told_from_bad_data(name: str) -> None:
    """nan-1, the other way round: every field is finite and the loss is not."""
    algorithm = make(name, **({"actor_interval": 1} if name == "td3" else {}))
    parameter = next(algorithm.policy.parameters())
    with torch.no_grad():
        parameter[0, 0] = float("nan")
    with pytest.raises(NonFinite, match="Every field of the batch is finite"):
        algorithm.update(batch_for(name))


@pytest.mark.parametrize("name", NAMES)
def test_an_environment_that_does_not_fit_is_refused(name: str) -> None:
    other = CONTINUOUS if name == "dqn" else DISCRETE
    with pytest.raises(InvalidArgument, match=f"{name} needs a"):
        make(name, spec=other)
    image = EnvSpec((ObservationField(("observation", "image"), (8, 8), torch.uint8),), KINDS[name][2].action)
    with pytest.raises(InvalidArgument, match=r"observation\.image"):
        make(name, spec=image)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("sac", {"gamma": 1.1}),
        ("sac", {"hidden": ()}),
        ("sac", {"hidden": (0,)}),
        ("sac", {"actor_lr": 0.0}),
        ("sac", {"tau": float("nan")}),
        ("sac", {"initial_alpha": 0.0}),
        ("td3", {"actor_interval": 0}),
        ("ddpg", {"exploration_sigma": 0.0}),
        ("dqn", {"epsilon_end": 1.5}),
        ("dqn", {"epsilon_frames": 0}),
        ("dqn", {"lr": float("inf")}),
    ],
)
def test_a_setting_out_of_its_bounds_is_named(name: str, config: dict[str, Any]) -> None:
    (setting,) = config
    with pytest.raises(InvalidArgument, match=setting):
        make(name, **config)


@pytest.mark.parametrize("bounds", [((), ()), ((0.0,), (0.0,)), ((-float("inf"),), (1.0,)), ((0.0, 1.0), (2.0,))])
def test_actions_need_finite_bounds(bounds: tuple[tuple[float, ...], tuple[float, ...]]) -> None:
    with pytest.raises(InvalidArgument, match="bounds"):
        BoxAction(*bounds)


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_that_adam_cannot_take_changes_nothing_and_the_largest_number_is_named(name: str):
    """The loss is finite, and the squares of its gradient are not: Adam would keep infinity for good."""
    algorithm, batch = make(name), batch_for(name, rows=1)
    algorithm.update(batch)
    before = snapshot(algorithm)
    batch["next", "reward"][0] = 1.2e19
    with pytest.raises(NonFinite, match=r"gradients .* too large .* 1\.2e\+19, in next\.reward of row 0"):
        algorithm.update(batch)
    after = snapshot(algorithm)
    assert all(torch.equal(before[key], after[key]) for key in before if not key.startswith("generator."))
