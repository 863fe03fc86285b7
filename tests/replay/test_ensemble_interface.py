"""An ensemble has what a buffer has: the same methods, with the same meaning over all members."""

from __future__ import annotations

import inspect
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from fast_paths import forked
from waits import Call

from millpond import BlockingReplayBuffer, Flow, ReplayBuffer, ReplayBufferEnsemble
from millpond.core.errors import (
    Cancelled,
    CheckpointError,
    DeadlineExceeded,
    InvalidArgument,
    InvalidType,
    NotReady,
    NotShareable,
    OutOfRange,
    SchemaMismatch,
    Unsatisfiable,
)
from millpond.replay import PrioritizedSampler, SamplerWithoutReplacement


def numbers(n: int, start: int = 0) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(start, start + n), "y": torch.zeros(n, 2)}


def filled(*starts: int, **options: Any) -> list[ReplayBuffer]:
    """Buffers of ten items, numbered from each start on."""
    made = [ReplayBuffer(10, seed=i, **options) for i in range(len(starts))]
    for buffer, start in zip(made, starts, strict=True):
        buffer.extend(numbers(10, start))
    return made


def ensemble(*starts: int, batch_size: int = 8, weights: Any = None, **options: Any) -> ReplayBufferEnsemble:
    return ReplayBufferEnsemble(*filled(*starts, **options), batch_size=batch_size, weights=weights, seed=3)


def test_it_has_every_method_of_a_buffer() -> None:
    """But for two that name one buffer's state; and arguments of the same names."""
    left_out = {"receipt", "sampler", "flow"}
    for name, member in vars(ReplayBuffer).items():
        if name.startswith("_") and name not in ("__iter__", "__len__", "__getitem__", "__enter__", "__reduce__"):
            continue
        if name in left_out:
            continue
        mine = getattr(ReplayBufferEnsemble, name, None)
        assert mine is not None, name
        if inspect.isfunction(member):
            theirs, ours = inspect.signature(member).parameters, inspect.signature(mine).parameters
            if not any(p.kind is p.VAR_KEYWORD for p in ours.values()):
                missing = set(theirs) - set(ours) - {"index_or_sample"}
                assert not missing, (name, missing)


def test_one_item_goes_to_one_member() -> None:
    with ensemble(0, 10) as both:
        item = {"x": torch.tensor(77), "y": torch.zeros(2)}
        assert both.add(item, member=1) == 0
        assert [b.write_count for b in both.buffers] == [10, 11]
        assert (both.write_count, both.storage_size, both.sampleable_size, len(both), both.capacity) == (
            21,
            20,
            20,
            20,
            20,
        )
        for wrong in (2, -1, True, "0"):
            with pytest.raises((InvalidArgument, InvalidType), match="member"):
                both.add(item, member=wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="PrioritizedSampler"):
            both.add(item, member=0, priority=1.0)
        with pytest.raises(InvalidArgument, match="PrioritizedSampler"):
            both.update_priority(both.sample(), 1.0)


@pytest.mark.parametrize("where", ["batch", "info"])
def test_fields_are_written_back_to_the_members_that_they_came_from(where: str) -> None:
    with ensemble(0, 10, 20) as three:
        data, info = three.sample(24, return_info=True)
        batch = info if where == "info" else three.sample(24)
        x = data["x"] if where == "info" else batch["x"]
        patch = {"y": x[:, None].float().expand(24, 2)}
        assert three.update(batch, patch) == 24
        changed = set(x.tolist())
        for member in three.buffers:
            rows = member[:]
            for i, y in zip(rows["x"].tolist(), rows["y"].tolist(), strict=True):
                assert y == ([float(i)] * 2 if i in changed else [0.0, 0.0])


def test_a_change_that_is_wrong_for_one_member_changes_none() -> None:
    with ensemble(0, 10) as both:
        batch = both.sample(20)
        before = both[:]["y"].clone()
        for patch in ({"z": torch.zeros(20)}, {"y": torch.zeros(20)}, {"y": torch.zeros(19, 2)}):
            with pytest.raises(SchemaMismatch, match="[zy]"):
                both.update(batch, patch)
        patch = {"y": torch.ones(20, 2)}
        far = batch.clone()
        far["index"][-1] = 10
        with pytest.raises(InvalidArgument, match="outside 0 to 9"):
            both.update(far, patch)
        for ids in (torch.full((20,), 2), torch.zeros(20), torch.zeros(20, 1, dtype=torch.int64)):
            with pytest.raises(InvalidArgument, match="buffer_id"):
                both.update(batch.clone().set("buffer_id", ids), patch)
        with pytest.raises(InvalidArgument, match="generation"):
            both.update(batch.exclude("generation"), patch)
        assert torch.equal(both[:]["y"], before)


def test_a_look_is_uniform_over_all_items_and_changes_nothing() -> None:
    members = filled(0)
    large = ReplayBuffer(30, seed=0)
    large.extend(numbers(30, 10))
    with ReplayBufferEnsemble(*members, large, weights=[1, 0], batch_size=4, seed=0) as both:
        stats = both.stats()
        seen = both.peek(8000)
        assert both.stats() == stats
        assert torch.equal(seen["buffer_id"], (seen["x"] >= 10).long())
        counts = torch.bincount(seen["x"], minlength=40)
        assert float(((counts - 200) ** 2 / 200).sum()) < 100  # 39 degrees of freedom: p < 1e-6
        both.empty()
        with pytest.raises(NotReady):
            both.peek(1)


def test_items_by_member_and_age() -> None:
    with ensemble(0, 10, 20) as three:
        assert three[:]["x"].tolist() == list(range(30))
        assert three[7:25:3]["x"].tolist() == list(range(7, 25, 3))
        assert int(three[-1]["x"]) == 29
        assert three[torch.tensor([[25, 3], [12, 3]])]["x"].tolist() == [[25, 3], [12, 3]]
        assert three[torch.arange(30) % 7 == 0]["x"].tolist() == [0, 7, 14, 21, 28]
        assert len(three[5:5]) == 0
        with pytest.raises(OutOfRange):
            three[30]
        with pytest.raises(OutOfRange):
            three[torch.ones(29, dtype=torch.bool)]


def test_advice_on_waiting() -> None:
    members = [BlockingReplayBuffer(10), BlockingReplayBuffer(10)]
    with ReplayBufferEnsemble(*members, batch_size=6, seed=0) as both:
        assert not both.wait_until_sampleable(timeout=0)
        assert both.wait_until_writable(10, member=1, timeout=0)
        both.extend(numbers(10), member=0)
        assert not both.wait_until_writable(1, member=0, timeout=0)
        waiting = Call(lambda: both.wait_until_sampleable(timeout=60))
        both.extend(numbers(10), member=1)
        assert waiting.result(60)
        assert both.can_sample()
        assert both.explain() == "member 0: sample(6) can proceed\nmember 1: sample(6) can proceed"
        cancel = threading.Event()
        cancel.set()
        with pytest.raises(Cancelled):
            both.wait_until_writable(1, member=0, cancel_event=cancel)
        with pytest.raises(Unsatisfiable):
            both.wait_until_sampleable(11)
        with pytest.raises(DeadlineExceeded):
            both.extend(numbers(1), member=0, timeout=0)


def test_a_batch_that_failed_is_asked_of_the_same_members_again() -> None:
    """However often: the sequence of choices is that of a run without failures."""

    def chosen(*, fail: int) -> list[list[int]]:
        limited = [ReplayBuffer(10, seed=i, flow=Flow(min_size=1)) for i in range(2)]
        with ReplayBufferEnsemble(*limited, batch_size=8, seed=3) as both:
            for _ in range(fail):
                with pytest.raises(NotReady):
                    both.sample()
            for i, member in enumerate(limited):
                member.extend(numbers(10, 10 * i))
            return [both.sample()["buffer_id"].tolist() for _ in range(3)]

    assert chosen(fail=0) == chosen(fail=3)


def test_nothing_counts_against_a_ratio_inside_unlimited() -> None:
    with ensemble(0, 10, flow=Flow(samples_per_insert=1)) as both:
        with both.unlimited():
            assert len(both.sample(200)) == 200
        assert both.can_sample(8)
        with pytest.raises(NotReady):
            both.sample(200)


@pytest.mark.parametrize("way", ["state", "file"])
def test_a_run_goes_on_bit_for_bit_after_a_load(tmp_path: Path, way: str) -> None:
    def made() -> ReplayBufferEnsemble:
        return ReplayBufferEnsemble(
            *filled(0, sampler=PrioritizedSampler()),
            *filled(10, sampler=SamplerWithoutReplacement(), prefetch=2),
            batch_size=6,
            seed=4,
        )

    with made() as one, made() as other:
        for _ in range(3):
            batch = one.sample()
            one.update_priority(batch, batch["x"] + 1.0)
        if way == "file":
            one.dumps(tmp_path / "saved")
            other.loads(tmp_path / "saved")
        else:
            other.load_state_dict(one.state_dict())
        for _ in range(5):
            mine, theirs = one.sample(), other.sample()
            for key in ("x", "index", "generation", "buffer_id", "priority_weight"):
                assert torch.equal(mine[key], theirs[key]), key
        assert one.stats() == other.stats()


def test_a_checkpoint_that_does_not_fit_a_member_changes_none(tmp_path: Path) -> None:
    with ensemble(0, 10) as both, ensemble(20) as single:
        smaller = ReplayBuffer(9)
        smaller.extend(numbers(9))
        saved = both.state_dict()
        before = both[:]["x"].clone()
        with pytest.raises(CheckpointError, match="member 1"):
            both.load_state_dict({**saved, "members": [saved["members"][0], smaller.state_dict()]})
        with pytest.raises(CheckpointError, match="1 members"):
            both.load_state_dict(single.state_dict())
        for other in (
            smaller.state_dict(),
            {"members": saved["members"]},
            None,
            {**saved, "generator": torch.zeros(3)},
        ):
            with pytest.raises(CheckpointError, match="ensemble"):
                both.load_state_dict(other)
        smaller.dumps(tmp_path / "one")
        with pytest.raises(CheckpointError, match="ensemble"):
            both.loads(tmp_path / "one")
        both.dumps(tmp_path / "both")
        with pytest.raises(CheckpointError):
            smaller.loads(tmp_path / "both")
        assert torch.equal(both[:]["x"], before)


def test_other_processes_use_the_same_members() -> None:
    with ensemble(0, 10, weights=[1, 3], sampler=None) as both:
        with pytest.raises(NotShareable):
            pickle.dumps(both)
        assert not both.shared
        both.share()
        sent = pickle.dumps(both)

        def child() -> None:
            mine = pickle.loads(sent)
            assert mine.weights.tolist() == [0.25, 0.75]
            assert len(mine.sample()) == 8
            mine.extend(numbers(2, 50), member=1)
            mine.close()

        assert forked(child) == 0
        assert both.stats()["samples_returned"] == 8
        assert both.write_count == 22
        assert len(both.sample()) == 8
        with ReplayBufferEnsemble.attach(both.handle()) as again:
            assert len(again) == 20


def test_iterating_ends_with_a_members_epoch_or_with_a_closed_member() -> None:
    with ensemble(0, 10, sampler=None) as both:
        for i, _ in enumerate(both):
            if i == 3:
                both.buffers[1].close()
        assert i == 3
    (alone,) = filled(0, batch_size=2)
    for _ in alone:
        alone.close()
    assert len(alone) == 10
    members = filled(0) + filled(10, sampler=SamplerWithoutReplacement())
    with ReplayBufferEnsemble(*members, batch_size=4, seed=0) as both:
        seen = [x for batch in both for x in batch["x"].tolist() if x >= 10]
        assert sorted(seen) == list(range(10, 20))


def test_settings_are_checked_when_they_are_assigned() -> None:
    with ensemble(0, 10) as both:
        wrong: list[Any] = [[1], [1, -1], [0, 0], [1, float("nan")], "ab"]
        for weights in wrong:
            with pytest.raises((InvalidArgument, InvalidType), match="weights"):
                both.weights = weights
        with pytest.raises(ValueError, match="read-only"):
            both.weights[0] = 0.0
        for size in (0, -1, 2.5, True):
            with pytest.raises((InvalidArgument, InvalidType), match="batch_size"):
                both.batch_size = size  # type: ignore[assignment]
        with pytest.raises(AttributeError):
            both.buffers = ()  # type: ignore[misc]
        both.weights, both.batch_size = [0, 1], 5
        assert both.sample()["buffer_id"].tolist() == [1] * 5


def test_members_whose_transforms_give_different_things() -> None:
    """Named, and nothing counts as delivered."""

    def of_two(first: Any, second: Any) -> ReplayBufferEnsemble:
        members = filled(0, transform=first) + filled(10, transform=second)
        return ReplayBufferEnsemble(*members, batch_size=40, seed=0)

    with of_two(lambda b: b, lambda b: b.set("x", b["x"].float())) as both:
        with pytest.raises(SchemaMismatch, match="differ in x"):
            both.sample()
        assert both.stats()["samples_returned"] == 0
    with of_two(lambda b: b, lambda b: b.exclude("y")) as both, pytest.raises(SchemaMismatch, match="differ in y"):
        both.sample()
    with of_two(dict, dict) as both, pytest.raises(InvalidType, match="member 0 returned a dict"):
        both.sample()
    with of_two(lambda b: b["y"], lambda b: b["y"] + 1) as both:
        assert both.sample().shape == (40, 2)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_members_with_prefetch_and_plain_tensors(prefetch: int) -> None:
    members = [ReplayBuffer(10, seed=i, prefetch=prefetch) for i in range(2)]
    for member in members:
        member.extend(torch.arange(10.0))
    with ReplayBufferEnsemble(*members, batch_size=6, seed=0) as both:
        data, info = both.sample(return_info=True)
        assert torch.equal(data, info["index"].float())
        assert info["buffer_id"].shape == (6,)
        assert both.update(info, torch.full((6,), -1.0)) == 6
        assert both.stats()["samples_returned"] == 6
