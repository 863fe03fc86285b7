"""The parts that meet across packages, on one page.

Data walks once round: an ``EnvFactory`` makes worlds, a ``Policy`` acts in them, a ``Replay`` keeps what happened, an
``Algorithm`` learns from it, and a ``Board`` carries the new weights back to the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from tensordict import TensorDictBase
from torch import Generator, Tensor, nn


class CancelEvent(Protocol):
    """What ends a wait from outside: ``threading.Event``, ``multiprocessing.Event``, or anything with ``is_set``."""

    def is_set(self) -> bool: ...


class EnvFactory(Protocol):
    """Makes one vector environment. Called once in each worker, so it must be picklable (by cloudpickle)."""

    def __call__(self) -> Any: ...


class Policy(Protocol):
    """Reads the observation of a batch of environments, sets ``"action"``, returns the same TensorDict.

    Collectors take any callable; the rest they use where it is there.
    """

    def __call__(self, data: TensorDictBase) -> TensorDictBase: ...

    def reseed(self, seed: int) -> None:
        """Restart the policy's own noise. Each worker calls it with a seed of its own."""

    def at_frame(self, frame: int) -> None:
        """Frame number ``frame`` of all comes next. A worker says so before each step; schedules follow it."""

    @property
    def generator(self) -> Generator:
        """Where the policy's own noise comes from; it is saved with the collector that asks the policy."""


class Replay(Protocol):
    """A replay as a learner sees it."""

    def sample(
        self,
        batch_size: int | None = None,
        *,
        wait: bool = False,
        timeout: float | None = None,
        cancel_event: CancelEvent | None = None,
    ) -> Any: ...

    def update_priority(self, index_or_sample: Any, priority: Tensor) -> int: ...

    def explain(self, op: str = "sample", n: int | None = None) -> str: ...

    @property
    def write_count(self) -> int: ...


class Board(Protocol):
    """Where weights are published, each under the number of optimizer steps that made them."""

    def publish(self, module: nn.Module, version: int | None = None) -> int: ...

    @property
    def version(self) -> int: ...


class Algorithm(Protocol):
    """One learning algorithm, with everything that it changes."""

    @property
    def policy(self) -> nn.Module:
        """The exploring ``Policy`` that collectors run."""

    @property
    def published(self) -> nn.Module:
        """The module whose parameters and buffers collectors need. Small; no critics."""

    @property
    def steps(self) -> int:
        """Updates that were applied, ever."""

    def evaluation_policy(self) -> nn.Module:
        """A ``Policy`` on the same weights that never explores."""

    def advance(self, frames: int) -> None:
        """Say how many frames were collected so far; exploration schedules follow it."""

    def update(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """One step on one batch. Detached metrics, and ``"td_error"`` of shape ``[B]``."""

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...
