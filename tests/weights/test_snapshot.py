from __future__ import annotations

import pickle

import pytest
import torch

from millpond.core.errors import BufferClosed, SchemaMismatch
from millpond.weights import Snapshot, WeightBoard


def test_a_snapshot_is_one_whole_version() -> None:
    module = torch.nn.Linear(3, 2)
    with WeightBoard(module, version=5) as board:
        snapshot: Snapshot = pickle.loads(pickle.dumps(board.snapshot()))
    other = torch.nn.Linear(3, 2)
    snapshot.block.flags.writeable = False
    assert snapshot.pull(other) == 5
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))
    with pytest.raises(SchemaMismatch, match="weight"):
        snapshot.pull(torch.nn.Linear(4, 2))


def test_later_publications_do_not_change_it() -> None:
    """Case rem-9: who is far away reads at leisure."""
    module = torch.nn.Linear(3, 2)
    with WeightBoard(module) as board:
        first = {name: value.clone() for name, value in module.state_dict().items()}
        snapshot = board.snapshot()
        for _ in range(3):  # both halves of the board are written again
            torch.nn.init.normal_(module.weight)
            board.publish(module)
        other = torch.nn.Linear(3, 2)
        assert (snapshot.pull(other), board.snapshot().version) == (0, 3)
        assert all(torch.equal(value, first[name]) for name, value in other.state_dict().items())
        board.close()
        with pytest.raises(BufferClosed):
            board.snapshot()
