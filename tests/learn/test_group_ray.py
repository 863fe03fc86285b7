"""The learner group over Ray actors: the same numbers, and the same ends."""

from __future__ import annotations

import functools
import time
from typing import Any

import pytest

from millpond.core.errors import WorkerFailed
from millpond.learn.group import LearnerGroup
from tests.algos.batches import batch_for, make, snapshot
from tests.learn.test_group import ENDS_S, faulty, furthest, made

pytestmark = pytest.mark.usefixtures("ray_session")


@pytest.mark.parametrize("name", ["sac", "dqn"])
def test_actors_learn_what_one_process_learns(name: str) -> None:
    alone, together = make(name), make(name)
    make_algorithm = functools.partial(made, name)
    with LearnerGroup(together, make_algorithm, world_size=2, batch_size=48, launch="ray") as group:
        for step in range(50):
            batch = batch_for(name, 48, seed=step)
            alone.update(batch.clone())
            group.update(batch)
    assert furthest(snapshot(alone), snapshot(together)) <= 1e-5


@pytest.mark.parametrize("deed", ["raise", "die", "hang"])
def test_one_failing_actor_ends_the_group(deed: str) -> None:
    algorithm: Any = faulty(deed, "cpu")
    group = LearnerGroup(
        algorithm, functools.partial(faulty, deed), world_size=3, batch_size=48, launch="ray", timeout=3
    )
    for step in range(2):
        group.update(batch_for("td3", 48, seed=step))
    began = time.monotonic()
    words = {"raise": "ZeroDivisionError: on purpose", "die": "rank 1 of 3", "hang": "rank 1 of 3 did not answer"}
    with pytest.raises(WorkerFailed, match=words[deed]):
        group.update(batch_for("td3", 48, seed=2))
    assert time.monotonic() - began < ENDS_S
    group.close()
