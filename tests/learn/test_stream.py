"""Batches ahead of their use: bounded, in order, and ended by whatever ends the replay."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from millpond import Flow, ReplayBuffer
from millpond.core.errors import BufferClosed, Cancelled, DeadlineExceeded, InvalidArgument, NotReady
from millpond.learn.stream import SampleStream

SECONDS = 30.0  # for what must happen; nothing here waits that long


def items(n: int) -> TensorDict:
    return TensorDict({"observation": torch.arange(n, dtype=torch.float32)[:, None]}, [n])


class Counting:
    """A replay whose batches are numbered; says when so many were drawn, and fails where asked."""

    def __init__(self, *, fail_at: int | None = None) -> None:
        self.drawn = 0
        self.write_count = 10
        self._fail_at = fail_at
        self._changed = threading.Condition()

    def sample(self, batch_size: int | None = None, **_: Any) -> TensorDict:
        with self._changed:
            if self.drawn == self._fail_at:
                raise RuntimeError("the disk is gone")
            self.drawn += 1
            self._changed.notify_all()
            return TensorDict({"number": torch.full((batch_size or 1,), self.drawn)}, [batch_size or 1])

    def update_priority(self, index_or_sample: Any, priority: torch.Tensor) -> int:
        return len(priority)

    def wait_for(self, drawn: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.drawn >= drawn, SECONDS)


def test_it_draws_ahead_within_its_bound_and_in_order() -> None:
    replay = Counting()
    with SampleStream(replay, batch_size=2, ahead=3) as stream:
        assert replay.drawn == 0, "nothing is drawn before somebody asks"
        for number in range(1, 6):
            assert stream.sample(timeout=SECONDS)["number"].tolist() == [number, number]
            replay.wait_for(number + 3)
            assert replay.drawn == number + 3
        assert stream.update_priority(None, torch.zeros(4)) == 4
        assert stream.write_count == 10


def test_without_a_thread_a_batch_is_drawn_where_it_is_asked_for() -> None:
    replay = Counting()
    threads = threading.active_count()
    with SampleStream(replay, batch_size=2, ahead=0) as stream:
        for number in range(1, 4):
            assert stream.sample()["number"][0] == number
            assert replay.drawn == number
        assert threading.active_count() == threads


def test_a_batch_whose_copy_to_the_device_fails_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with SampleStream(Counting(), batch_size=2, ahead=0, device="cpu") as stream:
        assert stream.sample()["number"][0] == 1
        with monkeypatch.context() as broken:

            def fail(self: TensorDict, device: str) -> TensorDict:
                raise RuntimeError("the GPU is full")

            broken.setattr(TensorDict, "to", fail)
            with pytest.raises(RuntimeError, match="the GPU is full"):
                stream.sample()
        assert [stream.sample()["number"][0].item() for _ in range(2)] == [2, 3]


def test_an_error_comes_after_the_batches_before_it_and_stays() -> None:
    with SampleStream(Counting(fail_at=2), batch_size=1, ahead=5) as stream:
        assert [stream.sample(timeout=SECONDS)["number"].item() for _ in range(2)] == [1, 2]
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the disk is gone"):
                stream.sample(timeout=SECONDS)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_closed_buffer_ends_the_stream(ahead: int) -> None:
    with ReplayBuffer(32, seed=0) as replay, SampleStream(replay, batch_size=4, ahead=ahead) as stream:
        replay.extend(items(16))
        assert stream.sample(timeout=SECONDS)["observation"].shape == (4, 1)
        replay.close()
        assert sum(1 for _ in stream) <= ahead + 1


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_batch_that_does_not_come_ends_the_wait(ahead: int) -> None:
    with (
        ReplayBuffer(32, flow=Flow(min_size=16), seed=0) as replay,
        SampleStream(replay, batch_size=4, ahead=ahead) as stream,
    ):
        replay.extend(items(5))
        with pytest.raises(DeadlineExceeded, match="5 of 16 items written"):
            stream.sample(timeout=0.01)
        with pytest.raises(NotReady, match="5 of 16 items written"):
            stream.sample(wait=False)
        assert "5 of 16 items written" in stream.explain()
        cancel = threading.Event()
        cancel.set()
        with pytest.raises(Cancelled):
            stream.sample(timeout=SECONDS, cancel_event=cancel)
        replay.extend(items(11))
        assert stream.sample(timeout=SECONDS).batch_size == (4,)


def test_a_cancel_event_set_during_the_wait_ends_it() -> None:
    cancel = threading.Event()
    with ReplayBuffer(32, flow=Flow(min_size=16), seed=0) as replay, SampleStream(replay, batch_size=4) as stream:
        timer = threading.Timer(0.05, cancel.set)
        timer.start()
        with pytest.raises(Cancelled):
            stream.sample(timeout=SECONDS, cancel_event=cancel)
        timer.join()


def test_close_frees_a_waiting_caller_and_a_waiting_thread() -> None:
    """The thread waits in an empty buffer, a caller in the stream; closing ends both, and the buffer stays open."""
    with ReplayBuffer(32, flow=Flow(min_size=16), seed=0) as replay:
        asked = threading.Event()

        class Watched:
            write_count = 0
            update_priority = replay.update_priority

            def sample(self, batch_size: int | None = None, **waiting: Any) -> Any:
                asked.set()
                return replay.sample(batch_size, **waiting)

        stream = SampleStream(Watched(), batch_size=4)
        outcome: list[BaseException] = []

        def call() -> None:
            try:
                stream.sample(timeout=SECONDS)
            except BaseException as error:
                outcome.append(error)

        caller = threading.Thread(target=call)
        caller.start()
        assert asked.wait(SECONDS)
        stream.close()
        caller.join(SECONDS)
        (error,) = outcome
        assert isinstance(error, BufferClosed)
        stream.close()
        with pytest.raises(BufferClosed):
            stream.sample()
        replay.extend(items(16))
        assert replay.sample(4).batch_size == (4,)


def test_sizes_that_mean_nothing_are_refused() -> None:
    for sizes in ({"batch_size": 0}, {"batch_size": 1, "ahead": -1}):
        with pytest.raises(InvalidArgument, match="at least"):
            SampleStream(Counting(), **sizes)
    with SampleStream(Counting(), batch_size=2) as stream, pytest.raises(InvalidArgument, match="batches of 2"):
        stream.sample(3)
