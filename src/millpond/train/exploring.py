"""Whether collectors explore, judged from what they did: the actions in replay beside those of a policy that does not.

An action is compared with the deterministic action of the very version of the weights that made it, for the same
observation. How often the two should differ is found by drawing from the exploring policy with the same weights. So the
judgement needs no knowledge of the algorithm or its settings: where these ask for little exploration, or for none,
little is expected.
"""

from __future__ import annotations

import math
import pickle
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from millpond.core.roles import Algorithm
from millpond.core.spec import BoxAction, EnvSpec
from millpond.train.replay import as_transitions

DRAWS = 8  # how often the exploring policy is asked, for each action in replay
_SAME = 1e-4  # closer than this, in halves of the range, is the same action: workers round otherwise
_KEPT, _KEPT_BYTES = 32, 64 << 20  # versions that are remembered
_LOOKS, _ROWS = 64, 128  # what the judgement is about: the last looks, of so many rows of a version each
_GAP_S, _LOOK_S, _SHARE = 0.01, 0.25, 50  # seconds between two versions, and two looks; and a share of the time


@dataclass(frozen=True, slots=True)
class Explored:
    """Of ``rows`` actions ``differing`` were not the deterministic ones; about ``expected`` should not have been."""

    rows: int = 0
    differing: int = 0
    expected: float = 0.0

    @property
    def chance(self) -> float:
        """At most how likely it is that a collector that explores as it should gives so few (Hoeffding, 1963).

        Of ``DRAWS + 1`` actions for one observation, all drawn in the same way, the one in replay is any.
        """
        if not self.rows or self.differing >= self.expected:
            return 1.0
        seen, mean = self.differing / self.rows, self.expected / self.rows
        divergence = (1 - seen) * math.log((1 - seen) / (1 - mean))
        if seen:
            divergence += seen * math.log(seen / mean)
        return math.exp(-self.rows * divergence)


class Explorers:
    """Remembers some of the versions that were published, and compares what collectors did with them.

    ``note`` after each publication, ``look`` now and then: both return at once where they would take too much time.
    Nothing that a run computes is changed.
    """

    def __init__(self, algorithm: Algorithm, spec: EnvSpec, *, written: int, time: int | None = None) -> None:
        self._algorithm, self._spec, self._time = algorithm, spec, time
        policies = (algorithm.policy, algorithm.evaluation_policy())
        self._exploring, self._deterministic = (pickle.loads(pickle.dumps(policy)).to("cpu") for policy in policies)
        self._exploring.reseed(0)
        self._known: dict[int, dict[str, Tensor]] = {}  # by version
        self._tallies: deque[Explored] = deque(maxlen=_LOOKS)
        self._seen = written  # items written before the next look's
        self._next_note = self._next_look = 0.0
        self.note()

    def note(self) -> None:
        """The weights are published as they are now."""
        version, start = self._algorithm.steps, time.monotonic()
        if start < self._next_note or version in self._known:
            return
        state = self._algorithm.policy.state_dict()
        weights = {name: value.detach().to("cpu", copy=True) for name, value in state.items()}
        nbytes = sum(value.nbytes for value in weights.values())
        while len(self._known) >= max(2, min(_KEPT, _KEPT_BYTES // max(1, nbytes))):
            del self._known[next(iter(self._known))]
        self._known[version] = weights
        end = time.monotonic()
        self._next_note = end + max(_GAP_S, _SHARE * (end - start))

    def look(self, replay: Any, *, frames: int, newest: int, last: bool = False) -> None:
        """Compare the ``newest`` items, as far as no look saw them. ``frames`` were collected so far."""
        start = time.monotonic()
        if start < self._next_look and not last:
            return
        count = min(replay.write_count - self._seen, len(replay), newest)
        rows = replay[-count:] if count > 0 else None
        self._seen = replay.write_count
        if rows is not None:
            rows = as_transitions(rows, self._time)
            versions = rows.get("policy_version").reshape(-1)
            for version, weights in self._known.items():
                if len(chosen := (versions == version).nonzero()[:_ROWS, 0]):
                    self._tallies.append(self._compare(rows[chosen], weights, frames))
        end = time.monotonic()
        self._next_look = end + max(_LOOK_S, _SHARE * (end - start))

    @property
    def explored(self) -> Explored:
        """What the last looks have seen."""
        tallies = list(self._tallies)
        return Explored(
            sum(tally.rows for tally in tallies),
            sum(tally.differing for tally in tallies),
            sum(tally.expected for tally in tallies),
        )

    @torch.no_grad()
    def _compare(self, rows: TensorDictBase, weights: dict[str, Tensor], frames: int) -> Explored:
        count = len(rows)
        for policy in (self._exploring, self._deterministic):
            policy.load_state_dict(weights)
        for module in self._exploring.modules():
            if isinstance(at := getattr(module, "frames", None), Tensor):
                at.fill_(frames)  # schedules only fall: no action in replay was drawn at a later frame
        asked = rows.select("observation").to("cpu")
        plain = self._asked(self._deterministic, asked)
        drawn = self._asked(self._exploring, asked.repeat(DRAWS))
        stored = rows.get("action").to("cpu").reshape(count, -1).double()
        differs = self._differs(stored, plain)
        like_it = self._differs(drawn, plain.repeat(DRAWS, 1)).reshape(DRAWS, count).sum(0) + differs
        return Explored(count, int(differs.sum()), float(like_it.sum()) / (DRAWS + 1))

    @staticmethod
    def _asked(policy: nn.Module, asked: TensorDictBase) -> Tensor:
        told = policy(TensorDict(dict(asked.items()), batch_size=asked.batch_size))
        action: Tensor = told.get("action")
        return action.reshape(len(action), -1).double()

    def _differs(self, first: Tensor, second: Tensor) -> Tensor:
        """Which rows of two ``[n, size]`` are different actions: ``[n]``."""
        action, away = self._spec.action, (first - second).abs()
        if not isinstance(action, BoxAction):
            return (away > 0).any(1)
        half = (torch.tensor(action.high, dtype=torch.float64) - torch.tensor(action.low, dtype=torch.float64)) / 2
        return (away > _SAME * half.reshape(-1)).any(1)
