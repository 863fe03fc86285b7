"""What runs in a Ray actor, without Ray."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import cloudpickle
import numpy as np
import pytest
import torch
from episode_worlds import Diary, diaries
from policies import Constant, Waver
from tensordict import TensorDict

from millpond.collect.actor import CollectActor, Home, Order, Report
from millpond.collect.packing import Format
from millpond.collect.rollout_storage import transition_fields
from millpond.collect.worker import WorkerSpec
from millpond.collect.worker_status import STATES, WorkerTable
from millpond.flow.limiter import Flow
from millpond.replay import ReplayBuffer
from millpond.shm import identity
from millpond.weights import WeightBoard

LINE = 3
FAR = Home("far", "another boot", 0)


@pytest.fixture(autouse=True)
def threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor says in its process's environment how many threads it takes; here that is the tests' process."""
    monkeypatch.setenv("MILLPOND_ENV_THREADS", "1")


def spec(**options: Any) -> WorkerSpec:
    sizes = {"workers": 1, "num_envs": 2, "frames_per_batch": 10, "layout": "transitions", "random_frames": 0}
    unset: Any = {"budget": None, "weights": None, "replay": None, "policy": None, "seed": 1, "keep_float64": False}
    return WorkerSpec(**{"duty": "hand_over", "env": Diary, "line": LINE, **sizes, **unset, **options})


class Lent:
    """What goes into a pickle, and is itself what comes out: an actor in this process writes into this buffer."""

    held: ClassVar[dict[int, Any]] = {}

    def __init__(self, thing: Any) -> None:
        self.number = id(thing)
        self.held[self.number] = thing

    def __reduce__(self) -> tuple[Any, ...]:
        return _taken_back, (self.number,)


def _taken_back(number: int) -> Any:
    return Lent.held[number]


def began(asked: WorkerSpec, *, board: bytes | None = None, home: Home | None = None) -> tuple[CollectActor, Report]:
    actor, line = CollectActor(), WorkerTable(bytearray(WorkerTable.nbytes(1)), workers=1).lines[0]
    pickled = cloudpickle.dumps((asked, -1))
    # far away nobody watches this process, so that no thread stays
    report = actor.begin(pickled, line.told(), 1, board, FAR if home is None else home, identity.me())
    return actor, report


def order(number: int, frames: int = 10, first: int = 0) -> Order:
    return Order(number=number, frames=frames, first=first)


def state_of(report: Report) -> str:
    line = WorkerTable(bytearray(WorkerTable.nbytes(1)), workers=1).lines[0]
    line.hear(report.line)
    return STATES[line.state]


@contextlib.contextmanager
def blocking() -> Iterator[ReplayBuffer]:
    with ReplayBuffer(40, shared=True, consume_after_n_samples=1, flow=Flow(admission="block")) as rb:
        yield rb
    Lent.held.clear()


def test_orders_are_carried_out_in_their_order_and_leave_their_numbers_as_receipts() -> None:
    with blocking() as rb:
        actor, begun = began(spec(duty="write", replay=Lent(rb)))
        assert (begun.outcome, begun.neighbour, begun.direct) == ("begun", False, False)
        assert actor.work(order(2), None).outcome == "kept"  # not its turn
        for number in (1, 2):
            report = actor.work(order(number), None)
            assert (report.outcome, report.frames, rb.receipt(LINE)) == ("written", 10, number)
        assert rb.write_count == 20
        actor.finish()


def test_a_blocked_write_is_cut_off_by_a_pause_and_the_same_batch_is_written_afterwards() -> None:
    with blocking() as rb:
        actor, _ = began(spec(duty="write", replay=Lent(rb)))
        for number in range(1, 5):
            actor.work(order(number), None)
        blocked: list[Report] = []
        thread = threading.Thread(target=lambda: blocked.append(actor.work(order(5), None)))
        thread.start()
        while not rb.stats()["waiting_producers"]:
            time.sleep(0.001)
        actor.mind(2, 7, False)
        thread.join(timeout=60)
        assert (blocked[0].outcome, state_of(blocked[0])) == ("kept", "paused")
        assert (rb.write_count, rb.receipt(LINE)) == (40, 4)
        waiting = actor.state()
        assert len(waiting["env"]) == 10
        actor.mind(3, 0, False)
        actor.mind(1, 7, False)  # came too late
        rb.sample(10, wait=True)
        assert actor.work(order(5), None).outcome == "written"
        assert (rb.write_count, rb.receipt(LINE)) == (50, 5)
        actor.finish()


def test_told_to_stop_it_keeps_what_it_has() -> None:
    with blocking() as rb:
        actor, _ = began(spec(duty="write", replay=Lent(rb)))
        actor.mind(1, 0, True)
        actor.mind(2, 0, False)  # there is no way back
        assert actor.work(order(1), None).outcome == "kept"
        assert rb.write_count == 0


def test_a_buffer_that_drops_is_told_from_one_that_writes() -> None:
    with ReplayBuffer(10, shared=True, consume_after_n_samples=1, flow=Flow(admission="drop_newest")) as rb:
        actor, _ = began(spec(duty="write", replay=Lent(rb)))
        assert [actor.work(order(n), None).outcome for n in (1, 2)] == ["written", "dropped"]
        rb.sample(10)
        assert actor.work(order(3), None).outcome == "written"
        assert rb.receipt(LINE) == 3
        rb.close()
        assert actor.work(order(4), None).outcome == "closed"
    Lent.held.clear()


@pytest.mark.parametrize("layout", ["transitions", "sequences"])
def test_batches_come_back_as_one_block_and_nothing_is_lost_on_the_way(layout: str) -> None:
    actor, begun = began(spec(layout=layout, env=lambda: diaries(2, "NextStep"), policy=Waver()))
    assert begun.form is not None
    steps = []
    for number, frames in ((1, 10), (2, 5)):
        report = actor.work(order(number, frames), None)
        assert (report.outcome, report.frames) == ("batch", frames)
        packed = pickle.loads(pickle.dumps(report.batch))
        packed.flags.writeable = False  # as Ray gives it
        batch = begun.form.unpack(packed, frames)
        assert tuple(batch.batch_size) == ((frames,) if layout == "transitions" else (frames // 5, 5))
        steps.append(batch.reshape(-1))
    ids = torch.cat([torch.stack([b["episode_id"].flatten(), b["step"].flatten()]) for b in steps], dim=1)
    assert ids.unique(dim=1).shape[1] == 15
    actor.finish()


def test_a_block_holds_any_shape_and_type() -> None:
    fields = transition_fields((), ())
    form = Format(tuple(dataclasses.replace(f, shape=(2, 0, 3)) if f.key == ("step",) else f for f in fields), 7, None)
    sizes = {f.key: torch.randint(0, 2, (5, *f.shape)).to(torch.from_numpy(np.zeros(1, f.dtype)).dtype) for f in fields}
    sizes[("step",)] = torch.zeros(5, 2, 0, 3, dtype=torch.int64)
    given = TensorDict({key if len(key) > 1 else key[0]: value for key, value in sizes.items()}, batch_size=[5])
    back = form.unpack(form.pack(given), 5)
    assert all(torch.equal(back.get(key), value) for key, value in sizes.items())


def test_weights_come_with_the_orders_where_the_board_is_out_of_reach() -> None:
    module = Constant(1.0)
    with WeightBoard(module, version=4) as board:
        actor, _ = began(spec(policy=Constant()), board=b"of elsewhere, and not to be opened")
        first = actor.work(order(1), board.snapshot())
        module.value.data.fill_(2.0)
        board.publish(module, 9)
        second = actor.work(order(2), pickle.loads(pickle.dumps(board.snapshot())))
        third = actor.work(order(3), None)
    for report, version, value in ((first, 4, 1.0), (second, 9, 2.0), (third, 9, 2.0)):
        batch = actor._form.unpack(report.batch, 10)
        assert set(batch["policy_version"].flatten().tolist()) == {version}
        assert set(batch["action"].flatten().tolist()) == {value}
    actor.finish()


def test_neighbours_pull_from_the_board_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[Any] = []
    monkeypatch.setattr(identity, "when_gone", lambda pid, started, act: watched.append((pid, started)))
    module = Constant(1.0)
    with WeightBoard(module) as board:
        actor, begun = began(spec(policy=Constant()), board=pickle.dumps(board), home=Home.here())
        assert (begun.neighbour, begun.direct) == (True, True)
        module.value.data.fill_(2.0)
        board.publish(module)
        batch = actor._form.unpack(actor.work(order(1), None).batch, 10)
        assert set(batch["policy_version"].flatten().tolist()) == {1}
    assert watched == [identity.me()]  # it ends with its owner
    actor.finish()


def test_random_actions_come_first() -> None:
    actor, begun = began(spec(policy=Constant(0.5), random_frames=14))
    assert begun.form is not None
    batch = begun.form.unpack(actor.work(order(1, first=10), None).batch, 10)
    assert int((batch["policy_version"] == -1).sum()) == 4
    actor.finish()


class Explodes(Diary):
    def step(self, action: Any) -> Any:
        raise ZeroDivisionError("the pond is dry")


def test_what_is_raised_is_told_with_its_traceback() -> None:
    """Case proc-5."""
    actor, _ = began(spec(env=Explodes))
    report = actor.work(order(1), None)
    assert report.outcome == "failed"
    assert report.failure is not None
    assert report.failure[:2] == ("ZeroDivisionError", "the pond is dry")
    assert "in step" in report.failure.trace
    assert actor.work(order(2), None).outcome == "kept"  # the orders that were on their way do nothing
    _, begun = began(spec(env="NoSuchEnvironment-v0"))
    assert begun.failure is not None
    assert (begun.outcome, begun.failure.kind, "NoSuchEnvironment" in begun.failure.text) == (
        "failed",
        "InvalidArgument",
        True,
    )


def test_a_policy_that_does_not_fit_is_told_in_words() -> None:
    actor, _ = began(spec(policy=lambda td: td["observation"]))
    failure = actor.work(order(1), None).failure
    assert failure is not None
    assert failure.kind == "InvalidType"
    assert "the policy returned a Tensor float32[2, 4]; it must return a TensorDict with action" in failure.text


class Sick(Diary):
    def step(self, action: Any) -> Any:
        observation, *others = super().step(action)
        if self.episode == 1 and self.at == 1:
            observation[3] = float("nan")
        return observation, *others


def test_quarantined_transitions_are_told_once() -> None:
    """Case nan-1."""
    actor, _ = began(spec(env=Sick, num_envs=1))
    first, second = (actor.work(order(n), None).quarantined for n in (1, 2))
    assert [event.key for event in first + second] == ["next/observation", "observation"]
    actor.finish()


def test_a_line_that_travelled_says_what_it_said() -> None:
    here, there = (WorkerTable(bytearray(WorkerTable.nbytes(1)), workers=1).lines[0] for _ in range(2))
    there.enter()
    there.state, here.paused = 4, 7
    clock, words = there.told()
    here.hear((clock + 5_000_000_000, words))  # told five seconds after the step, by the clock there
    assert (here.process, here.state, here.lives, here.paused) == (identity.me(), 4, 1, 7)
    age = here.describe(worker=0, frames=0, deaths=[])["last_step_age_s"]
    assert 5 <= age < 60
    assert there.enter() == 1
