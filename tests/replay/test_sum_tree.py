"""The sum tree against a list: what it holds, what it draws, and that both engines give the same bits."""

from __future__ import annotations

import bisect
import itertools
import math
import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.core.errors import InvalidArgument, InvalidType
from millpond.replay.samplers.sum_tree import EngineName, Floats, SumTree

ENGINES: tuple[EngineName, ...] = get_args(EngineName)
both_engines = pytest.mark.parametrize("engine", ENGINES)

CAPACITIES = st.one_of(st.sampled_from([1, 2, 7, 8, 9, 63, 64, 65, 511, 512, 513]), st.integers(1, 700))
LEAVES = st.one_of(st.just(0.0), st.integers(1, 9).map(float), st.floats(0.0, 1e300), st.just(5e-324), st.just(-0.0))


def make(capacity: int, engine: EngineName) -> SumTree:
    return SumTree(capacity, bytearray(SumTree.nbytes(capacity)), create=True, engine=engine)


def bits(tree: SumTree) -> bytes:
    return tree._tree.tobytes()


def pyramid_sum(leaves: list[float]) -> float:
    """The total in the order that the tree promises: eight by eight, from left to right."""
    while True:
        groups = [leaves[i : i + 8] for i in range(0, len(leaves), 8)]
        leaves = [list(itertools.accumulate(group, initial=0.0))[-1] for group in groups]
        if len(leaves) == 1:
            return leaves[0]


def check(tree: SumTree, model: list[float]) -> None:
    positive = [leaf for leaf in model if leaf > 0]
    assert tree.leaves.tolist() == model
    assert tree.total == pyramid_sum(model)
    assert tree.total == pytest.approx(math.fsum(model), rel=1e-12, abs=1e-320)
    assert (tree.count, tree.max) == (len(positive), max(model))
    assert tree.min_positive == min(positive, default=math.inf)


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[tuple[str, tuple[Any, ...]]]]:
    capacity = draw(CAPACITIES)
    slot = st.integers(0, capacity - 1)
    steps: list[tuple[str, tuple[Any, ...]]] = []
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["update", "fill", "fill_at", "rebuild", "attach"]))
        if kind == "update":
            pairs = draw(st.lists(st.tuples(slot, LEAVES), max_size=40))
            steps.append((kind, ([s for s, _ in pairs], [leaf for _, leaf in pairs])))
        elif kind == "fill":
            first = draw(slot)
            steps.append((kind, (first, draw(st.integers(0, capacity - first)), draw(LEAVES))))
        elif kind == "fill_at":
            steps.append((kind, (draw(st.lists(slot, max_size=40)), draw(LEAVES))))
        else:
            steps.append((kind, ()))
    return capacity, steps


@given(histories(), st.lists(st.floats(0.0, 1.0, exclude_max=True), max_size=20))
def test_any_history_equals_a_list_and_both_engines_agree_in_every_bit(
    history: tuple[int, list[tuple[str, tuple[Any, ...]]]], shares: list[float]
) -> None:
    capacity, steps = history
    memories = {engine: bytearray(SumTree.nbytes(capacity)) for engine in ENGINES}
    trees = {engine: SumTree(capacity, memories[engine], create=True, engine=engine) for engine in ENGINES}
    model = [0.0] * capacity
    for kind, arguments in steps:
        for engine in ENGINES:
            if kind == "attach":
                trees[engine] = SumTree(capacity, memories[engine], create=False, engine=engine)
            elif kind in ("update", "fill_at"):
                slots, values = arguments
                if kind == "update":
                    trees[engine].update(np.array(slots, np.int64), np.array(values, np.float64))
                else:
                    trees[engine].fill_at(np.array(slots, np.int64), values)
            else:
                getattr(trees[engine], kind)(*arguments)
        if kind == "update":
            for slot, leaf in zip(*arguments, strict=True):
                model[slot] = leaf
        elif kind == "fill":
            first, n, leaf = arguments
            model[first : first + n] = [leaf] * n
        elif kind == "fill_at":
            for slot in arguments[0]:
                model[slot] = arguments[1]
    for tree in trees.values():
        check(tree, model)
    assert bits(trees["numba"]) == bits(trees["numpy"])
    if trees["numba"].total > 0:
        mass = np.array(shares) * trees["numba"].total
        drawn, there = trees["numba"].draw(mass)
        assert (there > 0).all()
        assert there.tolist() == trees["numba"].leaf(drawn).tolist()
        assert [part.tolist() for part in trees["numpy"].draw(mass)] == [drawn.tolist(), there.tolist()]


@both_engines
@given(leaves=st.lists(st.integers(0, 5), min_size=1, max_size=600).filter(any), data=st.data())
def test_a_draw_finds_the_slot_in_whose_share_the_mass_lies(
    engine: EngineName, leaves: list[int], data: st.DataObject
) -> None:
    tree = make(len(leaves), engine)
    tree.update(np.arange(len(leaves)), np.array(leaves, np.float64))
    ends = list(itertools.accumulate(leaves))
    masses = data.draw(
        st.lists(st.integers(0, 4 * ends[-1] - 1), min_size=1, max_size=30)
    )  # in quarters: exact in binary
    drawn, _ = tree.draw(np.array(masses) / 4)
    assert drawn.tolist() == [bisect.bisect_right(ends, mass / 4) for mass in masses]


@both_engines
@pytest.mark.parametrize(
    "leaves",
    [
        [0.0, 5e-324, 0.0],
        [1e300, 1e-300, 0.0, 0.0],
        [1e-300, 1e300, 1e-300, 0.0],
        [0.1] * 10 + [0.0] * 60,
        [0.0] * 9 + [0.1] * 7 + [0.0] * 9 + [0.7] + [0.0] * 500,
        [5e-324] * 9 + [0.0] * 56 + [5e-324] + [0.0] * 6,
        [1e16, 1.0, 0.0, 1.0, 0.0],
        [1e300] * 9 + [5e-324, 0.0],
    ],
)
def test_no_rounding_draws_an_empty_slot(engine: EngineName, leaves: list[float]) -> None:
    """prio-4, prio-5: at the very end of each share, past the total, and for masses that are no number."""
    tree = make(len(leaves), engine)
    tree.update(np.arange(len(leaves)), np.array(leaves))
    ends = np.cumsum(leaves)
    mass = np.concatenate(
        [ends, np.nextafter(ends, 0), np.nextafter(ends, np.inf), [math.inf, math.nan, -1.0, -0.0, 0.0]]
    )
    mass = np.concatenate([mass, np.nextafter(tree.total, 0) * np.linspace(0, 1, 101)])
    drawn, _ = tree.draw(mass)
    assert (tree.leaf(drawn) > 0).all()
    positive = np.flatnonzero(np.array(leaves) > 0)
    assert drawn[3 * len(leaves)] == positive[-1]
    assert (drawn[3 * len(leaves) + 1 :][:4] == positive[0]).all()


@both_engines
def test_an_item_of_priority_zero_is_never_drawn_in_a_hundred_seeds(engine: EngineName) -> None:
    """prio-4."""
    for seed in range(100):
        random = np.random.default_rng(seed)
        leaves = 10.0 ** random.uniform(-300, 280, 83) * random.integers(0, 2, 83)
        leaves[random.integers(83)] = 1.0
        tree = make(83, engine)
        tree.update(np.arange(83), leaves)
        assert (leaves[tree.draw(random.random(200) * tree.total)[0]] > 0).all()


@both_engines
def test_frequencies_follow_priorities(engine: EngineName) -> None:
    """prio-7: 1:2:3:4 over 10⁵ draws; the critical value is that of p = 0.001 with 3 degrees of freedom."""
    tree = make(1000, engine)
    slots = np.array([3, 500, 501, 999])
    tree.update(slots, np.array([1.0, 2.0, 3.0, 4.0]))
    drawn, _ = tree.draw(np.random.default_rng(7).random(100_000) * tree.total)
    counts = np.array([(drawn == slot).sum() for slot in slots])
    expected = np.array([1, 2, 3, 4]) * 10_000
    assert counts.sum() == 100_000
    assert ((counts - expected) ** 2 / expected).sum() < 16.27


def test_ten_million_updates_leave_no_drift() -> None:
    """mem-1: the total after them equals that of a tree built once from the same leaves, in every bit."""
    capacity, random = 5003, np.random.default_rng(11)
    tree = make(capacity, "numba")
    for _ in range(1000):
        tree.update(random.integers(0, capacity, 10_000), 10.0 ** random.uniform(-12, 12, 10_000))
    fresh = make(capacity, "numpy")
    fresh.update(np.arange(capacity), tree.leaves.copy())
    assert bits(fresh) == bits(tree)
    assert tree.total == pytest.approx(math.fsum(tree.leaves), rel=1e-12)


@both_engines
def test_rebuild_repairs_what_a_killed_writer_left(engine: EngineName) -> None:
    tree = make(100, engine)
    tree.update(np.arange(100), np.ones(100))
    tree.leaves[:5] = [math.nan, -1.0, math.inf, 2.0, 0.0]
    tree._tree[104:] = 77.0  # whatever was in the pyramids, padding included
    assert tree.rebuild() == 3
    check(tree, [0.0, 0.0, 0.0, 2.0, 0.0] + [1.0] * 95)
    assert bits(tree) == bits(_built(tree.leaves, engine))


def _built(leaves: Floats, engine: EngineName) -> SumTree:
    tree = make(leaves.size, engine)
    tree.update(np.arange(leaves.size), leaves)
    return tree


@both_engines
@pytest.mark.parametrize("leaf", [math.nan, math.inf, -math.inf, -1.0, 1.7e308])
@pytest.mark.parametrize("position", [0, 2])
def test_a_bad_leaf_is_refused_before_the_tree_is_touched(engine: EngineName, leaf: float, position: int) -> None:
    """prio-6."""
    tree = make(10, engine)
    tree.update(np.arange(10), np.ones(10))
    before = bits(tree)
    leaves = np.full(3, 2.0)
    leaves[position] = leaf
    with pytest.raises(InvalidArgument, match="a leaf must be in"):
        tree.update(np.arange(3), leaves)
    with pytest.raises(InvalidArgument, match="a leaf must be in"):
        tree.fill(0, 3, leaf)
    with pytest.raises(InvalidArgument, match="a leaf must be in"):
        tree.fill_at(np.arange(3), leaf)
    assert bits(tree) == before


@both_engines
@pytest.mark.parametrize("slot", [-1, 10, 15, 2**40])
def test_a_slot_out_of_range_is_refused_before_the_tree_is_touched(engine: EngineName, slot: int) -> None:
    """prio-9; 10 … 15 are padding."""
    tree = make(10, engine)
    before = bits(tree)
    slots = np.array([0, slot, 1])
    with pytest.raises(InvalidArgument, match=rf"slots\[1\] is {slot}, outside 0 … 9"):
        tree.update(slots, np.ones(3))
    with pytest.raises(InvalidArgument, match=rf"slots\[1\] is {slot}, outside 0 … 9"):
        tree.fill_at(slots, 1.0)
    with pytest.raises(InvalidArgument, match="leave the range"):
        tree.fill(slot, 1, 1.0)
    with pytest.raises(InvalidArgument, match="leave the range"):
        tree.fill(5, 6, 1.0)
    assert bits(tree) == before


@both_engines
def test_arrays_of_another_kind(engine: EngineName) -> None:
    """prio-9: the wrong dtype or shape is an error; strided, read-only and empty arrays work."""
    tree = make(10, engine)
    with pytest.raises(InvalidType, match="slots must be int64, got float64"):
        tree.update(np.array([1.0]), np.ones(1))
    with pytest.raises(InvalidType, match="leaves must be float64, got float32"):
        tree.update(np.array([1]), np.ones(1, np.float32))
    with pytest.raises(InvalidArgument, match="one-dimensional"):
        tree.update(np.zeros((1, 1), np.int64), np.ones(1))
    with pytest.raises(InvalidArgument, match="one-dimensional"):
        tree.draw(np.zeros((1, 1)))
    with pytest.raises(InvalidArgument, match="2 slots came with 1 leaves"):
        tree.update(np.array([1, 2]), np.ones(1))
    slots, leaves = np.arange(10)[::2], np.arange(10.0)[::-2]
    slots.flags.writeable = leaves.flags.writeable = False
    tree.update(slots, leaves)
    assert tree.leaves.tolist() == [9, 0, 7, 0, 5, 0, 3, 0, 1, 0]
    tree.update(np.array([], np.int64), np.array([]))
    tree.fill_at(np.array([], np.int64), 3.0)
    tree.fill(4, 0, 3.0)
    assert tree.draw(np.array([]))[0].dtype == np.int64
    mass = np.array([24.0, 0.0])
    assert tree.draw(mass)[0].tolist() == [8, 0]
    assert mass.tolist() == [24.0, 0.0]  # ring-8: a caller's array is never written


@both_engines
def test_an_empty_tree(engine: EngineName) -> None:
    tree = make(20, engine)
    check(tree, [0.0] * 20)
    with pytest.raises(InvalidArgument, match="every leaf of the sum tree is 0"):
        tree.draw(np.zeros(1))
    tree.fill(3, 1, 2.0)
    tree.fill(3, 1, 0.0)
    assert tree.min_positive == math.inf
    assert bits(tree) == bytes(len(bits(tree)))


@both_engines
def test_the_largest_tree_costs_the_memory_that_is_touched(engine: EngineName, tmp_path: Path) -> None:
    capacity = 2**31
    nbytes = SumTree.nbytes(capacity)
    with open(tmp_path / "tree", "wb+") as file:
        file.truncate(nbytes)  # sparse
        memory = mmap.mmap(file.fileno(), nbytes)
    with memory:
        tree = SumTree(capacity, memory, create=False, engine=engine)  # zeroed memory is an empty tree
        slots = np.array([capacity - 1, 0, 2**30 + 1])
        tree.update(slots, np.array([1.0, 2.0, 4.0]))
        tree.fill(capacity - 3, 2, 8.0)
        assert tree.draw(np.array([0.0, 2.0, 6.0, 14.0, 22.0]))[0].tolist() == [
            0,
            2**30 + 1,
            *range(capacity - 3, capacity),
        ]
        assert (tree.total, tree.count, tree.max, tree.min_positive) == (23.0, 5, 8.0, 1.0)
        del tree


def test_what_a_tree_cannot_be_made_of() -> None:
    for capacity in (0, -1, 2**31 + 1):
        with pytest.raises(InvalidArgument, match=f"got {capacity}"):
            SumTree.nbytes(capacity)
    for wrong in (True, 8.0, "8"):
        with pytest.raises(InvalidType, match="must be an int"):
            SumTree.nbytes(wrong)  # type: ignore[arg-type]
    nbytes = SumTree.nbytes(8)
    with pytest.raises(InvalidArgument, match=f"needs {nbytes} bytes, the memory has {nbytes - 1}"):
        SumTree(8, bytearray(nbytes - 1), create=True)
    with pytest.raises(InvalidArgument, match="writable"):
        SumTree(8, bytes(nbytes), create=True)
    with pytest.raises(InvalidArgument, match="contiguous"):
        SumTree(8, np.zeros(2 * nbytes, np.uint8)[::2], create=True)
    with pytest.raises(InvalidArgument, match="aligned"):
        SumTree(8, np.zeros(nbytes + 8, np.uint8)[1:], create=True)
    with pytest.raises(InvalidArgument, match='"numba" and "numpy"'):
        SumTree(8, bytearray(nbytes), create=True, engine="torch")  # type: ignore[arg-type]


def test_create_empties_and_attach_keeps() -> None:
    memory = np.zeros(SumTree.nbytes(20), np.uint8)
    SumTree(20, memory, create=True, engine="numpy").fill(0, 20, 1.0)
    assert SumTree(20, memory, create=False).total == 20.0
    assert SumTree(20, memory, create=True).total == 0.0
    assert not memory.any()


def test_the_environment_chooses_the_engine_and_an_argument_overrides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = bytearray(SumTree.nbytes(8))
    monkeypatch.setenv("MILLPOND_TREE", "numpy")
    assert SumTree(8, memory, create=True).prepare() == "numpy"
    assert SumTree(8, memory, create=True, engine="numba").prepare() == "numba"
    monkeypatch.setenv("MILLPOND_TREE", "")
    assert SumTree(8, memory, create=True).prepare() == "numba"
    monkeypatch.setenv("MILLPOND_TREE", "fortran")
    with pytest.raises(InvalidArgument, match="MILLPOND_TREE=fortran"):
        SumTree(8, memory, create=True)


def _python(code: str, **variables: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "MILLPOND_TREE"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    environment.update(variables)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_without_numba_the_tree_works_and_asking_for_numba_says_what_to_do() -> None:
    code = """
import sys
sys.modules["numba"] = None  # what an import finds where it is not installed
from millpond.replay.samplers.sum_tree import SumTree
tree = SumTree(8, bytearray(SumTree.nbytes(8)), create=True)
tree.fill(0, 8, 1.0)
print(tree.prepare(), tree.total)
try:
    SumTree(8, bytearray(SumTree.nbytes(8)), create=True, engine="numba").prepare()
except ValueError as error:
    print(error)
"""
    first, second = _python(code).splitlines()
    assert first == "numpy 8.0"
    assert "pip install numba" in second


def test_numba_is_imported_at_the_first_use_only() -> None:
    code = """
import sys
from millpond.replay.samplers.sum_tree import SumTree
tree = SumTree(8, bytearray(SumTree.nbytes(8)), create=True)
before = "numba" in sys.modules
tree.fill(0, 8, 1.0)
print(before, "numba" in sys.modules)
"""
    assert _python(code) == "False True"


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="needs LD_PRELOAD and a C compiler")
@both_engines
def test_no_call_lets_go_of_the_gil(engine: EngineName, tmp_path: Path) -> None:
    """A lock is held around these calls, and whoever lets go of the GIL under it gets it back milliseconds later."""
    (tmp_path / "spy.c").write_text(
        """
        #define _GNU_SOURCE
        #include <dlfcn.h>
        long released = 0;
        void *PyEval_SaveThread(void) {
            released++;
            return ((void *(*)(void)) dlsym(RTLD_NEXT, "PyEval_SaveThread"))();
        }
        """
    )
    spy = tmp_path / "spy.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", spy, tmp_path / "spy.c", "-ldl"], check=True, timeout=60)
    code = f"""
import ctypes
import numpy as np
from millpond.replay.samplers.sum_tree import SumTree
released = ctypes.c_long.in_dll(ctypes.CDLL({str(spy)!r}), "released")
before = released.value
np.arange(2000) + 1  # the spy sees something at all
print(released.value > before)
tree = SumTree(50_000, bytearray(SumTree.nbytes(50_000)), create=True, engine={engine!r})
tree.prepare()
for n in (1, 62, 63, 500, 501, 20_000):
    slots, leaves, mass = np.arange(n) * 50_000 // n, np.ones(n), np.arange(n, dtype=np.float64)
    for call in (
        lambda: tree.update(slots, leaves),
        lambda: tree.draw(mass),
        lambda: tree.fill(0, n, 2.0),
        lambda: tree.fill_at(slots, 3.0),
        lambda: tree.rebuild(),
        lambda: (tree.total, tree.count, tree.max, tree.min_positive, tree.leaves),
    ):
        before = released.value
        call()
        print(released.value - before)
"""
    saw, *counts = _python(code, LD_PRELOAD=str(spy)).splitlines()
    assert saw == "True"
    assert counts == ["0"] * 36
