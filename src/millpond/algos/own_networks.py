"""Networks of the user's own, in the place of the multi-layer perceptrons.

An algorithm asks for a network by its role. ``Networks`` says, for each role, what makes one: called with the numbers
of inputs and outputs, it returns an ``nn.Module`` that maps float32 ``[B, inputs]`` to ``[B, outputs]``.

=============  =====================================================  ===========================================
algorithm      ``actor``                                              ``critic``
=============  =====================================================  ===========================================
SAC            observation → mean and log standard deviation, ``2A``  observation and action → value, ``1``
TD3, DDPG      observation → action before its tanh, ``A``            observation and action → value, ``1``
DQN            (none)                                                 observation → a value for each action, ``n``
=============  =====================================================  ===========================================

With ``dueling=True`` DQN's has one output more: the value of the state, before the advantages of the actions.

``A`` is the number of an action's elements. Observations come flat, all fields end to end, as
``EnvSpec.observation_size`` counts them; actions come scaled to ``[-1, 1]``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from millpond.algos.nets import MLP
from millpond.core.errors import InvalidArgument, InvalidType

MakeNetwork = Callable[[int, int], nn.Module]
Networks = Mapping[str, MakeNetwork]


def make_network(
    networks: Networks | None,
    role: str,
    sizes: Sequence[int],
    *,
    generator: torch.Generator,
    copies: int | None = None,
    tanh_output: bool = False,
) -> MLP | OwnNetwork:
    """The network for ``role``: one of the user's own where ``networks`` has one, else an MLP of ``sizes``.

    Raises:
        InvalidType: what was given does not make an ``nn.Module``.
        InvalidArgument: the module does not take or give the shapes that it should, or has buffers.
    """
    own = (networks or {}).get(role)
    if own is None:
        return MLP(sizes, generator=generator, copies=copies, tanh_output=tanh_output)
    if not callable(own) or isinstance(own, nn.Module):
        raise InvalidType(
            f"the network {role!r} must be a class or function that makes an nn.Module from (inputs, outputs), for"
            f" copies and targets are made of it; got {type(own).__name__}"
        )
    return OwnNetwork(own, role, sizes[0], sizes[-1], generator=generator, copies=copies, tanh_output=tanh_output)


def check_roles(networks: Networks | None, roles: tuple[str, ...], algorithm: str) -> None:
    """Refuse networks that ``algorithm`` has no use for.

    Raises:
        InvalidArgument: it has no such role; the message lists those that it has.
    """
    for role in networks or {}:
        if role not in roles:
            raise InvalidArgument(f"{algorithm} has no network {role!r}; it has: {', '.join(roles)}")


class OwnNetwork(nn.Module):
    """What an algorithm expects of ``MLP``, from modules of the user's: ``copies`` side by side, and frozen passes.

    Initial numbers are drawn from PyTorch's global generator, seeded for that from ``generator``, and left as it was.
    """

    def __init__(
        self,
        make: MakeNetwork,
        role: str,
        inputs: int,
        outputs: int,
        *,
        generator: torch.Generator,
        copies: int | None,
        tanh_output: bool,
    ) -> None:
        super().__init__()
        self.copies, self.tanh_output = copies, tanh_output
        seed = int(torch.randint(2**31, (), generator=generator, device=generator.device))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            parts = [make(inputs, outputs) for _ in range(copies or 1)]
        for part in parts:
            _check(part, role, inputs, outputs)
        if len({id(part) for part in parts}) < len(parts):
            raise InvalidArgument(f"each call for the network {role!r} must make a new module: {copies} are needed")
        self.parts = nn.ModuleList(copy.deepcopy(parts)).to(generator.device)  # a target must not be its own network

    def forward(self, x: Tensor, *, frozen: bool = False) -> Tensor:
        """``[B, inputs]`` to float32 ``[B, outputs]``, or ``[copies, B, outputs]``; with ``frozen``, gradients flow to
        ``x`` alone."""
        answers = [self._answer(part, x, frozen=frozen) for part in self.parts]
        answer = answers[0] if self.copies is None else torch.stack(answers)
        return answer.tanh() if self.tanh_output else answer

    def _answer(self, part: nn.Module, x: Tensor, *, frozen: bool) -> Tensor:
        if frozen:
            weights = {name: value.detach() for name, value in part.named_parameters()}
            answer: Tensor = torch.func.functional_call(part, weights, (x,))
        else:
            answer = part(x)
        return answer.float()


def _check(module: nn.Module, role: str, inputs: int, outputs: int) -> None:
    wanted = f"the network {role!r} must map float32 [B, {inputs}] to [B, {outputs}]"
    if not isinstance(module, nn.Module):
        raise InvalidType(f"{wanted}; what was given made a {type(module).__name__}, not an nn.Module")
    if next(module.buffers(), None) is not None:
        raise InvalidArgument(
            f"the network {role!r} has buffers (as batch normalisation has): targets, checkpoints and ranks know"
            " parameters only; use layers without, such as nn.LayerNorm"
        )
    if next(module.parameters(), None) is None:
        raise InvalidArgument(f"the network {role!r} has no parameters to learn")
    if any(p.dtype != torch.float32 for p in module.parameters()):
        raise InvalidArgument(f"the network {role!r} must have float32 parameters")
    for rows in (2, 3):
        try:
            with torch.no_grad():
                answer = module(torch.zeros(rows, inputs))
        except (RuntimeError, TypeError, ValueError, IndexError) as problem:
            raise InvalidArgument(f"{wanted}; it raised {type(problem).__name__}: {problem}") from problem
        if not isinstance(answer, Tensor) or tuple(answer.shape) != (rows, outputs):
            got = list(answer.shape) if isinstance(answer, Tensor) else type(answer).__name__
            raise InvalidArgument(f"{wanted}; for [{rows}, {inputs}] it gave {got}")
