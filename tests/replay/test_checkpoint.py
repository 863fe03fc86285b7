"""Saving and restoring: bit for bit, whole or not at all, and never the wrong thing."""

from __future__ import annotations

import itertools
import multiprocessing as mp
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from millpond import Flow, ReplayBuffer
from millpond.core.errors import CheckpointError, InvalidArgument
from millpond.replay import (
    ConsumingSampler,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    container,
)

FIXTURES = Path(__file__).parent / "fixtures"
SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": RandomSampler,
    "epochs": SamplerWithoutReplacement,
    "fifo": lambda: ConsumingSampler(2),
    "prioritized": PrioritizedSampler,
    "slices": lambda: SliceSampler(slice_len=2),
    "nstep": lambda: NStep(3, 0.9, base=PrioritizedSampler()),
}


def items(n: int, start: int) -> dict[str, Any]:
    x = torch.arange(start, start + n)
    reward = (x % 7).float()[:, None]
    return {"x": x, "next": {"reward": reward, "done": (x % 5 == 4)[:, None]}}


def buffer(name: str, consume: int | None = None, prefetch: int = 0, **more: Any) -> ReplayBuffer:
    flow = Flow(min_size=4, samples_per_insert=3.0)
    return ReplayBuffer(
        32,
        sampler=SAMPLERS[name](),
        batch_size=4,
        consume_after_n_samples=consume,
        prefetch=prefetch,
        flow=flow,
        seed=2,
        num_envs=1,
        **more,
    )


def go_on(rb: ReplayBuffer, begin: int, steps: int) -> list[Any]:
    batches = []
    for i in range(begin, begin + steps):
        rb.extend(items(5, 5 * i))
        if rb.can_sample():
            batch = rb.sample()
            batches.append(batch)
            if rb._local.engine.priorities is not None:
                rb.update_priority(batch, batch["x"].float())
    return batches


def variants() -> list[Any]:
    found = []
    for name, consume, prefetch in itertools.product(SAMPLERS, (None, 1, 2), (0, 2)):
        if name != "fifo" or consume is None:
            found.append(pytest.param(name, consume, prefetch, id=f"{name}, consume {consume}, prefetch {prefetch}"))
    return found


@pytest.mark.parametrize(("name", "consume", "prefetch"), variants())
def test_the_resumed_buffer_goes_on_bit_for_bit(name: str, consume: int | None, prefetch: int, tmp_path: Path) -> None:
    """ckpt-1, for every sampler: contents, counters, priorities, batches drawn ahead, generator."""
    rb = buffer(name, consume, prefetch)
    go_on(rb, 0, 13)
    rb.dumps(tmp_path / "saved")
    state = rb.state_dict()
    resumed, from_dict = buffer(name, consume, prefetch), buffer(name, consume, prefetch, shared=True)
    resumed.loads(tmp_path / "saved")
    from_dict.load_state_dict(state)
    assert resumed.stats() == from_dict.stats() == rb.stats()
    expected = go_on(rb, 13, 12)
    assert len(expected) > 6
    for other in (resumed, from_dict):
        for one, two in zip(expected, go_on(other, 13, 12), strict=True):
            assert (one == two).all()
        assert other.stats() == rb.stats()
        assert (other[:] == rb[:]).all()
        other.close()


def test_limits_come_from_the_code_that_runs() -> None:
    rb = buffer("random")
    for i in range(10):
        rb.extend(items(5, 5 * i))
        while rb.can_sample():
            rb.sample()
    other = ReplayBuffer(32, batch_size=6, flow=Flow(samples_per_insert=1.0), seed=0)
    other.load_state_dict(rb.state_dict())
    assert other.flow.samples_per_insert == 1.0
    assert rb.stats()["samples_returned"] + 6 > other.write_count
    assert not other.can_sample()
    assert other.write_count == rb.write_count


def test_a_load_replaces_what_was_there_and_drops_what_was_drawn_ahead() -> None:
    rb, other = buffer("random", prefetch=2), buffer("random", prefetch=2)
    go_on(rb, 0, 6)
    go_on(other, 50, 12)
    other.load_state_dict(rb.state_dict())
    assert (other[:] == rb[:]).all()
    assert other.stats() == rb.stats()
    assert [b.numbers.tolist() for b in other._local.ahead] == [b.numbers.tolist() for b in rb._local.ahead]


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (lambda: ReplayBuffer(33), "capacity of 32 items, this buffer 33"),
        (lambda: ReplayBuffer(32, sampler=PrioritizedSampler()), "RandomSampler.*PrioritizedSampler"),
        (lambda: ReplayBuffer(32, consume_after_n_samples=1), "consumption"),
    ],
)
def test_a_checkpoint_of_another_buffer_is_refused(other: Any, says: str) -> None:
    """ckpt-3"""
    rb, target = buffer("random"), other()
    go_on(rb, 0, 3)
    with pytest.raises(CheckpointError, match=says):
        target.load_state_dict(rb.state_dict())
    assert target.stats()["write_count"] == 0
    assert target.schema is None


def test_a_checkpoint_of_another_schema_is_refused() -> None:
    """ckpt-3"""
    rb, target = buffer("random"), buffer("random")
    go_on(rb, 0, 3)
    target.extend({"x": torch.zeros(3)})
    with pytest.raises(CheckpointError, match=r"x: expected float32.*int64.*next/reward is not known"):
        target.load_state_dict(rb.state_dict())
    assert target.write_count == 3


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    """ckpt-3: cut off anywhere, any byte flipped."""
    rb, target = buffer("prioritized"), buffer("prioritized")
    go_on(rb, 0, 5)
    rb.dumps(tmp_path / "good")
    good = (tmp_path / "good").read_bytes()
    broken = tmp_path / "broken"
    step = max(1, len(good) // 150)
    for at in [*range(60), *range(60, len(good), step)]:
        broken.write_bytes(good[:at])
        with pytest.raises(CheckpointError):
            target.loads(broken)
        flipped = bytearray(good)
        flipped[at] ^= 0x40
        broken.write_bytes(flipped)
        with pytest.raises(CheckpointError):
            target.loads(broken)
    broken.write_bytes(good + b"x")
    with pytest.raises(CheckpointError, match="too many"):
        target.loads(broken)
    with pytest.raises(CheckpointError, match="cannot be read"):
        target.loads(tmp_path / "nothing")
    assert target.write_count == 0
    with pytest.raises(InvalidArgument, match="no directory"):
        rb.dumps(tmp_path / "nowhere" / "file")


def save_for_ever(path: Path, pipe: Any) -> None:
    rb = ReplayBuffer(5000)
    for i in itertools.count():
        rb.extend({"x": torch.full((500, 20), i)})
        rb.dumps(path)
        if i == 2:
            pipe.send("saving")


def test_a_kill_while_saving_leaves_the_last_good_one(tmp_path: Path) -> None:
    """ckpt-2"""
    context = mp.get_context("fork")
    for attempt in range(6):
        path = tmp_path / "saved"
        mine, theirs = context.Pipe()
        process = context.Process(target=save_for_ever, args=(path, theirs), daemon=True)
        process.start()
        mine.recv()
        time.sleep(0.003 * attempt)  # another instant each time
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        process.close()
        mine.close()
        theirs.close()
        rb = ReplayBuffer(5000)
        rb.loads(path)
        rows = rb[:]["x"]
        assert rb.write_count % 500 == 0
        assert (rows.view(-1, 500, 20) == rows[::500, :1, None]).all()


def test_what_killed_saves_left_the_next_one_removes(tmp_path: Path) -> None:
    context = mp.get_context("fork")
    rb = ReplayBuffer(4)
    rb.extend({"x": torch.arange(4)})
    with container.replacing(tmp_path / "living") as file:  # a save that goes on meanwhile
        for _ in range(2):
            process = context.Process(target=die_while_saving, args=(tmp_path / "other",), daemon=True)
            process.start()
            process.join()
            process.close()
        (tmp_path / ".notes.making.12").write_text("a file of somebody's")
        assert len(list(tmp_path.glob(".other.making.*"))) >= 1
        rb.dumps(tmp_path / "saved")
        assert not list(tmp_path.glob(".other.making.*"))
        file.write(b"MILLPOND and all of it")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".notes.making.12", "living", "saved"]
    assert (tmp_path / "living").read_bytes() == b"MILLPOND and all of it"


def die_while_saving(path: Path) -> None:
    with container.replacing(path) as file:
        file.write(b"MILLPOND and half of it")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)


KEPT = {name: (name, None) for name in SAMPLERS} | {"pool": ("random", 2), "prioritized-consuming": ("prioritized", 2)}


@pytest.mark.parametrize("kind", KEPT)
def test_files_of_every_version_load(kind: str) -> None:
    """One fixture of each sampler for each version of what is saved, with a batch drawn ahead, stays here.
    ``python tests/replay/test_checkpoint.py`` writes those of today that are missing."""
    name, consume = KEPT[kind]
    assert (FIXTURES / f"{kind}-v1.millpond").exists()
    for path in sorted(FIXTURES.glob(f"{kind}-v*.millpond")):
        rb = buffer(name, consume, prefetch=1)
        rb.loads(path)
        assert rb.write_count == 65
        x = rb[:]["x"].tolist()
        assert (
            x == list(range(33, 65)) if consume is None and kind != "fifo" else len(set(x) & set(range(65))) == len(x)
        )
        assert rb.stats()["prefetched"] == 1
        assert rb.sample().batch_size == (4,)
        go_on(rb, 13, 12)
        assert rb.write_count == 125


if __name__ == "__main__":
    FIXTURES.mkdir(exist_ok=True)
    for kind, (name, consume) in KEPT.items():
        for version in ("v1", "v1.1") if kind == "prioritized" else ("v1",):  # the first has leaves, no priorities
            if not (FIXTURES / f"{kind}-{version}.millpond").exists():
                made = buffer(name, consume, prefetch=1)
                go_on(made, 0, 13)
                made.dumps(FIXTURES / f"{kind}-{version}.millpond")
