"""What is given is stored as it is, or refused by the name of its field before anything is written."""

from __future__ import annotations

import collections
import fractions
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict, lazy_stack, tensorclass

from millpond import ReplayBuffer, ReplayBufferEnsemble
from millpond.core.errors import InvalidArgument, InvalidType, NonFinite, SchemaMismatch
from millpond.core.schema import Schema
from millpond.replay import PrioritizedSampler

Pair = collections.namedtuple("Pair", "a b")


@tensorclass
class Step:
    a: torch.Tensor
    b: TensorDict
    note: Any = None


def td(**fields: Any) -> TensorDict:
    return TensorDict(fields, [3])


def nested_tensor() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.quint8)


def masked() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.masked.masked_tensor(torch.zeros(3), torch.tensor([True, False, True]))


DTYPES = (torch.float32, torch.float64)
UNFIT: dict[str, Callable[[], Any]] = {  # three items each, whose field s cannot be stored
    "text": lambda: td(a=torch.zeros(3), s=["x", "y", "z"]),
    "one text for all": lambda: td(a=torch.zeros(3), s="x"),
    "an object": lambda: td(a=torch.zeros(3), s=NonTensorData(object(), [3])),
    "text in a dict": lambda: {"a": torch.zeros(3), "s": ["x", "y", "z"]},
    "an object in a dict": lambda: {"a": torch.zeros(3), "s": object()},
    "None": lambda: {"a": torch.zeros(3), "s": None},
    "text in a tensorclass": lambda: Step(a=torch.zeros(3), b=td(s=["x", "y", "z"]), batch_size=[3]),
    "an empty group": lambda: td(a=torch.zeros(3), s=TensorDict({}, [3])),
    "an empty group in groups": lambda: td(a=torch.zeros(3), s=td(t=td(u=TensorDict({}, [3])))),
    "an empty dict": lambda: {"a": torch.zeros(3), "s": {}},
    "what some of a stack have": lambda: lazy_stack(
        [TensorDict({"a": torch.zeros(())} | ({"s": torch.zeros(())} if i else {}), []) for i in range(3)]
    ),
    "what some of a list have": lambda: [{"a": 0.0}, {"a": 0.0, "s": 1.0}, {"a": 0.0}],
    "a ragged stack": lambda: lazy_stack(
        [TensorDict({"a": torch.zeros(()), "s": torch.zeros(i)}, []) for i in range(3)]
    ),
    "a stack of two types": lambda: lazy_stack(
        [TensorDict({"a": torch.zeros(()), "s": torch.zeros(2, dtype=d)}, []) for d in (*DTYPES, DTYPES[0])]
    ),
    "a ragged list": lambda: {"a": torch.zeros(3), "s": [[1.0], [2.0, 3.0], [4.0]]},
    "a ragged list of tensors": lambda: {"a": torch.zeros(3), "s": [torch.zeros(i) for i in range(3)]},
    "a list of two types": lambda: {"a": torch.zeros(3), "s": [torch.zeros(1, dtype=d) for d in (*DTYPES, DTYPES[0])]},
    "booleans and numbers": lambda: {"a": torch.zeros(3), "s": [True, 2, 3]},
    "an empty list": lambda: {"a": torch.zeros(3), "s": []},
    "a sparse tensor": lambda: {"a": torch.zeros(3), "s": torch.zeros(3, 2).to_sparse()},
    "a nested tensor": lambda: {"a": torch.zeros(3), "s": nested_tensor()},
    "a quantized tensor": lambda: {"a": torch.zeros(3), "s": quantized()},
    "a masked tensor": lambda: {"a": torch.zeros(3), "s": masked()},
    "a tensor without memory": lambda: {"a": torch.zeros(3), "s": torch.zeros(3, device="meta")},
    "a masked array": lambda: {"a": torch.zeros(3), "s": np.ma.masked_array([1.0, 2.0, 3.0], [0, 1, 0])},
    "an array of text": lambda: {"a": torch.zeros(3), "s": np.array(["x", "y", "z"])},
    "an array of objects": lambda: {"a": torch.zeros(3), "s": np.array([object()] * 3)},
    "an array of records": lambda: {"a": torch.zeros(3), "s": np.zeros(3, [("x", "f4"), ("y", "f4")])},
    "dates": lambda: {"a": torch.zeros(3), "s": np.zeros(3, "M8[s]")},
    "fractions": lambda: {"a": torch.zeros(3), "s": [fractions.Fraction(1, 3)] * 3},
    "a number above 64 bits": lambda: {"a": torch.zeros(3), "s": [1, 2, 1 << 64]},
    "a number beyond float32": lambda: {"a": torch.zeros(3), "s": [0.0, 1e300, 1.0]},
    "a set": lambda: {"a": torch.zeros(3), "s": {1, 2, 3}},
}  # fmt: skip


@pytest.mark.parametrize("bound", ["unbound", "a bound", "both bound"])
@pytest.mark.parametrize("unfit", UNFIT)
def test_what_cannot_be_stored_is_refused_by_its_name(unfit: str, bound: str) -> None:
    rb = ReplayBuffer(10)
    if bound != "unbound":
        rb.extend({"a": torch.zeros(1)} | ({"s": torch.zeros(1)} if bound == "both bound" else {}))
    before, schema = rb.stats(), rb.schema
    with pytest.raises(InvalidArgument, match=r"\bs\b"):
        rb.extend(UNFIT[unfit]())
    assert (rb.stats(), rb.schema) == (before, schema)


def one_of(batch: Any) -> Any:
    """The first item of a batch."""
    if isinstance(batch, dict):
        return {key: one_of(value) for key, value in batch.items()}
    if isinstance(batch, torch.Tensor) and (batch.is_sparse or batch.is_nested):
        return batch
    return batch if isinstance(batch, (type(None), set)) or type(batch) is object or not len(batch) else batch[0]


@pytest.mark.parametrize("bound", ["unbound", "a bound"])
@pytest.mark.parametrize(
    "unfit",
    [
        *("text", "one text for all", "an object", "text in a dict", "None", "an empty group", "an empty dict"),
        *("a sparse tensor", "a nested tensor", "a quantized tensor", "a tensor without memory", "an array of records"),
    ],
)
def test_add_refuses_the_same(unfit: str, bound: str) -> None:
    rb = ReplayBuffer(10)
    if bound != "unbound":
        rb.add({"a": torch.zeros(())})
    before = rb.write_count
    with pytest.raises(InvalidArgument, match=r"\bs\b"):
        rb.add(one_of(UNFIT[unfit]()))
    assert rb.write_count == before


def test_an_ensemble_and_a_schema_refuse_the_same() -> None:
    rb = ReplayBufferEnsemble(ReplayBuffer(5), ReplayBuffer(5))
    for spoil in UNFIT.values():
        with pytest.raises(InvalidArgument, match=r"\bs\b"):
            rb.extend(spoil(), member=1)
        with pytest.raises(InvalidArgument, match=r"\bs\b"):
            Schema.from_example(spoil())
        with pytest.raises(InvalidArgument, match=r"\bs\b"):
            Schema.from_item({"group": [spoil()]})
    assert rb.stats()["write_count"] == 0


@pytest.mark.parametrize("unfit", UNFIT)
def test_update_refuses_the_same(unfit: str) -> None:
    rb = ReplayBuffer(10)
    slots = rb.extend({"a": torch.arange(3.0), "b": torch.arange(3)})
    with pytest.raises(InvalidArgument, match=r"\bs\b"):
        rb.update(slots, UNFIT[unfit]())
    with pytest.raises(SchemaMismatch, match=r"\bt\b"):
        rb.update(slots, {"a": torch.zeros(3), "t": torch.zeros(3)})
    assert rb[:]["a"].tolist() == [0.0, 1.0, 2.0]


def test_update_takes_what_extend_takes() -> None:
    rb = ReplayBuffer(10)
    slots = rb.extend({"a": torch.zeros(3, 1), "b": torch.zeros(3, dtype=torch.int64), "next": {"c": torch.zeros(3)}})
    assert rb.update(slots, {"a": np.full((3, 1), 0.5), "next": {"c": [1.0, 2.0, 3.0]}}) == 3
    assert rb.update(slots[:2], [{"b": 5}, {"b": 6}]) == 2
    assert (rb[:]["a"] == 0.5).all()
    assert (rb[:]["b"].tolist(), rb[:]["next", "c"].tolist()) == ([5, 6, 0], [1.0, 2.0, 3.0])
    for patch in ({"a": torch.zeros(3)}, {"a": torch.zeros(1, 1)}, {"a": 0.0}, {"b": torch.zeros(3)}, {"b": [0.5] * 3}):
        with pytest.raises(SchemaMismatch, match=next(iter(patch))):
            rb.update(slots, patch)


def test_update_minds_check_finite() -> None:
    rb = ReplayBuffer(10, check_finite=True)
    slots = rb.extend({"a": torch.zeros(3)})
    with pytest.raises(NonFinite, match=r"a: NaN or infinite in item 1 of 3"):
        rb.update(slots, {"a": torch.tensor([0.0, float("nan"), 0.0])})
    assert rb[:]["a"].tolist() == [0.0] * 3


# ---------------------------------------------------------------------- lists and stacks
LISTS: dict[str, Callable[[], Any]] = {  # two items, x of shape [1] with 1 and 2, and how else they may be given
    "tensors": lambda: {"x": [torch.tensor([1.0]), torch.tensor([2.0])]},
    "arrays": lambda: {"x": [np.float32([1.0]), np.float32([2.0])]},
    "numbers": lambda: {"x": [[1.0], [2.0]]},
    "TensorDicts": lambda: [TensorDict({"x": torch.tensor([float(i)])}, []) for i in (1, 2)],
    "a tuple of dicts": lambda: ({"x": torch.tensor([1.0])}, {"x": torch.tensor([2.0])}),
    "dicts of arrays": lambda: [{"x": np.float32([i])} for i in (1, 2)],
    "dicts of lists": lambda: [{"x": [float(i)]} for i in (1, 2)],
    "a lazy stack": lambda: lazy_stack([TensorDict({"x": torch.tensor([float(i)])}, []) for i in (1, 2)]),
}


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("way", LISTS)
def test_a_list_is_stacked(way: str, bound: bool) -> None:
    rb = ReplayBuffer(10)
    if bound:
        rb.add({"x": torch.tensor([0.0])})
    rb.extend(LISTS[way]())
    assert rb.schema == Schema({"x": (torch.float32, (1,))})
    assert rb[-2:]["x"].tolist() == [[1.0], [2.0]]


@pytest.mark.parametrize("bound", [False, True])
def test_a_list_of_plain_tensors_is_stacked(bound: bool) -> None:
    rb = ReplayBuffer(10)
    if bound:
        rb.add(torch.tensor([0.0]))
    rb.extend([torch.tensor([1.0]), torch.tensor([2.0])])
    assert rb.schema == Schema({(): (torch.float32, (1,))})
    assert rb[-2:].tolist() == [[1.0], [2.0]]


def test_what_has_names_is_a_group() -> None:
    """Tensorclasses, lists and lazy stacks of them, namedtuples, and lists of sampled items."""
    steps = Step(a=torch.arange(3.0), b=TensorDict({"c": torch.arange(3)}, [3]), batch_size=[3])
    for batch in (steps, [steps[0], steps[1], steps[2]], lazy_stack([steps[0], steps[1], steps[2]])):
        rb = ReplayBuffer(10)
        rb.extend(batch)
        rb.add(steps[0])
        assert (rb[:]["a"].tolist(), rb[:]["b", "c"].tolist()) == ([0.0, 1.0, 2.0, 0.0], [0, 1, 2, 0])
    rb = ReplayBuffer(10)
    rb.extend(Pair(torch.zeros(2, 3), torch.ones(2, 3)))
    rb.extend([Pair(torch.zeros(3), torch.ones(3))])
    assert rb.schema == Schema({"a": (torch.float32, (3,)), "b": (torch.float32, (3,))})
    sampled = rb.sample(4)
    rb.extend([sampled[i] for i in range(4)])
    assert rb.write_count == 7


def test_a_lazy_stack_along_another_dimension() -> None:
    members = [TensorDict({"a": torch.full((4, 2), float(i)), "n": {"b": torch.full((4,), i)}}, [4]) for i in range(3)]
    rb = ReplayBuffer(10)
    rb.extend(lazy_stack(members, 1))
    assert torch.equal(rb[:]["a"], torch.stack([m["a"] for m in members], 1))
    assert torch.equal(rb[:]["n", "b"], torch.stack([m["n", "b"] for m in members], 1))


def test_a_field_given_twice_is_refused() -> None:
    batch = {("a", "b"): torch.zeros(2), "a": {"b": torch.ones(2)}}
    for rb in (ReplayBuffer(5), ReplayBuffer(5, schema=Schema({("a", "b"): (torch.float32, ())}))):
        with pytest.raises(InvalidArgument, match="a/b is given twice"):
            rb.extend(batch)


@pytest.mark.parametrize("bound", [False, True])
def test_a_scalar_to_extend_says_use_add(bound: bool) -> None:
    for scalar, item in ((1.0, torch.zeros(())), (torch.tensor(1.0), torch.zeros(())), ({"x": 1.0}, {"x": 0.0})):
        rb = ReplayBuffer(5)
        if bound:
            rb.add(item)
        with pytest.raises(InvalidArgument, match=r"add\(\) takes one item"):
            rb.extend(scalar)


def test_an_item_to_extend_and_a_batch_to_add_say_so() -> None:
    rb = ReplayBuffer(5, schema=Schema({"x": (torch.float32, (3,))}))
    with pytest.raises(SchemaMismatch, match=r"x: .*add\(\) takes one item"):
        rb.extend({"x": torch.zeros(3)})
    with pytest.raises(SchemaMismatch, match=r"x: .*extend\(\) takes a batch"):
        rb.add({"x": torch.zeros(2, 3)})


# ---------------------------------------------------------------------- numbers
def test_types_are_never_changed() -> None:
    """But for NumPy's float64 where float32 is bound, and Python's numbers where they fit."""
    fits = {
        torch.float32: [np.full(2, 0.1), [0.1, 0.1], [1, 2], np.float64([0.1, np.inf])],
        torch.float64: [[0.1, 0.2], [1, 2], np.full(2, 0.1)],
        torch.bfloat16: [[0.5, 1.0], [1, 256]],
        torch.int32: [[1, -(2**31)], np.int32([1, 2])],
        torch.uint8: [[0, 255]],
        torch.uint64: [[0, 2**64 - 1], np.uint64([1, 2])],
        torch.bool: [[True, False], np.array([True, False])],
        torch.complex64: [[1j, 2.0], [1, 2]],
    }
    other = {
        torch.float32: [torch.zeros(2).double(), torch.zeros(2).half(), torch.zeros(2).long(), [True, False],
                        np.zeros(2, np.int64), np.zeros(2, np.float16), [1e39, 0.0], np.float64([1e39, 0.0]),
                        [2**24 + 1, 0]],
        torch.float64: [torch.zeros(2), np.zeros(2, np.float32), [2**53 + 1, 0]],
        torch.bfloat16: [torch.zeros(2), np.zeros(2), [257, 0], [1e39, 0.0]],
        torch.int32: [torch.zeros(2).long(), np.zeros(2, np.int64), torch.zeros(2), [0.5, 1.0], [2**31, 0],
                      [True, False]],
        torch.uint8: [torch.zeros(2).to(torch.int8), [256, 0], [-1, 0], np.zeros(2, bool)],
        torch.uint64: [torch.zeros(2).long(), [-1, 0], [2**64, 0]],
        torch.bool: [torch.zeros(2).to(torch.uint8), [0, 1], np.zeros(2, np.uint8)],
        torch.complex64: [torch.zeros(2), torch.zeros(2, dtype=torch.complex128), [True, True]],
    }  # fmt: skip
    for dtype, batches in fits.items():
        rb = ReplayBuffer(100, schema=Schema({"x": (dtype, ())}))
        for values in batches:
            kept = values.tolist() if isinstance(values, np.ndarray) else values
            expected = torch.tensor(kept, dtype=dtype)
            rb.extend({"x": values})
            assert torch.equal(rb[-2:]["x"], expected)
            rb.add({"x": values[1]})
            assert torch.equal(rb[-1]["x"], expected[1])
        for values in other[dtype]:
            with pytest.raises(SchemaMismatch, match="x"):
                rb.extend({"x": values})
            with pytest.raises(SchemaMismatch, match="x"):
                rb.add({"x": values[0]})
        assert rb.write_count == 3 * len(batches)


def test_odd_memory_is_taken_by_value() -> None:
    packed = np.zeros(4, [("a", "i1"), ("x", "<f4")])
    packed["x"] = np.arange(4)
    read_only = np.arange(4, dtype=np.float32)
    read_only.flags.writeable = False
    with torch.inference_mode():
        inference = torch.arange(4.0)
    four = torch.arange(4.0)
    for x in (
        packed["x"], np.arange(4, dtype=">f4"), np.arange(4, dtype=np.float32)[::-1], read_only, inference,
        np.broadcast_to(np.float32(2), 4), torch.arange(8.0)[::2], torch.tensor(2.0).expand(4),
        torch.arange(4.0, requires_grad=True) * 2, torch.nn.Parameter(four), torch.complex(four, four).conj().imag,
        four.as_subclass(type("Own", (torch.Tensor,), {})), np.asarray(four).view(np.ndarray),
    ):  # fmt: skip
        rb = ReplayBuffer(10)
        rb.extend({"x": x})
        rb.add({"x": x[1]})
        kept = x.detach().tolist() if isinstance(x, torch.Tensor) else x.tolist()
        assert rb[:]["x"].tolist() == [*kept, kept[1]]


def test_a_priority_is_not_rounded() -> None:
    """By way of float32, 16777217 would become 16777216."""
    rb = ReplayBuffer(4, sampler=PrioritizedSampler(alpha=1.0, beta=1.0, eps=0.0), seed=0)
    for priority in ([16777217.0, 0.0], [16777217, 0], torch.tensor([16777217, 0]), np.array([16777217, 0])):
        rb.extend({"x": torch.zeros(2)}, priority=priority)
        assert rb._local.engine.priorities.tree.total == 16777217.0 * min(2, rb.write_count // 2)


@pytest.mark.parametrize("receipt", [(0, 1.5), "ab", (True, 1), (1, 2, 3), (1,), 1, (64, 1), (-1, 1), (0, 1 << 64)])
def test_a_receipt_is_a_line_and_a_number(receipt: Any) -> None:
    rb = ReplayBuffer(4)
    with pytest.raises(InvalidArgument, match="a receipt is"):
        rb.extend({"x": torch.zeros(2)}, receipt=receipt)
    assert rb.write_count == 0


@pytest.mark.parametrize("index", [[0.0], torch.tensor([0.0]), np.array([0.5]), ["0"], [True], None, [1j]])
def test_slots_are_integers(index: Any) -> None:
    rb = ReplayBuffer(4, sampler=PrioritizedSampler())
    rb.extend({"x": torch.zeros(2)})
    with pytest.raises(InvalidType):
        rb.update(index, {"x": torch.ones(1)})
    with pytest.raises(InvalidType):
        rb.update_priority(index, [1.0])


def test_a_sample_turned_into_floats_names_no_items() -> None:
    """A number above 2^24 would name another item."""
    rb = ReplayBuffer(4, sampler=PrioritizedSampler())
    rb.extend({"x": torch.zeros(2)})
    batch = rb.sample(2)
    for name in ("index", "generation"):
        wrong = batch.clone().set(name, batch[name].float())
        with pytest.raises(InvalidType, match=name):
            rb.update(wrong, {"x": torch.ones(2)})
        with pytest.raises(InvalidType, match=name):
            rb.update_priority(wrong, 1.0)
