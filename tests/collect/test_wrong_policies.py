"""Policies that do not fit: one clear error, in the same words from every kind of collector, before any frame."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from episode_worlds import Diary
from gymnasium import spaces
from policies import Constant
from tensordict import TensorDict
from torch import nn

from millpond.collect import Collector, FrameBudget, MultiCollector
from millpond.core.errors import InvalidArgument, InvalidType, NonFinite, SchemaMismatch, WorkerFailed
from millpond.replay import ReplayBuffer


class Dial(gymnasium.Env[Any, Any]):
    """Takes whatever its action space holds, and counts its steps."""

    steps = 0

    def __init__(self, space: spaces.Space[Any]) -> None:
        self.observation_space, self.action_space = spaces.Box(-1, 1, (3,)), space

    def reset(self, **_: Any) -> Any:
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> Any:
        Dial.steps += 1
        return np.zeros(3, np.float32), 0.0, False, False, {}


CHOICE, PAIR = spaces.Discrete(2), spaces.Box(-1, 1, (2,))
BOTH = spaces.Dict({"turn": spaces.Discrete(3, start=1), "push": PAIR})
NEEDS = r"it must return a TensorDict with action: "
CHOOSE = NEEDS + r"int64\[2\], for 2 environments with the action space Discrete\(2\)"
PUSH = NEEDS + r"float32\[2, 2\], for 2 environments with the action space Box\(-1"


def answering(action: Any) -> Any:
    """A policy that always answers so."""
    return lambda td: td.set("action", action)


def needing(td: TensorDict) -> TensorDict:
    return td.set("action", td["observation", "image"])


class Wide(nn.Module):
    """Was made for other observations."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(7, 2)

    def forward(self, td: TensorDict) -> TensorDict:
        return td.set("action", self.net(td["observation"]))


ANSWERS: list[tuple[Any, Any, type[Exception], str]] = [
    (PAIR, lambda td: td["observation"], InvalidType, r"returned a Tensor float32\[2, 3\]; " + PUSH),
    (PAIR, lambda td: td["observation"].numpy(), InvalidType, r"returned a ndarray float32\[2, 3\]; " + PUSH),
    (PAIR, lambda td: None, InvalidType, r"returned None; " + PUSH),
    (PAIR, lambda td: {"action": 1}, InvalidType, r"returned a dict; " + PUSH),
    (PAIR, lambda td: td, SchemaMismatch, r"returned a TensorDict with observation: float32\[2, 3\]; " + PUSH),
    (PAIR, answering(torch.zeros(2, 3)), SchemaMismatch, r"gave action: float32\[2, 3\]; " + PUSH),
    (PAIR, answering(torch.zeros(2, 2, 1)), SchemaMismatch, r"gave action: float32\[2, 2, 1\]; " + PUSH),
    (PAIR, answering(torch.zeros(2, 2, dtype=torch.complex64)), SchemaMismatch, r"gave action: complex64"),
    (CHOICE, answering(torch.rand(2)), SchemaMismatch, r"gave action: float32\[2\]; " + CHOOSE),
    (CHOICE, answering(torch.eye(2)), SchemaMismatch, r"gave action: float32\[2, 2\]; " + CHOOSE),
    (CHOICE, answering(torch.tensor([1, 2])), InvalidArgument, r"chose action=2; " + CHOOSE),
    (CHOICE, answering(torch.tensor([-1, 0])), InvalidArgument, r"chose action=-1; " + CHOOSE),
    (BOTH, answering(torch.zeros(2, 2)), SchemaMismatch, r"action: float32\[2, 2\]; .* action/turn: int64\[2\]"),
    (
        BOTH,
        answering({"turn": torch.tensor([3, 0]), "push": torch.zeros(2, 2)}),
        InvalidArgument,
        r"chose action/turn=0; .* action/push: float32\[2, 2\]",
    ),
    (
        PAIR,
        needing,
        InvalidArgument,
        r"given a TensorDict with observation: float32\[2, 3\], it raised .* in needing\)",
    ),
    (PAIR, Wide(), InvalidArgument, r"raised RuntimeError: mat1 and mat2 .*test_wrong_policies.py.*in forward\)"),
    (PAIR, nn.Module(), InvalidArgument, r"raised NotImplementedError"),
]


@pytest.mark.parametrize("random_frames", [0, 1000])
@pytest.mark.parametrize(("space", "policy", "error", "text"), ANSWERS)
def test_an_answer_that_does_not_fit(
    space: Any, policy: Any, error: type[Exception], text: str, random_frames: int
) -> None:
    Dial.steps = 0
    with (
        FrameBudget(100) as budget,
        Collector(
            lambda: Dial(space),
            policy,
            frames_per_batch=10,
            num_envs=2,
            budget=budget,
            seed=0,
            random_frames=random_frames,
        ) as collector,
    ):
        with pytest.raises(InvalidArgument, match=text) as problem:
            next(collector)
        assert type(problem.value) is error
        assert (Dial.steps, budget.collected) == (0, 0)


class Unusual:
    """Callable, as anything may be."""

    def __call__(self, td: TensorDict, *more: Any, scale: float = 1.0) -> TensorDict:
        return td.set("action", torch.full((td.batch_size[0], 2), 0.5, dtype=torch.bfloat16))


def scaled(scale: float, td: TensorDict) -> TensorDict:
    return td.set("action", torch.full((td.batch_size[0], 2), scale, dtype=torch.float64))


FITTING = [
    Unusual(),
    functools.partial(scaled, 0.5),
    lambda td: td.set("action", torch.zeros(2, 2, dtype=torch.int32)),
    torch.compile(Constant(0.5), backend="eager"),
]


@pytest.mark.parametrize("policy", FITTING)
def test_what_fits_is_taken(policy: Any) -> None:
    with Collector(lambda: Dial(PAIR), policy, frames_per_batch=10, num_envs=2, total_frames=20) as collector:
        actions = [batch["action"] for batch in collector]
    assert torch.cat(actions).dtype is torch.float32


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (5, "not int"),
        ("greedy", "not str"),
        (Constant, "the class Constant was given"),
        (lambda: None, "cannot be called with a TensorDict alone"),
        (lambda observation, mask: None, r"<lambda>\(observation, mask\) cannot .* missing .*'mask'"),
        (scaled, r"scaled\(scale: .*'td'"),
    ],
)
@pytest.mark.parametrize("kind", [Collector, functools.partial(MultiCollector, num_workers=2)], ids=["one", "many"])
def test_what_cannot_be_asked_is_refused_at_once(kind: Any, policy: Any, text: str) -> None:
    with pytest.raises(InvalidType, match=text):
        kind(Diary, policy, frames_per_batch=5)


class Counting(Constant):
    """Knows how often it was asked, as one with a memory would."""

    asked = 0

    def forward(self, data: Any) -> Any:
        self.asked += 1
        return data.set("action", torch.rand(*data.batch_size, 2) * self.asked)


def test_to_be_asked_later_leaves_no_trace() -> None:
    """Not in the policy, and not in the global generator that it draws from."""
    found = []
    for trying in (True, False):
        policy = Counting()
        torch.manual_seed(0)
        with Collector(Diary, policy, frames_per_batch=5, total_frames=10, random_frames=5, seed=0) as collector:
            assert collector._batch_writer.rollout._asking is not None
            collector._batch_writer.rollout._asking.rehearsed = not trying
            found.append(torch.cat([batch["action"] for batch in collector]))
        assert policy.asked == 5
    assert torch.equal(*found)


def test_what_cannot_be_copied_is_asked_when_its_time_comes() -> None:
    def uncopied(self: Any, memo: Any) -> Any:
        raise RuntimeError("there is only one")

    policy = Constant()
    policy.__class__ = type("Single", (Constant,), {"__deepcopy__": uncopied})
    with Collector(Diary, policy, frames_per_batch=5, total_frames=10, random_frames=5, seed=0) as collector:
        assert len(list(collector)) == 2


class Fails(Constant):
    """Answers well at first."""

    def forward(self, data: Any) -> Any:
        self.size -= 1
        if not self.size:
            raise ZeroDivisionError("the pond is dry")
        return data.set("action", torch.zeros(*data.batch_size, 2))


def test_what_it_raises_later_is_its_own() -> None:
    collector = Collector(Diary, Fails(size=4), frames_per_batch=5)
    with collector, pytest.raises(ZeroDivisionError, match="the pond is dry"):
        next(collector)


def test_in_a_thread_too() -> None:
    rb = ReplayBuffer(100)
    with Collector(lambda: Dial(CHOICE), answering(torch.rand(1)), frames_per_batch=5, replay=rb) as collector:
        for ask in (lambda: collector.wait(timeout=30), collector.check):
            with pytest.raises(SchemaMismatch, match="gave action: float32"):
                ask()
    assert rb.write_count == 0
    rb.close()


WRONG: list[tuple[Any, Any, type[Exception], str]] = [
    (lambda: Dial(PAIR), lambda td: td["observation"], InvalidType, r"worker \d: the policy returned a Tensor"),
    (lambda: Dial(PAIR), needing, InvalidArgument, r"worker \d: the policy cannot be asked: .*in needing\)"),
    (lambda: 5, None, InvalidType, r"worker \d: .*int"),
]


@pytest.mark.parametrize(("env", "policy", "error", "text"), WRONG)
@pytest.mark.parametrize("sync", [False, True])
def test_worker_processes_say_the_same_once(
    env: Any, policy: Any, error: type[Exception], text: str, sync: bool
) -> None:
    with MultiCollector(env, policy, num_workers=2, frames_per_batch=5, sync=sync, total_frames=100) as collector:
        for _ in range(2):
            with pytest.raises(InvalidArgument, match=text) as problem:
                next(collector)
            assert type(problem.value) is error
            assert "Traceback" not in str(problem.value)
        with pytest.raises(error):
            collector.check()
        assert collector.collected_frames == 0
        assert [worker["restarts"] for worker in collector.stats()["workers"]] == [0, 0]


class Own(NonFinite):
    """An error of the user's own, made from one of millpond's."""


class Breaks(Diary):
    def step(self, action: Any) -> Any:
        raise Own("x: not finite")


def test_an_error_of_the_user_s_own_kind_counts_as_the_kind_that_is_known() -> None:
    with MultiCollector(Breaks, num_workers=1, frames_per_batch=5) as collector:
        with pytest.raises(NonFinite, match="worker 0: x: not finite"):
            next(collector)
        assert not isinstance(collector._pool.supervisor.failure, WorkerFailed)  # type: ignore[union-attr]
