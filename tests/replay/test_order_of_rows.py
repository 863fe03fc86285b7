"""Which rows follow one another where the items do not say: environments in turns, several writers, gaps and loads."""

from __future__ import annotations

import copy
import multiprocessing
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from episode_model import Worlds, batch, one
from fast_paths import install

from millpond import BlockingReplayBuffer, Flow, RateLimitedReplayBuffer, ReplayBuffer
from millpond.core.errors import (
    BufferFull,
    CheckpointError,
    InvalidArgument,
    InvalidType,
    NonFinite,
    SchemaMismatch,
    Unsatisfiable,
)
from millpond.replay import ConsumingSampler, HindsightSampler, NStep, PrioritizedSampler, SliceSampler

GAMMA = 0.5


def live_numbers(rb: ReplayBuffer, worlds: Worlds) -> set[int]:
    """Of a buffer in which the oldest leave first."""
    return set(range(len(worlds.steps) - len(rb), len(worlds.steps)))


def check(rb: ReplayBuffer, worlds: Worlds, n: int, live: set[int] | None = None, size: int = 64) -> list[int]:
    """Every sampled n-step transition is what the steps give that really followed. The lengths of the windows."""
    live = live_numbers(rb, worlds) if live is None else live
    lengths = []
    for item in rb.sample(size):
        window = worlds.window(int(item["generation"]), n, live)
        steps = [worlds.steps[i] for i in window]
        assert item["steps_to_next_obs"].item() == len(window)
        assert item["next", "reward"].item() == pytest.approx(
            sum(GAMMA**j * s.reward for j, s in enumerate(steps)), abs=1e-5
        )
        place = steps[-1].episode * 100 + steps[-1].step + 1
        assert item["next", "observation", "achieved_goal"].item() == place
        assert item["next", "done"].item() == steps[-1].done
        assert item["next", "terminated"].item() == steps[-1].terminated
        lengths.append(len(window))
    return lengths


@pytest.mark.parametrize("shared", [False, True], ids=["private", "shared"])
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(("num_envs", "capacity"), [(1, 10), (2, 12), (2, 17), (3, 16), (5, 23)])
def test_rows_of_several_environments_are_never_mixed(
    num_envs: int, capacity: int, prefetch: int, shared: bool
) -> None:
    """Also where a step of all environments is evicted in part, after `empty`, and with several steps in one write."""
    worlds = Worlds(seed=num_envs)
    sampler = NStep(3, GAMMA)
    with ReplayBuffer(capacity, sampler=sampler, num_envs=num_envs, prefetch=prefetch, shared=shared, seed=0) as rb:
        lengths: set[int] = set()
        for turn in range(25):
            time = worlds.rnd.randint(1, 2)
            rb.extend(batch(worlds.written([worlds.step(env) for _ in range(time) for env in range(num_envs)])))
            if turn == 12:
                rb.empty()
                rb.extend(batch(worlds.written([worlds.step(env) for env in range(num_envs)])))
            if not prefetch:  # what was drawn ahead was right when it was drawn
                lengths |= set(check(rb, worlds, 3))
        rb.sample(8)
        rb.sample(64)
        lengths |= set(check(rb, worlds, 3))
        assert 3 in lengths


@pytest.mark.parametrize("base", [ConsumingSampler, PrioritizedSampler], ids=["first in, first out", "prioritized"])
def test_environments_in_turns_with_items_that_leave(base: Any) -> None:
    """What was delivered is gone, and a window ends before it."""
    worlds = Worlds(seed=3, lengths=(4, 9))
    rb = ReplayBuffer(40, sampler=NStep(3, GAMMA, base=base()), num_envs=3, consume_after_n_samples=1, seed=0)
    live: set[int] = set()
    for _ in range(30):
        for row in worlds.written([worlds.step(env) for env in range(3)]):
            live.add(worlds.steps.index(row))
        rb.extend(batch(worlds.steps[-3:]))
        before = set(live)
        numbers = []
        for item in rb.sample(2):
            number = int(item["generation"])
            window = worlds.window(number, 3, before)
            assert item["steps_to_next_obs"].item() == len(window)
            numbers.append(number)
        live -= set(numbers)
        while len(rb) > 20:
            live -= set(rb.sample(3)["generation"].tolist())


def test_slices_of_environments_in_turns_are_of_one_environment() -> None:
    worlds = Worlds(seed=1, lengths=(3, 12))
    rb = ReplayBuffer(31, sampler=SliceSampler(slice_len=4), num_envs=2, seed=0)
    for _ in range(40):
        rb.extend(batch(worlds.written([worlds.step(env) for env in range(2)])))
        if rb.can_sample(32):
            for part in rb.sample(32)["generation"].view(8, 4).tolist():
                assert part == worlds.window(part[0], 4, live_numbers(rb, worlds))


def test_goals_of_environments_in_turns_are_of_one_environment() -> None:
    worlds = Worlds(seed=2, lengths=(3, 12))
    rb = ReplayBuffer(31, sampler=HindsightSampler(lambda a, d: a - d, fraction=1.0), num_envs=2, seed=0)
    for _ in range(40):
        rb.extend(batch(worlds.written([worlds.step(env) for env in range(2)])))
        for item in rb.sample(16):
            here = worlds.steps[int(item["generation"])]
            goal = int(item["observation", "desired_goal"]) - 1
            assert goal // 100 == here.episode
            assert goal % 100 >= here.step


@pytest.mark.parametrize(
    "make", [lambda: NStep(3, GAMMA), lambda: SliceSampler(slice_len=2), lambda: HindsightSampler(lambda a, d: a - d)]
)
def test_several_rows_that_could_be_anything_are_refused_with_the_two_ways_out(make: Any) -> None:
    worlds = Worlds()
    rows = batch([worlds.step(env) for env in range(2)])
    rb = ReplayBuffer(10, sampler=make())
    with pytest.raises(InvalidArgument, match=r"num_envs=n.*episode_id and step"):
        rb.extend(rows)
    assert rb.schema is None
    assert rb.write_count == 0
    rb.add(one([worlds.step(0)]))
    with pytest.raises(InvalidArgument, match="num_envs"):
        rb.extend(rows)
    assert rb.write_count == 1
    ReplayBuffer(10, sampler=make()).extend(batch([worlds.step(env) for env in range(2)], ids="episode_id step"))
    ReplayBuffer(10).extend(rows)


def test_num_envs_divides_every_write() -> None:
    worlds = Worlds()
    for sampler in (NStep(2, GAMMA), None):
        rb = ReplayBuffer(10, sampler=sampler, num_envs=3)
        for rows in ([worlds.step(0)] * 2, [worlds.step(0)] * 4):
            with pytest.raises(InvalidArgument, match="num_envs=3"):
                rb.extend(batch(rows))
        with pytest.raises(InvalidArgument, match="num_envs=3"):
            rb.add(one([worlds.step(0)]))
        assert (rb.write_count, rb.schema) == (0, None)
        rb.extend(batch([worlds.step(0)] * 6))
    ids = ReplayBuffer(10, sampler=NStep(2, GAMMA), num_envs=3)  # the ids decide
    ids.extend(batch([worlds.step(0)] * 2, ids="episode_id step"))


@pytest.mark.parametrize(("value", "error"), [(0, InvalidArgument), (1.5, InvalidType), (True, InvalidType)])
def test_num_envs_is_a_number_of_environments(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="num_envs"):
        ReplayBuffer(10, num_envs=value)
    with pytest.raises(Unsatisfiable, match="num_envs=11"):
        ReplayBuffer(10, num_envs=11)


@pytest.mark.parametrize(
    "make",
    [
        lambda **more: BlockingReplayBuffer(12, sampler=NStep(3, GAMMA, base=ConsumingSampler()), **more),
        lambda **more: RateLimitedReplayBuffer(12, samples_per_insert=100, sampler=NStep(3, GAMMA), **more),
    ],
)
def test_the_other_buffers_take_num_envs_too(make: Any) -> None:
    worlds = Worlds()
    rb = make(num_envs=2)
    with pytest.raises(InvalidArgument, match="num_envs=2"):
        rb.extend(batch([worlds.step(0)]))
    for _ in range(6):
        rb.extend(batch(worlds.written([worlds.step(env) for env in range(2)])))
    check(rb, worlds, 3, size=6)


def test_one_by_one_the_items_are_one_stream() -> None:
    worlds = Worlds(lengths=(5, 9))
    rb = ReplayBuffer(14, sampler=NStep(4, GAMMA), seed=0)
    for _ in range(40):
        rb.add(one(worlds.written([worlds.step(0)])))
    assert 4 in check(rb, worlds, 4)


def in_a_thread(call: Any) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_threads_that_write_in_turns_are_not_mixed_and_are_told() -> None:
    worlds = Worlds(lengths=(20, 20))
    rb = ReplayBuffer(100, sampler=NStep(4, GAMMA), seed=0)

    def write(env: str, steps: int) -> None:
        worlds.interrupted()  # another writer came between
        for _ in range(steps):
            rb.add(one(worlds.written([worlds.step(env)])))

    write("here", 5)
    in_a_thread(lambda: write("there", 5))
    with pytest.warns(RuntimeWarning, match="episode_id and step"):
        write("here", 5)
    in_a_thread(lambda: write("elsewhere", 5))
    write("here", 5)  # told once
    assert 4 in check(rb, worlds, 4)


def test_the_compiled_write_leaves_it_to_the_slow_one_to_note_what_does_not_follow(way: Any) -> None:
    """Where the last writer goes on there is nothing to note."""
    worlds = Worlds(lengths=(40, 40))
    rb = ReplayBuffer(60, sampler=NStep(4, GAMMA), num_envs=2, seed=0)
    rows = batch(worlds.written([worlds.step(env) for env in range(2)]))
    rb.extend(rows)
    short = install(rb, way)
    for _ in range(5):
        rb.extend(batch(worlds.written([worlds.step(env) for env in range(2)])))
    assert short.done == {"put": 5}
    worlds.interrupted()
    in_a_thread(lambda: rb.extend(batch(worlds.written([worlds.step(env) for env in range(2, 4)]))))
    assert short.done == {"put": 5}
    worlds.interrupted()
    with pytest.warns(RuntimeWarning):
        rb.extend(batch(worlds.written([worlds.step(env) for env in range(2)])))
    assert short.done == {"put": 5}
    for _ in range(3):
        rb.extend(batch(worlds.written([worlds.step(env) for env in range(2)])))
    assert short.done == {"put": 8}
    with pytest.raises(InvalidArgument):
        rb.extend(batch([worlds.step(0)]))
    check(rb, worlds, 4, size=300)


def write_two(rb: ReplayBuffer, rows: list[Any]) -> None:
    for row in rows:
        rb.add(row)


def test_processes_that_write_in_turns_are_not_mixed() -> None:
    """A forked child too is another writer than its parent."""
    worlds = Worlds(lengths=(30, 30))
    for method in ("fork", "spawn"):
        with ReplayBuffer(100, sampler=NStep(4, GAMMA), seed=0, shared=True) as rb:
            worlds.steps.clear()
            worlds.interrupted()
            write_two(rb, [one(worlds.written([worlds.step(0)])) for _ in range(5)])
            worlds.interrupted()
            rows = [one(worlds.written([worlds.step(1)])) for _ in range(5)]
            context: Any = multiprocessing.get_context(method)
            process = context.Process(target=write_two, args=(rb, rows))
            process.start()
            process.join()
            assert process.exitcode == 0
            worlds.interrupted()
            with pytest.warns(RuntimeWarning, match="in turns"):
                write_two(rb, [one(worlds.written([worlds.step(0)])) for _ in range(5)])
            assert 4 in check(rb, worlds, 4)


@pytest.mark.parametrize("how", ["loads", "load_state_dict", "share"])
@pytest.mark.parametrize("same", [True, False], ids=["the same buffer", "another"])
def test_no_window_reaches_from_what_was_loaded_to_what_came_after(how: str, same: bool, tmp_path: Path) -> None:
    """`share` changes nothing: the stream goes on."""
    worlds = Worlds(lengths=(6, 12))

    def buffer() -> ReplayBuffer:
        return ReplayBuffer(30, sampler=NStep(4, GAMMA), num_envs=2, seed=0)

    rb = buffer()
    for _ in range(20):
        rb.extend(batch(worlds.written([worlds.step(env) for env in range(2)])))
    with rb if same else buffer() as other:
        if how == "share":
            rb.share()
            other = rb
        elif how == "loads":
            rb.dumps(tmp_path / "saved")
            other.loads(tmp_path / "saved")
        else:
            other.load_state_dict(copy.deepcopy(rb.state_dict()))
        if how != "share":
            worlds.now.clear()
            worlds.interrupted()
        for _ in range(4):
            other.extend(batch(worlds.written([worlds.step(env) for env in range(2)])))
        check(other, worlds, 4, size=500)
        once_more = buffer()
        once_more.load_state_dict(other.state_dict())
        check(once_more, worlds, 4, size=500)
    rb.close()


def test_a_buffer_on_disk_that_is_opened_again_begins_new_windows(tmp_path: Path) -> None:
    worlds = Worlds(lengths=(50, 50))
    from millpond.replay import MappedStorage

    rb = ReplayBuffer(MappedStorage(30, tmp_path / "pond"), sampler=NStep(4, GAMMA), num_envs=2, seed=0)
    for _ in range(5):
        rb.extend(batch(worlds.written([worlds.step(env) for env in range(2)])))
    attached = ReplayBuffer.attach(rb.handle())  # a second face of the same buffer in this process: the same writer
    attached.extend(batch(worlds.written([worlds.step(env) for env in range(2)])))
    assert 4 in check(attached, worlds, 4)
    attached.close()
    rb.close()


def test_a_checkpoint_of_another_number_of_environments_is_refused() -> None:
    worlds = Worlds()
    rb = ReplayBuffer(30, sampler=NStep(4, GAMMA), num_envs=2)
    rb.extend(batch([worlds.step(env) for env in range(2)]))
    for num_envs in (None, 1, 3):
        other = ReplayBuffer(30, sampler=NStep(4, GAMMA), num_envs=num_envs)
        with pytest.raises(CheckpointError, match="num_envs=2"):
            other.load_state_dict(rb.state_dict())
        assert other.write_count == 0


def test_what_did_not_come_in_ends_a_window() -> None:
    """A batch that was dropped, or refused, is a step that is missing."""
    worlds = Worlds(lengths=(50, 50))
    rb = ReplayBuffer(12, sampler=NStep(4, GAMMA), num_envs=2, seed=0, check_finite=True)
    for turn in range(12):
        rows = [worlds.step(env) for env in range(2)]
        if turn % 4 == 3:
            rows[1].reward = float("nan")
            with pytest.raises(NonFinite):
                rb.extend(batch(rows))
            worlds.interrupted()
        else:
            rb.extend(batch(worlds.written(rows)))
    check(rb, worlds, 4)

    for admission in ("drop_newest", "raise"):
        worlds = Worlds(lengths=(50, 50))
        queue = ReplayBuffer(
            6,
            sampler=NStep(4, GAMMA, base=ConsumingSampler()),
            num_envs=2,
            flow=Flow(admission=admission),
        )
        live: set[int] = set()
        for turn in range(12):
            rows = [worlds.step(env) for env in range(2)]
            try:
                kept = len(queue.extend(batch(rows))) > 0
            except BufferFull:
                kept = False
            if kept:
                live |= set(range(len(worlds.steps), len(worlds.steps) + 2))
                worlds.written(rows)
            else:
                worlds.interrupted()
            if turn % 3 == 2:
                check(queue, worlds, 4, live, size=2)
                live -= set(sorted(live)[:2])


@pytest.mark.parametrize("sampler", [NStep(3, GAMMA), HindsightSampler(lambda a, d: a - d)], ids=["nstep", "hindsight"])
def test_an_end_that_is_written_later_ends_a_window(sampler: Any) -> None:
    """Also one that is put back with `update`, after the sampler looked."""
    worlds = Worlds(lengths=(50, 50))
    rb = ReplayBuffer(20, sampler=sampler, num_envs=1, seed=0)
    rb.extend(batch(worlds.written([worlds.step(0) for _ in range(10)])))
    rb.sample(8)
    rb.update(torch.tensor([4]), {"next": {"done": torch.tensor([[True]])}})
    for item in rb.sample(200):
        number = int(item["generation"])
        if isinstance(sampler, NStep):
            assert item["steps_to_next_obs"].item() == min(3, (5 if number < 5 else 10) - number)
        elif number < 5 and item["relabelled"]:
            assert item["observation", "desired_goal"].item() <= worlds.steps[4].episode * 100 + 5


@pytest.mark.parametrize("consume", [None, 1], ids=["kept", "first in, first out"])
def test_an_episode_id_without_a_step_is_the_order_of_writing(consume: int | None) -> None:
    """In the field of the user's choice, however the environments interleave."""
    worlds = Worlds(lengths=(2, 9))
    base = None if consume is None else ConsumingSampler()
    rb = ReplayBuffer(25, sampler=NStep(3, GAMMA, base=base, episode_key=("info", "trajectory")), seed=0)
    live: set[int] = set()
    for _ in range(60):
        envs = [worlds.rnd.randrange(3) for _ in range(worlds.rnd.randint(1, 4))]
        rows = worlds.written([worlds.step(env) for env in envs])
        items = batch(rows, ids="episode_id")
        items["info"] = {"trajectory": items.pop("episode_id")}
        rb.extend(items)
        live |= set(range(len(worlds.steps) - len(rows), len(worlds.steps)))
        live = set(sorted(live)[-25:])
        for row in worlds.steps:  # an id is an episode's: what another episode did does not count
            row.env = (row.env, row.episode) if not isinstance(row.env, tuple) else row.env
        check(rb, worlds, 3, live, size=2)
        if consume is not None:
            live -= set(sorted(live)[:2])
    with pytest.raises(SchemaMismatch, match="needs step"):
        ReplayBuffer(25, sampler=NStep(3, GAMMA), consume_after_n_samples=1).extend(
            batch([worlds.step(0)], ids="episode_id")
        )


@pytest.mark.parametrize("ids", ["episode_id", "episode_id step"])
@pytest.mark.parametrize("evicted", [False, True])
def test_after_a_load_the_ids_of_a_new_process_may_begin_anew(ids: str, evicted: bool) -> None:
    """A new environment counts its episodes from the first again; one that goes on with its episode is continued."""
    worlds = Worlds(lengths=(40, 40))
    rb = ReplayBuffer(25, sampler=NStep(4, GAMMA), seed=0)
    for _ in range(30 if evicted else 8):
        rb.extend(batch(worlds.written([worlds.step(env) for env in range(1)]), ids=ids))
    rb.load_state_dict(rb.state_dict())
    new = Worlds(lengths=(40, 40))  # the same ids, from step 0 on
    new.steps = list(worlds.steps)
    for _ in range(20):
        rb.extend(batch(new.written([new.step(0)]), ids=ids))
        check(rb, new, 4)
    again = ReplayBuffer(25, sampler=NStep(4, GAMMA), seed=0)
    again.load_state_dict(rb.state_dict())
    check(again, new, 4, size=300)
    if ids == "episode_id step":  # the same environment goes on
        for _ in range(5):
            again.extend(batch(new.written([new.step(0)]), ids=ids))
            check(again, new, 4, size=100)


def test_an_id_that_begins_once_more_is_another_episode() -> None:
    rb = ReplayBuffer(50, sampler=NStep(4, GAMMA), seed=0)
    worlds = Worlds(lengths=(20, 20))
    for _ in range(4):  # episodes that nobody ended, each with the id 1
        worlds.now.clear()
        worlds.made = 0
        worlds.interrupted()
        for _ in range(worlds.rnd.randint(3, 9)):
            rb.add(one(worlds.written([worlds.step(0)]), ids="episode_id step"))
    check(rb, worlds, 4, size=300)


def test_threads_may_sample_windows_at_once() -> None:
    """One index serves all threads of a process."""
    worlds = Worlds(lengths=(3, 9))
    rb = ReplayBuffer(60, sampler=NStep(3, GAMMA), num_envs=2, seed=0)
    rows = worlds.written([worlds.step(env) for _ in range(600) for env in range(2)])
    windows = {i: worlds.window(i, 3, set(range(i, len(rows)))) for i in range(len(rows))}
    found: list[Any] = []
    rb.extend(batch(rows[:60]))
    stop = threading.Event()

    def sample() -> None:
        while not stop.is_set():
            part = rb.sample(16)
            found.extend(zip(part["generation"].tolist(), part["steps_to_next_obs"][:, 0].tolist(), strict=True))

    threads = [threading.Thread(target=sample) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i in range(60, 1200, 2):
        rb.extend(batch(rows[i : i + 2]))
    stop.set()
    for thread in threads:
        thread.join()
    assert all(1 <= steps <= len(windows[number]) for number, steps in found)
    assert set(check(rb, worlds, 3)) <= {1, 2, 3}
