"""The same methods with the same meaning wherever the buffer is: here, on this host, behind Gloo, behind Ray."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from remote_children import batch, distance, episodes, ids_of, wait_for
from tensordict import TensorDict

from millpond import BlockingReplayBuffer, Flow, RateLimitedReplayBuffer, ReplayBuffer
from millpond.core.errors import (
    BufferFull,
    Cancelled,
    CheckpointError,
    DeadlineExceeded,
    InvalidArgument,
    InvalidType,
    NonFinite,
    NotReady,
    SchemaMismatch,
)
from millpond.core.schema import Schema
from millpond.replay import (
    ConsumingSampler,
    HindsightSampler,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
)

KEYS = {
    "capacity", "size", "storage_size", "nbytes", "write_count", "sample_calls", "samples_returned", "prefetched",
    "reserved", "overwritten", "consumed", "dropped", "stale_updates", "producer_blocks", "consumer_blocks",
    "waiting_producers", "waiting_consumers", "high_watermark", "low_watermark", "under_pressure", "lock", "recoveries",
    "discarded_writes",
}  # fmt: skip


def test_items_come_back_as_they_were_written(make):
    buffer = make(100, batch_size=16)
    assert buffer.schema is None
    slots = buffer.extend(TensorDict(batch(40), [40]))
    assert slots.tolist() == list(range(40))
    assert buffer.add({key: _first(value) for key, value in batch(1, start=40).items()}) == 40
    assert (len(buffer), buffer.write_count, buffer.storage_size, buffer.capacity) == (41, 41, 41, 100)
    sample = buffer.sample()
    assert sample.batch_size == (16,)
    assert ids_of(sample) == sample["index"].tolist() == sample["generation"].tolist()
    data, info = buffer.sample(3, return_info=True)
    assert set(info.keys()) == {"index", "generation"}
    assert not {"index", "generation"} & set(data.keys())
    assert ids_of(data) == info["index"].tolist()
    sample["observation"].zero_()  # the batch is the caller's
    assert ids_of(buffer[:]) == list(range(41))
    assert len(ids_of(buffer.peek(5))) == 5
    assert buffer.stats()["sample_calls"] == 2
    assert set(buffer.stats()) == KEYS


def _first(value: Any) -> Any:
    return {key: inner[0] for key, inner in value.items()} if isinstance(value, dict) else value[0]


def test_items_by_age(make):
    buffer = make(10)
    buffer.extend(batch(8))
    buffer.extend(batch(6, start=8))
    assert int(buffer[0]["action"][0]) == 4
    assert int(buffer[-1]["action"][0]) == 13
    assert ids_of(buffer[1:8:3]) == [5, 8, 11]
    assert ids_of(buffer[torch.tensor([3, 0])]) == [7, 4]
    assert ids_of(buffer[np.arange(10) % 5 == 1]) == [5, 10]
    with pytest.raises(IndexError):
        buffer[10]
    with pytest.raises(InvalidType):
        buffer[[0.5]]


def test_every_type_and_plain_tensors(make):
    """type-3 over the wire: bit for bit, also types that NumPy lacks, zero-size and scalar fields."""
    torch.manual_seed(1)
    items = {
        str(dtype): torch.randint(0, 255, (7, 3, dtype.itemsize), dtype=torch.uint8).view(dtype).reshape(7, 3)
        for dtype in (torch.int8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
    }
    items |= {"flag": torch.arange(7) % 2 == 0, "nothing": torch.zeros(7, 0), "image": torch.arange(84).view(7, 2, 6)}
    buffer = make(50)
    buffer.extend(items)
    found = buffer[:]
    for name, value in items.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name].contiguous().view(torch.uint8), value.contiguous().view(torch.uint8)), name


def test_a_plain_tensor(make):
    buffer = make(10, batch_size=2)
    buffer.extend(torch.arange(12.0).view(4, 3))
    data, info = buffer.sample(return_info=True)
    assert torch.equal(data[:, 0], info["index"] * 3.0)
    assert torch.equal(buffer[:], torch.arange(12.0).view(4, 3))


@pytest.mark.parametrize("bound", ["given", "written"])
def test_what_does_not_fit_is_refused_by_name(make, bound):
    """rem-1: never cast, repeated, dropped or filled; the same answer everywhere; nothing is written."""
    buffer = make(100, schema=Schema.from_example(batch(1)) if bound == "given" else None)
    if bound == "written":
        buffer.extend(batch(8))
    before = buffer.write_count
    wrong = {
        "missing": (lambda b: b.pop("action"), "action"),
        "unknown": (lambda b: b.update(extra=torch.zeros(8)), "extra"),
        "float for int": (lambda b: b.update(action=b["action"].float()), "action"),
        "float64 tensor for float32": (lambda b: b.update(observation=b["observation"].double()), "observation"),
        "would broadcast": (lambda b: b.update(observation=torch.zeros(8, 1)), "observation"),
        "other length": (lambda b: b.update(observation=torch.zeros(1, 3)), "observation"),
        "third field": (lambda b: b["next"].update(done=torch.zeros(8, 1)), "next/done"),  # rem-7
    }
    for spoil, field in wrong.values():
        bad = batch(8)
        spoil(bad)
        with pytest.raises(SchemaMismatch, match=field):
            buffer.extend(bad)
    with pytest.raises(InvalidType, match="observation"):  # type-2
        buffer.extend(batch(8) | {"observation": np.array([object()] * 8)})
    assert buffer.write_count == before
    buffer.extend(batch(1, start=8))
    assert buffer.write_count == before + 1


def test_arguments_are_judged_first(make):
    """flow-6: at once, and nothing changes."""
    buffer = make(10, batch_size=2)
    buffer.extend(batch(4))
    nan = float("nan")
    for timeout, error in ((-1, InvalidArgument), (nan, InvalidArgument), (True, InvalidType), ("1", InvalidType)):
        with pytest.raises(error):
            buffer.extend(batch(1), timeout=timeout)
        with pytest.raises(error):
            buffer.sample(wait=True, timeout=timeout)
    with pytest.raises(InvalidType):
        buffer.sample(wait=True, cancel_event=1)
    for n, error in ((0, InvalidArgument), (2.0, InvalidType), (True, InvalidType)):
        with pytest.raises(error):
            buffer.sample(n)
    with pytest.raises(InvalidArgument, match="PrioritizedSampler"):
        buffer.extend(batch(2), priority=1.0)
    with pytest.raises(InvalidArgument, match="PrioritizedSampler"):
        buffer.update_priority(buffer.sample(), 1.0)
    with pytest.raises(InvalidArgument, match="64"):
        buffer.extend(batch(1), receipt=(64, 1))
    with pytest.raises(InvalidArgument):
        buffer.explain("write")
    assert buffer.write_count == 4


def test_no_batch_size(make):
    buffer = make(10)
    buffer.extend(batch(4))
    with pytest.raises(InvalidArgument, match="batch_size"):
        buffer.sample()


def test_not_ready_says_why(make):
    """flow-10: the unmet condition and the counters, at once, after a wait, and as an explanation."""
    buffer = make(10, batch_size=2, flow=Flow(min_size=5))
    buffer.extend(batch(3))
    assert not buffer.can_sample()
    for wait, error in ((False, NotReady), (True, DeadlineExceeded)):
        with pytest.raises(error, match="3 of 5 items"):
            buffer.sample(wait=wait, timeout=0)
    with pytest.raises(DeadlineExceeded, match="0.05 s.*3 of 5 items"):
        buffer.sample(wait=True, timeout=0.05)
    assert "3 of 5 items" in buffer.explain()
    assert buffer.wait_until_sampleable(timeout=0.05) is False
    stats = buffer.stats()
    assert (stats["consumer_blocks"], stats["waiting_consumers"]) == (1, 0)
    buffer.extend(batch(2, start=3))
    assert buffer.can_sample()
    assert buffer.wait_until_sampleable(timeout=0)
    assert len(ids_of(buffer.sample())) == 2
    assert "can proceed" in buffer.explain()


def test_a_full_buffer_blocks_drops_or_raises(make):
    """flow-2: nothing of a batch that does not fit; a cancelled write leaves everything as it was."""
    buffer = make(10, kind=BlockingReplayBuffer, batch_size=4)
    buffer.extend(batch(7))
    before = buffer.stats()
    with pytest.raises(DeadlineExceeded, match="extend"):
        buffer.extend(batch(4, start=7), timeout=0)
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(Cancelled):
        buffer.extend(batch(1, start=7), cancel_event=cancel)
    assert buffer.stats() == before
    assert buffer.wait_until_writable(3, timeout=0)
    assert not buffer.wait_until_writable(4, timeout=0)
    assert ids_of(buffer.sample()) == [0, 1, 2, 3]
    assert buffer.extend(batch(4, start=7), timeout=0).tolist() == [7, 8, 9, 0]


def test_drop_and_raise(make):
    buffer = make(6, flow=Flow(admission="drop_newest"), sampler=ConsumingSampler(1))
    buffer.extend(batch(4))
    assert buffer.extend(batch(3)).tolist() == []
    assert buffer.add(_first_of(batch(1, start=4))) == 4
    assert buffer.stats()["dropped"] == 3


def test_raise(make):
    buffer = make(6, flow=Flow(admission="raise"), sampler=ConsumingSampler(1))
    buffer.extend(batch(4))
    with pytest.raises(BufferFull):
        buffer.extend(batch(3))
    assert buffer.write_count == 4


def _first_of(items: Any) -> Any:
    return {key: _first(value) for key, value in items.items()}


def test_the_ratio_holds(make):
    buffer = make(100, kind=RateLimitedReplayBuffer, samples_per_insert=2, min_size=10, max_debt=40, batch_size=10)
    buffer.extend(batch(15))
    assert buffer.can_sample(10)
    assert not buffer.can_sample(11)
    buffer.sample()
    with pytest.raises(NotReady, match="samples_per_insert"):
        buffer.sample(1)
    buffer.extend(batch(15, start=15))
    with pytest.raises(DeadlineExceeded, match="max_debt"):
        buffer.extend(batch(6, start=30), timeout=0)
    with buffer.unlimited():
        buffer.extend(batch(6, start=30))
        buffer.sample(40)
        assert buffer.can_sample(40)
    assert buffer.can_sample(30)
    assert not buffer.can_sample(31)
    with pytest.raises(DeadlineExceeded, match="max_debt"):
        buffer.extend(batch(6, start=36), timeout=0)


def test_each_item_is_delivered_as_often_as_said(make):
    """flow-4: exactly k deliveries of each."""
    buffer = make(50, consume_after_n_samples=3, batch_size=5)
    buffer.extend(batch(20))
    seen = Counter()
    while buffer.can_sample(5):
        seen.update(ids_of(buffer.sample()))
    while len(buffer):
        seen.update(ids_of(buffer.sample(1)))
    assert seen == Counter(dict.fromkeys(range(20), 3))
    assert buffer.stats()["consumed"] == 20


def test_priorities(make):
    """prio-1, prio-6, rem-5: applied by sample or by slot; one for a slot rewritten since is dropped and counted."""
    buffer = make(4, sampler=PrioritizedSampler(alpha=1.0, beta=1.0, eps=0.0), batch_size=64, seed=0)
    buffer.extend(batch(4), priority=[0.0, 0.0, 0.0, 1.0])
    old = buffer.sample()
    assert set(ids_of(old)) == {3}
    assert old["priority_weight"].dtype == torch.float32
    assert buffer.update_priority([1, 3], torch.tensor([5.0, 0.0])) == 2
    assert set(ids_of(buffer.sample())) == {1}
    for bad in ([-1.0] * 64, [float("nan")] * 64, [1.0] * 63):
        with pytest.raises(InvalidArgument):
            buffer.update_priority(old, bad)
    with pytest.raises(InvalidType):
        buffer.update_priority(torch.tensor([0.5]), 1.0)
    with pytest.raises(InvalidArgument):
        buffer.update_priority([4], 1.0)
    buffer.extend(batch(3, start=4))
    assert buffer.update_priority(old, torch.full((64,), 9.0)) == 64  # slot 3 was not rewritten
    buffer.extend(batch(1, start=7), priority=0.0)
    assert buffer.update_priority(old, 1.0) == 0
    assert buffer.stats()["stale_updates"] == 64


SAMPLERS: dict[str, Any] = {
    "uniform": RandomSampler,
    "epochs": SamplerWithoutReplacement,
    "consuming": lambda: ConsumingSampler(2),
    "prioritized": PrioritizedSampler,
    "slices": lambda: SliceSampler(slice_len=4),
    "n-step": lambda: NStep(3, 0.9, base=PrioritizedSampler()),
    "hindsight": lambda: HindsightSampler(distance, base=NStep(2, 0.9)),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_draws_what_it_draws_in_process(make, name):
    """seed-1: the same seed and the same writes give the same batches to the last bit, whatever adds to them."""
    here = ReplayBuffer(60, sampler=SAMPLERS[name](), batch_size=8, seed=11)
    there = make(60, sampler=SAMPLERS[name](), batch_size=8, seed=11)
    for buffer in (here, there):
        buffer.extend(episodes(70)[:40])
        buffer.extend(episodes(70)[40:])
    for _ in range(4):
        mine, theirs = here.sample(), there.sample()
        assert set(mine.keys(True, True)) == set(theirs.keys(True, True))
        for key in mine.keys(True, True):
            assert torch.equal(mine[key], theirs[key]), key
        if "priority_weight" in mine:
            assert here.update_priority(mine, mine["step"] + 1.0) == there.update_priority(theirs, mine["step"] + 1.0)
    here.close()


def test_many_writes_count_on(make):
    """rem-6: the counters pass 2³¹ and 2³²."""
    buffer = make(7, seed=0)
    buffer.extend(batch(7))
    for start in (2**31 - 5, 2**32 - 5):
        state = buffer.state_dict()
        shift = start // 7 * 7 - state["state"]["writes"] // 7 * 7
        for word in ("head", "tail", "writes"):
            state["state"][word] += shift
        buffer.load_state_dict(state)
        before = buffer.write_count
        for i in range(20):
            buffer.extend(batch(1, start=i))
        assert before < start + 5 < buffer.write_count == before + 20
        assert ids_of(buffer[:]) == list(range(13, 20))
        sample = buffer.sample(50)
        assert set(sample["generation"].tolist()) <= set(range(before + 13, before + 20))
        same = {"action": sample["action"]}
        assert buffer.update(sample, same) == 50
        sample["generation"] -= 2**31  # an item of the same slot, if only the lower half is looked at
        assert buffer.update(sample, same) == 0


def test_fields_are_written_back(make):
    buffer = make(8, batch_size=4, sampler=SamplerWithoutReplacement())
    buffer.extend(batch(8))
    sample = buffer.sample()
    new = {"next": {"reward": torch.full((4, 1), -1.0, dtype=torch.float64)}}
    assert buffer.update(sample, new) == 4
    assert int((buffer[:]["next", "reward"] == -1).sum()) == 4
    with pytest.raises(SchemaMismatch):
        buffer.update(sample, {"next": {"reward": torch.zeros(4, 1)}})
    with pytest.raises(SchemaMismatch):
        buffer.update(sample, {"other": torch.zeros(4, 1)})


def test_an_epoch_ends(make):
    buffer = make(10, batch_size=4, sampler=SamplerWithoutReplacement())
    buffer.extend(batch(10))
    for _ in range(2):
        assert sorted(i for found in buffer for i in ids_of(found)) == list(range(10))


def test_batches_drawn_ahead(make):
    buffer = make(100, batch_size=4, prefetch=2, sampler=ConsumingSampler(1))
    buffer.extend(batch(20))
    got = [ids_of(buffer.sample()) for _ in range(5)]
    assert got == [list(range(i, i + 4)) for i in range(0, 20, 4)]
    stats = buffer.stats()
    assert (stats["samples_returned"], stats["reserved"], stats["prefetched"]) == (20, 0, 0)


def test_what_is_done_to_a_batch_is_done_where_it_is_sampled(make):
    buffer = make(10, batch_size=3, transform=doubled, contiguous=True)
    buffer.extend(batch(10))
    sample = buffer.sample()
    assert sample["observation"].is_contiguous()
    assert torch.equal(sample["observation"][:, 0], 2.0 * sample["action"][:, 0])


def doubled(found: TensorDict) -> TensorDict:
    return found.set("observation", found["observation"] * 2)


def test_a_sampled_batch_can_be_written(make):
    source = make(10, batch_size=4, sampler=PrioritizedSampler())
    source.extend(batch(10))
    sampled = source.sample()
    source.extend(sampled)
    source.add(sampled[0])
    assert source.write_count == 15
    with pytest.raises(SchemaMismatch, match="unknown: mine$|unknown: mine\\."):
        source.extend(sampled.set("mine", torch.zeros(4)))
    source.close()
    other = make(10)
    other.extend(sampled.exclude("mine"))
    assert other.schema == Schema.from_example(batch(1))


fails: list[BaseException] = []


def failing(found: TensorDict) -> TensorDict:
    found["action"] *= 2  # in place
    if fails:
        raise fails.pop()
    return found


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("sampler", [ConsumingSampler(1), SamplerWithoutReplacement()], ids=["consumed", "epochs"])
def test_a_batch_on_which_the_transform_fails_is_not_lost(make, sampler, prefetch):
    buffer = make(10, sampler=sampler, transform=failing, prefetch=prefetch, flow=Flow(samples_per_insert=1.0))
    buffer.extend(batch(10))
    seen = buffer.sample(2)["generation"].tolist()
    for n in (4, 4, 3):
        before = buffer.stats()
        fails.append(ValueError("no"))
        with pytest.raises(ValueError, match="no"):
            buffer.sample(n)
        after = buffer.stats()
        assert [after[figure] for figure in ("samples_returned", "sample_calls")] == [
            before[figure] for figure in ("samples_returned", "sample_calls")
        ]
    while len(seen) < 10:
        found = buffer.sample(2)
        assert torch.equal(found["action"], batch(10)["action"][found["generation"]] * 2)
        seen += found["generation"].tolist()
    assert sorted(seen) == list(range(10))
    with pytest.raises(NotReady):
        buffer.sample(1)


def test_a_batch_on_which_the_transform_fails_costs_no_ratio(make):
    buffer = make(10, transform=failing, flow=Flow(samples_per_insert=1.0))
    buffer.extend(batch(10))
    fails.append(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        buffer.sample(10)
    assert buffer.sample(10).batch_size == (10,)


def test_nothing_infinite(make):
    buffer = make(10, check_finite=True)
    bad = batch(3)
    bad["observation"][1, 2] = float("inf")
    with pytest.raises(NonFinite, match="observation.*item 1"):
        buffer.extend(bad)
    assert buffer.write_count == 0


def test_receipts(make):
    buffer = make(10)
    buffer.extend(batch(3), receipt=(5, 17))
    assert (buffer.receipt(5), buffer.receipt(6)) == (17, 0)


def test_a_checkpoint_goes_anywhere(make, tmp_path: Path):
    """ckpt-1, ckpt-3: what is saved in one place is the same in another; damage is refused before anything changes."""
    buffer = make(20, batch_size=4, sampler=PrioritizedSampler(), seed=3)
    buffer.extend(batch(15), priority=torch.arange(15.0))
    buffer.extend(batch(10, start=15))
    buffer.sample()
    file = tmp_path / "saved"
    buffer.dumps(file)
    here = ReplayBuffer(20, batch_size=4, sampler=PrioritizedSampler())
    here.loads(file)
    assert ids_of(here[:]) == list(range(5, 25))
    here.extend(batch(2, start=25))
    here.dumps(tmp_path / "longer")
    here.close()
    buffer.loads(tmp_path / "longer")
    assert ids_of(buffer[:]) == list(range(7, 27))
    assert buffer.write_count == 27
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(CheckpointError):
        buffer.loads(file)
    with pytest.raises(InvalidArgument, match="no directory"):
        buffer.dumps(tmp_path / "none" / "saved")
    assert ids_of(buffer[:]) == list(range(7, 27))


def test_the_resumed_run_is_the_uninterrupted_one(make, way, tmp_path: Path):
    """ckpt-1: the draws go on where they were."""
    buffer = make(50, batch_size=4, seed=7)
    buffer.extend(batch(30))
    buffer.sample()
    buffer.dumps(tmp_path / "saved")
    then = [ids_of(buffer.sample()) for _ in range(3)]
    buffer.loads(tmp_path / "saved")
    assert [ids_of(buffer.sample()) for _ in range(3)] == then


def test_empty(make):
    buffer = make(10, batch_size=1)
    buffer.extend(batch(5))
    buffer.empty()
    assert (len(buffer), buffer.write_count) == (0, 5)
    with pytest.raises(NotReady):
        buffer.sample()


def test_waits_end_when_they_can(make, way):
    """A consumer and a producer of one client free each other."""
    buffer = make(10, kind=BlockingReplayBuffer, batch_size=5)
    got: list[list[int]] = []

    def consume() -> None:
        got.extend(ids_of(buffer.sample(wait=True, timeout=30)) for _ in range(6))

    consumer = threading.Thread(target=consume)
    consumer.start()
    wait_for(lambda: buffer.stats()["waiting_consumers"] == 1, "the consumer")
    for i in range(3):
        buffer.extend(batch(10, start=10 * i), timeout=30)
    consumer.join(30)
    assert got == [list(range(i, i + 5)) for i in range(0, 30, 5)]
    stats = buffer.stats()
    assert stats["consumer_blocks"] >= 1
    assert stats["waiting_consumers"] == stats["waiting_producers"] == 0


def test_a_cancel_event_ends_a_wait(make):
    buffer = make(10, batch_size=5)
    cancel = threading.Event()
    threading.Timer(0.1, cancel.set).start()
    start = time.monotonic()
    with pytest.raises(Cancelled):
        buffer.sample(wait=True, cancel_event=cancel)
    assert time.monotonic() - start < 10
    assert buffer.stats()["waiting_consumers"] == 0
    buffer.extend(batch(5))
    assert buffer.stats()["samples_returned"] == 0


def walk(start: int, n: int) -> dict[str, Any]:
    """n steps without ids, whose rewards tell which they are."""
    reward = torch.arange(start, start + n, dtype=torch.float32)[:, None]
    return {"next": {"reward": reward, "done": torch.zeros(n, 1, dtype=torch.bool)}}


def test_rows_of_environments_in_turns_are_not_mixed(make):
    buffer = make(40, sampler=NStep(2, 1.0), num_envs=2, batch_size=64)
    for step in range(10):
        buffer.extend({**walk(0, 2), "step": torch.full((2,), step)})
    with pytest.raises(InvalidArgument, match="num_envs=2"):
        buffer.extend({**walk(0, 3), "step": torch.zeros(3, dtype=torch.int64)})
    sample = buffer.sample()
    steps, env = sample["steps_to_next_obs"], sample["generation"] % 2
    assert torch.equal(sample["next", "reward"], env[:, None].float() * steps)
    assert set(steps[:, 0].tolist()) == {1, 2}


@pytest.mark.filterwarnings("ignore:several threads")
def test_threads_that_write_in_turns_are_not_mixed(make):
    """Also where one thread of the owner serves them all."""
    buffer = make(100, sampler=NStep(2, 1.0), batch_size=400)
    with pytest.raises(InvalidArgument, match="num_envs"):
        buffer.extend(walk(0, 2))
    for turn in range(5):
        for start in (0, 1000):

            def write(start: int = start + 3 * turn) -> None:
                for step in range(3):
                    buffer.add({"next": {name: value[0] for name, value in walk(start + step, 1)["next"].items()}})

            if start:
                thread = threading.Thread(target=write)
                thread.start()
                thread.join()
            else:
                write()
    sample = buffer.sample()
    first = sample["generation"]
    own = first // 6 * 3 + first % 3 + (first % 6 >= 3) * 1000  # what the item's own reward is
    both = torch.where(first % 3 < 2, 2 * own + 1, own)  # a window ends where another writer came between
    assert torch.equal(sample["next", "reward"][:, 0], both.float())
