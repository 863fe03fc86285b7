"""Damages the files of buffers on disk at random and opens them: ``python damage_files.py FOLDER SEED ROUNDS``.

Prints a JSON object: how often each error came, "fine" for buffers that could be used, and under "foreign" whatever is
neither. A process of its own, since what is tried for may end it.
"""

from __future__ import annotations

import collections
import json
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from millpond import ReplayBuffer
from millpond.core.errors import MillpondError
from millpond.core.sealing import seal, unseal
from millpond.replay import ConsumingSampler, MappedStorage, NStep, PrioritizedSampler, SamplerWithoutReplacement

CAPACITY = 64
SETTINGS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "prioritized": {"sampler": PrioritizedSampler},
    "consuming": {"sampler": lambda: ConsumingSampler(1)},
    "epochs": {"sampler": SamplerWithoutReplacement},
    "n-step": {"sampler": lambda: NStep(3, 0.9), "num_envs": 2},
    "pool": {"consume_after_n_samples": 2},
}
ODD = [
    None,
    True,
    0,
    -1,
    1,
    2**31,
    2**63,
    2**70,
    -(2**63),
    0.5,
    1e308,
    "",
    "x",
    [],
    {},
    [1],
    {"a": 1},
    [[[]]],
    "é" * 100,
]
NUMBERS = [0, 1, -1, 2**62, -(2**62), CAPACITY - 1, CAPACITY, CAPACITY + 1]
LONGEST_S = 60.0  # of one buffer; a hang


def items(n: int) -> TensorDict:
    """Transitions of one kind."""
    ends = {key: torch.zeros(n, 1, dtype=torch.bool) for key in ("done", "terminated", "truncated")}
    after = {"observation": torch.zeros(n, 1), "reward": torch.ones(n, 1), **ends}
    return TensorDict({"observation": torch.arange(float(n)).reshape(n, 1), "next": TensorDict(after, [n])}, [n])


def made(folder: Path) -> dict[str, Path]:
    """A buffer of each kind, full, whose owner has left it."""
    found = {}
    for name, settings in SETTINGS.items():
        arguments = {key: value() if callable(value) else value for key, value in settings.items()}
        found[name] = folder / name
        buffer = ReplayBuffer(MappedStorage(CAPACITY, found[name]), batch_size=4, seed=1, **arguments)
        buffer.extend(items(CAPACITY if name in ("consuming", "pool") else 100))
        buffer.sample()
        buffer.close()
    return found


def damage(folder: Path, rng: random.Random) -> str:
    """Change one file of a buffer. Says which, and how."""
    file = rng.choice([*sorted(folder.iterdir()), folder / "control", folder / "arrays"])
    if not file.is_file():
        return f"{file.name}: none"
    content, how = bytearray(file.read_bytes()), rng.random()
    if file.suffix == ".json" and how < 0.6:
        return f"{file.name}: {_other_values(file, rng)}"
    if how < 0.7:
        file.write_bytes(content[: rng.randrange(len(content) + 1)])
        return f"{file.name}: cut"
    if how < 0.78:
        file.unlink()
        if how < 0.74:
            file.mkdir()
        return f"{file.name}: gone, or a folder"
    used = [i for i, byte in enumerate(content) if byte]
    for _ in range(rng.choice([1, 1, 2, 8, 64]) if content else 0):
        at = rng.choice(used) if used and rng.random() < 0.8 else rng.randrange(len(content))
        if rng.random() < 0.5 and len(content) >= 8:
            at = min(at - at % 8, len(content) - 8)
            content[at : at + 8] = rng.choice([*NUMBERS, rng.randrange(2**63)]).to_bytes(8, "little", signed=True)
        else:
            content[at] = rng.randrange(256)
    file.write_bytes(content)
    return f"{file.name}: other bytes"


def _other_values(file: Path, rng: random.Random) -> str:
    """Of a JSON file, with a checksum that is right."""
    try:
        text = file.read_text()
        sealed = "crc32" in text
        values = unseal(text) if sealed else json.loads(text)
    except ValueError:
        return "damaged before"
    node: Any = values
    while True:
        places: list[Any] = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not places:
            break
        at = rng.choice(places)
        if isinstance(node[at], (dict, list)) and node[at] and rng.random() < 0.6:
            node = node[at]
            continue
        if isinstance(node, dict) and rng.random() < 0.2:
            del node[at]
        else:
            node[at] = rng.choice(ODD)
        break
    try:
        file.write_text(seal(values) if sealed else json.dumps(values))
    except ValueError:
        return "nothing"
    return "other values"


def use(path: Path) -> None:
    """Open it, and do what users do."""
    buffer = ReplayBuffer.attach(path)
    try:
        buffer.stats()
        for _ in range(3):
            if buffer.can_sample():
                buffer.sample()
        buffer[:]
        buffer.extend(items(8), timeout=0.0)
        if buffer.can_sample():
            buffer.sample()
    finally:
        buffer.close()


def main(folder: Path, seed: int, rounds: int) -> None:
    """See above."""
    rng, kinds = random.Random(seed), made(folder)
    came: collections.Counter[str] = collections.Counter()
    foreign: list[str] = []
    for number in range(rounds):
        kind, path = rng.choice(sorted(kinds)), folder / "damaged"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(kinds[kind], path)
        done = [damage(path, rng) for _ in range(rng.choice([1, 1, 2]))]
        began, told = time.monotonic(), "fine"
        try:
            use(path)
        except MillpondError as problem:
            told = type(problem).__name__
        except Exception as problem:  # that is what is looked for
            told = "foreign"
            foreign.append(f"round {number}, {kind}, {done}: {problem!r:.200}")
        came[told] += 1
        if time.monotonic() - began > LONGEST_S:
            foreign.append(f"round {number}, {kind}, {done}: took {time.monotonic() - began:.0f} s")
    print(json.dumps({**came, "foreign": foreign}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
