"""What each request must hold: every field and every tensor of it is looked at here, before anybody uses one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from millpond.core.errors import InvalidArgument, InvalidType
from millpond.remote.messages import Message

Check = Callable[[Any], bool]
Suits = Callable[[torch.Tensor], bool]
_MOST = 1 << 62
_LONG = 1 << 63


def _count(value: Any) -> bool:
    return type(value) is int and 1 <= value < _MOST


def _flag(value: Any) -> bool:
    return type(value) is bool


def _text(value: Any) -> bool:
    return type(value) is str


def _place(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LONG


def _integer(value: Any) -> bool:
    return type(value) is int and -_LONG <= value < _LONG


def _list_of(check: Check, *lengths: int) -> Check:
    return lambda value: (
        type(value) is list and (not lengths or len(value) in lengths) and all(check(part) for part in value)
    )


def _maybe(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _side(value: Any) -> bool:
    return value in ("sample", "extend")


_key = _list_of(_text)
_WAITS: dict[str, Check] = {"n": _count, "wait": _flag, "exempt": _flag}
_ABOUT: dict[str, Check] = {"number": _place, "op": _side, "n": _count}

FIELDS: dict[str, dict[str, Check]] = {
    "extend": {**_WAITS, "schema": _text, "who": _place, "receipt": _maybe(_list_of(_integer, 2))},
    "sample": {**_WAITS, "patient": _flag},
    "until_sample": _WAITS,
    "until_extend": _WAITS,
    "collect": _ABOUT,
    "withdraw": _ABOUT,
    "bind": {"schema": _maybe(_text)},
    "counts": {},
    "can_sample": {"n": _count, "exempt": _flag},
    "stats": {},
    "explain": {"op": _side, "n": _count},
    "receipt": {"line": _integer},
    "epoch_over": {"n": _count},
    "peek": {"n": _count},
    "pick": {"slice": _maybe(_list_of(_maybe(_integer), 3))},
    "give_back": {"number": _place},
    "empty": {},
    "update_priority": {},
    "update": {"keys": _list_of(_key)},
    "state": {},
    "fetch": {"at": _place},
    "fetched": {},
    "offer": {"nbytes": _place},
    "bring": {"at": _place},
    "load": {},
}


def _rows(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.uint8 and tensor.dim() == 2


def _bytes(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.uint8 and tensor.dim() == 1


def _numbers(tensor: torch.Tensor) -> bool:
    whole = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    return tensor.dtype in whole and tensor.dim() == 1


def _any(tensor: torch.Tensor) -> bool:
    return True


_NAMED: dict[str, Suits] = {"index": _numbers, "generation": _numbers}
# Of each kind: the tensors that must be there, and those that may be.
TENSORS: dict[str, tuple[dict[str, Suits], dict[str, Suits]]] = {
    "extend": ({"rows": _rows}, {"priority": _any}),
    "pick": ({}, {"which": _any}),
    "update_priority": ({"index": _numbers, "priority": _any}, _NAMED),
    "update": ({"index": _numbers}, _NAMED),
    "bring": ({"piece": _bytes}, {}),
}


def check(request: Message) -> None:
    """Raises ``InvalidArgument`` or ``InvalidType``, naming what is unknown, missing or not what it must be."""
    kind, fields, tensors = request.kind, request.fields, request.tensors
    if kind not in FIELDS:
        raise InvalidArgument(f"nobody here knows what {kind[:50]!r} is; is the client a newer millpond?")
    expected = FIELDS[kind]
    if fields.keys() != expected.keys():
        raise InvalidArgument(f"{kind} has {sorted(expected)}, not {_short(sorted(fields))}")
    for name, fits in expected.items():
        if not fits(fields[name]):
            raise InvalidType(f"{kind}: {name} is not {_short(fields[name])}")
    must, may = TENSORS.get(kind, ({}, {}))
    patches = {f"patch{i}": _any for i in range(len(fields["keys"]))} if kind == "update" else {}
    for name in [*must, *patches]:
        if name not in tensors:
            raise InvalidArgument(f"{kind}: {name} is missing")
    for name, tensor in tensors.items():
        suits = {**may, **must, **patches}.get(name)
        if suits is None or not suits(tensor):
            raise InvalidType(f"{kind}: {name[:50]} is not {tensor.dtype} of shape {list(tensor.shape)}")
    if kind == "pick" and ("which" in tensors) == (fields["slice"] is not None):
        raise InvalidArgument("pick: a slice, or which, and not both")
    if kind == "extend" and len(tensors["rows"]) != fields["n"]:
        raise InvalidArgument(f"extend: {len(tensors['rows'])} rows, and n is {fields['n']}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
