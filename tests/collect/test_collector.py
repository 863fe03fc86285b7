from __future__ import annotations

import contextlib
import itertools
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from episode_worlds import MODES, Diary, DictDiary, diaries
from gymnasium.vector import SyncVectorEnv
from policies import Constant, Waver
from torch import nn

from millpond.collect import Collector, FrameBudget
from millpond.core.errors import (
    BufferClosed,
    Cancelled,
    InvalidArgument,
    InvalidType,
    NonFinite,
    NotReady,
    SchemaMismatch,
    WorkerFailed,
)
from millpond.envs import declare, make_batched
from millpond.flow.limiter import Flow
from millpond.replay import ReplayBuffer
from millpond.weights import WeightBoard


def gather(collector: Collector) -> Any:
    """All batches of a collector, end to end; it is closed."""
    with collector:
        return torch.cat(list(collector))  # type: ignore[arg-type]


def by_environment(batch: Any) -> dict[int, list[tuple[Any, ...]]]:
    """What a Diary's transitions say, in order, for each environment."""
    found = defaultdict(list)
    keys: Sequence[Any] = (
        "observation",
        "action",
        ("next", "observation"),
        ("next", "reward"),
        ("next", "done"),
        ("next", "terminated"),
        ("next", "truncated"),
        "step",
    )
    for row in batch.flatten():
        found[int(row["observation"][0])].append(tuple(tuple(row[key].tolist()) for key in keys))
    return found


# ---------------------------------------------------------------------------------------------------- transitions
def test_what_a_transition_holds() -> None:
    batch = gather(Collector("Pendulum-v1", frames_per_batch=10, total_frames=20, seed=0))
    described = {
        "/".join(key) if isinstance(key, tuple) else key: (str(value.dtype)[6:], list(value.shape[1:]))
        for key, value in batch.items(include_nested=True, leaves_only=True)
    }
    assert described == {
        "observation": ("float32", [3]),
        "action": ("float32", [1]),
        "next/observation": ("float32", [3]),
        "next/reward": ("float32", [1]),
        "next/done": ("bool", [1]),
        "next/terminated": ("bool", [1]),
        "next/truncated": ("bool", [1]),
        "policy_version": ("int64", [1]),
        "episode_id": ("int64", [1]),
        "step": ("int64", [1]),
    }


def test_a_time_limit_truncates_and_does_not_terminate() -> None:
    """Case end-1: the final observation is where physics went, not where the next episode began."""
    batch = gather(Collector("Pendulum-v1", frames_per_batch=100, total_frames=450, seed=0))
    ends = batch["next", "done"].flatten().nonzero().flatten().tolist()
    assert ends == [199, 399]
    assert batch["next", "truncated"].flatten().nonzero().flatten().tolist() == ends
    assert not batch["next", "terminated"].any()
    for end in ends:
        (x, y, speed), (nx, ny, _) = batch["observation"][end], batch["next", "observation"][end]
        turned = torch.atan2(ny, nx) - torch.atan2(y, x)
        assert abs((turned + 3.1416) % 6.2832 - 3.1416) <= 0.05 * 8 + 1e-3
        assert abs(speed) <= 8
        assert not torch.equal(batch["next", "observation"][end], batch["observation"][end + 1])
    inside = [t for t in range(449) if t not in ends]
    assert torch.equal(batch["next", "observation"][inside], batch["observation"][[t + 1 for t in inside]])


@pytest.mark.parametrize("layout", ["transitions", "sequences"])
def test_every_mode_gives_the_same_transitions_to_the_same_policy(layout: Any) -> None:
    """Cases end-2, end-3, end-4, end-7, unit-2; flat and in sequences."""
    found = []
    for mode in MODES:
        env = diaries(3, mode, longest=4)
        collector = Collector(env, Waver(), frames_per_batch=12, num_envs=3, total_frames=120, seed=7, layout=layout)
        rows = by_environment(gather(collector))
        assert sum(map(len, rows.values())) == 120
        found.append(rows)
    shortest = {i: min(len(rows[i]) for rows in found) for i in range(3)}
    assert all(n >= 24 for n in shortest.values())
    for i, n in shortest.items():
        assert found[0][i][:n] == found[1][i][:n] == found[2][i][:n]
        for observation, _, after, reward, done, *_, step in found[0][i]:
            assert after[1:3] == (observation[1], observation[2] + 1)
            assert reward == (100 * observation[1] + observation[2] + 1,)
            assert step == (observation[2],)
            assert isinstance(done[0], bool)


def test_next_step_frames_are_environment_steps_without_reset_rows() -> None:
    """Case end-2."""
    with Collector(diaries(2, "NextStep", longest=3), frames_per_batch=10, total_frames=95, seed=1) as collector:
        assert [batch.batch_size[0] for batch in collector if batch is not None] == [10] * 9 + [5]
        stats = collector.stats()
    assert stats["collected_frames"] == 95
    assert stats["reset_rows"] > 10
    assert stats["held_frames"] <= 1  # the surplus of the last vector step, not counted


def test_rows_without_a_final_observation_are_marked_and_counted() -> None:
    """Case end-5: nobody bootstraps from them, and no observation of another episode appears in them."""
    env = declare(diaries(2, "SameStep", longest=3), final_observation=False)
    with Collector(env, frames_per_batch=100, total_frames=100, seed=1) as collector:
        batch = next(collector)
        counted = collector.stats()["unbootstrappable"]
    assert batch is not None
    ends = batch["next", "done"].flatten()
    assert batch["next", "terminated"].flatten()[ends].all()
    assert torch.equal(batch["next", "observation"][ends], batch["observation"][ends])
    assert batch["next", "truncated"].any()
    assert counted == int(ends.sum()) > 10


def test_dictionaries_keep_their_keys_and_types() -> None:
    """Case type-1."""
    batch = gather(Collector(DictDiary, frames_per_batch=8, num_envs=2, total_frames=16, seed=3))
    assert batch["observation", "image"].dtype == torch.uint8
    assert batch["observation", "id"].dtype == torch.int64
    assert batch["observation", "inner", "vector"].dtype == torch.float32
    assert batch["next", "observation", "id"].flatten().tolist() == [2**40] * 16
    episode, at, _ = batch["next", "observation", "inner", "vector"].T
    assert torch.equal(batch["next", "observation", "image"][:, 0, 0].float(), (17 * episode + at) % 256)


def test_float64_becomes_float32_unless_it_is_wanted() -> None:
    narrow = gather(Collector("InvertedPendulum-v5", frames_per_batch=4, total_frames=4, seed=0))
    wide = gather(Collector("InvertedPendulum-v5", frames_per_batch=4, total_frames=4, seed=0, keep_float64=True))
    assert narrow["observation"].dtype == torch.float32
    assert wide["next", "observation"].dtype == torch.float64
    assert torch.equal(wide["observation"].float(), narrow["observation"])


def test_episodes_have_ids_of_their_own() -> None:
    batch = gather(Collector(Diary, frames_per_batch=64, num_envs=2, total_frames=128, seed=3))
    seen: dict[int, tuple[float, float]] = {}
    for row in batch:
        where = row["observation"][0].item(), row["observation"][1].item()
        seen.setdefault(int(row["episode_id"]), where)
        assert int(row["step"]) == row["observation"][2]
    assert len(seen) > 20
    with FrameBudget(20) as budget:
        one, other = (Collector(Diary, frames_per_batch=10, budget=budget, seed=3) for _ in range(2))
        ids = [set(next(c)["episode_id"].flatten().tolist()) for c in (one, other)]  # type: ignore[index]
        assert not ids[0] & ids[1]
        one.close()
        other.close()


# ------------------------------------------------------------------------------------------------------- counting
@pytest.mark.parametrize("total", [1, 7, 64, 1003])
@pytest.mark.parametrize(("frames", "envs"), [(1, 1), (5, 8), (24, 8), (25, 8)])
def test_exactly_the_total_for_any_sizes(total: int, frames: int, envs: int) -> None:
    """Case unit-1, in one process."""
    rb = ReplayBuffer(2000)
    with Collector(Diary, frames_per_batch=frames, num_envs=envs, total_frames=total, replay=rb, seed=0) as collector:
        assert list(collector) == [None] * -(-total // frames)
        assert collector.collected_frames == collector.written_frames == rb.write_count == total
        with pytest.raises(StopIteration):
            next(collector)
    rb.close()


def test_both_layouts_end_at_the_same_frame() -> None:
    """Case unit-2, rem-11: items are counted by replay, frames by the collector."""
    counts = {}
    for layout in ("transitions", "sequences"):
        rb = ReplayBuffer(2000)
        with Collector(
            diaries(3, "NextStep"), frames_per_batch=12, num_envs=3, total_frames=100, replay=rb, layout=layout, seed=0
        ) as collector:
            list(collector)
            counts[layout] = collector.collected_frames, collector.written_frames, rb.write_count
        if layout == "sequences":
            assert rb.sample(4)["observation"].shape == (4, 4, 4)
        rb.close()
    assert counts == {"transitions": (100, 100, 100), "sequences": (100, 100, 25)}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"layout": "sequences", "frames_per_batch": 10}, "multiple of num_envs"),
        ({"layout": "sequences", "total_frames": 101}, "not a multiple of the 4 frames of a sequence"),
        ({"layout": "grouped"}, "must be 'transitions' or 'sequences'"),
        ({"frames_per_batch": 0}, "at least 1"),
        ({"frames_per_batch": 1.5}, "must be an int"),
        ({"total_frames": -5}, "at least -1"),
        ({"num_envs": 0}, "num_envs"),
        ({"policy": 5}, "a policy is a module"),
        ({"env": "Humbug-v0"}, "cannot make"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_made(options: Any, text: str) -> None:
    given = {"env": Diary, "frames_per_batch": 12, "num_envs": 3, "total_frames": 120, **options}
    with pytest.raises((InvalidArgument, InvalidType), match=text):
        Collector(**given)


def test_weights_need_a_policy() -> None:
    with WeightBoard(Constant()) as board, pytest.raises(InvalidArgument, match="no policy"):
        Collector(Diary, frames_per_batch=1, weights=board)


# ------------------------------------------------------------------------------------------------ policy and seeds
def test_every_transition_carries_the_version_that_produced_it() -> None:
    board, policy = WeightBoard(Constant(0.0)), Constant(9.0)
    collector = Collector(Diary, policy, frames_per_batch=5, num_envs=2, total_frames=30, weights=board, seed=0)
    for version, batch in enumerate(collector):
        assert batch is not None
        action, told = batch["action"][:, 0], batch["policy_version"].flatten()
        assert torch.equal(action, told.float())  # also of the row that was left from the batch before
        assert told[-1] == version
        board.publish(Constant(version + 1.0))
    collector.close()
    board.close()


def test_a_policy_in_the_same_process_may_be_numbered_by_its_owner() -> None:
    with Collector(Diary, Constant(), frames_per_batch=2, total_frames=4, seed=0) as collector:
        assert next(collector)["policy_version"].flatten().tolist() == [0, 0]  # type: ignore[index]
        collector.policy_version = 12
        assert next(collector)["policy_version"].flatten().tolist() == [12, 12]  # type: ignore[index]


@pytest.mark.parametrize("random_frames", [0, 1, 7, 20, 100])
def test_the_first_frames_are_random(random_frames: int) -> None:
    """Case unit-6, in one process."""
    collector = Collector(
        Diary, Constant(5.0), frames_per_batch=10, num_envs=4, total_frames=40, random_frames=random_frames, seed=0
    )
    batch = gather(collector)
    told = batch["policy_version"].flatten()
    assert int((told == -1).sum()) == min(random_frames, 40)
    assert torch.equal(batch["action"][:, 0] == 5, told == 0)
    assert batch["action"][told == -1].unique().numel() >= min(random_frames, 40) * 2


def test_the_same_seed_gives_the_same_frames_whatever_the_global_generator_does() -> None:
    """Case seed-1."""
    batches = []
    for seed in (4, 4, 5):
        torch.manual_seed(len(batches))
        np.random.seed(len(batches))
        policy = Constant()
        batches.append(gather(Collector("Pendulum-v1", frames_per_batch=16, num_envs=2, total_frames=64, seed=seed)))
        with Collector(Diary, policy, frames_per_batch=2, total_frames=4, seed=seed) as collector:
            next(collector)
        assert policy.seed is not None
    assert (batches[0] == batches[1]).all()
    assert not (batches[0]["observation"] == batches[2]["observation"]).all()


def test_an_environment_that_does_not_keep_its_word_is_told_so() -> None:
    env: Any = diaries(2, "Disabled")
    env.reset = lambda **_: (np.zeros((2, 5), np.float32), {})
    collector = Collector(env, frames_per_batch=4)
    with collector, pytest.raises(SchemaMismatch, match=r"returned shape \(2, 5\), its space says \(2, 4\)"):
        next(collector)


# ------------------------------------------------------------------------------------------------------ not finite
class Sick(Diary):
    """Gives NaN in one place at step ``when`` of each second episode."""

    def __init__(self, where: str, when: int = 2, name: int = 0) -> None:
        super().__init__(name, longest=8)
        self.where, self.when = where, when

    def step(self, action: Any) -> Any:
        assert np.isfinite(action).all()
        observation, reward, *others = super().step(action)
        if self.at == self.when and self.episode % 2:
            if self.where == "observation":
                observation[3] = np.nan
            else:
                reward = np.inf
        return observation, reward, *others


class NanAction(nn.Module):
    def forward(self, data: Any) -> Any:
        seen = data["observation"]
        action = torch.zeros(len(seen), 2)
        action[(seen[:, 2] == 2) & (seen[:, 1] % 2 == 1), 1] = torch.nan
        return data.set("action", action)


@pytest.mark.parametrize("where", ["observation", "reward", "action"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["transitions", "sequences"])
def test_numbers_that_are_not_finite_are_quarantined(where: str, mode: str, layout: Any) -> None:
    """Case nan-1: by key, environment and step; not stored, not counted, and the gap can be seen."""
    env = gymnasium.vector.SyncVectorEnv(
        [lambda: Sick(where if where != "action" else "", name=0), lambda: Diary(1, 8)], autoreset_mode=mode
    )
    policy = NanAction() if where == "action" else Constant()
    if where == "action":
        env.envs[1] = Diary(1, 1)  # never gets as far as step 2
    with Collector(env, policy, frames_per_batch=8, total_frames=240, num_envs=2, seed=2, layout=layout) as collector:
        batch = torch.cat(list(collector))  # type: ignore[arg-type]
        stats = collector.stats()
    key = {"observation": "next/observation", "reward": "next/reward", "action": "action"}[where]
    assert batch.numel() == stats["collected_frames"] == 240
    assert stats["quarantined_rows"] > 3
    assert {(event.env, event.step) for event in stats["quarantine"] if event.key == key} == {
        (0, 2 if where == "action" else 1)
    }
    for name, value in batch.items(include_nested=True, leaves_only=True):
        assert value.isfinite().all(), name
    lines: dict[int, list[Any]] = defaultdict(list)
    for row in batch.flatten():
        lines[int(row["observation"][0])].append(row)
        assert int(row["step"]) == row["observation"][2]  # counted from the reset, gap or not
    for rows in lines.values():
        for row, later in itertools.pairwise(rows):
            together = int(row["episode_id"]) == int(later["episode_id"])
            follows = torch.equal(row["next", "observation"][1:3], later["observation"][1:3])
            assert together == (follows and not bool(row["next", "done"]))  # equal ids: nothing is missing between


def test_a_sequence_is_cut_at_a_gap() -> None:
    """The last frame before the gap is marked as truncated, since it is still here; its own numbers are right."""
    env = gymnasium.vector.SyncVectorEnv([lambda: Sick("reward", when=3)], autoreset_mode="Disabled")
    with Collector(env, frames_per_batch=40, total_frames=400, layout="sequences", seed=5) as collector:
        for batch in collector:
            assert batch is not None
            ids, done = batch["episode_id"][0, :, 0], batch["next", "done"][0, :, 0]
            changes = ids[1:] != ids[:-1]
            assert torch.equal(changes, done[:-1])
            assert (batch["next", "truncated"] | batch["next", "terminated"])[0, done].all()
        assert collector.stats()["quarantined_rows"] > 5


class SickOnce(Diary):
    """Rewards of 1, but NaN in every third episode."""

    def step(self, action: Any) -> Any:
        observation, _, *others = super().step(action)
        return observation, np.nan if self.episode % 3 == 1 and self.at == 1 else 1.0, *others


@pytest.mark.parametrize("mode", MODES)
def test_an_episode_with_a_gap_stays_out_of_the_means_and_no_frame_is_missing(mode: str) -> None:
    """Returns equal lengths in all other episodes. What was quarantined is collected anew."""
    env = gymnasium.vector.SyncVectorEnv([lambda: SickOnce(0, longest=6)] * 2, autoreset_mode=mode)
    rb = ReplayBuffer(1000)
    with Collector(env, Waver(), frames_per_batch=20, total_frames=400, replay=rb, seed=3) as collector:
        for _ in collector:
            stats = collector.stats()
            assert stats["episode_return"] == stats["episode_length"] or stats["episode_return"] is None
        stats = collector.stats()
    assert stats["quarantined_rows"] > 20
    assert np.isfinite(stats["episode_return"])
    assert stats["collected_frames"] == stats["written_frames"] == rb.write_count == 400
    assert (rb[:]["next", "reward"] == 1).all()
    rb.close()


def test_numbers_too_large_for_the_stored_type_are_quarantined_too() -> None:
    class Loud(Diary):
        def step(self, action: Any) -> Any:
            observation, _, *others = super().step(action)
            return observation, 1e300 if self.at == 2 else 1.0, *others

    with Collector(lambda: Loud(longest=6), frames_per_batch=100, seed=0) as collector, np.errstate(over="ignore"):
        batch = next(collector)
        assert collector.stats()["quarantined_rows"] > 3
        assert collector.stats()["episode_return"] == 1.0  # only episodes of one step have no such number
    assert batch is not None
    assert batch["next", "reward"].isfinite().all()


class Hopeless(Diary):
    def step(self, action: Any) -> Any:
        observation, *_ = super().step(action)
        return observation * np.nan, 0.0, False, False, {}


def test_an_environment_that_never_recovers_is_an_error() -> None:
    collector = Collector(Hopeless, frames_per_batch=4)
    with collector, pytest.raises(NonFinite, match="environment 0 gave nothing but NaN"):
        next(collector)


# ------------------------------------------------------------------------------------------------------- replay
def test_a_full_buffer_that_drops_gives_its_frames_back() -> None:
    """Frames that the buffer refused are not counted: what is collected was written."""
    rb = ReplayBuffer(20, consume_after_n_samples=1, flow=Flow(admission="drop_newest"))
    with Collector(Diary, frames_per_batch=8, total_frames=40, replay=rb, seed=0) as collector:
        for _ in range(4):
            next(collector)
        assert (collector.collected_frames, rb.write_count) == (16, 16)
        assert collector.stats()["dropped_frames"] == 16
        while rb.write_count < 40:
            with contextlib.suppress(NotReady):
                rb.sample(8)
            next(collector)
        assert collector.collected_frames == collector.written_frames == 40
    rb.close()


def test_a_cancelled_write_keeps_its_batch() -> None:
    """Case flow-5, in one process."""
    stop = threading.Event()
    rb = ReplayBuffer(10, consume_after_n_samples=1, flow=Flow(admission="block"))
    with Collector(Diary, frames_per_batch=8, total_frames=16, replay=rb, seed=0, cancel_event=stop) as collector:
        next(collector)
        stop.set()
        for _ in range(2):
            with pytest.raises(Cancelled):
                next(collector)
            assert (collector.collected_frames, collector.budget.reserved, rb.write_count) == (8, 8, 8)
        stop.clear()
        rb.sample(8)
        next(collector)
        assert collector.collected_frames == rb.write_count == 16
        ids = rb[:]["step"]
    assert ids.numel() == 8
    rb.close()


def test_two_collectors_that_do_not_share_a_budget_notice_each_other() -> None:
    rb = ReplayBuffer(100)
    one, other = (Collector(Diary, frames_per_batch=4, replay=rb, seed=0) for _ in range(2))
    next(one)
    next(other)
    with pytest.raises(InvalidArgument, match="share one FrameBudget"):
        next(one)
    one.close()
    other.close()
    rb.close()


class Explodes(Diary):
    def step(self, action: Any) -> Any:
        if self.at == 3:
            raise ZeroDivisionError("boom")
        return super().step(action)


def test_an_environment_that_raises_leaves_exact_counts() -> None:
    """Case flow-11: what was reserved for the batch goes back."""
    with FrameBudget(1000) as budget:
        collector = Collector(lambda: Explodes(longest=10), frames_per_batch=10, budget=budget, seed=1)
        with pytest.raises(ZeroDivisionError):
            list(collector)
        collector.close()
        collector.close()
        assert budget.reserved == 0
        assert budget.collected % 10 == 0
        with pytest.raises(BufferClosed):
            next(collector)


# ------------------------------------------------------------------------------------------------------ save, load
@pytest.mark.parametrize("layout", ["transitions", "sequences"])
def test_what_was_collected_and_not_handed_over_is_saved_and_closed_as_truncated(layout: Any) -> None:
    """Case end-8."""
    options: Any = {"frames_per_batch": 12, "num_envs": 3, "total_frames": 60, "seed": 1, "layout": layout}
    if layout == "transitions":
        options["frames_per_batch"] = 10
    first = Collector(diaries(3, "NextStep", longest=30), **options)
    before = next(first)
    assert before is not None
    state = first.state_dict()
    held = first.stats()["held_frames"]
    first.close()
    assert held > 0
    second = Collector(diaries(3, "NextStep", longest=30), **options)
    second.load_state_dict(state)
    assert second.collected_frames == before.numel()
    after = torch.cat(list(second))  # type: ignore[arg-type]
    assert second.collected_frames == 60
    assert after.numel() == 60 - before.numel()
    saved = [row for row in after.flatten() if int(row["episode_id"]) >> 36 & 4095 == 0]  # of the first life
    assert len(saved) == held
    last = {int(row["episode_id"]): row for row in saved}
    assert all(bool(row["next", "done"]) for row in last.values())
    assert any(bool(row["next", "truncated"]) for row in last.values())
    with pytest.raises(InvalidArgument):
        second.load_state_dict(state)
    second.close()


class Torque(nn.Module):
    """A deterministic action for a pendulum."""

    def forward(self, data: Any) -> Any:
        return data.set("action", 2 * torch.sin(3 * data["observation"][:, 2:]))


def pendulums(mode: str, limit: int = 7) -> Any:
    return lambda: make_batched("Pendulum-v1", 3, max_episode_steps=limit, autoreset_mode=mode)


@pytest.mark.parametrize("layout", ["transitions", "sequences"])
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_environments_that_can_be_saved_go_on_bit_for_bit(mode: str, layout: Any) -> None:
    """Case end-8: saved in the middle of episodes, at their ends, and between an end and its reset."""
    options: Any = {"frames_per_batch": 12, "num_envs": 3, "seed": 1, "layout": layout}
    if layout == "transitions":
        options["frames_per_batch"] = 10
    with Collector(pendulums(mode), Torque(), **options) as whole:
        expected: Any = torch.cat([next(whole) for _ in range(20)])  # type: ignore[misc]
    parts: list[Any] = []
    state: Any = None
    for _ in range(10):
        with Collector(pendulums(mode), Torque(), **options) as part:
            if state is not None:
                part.load_state_dict(state)
            parts += [next(part), next(part)]
            state = part.state_dict()
    got: Any = torch.cat(parts)
    for key in expected.keys(include_nested=True, leaves_only=True):
        assert torch.equal(got[key], expected[key]), key
    flat = got.reshape(-1)
    steps = list(zip(flat["episode_id"].flatten().tolist(), flat["step"].flatten().tolist(), strict=True))
    assert all(step == 0 or (episode, step - 1) in steps for episode, step in steps)


class Noisy(Torque):
    """The same with noise of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def reseed(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    def forward(self, data: Any) -> Any:
        action = super().forward(data)["action"]
        return data.set("action", action + torch.randn(action.shape, generator=self.generator))


@pytest.mark.parametrize("random_frames", [0, 65])
def test_saving_changes_nothing_and_what_was_saved_draws_what_would_have_come(random_frames: int) -> None:
    """Noise, random actions, seeds of episodes and their ids, and the counters."""
    options: Any = {"frames_per_batch": 10, "num_envs": 3, "seed": 1, "random_frames": random_frames}
    with Collector(pendulums("NextStep"), Noisy(), **options) as whole:
        expected: Any = torch.cat([next(whole) for _ in range(12)])  # type: ignore[misc]
        counted = whole.stats()
    with Collector(pendulums("NextStep"), Noisy(), **options) as looked_at:
        parts: list[Any] = []
        for _ in range(12):
            looked_at.state_dict()
            parts.append(next(looked_at))
            assert looked_at.state_dict().keys() == looked_at.state_dict().keys()
    saved: list[Any] = []
    state: Any = None
    for _ in range(4):
        with Collector(pendulums("NextStep"), Noisy(), **options) as part:
            if state is not None:
                part.load_state_dict(state)
            saved += [next(part) for _ in range(3)]
            state = part.state_dict()
            final = part.stats()
    for name, got in (("saved", torch.cat(parts)), ("restored", torch.cat(saved))):
        for key in expected.keys(include_nested=True, leaves_only=True):
            assert torch.equal(got[key], expected[key]), (name, key)
    for name in ("episodes", "episode_return", "episode_length", "reset_rows", "collected_frames"):
        assert final[name] == counted[name], name


def test_a_saved_world_that_cannot_be_put_back_ends_its_episodes() -> None:
    """Case end-8: saved from environments that can be saved, loaded where there are others."""
    options: Any = {"frames_per_batch": 10, "num_envs": 3, "total_frames": 40, "seed": 1}
    with Collector(pendulums("NextStep", limit=90), **options) as first:
        taken = next(first).numel()  # type: ignore[union-attr]
        state = first.state_dict()
        held = len(state["workers"][0]["env"])
    assert (taken, held) == (10, 2)
    ordinary = [lambda: gymnasium.make("Pendulum-v1")] * 3
    with Collector(lambda: SyncVectorEnv(ordinary, autoreset_mode="NextStep"), **options) as second:
        second.load_state_dict(state)
        after: Any = torch.cat(list(second))  # type: ignore[arg-type]
    assert after.numel() == 30
    assert after["next", "truncated"].flatten().tolist()[:3] == [True, True, False]


# -------------------------------------------------------------------------------------------------- in a thread
def test_in_the_background_it_collects_exactly_the_total() -> None:
    rb = ReplayBuffer(2000)
    with Collector(Diary, frames_per_batch=7, num_envs=2, total_frames=500, replay=rb, seed=0) as collector:
        collector.start()
        collector.start()
        with pytest.raises(InvalidArgument, match="cannot be iterated too"):
            next(collector)
        assert collector.wait(timeout=30)
        assert collector.collected_frames == collector.written_frames == rb.write_count == 500
    rb.close()


def test_in_the_background_it_pauses_and_goes_on() -> None:
    """Case rem-8, in a thread."""
    rb = ReplayBuffer(30, consume_after_n_samples=1, flow=Flow(admission="block"))
    with Collector(Diary, frames_per_batch=10, total_frames=90, replay=rb, seed=0) as collector:
        collector.start()
        taken = 0
        while taken < 60:
            collector.pause(timeout=30)
            paused = rb.write_count
            assert collector.collected_frames == paused
            collector.resume()
            taken += rb.sample(10, wait=True, timeout=30).numel()
        assert not collector.wait(timeout=0.01) or rb.write_count == 90
        while taken < 90:
            taken += rb.sample(10, wait=True, timeout=30).numel()
        assert collector.wait(timeout=30)
    rb.close()


def test_in_the_background_closing_frees_it() -> None:
    """Case flow-5, in a thread."""
    rb = ReplayBuffer(30, consume_after_n_samples=1, flow=Flow(admission="block"))
    with FrameBudget() as budget:
        collector = Collector(Diary, frames_per_batch=10, replay=rb, budget=budget)
        collector.start()
        rb.wait_until_sampleable(30, timeout=30)
        collector.close()
        assert (budget.collected, budget.reserved, rb.write_count) == (30, 0, 30)
    rb.close()


def test_in_the_background_failures_are_told() -> None:
    """Case proc-5, in a thread."""
    rb = ReplayBuffer(1000)
    with Collector(lambda: Explodes(longest=10), frames_per_batch=10, replay=rb, seed=1) as collector:
        with pytest.raises(WorkerFailed, match="boom") as problem:
            collector.wait(timeout=30)
        assert isinstance(problem.value.__cause__, ZeroDivisionError)
        with pytest.raises(WorkerFailed):
            collector.check()
    rb.close()
    with Collector(Diary, frames_per_batch=10) as collector, pytest.raises(InvalidArgument, match="needs replay"):
        collector.start()
