"""From GPU to GPU. What needs two of them is skipped elsewhere; what is refused, and how the ends meet, is not."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import remote_children as children
import torch
from remote_children import batch, ids_of
from torch.distributed import is_nccl_available

from millpond.core.errors import NotShareable, PeerLost
from millpond.remote.messages import SMALL, Message, decode, direct_nbytes, head_of, payload_nbytes, payload_of
from millpond.remote.transports.nccl import Introduction, why_not
from millpond.replay import TensorStorage

two_gpus = pytest.mark.skipif(
    not is_nccl_available() or torch.cuda.device_count() < 2,
    reason="takes NCCL and two GPUs: it refuses two ends on one",
)


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_it_is_refused_in_words_where_it_cannot_be(pond, client, transport):
    owner = pond(10, transport=transport, batch_size=2)
    with pytest.raises(NotShareable, match="transport='nccl'.*transport='gloo' works"):
        client(owner, transport="nccl").stats()
    with pytest.raises(NotShareable, match="transport='nccl'"):
        pond(10, transport="nccl")


@pytest.mark.skipif(not is_nccl_available() or not torch.cuda.is_available(), reason="takes NCCL and a GPU")
@pytest.mark.parametrize(("storage", "device", "word"), [(None, "cuda", "storage"), ("cuda:0", None, "device")])
def test_both_ends_must_be_on_a_gpu(storage, device, word):
    assert word in why_not(storage, device)
    assert why_not("cuda:0", "cuda:1") is None


def test_the_ends_meet_by_one_word():
    """The owner says the first thing that NCCL notes, the client hears it once; the rest is nobody else's."""
    said: list[bytes] = []
    owner = Introduction(say=said.append)
    client = Introduction(hear=lambda: said[0])
    owner.set("0:1", b"unique")
    owner.set("note", b"x")
    assert said == [b"unique"]
    assert client.get("0:1") == client.get("0:1") == b"unique"
    client.wait(["0:1"], timedelta(seconds=1))
    assert client.check(["0:1"])
    assert not client.check(["note"])
    for end in (owner, client):
        with pytest.raises(PeerLost, match="other"):
            end.get("other")


def test_the_head_says_where_the_payload_comes_from():
    answer = Message("done", 7, {"n": 3}, {"rows": torch.ones(SMALL + 1, dtype=torch.uint8)})
    payload = payload_of(answer)
    direct = head_of(answer, payload, direct=True)
    assert (direct_nbytes(direct), payload_nbytes(direct)) == (SMALL + 1, 0)
    assert direct_nbytes(head_of(answer, payload)) == 0
    again = decode(head_of(answer, payload, direct=True), payload)
    assert (again.number, again.fields) == (7, {"n": 3})
    assert torch.equal(again.tensors["rows"], answer.tensors["rows"])


@two_gpus
def test_samples_go_from_gpu_to_gpu(child: Any, client: Any) -> None:
    """The owner's storage on one, the client's batches on the other: samples by NCCL, writes by Gloo."""
    owning = child()
    owner = owning.ask(
        children.open_service,
        children.plan(TensorStorage(20_000, device="cuda:0"), transport="nccl", batch_size=5000, device="cuda:1"),
    )
    made = client(owner, transport="nccl")
    made.extend(batch(20_000))
    for _ in range(20):
        found = made.sample()
        assert found["observation"].device == torch.device("cuda:1")
        assert len(ids_of(found.cpu())) == 5000
    traffic = owning.ask(children.describe)["traffic"]
    assert traffic["nccl_out"] == 20 * 5000 * made.schema.row_nbytes
    assert traffic["gloo_out"] < traffic["nccl_out"]
    owning.kill()
    with pytest.raises(PeerLost):
        made.sample()
