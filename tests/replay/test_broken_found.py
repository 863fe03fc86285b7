"""Faults that somebody who set out to break the buffer has found, each with the whole of its kind."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from millpond import BlockingReplayBuffer, Flow, ReplayBuffer, ReplayBufferEnsemble
from millpond.core.errors import (
    BufferClosed,
    Cancelled,
    CheckpointError,
    DeadlineExceeded,
    InvalidArgument,
    InvalidType,
    MillpondError,
    NotReady,
    SchemaMismatch,
    Unsatisfiable,
)
from millpond.core.schema import Schema
from millpond.replay import (
    ConsumingSampler,
    HindsightSampler,
    MappedStorage,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorStorage,
)
from millpond.replay import update as editing
from millpond.replay.samplers.protocol import Generator
from millpond.replay.state import REWRITES
from millpond.shm.directory import shared_root
from tests.replay.waits import until


def numbers(n: int, first: int = 0) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(first, first + n)}


# ---------------------------------------------------------------------- one sampler, one storage, one buffer
@pytest.mark.parametrize(
    "make",
    [
        PrioritizedSampler,
        SamplerWithoutReplacement,
        ConsumingSampler,
        lambda: SliceSampler(slice_len=2),
        lambda: NStep(2, 0.9, base=PrioritizedSampler()),
        lambda: HindsightSampler(lambda a, b: a[..., 0]),
    ],
)
def test_a_sampler_serves_one_buffer(make: Any) -> None:
    sampler = make()
    first = ReplayBuffer(10, sampler=sampler, batch_size=4)
    with pytest.raises(InvalidArgument, match="serves another buffer"):
        ReplayBuffer(100, sampler=sampler)
    inner = getattr(sampler, "base", None)
    if inner is not None and type(inner) is not RandomSampler:
        with pytest.raises(InvalidArgument, match="serves another buffer"):
            ReplayBuffer(100, sampler=inner)
    first.close()
    ReplayBuffer(100, sampler=sampler).close()


def test_a_buffer_that_is_gone_holds_no_sampler() -> None:
    sampler = PrioritizedSampler()
    ReplayBuffer(10, sampler=sampler)  # nobody keeps it, and nobody closes it
    ReplayBuffer(10, sampler=sampler).close()


def test_a_construction_that_fails_holds_no_sampler(tmp_path: Path) -> None:
    sampler, taken = PrioritizedSampler(), tmp_path / "taken"
    taken.mkdir()
    with pytest.raises(InvalidArgument, match="exists already"):
        ReplayBuffer(MappedStorage(10, taken), sampler=sampler)
    ReplayBuffer(10, sampler=sampler).close()


def test_a_storage_serves_one_buffer() -> None:
    storage = TensorStorage(10)
    first = ReplayBuffer(storage)
    first.extend(numbers(10))
    with pytest.raises(InvalidArgument, match="serves another buffer"):
        ReplayBuffer(storage)
    assert first[:]["x"].tolist() == list(range(10))


@pytest.mark.parametrize("make", [PrioritizedSampler, SamplerWithoutReplacement, lambda: ConsumingSampler(3)])
def test_attaching_in_the_process_that_made_it(make: Any) -> None:
    """Each object has a sampler of its own; closing one harms no other."""
    with ReplayBuffer(20, sampler=make(), batch_size=4, shared=True) as rb:
        rb.extend(numbers(20))
        one, other = ReplayBuffer.attach(rb.handle()), ReplayBuffer.attach(rb.handle())
        assert len({id(b.sampler) for b in (rb, one, other)}) == 3
        assert [len(b.sample()) for b in (one, rb, other)] == [4, 4, 4]
        one.close()
        assert [len(b.sample()) for b in (rb, other)] == [4, 4]
        other.close()
        assert len(rb.sample()) == 4


# ---------------------------------------------------------------------- names on disk
def test_a_directory_of_the_users_is_kept_whatever_its_name(tmp_path: Path) -> None:
    path = tmp_path / "millpond-buffer"
    rb = ReplayBuffer(MappedStorage(10, path))
    rb.extend(numbers(10))
    rb.close()
    with ReplayBuffer.attach(path) as again:
        assert again[:]["x"].tolist() == list(range(10))


# ---------------------------------------------------------------------- batches drawn ahead
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize(("size", "batch"), [(10, 5), (13, 5), (3, 5)])
def test_an_epoch_holds_each_item_once_however_far_one_draws_ahead(prefetch: int, size: int, batch: int) -> None:
    batch = min(batch, size)
    rb = ReplayBuffer(size, sampler=SamplerWithoutReplacement(), batch_size=batch, prefetch=prefetch, seed=3)
    rb.extend(numbers(size))
    for _ in range(3):
        assert sorted(x for part in rb for x in part["x"].tolist()) == list(range(size))
    count = -(-size // batch)
    for _ in range(3):
        assert sorted(x for _ in range(count) for x in rb.sample()["x"].tolist()) == list(range(size))
    assert rb.stats()["samples_returned"] == 6 * size


def test_the_last_batch_of_an_epoch_survives_a_checkpoint() -> None:
    rb, other = (
        ReplayBuffer(8, sampler=SamplerWithoutReplacement(), batch_size=5, prefetch=1, seed=seed) for seed in (0, 1)
    )
    rb.extend(numbers(8))
    first = rb.sample()["x"].tolist()
    other.load_state_dict(rb.state_dict())
    assert sorted(first + other.sample()["x"].tolist()) == list(range(8))


@pytest.mark.parametrize("how", [{"sampler": ConsumingSampler(1)}, {"consume_after_n_samples": 1}])
def test_threads_share_what_is_drawn_ahead(how: dict[str, Any]) -> None:
    rb = ReplayBuffer(3000, batch_size=4, prefetch=2, **(how | {"sampler": copy.deepcopy(how.get("sampler"))}))
    rb.extend(numbers(3000))
    got: list[int] = []
    failed: list[BaseException] = []

    def draw(number: int) -> None:
        try:
            for k in range(1000):
                got.extend(rb.sample(1 + (k + number) % 4)["x"].tolist())
        except NotReady:
            pass
        except BaseException as problem:
            failed.append(problem)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=draw, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(before)
    assert not failed
    while len(rb) or rb._local.ahead:
        got += rb.sample(1)["x"].tolist()
    assert sorted(got) == list(range(3000))
    stats = rb.stats()
    assert (stats["samples_returned"], stats["reserved"], stats["prefetched"]) == (3000, 0, 0)


def test_a_set_cancel_event_counts_whether_or_not_a_batch_is_ahead() -> None:
    cancel = threading.Event()
    rb = ReplayBuffer(10, batch_size=4, prefetch=2)
    rb.extend(numbers(10))
    rb.sample()
    cancel.set()
    with pytest.raises(Cancelled):
        rb.sample(cancel_event=cancel)
    assert rb.stats()["samples_returned"] == 4


# ---------------------------------------------------------------------- leaving
@pytest.mark.parametrize("what", ["sample", "extend", "sampleable", "writable"])
def test_whoever_waits_in_a_process_that_leaves_is_freed(what: str) -> None:
    """flow-5: also where the buffer itself goes on, for others."""
    with BlockingReplayBuffer(4, batch_size=4, shared=True) as rb:
        if what in ("extend", "writable"):
            rb.extend(numbers(4))
        here = ReplayBuffer.attach(rb.handle())
        calls: dict[str, Any] = {
            "sample": lambda: here.sample(wait=True),
            "extend": lambda: here.extend(numbers(4)),
            "sampleable": here.wait_until_sampleable,
            "writable": here.wait_until_writable,
        }
        result: list[Any] = []

        def call() -> None:
            try:
                result.append(calls[what]())
            except BaseException as problem:
                result.append(problem)

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        until(lambda: len(rb._local.engine.control.waiting()) == 1)
        here.close()
        thread.join(10)
        assert isinstance(result[0], BufferClosed)
        assert rb.stats()["waiting_consumers"] + rb.stats()["waiting_producers"] == 0


# ---------------------------------------------------------------------- states and files
def test_a_saved_state_is_nobodys_memory() -> None:
    rb = ReplayBuffer(10, batch_size=4, prefetch=2, seed=0)
    rb.extend(numbers(10))
    rb.sample()
    saved = rb.state_dict()
    kept = copy.deepcopy(saved)

    def spoil(buffer: ReplayBuffer) -> list[int]:
        batch = buffer.sample()
        found: list[int] = batch["x"].tolist()
        for key in ("x", "index", "generation"):
            batch[key].fill_(-1)
        return found

    drawn = [spoil(rb)]
    for _ in range(2):
        other = ReplayBuffer(10, batch_size=4, prefetch=2)
        other.load_state_dict(saved)
        drawn.append(spoil(other))
    assert drawn[0] == drawn[1] == drawn[2]
    for mine, theirs in zip(saved["ahead"], kept["ahead"], strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in ("rows", "slots", "numbers"))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: d.update(generator=torch.zeros(3, dtype=torch.uint8)),
        lambda d: d.pop("generator"),
        lambda d: d.update(slots=d["slots"] - 1),
        lambda d: d.update(slots=d["slots"] * 0),
        lambda d: d.update(slots=d["slots"].int()),
        lambda d: d.update(slots=None),
        lambda d: d.pop("state"),
        lambda d: d["state"].update(live=100),
        lambda d: d["state"].update(live=-1),
        lambda d: d["state"].update(head="x"),
        lambda d: d["state"].update(epoch_size=100),
        lambda d: d.update(ahead=[1]),
        lambda d: d.pop("ahead"),
    ],
)
def test_a_state_that_cannot_be_is_refused_before_anything_changes(spoil: Any) -> None:
    """ckpt-3: also where it comes as a dict, without a checksum."""
    rb, other = ReplayBuffer(10, batch_size=4, prefetch=1), ReplayBuffer(10, batch_size=4, prefetch=1)
    rb.extend(numbers(10))
    rb.sample()
    other.extend(numbers(3, 50))
    saved = rb.state_dict()
    spoil(saved)
    with pytest.raises(CheckpointError):
        other.load_state_dict(saved)
    assert other[:]["x"].tolist() == [50, 51, 52]
    assert other.write_count == 3


# ---------------------------------------------------------------------- Ctrl-C
class Interrupt(Exception):
    pass


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 64, 90])
def test_an_update_that_is_interrupted_is_finished_by_the_next(shared: bool, rows: int) -> None:
    with ReplayBuffer(100, shared=shared, batch_size=8) as rb:
        rb.extend({"a": torch.zeros(100, 40), "b": torch.zeros(100, 40)})
        stored = rb._local.engine.rows
        assert stored is not None

        def interrupt(step: str) -> None:
            stored.hook = None
            raise Interrupt

        stored.hook = interrupt
        ones = torch.ones(rows, 40)
        with pytest.raises(Interrupt):
            rb.update(torch.arange(rows), {"a": ones, "b": ones})
        found = rb.sample(50)
        assert rb._local.engine.control.peek()[REWRITES] % 2 == 0
        assert torch.equal(found["a"], found["b"])
        done = min(rows, 64)
        assert rb[:]["a"][:, 0].tolist() == [1.0] * done + [0.0] * (100 - done)


def test_an_interrupted_wait_keeps_no_other_waiting() -> None:
    """Of threads that are woken one goes after the other: whoever is interrupted while it goes must let the next."""
    rb = BlockingReplayBuffer(4, batch_size=4)
    turnstile = rb._local.engine.memory.turnstile

    class Interrupting:
        def __getattr__(self, name: str) -> Any:
            return getattr(turnstile, name)

        def acquire(self, timeout: float) -> bool:
            turnstile.acquire(timeout=timeout)
            raise Interrupt

    rb._local.engine.memory.turnstile = Interrupting()
    with pytest.raises(Interrupt):
        rb.sample(wait=True, timeout=1)
    rb._local.engine.memory.turnstile = turnstile
    free: list[bool] = []
    thread = threading.Thread(target=lambda: free.append(turnstile.acquire(blocking=False)))
    thread.start()
    thread.join()
    assert free == [True]


# ---------------------------------------------------------------------- looking at a pool
def _churn(handle: Any, stop: Any) -> None:
    rb = ReplayBuffer.attach(handle)
    first = 10_000
    while not stop.is_set():
        rb.sample(400)
        rb.extend(numbers(400, first))
        first += 400


def test_a_look_at_a_pool_names_no_item_twice() -> None:
    """Items change places when others leave: an item must not be seen at both."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    with ReplayBuffer(2000, consume_after_n_samples=1, shared=True) as rb:
        rb.extend(numbers(1800))
        process = context.Process(target=_churn, args=(rb.handle(), stop))
        process.start()
        try:
            until(lambda: rb.write_count > 1800)
            for _ in range(2000):
                found = rb[:]["x"]
                assert len(found.unique()) == len(found)
        finally:
            stop.set()
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()


# ---------------------------------------------------------------------- ensembles
def test_samplers_that_do_not_go_together_take_nothing() -> None:
    items = {"x": torch.arange(20), "next": {"reward": torch.ones(20, 1), "done": torch.zeros(20, 1).bool()}}
    plain = ReplayBuffer(20, sampler=ConsumingSampler(1))
    steps = ReplayBuffer(20, sampler=NStep(2, 0.9), num_envs=1)
    for member in (plain, steps):
        member.extend(items)
    both = ReplayBufferEnsemble(plain, steps, batch_size=8, seed=0)
    with pytest.raises(SchemaMismatch, match="does not add"):
        both.sample()
    assert len(plain) == 20
    assert both.stats()["samples_returned"] == 0


def test_what_an_ensemble_explains() -> None:
    both = ReplayBufferEnsemble(ReplayBuffer(4), ReplayBuffer(4), batch_size=100)
    assert both.explain("extend").splitlines() == ["member 0: extend(1) can proceed", "member 1: extend(1) can proceed"]
    with pytest.raises(InvalidArgument, match="devices"):
        ReplayBufferEnsemble(ReplayBuffer(4, device="cpu"), ReplayBuffer(4))


# ---------------------------------------------------------------------- arguments
@pytest.mark.parametrize("bad", ["a", None, {}, [None], 1j, torch.tensor(1j), np.array([1j]), object()])
def test_what_is_no_priority_is_refused(bad: Any) -> None:
    rb = ReplayBuffer(10, sampler=PrioritizedSampler())
    rb.extend(numbers(10))
    with pytest.raises(InvalidType):
        rb.update_priority(torch.tensor([1, 2]), bad)


@pytest.mark.parametrize("small", [1e-50, [1e-50, 1e-50], np.full(2, 1e-50), torch.full((2,), 1e-50).double()])
def test_priorities_are_numbers_of_64_bits(small: Any) -> None:
    rb = ReplayBuffer(2, sampler=PrioritizedSampler(alpha=1, eps=0), batch_size=2)
    rb.extend(numbers(2))
    small = small if not isinstance(small, torch.Tensor) else torch.full((2,), 1e-50, dtype=torch.float64)
    assert rb.update_priority([0, 1], small) == 2
    assert rb.sample()["priority_weight"].tolist() == [1, 1]
    rb.update_priority([0, 1], 1e39)


@pytest.mark.parametrize("bad", ["a", None, {}, 2**70, [2**70], {"index": [1]}])
def test_what_is_no_index_is_refused(bad: Any) -> None:
    rb = ReplayBuffer(10, sampler=PrioritizedSampler())
    rb.extend(numbers(10))
    for call in (lambda: rb.update_priority(bad, 1.0), lambda: rb.update(bad, {"x": torch.tensor([1])})):
        with pytest.raises(InvalidType):
            call()
    if not isinstance(bad, int):
        with pytest.raises(InvalidType):
            rb[bad]


def test_an_empty_list_is_an_index() -> None:
    rb = ReplayBuffer(10, sampler=PrioritizedSampler())
    rb.extend(numbers(10))
    assert len(rb[[]]) == 0
    assert rb.update_priority([], []) == 0
    assert rb.update([], {"x": torch.empty(0, dtype=torch.int64)}) == 0


def test_an_update_takes_the_arrays_that_a_write_takes() -> None:
    """Backwards, of the other byte order, read-only: as `extend`."""
    rb = ReplayBuffer(4)
    rb.extend({"x": torch.zeros(4)})
    still = np.full(2, 7, np.float32)
    still.setflags(write=False)
    for values in (np.array([2, 1], np.float32)[::-1], np.array([3, 4], ">f4"), still, [5.0, 6.0]):
        assert rb.update([0, 1], {"x": values}) == 2
        assert rb[[0, 1]]["x"].tolist() == [float(v) for v in values]
    with pytest.raises(MillpondError):
        rb.update([0, 1], {"x": "ab"})


def test_a_conjugate_is_written_as_what_it_says() -> None:
    value = torch.tensor([1 + 2j, 3 - 4j]).conj()
    rb = ReplayBuffer(4, schema=Schema({"z": (torch.complex64, (2,))}))
    rb.add({"z": value})
    rb.extend({"z": value[None]})
    assert rb[:]["z"].tolist() == [[1 - 2j, 3 + 4j]] * 2


@pytest.mark.parametrize("more", [{"device": "nowhere"}, {"device": "meta"}, {"seed": 2**64}, {"seed": -(2**64)}])
def test_what_no_batch_could_be_drawn_with_is_refused_at_once(more: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        ReplayBuffer(10, **more)


def test_sizes_are_refused_by_their_own_names() -> None:
    rb = ReplayBuffer(10, flow=Flow(min_size=1))
    with pytest.raises(InvalidArgument, match="num_items"):
        rb.wait_until_writable(0)
    with pytest.raises(InvalidArgument, match="n is"):
        rb.explain("extend", 0)
    with pytest.raises(DeadlineExceeded):
        rb.sample(1, wait=True, timeout=0)


# ---------------------------------------------------------------------- the end
@pytest.mark.parametrize("shared", [False, True])
def test_a_buffer_that_nobody_closed_goes_with_its_memory(shared: bool) -> None:
    """mem-1: also the memory of whole buffers."""
    rb = ReplayBuffer(10, shared=shared, batch_size=2, prefetch=1, sampler=PrioritizedSampler())
    rb.extend(numbers(10))
    rb.sample()
    gone, path = weakref.ref(rb), rb._local.engine.memory.path
    del rb
    gc.collect()
    assert gone() is None
    assert path is None or not path.exists()


@pytest.mark.parametrize("name", ["index", "generation", ("index", "inner")])
def test_a_field_that_a_batch_would_hide_is_refused(name: Any) -> None:
    rb = ReplayBuffer(4, batch_size=2)
    with pytest.raises(SchemaMismatch, match="of its own|its own"):
        rb.extend({name: torch.arange(4), "x": torch.arange(4)})
    assert rb.schema is None
    rb.extend({"x": torch.arange(4), "inner": {"index": torch.arange(4)}})


def test_what_holds_no_numbers_binds_nothing() -> None:
    rb = ReplayBuffer(4)
    with pytest.raises(InvalidType, match="meta"):
        rb.extend({"x": torch.ones(4, device="meta")})
    assert rb.schema is None


@pytest.mark.parametrize("admission", ["block", "drop_newest", "raise"])
@pytest.mark.parametrize("deliveries", [1, 2])
def test_a_ratio_below_what_frees_an_item_is_refused_at_once(admission: Any, deliveries: int) -> None:
    """flow-7: producers would wait for samples that the ratio forbids."""
    flow = Flow(samples_per_insert=0.5, admission=admission)
    with pytest.raises(Unsatisfiable, match="fills up"):
        ReplayBuffer(10, flow=flow, consume_after_n_samples=deliveries)
    ReplayBuffer(10, flow=Flow(samples_per_insert=0.5), consume_after_n_samples=deliveries)
    with pytest.raises(Unsatisfiable, match="never be paid"):
        ReplayBuffer(10, flow=Flow(samples_per_insert=4, max_debt=100), consume_after_n_samples=deliveries)


def test_an_ensembles_bad_arguments() -> None:
    members = [ReplayBuffer(10, sampler=PrioritizedSampler()) for _ in range(2)]
    for member in members:
        member.extend(numbers(10))
    with pytest.raises(InvalidType):
        ReplayBufferEnsemble(*members, weights=["a", 1])  # type: ignore[list-item]
    both = ReplayBufferEnsemble(*members, weights=[1e308, 1e308], batch_size=64, seed=0)
    assert set(both.sample()["buffer_id"].tolist()) == {0, 1}
    for bad in ("a", None, {}):
        with pytest.raises(InvalidType):
            both.update_priority(both.sample(), bad)
    with pytest.raises(InvalidType):
        both.update_priority(torch.tensor([1]), 1.0)  # type: ignore[arg-type]


def test_a_closed_buffer_says_so_when_it_is_loaded() -> None:
    rb = ReplayBuffer(4)
    rb.extend(numbers(4))
    saved = rb.state_dict()
    rb.close()
    with pytest.raises(BufferClosed):
        rb.load_state_dict(saved)


@pytest.mark.parametrize("consume", [None, 1])
@pytest.mark.parametrize("sizes", [[8, 4, 4], [4, 8, 3], [7], [8, 20]])
def test_an_epoch_holds_each_item_once_whatever_sizes_are_asked_for(consume: int | None, sizes: list[int]) -> None:
    """What was drawn ahead in another size was taken from the epoch, and belongs to it."""
    sampler = SamplerWithoutReplacement()
    rb = ReplayBuffer(40, sampler=sampler, prefetch=2, seed=0, consume_after_n_samples=consume)
    for epoch in range(3):
        if consume or not epoch:
            rb.extend(numbers(40))
        got: list[int] = []
        while len(got) < 40:
            size = sizes[len(got) % len(sizes)]
            part = rb.sample(min(size, 40 - len(got)) if consume else size)
            got += part["x"].tolist()
        assert sorted(got) == list(range(40))
    stats = rb.stats()
    assert (stats["samples_returned"], stats["reserved"], stats["prefetched"]) == (120, 0, 0)


@pytest.mark.parametrize("receipt", [(64, 1), (-1, 1), (0, -1), (0, 2**64)])
def test_a_receipt_that_cannot_be_is_refused_before_anything_is_evicted(receipt: tuple[int, int]) -> None:
    rb = ReplayBuffer(4)
    rb.extend(numbers(4))
    with pytest.raises(InvalidArgument):
        rb.extend(numbers(2, 50), receipt=receipt)
    assert rb[:]["x"].tolist() == [0, 1, 2, 3]


def test_a_construction_that_fails_leaves_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(shared_root().glob("millpond-*"))
    monkeypatch.setenv("MILLPOND_TREE", "oak")
    with pytest.raises(InvalidArgument, match="MILLPOND_TREE"):
        ReplayBuffer(10, sampler=PrioritizedSampler(), shared=True)
    assert set(shared_root().glob("millpond-*")) == before


class MidRecovery(Generator):
    """When the first numbers are drawn somebody else begins to mend the tree, which is empty for a moment."""

    def __init__(self, rb: ReplayBuffer) -> None:
        super().__init__(rb._local.engine.random.torch)
        self.engine, self.calls, self.began = rb._local.engine, 0, threading.Event()
        self.other = threading.Thread(target=self.mend)

    def mend(self) -> None:
        priorities = self.engine.priorities
        assert priorities is not None
        try:
            self.engine.load()
            before = priorities.tree.leaves.copy()
            for leaves in (0.0, before):
                priorities.tree.leaves[:] = leaves
                priorities.tree.rebuild()
                self.began.set()
                time.sleep(0.1)
        finally:
            self.engine.control.mutex.unlock()

    def uniform(self, n: int) -> Any:
        self.calls += 1
        if self.calls == 1:
            self.other.start()
            assert self.began.wait(10)
        return super().uniform(n)


@pytest.mark.parametrize("stratified", [True, False])
def test_a_tree_that_is_mended_while_somebody_draws(stratified: bool) -> None:
    with ReplayBuffer(10, sampler=PrioritizedSampler(stratified=stratified)) as rb:
        rb.extend(numbers(5))
        random = rb._local.engine.random = MidRecovery(rb)
        assert len(rb.sample(4)) == 4
        assert random.calls >= 2
        random.other.join()


def test_a_look_at_a_buffer_that_others_empty_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(editing, "TRIES", 0)  # others were faster several times
    with ReplayBuffer(10) as rb:
        rb.extend(numbers(5))
        control = rb._local.engine.control
        before = control.peek()
        rb.empty()
        monkeypatch.setattr(control, "peek", lambda: list(before))
        with pytest.raises(NotReady):
            rb.peek(2)
        assert not control.mutex.held()


def test_moved_to_shared_memory_inside_unlimited() -> None:
    with ReplayBuffer(10, flow=Flow(samples_per_insert=1.0)) as rb:
        with rb.unlimited():
            rb.extend(numbers(5))
            rb.share()
            rb.sample(3)
        assert rb.stats()["samples_returned"] == 3
        with pytest.raises(NotReady):
            rb.sample(1)


def test_closed_inside_unlimited() -> None:
    rb = ReplayBuffer(10)
    with rb.unlimited():
        rb.close()


class Confused(RandomSampler):
    """Fails over what somebody else changes while it looks."""

    def __init__(self, others: Any) -> None:
        self.others, self.failures = others, 0

    def draw(self, items: Any, n: int, random: Any) -> Any:
        if self.failures < 2:
            self.failures += 1
            self.others()
            raise ValueError("negative dimensions are not allowed")
        return super().draw(items, n, random)


def test_a_draw_that_fails_over_what_others_change_is_made_again() -> None:
    with ReplayBuffer(50, sampler=Confused(lambda: rb.extend(numbers(3)))) as rb:
        rb.extend(numbers(5))
        assert len(rb.sample(4)) == 4


def test_a_draw_that_fails_by_itself_is_an_error() -> None:
    with ReplayBuffer(50, sampler=Confused(lambda: None)) as rb:
        rb.extend(numbers(5))
        with pytest.raises(ValueError, match="negative"):
            rb.sample(4)
        assert not rb._local.engine.control.mutex.held()
