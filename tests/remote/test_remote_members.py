"""Buffers that other processes own as members of an ensemble, and the settings of their samplers."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from millpond import BlockingReplayBuffer, ReplayBuffer, ReplayBufferEnsemble
from millpond.core.errors import InvalidArgument, NotReady, NotShareable
from millpond.replay import PrioritizedSampler


def numbers(n: int, start: int = 0) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(start, start + n)}


def prioritized() -> PrioritizedSampler:
    return PrioritizedSampler(alpha=1.0, beta=1.0, eps=0.0)


def test_clients_on_the_owners_host_are_members(pond: Any, client: Any) -> None:
    """Drawn, weighed, changed and waited for as one buffer would be."""
    theirs = client(pond(100, sampler=prioritized()), transport="shm")
    mine = ReplayBuffer(100, sampler=prioritized(), seed=0)
    with ReplayBufferEnsemble(mine, theirs, batch_size=400, seed=0) as both:
        both.extend(numbers(100), member=0, priority=1.0)
        with pytest.raises(NotReady, match="member 1"):
            both.sample()
        both.extend(numbers(100, 100), member=1, priority=[1.0] * 50 + [99.0] * 50)
        batch = both.sample(4000)
        assert torch.equal(batch["buffer_id"], batch["x"] // 100)
        of_mine = batch["buffer_id"] == 0
        assert float(batch["priority_weight"][of_mine].sum() / batch["priority_weight"].sum()) == pytest.approx(
            0.5, abs=0.05
        )
        assert both.update_priority(batch, 2.0) == 4000
        assert both.stats()["samples_returned"] == theirs.stats()["samples_returned"] + mine.stats()["samples_returned"]
        both.share()
        with pickle.loads(pickle.dumps(both)) as again:
            assert again.sample(10)["x"].shape == (10,)
        assert both[150:152]["x"].tolist() == [150, 151]


def test_what_is_consumed_is_taken_from_every_client_or_from_none(pond: Any, client: Any) -> None:
    members = [client(pond(100, kind=BlockingReplayBuffer), transport="shm") for _ in range(2)]
    with ReplayBufferEnsemble(*members, batch_size=10, seed=0) as both:
        both.extend(numbers(50), member=0)
        for _ in range(3):
            with pytest.raises(NotReady):
                both.sample()
        assert len(members[0]) == 50
        both.extend(numbers(50, 50), member=1)
        seen = [x for _ in range(5) for x in both.sample(wait=True, timeout=30)["x"].tolist()]
        assert len(set(seen)) == 50


def test_a_client_elsewhere_is_refused_as_a_member_with_the_reason(pond: Any, client: Any) -> None:
    far = client(pond(100), transport="gloo")
    with pytest.raises(NotShareable, match="locks"):
        ReplayBufferEnsemble(far, ReplayBuffer(10))


def test_a_setting_that_is_assigned_through_a_client_holds_for_all_or_is_refused(pond: Any, client: Any) -> None:
    owner = pond(8, sampler=prioritized())
    near, far = client(owner, transport="shm"), client(owner, transport="gloo")
    near.extend(numbers(4), priority=[1.0, 2.0, 3.0, 4.0])
    near.sampler.alpha = 0.5
    shares = torch.bincount(far.sample(20_000)["x"], minlength=4) / 20_000
    assert shares.tolist() == pytest.approx([0.1627, 0.2301, 0.2818, 0.3254], abs=5e-4)
    with pytest.raises(InvalidArgument, match="copy of the one that draws"):
        far.sampler.alpha = 1.0
    with pytest.raises(InvalidArgument, match="copy of the one that draws"):
        far.sampler.beta = 0.5
