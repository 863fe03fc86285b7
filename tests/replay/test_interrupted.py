"""Exceptions that come from outside, such as Ctrl-C, and from what users give: no reservation and no item is lost."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from millpond import Flow, ReplayBuffer, ReplayBufferEnsemble
from millpond.replay import ConsumingSampler, PrioritizedSampler, RandomSampler, SamplerWithoutReplacement
from tests.alike import usually
from tests.replay.interrupts import Interrupt, interrupted

KINDS: dict[str, dict[str, Any]] = {
    "random": {"sampler": RandomSampler(), "flow": Flow(samples_per_insert=4.0)},
    "prioritized": {"sampler": PrioritizedSampler()},
    "epochs": {"sampler": SamplerWithoutReplacement()},
    "queue": {"sampler": ConsumingSampler(1)},
    "pool": {"sampler": RandomSampler(), "consume_after_n_samples": 2},
}


def make(kind: str, **more: Any) -> ReplayBuffer:
    how = KINDS[kind] | {"seed": 0} | more
    how["sampler"] = type(how["sampler"])(*([1] if kind == "queue" else []))
    return ReplayBuffer(1000, **how)


def numbers(first: int, n: int) -> dict[str, torch.Tensor]:
    return {"number": torch.arange(first, first + n)}


def agree(rb: ReplayBuffer) -> None:
    """What everybody sees to be reserved is what this process keeps."""
    stats, kept = rb.stats(), list(rb._local.ahead)
    assert (stats["reserved"], stats["prefetched"]) == (sum(len(b.slots) for b in kept), len(kept))
    assert rb._local.engine.control.participants.all_reserved() == (stats["reserved"], stats["prefetched"])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("sizes", usually([(4,), (4, 3), (4, 9)], (4, 3)), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_anywhere_a_sample_leaves_no_reservation_behind(
    kind: str, sizes: tuple[int, ...], shared: bool
) -> None:
    with make(kind, prefetch=2, shared=shared) as rb:
        written = 0
        for place in itertools.count():
            rb.extend(numbers(written, 40))
            written += 40
            cut_off = False
            try:
                with interrupted(place, "replay/"):
                    for n in sizes:
                        rb.sample(n)
            except Interrupt:
                cut_off = True
            rb.sample(sizes[0])
            agree(rb)
            if not cut_off:
                break
        assert place > 50


@pytest.mark.parametrize("sizes", [(4, 3), (4, 9), (9, 4)], ids=str)
@pytest.mark.parametrize("kind", ["queue", "pool", "epochs"])
def test_interrupted_while_batches_are_handed_out_no_item_is_lost(kind: str, sizes: tuple[int, ...]) -> None:
    """Everywhere but in the midst of drawing."""
    more = {} if kind == "epochs" else {"consume_after_n_samples": 1}
    with make(kind, prefetch=2, **more) as rb:
        written = 5000 if kind == "epochs" else 0
        if written:
            rb.extend(numbers(0, 1000))
        returned: list[int] = []
        for place in itertools.count():
            if kind != "epochs" and len(rb) < 100:
                rb.extend(numbers(written, 40))
                written += 40
            cut_off = False
            for n in sizes:
                found = None
                try:
                    with interrupted(place, "replay/prefetch.py"):
                        found = rb.sample(n)
                except Interrupt:
                    cut_off = True
                returned += [] if found is None else found["number"].tolist()
            agree(rb)
            assert rb.stats()["samples_returned"] == len(returned)
            if not cut_off:
                break
        assert place > 40
        if kind == "epochs":
            while len(returned) < 1000:
                returned += rb.sample(7)["number"].tolist()
            assert sorted(returned[:1000]) == list(range(1000))
        else:
            kept = [number for batch in rb._local.ahead for number in batch.numbers.tolist()]
            assert sorted([*returned, *kept, *rb[:]["number"].tolist()]) == list(range(written))


# ---------------------------------------------------------------------- what users give raises
class Failing:
    """A transform that changes the batch in place, and then raises as long as it is told to."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __call__(self, batch: Any) -> Any:
        batch["number"] += 1000
        batch["index"] += 1
        if self.error is not None:
            raise self.error
        return batch


@pytest.fixture(params=["transform", "device"])
def failing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Failing, dict[str, Any]]:
    """What raises, and the arguments of a buffer to which it belongs."""
    fails = Failing()
    if request.param == "transform":
        return fails, {"transform": fails}

    def move(device: str, *parts: Any) -> Any:
        if fails.error is not None:
            raise fails.error
        return parts

    monkeypatch.setattr("millpond.replay.config.to_device", move)
    return fails, {"device": "cpu", "transform": fails}


@pytest.mark.parametrize("error", [ValueError("no"), Interrupt()], ids=repr)
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_did_not_reach_its_caller_is_not_lost(
    kind: str, prefetch: int, error: BaseException, failing: tuple[Failing, dict[str, Any]]
) -> None:
    fails, options = failing
    with make(kind, prefetch=prefetch, **options) as rb, make(kind, prefetch=prefetch) as other:
        rb.extend(numbers(0, 60))
        other.extend(numbers(0, 60))
        rb.sample(5), other.sample(5)
        before = rb.stats()
        for _ in range(3):
            fails.error = error
            with pytest.raises(type(error)):
                rb.sample(4)
            agree(rb)
            for figure in ("samples_returned", "sample_calls"):
                assert rb.stats()[figure] == before[figure]
        fails.error = None
        again, expected = rb.sample(4), other.sample(4)
        if kind in ("random", "prioritized"):  # another one, as it could be drawn again
            return
        assert torch.equal(again["number"], expected["number"] + 1000)
        assert torch.equal(again["generation"], expected["generation"])
        assert torch.equal(again["index"], expected["index"] + 1)
        seen = again["number"].tolist()
        if kind == "queue":
            while len(rb) or len(rb._local.ahead):
                seen += rb.sample(3)["number"].tolist()
            assert sorted(seen) == list(range(1005, 1060))


def test_a_batch_that_was_not_delivered_is_not_counted_against_the_ratio() -> None:
    fails = Failing()
    with ReplayBuffer(100, flow=Flow(samples_per_insert=1.0), transform=fails, seed=0) as rb:
        rb.extend(numbers(0, 10))
        for error in (ValueError(), None):
            fails.error = error
            try:
                rb.sample(10)
            except ValueError:
                assert rb.can_sample(10)
        assert not rb.can_sample(1)


@pytest.mark.parametrize("n", [3, 4, 7])
def test_a_batch_that_was_not_delivered_serves_other_sizes_and_survives_a_checkpoint(n: int) -> None:
    fails = Failing()
    with (
        ReplayBuffer(1000, sampler=ConsumingSampler(1), transform=fails) as rb,
        ReplayBuffer(1000, sampler=ConsumingSampler(1)) as other,
    ):
        rb.extend(numbers(0, 10))
        fails.error = ValueError("no")
        with pytest.raises(ValueError, match="no"):
            rb.sample(4)
        fails.error = None
        assert rb.can_sample(10)
        assert not rb.can_sample(11)
        other.load_state_dict(rb.state_dict())
        assert other.sample(n)["number"].tolist() == list(range(n))
        rb.empty()
        agree(rb)
        assert not rb.can_sample(1)


def two(prefetch: int, *transforms: Any) -> tuple[ReplayBufferEnsemble, list[ReplayBuffer]]:
    """An ensemble of a queue and a pool, each of whose 60 items is delivered once."""
    members = [
        make(kind, prefetch=prefetch, transform=transform, consume_after_n_samples=1)
        for kind, transform in zip(("queue", "pool"), transforms or (None, None), strict=True)
    ]
    for i, member in enumerate(members):
        member.extend(numbers(100 * i, 60))
    return ReplayBufferEnsemble(*members, batch_size=6, seed=2), members


def drained(members: list[ReplayBuffer]) -> list[int]:
    rest: list[int] = []
    for member in members:
        while member.can_sample(1):
            rest += member.sample(1)["number"].tolist()
        agree(member)
        assert (len(member), len(member._local.ahead)) == (0, 0)
    return rest


ALL = [*range(60), *range(100, 160)]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("failing_member", [0, 1])
def test_an_ensemble_loses_nothing_where_a_member_fails(failing_member: int, prefetch: int) -> None:
    fails: list[Any] = [lambda batch: batch, lambda batch: batch]
    fails[failing_member] = failing = Failing()
    both, members = two(prefetch, *fails)
    with both_closed(both):
        members[0].sample(1), members[1].sample(1)
        before = [member.stats() for member in members]
        failing.error = ValueError("no")
        for _ in range(3):
            with pytest.raises(ValueError, match="no"):
                both.sample()
            for member, stats in zip(members, before, strict=True):
                agree(member)
                for figure in ("samples_returned", "sample_calls"):
                    assert member.stats()[figure] == stats[figure]
        failing.error = None
        found = both.sample()
        assert found.batch_size[0] == 6
        first = [n % 1000 for n in found["number"][found["buffer_id"] == 0].tolist()]
        assert first == list(range(1, 1 + len(first))), "what comes next is what has failed"
        rest = drained(members)
        assert len({n % 1000 for n in [*found["number"].tolist(), *rest]}) == 118
        calls = 2 + len(found["buffer_id"].unique()) + len(rest)
        assert sum(member.stats()["sample_calls"] for member in members) == calls


@pytest.mark.parametrize("prefetch", usually([0, 2], 2))
def test_interrupted_anywhere_an_ensemble_loses_nothing(prefetch: int) -> None:
    for place in itertools.count():
        both, members = two(prefetch)
        with both_closed(both):
            got, cut_off = [member.sample(1)["number"].item() for member in members], False
            try:
                with interrupted(place, "replay/ensemble/buffer.py"):
                    found = both.sample()
                got += found["number"].tolist()
            except Interrupt:
                cut_off = True
            got += both.sample()["number"].tolist()
            assert sorted([*got, *drained(members)]) == ALL
        if not cut_off:
            break
    assert place > 20


@contextlib.contextmanager
def both_closed(both: ReplayBufferEnsemble) -> Iterator[None]:
    try:
        yield
    finally:
        both.close()
