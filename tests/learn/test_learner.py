"""Sample, update, publish, report: against a real buffer, a real board and real algorithms."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from millpond import Flow, ReplayBuffer
from millpond.algos.dqn import DQN, DQNConfig
from millpond.algos.sac import SAC, SACConfig
from millpond.core.errors import BufferClosed, Cancelled, DeadlineExceeded, InvalidArgument, NonFinite
from millpond.core.spec import BoxAction, DiscreteAction, EnvSpec
from millpond.learn.learner import Learner
from millpond.learn.stream import SampleStream
from millpond.replay import PrioritizedSampler
from millpond.weights import WeightBoard


def transitions(n: int, *, seed: int = 0) -> TensorDict:
    g = torch.Generator().manual_seed(seed)
    return TensorDict(
        {
            "observation": torch.randn(n, 4, generator=g),
            "action": torch.randint(2, (n,), generator=g),
            "next": {
                "observation": torch.randn(n, 4, generator=g),
                "reward": torch.randn(n, 1, generator=g),
                "terminated": torch.rand(n, 1, generator=g) < 0.1,
            },
        },
        [n],
    )


def dqn(seed: int = 0) -> DQN:
    return DQN(EnvSpec.vector(4, action=DiscreteAction(2)), DQNConfig(hidden=(8,)), seed=seed)


@pytest.fixture
def replay() -> Iterator[ReplayBuffer]:
    with ReplayBuffer(256, seed=0) as buffer:
        yield buffer


def test_it_learns_publishes_and_reports(replay: ReplayBuffer) -> None:
    replay.extend(transitions(64))
    algorithm = dqn()
    with WeightBoard(algorithm.published) as board:
        learner = Learner(algorithm, replay, board, batch_size=16, publish_every=3)
        seen = []
        for _ in range(7):
            metrics = learner.step()
            seen.append(board.version)
        assert seen == [0, 0, 3, 3, 3, 6, 6]
        assert learner.finish() == board.version == algorithm.steps == 7
        assert learner.finish() == 7
        elsewhere = dqn(seed=1)
        board.pull(elsewhere.policy)
    for mine, theirs in zip(algorithm.policy.parameters(), elsewhere.policy.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert "td_error" not in metrics
    assert all(value.shape == () and not value.requires_grad for value in metrics.values())
    assert learner.batch is not None
    assert learner.batch.batch_size == (16,)


def test_it_needs_no_board(replay: ReplayBuffer) -> None:
    replay.extend(transitions(64))
    learner = Learner(dqn(), replay, batch_size=16)
    learner.step()
    assert learner.finish() == 1


def test_exploration_follows_the_frames(replay: ReplayBuffer) -> None:
    replay.extend(transitions(64))
    algorithm = dqn()
    Learner(algorithm, replay, batch_size=8).step()
    assert algorithm.exploration.frames == 64
    Learner(algorithm, replay, batch_size=8, frames=lambda: 640).step()
    assert algorithm.exploration.frames == 640


def test_priorities_come_back(replay: ReplayBuffer) -> None:
    """Where replay is prioritized, the items of the batch get the absolute errors of the update as priorities."""
    with ReplayBuffer(64, sampler=PrioritizedSampler(alpha=1.0, beta=0.4), seed=0) as prioritized:
        prioritized.extend(transitions(64))
        updates: list[tuple[Any, torch.Tensor]] = []

        class Watched:
            write_count = 64
            sample = prioritized.sample

            def update_priority(self, sample: Any, priority: torch.Tensor) -> int:
                updates.append((sample, priority))
                return prioritized.update_priority(sample, priority)

        algorithm, twin = dqn(), dqn()
        Learner(algorithm, Watched(), batch_size=16).step()
        ((sample, priority),) = updates
        assert sample["priority_weight"].shape == (16,)
        torch.testing.assert_close(priority, twin.update(sample)["td_error"])
        assert (priority >= 0).all()
        prioritized.update_priority(torch.arange(64), torch.zeros(64))
        prioritized.update_priority(sample, priority)
        drawn = {i for _ in range(10) for i in prioritized.sample(64)["index"].tolist()}
        assert drawn & set(sample["index"].tolist())


def test_uniform_replay_gets_no_priorities(replay: ReplayBuffer) -> None:
    """A uniform buffer refuses or ignores priorities; the learner does not send any."""
    replay.extend(transitions(64))

    class Unprioritized:
        write_count = 64
        sample = replay.sample

    Learner(dqn(), Unprioritized(), batch_size=16).step()  # type: ignore[arg-type]


def test_a_non_finite_batch_stops_the_run_before_anything_changed(replay: ReplayBuffer) -> None:
    """nan-1: the error names field, row and slot; weights and published version stay."""
    bad = transitions(1)
    bad["next", "reward"][0, 0] = float("nan")
    replay.extend(bad)
    algorithm = dqn()
    before = algorithm.state_dict()
    with WeightBoard(algorithm.published) as board:
        learner = Learner(algorithm, replay, board, batch_size=4)
        with pytest.raises(NonFinite, match=r"loss/q=nan.*next\.reward at \[0, 0\] is nan: row 0 \(slot 0\)"):
            learner.step()
        assert board.version == 0
    for key, value in algorithm.state_dict().items():
        assert torch.equal(value, before[key]) or key == "frames"
    assert algorithm.steps == 0


def test_waiting_for_a_batch_ends() -> None:
    with ReplayBuffer(64, flow=Flow(min_size=32), seed=0) as replay:
        algorithm = dqn()
        learner = Learner(algorithm, replay, batch_size=8)
        with pytest.raises(DeadlineExceeded):
            learner.step(timeout=0.01)
        cancel = threading.Event()
        cancel.set()
        with pytest.raises(Cancelled):
            learner.step(cancel_event=cancel)
        replay.close()
        with pytest.raises(BufferClosed):
            learner.step()
        assert algorithm.steps == 0


@pytest.mark.parametrize("sizes", [{"batch_size": 0}, {"batch_size": 8, "publish_every": 0}])
def test_sizes_below_one_are_refused(replay: ReplayBuffer, sizes: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument, match="at least 1"):
        Learner(dqn(), replay, **sizes)


def test_the_same_seeds_give_the_same_numbers() -> None:
    """seed-1, for learner and replay together, with another state of the global generator."""

    def run(other_seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(other_seed)
        with ReplayBuffer(64, seed=3) as replay, SampleStream(replay, batch_size=16, ahead=0) as stream:
            replay.extend(transitions(64))
            algorithm = SAC(EnvSpec.vector(4, action=BoxAction((-1.0,), (1.0,))), SACConfig(hidden=(8,)), seed=3)
            data = transitions(64)
            data["action"] = data["next", "reward"].tanh()
            replay.empty()
            replay.close()
        with ReplayBuffer(64, seed=3) as replay, SampleStream(replay, batch_size=16, ahead=0) as stream:
            replay.extend(data)
            learner = Learner(algorithm, stream, batch_size=16)
            for _ in range(5):
                learner.step()
        return algorithm.state_dict()

    a, b = run(0), run(1)
    assert all(torch.equal(a[key], b[key]) for key in a)
