"""Whatever is given comes back bit for bit, or is refused by the name of its field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from any_data import (
    FORMS,
    TYPED,
    UNFIT,
    each,
    examples,
    joined,
    last,
    patient,
    random_items,
    refuses,
    same,
    schemas,
    tree,
)
from hypothesis import given
from hypothesis import strategies as st

from millpond import ReplayBuffer
from millpond.core.schema import Schema


@patient
@examples()
@given(data=st.data())
def test_what_is_given_comes_back_bit_for_bit(data: Any, tmp_path_factory: Any) -> None:
    schema, seed = data.draw(schemas()), data.draw(st.integers(0, 2**32))
    capacity, how = data.draw(st.integers(1, 9)), data.draw(st.sampled_from(sorted(UNFIT)))
    bound = data.draw(st.booleans())
    rb = ReplayBuffer(capacity, schema=schema if bound else None, shared=data.draw(st.booleans()), seed=0)
    try:
        written: list[Any] = []
        for i in range(data.draw(st.integers(1, 3))):
            items = random_items(schema, data.draw(st.integers(1, 5)), seed + i)
            refuses(rb, items, how)
            if data.draw(st.booleans()):
                form = data.draw(st.sampled_from(sorted(FORMS) if rb.schema else TYPED))
                rb.extend(FORMS[form](items))
            else:
                for item in each(items):
                    rb.add(item)
            written.append(items)
            assert rb.schema == schema
        change(data, rb, schema, written)
        expected = last(joined(written), capacity)
        same(rb[:], expected)
        look_elsewhere(data, rb, expected, tmp_path_factory.getbasetemp())
    finally:
        rb.close()


def change(data: Any, rb: ReplayBuffer, schema: Schema, written: list[Any]) -> None:
    """Some fields of the last item."""
    names = data.draw(st.sets(st.sampled_from(sorted(schema.by_key))))
    if names:
        patch = last(random_items(schema, 1, data.draw(st.integers(0, 99))), 1)
        form = FORMS[data.draw(st.sampled_from(sorted(FORMS)))]
        slot = (rb.write_count - 1) % rb.capacity
        assert rb.update([slot], form({key: patch[key] for key in names})) == 1
        written[-1] = {key: value.clone() for key, value in written[-1].items()}
        for key in names:
            written[-1][key][-1] = patch[key][0]


def look_elsewhere(data: Any, rb: ReplayBuffer, expected: Any, directory: Path) -> None:
    """In samples, another buffer's memory, a saved state, a file, and shared memory."""
    batch, info = rb.sample(4, return_info=True)
    ages = info["generation"] - (rb.write_count - len(rb))
    same(batch, {key: value[ages] for key, value in expected.items()})
    with ReplayBuffer(rb.capacity) as copy:
        copy.load_state_dict(rb.state_dict())
        same(copy[:], expected)
    with ReplayBuffer(rb.capacity) as copy:
        rb.dumps(directory / "saved")
        copy.loads(directory / "saved")
        same(copy[:], expected)
    with ReplayBuffer(len(rb)) as copy:  # what was sampled can be written as it is
        copy.extend(rb[:])
        copy.extend(rb.sample(len(rb)) if not rb._local.known_schema().plain else rb[:])
        assert copy.schema == rb.schema
    if data.draw(st.booleans()):
        same(rb.share()[:], expected)
        assert torch.equal(
            rb._local.engine.rows.gather(info["index"].numpy()), rb.schema.pack(tree_of(batch, rb.schema))
        )


def tree_of(batch: Any, schema: Schema) -> Any:
    return tree({key: batch[key] if key else batch for key in schema.by_key})
