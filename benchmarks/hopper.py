"""Hopper transitions, the rows that the replay benchmarks move: 106 bytes of fields in rows of 112."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from millpond.replay.kernels import loading as kernels

ITEMS = 1_000_000
WORDS = 14  # 64-bit words of a row


def transitions(n: int) -> TensorDict:
    """A batch of n made-up transitions."""
    return TensorDict(
        {
            "observation": torch.randn(n, 11),
            "action": torch.randn(n, 3),
            "next": TensorDict(
                {
                    "observation": torch.randn(n, 11),
                    "reward": torch.randn(n, 1),
                    "done": torch.zeros(n, 1, dtype=torch.bool),
                    "terminated": torch.zeros(n, 1, dtype=torch.bool),
                },
                [n],
            ),
        },
        [n],
    )


def item() -> dict[str, Any]:
    """One transition as nested NumPy arrays."""
    one = transitions(1)[0]
    following = {key: value.numpy() for key, value in one["next"].items()}
    return {"observation": one["observation"].numpy(), "action": one["action"].numpy(), "next": following}


def fill(rb: Any, items: int = ITEMS) -> None:
    """Write ``items`` transitions, and have the compiled kernels loaded, which the first sample asks for."""
    part = transitions(50_000)
    for _ in range(items // 50_000):
        rb.extend(part)
    kernels.request()
    kernels.wait()
