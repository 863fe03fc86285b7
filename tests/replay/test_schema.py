"""The packed row: what goes in comes out, bit for bit, and what does not fit is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from millpond.core.errors import InvalidArgument, InvalidType, SchemaMismatch
from millpond.core.schema import Schema

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
FIELDS = st.dictionaries(
    st.tuples(st.sampled_from("abcd"), st.sampled_from("xyz")) | st.tuples(st.sampled_from("efgh")),
    st.tuples(st.sampled_from(DTYPES), SHAPES),
    min_size=1,
    max_size=7,
)


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any bit pattern, NaN payloads included; booleans are 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (*shape, dtype.itemsize), generator=generator)
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    return raw.to(torch.uint8).view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def nested(flat: dict[tuple[str, ...], Any]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for key, value in flat.items():
        place = root
        for part in key[:-1]:
            place = place.setdefault(part, {})
        place[key[-1]] = value
    return root


@given(FIELDS, st.integers(1, 5), st.integers(0, 2**31))
def test_every_type_and_shape_comes_back_bit_for_bit(fields: Any, n: int, seed: int) -> None:
    """type-3: all types, zero-size and scalar fields."""
    flat = {key: random_bits(dtype, (n, *shape), seed + i) for i, (key, (dtype, shape)) in enumerate(fields.items())}
    schema = Schema.from_example(nested(flat))
    rows = schema.pack(nested(flat))
    assert rows.shape == (n, schema.row_nbytes)
    out = schema.unpack(rows)
    for key, value in flat.items():
        assert out[key].dtype is value.dtype
        assert out[key].shape == value.shape
        assert bits(out[key]) == bits(value)
    assert Schema.from_json(schema.to_json()) == schema


@given(FIELDS, st.integers(0, 2**31))
def test_one_item_is_a_batch_of_one(fields: Any, seed: int) -> None:
    flat = {key: random_bits(dtype, (1, *shape), seed + i) for i, (key, (dtype, shape)) in enumerate(fields.items())}
    schema = Schema.from_example(nested(flat))
    item = schema.pack_item(nested({key: value[0] for key, value in flat.items()}))
    assert torch.equal(item, schema.pack(nested(flat)))


def test_fields_are_views_of_the_rows() -> None:
    schema = Schema({"observation": (torch.float32, (3,)), ("next", "done"): (torch.bool, (1,))})
    rows = schema.pack({"observation": torch.ones(2, 3), "next": {"done": torch.zeros(2, 1, dtype=torch.bool)}})
    out = schema.unpack(rows)
    rows.zero_()
    assert out["observation"].sum() == 0
    assert out["observation"].untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()


def test_the_order_of_keys_does_not_matter() -> None:
    one = Schema({"a": (torch.float32, (2,)), "b": (torch.bool, ())})
    two = Schema({"b": (torch.bool, ()), "a": (torch.float32, (2,))})
    assert one == two
    assert one.fingerprint == two.fingerprint
    assert one != Schema({"a": (torch.float32, (3,)), "b": (torch.bool, ())})


def test_types_are_kept() -> None:
    """type-1: a uint8 image, a float32 vector, an int64 id; nothing becomes float64."""
    item = {
        "observation": {"image": np.zeros((8, 8, 3), np.uint8), "vector": np.zeros(4, np.float32)},
        "id": np.int64(7),
    }
    schema = Schema.from_item(item)
    found = {field.key: field.dtype for field in schema.fields}
    assert found == {
        ("observation", "image"): torch.uint8,
        ("observation", "vector"): torch.float32,
        ("id",): torch.int64,
    }
    assert schema.row_nbytes == 8 * 8 * 3 + 16 + 8


@pytest.mark.parametrize("bad", [np.array(["a", "b"]), np.array([{}, {}], object), ["x", "y"], object(), None])
def test_what_holds_no_numbers_is_refused_by_name(bad: Any) -> None:
    """type-2"""
    with pytest.raises(InvalidType, match="next/label"):
        Schema.from_example({"x": torch.zeros(2), "next": {"label": bad}})


BOUND = Schema({"x": (torch.float32, (3,)), ("next", "reward"): (torch.float32, (1,)), "id": (torch.int64, ())})


def good(n: int = 4) -> dict[str, Any]:
    return {"x": torch.zeros(n, 3), "next": {"reward": torch.zeros(n, 1)}, "id": torch.zeros(n, dtype=torch.int64)}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"id": None}, "missing: id"),
        ({"more": torch.zeros(4)}, "unknown: more"),
        ({"id": torch.zeros(4)}, r"id: expected int64\[\].*float32"),
        ({"x": torch.zeros(4, 1)}, r"x: expected float32\[3\].*float32\[1\]"),
        ({"x": torch.zeros(4, 3, 1)}, r"x: expected float32\[3\]"),
        ({"x": torch.zeros(3, 3)}, "items"),
        ({"x": torch.zeros(4, 3, dtype=torch.float64)}, "float64"),
        ({"id": np.zeros(4, np.int32)}, "int32"),
        ({"next": torch.zeros(4, 1)}, "missing: next/reward"),
        ({"x": torch.tensor(1.0)}, "x"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, Any], says: str) -> None:
    """rem-1: a missing key, an extra key, a float where an int is bound, a shape that would broadcast."""
    batch = {key: value for key, value in {**good(), **change}.items() if value is not None}
    with pytest.raises(SchemaMismatch, match=says):
        BOUND.pack(batch)


def test_numpy_float64_fits_where_float32_is_bound() -> None:
    rows = BOUND.pack({**good(), "x": np.full((4, 3), 0.1)})
    assert torch.equal(BOUND.unpack(rows)["x"], torch.full((4, 3), 0.1))


@pytest.mark.parametrize("form", ["TensorDict", "nested dict", "tuple keys", "numpy"])
def test_a_batch_may_come_in_any_form(form: str) -> None:
    n = 5
    flat: dict[Any, Any] = {
        "x": torch.randn(n, 3),
        ("next", "reward"): torch.randn(n, 1),
        "id": torch.arange(n),
    }
    tree = {"x": flat["x"], "next": {"reward": flat["next", "reward"]}, "id": flat["id"]}
    batch: Any = {
        "TensorDict": TensorDict(tree, [n]),
        "nested dict": tree,
        "tuple keys": flat,
        "numpy": {"x": flat["x"].numpy(), "next": {"reward": flat["next", "reward"].numpy()}, "id": flat["id"].numpy()},
    }[form]
    out = BOUND.unpack(BOUND.pack(batch))
    for key, value in flat.items():
        assert torch.equal(out[key], value)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.float32).reshape(4, 3)[::-1],
        np.asfortranarray(np.arange(12, dtype=np.float32).reshape(4, 3)),
        np.arange(12, dtype=">f4").reshape(4, 3),
        np.broadcast_to(np.float32([1, 2, 3]), (4, 3)),
    ],
    ids=["reversed", "fortran", "big endian", "read-only"],
)
def test_odd_arrays_are_taken_by_value(array: np.ndarray[Any, Any]) -> None:
    rows = BOUND.pack({**good(), "x": array})
    assert np.array_equal(BOUND.unpack(rows)["x"].numpy(), array)


def test_odd_tensors_are_taken_by_value() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    rows = BOUND.pack({**good(), "x": x.t()})
    assert torch.equal(BOUND.unpack(rows)["x"], x.detach().t())
    with pytest.raises(InvalidType, match="dense"):
        BOUND.pack({**good(), "x": torch.zeros(4, 3).to_sparse()})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"a": (torch.float32, ()), ("a", "b"): (torch.float32, ())},
        {3: (torch.float32, ())},
        {"a": (torch.float32, (-1,))},
        {"a": (torch.qint8, ())},
        {"": (torch.float32, ())},
    ],
)
def test_schemas_that_mean_nothing_are_refused(fields: Any) -> None:
    with pytest.raises(InvalidArgument):
        Schema(fields)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 99}', BOUND.to_json().replace("float32", "float16")])
def test_a_text_that_is_no_schema_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        Schema.from_json(text)


def test_one_plain_tensor() -> None:
    schema = Schema.from_example(torch.zeros(4, 2, 2))
    data = torch.randn(4, 2, 2)
    assert torch.equal(schema.unpack(schema.pack(data)), data)
