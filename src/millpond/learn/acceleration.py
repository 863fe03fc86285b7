"""The one place where updates are made faster by PyTorch: compiled networks, and bfloat16 under autocast."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from millpond.core.errors import InvalidArgument


def check_acceleration(*, compiled: bool, amp: bool, device: str) -> None:
    """Can this be had on ``device``, here? Tries it on a few numbers.

    Raises:
        InvalidArgument: it cannot; the message names the setting and what is missing.
    """
    if amp:
        if torch.device(device).type != "cuda":
            raise InvalidArgument(f"learner.amp=true is for GPUs, and learner.device is {device}")
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            raise InvalidArgument(f"learner.amp=true needs a GPU that computes in bfloat16, and {device} does not")
    if compiled:
        try:
            torch.compile(_plus_one)(torch.zeros(8, device=device))
        except Exception as problem:  # it raises whatever its compilers raise
            words = str(problem).strip().partition("\n")[0]
            raise InvalidArgument(f"learner.compile=true: torch.compile does not work here: {words}") from problem


def _plus_one(x: torch.Tensor) -> torch.Tensor:
    return x.relu() + 1


def accelerate(algorithm: Any, *, compiled: bool, amp: bool, device: str) -> None:
    """Let ``algorithm`` run its networks compiled, and its updates under autocast to bfloat16.

    Networks are the modules with parameters that it holds as attributes, besides its policy. What they answer is
    float32 also under autocast, so targets, losses, optimizers and parameters stay so; only their layers compute in
    bfloat16. Copies of a compiled network, in collectors and evaluations, are not compiled.
    """
    if compiled:
        for module in vars(algorithm).values():
            if (
                isinstance(module, nn.Module)
                and module is not algorithm.policy
                and any(True for _ in module.parameters())
            ):
                module.compile()
    if amp:
        algorithm.update = _autocasting(algorithm.update, torch.device(device).type)


def _autocasting(update: Any, kind: str) -> Any:
    @functools.wraps(update)
    def in_bfloat16(batch: Any) -> Any:
        # Without its cache: a copy of a weight that was made for a target, without gradients, would serve the loss too.
        with torch.autocast(kind, torch.bfloat16, cache_enabled=False):
            return update(batch)

    return in_bfloat16
