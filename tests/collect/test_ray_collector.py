"""Collection in real Ray actors. They take seconds to start, so each test sees several things."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from episode_worlds import Diary
from policies import Constant, Waver

from millpond.collect import MultiCollector, RayCollector
from millpond.core.errors import BufferClosed, InvalidArgument, InvalidType, WorkerFailed
from millpond.flow.limiter import Flow
from millpond.replay import ReplayBuffer
from millpond.weights import WeightBoard

PATIENCE_S = 180.0


def until(condition: Callable[[], Any], collector: RayCollector) -> None:
    """Wait for something that actors will do."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        collector.check()
        assert time.monotonic() < end, collector.stats()
        time.sleep(0.002)


def kill(collector: RayCollector, worker: int) -> None:
    os.kill(collector.stats()["workers"][worker]["pid"], signal.SIGKILL)


def no_frame_twice(items: Any) -> bool:
    ids = torch.stack([items["episode_id"].flatten(), items["step"].flatten()])
    return bool(ids.unique(dim=1).shape[1] == ids.shape[1])


def lives(items: Any) -> set[int]:
    return set(((items["episode_id"] >> 36) & 4095).flatten().tolist())


class DiesUnheard(Diary):
    """Its actor dies between a write and the answer that would tell of it, once."""

    def __init__(self, flag: str) -> None:
        super().__init__()
        path = Path(flag)
        if not path.exists():
            return
        from millpond.collect.actor import Granted

        def die(*_: Any, **__: Any) -> None:
            path.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

        Granted.commit = die  # type: ignore[method-assign]


@pytest.mark.timeout(400)  # actors are started four times, each of which imports for as long as the machine takes
def test_whatever_is_killed_frames_written_are_frames_collected(cluster: Any, tmp_path: Path) -> None:
    """Cases flow-11, unit-1, rem-8; all the counters of MultiCollector, under the same names."""
    flag, total = tmp_path / "flag", 10_003
    flag.touch()
    with ReplayBuffer(100_000, shared=True) as rb:
        collector = RayCollector(
            [lambda: DiesUnheard(str(flag)), Diary],
            num_workers=2,
            num_envs=2,
            frames_per_batch=20,
            total_frames=total,
            replay=rb,
        )
        with collector:
            collector.start()
            until(lambda: collector.stats()["workers"][1]["frames"] > 100, collector)
            collector.pause(timeout=PATIENCE_S)
            paused = collector.stats()
            assert {worker["state"] for worker in paused["workers"]} == {"paused"}
            assert paused["collected_frames"] == rb.write_count < total
            assert paused["reserved_frames"] <= 80
            kill(collector, 1)  # while it rests
            until(lambda: collector.stats()["workers"][1]["restarts"] == 1, collector)
            assert rb.write_count == paused["collected_frames"]
            collector.resume()
            assert collector.wait(timeout=PATIENCE_S)
            stats = collector.stats()
        assert stats["collected_frames"] == stats["written_frames"] == rb.write_count == total
        assert (stats["reserved_frames"], collector.stats()["restarts"]) == (0, stats["restarts"])
        items = rb[:]
    assert not flag.exists()
    assert no_frame_twice(items)
    assert stats["workers"][0]["restarts"] >= 1
    assert stats["workers"][0]["reason"].startswith("died: ")
    first = items["episode_id"][(items["episode_id"] >> 48) == stats["workers"][0]["id"]]
    assert int(((first >> 36) & 4095 == 0).sum()) == 20  # what was written unheard is counted, once
    with MultiCollector(Diary, num_workers=2, frames_per_batch=4) as other:
        assert other.stats().keys() == stats.keys()
        assert other.stats()["workers"][0].keys() == stats["workers"][0].keys()


def test_batches_are_handed_over_and_another_collector_goes_on(cluster: Any) -> None:
    options: Any = {"num_workers": 1, "frames_per_batch": 30, "num_envs": 2, "total_frames": 1000}
    with RayCollector(Diary, Waver(), **options) as collector:
        batches = [next(collector) for _ in range(3)]
        saved = collector.state_dict()
        assert saved["collected_frames"] == 90 + sum(batch.numel() for batch in saved["batches"])
        started = time.monotonic()
    assert time.monotonic() - started < 10
    with pytest.raises(BufferClosed):
        next(collector)
    with RayCollector(Diary, Waver(), **options) as collector:
        collector.load_state_dict(saved)
        batches += list(collector)
        assert collector.collected_frames == 1000
        assert collector.stats()["workers"][0]["state"] in ("waiting", "finished")
    frames: Any = torch.cat(batches)  # type: ignore[arg-type]
    assert frames.numel() == 1000
    assert no_frame_twice(frames)


@pytest.mark.exhaustive
def test_rounds_have_one_version_from_all_actors(cluster: Any) -> None:
    module = Constant(0.0)
    with (
        WeightBoard(module) as board,
        RayCollector(
            Diary,
            Constant(),
            num_workers=2,
            num_envs=2,
            frames_per_batch=10,
            total_frames=100,
            weights=board,
            sync=True,
        ) as collector,
    ):
        for number, batch in enumerate(collector):
            assert batch is not None
            assert batch.numel() == 20
            assert set(batch["policy_version"].flatten().tolist()) == {number}
            assert set(batch["action"].flatten().tolist()) == {float(number)}
            module.value.data.fill_(float(number + 1))
            board.publish(module)
        assert (number, collector.collected_frames) == (4, 100)
        assert [worker["frames"] for worker in collector.stats()["workers"]] == [50, 50]


@pytest.mark.exhaustive
def test_on_another_host_weights_and_frames_take_other_ways(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case rem-2: the actor that is killed writes through the network to an owner elsewhere."""
    from millpond.remote import RayReplayBuffer

    monkeypatch.setattr("millpond.collect.actor_handle.DOUBT_S", 1.0)
    module = Constant(3.0)
    far = {"runtime_env": {"env_vars": {"MILLPOND_HOST": "far"}}}
    with (
        RayReplayBuffer(100_000) as rb,
        WeightBoard(module, version=5) as board,
        RayCollector(
            Diary,
            Constant(),
            num_workers=1,
            num_envs=2,
            frames_per_batch=20,
            total_frames=6_000,
            replay=rb,
            weights=board,
            ray_options=far,
        ) as collector,
    ):
        collector.start()
        until(lambda: rb.write_count > 100, collector)
        assert len(rb.describe()["clients"]) == 1  # the actor, which does not come through shared memory
        module.value.data.fill_(4.0)
        board.publish(module, 8)
        until(lambda: collector.stats()["workers"][0]["policy_version"] == 8, collector)
        kill(collector, 0)
        assert collector.wait(timeout=PATIENCE_S)
        assert collector.collected_frames == collector.written_frames == rb.write_count == 6_000
        assert collector.stats()["restarts"] == 1
        items = rb[:]
        collector.close()
    assert no_frame_twice(items)
    assert lives(items) == {0, 1}
    for version, value in ((5, 3.0), (8, 4.0)):
        chosen = items["action"][(items["policy_version"] == version).flatten()]
        assert chosen.numel()
        assert bool((chosen == value).all())


class Explodes(Diary):
    def step(self, action: Any) -> Any:
        if self.episode == 2:
            raise ZeroDivisionError("the pond is dry")
        return super().step(action)


def test_an_exception_in_an_actor_surfaces_with_its_traceback(cluster: Any) -> None:
    """Case proc-5."""
    with ReplayBuffer(1000, shared=True) as rb:
        with RayCollector(Explodes, num_workers=1, frames_per_batch=10, replay=rb) as collector:
            collector.start()
            with pytest.raises(WorkerFailed, match="the pond is dry") as problem:
                collector.wait(timeout=PATIENCE_S)
            assert "in step" in str(problem.value)
            with pytest.raises(WorkerFailed):
                collector.check()
        assert rb.write_count == collector.written_frames == collector.collected_frames
        assert collector.stats()["reserved_frames"] == 0
        assert collector.stats()["workers"][0]["state"] == "failed"


def test_an_actor_that_waits_for_space_pauses_goes_on_and_ends_with_the_buffer(cluster: Any) -> None:
    """Cases flow-5, proc-3."""
    with ReplayBuffer(25, shared=True, consume_after_n_samples=1, flow=Flow(admission="block")) as rb:
        collector = RayCollector(Diary, num_workers=1, frames_per_batch=10, replay=rb)
        collector.start()
        until(lambda: rb.stats()["waiting_producers"] == 1, collector)
        collector.pause(timeout=PATIENCE_S)
        assert (rb.write_count, rb.stats()["waiting_producers"], collector.collected_frames) == (20, 0, 20)
        assert len(collector.state_dict()["workers"][0]["env"]) == 10
        collector.resume()
        rb.sample(10, wait=True)
        until(lambda: rb.write_count == 30, collector)
        until(lambda: rb.stats()["waiting_producers"] == 1, collector)
        rb.close()
        assert collector.wait(timeout=PATIENCE_S)  # nobody can write any more
        assert set(collector) == {None}
        assert collector.stats()["workers"][0]["state"] == "finished"
        started = time.monotonic()
        collector.close()
        assert time.monotonic() - started < 10
        assert collector.stats()["reserved_frames"] == 0
        assert collector.collected_frames == 30


def test_more_deaths_than_may_be_replaced_end_the_collection(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("ray")
    from millpond.collect.ray_supervisor import RaySupervisor
    from millpond.collect.supervision import Watch

    with RayCollector(Diary, num_workers=2, frames_per_batch=4, max_restarts=2) as collector:
        pool = collector._pool
        watch = Watch(stall_timeout=None, names=["Diary", "Diary"])
        supervisor = RaySupervisor(
            collector._spec,
            [b"", b""],
            lines=pool.lines,
            worker_table=pool.worker_table,
            options={"num_cpus": 0},
            max_restarts=2,
            watch=watch,
        )
        first, second = supervisor.handles
        for order_book in (first, second):
            supervisor.lost(order_book, "died: by accident")
        assert supervisor.failure is None
        assert "worker 1 died: by accident; restart 2 of 2" in caplog.text
        supervisor.lost(first, "died: again")
        assert str(supervisor.failure) == "worker 0 died: again; the 2 restarts that are allowed were made"
        assert supervisor.stopping


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"ray_options": {"max_restarts": 3}}, InvalidArgument, "max_restarts"),
        ({"num_workers": 0}, InvalidArgument, "workers"),
        ({"max_restarts": -1}, InvalidArgument, "max_restarts"),
        ({"env": "NoSuch-v0"}, InvalidArgument, "NoSuch"),
        ({"policy": 3}, InvalidType, "policy"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(options: Any, error: type[Exception], text: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(error, match=text):
        RayCollector(**{"env": Diary, "num_workers": 1, "frames_per_batch": 4, **options})


def test_options_that_ray_does_not_know_are_refused(cluster: Any) -> None:
    with (
        RayCollector(Diary, num_workers=1, frames_per_batch=4, ray_options={"no_such_option": 1}) as collector,
        pytest.raises(InvalidArgument, match="no_such_option"),
    ):
        next(collector)
