"""Every kind of replay in a run: it trains, its values are right, and it goes on after a stop as if there were none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from alike import usually
from runs import SMALL, Silent, rows, run, same, summary, weights
from tensordict import TensorDict
from test_resuming import StoppedAt, stopped

from millpond.algos.dqn import DQN, DQNConfig
from millpond.core.errors import InvalidArgument, MillpondError
from millpond.core.spec import DiscreteAction, EnvSpec
from millpond.replay import ReplayBuffer
from millpond.train.assembly import look_at_world
from millpond.train.compose import settings_from_overrides
from millpond.train.goals import GoalFunction
from millpond.train.replay import make_replay
from millpond.train.run import train

SYNC = ("execution.mode=sync", "collectors=1", "eval.max_steps=20", "eval.episodes=1", "total_frames=90")
KINDS: dict[str, tuple[str, ...]] = {
    "prioritized": ("replay.sampler=prioritized", "replay.alpha=0.7", "replay.beta_end=1"),
    "prioritized, n steps": ("replay.sampler=prioritized", "replay.n_step=3", "replay.alpha_end=0.2"),
    "without replacement": ("replay.sampler=without_replacement",),
    "n steps": ("replay.n_step=4", "envs_per_collector=2"),
    "hindsight": ("replay.sampler=hindsight", "env=worlds:Reach-v0"),
    "hindsight, n steps": ("replay.sampler=hindsight", "replay.n_step=2", "env=worlds:Reach-v0"),
    "sequences": (
        *("replay.layout=sequences", "collect.frames_per_batch=10", "envs_per_collector=2"),
        *("replay.learning_starts=4", "replay.batch_size=3"),
    ),
    "prefetch": ("replay.prefetch=2",),
    "consumed": ("replay.consume_after_n_samples=2",),
    "on disk": ("replay.path={path}/items",),
}
DISCRETE = ("algorithm=dqn", "env.kwargs.discrete=true")
ALGORITHMS = {"sac": ("algorithm=sac",), "td3": ("algorithm=td3",), "ddpg": ("algorithm=ddpg",), "dqn": DISCRETE}
PAIRS = [(name, kind) for name in ALGORITHMS for kind in KINDS if name != "dqn" or "hindsight" not in kind]

FEW = [("sac", "sequences"), ("td3", "prioritized, n steps"), ("ddpg", "hindsight"), ("dqn", "without replacement")]


def words_of(kind: str, path: Path) -> tuple[str, ...]:
    return tuple(word.format(path=path) for word in KINDS[kind])


@pytest.mark.parametrize("pair", usually(PAIRS, *FEW), ids=", ".join)
def test_each_algorithm_learns_from_each_kind(tmp_path: Path, pair: tuple[str, str]) -> None:
    name, kind = pair
    outcome = run(tmp_path / "run", *SYNC, *ALGORITHMS[name], *words_of(kind, tmp_path))
    assert (outcome.status, outcome.problem) == ("completed", None)
    found = summary(tmp_path / "run")
    assert found["collected_frames"] == found["written_frames"] == 90
    assert found["write_count"] == (18 if kind == "sequences" else 90)
    assert found["optimizer_steps"] > 5
    last = rows(tmp_path / "run")[-1]
    assert (last["replay/priority_max"] != "") == ("prioritized" in kind)
    assert (tmp_path / "items" / "rows").exists() == (kind == "on disk")


@pytest.mark.parametrize("kind", usually(KINDS, "prioritized, n steps", "sequences", "on disk"))
def test_stopped_and_resumed_it_equals_a_run_that_never_was(tmp_path: Path, kind: str) -> None:
    whole, path = tmp_path / "whole", tmp_path / "stopped"
    first, second = words_of(kind, tmp_path / "one"), words_of(kind, tmp_path / "two")
    saved = "hindsight" not in kind  # the environment can be saved, in the middle of an episode too
    env = ("env=Pendulum-v1", "collect.random_frames=10") if saved else ()
    assert run(whole, *SYNC, *env, *first).status == "completed"
    outcome, parts = stopped(path, 40, *SYNC, *env, *second), 1
    while outcome.status == "interrupted":
        outcome = train(settings_from_overrides([f"resume={path}"]), stop=StoppedAt(70 * parts), progress=Silent())
        parts += 1
        assert outcome.problem is None
    assert (outcome.status, parts > 1) == ("completed", True)
    assert summary(path)["written_frames"] == 90
    assert same(weights(whole), weights(path)) == saved
    assert (rows(whole) == rows(path)) == saved


@pytest.mark.parametrize(
    "kind",
    usually(
        ["prioritized, n steps", "hindsight", "sequences", "prefetch", "on disk", "blocked"], "sequences", "blocked"
    ),
)
def test_side_by_side_counts_are_exact(tmp_path: Path, kind: str) -> None:
    blocked = ("replay.consume_after_n_samples=4", "replay.admission=block", "replay.high_watermark=40")
    words = blocked if kind == "blocked" else words_of(kind, tmp_path)
    total = ("total_frames=120", "eval.episodes=1")
    outcome = run(tmp_path / "run", *total, "collectors=2", *words)
    assert (outcome.status, outcome.problem) == ("completed", None)
    found = summary(tmp_path / "run")
    assert found["collected_frames"] == found["written_frames"] == 120


# ---------------------------------------------------------------------- values
def plain_target(rb: Any, sample: Any, n: int, gamma: float, best: Any) -> torch.Tensor:
    """n-step targets of sampled transitions, one by one, from what is stored."""
    stored = rb[:]
    order = {int(slot): i for i, slot in enumerate(stored_slots(rb))}
    targets = []
    for slot in sample["index"].tolist():
        at, total, discount, last = order[slot], 0.0, 1.0, order[slot]
        for k in range(n):
            if at + k >= len(stored) or int(stored["episode_id"][at + k]) != int(stored["episode_id"][at]):
                break
            last, total = at + k, total + discount * float(stored["next", "reward"][at + k])
            discount *= gamma
            if bool(stored["next", "done"][at + k]):
                break
        alive = 0.0 if bool(stored["next", "terminated"][last]) else 1.0
        targets.append(total + alive * discount * best(stored["next", "observation"][last]))
    return torch.tensor(targets)


def stored_slots(rb: Any) -> list[int]:
    return [int(i) for i in range(len(rb))]  # nothing was overwritten: slots are in the order of writing


@pytest.mark.parametrize("sampler", ["uniform", "prioritized"])
@pytest.mark.parametrize("n", [1, 3])
def test_targets_and_weights_are_those_of_a_plain_computation(sampler: str, n: int) -> None:
    words = [*SMALL, *DISCRETE, *SYNC, f"replay.sampler={sampler}", f"replay.n_step={n}", "algorithm.gamma=0.9"]
    settings = settings_from_overrides(words)
    world = look_at_world(settings.env)
    with make_replay(settings, world.schema) as rb:
        generator = torch.Generator().manual_seed(0)
        rows_, ends = 60, [6, 7, 15, 40, 41, 59]
        lengths = [b - a for a, b in zip([-1, *ends[:-1]], ends, strict=True)]
        done = torch.zeros(rows_, 1, dtype=torch.bool)
        done[ends] = True
        terminated = done & (torch.arange(rows_)[:, None] % 2 == 1)
        episode = torch.cat([torch.zeros(1, 1), done[:-1].float()]).cumsum(0).long()
        after = {
            "observation": torch.rand(rows_, 3, generator=generator),
            "reward": torch.rand(rows_, 1, generator=generator),
            "done": done,
            "terminated": terminated,
            "truncated": done & ~terminated,
        }
        rb.extend(
            TensorDict(
                {
                    "observation": torch.rand(rows_, 3, generator=generator),
                    "action": torch.randint(2, (rows_,), generator=generator),
                    "next": TensorDict(after, [rows_]),
                    "policy_version": torch.zeros(rows_, 1, dtype=torch.int64),
                    "episode_id": episode,
                    "step": torch.cat([torch.arange(n_)[:, None] for n_ in lengths]),
                },
                [rows_],
            )
        )
        if sampler == "prioritized":
            rb.update_priority(torch.arange(rows_), torch.rand(rows_, generator=generator))
        sample = rb.sample(32)
        dqn = DQN(EnvSpec.vector(3, action=DiscreteAction(2)), DQNConfig(hidden=(8,), gamma=0.9), seed=0)
        network, target = dqn.network, dqn.target_network

        @torch.no_grad()
        def best(observation: torch.Tensor) -> float:
            one = observation[None]
            return float(target(one)[0, int(network(one).argmax())])

        wanted = plain_target(rb, sample, n, 0.9, best)
        q = network(sample["observation"]).gather(-1, sample["action"].reshape(-1, 1)).squeeze(-1).detach()
        weight = sample["priority_weight"] if sampler == "prioritized" else torch.ones(32)
        assert (sampler == "uniform") == bool((weight == 1).all())
        told = dqn.update(sample)
        torch.testing.assert_close(told["td_error"], (q - wanted).abs(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(told["loss/q"], (weight * (q - wanted).square()).mean(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_goals_are_judged_by_the_environment(one_by_one: bool) -> None:
    reward = GoalFunction("worlds:Reach-v0", {"one_by_one": one_by_one}, "compute_reward")
    achieved, desired = torch.tensor([[0.0], [0.5], [1.0]]), torch.tensor([[0.05], [0.0], [1.0]])
    assert reward(achieved, desired).tolist() == [0.0, -1.0, 0.0]
    assert GoalFunction("worlds:Reach-v0", {}, "compute_terminated")(achieved, desired).tolist() == [True, False, True]


# ---------------------------------------------------------------------- refusals
REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("replay.alpha=0.5",), "replay.alpha is of replay.sampler=prioritized, and that is uniform"),
    (("replay.beta_end=1",), "replay.beta_end is of replay.sampler=prioritized"),
    (("replay.hindsight_fraction=0.5",), "replay.hindsight_fraction is of replay.sampler=hindsight"),
    (("replay.sampler=prioritized", "replay.beta=1.5"), "replay.beta must be from 0 to 1, got 1.5"),
    (("replay.sampler=best",), "replay.sampler must be uniform or prioritized or without_replacement or hindsight"),
    (("replay.n_step=0",), "replay.n_step must be at least 1"),
    (("replay.layout=sequences", "replay.n_step=2"), "needs replay.layout=transitions"),
    (("replay.layout=sequences", "total_frames=121", "envs_per_collector=2"), "not divisible by the 8 frames of a"),
    (("replay.admission=block",), "without replay.consume_after_n_samples none would come"),
    (("replay.high_watermark=10",), "set replay.admission=block"),
    (("replay.consume_after_n_samples=2", "replay.samples_per_insert=4"), "says how often each item is drawn"),
    (("replay.consume_after_n_samples=2", "replay.sampler=without_replacement"), "consumes none"),
    (
        ("execution.mode=sync", "replay.consume_after_n_samples=2", "replay.admission=block"),
        "needs execution.mode=async",
    ),
]


@pytest.mark.parametrize(("words", "told"), REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_what_a_combination_does_not_use_is_refused(words: tuple[str, ...], told: str) -> None:
    with pytest.raises(MillpondError, match=told):
        settings_from_overrides([*SMALL, *words])


def test_hindsight_needs_goals(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"worlds:Corridor-v0 has no compute_reward"):
        run(tmp_path / "run", "replay.sampler=hindsight")
    assert not (tmp_path / "run").exists()


def test_a_place_on_disk_that_is_taken_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "items"
    place.mkdir()
    with pytest.raises(InvalidArgument, match=f"replay.path={place} exists already"):
        run(tmp_path / "run", f"replay.path={place}")
    assert list(place.iterdir()) == []


def test_items_on_disk_stay_after_the_run(tmp_path: Path) -> None:
    assert run(tmp_path / "run", *SYNC, f"replay.path={tmp_path}/items").status == "completed"
    with ReplayBuffer.attach(tmp_path / "items") as rb:
        assert (len(rb), rb.write_count) == (90, 90)
