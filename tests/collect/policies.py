"""Policies whose actions say where they come from."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Waver(nn.Module):
    """An action that depends on the observation of a Diary alone."""

    def forward(self, data: Any) -> Any:
        seen = data["observation"]
        return data.set("action", torch.sin(seen[:, 1:3] + seen[:, :1]))


class Constant(nn.Module):
    """Always the value of its one parameter; remembers its seed."""

    def __init__(self, value: float = 0.0, size: int = 2) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value))
        self.size = size
        self.seed: int | None = None

    def forward(self, data: Any) -> Any:
        return data.set("action", self.value.detach().expand(*data.batch_size, self.size))

    def reseed(self, seed: int) -> None:
        self.seed = seed
