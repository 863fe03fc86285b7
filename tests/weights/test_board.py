from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from millpond.core.errors import (
    BufferClosed,
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    InvalidType,
    PeerLost,
    SchemaMismatch,
)
from millpond.shm.directory import leftovers
from millpond.shm.mapped import remove_directory
from millpond.weights import WeightBoard


class Mixed(nn.Module):
    """Parameters and buffers of several types and shapes, all filled with one number."""

    def __init__(self, value: float = 0.0, width: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2, width), value))
        self.small = nn.Parameter(torch.full((5,), value, dtype=torch.bfloat16))
        self.register_buffer("count", torch.tensor(int(value)))
        self.register_buffer("mask", torch.tensor([value % 2 == 0]))
        self.register_buffer("nothing", torch.zeros(0, 4))
        self.register_buffer("transient", torch.full((3,), value, dtype=torch.float64), persistent=False)

    def values(self) -> list[torch.Tensor]:
        return [*self.parameters(), *self.buffers()]


def same(a: Mixed, b: Mixed) -> bool:
    return all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(a.values(), b.values(), strict=True))


@pytest.fixture
def board() -> Iterator[WeightBoard]:
    with WeightBoard(Mixed(1.0)) as made:
        yield made


def test_what_is_given_at_construction_is_version_0(board: WeightBoard) -> None:
    module = Mixed(9.0)
    assert board.version == 0
    assert board.pull(module) == 0
    assert same(module, Mixed(1.0))


def test_versions_rise_by_one_or_as_told(board: WeightBoard) -> None:
    module = Mixed()
    assert board.publish(Mixed(2.0)) == 1
    assert board.publish(Mixed(3.0), version=10) == board.version == 10
    assert board.publish(Mixed(4.0)) == 11
    assert board.pull(module) == 11
    assert same(module, Mixed(4.0))


@pytest.mark.parametrize("version", [0, 3])
def test_a_version_that_does_not_rise_is_refused(board: WeightBoard, version: int) -> None:
    board.publish(Mixed(2.0), version=3)
    with pytest.raises(InvalidArgument, match="version 3 was"):
        board.publish(Mixed(5.0), version=version)
    board.pull(module := Mixed())
    assert same(module, Mixed(2.0))


@pytest.mark.parametrize("version", [-1, True, 1.5, "2"])
def test_a_version_that_is_no_number_of_one_is_refused(board: WeightBoard, version: Any) -> None:
    with pytest.raises((InvalidArgument, InvalidType)):
        board.publish(Mixed(5.0), version=version)
    assert board.version == 0


def test_a_pull_copies_only_what_is_newer_unless_forced(board: WeightBoard) -> None:
    board.pull(module := Mixed())
    with torch.no_grad():
        module.weight.fill_(77.0)
    assert board.pull(module) == 0
    assert module.weight.eq(77.0).all()
    assert board.pull(module, force=True) == 0
    assert same(module, Mixed(1.0))
    with torch.no_grad():
        module.weight.fill_(77.0)
    board.publish(Mixed(2.0))
    board.pull(module)
    assert same(module, Mixed(2.0))


def test_another_module_with_the_same_layout_holds_nothing_yet(board: WeightBoard) -> None:
    board.pull(Mixed())
    board.pull(other := Mixed())
    assert same(other, Mixed(1.0))


def test_gradients_and_inference_mode_do_not_mind(board: WeightBoard) -> None:
    module = Mixed()
    with torch.inference_mode():
        board.pull(module)
    module.weight.sum().backward()
    board.publish(module)
    assert module.weight.requires_grad
    assert module.weight.grad is not None


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (Mixed(width=4), r"weight: the board holds float32\[2, 3\], the module has float32\[2, 4\]"),
        (Mixed().double(), "weight: .*float64"),
        (nn.Linear(3, 2), "small: the board holds .* no such tensor"),
    ],
)
def test_a_module_that_does_not_fit_is_refused_by_name(board: WeightBoard, module: nn.Module, named: str) -> None:
    before = [p.clone() for p in module.parameters()]
    for call in (board.pull, board.publish):
        with pytest.raises(SchemaMismatch, match=named):
            call(module)
    assert board.version == 0
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def test_a_tensor_too_many_is_refused_by_name(board: WeightBoard) -> None:
    module = Mixed()
    module.register_buffer("extra", torch.zeros(1))
    with pytest.raises(SchemaMismatch, match="extra: the module has it"):
        board.pull(module)


def test_nothing_to_publish_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="neither parameters nor buffers"):
        WeightBoard(nn.ReLU())
    with pytest.raises(InvalidType, match="expected a tensor, got int"):
        WeightBoard({"a": 3})  # type: ignore[dict-item]


def test_plain_tensors_do_too() -> None:
    flat = torch.arange(5.0)
    with WeightBoard(flat) as board:
        board.publish(flat * 2)
        board.pull(out := torch.zeros(5))
        assert torch.equal(out, flat * 2)
    with WeightBoard({"a": flat, "b": torch.ones(2)}, version=7) as board:
        into = {"b": torch.zeros(2), "a": torch.zeros(5)}
        assert board.pull(into) == 7
        assert torch.equal(into["a"], flat)


# ---------------------------------------------------------------------------------------------------- waiting
def test_wait_for_returns_at_once_what_is_there(board: WeightBoard) -> None:
    assert board.wait_for(0, timeout=0) == 0


def test_wait_for_is_woken_by_the_publication(board: WeightBoard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond.weights.board._SLICE_S", 60.0)  # looking by itself would come too late
    seen: list[int] = []
    waiter = threading.Thread(target=lambda: seen.append(board.wait_for(2)))
    waiter.start()
    board.publish(Mixed(2.0))
    board.publish(Mixed(3.0))
    waiter.join(30)
    assert seen == [2]


def test_wait_for_says_what_it_waited_for(board: WeightBoard) -> None:
    """Case flow-10."""
    with pytest.raises(DeadlineExceeded, match="version 3 of the weights; 0 is in force"):
        board.wait_for(3, timeout=0.01)
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(Cancelled, match="version 3"):
        board.wait_for(3, cancel_event=cancel)


def test_wait_for_says_now_and_then_that_it_still_waits(
    board: WeightBoard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("millpond.weights.board.LOG_EVERY", 0.02)
    monkeypatch.setattr("millpond.weights.board._SLICE_S", 0.01)
    with pytest.raises(DeadlineExceeded):
        board.wait_for(3, timeout=0.2)
    said = [record.getMessage() for record in caplog.records if record.name == "millpond"]
    assert said
    assert all("version 3 of the weights; 0 is in force" in one and str(os.getpid()) in one for one in said)


@pytest.mark.parametrize("timeout", [-1, True, float("nan"), "1"])
def test_wait_for_refuses_a_timeout_that_is_none(board: WeightBoard, timeout: Any) -> None:
    """Case flow-6."""
    with pytest.raises((InvalidArgument, InvalidType)):
        board.wait_for(3, timeout=timeout)


def test_close_ends_waits_and_leaves_the_last_version_readable() -> None:
    board = WeightBoard(Mixed(4.0))
    attached = pickle.loads(pickle.dumps(board))
    problems: list[BaseException] = []

    def wait() -> None:
        try:
            attached.wait_for(1)
        except BufferClosed as problem:
            problems.append(problem)

    waiter = threading.Thread(target=wait)
    waiter.start()
    board.close()
    board.close()
    waiter.join(10)
    assert len(problems) == 1
    attached.pull(module := Mixed())
    assert same(module, Mixed(4.0))
    with pytest.raises(BufferClosed):
        attached.publish(Mixed(5.0))


# -------------------------------------------------------------------------------------------------- processes
def _read_whole_versions(board: WeightBoard, until: int, out: Any) -> None:
    module = Mixed()
    numbers = [tensor for tensor in module.values() if tensor.dtype != torch.bool]
    last = board.pull(module)
    out.send("ready")
    while last < until:
        version = board.pull(module)
        found = {float(n) for tensor in numbers for n in tensor.detach().flatten()}
        if found != {float(version % 100)} or version < last:
            out.send(("torn", version, sorted(found)))
            return
        last = version
    out.send("whole")


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_readers_in_other_processes_see_whole_versions_only(method: str) -> None:
    """Case proc-9. Every version fills all tensors with its own number: a mixture would show."""
    context: Any = multiprocessing.get_context(method)
    here, there = context.Pipe()
    with WeightBoard(Mixed(0.0)) as board:
        reader = context.Process(target=_read_whole_versions, args=(board, 3000, there))
        reader.start()
        there.close()
        modules = [Mixed(float(i)) for i in range(100)]
        assert here.poll(60)
        assert here.recv() == "ready"
        for version in range(1, 3001):
            board.publish(modules[version % 100], version=version)
        assert here.poll(60)
        answer = here.recv()
        reader.join(30)
    here.close()
    reader.close()
    assert answer == "whole"


def _publish_for_ever(board: WeightBoard) -> None:
    modules = [Mixed(float(i)) for i in range(100)]
    while True:
        board.publish(modules[(board.version + 1) % 100])


def test_a_publisher_killed_at_any_instant_leaves_one_whole_version() -> None:
    """The case of proc-1 for weights: SIGKILL at random instants; readers and later publishers go on."""
    context = multiprocessing.get_context("fork")
    module = Mixed()
    with WeightBoard(Mixed(0.0)) as board:
        for attempt in range(15):
            before = board.version
            publisher = context.Process(target=_publish_for_ever, args=(board,))
            publisher.start()
            board.wait_for(before + 5 + attempt, timeout=30)
            time.sleep(attempt * 1e-4)
            os.kill(publisher.pid or 0, signal.SIGKILL)
            publisher.join(10)
            publisher.close()
            version = board.pull(module, force=True)
            assert same(module, Mixed(float(version % 100)))
            assert board.publish(Mixed(float((version + 1) % 100))) == version + 1


def test_killed_between_half_the_copy_and_the_rest(board: WeightBoard, monkeypatch: pytest.MonkeyPatch) -> None:
    """The named instant of the case above: the copy that is not in force is half written, the lock is held."""

    def die_half_way(destinations: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        for destination, source in list(zip(destinations, sources, strict=True))[:2]:
            destination.copy_(source)
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            monkeypatch.setattr(torch, "_foreach_copy_", die_half_way)
            board.publish(Mixed(8.0))
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    board.pull(module := Mixed())
    assert board.version == 0
    assert same(module, Mixed(1.0))
    assert board.publish(Mixed(2.0)) == 1
    board.pull(module)
    assert same(module, Mixed(2.0))


def test_a_slow_reader_reads_again(board: WeightBoard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case rem-9: two publications fall into one copy; neither waits, and the reader returns the newer one whole."""
    real, published = torch._foreach_copy_, []

    def slowly(destinations: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        real(destinations[:1], sources[:1])
        monkeypatch.setattr(torch, "_foreach_copy_", real)
        published.extend(board.publish(Mixed(value)) for value in (5.0, 6.0))
        real(destinations[1:], sources[1:])

    monkeypatch.setattr(torch, "_foreach_copy_", slowly)
    assert board.pull(module := Mixed()) == 2
    assert published == [1, 2]
    assert same(module, Mixed(6.0))


def _own_a_board(out: Any) -> None:
    board = WeightBoard(Mixed(3.0))
    out.send(board)
    time.sleep(60)


def test_the_death_of_the_owner_ends_a_wait_by_name() -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    owner = context.Process(target=_own_a_board, args=(there,))
    owner.start()
    board = here.recv()
    os.kill(owner.pid or 0, signal.SIGKILL)
    owner.join(10)
    with pytest.raises(PeerLost, match=str(owner.pid)):
        board.wait_for(1, timeout=10)
    assert board.pull(module := Mixed()) == 0
    assert same(module, Mixed(3.0))
    for path in leftovers():
        remove_directory(path)
    owner.close()
    here.close()
    there.close()
