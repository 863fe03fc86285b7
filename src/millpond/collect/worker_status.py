"""What the workers of one collector say about themselves, in shared words: read at any time, without asking them.

Each worker writes its own line and nobody else does, while it lives. The first words are the collector's orders.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

from millpond.collect.budget import FrameBudget
from millpond.collect.rollout import MAKING, NOTHING, RECENT, Tally
from millpond.shm import identity

STATES = ("starting", "collecting", "writing", "waiting", "paused", "finished", "failed", "dead")
DOING = (None, "making the environments", "reset()", "step()", "the policy", "state_dict()")  # by Rollout's numbers
STARTING, COLLECTING, WRITING, WAITING, PAUSED, FINISHED, FAILED, DEAD = range(len(STATES))
_STOP, _PAUSE, _HURRY, _FIRST = 0, 1, 2, 16
_PID, _STARTED, _STATE, _LIVES, _STEPPED, _HELD, _VERSION, _PAUSED = range(8)  # words of a line
_QUARANTINED, _LOST, _RESETS, _DROPPED, _EPISODES, _DOING, _SINCE = range(8, 15)
_COUNTED = (_QUARANTINED, _LOST, _RESETS, _DROPPED, _EPISODES)  # these go on where an earlier life ended
_SUMS = {
    "held_frames": _HELD,  # collected, not handed over, and not counted
    "dropped_frames": _DROPPED,  # refused by a buffer that drops
    "reset_rows": _RESETS,  # rows of NEXT_STEP environments that are no transitions
    "quarantined_rows": _QUARANTINED,
    "unbootstrappable": _LOST,
    "episodes": _EPISODES,
}
_RETURNS, _LENGTHS, _LINE = 16, 16 + RECENT, 16 + 2 * RECENT


class WorkerTable:
    """The lines of ``workers`` workers in ``memory``, which is ``WorkerTable.nbytes(workers)`` zeros at first."""

    def __init__(self, memory: Any, *, workers: int) -> None:
        view = memoryview(memory)
        self._orders = view[: 8 * _FIRST].cast("q")
        starts = [8 * (_FIRST + i * _LINE) for i in range(workers)]
        self.lines = [WorkerLine(view[at : at + 8 * _LINE]) for at in starts]

    @staticmethod
    def nbytes(workers: int) -> int:
        """The memory that so many workers need."""
        return 8 * (_FIRST + workers * _LINE)

    @property
    def stopping(self) -> bool:
        """The workers are to end."""
        return self._orders[_STOP] != 0

    @property
    def pausing(self) -> int:
        """The number of the pause that the workers are to begin when their batch is done; 0 when they are to run."""
        return max(0, self._orders[_PAUSE])

    def stop(self) -> None:
        """Order all workers to end."""
        self._orders[_STOP] = 1

    @property
    def hurrying(self) -> bool:
        """The workers are to pause, or to end, between two steps, with a batch that is not done."""
        return self._orders[_HURRY] != 0 or self.stopping

    def pause(self, *, hurry: bool = False) -> int:
        """Order all workers to pause, when their batch is done or at once; the number of the pause."""
        self._orders[_HURRY] = int(hurry)
        if not self.pausing:
            self._orders[_PAUSE] = 1 - self._orders[_PAUSE]
        return self.pausing

    def resume(self) -> None:
        """Order all workers to go on."""
        self._orders[_PAUSE] = -abs(self._orders[_PAUSE])
        self._orders[_HURRY] = 0

    def stats(self, budget: FrameBudget, lines: Sequence[int], deaths: Sequence[Sequence[str]]) -> dict[str, Any]:
        """The counters of a collector: sums over its workers, and an entry for each.

        Worker i counts on line ``lines[i]`` of the budget; ``deaths[i]`` says why it was restarted, each time. Means of
        returns and lengths are over each worker's last 32 episodes; None before the first.
        """
        episodes = list(itertools.chain.from_iterable(line.recent() for line in self.lines))
        means = [sum(values) / len(episodes) for values in zip(*episodes, strict=True)] if episodes else [None, None]
        frames = [budget.collected_by(line) for line in lines]
        return {
            "collected_frames": budget.collected,
            "reserved_frames": budget.reserved,
            "total_frames": budget.total,
            **{name: sum(line.words[word] for line in self.lines) for name, word in _SUMS.items()},
            "episode_return": means[0],
            "episode_length": means[1],
            "restarts": sum(map(len, deaths)),
            "workers": [
                line.describe(worker=i, frames=frames[i], deaths=deaths[i]) for i, line in enumerate(self.lines)
            ],
        }


class WorkerLine:
    """One worker's words."""

    def __init__(self, view: memoryview) -> None:
        self.words, self._floats = view.cast("q"), view.cast("d")
        self._base = dict.fromkeys(_COUNTED, 0)

    def enter(self) -> int:
        """Called by a worker when it begins: the number of this life of it, from 0."""
        words = self.words
        words[_PID], words[_STARTED] = identity.me()
        words[_STATE], words[_STEPPED], words[_HELD], words[_PAUSED] = STARTING, time.monotonic_ns(), 0, 0
        self.doing(MAKING)
        self._base = {word: words[word] for word in _COUNTED}
        words[_LIVES] += 1
        return words[_LIVES] - 1

    def touch(self) -> None:
        """A step was made."""
        self.words[_STEPPED] = time.monotonic_ns()

    def doing(self, what: int) -> None:
        """Others' code is called, or has returned."""
        self.words[_SINCE] = time.monotonic_ns()  # first: who reads it last never sees a new call with an old time
        self.words[_DOING] = what

    def activity(self) -> tuple[str | None, float]:
        """Whose code runs, and since when, in seconds of the clock of ``time.monotonic``; None: nobody's but ours."""
        return DOING[self.words[_DOING]], self.words[_SINCE] / 1e9

    def leave(self, state: int) -> None:
        """Nobody is here any more: what was true of the one who was is not told any longer. The counts stay."""
        words = self.words
        words[_STATE], words[_DOING], words[_HELD], words[_VERSION] = state, NOTHING, 0, 0
        words[_PID] = words[_STARTED] = 0

    def told(self) -> tuple[int, bytes]:
        """This line, to be carried to another process: the clock here, and the words."""
        return time.monotonic_ns(), self.words.tobytes()

    def hear(self, said: tuple[int, bytes]) -> None:
        """Say what that line said; which pause is whose business stays as it is here."""
        now, words = said
        paused = self.paused
        self.words[:] = memoryview(words).cast("q")
        late = time.monotonic_ns() - now
        self.words[_STEPPED] += late
        self.words[_SINCE] += late
        self.paused = paused

    def report(self, tally: Tally, *, held: int, dropped: int, version: int) -> None:
        """What was counted since ``enter``."""
        words, base = self.words, self._base
        counts = (tally.quarantined, tally.unbootstrappable, tally.resets, dropped, tally.episodes)
        for word, count in zip(_COUNTED, counts, strict=True):
            words[word] = base[word] + count
        words[_HELD], words[_VERSION] = held, version
        for i, (total, length) in enumerate(tally.finished):
            self._floats[_RETURNS + i], words[_LENGTHS + i] = total, length

    @property
    def lives(self) -> int:
        """How often the worker began."""
        return self.words[_LIVES]

    @lives.setter
    def lives(self, lives: int) -> None:
        self.words[_LIVES] = lives

    @property
    def state(self) -> int:
        """One of the numbers of ``STATES``."""
        return self.words[_STATE]

    @state.setter
    def state(self, state: int) -> None:
        self.words[_STATE] = state

    @property
    def paused(self) -> int:
        """The number of the latest pause that the worker began: an old "paused" is not mistaken for a new one."""
        return self.words[_PAUSED]

    @paused.setter
    def paused(self, pause: int) -> None:
        self.words[_PAUSED] = pause

    @property
    def process(self) -> tuple[int, int]:
        """(pid, start time) of the latest life; (0, 0) before the first."""
        return self.words[_PID], self.words[_STARTED]

    def recent(self) -> list[tuple[float, int]]:
        """Return and length of the latest episodes, of the latest life that ended any."""
        lengths = self.words[_LENGTHS:_LINE].tolist()
        return [(self._floats[_RETURNS + i], length) for i, length in enumerate(lengths) if length]

    def describe(self, *, worker: int, frames: int, deaths: Sequence[str]) -> dict[str, Any]:
        """This worker's entry in ``stats()["workers"]``. What is true of a process is None where there is none."""
        words, now, there = self.words, time.monotonic(), self.words[_PID] != 0
        doing, since = self.activity()
        return {
            "id": worker,
            "pid": words[_PID] or None,
            "state": STATES[words[_STATE]],
            "frames": frames,
            "last_step_age_s": now - words[_STEPPED] / 1e9 if there else None,
            "doing": doing,
            "doing_s": now - since if doing else None,
            "policy_version": words[_VERSION] if there else None,
            "restarts": len(deaths),
            "reason": deaths[-1] if deaths else None,
        }
