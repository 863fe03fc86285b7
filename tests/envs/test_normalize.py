from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from episode_worlds import DictDiary
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from side_by_side import MODES, ours
from tensordict import TensorDict
from torch import nn

from millpond.core.errors import BufferClosed, InvalidArgument
from millpond.envs import check_env
from millpond.envs.normalize import Moments, NormalizedEnv, NormalizedPolicy, Normalizer, RunningStatistics

FORK = multiprocessing.get_context(
    "fork"
)  # others would spend seconds on imports; what attaches is pickled all the same


@pytest.fixture
def statistics() -> Iterator[RunningStatistics]:
    with RunningStatistics(3) as made:
        yield made


def vectors(count: int, size: int = 3, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(5, 3, (count, size))


def assert_moments_of(known: Moments, rows: Any) -> None:
    assert known.count == len(rows)
    np.testing.assert_allclose(known.mean, rows.mean(axis=0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(known.variance, rows.var(axis=0), rtol=1e-9, atol=1e-12)


# -------------------------------------------------------------------------------------------------------- statistics


@settings(max_examples=50)
@given(
    rows=arrays.arrays(np.float64, st.tuples(st.integers(2, 60), st.just(3)), elements=st.floats(-1e3, 1e3)),
    cuts=st.lists(st.integers(0, 60), max_size=5),
)
def test_any_grouping_gives_the_moments_of_all_rows_together(rows: Any, cuts: list[int]) -> None:
    known = Moments.of(rows[:0])
    edges = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    for start, stop in itertools.pairwise(edges):
        known = known.merged(Moments.of(rows[start:stop]))
    assert known.count == len(rows)
    np.testing.assert_allclose(known.mean, rows.mean(axis=0), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(known.variance, rows.var(axis=0), rtol=1e-9, atol=1e-6)


def test_a_small_variance_far_from_zero_survives() -> None:
    """What sums of squares would lose."""
    rows = 1e8 + np.random.default_rng(0).normal(0, 1e-2, (10_000, 2))
    known = Moments.of(rows[:1])
    for at in range(1, 10_000, 77):
        known = known.merged(Moments.of(rows[at : at + 77]))
    np.testing.assert_allclose(known.variance, rows.var(axis=0), rtol=1e-6)


@pytest.mark.parametrize("size", [1, 499, 500, 501, 1234])
def test_vectors_of_any_length(size: int) -> None:
    """Long ones are handled in parts."""
    rows = vectors(50, size)
    with RunningStatistics(size) as made:
        made.update(rows[:20])
        assert_moments_of(made.update(rows[20:]), rows)
        assert_moments_of(made.moments(), rows)


def test_more_rows_than_are_taken_at_once(statistics: RunningStatistics) -> None:
    rows = vectors(9_001)
    assert_moments_of(statistics.update(rows.astype(np.float32)), rows.astype(np.float32).astype(np.float64))


def test_rows_with_nan_or_infinity_are_left_out(statistics: RunningStatistics) -> None:
    """Case nan-1: one of them would spoil the statistics for good."""
    rows = vectors(10)
    spoiled = np.insert(rows, [2, 5], [[np.nan, 0, 0], [0, np.inf, 0]], axis=0)
    assert_moments_of(statistics.update(spoiled), rows)
    assert statistics.update(np.full((4, 3), np.nan)).count == 10


def test_before_two_vectors_the_variance_is_one(statistics: RunningStatistics) -> None:
    assert statistics.moments().variance.tolist() == [1, 1, 1]
    assert statistics.update(np.ones((1, 3))).variance.tolist() == [1, 1, 1]


def test_a_saved_state_goes_on_as_if_never_saved(statistics: RunningStatistics) -> None:
    rows = vectors(100)
    statistics.update(rows[:60])
    saved = statistics.state_dict()
    wanted = statistics.update(rows[60:])
    with RunningStatistics(3) as other:
        other.load_state_dict(saved)
        got = other.update(rows[60:])
    assert got.count == wanted.count
    np.testing.assert_array_equal(got.mean, wanted.mean)
    np.testing.assert_array_equal(got.squares, wanted.squares)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"count": 1, "mean": torch.zeros(3)},
        {"count": torch.tensor(1), "mean": torch.zeros(4), "squares": torch.zeros(4)},
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(statistics: RunningStatistics, state: Any) -> None:
    statistics.update(vectors(5))
    with pytest.raises(InvalidArgument):
        statistics.load_state_dict(state)
    assert_moments_of(statistics.moments(), vectors(5))


@pytest.mark.parametrize("wrong", [np.zeros((2, 4)), np.zeros(3), np.zeros((2, 3, 1)), np.full((2, 3), "x")])
def test_vectors_that_do_not_fit_change_nothing(statistics: RunningStatistics, wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match="is expected"):
        statistics.update(wrong)
    with pytest.raises(InvalidArgument, match="not"):
        statistics.merge(Moments.of(np.zeros((2, 4))))
    assert statistics.count == 0


@pytest.mark.parametrize("size", [0, -1, True, 2.0])
def test_the_size_is_checked(size: Any) -> None:
    with pytest.raises(InvalidArgument, match="size"):
        RunningStatistics(size)


# --------------------------------------------------------------------------------------------------------- processes


def _take_in(pickled: bytes, start: int, batches: int) -> None:
    statistics = pickle.loads(pickled)
    for at in range(start, start + batches):
        statistics.update(vectors(7, seed=at))


def test_processes_share_them_and_no_batch_is_lost_or_doubled(statistics: RunningStatistics) -> None:
    handle = pickle.dumps(statistics)
    workers = [FORK.Process(target=_take_in, args=(handle, 200 * i, 200)) for i in range(2)]
    for worker in workers:
        worker.start()
    _take_in(handle, 400, 200)
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert_moments_of(statistics.moments(), np.concatenate([vectors(7, seed=at) for at in range(600)]))


def _take_in_for_ever(pickled: bytes, ready: Any) -> None:
    statistics = pickle.loads(pickled)
    ready.set()
    while True:
        statistics.update(np.ones((10, 600)))


def test_a_killed_process_leaves_whole_batches_behind() -> None:
    """Case proc-1: all rows are ones, so any half-written record would show."""
    with RunningStatistics(600) as statistics:
        before = 0
        for _ in range(15):
            ready = FORK.Event()
            worker = FORK.Process(target=_take_in_for_ever, args=(pickle.dumps(statistics), ready))
            worker.start()
            assert ready.wait(30)
            while statistics.count == before:
                assert worker.is_alive()
            os.kill(worker.pid or 0, signal.SIGKILL)
            worker.join(30)
            known = statistics.update(np.ones((10, 600)))
            assert known.count % 10 == 0
            assert known.count > before
            assert (known.mean == 1).all()
            assert (known.squares == 0).all()
            before = known.count


def _close(pickled: bytes, inherited: RunningStatistics) -> None:
    pickle.loads(pickled).close()
    inherited.close()


def test_who_attached_detaches_and_the_owner_closes_for_everybody(statistics: RunningStatistics) -> None:
    copy = pickle.loads(pickle.dumps(statistics))
    worker = FORK.Process(target=_close, args=(pickle.dumps(statistics), statistics))
    worker.start()
    worker.join(60)
    assert worker.exitcode == 0
    copy.update(vectors(4))
    assert statistics.count == 4
    statistics.close()
    statistics.close()
    with pytest.raises(BufferClosed):
        copy.update(vectors(4))
    with pytest.raises(BufferClosed):
        pickle.dumps(statistics)
    assert not statistics.path.exists()


# ------------------------------------------------------------------------------------------------- in an environment


def test_the_three_autoreset_modes_give_the_same_statistics() -> None:
    """Every observation counts once, final ones included."""
    known = []
    for mode in MODES:
        with contextlib.closing(NormalizedEnv(ours("Pendulum-v1", 2, mode, max_episode_steps=4))) as env:
            env.reset(seed=0)
            steps = 11 if mode == "NextStep" else 9  # two of them are resets
            for _ in range(steps):
                _, _, terminated, truncated, _ = env.step(np.full((2, 1), 0.5, np.float32))
                ended = terminated | truncated
                if mode == "Disabled" and ended.any():
                    env.reset(options={"reset_mask": ended})
            known.append(env.statistics.moments())
    for other in known[1:]:
        assert other.count == known[0].count == 2 * (9 + 3)
        np.testing.assert_allclose(other.mean, known[0].mean, rtol=1e-12)
        np.testing.assert_allclose(other.squares, known[0].squares, rtol=1e-12)


def test_observations_are_what_the_statistics_say() -> None:
    raw = ours("Pendulum-v1", 3, "SameStep", max_episode_steps=3)
    with contextlib.closing(NormalizedEnv(ours("Pendulum-v1", 3, "SameStep", max_episode_steps=3))) as env:
        seen, plain = env.reset(seed=1)[0], raw.reset(seed=1)[0]
        for at in range(7):
            known = env.statistics.moments()
            wanted = np.clip((plain - known.mean) / np.sqrt(known.variance + 1e-8), -10, 10).astype(np.float32)
            np.testing.assert_allclose(seen, wanted, rtol=1e-6)
            assert seen.dtype == env.single_observation_space.dtype
            action = np.full((3, 1), 0.1 * at, np.float32)
            seen, _, _, truncated, info = env.step(action)
            plain, _, _, _, raw_info = raw.step(action)
            if truncated.any():
                known = env.statistics.moments()
                wanted = (raw_info["final_obs"][1] - known.mean) / np.sqrt(known.variance + 1e-8)
                np.testing.assert_allclose(info["final_obs"][1], np.clip(wanted, -10, 10), rtol=1e-5)
    raw.close()


def test_frozen_statistics_stay_as_they_are(statistics: RunningStatistics) -> None:
    statistics.update(vectors(10))
    with contextlib.closing(NormalizedEnv(ours("Pendulum-v1", 2), statistics, update=False)) as env:
        env.reset(seed=0)
        env.step(np.zeros((2, 1), np.float32))
    assert_moments_of(statistics.moments(), vectors(10))


def test_of_a_dictionary_the_floating_parts_are_normalised() -> None:
    """Case type-1: images and ids keep their bytes."""
    worlds = [lambda: DictDiary(0, 3), lambda: DictDiary(1, 3)]
    env = NormalizedEnv(SyncVectorEnv(worlds, autoreset_mode=AutoresetMode.SAME_STEP))
    with contextlib.closing(env):
        assert env.statistics.size == 3
        assert check_env(env) == []
        observation, _ = env.reset(seed=0)
        assert observation["image"].dtype == np.uint8
        assert observation["id"].tolist() == [[2**40], [2**40 + 1]]
        for _ in range(10):
            observation, _, terminated, truncated, info = env.step(np.ones((2, 2), np.float32))
            assert observation in env.observation_space
            for i in np.flatnonzero(terminated | truncated):
                assert info["final_obs"][i] in env.single_observation_space


@pytest.mark.parametrize("mode", MODES)
def test_the_wrapped_environment_passes_our_own_check(mode: str) -> None:
    """Frozen: what an observation looks like must not depend on how often it was seen."""
    with contextlib.closing(NormalizedEnv(ours("Pendulum-v1", 2, mode, max_episode_steps=5), update=False)) as env:
        assert check_env(env) == []


def test_statistics_that_do_not_fit_are_refused(statistics: RunningStatistics) -> None:
    with contextlib.closing(ours("Acrobot-v1", 2)) as env:
        with pytest.raises(InvalidArgument, match="statistics of 3 numbers, but observations have 6"):
            NormalizedEnv(env, statistics)
        for wrong in ({"epsilon": 0.0}, {"clip": 0}):
            with pytest.raises(InvalidArgument, match=next(iter(wrong))):
                NormalizedEnv(env, **wrong)


# ------------------------------------------------------------------------------------------------------- in a policy


class Copying(nn.Module):
    """Acts with what it observes."""

    seed = -1

    def forward(self, data: Any) -> Any:
        return data.set("action", data["observation"] * 1)

    def reseed(self, seed: int) -> None:
        self.seed = seed


def test_a_policy_sees_normalised_observations_and_others_raw_ones(statistics: RunningStatistics) -> None:
    known = statistics.update(vectors(100))
    normalizer = Normalizer(3)
    policy = NormalizedPolicy(Copying(), normalizer)
    raw = torch.tensor(vectors(5, seed=1), dtype=torch.float32)
    out = policy(TensorDict({"observation": raw.clone()}, [5]))
    assert torch.equal(out["action"], raw.clamp(-10, 10))  # nothing is known yet
    normalizer.refresh(known)
    out = policy(TensorDict({"observation": raw.clone()}, [5]))
    wanted = (raw.numpy() - known.mean) / np.sqrt(known.variance + 1e-8)
    np.testing.assert_allclose(out["action"].numpy(), wanted, rtol=1e-4, atol=1e-5)
    assert torch.equal(out["observation"], raw)
    policy.reseed(4)
    assert policy.policy.seed == 4


def test_the_statistics_of_a_policy_are_frozen_and_saved_with_its_weights(statistics: RunningStatistics) -> None:
    normalizer, other = Normalizer(3), Normalizer(3)
    normalizer.refresh(statistics.update(vectors(100)))
    before = normalizer(torch.ones(2, 3))
    statistics.update(vectors(100, seed=1))
    assert torch.equal(normalizer(torch.ones(2, 3)), before)
    other.load_state_dict(normalizer.state_dict())
    assert torch.equal(other(torch.ones(2, 3)), before)
    assert normalizer(torch.ones(2, 3, dtype=torch.float64)).dtype == torch.float64


def test_outliers_are_clipped() -> None:
    assert Normalizer(1, clip=2.5)(torch.tensor([[-100.0], [1.0], [100.0]])).flatten().tolist() == [-2.5, 1, 2.5]
