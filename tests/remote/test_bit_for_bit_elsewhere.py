"""Whatever is given to a client comes back bit for bit, or is refused by the name of its field."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import remote_children as children
from any_data import FORMS, TYPED, UNFIT, each, examples, joined, last, patient, random_items, refuses, same, schemas
from hypothesis import given
from hypothesis import strategies as st

from millpond.remote.client import ReplayClient

numbers = itertools.count()


@pytest.mark.parametrize("transport", ["gloo", "shm"])
@patient
@examples(share=5)
@given(data=st.data())
def test_what_is_given_to_a_client_comes_back_bit_for_bit(data: Any, transport: str, keeper: Any) -> None:
    schema, seed = data.draw(schemas()), data.draw(st.integers(0, 2**32))
    name = f"any{next(numbers)}"
    owner = keeper.ask(children.open_service, children.plan(9, name=name, schema=schema if seed % 2 else None))
    try:
        client = ReplayClient(owner, transport=transport, connect_timeout=20.0)
        try:
            talk(data, client, schema, seed)
        finally:
            client.close()
    finally:
        keeper.ask(children.close_service, name)


def talk(data: Any, client: ReplayClient, schema: Any, seed: int) -> None:
    written = []
    for i in range(data.draw(st.integers(1, 3))):
        items = random_items(schema, data.draw(st.integers(1, 12)), seed + i)
        refuses(client, items, data.draw(st.sampled_from(sorted(UNFIT))))
        if data.draw(st.booleans()):
            form = data.draw(st.sampled_from(sorted(FORMS) if client.schema else TYPED))
            client.extend(FORMS[form](items))
        else:
            for item in each(items):
                client.add(item)
        written.append(items)
    names = data.draw(st.sets(st.sampled_from(sorted(schema.by_key))))
    if names:
        patch = random_items(schema, 1, seed)
        form = FORMS[data.draw(st.sampled_from(sorted(FORMS)))]
        assert client.update([(client.write_count - 1) % 9], form({key: patch[key] for key in names})) == 1
        for key in names:
            written[-1][key][-1] = patch[key][0]
    expected = last(joined(written), 9)
    same(client[:], expected)
    batch, info = client.sample(4, return_info=True)
    ages = info["generation"] - (client.write_count - len(client))
    same(batch, {key: value[ages] for key, value in expected.items()})
    client.load_state_dict(client.state_dict())
    same(client[:], expected)
