from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest

from millpond.core.errors import InvalidArgument
from millpond.core.spec import BoxAction, DiscreteAction, EnvSpec
from millpond.train.algorithms import _ALGORITHMS, make_algorithm
from millpond.train.checkpoint import spec_from_json, spec_to_json
from millpond.train.compose import settings_from_overrides
from millpond.train.settings import build

BOX = EnvSpec.vector(3, action=BoxAction((-2.0,), (2.0,)))
CHOICE = EnvSpec.vector(4, action=DiscreteAction(2))


def settings(name: str, *words: str) -> dict[str, Any]:
    return settings_from_overrides([f"algorithm={name}", *words]).algorithm


@pytest.mark.parametrize("name", _ALGORITHMS)
def test_the_configuration_file_says_what_the_algorithm_itself_would_take(name: str):
    module, algorithm, config = _ALGORITHMS[name]
    kind = getattr(importlib.import_module(module), config)
    values = settings(name)
    assert values.pop("name") == name
    assert build(kind, values, "algorithm") == kind()
    assert set(values) == {field.name for field in dataclasses.fields(kind)}
    spec = CHOICE if name == "dqn" else BOX
    assert type(make_algorithm(settings(name), spec, seed=0)).__name__ == algorithm


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("algorithm.hidden=[]", r"algorithm\.hidden must be the widths"),
        ("algorithm.hidden=[8,x]", r"algorithm\.hidden: expected a whole number, got 'x'"),
        ("algorithm.hidden=8", r"algorithm\.hidden: expected a list of whole numbers, got 8"),
        ("algorithm.tau=-1", r"algorithm\.tau must be between 0 and 1"),
        ("algorithm.learn_alpha=3", r"algorithm\.learn_alpha: expected true or false, got 3"),
    ],
)
def test_a_value_that_does_not_fit_is_named_with_its_place(word: str, said: str):
    with pytest.raises(InvalidArgument, match=said):
        make_algorithm(settings("sac", word), BOX, seed=0)


def test_unknown_algorithms_and_devices_are_refused():
    with pytest.raises(InvalidArgument, match=r"algorithm\.name=ppo is unknown; there are: sac, dqn"):
        make_algorithm({"name": "ppo"}, BOX, seed=0)
    with pytest.raises(InvalidArgument, match=r"learner\.device=abacus is no device"):
        make_algorithm(settings("sac"), BOX, seed=0, device="abacus")


@pytest.mark.parametrize("spec", [BOX, CHOICE])
def test_a_specification_survives_json(spec: EnvSpec):
    import json

    assert spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec
