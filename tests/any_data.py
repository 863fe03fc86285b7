"""Random items of every type and shape, in every form in which people give them, and what must then come back.

``MILLPOND_EXAMPLES=10000`` sets how many examples the tests that use this try.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack, tensorclass

from millpond.core.errors import InvalidArgument
from millpond.core.schema import Schema

Key = tuple[str, ...]
Items = dict[Key, torch.Tensor]  # by field, [n, *shape]

NUMPY = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
]
SMALL = [(), (1,), (3,), (11,), (0,), (2, 0), (4, 3), (2, 1, 5), (1, 1, 1)]
SHAPES = st.sampled_from([*SMALL * 9, (4, 84, 84)])
KEYS: list[Key] = [
    ("observation",), ("action",), ("next", "observation"), ("next", "reward"), ("next", "more", "deep"), ("x y",),
    ("é",),
]  # fmt: skip


def examples(share: int = 1) -> Any:
    """How many are tried: 40, or what ``MILLPOND_EXAMPLES`` says; one of so many where each takes long."""
    number = int(os.environ.get("MILLPOND_EXAMPLES", "40"))
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=max(1, number // share), suppress_health_check=slow)


#: Without the usual limit, which many examples exceed.
patient = pytest.mark.timeout(0 if "MILLPOND_EXAMPLES" in os.environ else 120)


@tensorclass
class Next:
    observation: Any = None
    reward: Any = None
    more: Any = None


@st.composite
def schemas(draw: Any) -> Schema:
    """Some fields of an item; sometimes the item is one plain tensor."""
    field = st.tuples(st.sampled_from([*NUMPY, torch.bfloat16]), SHAPES)
    if draw(st.integers(0, 9)) == 0:
        return Schema({(): draw(field)})
    return Schema(draw(st.dictionaries(st.sampled_from(KEYS), field, min_size=1, max_size=6)))


def random_items(schema: Schema, n: int, seed: int) -> Items:
    """Any bytes at all: NaN with payloads, infinities, the largest numbers."""
    made = torch.Generator().manual_seed(seed)
    items = {}
    for field in schema.fields:
        highest = 2 if field.dtype is torch.bool else 256
        raw = torch.randint(0, highest, (n * field.nbytes,), dtype=torch.uint8, generator=made)
        items[field.key] = raw.view(field.dtype).reshape(n, *field.shape)
    return items


def tree(items: dict[Key, Any]) -> Any:
    """Nested dicts; the tensor itself where there is one alone."""
    root: dict[str, Any] = {}
    for key, value in items.items():
        if not key:
            return value
        place = root
        for part in key[:-1]:
            place = place.setdefault(part, {})
        place[key[-1]] = value
    return root


def each(items: Items) -> list[Any]:
    """The items one by one."""
    n = len(next(iter(items.values())))
    return [tree({key: value[i] for key, value in items.items()}) for i in range(n)]


def as_arrays(value: torch.Tensor) -> Any:
    """NumPy's, where it has the type."""
    return value.numpy() if value.dtype in NUMPY else value


def as_odd_arrays(value: torch.Tensor) -> Any:
    """Backwards in memory, read-only, and in the other byte order."""
    if value.dtype not in NUMPY:
        return value.repeat_interleave(2, 0)[::2]
    array = value.numpy()
    odd = array[::-1].astype(array.dtype.newbyteorder(">"))[::-1] if array.ndim else array.astype(array.dtype)
    odd.flags.writeable = False
    return odd


def as_odd_tensors(value: torch.Tensor) -> torch.Tensor:
    """Not contiguous, with a gradient, in inference mode."""
    with torch.inference_mode(len(value) % 2 == 0):
        spread = torch.stack([value, value], -1)[..., 0]
    return spread.requires_grad_() if spread.is_floating_point() and not spread.is_inference() else spread


def as_list(value: torch.Tensor) -> Any:
    """Python's own integers and booleans, where these can say all; else a list of tensors."""
    plain = not (value.is_floating_point() or value.is_complex()) and value.numel()
    return value.tolist() if plain else list(value)


def mapped(how: Callable[[torch.Tensor], Any]) -> Callable[[Items], Any]:
    return lambda items: tree({key: how(value) for key, value in items.items()})


def as_tensordicts(items: Items) -> list[Any]:
    return [TensorDict(item, []) if isinstance(item, dict) else item for item in each(items)]


def as_lazy_stack(items: Items) -> Any:
    members = as_tensordicts(items)
    return lazy_stack(members) if isinstance(members[0], TensorDict) else torch.stack(members)


def as_tensordict(items: Items) -> Any:
    whole = tree(items)
    return TensorDict(whole, [len(next(iter(items.values())))]) if isinstance(whole, dict) else whole


def with_tensorclass(item: Any, size: list[int]) -> Any:
    if isinstance(item, dict) and "next" in item:
        parts = {name: TensorDict(x, size) if isinstance(x, dict) else x for name, x in item["next"].items()}
        return {**item, "next": Next(**parts, batch_size=size)}
    return item


FORMS: dict[str, Callable[[Items], Any]] = {  # those of a batch of at least one item
    "nested dicts": mapped(lambda value: value),
    "a TensorDict": as_tensordict,
    "a dict with tuples for keys": dict,
    "arrays": mapped(as_arrays),
    "odd arrays": mapped(as_odd_arrays),
    "odd tensors": mapped(as_odd_tensors),
    "lists": mapped(as_list),
    "a list of dicts": each,
    "a list of TensorDicts": as_tensordicts,
    "a lazy stack": as_lazy_stack,
    "a tensorclass in a dict": lambda items: with_tensorclass(tree(items), [len(next(iter(items.values())))]),
    "tensorclasses in a list of dicts": lambda items: [with_tensorclass(item, []) for item in each(items)],
}
TYPED = sorted(FORMS.keys() - {"lists"})  # those that tell the types of their fields


UNFIT: dict[str, Any] = {
    "text": lambda n: ["text"] * n,
    "an object": lambda n: object(),
    "an empty group": lambda n: {},
    "a sparse tensor": lambda n: torch.zeros(n, 1).to_sparse(),
    "a field too many": lambda n: torch.zeros(n),
    "an array of text": lambda n: np.array(["text"] * n),
}


def spoiled(items: Items, how: str) -> Any:
    """A batch with a field ``unfit`` that cannot be stored."""
    unfit = UNFIT[how](len(next(iter(items.values()))))
    rest = {key or ("whole",): value for key, value in items.items()}
    if how == "text":
        return as_tensordict(rest).set("unfit", unfit)
    return {**tree(rest), "unfit": unfit}


def refuses(buffer: Any, items: Items, how: str) -> None:
    """By name, with nothing changed."""
    if how == "a field too many" and buffer.schema is None:
        return
    before = buffer.stats()
    with pytest.raises(InvalidArgument, match="unfit|whole"):
        buffer.extend(spoiled(items, how))
    assert buffer.stats() == before


def same(found: Any, expected: Items) -> None:
    """Bit for bit, and nothing else."""
    keys = set(found.keys(True, True)) if isinstance(found, TensorDict) else {()}
    assert {key if isinstance(key, tuple) else (key,) for key in keys} - {("index",), ("generation",)} == set(expected)
    for key, value in expected.items():
        got = found[key] if key else found
        assert (got.dtype, got.shape) == (value.dtype, value.shape), key
        if value.numel():
            assert torch.equal(raw(got), raw(value)), key


def raw(value: torch.Tensor) -> torch.Tensor:
    return value.detach().contiguous().reshape(-1).view(torch.uint8)


def joined(parts: list[Items]) -> Items:
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def last(items: Items, n: int) -> Items:
    return {key: value[-n:] for key, value in items.items()}
