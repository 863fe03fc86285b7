"""A sampled batch in a plain PyTorch loop: a value network learns from dictionaries of tensors.

    python examples/plain_pytorch.py

A chain of five states is walked from left to right; only the last step is rewarded, with 1. What a state is worth
(its discounted return) is therefore 0.9 to the power of the steps that are left after it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from millpond import ReplayBuffer

STATES, GAMMA = 5, 0.9


def walk(times: int) -> dict[str, Tensor | dict[str, Tensor]]:
    """Transitions of whole walks: a nested dictionary, as `extend` takes it. The leading dimension counts items."""
    state = torch.arange(STATES).repeat(times)
    last = (state == STATES - 1).reshape(-1, 1)
    eye = torch.eye(STATES + 1)[:, :STATES]  # behind the last state comes nothing
    return {"state": eye[state], "next": {"state": eye[state + 1], "reward": last.float(), "terminated": last}}


def main() -> None:
    """Learn, and print what was learned beside what is right."""
    torch.manual_seed(0)
    buffer = ReplayBuffer(1_000, batch_size=64, seed=0)
    buffer.extend(walk(times=100))
    value = nn.Linear(STATES, 1, bias=False)
    optimizer = torch.optim.SGD(value.parameters(), lr=1.0)
    for _ in range(400):
        batch = buffer.sample().to_dict()  # without to_dict() it is a TensorDict, which is used the same way
        following = batch["next"]
        with torch.no_grad():
            target = following["reward"] + GAMMA * ~following["terminated"] * value(following["state"])
        loss = nn.functional.mse_loss(value(batch["state"]), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("learned", " ".join(f"{v:.2f}" for v in value.weight.detach()[0].tolist()))
    print("exact  ", " ".join(f"{GAMMA ** (STATES - 1 - s):.2f}" for s in range(STATES)))


if __name__ == "__main__":
    main()
