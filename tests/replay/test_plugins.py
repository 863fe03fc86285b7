"""A sampler and a storage that users wrote, with everything else: any sampler goes with any storage and any flow."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plugins import CompressedStorage, NewestFirst
from waits import Call, until

from millpond import Flow, ReplayBuffer
from millpond.core.errors import CheckpointError, InvalidType, NotReady, NotShareable, Unsatisfiable
from millpond.core.schema import Schema
from millpond.replay import PrioritizedSampler, RandomSampler
from millpond.replay.samplers.protocol import Sampler
from millpond.replay.storage import Storage
from tests.alike import usually


def numbers(n: int, start: int = 0) -> dict[str, torch.Tensor]:
    x = torch.arange(start, start + n)
    return {"x": x, "y": x.double()}


@pytest.fixture(params=[False, True], ids=["private", "shared"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., ReplayBuffer]:
    made = iter(range(100))

    def make(capacity: int, *, sampler: Any = None, **options: Any) -> ReplayBuffer:
        storage = CompressedStorage(capacity, str(tmp_path / f"rows{next(made)}"))
        sampler = NewestFirst() if sampler is None else sampler
        return ReplayBuffer(storage, sampler=sampler, shared=request.param, **options)

    return make


def test_they_are_what_the_protocols_ask_for(tmp_path: Path) -> None:
    assert isinstance(NewestFirst(), Sampler)
    assert isinstance(CompressedStorage(3, str(tmp_path / "rows")), Storage)
    with pytest.raises(InvalidType, match="is no sampler"):
        ReplayBuffer(3, sampler=CompressedStorage(3, ""))  # type: ignore[arg-type]


def test_writing_sampling_looking_and_updating(make: Any) -> None:
    with make(8) as rb:
        rb.extend(numbers(6))
        rb.extend(numbers(6, 6))
        batch = rb.sample(3)
        assert batch["x"].tolist() == batch["y"].tolist() == [11, 10, 9]
        assert batch["age"].tolist() == [0, 1, 2]
        assert rb[:]["x"].tolist() == list(range(4, 12))
        assert rb.update(batch, {"y": torch.zeros(3, dtype=torch.float64)}) == 3
        assert rb[-3:]["y"].tolist() == [0, 0, 0]
        assert set(rb.peek(20)["x"].tolist()) <= set(range(4, 12))
        assert rb.sampler.draws == 1
        with make(8) as bare, pytest.raises(NotReady):
            bare.sample(1)
        with pytest.raises(Unsatisfiable):
            rb.sample(9)


def test_consumption_and_blocking(make: Any) -> None:
    with make(4, consume_after_n_samples=1, flow=Flow(admission="block")) as rb:
        rb.extend(numbers(4))
        producer = Call(lambda: rb.extend(numbers(2, 4), timeout=60))
        until(lambda: rb.stats()["waiting_producers"] == 1)
        assert rb.sample(2)["x"].tolist() == [3, 2]
        producer.result(60)
        consumer = Call(lambda: [rb.sample(3, wait=True, timeout=60)["x"].tolist() for _ in range(2)])
        until(lambda: rb.stats()["waiting_consumers"] == 1)
        rb.extend(numbers(2, 6))
        assert consumer.result(60) == [[5, 4, 1], [7, 6, 0]]
        assert len(rb) == 0


def test_the_ratio_and_batches_drawn_ahead(make: Any) -> None:
    with make(16, prefetch=2, flow=Flow(min_size=4, samples_per_insert=1, max_debt=8), batch_size=2) as rb:
        rb.extend(numbers(8))
        assert [rb.sample()["x"].tolist() for _ in range(2)] == [[7, 6], [7, 6]]
        assert not rb.can_sample()
        waiting = Call(lambda: rb.sample(wait=True, timeout=60)["x"].tolist())
        until(lambda: rb.stats()["waiting_consumers"] == 1)
        rb.extend(numbers(2, 8))
        assert waiting.result(60) == [9, 8]
        stats = rb.stats()
        assert stats["samples_returned"] + stats["reserved"] == 6


@pytest.mark.parametrize("consuming", [None, 2])
def test_checkpoints(make: Any, consuming: int | None, tmp_path: Path) -> None:
    def go_on(rb: ReplayBuffer) -> list[list[int]]:
        rb.extend(numbers(3, 100))
        return [rb.sample(2)["x"].tolist() for _ in range(3)]

    with (
        make(8, prefetch=1, consume_after_n_samples=consuming) as one,
        make(8, prefetch=1, consume_after_n_samples=consuming) as other,
    ):
        one.extend(numbers(8))
        one.sample(2)
        one.dumps(tmp_path / "saved")
        other.loads(tmp_path / "saved")
        assert other.sampler.draws == one.sampler.draws == 2
        assert go_on(one) == go_on(other)
    with ReplayBuffer(8, sampler=RandomSampler()) as rb, pytest.raises(CheckpointError, match="sampler"):
        rb.loads(tmp_path / "saved")


def test_a_storage_of_the_users_with_priorities(make: Any) -> None:
    with make(8, sampler=PrioritizedSampler(alpha=1.0), seed=0) as rb:
        rb.extend(numbers(8), priority=[0.0] * 7 + [1.0])
        batch = rb.sample(16)
        assert set(batch["x"].tolist()) == {7}
        assert rb.update_priority(batch, 0.0) == 16


def work(rb: ReplayBuffer, pipe: Any) -> None:
    torch.set_num_threads(1)
    pipe.send(rb.sample(2)["x"].tolist())
    rb.extend(numbers(2, 50))
    pipe.send(rb.sample(2, wait=True, timeout=60)["x"].tolist())
    rb.close()


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("moved", usually([False, True], False), ids=["from the start", "share"])
def test_in_another_process(method: str, moved: bool, tmp_path: Path) -> None:
    storage = CompressedStorage(8, str(tmp_path / "rows"))
    with ReplayBuffer(
        storage, sampler=NewestFirst(), consume_after_n_samples=1, flow=Flow(admission="block"), shared=not moved
    ) as rb:
        rb.extend(numbers(4))
        rb.share()
        context: Any = mp.get_context(method)
        mine, theirs = context.Pipe()
        process = context.Process(target=work, args=(rb, theirs))
        process.start()
        theirs.close()
        assert mine.poll(90)
        assert mine.recv() == [3, 2]
        assert mine.recv() == [51, 50]
        process.join(60)
        assert process.exitcode == 0
        process.close()
        mine.close()
        assert rb.sample(2)["x"].tolist() == [1, 0]
        assert rb.sampler.draws == 3  # type: ignore[attr-defined]
        assert rb.stats()["consumed"] == 6


class Failing(CompressedStorage):
    """Refuses one write, or to be bound once more."""

    fails = False

    def bind(self, schema: Schema) -> None:
        self._fail()
        super().bind(schema)

    def write(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        self._fail()
        super().write(slots, rows)

    def _fail(self) -> None:
        if self.fails:
            self.fails = False
            raise OSError("no")


def test_sharing_that_fails_leaves_the_buffer_as_it_was(tmp_path: Path) -> None:
    storage = Failing(8, str(tmp_path / "rows"))
    with ReplayBuffer(storage, sampler=NewestFirst(), prefetch=1) as rb:
        rb.extend(numbers(4))
        rb.sample(2)
        before = rb.stats()
        storage.fails = True
        with pytest.raises(OSError, match="no"):
            rb.share()
        assert not rb.shared
        assert rb.stats() == before
        rb.extend(numbers(2, 4))
        assert [rb.sample(2)["x"].tolist() for _ in range(2)] == [[3, 2], [5, 4]]
        rb.share()
        assert rb.shared
        assert rb.sampler.draws == 4  # type: ignore[attr-defined]


def test_a_write_that_a_storage_refuses_is_not_there(tmp_path: Path) -> None:
    storage = Failing(8, str(tmp_path / "failing"))
    with ReplayBuffer(storage, sampler=NewestFirst(), consume_after_n_samples=1, shared=True) as rb:
        rb.extend(numbers(4))
        storage.fails = True
        with pytest.raises(OSError, match="no"):
            rb.extend(numbers(3, 4))
        assert (len(rb), rb.write_count) == (4, 4)
        rb.extend(numbers(2, 4))
        assert rb.sample(6)["x"].tolist() == [5, 4, 3, 2, 1, 0]
        assert rb.stats()["discarded_writes"] == 1


def test_a_path_alone_does_not_bring_them(tmp_path: Path) -> None:
    with ReplayBuffer(8, sampler=NewestFirst(), shared=True) as rb:
        rb.extend(numbers(4))
        with pytest.raises(NotShareable, match="sampler=…"):
            ReplayBuffer.attach(rb.handle().path)
        with ReplayBuffer.attach(rb.handle().path, sampler=NewestFirst()) as other:
            assert other.sample(1)["x"].tolist() == [3]
    with ReplayBuffer(CompressedStorage(8, str(tmp_path / "rows")), shared=True) as rb:
        with pytest.raises(NotShareable, match="handle"):
            ReplayBuffer.attach(rb.handle().path)
        with ReplayBuffer.attach(rb.handle()) as other:
            other.extend(numbers(2))
        assert rb.sample(1)["x"].item() in (0, 1)
