"""What a policy must be, and what it must answer. Whatever it does else is told in the words of who wrote it."""

from __future__ import annotations

import copy
import inspect
import traceback
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict, TensorDictBase

from millpond.core.errors import InvalidArgument, InvalidType, MillpondError, SchemaMismatch
from millpond.envs.spaces import Leaf, limits
from millpond.weights import WeightBoard

Array = npt.NDArray[Any]


def check_policy(policy: Any, weights: WeightBoard | None = None) -> None:
    """Raises InvalidType or InvalidArgument where these cannot act, as far as can be seen without asking."""
    if policy is None:
        if weights is not None:
            raise InvalidArgument("weights were given, but no policy that could use them")
        return
    wanted = "a policy is a module, or a function, from TensorDict to TensorDict, or None"
    if isinstance(policy, type):
        raise InvalidType(f"{wanted}; the class {policy.__name__} was given, where an instance of it may be meant")
    if not callable(policy):
        raise InvalidType(f"{wanted}, not {type(policy).__name__}")
    asked = policy.forward if isinstance(policy, torch.nn.Module) else policy
    try:
        signature = inspect.signature(asked)
    except (TypeError, ValueError):  # it has none to look at
        return
    try:
        signature.bind(None)
    except TypeError as problem:
        name = getattr(policy, "__name__", type(policy).__name__)
        raise InvalidType(f"{wanted}; {name}{signature} cannot be called with a TensorDict alone: {problem}") from None


class Asking:
    """Asks a policy for the actions of ``num_envs`` environments; ``space`` is that of one, with these ``leaves``.

    Its first answer is looked at more closely, and what it raises there is told in the words of this module: it comes
    before anything was collected.
    """

    def __init__(self, policy: Any, space: Any, leaves: Sequence[Leaf], num_envs: int) -> None:
        self.policy = policy
        self._space, self._num_envs = space, num_envs
        self._acts = [(leaf, ("action", *leaf.key), (num_envs, *leaf.shape), limits(space, leaf)) for leaf in leaves]
        self._proven = self.rehearsed = False

    def __call__(self, observation: TensorDict) -> list[Array]:
        """The actions, one array for each leaf. Whole numbers beyond the bounds of a Box are clipped to them.

        Raises:
            InvalidType, SchemaMismatch: the policy answered something else.
            InvalidArgument: it answered with a choice that there is not; or, the first time, it cannot be asked.
        """
        if self._proven:
            return self._read(self.policy(observation))
        actions = self._first(self.policy, observation)
        self._proven = self.rehearsed = True
        return actions

    def rehearse(self, observation: TensorDict) -> None:
        """Ask a copy of the policy, where itself will be asked later. Raises what asking it would raise.

        Not everything can be copied; then the first answer is looked at when it comes.
        """
        self.rehearsed = True
        try:
            double = copy.deepcopy(self.policy)
        except Exception:  # noqa: BLE001  # a class of the user's may raise anything
            return
        with torch.random.fork_rng(devices=[]):
            self._first(double, observation)

    def _first(self, policy: Any, observation: TensorDict) -> list[Array]:
        told = _described(observation)
        try:
            given = policy(observation)
        except MillpondError:
            raise
        except Exception as problem:
            what = f"{type(problem).__name__}: {problem}{_where(problem)}"
            raise InvalidArgument(
                f"the policy cannot be asked: given {told}, it raised {what}. It must return {self._needs()}"
            ) from problem
        return self._read(given)

    def _read(self, given: Any) -> list[Array]:
        actions = []
        for leaf, key, shape, (low, high, choice) in self._acts:
            action = given.get(key, None) if isinstance(given, TensorDictBase) else None
            if not isinstance(action, torch.Tensor):
                kind = SchemaMismatch if isinstance(given, TensorDictBase) else InvalidType
                raise kind(f"the policy returned {_described(given)}; it must return {self._needs()}")
            if action.dtype is torch.bfloat16:  # unknown to NumPy
                action = action.float()
            array: Array = action.numpy(force=True)
            if array.shape != shape or (array.dtype.kind in "fc" and array.dtype.kind != leaf.dtype.kind):
                name = "/".join(key)
                raise SchemaMismatch(f"the policy gave {name}: {_typed(array)}; it must return {self._needs()}")
            if choice and (wrong := (array < low) | (array > high)).any():
                chosen = f"{'/'.join(key)}={array[wrong].flat[0]}"
                raise InvalidArgument(f"the policy chose {chosen}; it must return {self._needs()}")
            if not choice and leaf.dtype.kind != "f":
                array = np.clip(array, low, high)
            actions.append(array)
        return actions

    def _needs(self) -> str:
        parts = ", ".join(f"{'/'.join(key)}: {leaf.dtype}{list(shape)}" for leaf, key, shape, _ in self._acts)
        count = "1 environment" if self._num_envs == 1 else f"{self._num_envs} environments"
        return f"a TensorDict with {parts}, for {count} with the action space {self._space}"


def _described(given: Any) -> str:
    """What it is, for a message."""
    if isinstance(given, TensorDictBase):
        parts = [
            f"{key if isinstance(key, str) else '/'.join(key)}: {_typed(value)}"
            for key, value in given.items(include_nested=True, leaves_only=True)
        ]
        return f"a TensorDict with {', '.join(parts) or 'nothing'}"
    if isinstance(given, torch.Tensor | np.ndarray):
        return f"a {type(given).__name__} {_typed(given)}"
    return "None" if given is None else f"a {type(given).__name__}"


def _typed(value: Any) -> str:
    return f"{str(getattr(value, 'dtype', '')).removeprefix('torch.')}{list(getattr(value, 'shape', ()))}"


def _where(problem: BaseException) -> str:
    """The line of the policy that raised, where it can be told."""
    frames = traceback.extract_tb(problem.__traceback__)[1:]
    own = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    return f" ({own[-1].filename}:{own[-1].lineno}, in {own[-1].name})" if own else ""
