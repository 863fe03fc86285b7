"""Files whose checksums are right and whose contents are not: refused before anything changed, or as good as any.

``MILLPOND_CRAFTED`` is the number of inputs (1000 by default).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from millpond import Flow, ReplayBuffer
from millpond.core.errors import CheckpointError, MillpondError
from millpond.core.sealing import seal
from millpond.replay import (
    ConsumingSampler,
    MappedStorage,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
)
from millpond.replay.inspection import inspect

INPUTS = int(os.environ.get("MILLPOND_CRAFTED", "1000"))
HEAD = struct.Struct("<8sIQI")
CAPACITY = 24
KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "random": lambda: {"sampler": RandomSampler(), "prefetch": 1},
    "random, consuming": lambda: {"sampler": RandomSampler(), "consume_after_n_samples": 3, "prefetch": 2},
    "epochs": lambda: {"sampler": SamplerWithoutReplacement()},
    "epochs, consuming": lambda: {"sampler": SamplerWithoutReplacement(), "consume_after_n_samples": 1},
    "fifo": lambda: {"sampler": ConsumingSampler(2), "prefetch": 1},
    "prioritized": lambda: {"sampler": PrioritizedSampler(), "flow": Flow(samples_per_insert=2.0, max_debt=500)},
    "prioritized, consuming": lambda: {"sampler": PrioritizedSampler(), "consume_after_n_samples": 2, "prefetch": 1},
    "n-step": lambda: {"sampler": NStep(3, 0.9, base=PrioritizedSampler()), "prefetch": 2},
    "slices": lambda: {"sampler": SliceSampler(slice_len=2), "prefetch": 1},
}
WEIRD: list[Any] = [
    -1, 0, 1, 2, 3, 7, CAPACITY, CAPACITY + 1, 255, 1 << 31, 1 << 40, (1 << 63) - 1, 1 << 63, 1 << 64, -(1 << 63),
    1 << 200,
    0.5, 1e300, float("nan"), float("inf"), None, True, "", "x", "0", [], [1], [[]], {}, {"x": 1},
]  # fmt: skip


def made(kind: str, **more: Any) -> ReplayBuffer:
    return ReplayBuffer(CAPACITY, batch_size=4, seed=0, **KINDS[kind](), **more)


def items(n: int, start: int) -> dict[str, Any]:
    x = torch.arange(start, start + n)
    return {
        "x": x,
        "episode_id": x // 5,
        "step": x % 5,
        "next": {"reward": (x % 7).float()[:, None], "done": (x % 5 == 4)[:, None]},
    }


def use(rb: ReplayBuffer, rounds: int = 4, start: int = 0) -> None:
    """Whatever a program does with a buffer."""
    for i in range(rounds):
        rb.extend(items(5, start + 5 * i))
        rb.add(
            {k: v[0] if not isinstance(v, dict) else {a: b[0] for a, b in v.items()} for k, v in items(1, 0).items()}
        )
        for _ in range(2):
            if rb.can_sample():
                batch = rb.sample()
                assert batch.batch_size[0] >= 1
                if "Prioritized" in repr(rb.sampler):
                    rb.update_priority(batch, batch["x"].double().abs() % 9)
                rb.update(batch, {"x": batch["x"]})
    rb.stats(), rb.explain("sample"), rb.explain("extend"), rb[:]
    if len(rb):
        rb.peek(3)


def contents(rb: ReplayBuffer) -> tuple[Any, Any]:
    return rb.stats(), {str(k): v.tolist() for k, v in rb[:].items(include_nested=True, leaves_only=True)}


class Crafted:
    """A saved file, taken apart, and put together again with something changed and the checksums right."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        _, self.version, length, _ = HEAD.unpack_from(content)
        self.header = json.loads(content[HEAD.size : HEAD.size + length])
        at, self.sections = HEAD.size + length, []
        for about in self.header["sections"]:
            self.sections.append(content[at : at + about["nbytes"]])
            at += about["nbytes"]

    def changed(self, rnd: random.Random) -> bytes:
        way = rnd.random()
        if way < 0.1:
            at = rnd.randrange(len(self.content))
            return self.content[:at] + bytes([self.content[at] ^ 1 << rnd.randrange(8)]) + self.content[at + 1 :]
        if way < 0.15:
            return self.content[: rnd.randrange(len(self.content))]
        header, sections = json.loads(json.dumps(self.header)), list(self.sections)
        for _ in range(rnd.choice([1, 1, 1, 2, 3])):
            if rnd.random() < 0.6:
                alter(header, rnd)
            else:
                i = rnd.choice([i for i, section in enumerate(sections) if section])
                sections[i] = altered_bytes(sections[i], rnd)
        index = header.get("sections")
        for about, section in zip(index if isinstance(index, list) else [], sections, strict=False):
            if isinstance(about, dict) and rnd.random() < 0.95:
                about["crc32"] = zlib.crc32(section)
        text = json.dumps(header).encode()
        return HEAD.pack(b"MILLPOND", self.version, len(text), zlib.crc32(text)) + text + b"".join(sections)


def places(node: Any) -> list[tuple[Any, Any]]:
    keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    found = []
    for key in keys:
        found += [(node, key), *places(node[key])]
    return found


def alter(tree: Any, rnd: random.Random) -> None:
    found = places(tree)
    node, key = rnd.choice(found)
    way, value = rnd.random(), node[key]
    if way < 0.2 and type(value) is int:
        node[key] = value + rnd.choice([-1, 1])
    elif way < 0.3:
        del node[key]
    elif way < 0.5:
        other, its = rnd.choice(found)
        node[key], other[its] = other[its], value
    elif way < 0.55 and isinstance(value, str) and value:
        at = rnd.randrange(len(value))
        node[key] = value[:at] + rnd.choice("0x/{9") + value[at + 1 :]
    else:
        node[key] = rnd.choice(WEIRD)


def altered_bytes(section: bytes, rnd: random.Random) -> bytes:
    changed = bytearray(section)
    if rnd.random() < 0.3 or len(section) < 8:
        changed[rnd.randrange(len(changed))] ^= 1 << rnd.randrange(8)
    else:
        at = rnd.randrange(len(section) // 8) * 8
        word = rnd.choice([rnd.choice([n for n in WEIRD if type(n) is int]) & (1 << 64) - 1, rnd.getrandbits(64)])
        changed[at : at + 8] = struct.pack("<Q", word)
    return bytes(changed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_crafted_save_is_refused_or_loads_a_buffer_that_works(kind: str, tmp_path: Path) -> None:
    rnd, rb, file = random.Random(kind), made(kind), tmp_path / "crafted"
    use(rb, 7)
    rb.dumps(tmp_path / "good")
    rb.loads(tmp_path / "good")
    good, expected = Crafted((tmp_path / "good").read_bytes()), contents(rb)
    refused = 0
    for number in range(INPUTS // len(KINDS) + 1):
        crafted = good.changed(rnd)
        file.write_bytes(crafted)
        try:
            rb.loads(file)
        except CheckpointError:
            refused += 1
            assert contents(rb) == expected, number
        else:
            use(rb)
            rb.dumps(tmp_path / "again")
            rb.loads(tmp_path / "again")
            rb.close()
            rb = made(kind)
            rb.loads(tmp_path / "good")
        with contextlib.suppress(MillpondError):
            inspect(file)
    assert refused > INPUTS // len(KINDS) // 3


@pytest.mark.parametrize("name", ["rules.json", "schema.json", "owner"])
def test_a_crafted_file_of_a_buffer_on_disk_is_refused_by_name_or_does_no_harm(name: str, tmp_path: Path) -> None:
    rnd, path = random.Random(name), tmp_path / "buffer"
    with ReplayBuffer(MappedStorage(CAPACITY, path), batch_size=4, sampler=PrioritizedSampler()) as rb:
        use(rb, 7)
    whole = (path / name).read_bytes()
    for _ in range(INPUTS // 10):
        way, flipped = rnd.random(), False
        if way < 0.4:
            at = rnd.randrange(len(whole))
            changed, flipped = bytearray(whole), True
            changed[at] ^= 1 << rnd.randrange(8)
        elif way < 0.6 or name == "owner":
            changed = bytearray(whole[: rnd.randrange(len(whole))] if way < 0.9 else rnd.randbytes(30))
        else:
            values = json.loads(whole)
            values.pop("crc32", None)
            alter(values, rnd)
            values = json.loads(json.dumps(values).replace("NaN", "0").replace("Infinity", "0"))
            changed = bytearray((json.dumps(values) if name == "schema.json" else seal(values)).encode())
        copy = tmp_path / "copy"
        shutil.copytree(path, copy)
        (copy / name).write_bytes(changed)
        said = ""
        try:
            with ReplayBuffer.attach(copy) as again:
                use(again)
        except MillpondError as problem:
            said = str(problem)
        assert said or not (flipped and name == "rules.json"), changed
        assert not (said and flipped) or any(word in said for word in (name, "format", "bytes")), said
        assert not (said and name == "owner"), said
        shutil.rmtree(copy)
