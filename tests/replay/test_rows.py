"""Gathering rows: the same bytes by every way, and nothing outside of the storage, whatever a sampler answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fast_paths import compiled

from millpond import ReplayBuffer
from millpond.core.errors import InvalidArgument
from millpond.core.schema import Schema
from millpond.replay import rows as rows_module
from millpond.replay.kernels import loading as kernels
from millpond.replay.rows import FEW, MANY, Rows
from millpond.replay.samplers.protocol import Draw, Items, Randomness
from millpond.replay.storage import TensorStorage


@pytest.fixture(params=["Numba", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the compiled gathers, and as long as they are not loaded, or cannot be."""
    monkeypatch.setattr(rows_module, "VAST", 1)
    found = compiled() if request.param == "Numba" else None
    monkeypatch.setattr(kernels, "request", lambda: found)
    return str(request.param)


def stored(capacity: int, words: int) -> Rows:
    schema = Schema({"x": (torch.int64, (words,))})
    storage = TensorStorage(capacity)
    storage.bind(schema)
    assert storage.rows is not None
    storage.rows.copy_(torch.from_numpy(np.random.default_rng(0).integers(0, 256, (capacity, 8 * words), np.uint8)))
    return Rows(storage, schema)


@pytest.mark.parametrize("words", [1, 2, 7, 8, 9, 14, 16, 17, 100])
@pytest.mark.parametrize("n", [1, FEW, FEW + 1, 255, MANY - 1, MANY, 3000])
def test_every_way_of_gathering_gives_the_same_rows(way: str, words: int, n: int) -> None:
    rows = stored(500, words)
    slots = np.random.default_rng(n).integers(0, 500, n)
    slots[0], slots[-1] = 499, 0  # the ends, beyond which is nothing
    found = rows.read(slots).view(torch.uint8)
    assert torch.equal(found, rows.storage.read(torch.from_numpy(slots)).view(torch.uint8))
    assert torch.equal(found, rows.gather(slots).view(torch.uint8))
    backwards = rows.read(slots[::-1]).view(torch.uint8)
    assert torch.equal(backwards, found.flip(0))


def test_the_way_is_what_it_says(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would compare torch with torch."""
    rows, used = stored(500, 14), []
    select = torch.index_select
    monkeypatch.setattr(torch, "index_select", lambda *given, **more: used.append(1) or select(*given, **more))
    into = torch.empty((FEW + 1, 14), dtype=torch.int64)
    assert rows.read(np.arange(FEW + 1), into) is into
    assert torch.equal(into, rows._words[: FEW + 1])
    assert len(used) == (way == "torch")


class Nonsense:
    """A sampler as a beginner might write it: it answers whatever it was told to."""

    replacement = True

    def __init__(self, slots: Any, numbers: Any) -> None:
        self.answer = Draw(slots, numbers)

    def memory(self, capacity: int) -> dict[str, int]:
        return {}

    def bind(self, arrays: Any) -> None:
        return

    def ready(self, items: Items, n: int) -> str | None:
        return None

    def draw(self, items: Items, n: int, random: Randomness) -> Draw:
        return self.answer


@pytest.mark.parametrize(
    ("slots", "numbers", "words"),
    [
        (np.array([0, 10]), np.array([0, 10]), "slots 0 to 10, outside 0 to 9"),
        (np.array([0, -1]), np.array([0, 9]), "slots -1 to 0, outside 0 to 9"),
        (np.array([0, 2**62]), np.array([0, 1]), "outside 0 to 9"),
        (np.array([0, 1], np.int32), np.array([0, 1]), r"slots as a one-dimensional int64 array, not int32\[2\]"),
        (np.array([0.0, 1.0]), np.array([0, 1]), r"slots as a .* not float64\[2\]"),
        (np.array([[0, 1]]), np.array([0, 1]), r"not int64\[1, 2\]"),
        (torch.tensor([0, 1]), np.array([0, 1]), r"not torch.int64\[2\]"),
        ([0, 1], np.array([0, 1]), "not list"),
        (np.array([0, 1]), [0, 1], "numbers as a one-dimensional int64 array, not list"),
        (np.array([0, 1]), np.array([0]), "2 slots with 1 numbers"),
        (np.array([], np.int64), np.array([], np.int64), "0 slots with 0 numbers"),
    ],
)
def test_what_a_sampler_of_the_users_answers_is_checked(
    monkeypatch: pytest.MonkeyPatch, slots: Any, numbers: Any, words: str
) -> None:
    """prio-9, for samplers: a clear error, never a crash of the interpreter. Nothing is counted."""
    monkeypatch.setattr(rows_module, "VAST", 1)
    with ReplayBuffer(10, sampler=Nonsense(slots, numbers)) as rb:
        rb.extend({"x": torch.arange(10)})
        with pytest.raises(InvalidArgument, match=words):
            rb.sample(2)
        assert rb.stats()["sample_calls"] == 0
        assert rb.peek(3)["x"].shape == (3,)
