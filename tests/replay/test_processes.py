"""One buffer in several processes, however they were started."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from waits import Call, until

from millpond import BlockingReplayBuffer, Flow, ReplayBuffer
from millpond.core.errors import BufferClosed, InvalidArgument, NotShareable, PeerLost, SchemaMismatch
from millpond.core.schema import Schema
from millpond.replay import (
    ConsumingSampler,
    MappedStorage,
    PrioritizedSampler,
    RandomSampler,
    SamplerWithoutReplacement,
)
from millpond.shm.directory import reap
from tests.alike import usually

METHODS = ["fork", "spawn", "forkserver"]
SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": RandomSampler,
    "prioritized": PrioritizedSampler,
    "epochs": SamplerWithoutReplacement,
    "fifo": ConsumingSampler,
}


def child(pipe: Any, rb: ReplayBuffer) -> None:
    """Does what it is told, one call after the other, and sends back what came of it."""
    torch.set_num_threads(1)
    pipe.send("ready")
    while (call := pickle.loads(pipe.recv_bytes())) is not None:  # plain pickle: tensors go by value
        try:
            pipe.send(call(rb))
        except Exception as error:
            pipe.send(error)
    rb.close()


class Other:
    """A process that has the buffer."""

    def __init__(self, method: str, rb: ReplayBuffer) -> None:
        context: Any = mp.get_context(method)
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=child, args=(theirs, rb), daemon=True)
        self.process.start()
        theirs.close()
        assert self._pipe.recv() == "ready"

    def start(self, call: Callable[[ReplayBuffer], Any]) -> None:
        self._pipe.send_bytes(pickle.dumps(call))

    def result(self, timeout: float = 20.0) -> Any:
        assert self._pipe.poll(timeout), "no answer from the other process"
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def does(self, call: Callable[[ReplayBuffer], Any]) -> Any:
        self.start(call)
        return self.result()

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()

    def end(self) -> None:
        if self.process.is_alive():
            self._pipe.send_bytes(pickle.dumps(None))
        self._pipe.close()
        self.process.join(10)
        assert not self.process.is_alive()
        self.process.close()


class Do:
    """A picklable call: ``Do("sample", 4, wait=True)``; a batch comes back as the list of its numbers."""

    def __init__(self, name: str, *arguments: Any, **options: Any) -> None:
        self.name, self.arguments, self.options = name, arguments, options

    def __call__(self, rb: ReplayBuffer) -> Any:
        answer = getattr(rb, self.name)
        if callable(answer):
            answer = answer(*self.arguments, **self.options)
        return answer["x"].tolist() if self.name in ("sample", "peek") else answer


def numbers(n: int, start: int = 0) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(start, start + n)}


@pytest.fixture
def others() -> Iterator[Callable[..., Other]]:
    made: list[Other] = []

    def make(method: str, rb: ReplayBuffer) -> Other:
        made.append(Other(method, rb))
        return made[-1]

    yield make
    for other in made:
        other.end()


@pytest.mark.parametrize("name", list(SAMPLERS))
@pytest.mark.parametrize("method", usually(METHODS, "fork", "forkserver"))
def test_every_way_of_starting_a_process(method: str, name: str, others: Any) -> None:
    """proc-9: what one process writes, another samples; the schema binds wherever the first write happens."""
    with ReplayBuffer(100, sampler=SAMPLERS[name](), shared=True, seed=0) as rb:
        other = others(method, rb)
        assert rb.schema is None
        other.does(Do("extend", numbers(20)))
        assert rb.schema is not None
        assert rb.write_count == 20
        assert set(rb.sample(5)["x"].tolist()) <= set(range(20))
        rb.extend(numbers(20, 20))
        assert other.does(Do("write_count")) == 40
        assert set(other.does(Do("sample", 15))) <= set(range(40))
        assert rb.stats()["samples_returned"] == other.does(Do("stats"))["samples_returned"] == 20


@pytest.mark.parametrize("method", METHODS)
def test_a_consumer_elsewhere_frees_space(method: str, others: Any) -> None:
    """flow-3: whether the workers started before or after the sampler was used, and after a write by the worker."""
    with BlockingReplayBuffer(10, shared=True) as rb:
        early = others(method, rb)
        rb.extend(numbers(10))
        rb.sample(1)
        late = others(method, rb)
        for other in (early, late, early):
            other.does(Do("extend", numbers(1, 100)))
            producer = Call(lambda: rb.extend(numbers(2, 200)))
            until(lambda: rb.stats()["waiting_producers"] == 1)
            other.does(Do("sample", 2))
            producer.result()
            other.start(Do("extend", numbers(1, 300)))
            until(lambda: rb.stats()["waiting_producers"] == 1)
            rb.sample(2)
            other.result()


def test_two_processes_consume_one_buffer(others: Any) -> None:
    """rem-4: exactly 100 deliveries together."""
    for sampler in (None, RandomSampler(), PrioritizedSampler(), SamplerWithoutReplacement()):
        with BlockingReplayBuffer(100, sampler=sampler, shared=True) as rb:
            other = others("fork", rb)
            rb.extend(numbers(100))
            got: list[int] = []
            for _ in range(10):
                other.start(Do("sample", 5))
                got += rb.sample(5)["x"].tolist() + other.result()
            assert sorted(got) == list(range(100))
            assert len(rb) == 0


def test_an_update_from_another_process_for_a_slot_rewritten_since(others: Any) -> None:
    """rem-5, prio-1: dropped and counted, in every process."""
    with ReplayBuffer(10, sampler=PrioritizedSampler(), shared=True, seed=0) as rb:
        rb.extend(numbers(10))
        batch = rb.sample(10)
        other = others("fork", rb)
        other.does(Do("extend", numbers(10, 10)))
        assert other.does(Do("update_priority", batch, torch.ones(10))) == 0
        assert rb.update(batch, {"x": torch.zeros(10, dtype=torch.int64)}) == 0
        assert rb.stats()["stale_updates"] == other.does(Do("stats"))["stale_updates"] == 20
        assert rb[:]["x"].tolist() == list(range(10, 20))


def test_several_writers_and_one_learner_update_priorities(others: Any) -> None:
    """prio-8"""
    with ReplayBuffer(64, sampler=PrioritizedSampler(), shared=True, seed=0) as rb:
        rb.extend(numbers(64))
        writers = [others("fork", rb) for _ in range(2)]
        for i in range(30):
            for writer in writers:
                writer.start(Do("extend", numbers(7, 100 * i)))
            batch = rb.sample(16)
            rb.update_priority(batch, batch["x"].abs().float())
            for writer in writers:
                writer.result()
        tree = rb.sampler.tree  # type: ignore[attr-defined]
        total = tree.total
        tree.rebuild()
        assert tree.total == total
        assert tree.count == 64


def test_a_shared_buffer_pickles_its_handle() -> None:
    """proc-8"""
    with ReplayBuffer(10, shared=True, batch_size=3) as rb:
        rb.extend(numbers(10))
        copy = pickle.loads(pickle.dumps(rb))
        assert copy.sample().batch_size == (3,)
        copy.extend(numbers(1, 10))
        assert rb.write_count == 11
        copy.close()
        assert rb.sample().batch_size == (3,)  # one that attached only leaves


def test_share_keeps_what_the_buffer_holds(others: Any) -> None:
    rb = ReplayBuffer(20, sampler=PrioritizedSampler(), seed=3, prefetch=1, batch_size=4)
    rb.extend(numbers(15))
    rb.sample()
    before = rb.stats()
    assert rb.share() is rb
    assert rb.stats() == before
    other = others("spawn", rb)
    assert other.does(Do("write_count")) == 15
    rb.sample()
    rb.close()


def test_closing_by_the_owner_ends_every_wait(others: Any) -> None:
    """flow-5, in other processes."""
    with BlockingReplayBuffer(4, shared=True) as rb:
        rb.extend(numbers(4))
        producer, consumer = others("fork", rb), others("fork", rb)
        producer.start(Do("extend", numbers(1)))
        until(lambda: rb.stats()["waiting_producers"] == 1)
        rb.sample(4)
        producer.result()
        consumer.start(Do("sample", 4, wait=True))
        until(lambda: rb.stats()["waiting_consumers"] == 1)
        rb.close()
        with pytest.raises(BufferClosed):
            consumer.result()
        with pytest.raises(BufferClosed):
            producer.does(Do("extend", numbers(1)))


def test_a_first_write_after_the_owner_closed_says_so() -> None:
    rb = ReplayBuffer(4, shared=True)
    copy = pickle.loads(pickle.dumps(rb))
    rb.close()
    with pytest.raises(BufferClosed):
        copy.extend(numbers(1))
    copy.close()


def own_and_die(pipe: Any) -> None:
    rb = BlockingReplayBuffer(4, shared=True)
    pipe.send(rb.handle())
    time.sleep(60)


def own_prioritized_and_die(pipe: Any) -> None:
    rb = ReplayBuffer(64, sampler=PrioritizedSampler(), shared=True, consume_after_n_samples=None)
    rb.extend({"x": torch.zeros(64)})
    pipe.send(rb.handle())
    time.sleep(60)


def test_a_dead_owner_ends_every_wait() -> None:
    context = mp.get_context("fork")
    mine, theirs = context.Pipe()
    owner = context.Process(target=own_and_die, args=(theirs,), daemon=True)
    owner.start()
    rb = ReplayBuffer.attach(mine.recv())
    waiting = Call(lambda: rb.sample(1, wait=True))
    until(lambda: rb.stats()["waiting_consumers"] == 1)
    assert owner.pid is not None
    os.kill(owner.pid, signal.SIGKILL)
    with pytest.raises(PeerLost, match=str(owner.pid)):
        waiting.result()
    owner.join()
    owner.close()
    handle = rb.handle()
    with pytest.raises(PeerLost):
        ReplayBuffer.attach(handle)
    ReplayBuffer(4, shared=True).close()  # the next shared buffer on this host frees the memory
    assert not Path(handle.path).exists()
    rb.close()
    mine.close()
    theirs.close()


@pytest.mark.parametrize("reaped", [False, True])
def test_no_call_goes_on_in_the_memory_of_a_dead_owner(reaped: bool) -> None:
    """Within 5 s, whoever is busy: who writes, samples, changes priorities or items."""
    context = mp.get_context("fork")
    mine, theirs = context.Pipe()
    owner = context.Process(target=own_prioritized_and_die, args=(theirs,), daemon=True)
    owner.start()
    handle = mine.recv()
    rb = ReplayBuffer.attach(handle)
    batch = rb.sample(4)

    def busy(call: Callable[[], Any]) -> tuple[str, float]:
        try:
            while True:
                call()
        except PeerLost as lost:
            return str(lost), time.monotonic()

    calls = [
        lambda: rb.extend({"x": torch.zeros(2)}),
        lambda: rb.add({"x": torch.zeros(())}),
        lambda: rb.sample(4),
        lambda: rb.update_priority(batch, torch.ones(4)),
        lambda: rb.update(batch, {"x": torch.ones(4)}),
    ]
    running = [Call(lambda call=call: busy(call)) for call in calls]
    until(lambda: rb.write_count > 300)
    assert owner.pid is not None
    os.kill(owner.pid, signal.SIGKILL)
    died = time.monotonic()
    if reaped:
        until(lambda: Path(handle.path) in reap())
    for call in running:
        said, when = call.result()
        assert str(owner.pid) in said
        assert when - died < 5
    with pytest.raises(PeerLost):
        rb.extend({"x": torch.zeros(2)})
    rb.close()
    reap()
    owner.join()
    owner.close()
    mine.close()
    theirs.close()


def test_a_waiter_that_is_killed_is_taken_off_the_table(others: Any) -> None:
    """flow-11: also what it had reserved returns."""
    with ReplayBuffer(100, flow=Flow(samples_per_insert=1.0), prefetch=2, batch_size=10, shared=True, seed=0) as rb:
        rb.extend(numbers(40))
        other = others("fork", rb)
        other.does(Do("sample"))
        assert rb.stats()["reserved"] == 20
        other.start(Do("sample", 35, wait=True))
        until(lambda: rb.stats()["waiting_consumers"] == 1)
        other.kill()
        until(lambda: rb.stats()["waiting_consumers"] == 0)
        stats = rb.stats()
        assert (stats["reserved"], stats["prefetched"], stats["samples_returned"]) == (0, 0, 10)
        rb.sample(10)
        rb.extend(numbers(1))


def test_a_forked_child_draws_other_numbers(others: Any) -> None:
    with ReplayBuffer(10_000, shared=True, seed=0) as rb:
        rb.extend(numbers(10_000))
        one, two = others("fork", rb), others("fork", rb)
        drawn = [rb.sample(50)["x"].tolist(), one.does(Do("sample", 50)), two.does(Do("sample", 50))]
        assert drawn[0] != drawn[1] != drawn[2] != drawn[0]


def test_another_schema_is_refused_in_every_process(others: Any) -> None:
    with ReplayBuffer(10, shared=True) as rb:
        other = others("fork", rb)
        rb.extend(numbers(2))
        with pytest.raises(SchemaMismatch, match=r"x: expected int64.*float32"):
            other.does(Do("extend", {"x": torch.zeros(2)}))
        assert rb.write_count == 2


def test_a_buffer_on_disk_is_found_by_its_path(tmp_path: Path, others: Any) -> None:
    path = tmp_path / "buffer"
    schema = Schema({"x": (torch.int64, ())})
    with ReplayBuffer(
        MappedStorage(10, path), sampler=PrioritizedSampler(alpha=0.7), schema=schema, batch_size=4
    ) as rb:
        rb.extend(numbers(6))
        attached = ReplayBuffer.attach(path)
        assert attached.sample().batch_size == (4,)
        assert attached.sampler.alpha == 0.7  # type: ignore[attr-defined]
        attached.extend(numbers(1, 6))
        attached.close()
        assert rb.write_count == 7
        with pytest.raises(InvalidArgument, match="attach"):
            ReplayBuffer(MappedStorage(10, path))
    with ReplayBuffer.attach(path) as again:  # the owner is gone: reopened
        assert again[:]["x"].tolist() == list(range(7))
        again.extend(numbers(1, 7))
    with ReplayBuffer.attach(str(path)) as again:
        assert again.write_count == 8


def write_for_ever(path: Path, pipe: Any) -> None:
    rb = ReplayBuffer(MappedStorage(64, path), schema=Schema({"x": (torch.int64, (8,))}))
    pipe.send("ready")
    value = 0
    while True:
        value += 1
        rb.extend({"x": torch.full((5, 8), value)})


def test_a_buffer_on_disk_reopens_after_a_kill(tmp_path: Path) -> None:
    """At most the write in progress is lost."""
    context = mp.get_context("fork")
    for attempt in range(5):
        path = tmp_path / str(attempt)
        mine, theirs = context.Pipe()
        writer = context.Process(target=write_for_ever, args=(path, theirs), daemon=True)
        writer.start()
        mine.recv()
        until(partial(has_written, path, 50 * (attempt + 1)))
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        writer.close()
        with ReplayBuffer.attach(path) as rb:
            rows = rb[:]["x"]
            assert rb.write_count % 5 == 0
            assert (rows == rows[:, :1]).all()
            last = rb.write_count // 5
            assert rows[-1, 0] == last
            rb.extend({"x": torch.full((5, 8), last + 1)})
        mine.close()
        theirs.close()


def has_written(path: Path, items: int) -> bool:
    rb = ReplayBuffer.attach(path)
    try:
        return rb.write_count > items
    finally:
        rb.close()


def test_what_is_no_buffer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotShareable):
        ReplayBuffer.attach(tmp_path)
    with pytest.raises(NotShareable):
        ReplayBuffer.attach(tmp_path / "nothing")
    with ReplayBuffer(MappedStorage(10, tmp_path / "b"), schema=Schema({"x": (torch.int64, ())})):
        os.truncate(tmp_path / "b" / "arrays", 8)
        with pytest.raises(NotShareable, match=r"arrays.*truncated"):
            ReplayBuffer.attach(tmp_path / "b")
