"""Steps environments with a policy and keeps what happened: the inner loop of every collector."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

from millpond.collect.policies import Asking
from millpond.collect.rollout_storage import (
    DONE,
    EPISODE,
    REWARD,
    STEP,
    TERMINATED,
    TRUNCATED,
    VERSION,
    Block,
    Key,
    rows_for,
    store,
    transition_fields,
)
from millpond.core.errors import InvalidArgument, NonFinite, SchemaMismatch
from millpond.envs.autoreset import Step, Stepper
from millpond.envs.spaces import Leaf, Limits, limits, load_space_state, nested, space_state

Mask = npt.NDArray[np.bool_]
NOTHING, MAKING, RESETTING, STEPPING, ASKING, SAVING = range(6)  # whose code runs
RANDOM = -1  # the policy version of a random action: no weights had a part in it
RECENT = 32  # episodes, and transitions in quarantine, that are remembered
PATIENCE = 1000  # steps in a row that one environment may give nothing but NaN
_ORIGIN_BITS, _INCARNATION_BITS, _COUNT_BITS = 15, 12, 36
_COUNTS = ("quarantined", "unbootstrappable", "resets", "episodes")
_HUGE = 1e37  # squares that sum to less contain neither NaN nor infinity


class _Seen(NamedTuple):
    """A part of the observation, and where it is kept."""

    leaf: Leaf
    key: Key
    next_key: Key
    floating: bool


class Quarantined(NamedTuple):
    """A transition that was not stored because a number in it was not finite."""

    key: str
    env: int
    step: int


class Tally:
    """What a rollout has counted so far. Never reset."""

    def __init__(self, num_envs: int) -> None:
        self.quarantined = self.unbootstrappable = self.resets = self.episodes = 0
        self.recent: deque[Quarantined] = deque(maxlen=RECENT)
        self.finished: deque[tuple[float, int]] = deque(maxlen=RECENT)  # return, length
        self.returns = np.zeros(num_envs)
        self.gaps = np.zeros(num_envs, bool)  # was anything of the open episode quarantined?

    def count(self, step: Step, steps: npt.NDArray[np.int64], bad: Mask | None) -> None:
        """One step of all environments; ``steps``: the number of each within its episode, from 0.

        An episode of which a transition is ``bad`` stays out of what is told of returns and lengths.
        """
        if bad is None:
            self.returns += step.reward
        else:
            np.add(self.returns, step.reward, out=self.returns, where=~bad)
            self.gaps |= bad
        if step.stored is not None:
            resets = (~step.stored).nonzero()[0]
            self.resets += len(resets)
            self.returns[resets] = 0.0
        if step.lost is not None:
            self.unbootstrappable += int(np.count_nonzero(step.lost))
        if step.ended is not None:
            ended = step.ended.nonzero()[0]
            latest = ended[~self.gaps[ended]][-RECENT:]
            self.finished.extend(zip(self.returns[latest].tolist(), (steps[latest] + 1).tolist(), strict=True))
            self.episodes += len(ended)
            self.returns[ended], self.gaps[ended] = 0.0, False

    def state_dict(self) -> dict[str, Any]:
        """The counts, and the latest episodes."""
        return {**{name: getattr(self, name) for name in _COUNTS}, "finished": list(self.finished)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Count on from there."""
        for name in _COUNTS:
            setattr(self, name, state[name])
        self.finished.extend((total, length) for total, length in state["finished"])


class EpisodeIds:
    """Numbers for episodes that no other worker, and no earlier life of this one, hands out.

    ``origin`` (15 bits) tells the worker, ``incarnation`` (12 bits) its life; 36 bits count.
    """

    def __init__(self, origin: int, incarnation: int) -> None:
        if not 0 <= origin < 1 << _ORIGIN_BITS:
            raise InvalidArgument(f"worker {origin}: episode ids have room for {1 << _ORIGIN_BITS} workers")
        high = origin << _INCARNATION_BITS | incarnation % (1 << _INCARNATION_BITS)
        self.next = high << _COUNT_BITS

    def take(self, n: int) -> npt.NDArray[np.int64]:
        first, self.next = self.next, self.next + n
        return np.arange(first, first + n, dtype=np.int64)


class Rollout:
    """``num_envs`` environments that are stepped together, and the rows that this gives.

    ``policy`` maps a TensorDict with ``observation`` to one with ``action``; None acts randomly. Weights are not its
    matter: set ``version`` to the number of those that the policy holds. ``seed`` decides environments, random actions
    and, where it can be reseeded, the policy; None takes one from the system. ``frames`` is how many one ``collect``
    asks for, with ``time`` in sequences of so many.
    """

    def __init__(
        self,
        stepper: Stepper,
        policy: Any = None,
        *,
        frames: int,
        time: int | None = None,
        origin: int = 0,
        incarnation: int = 0,
        seed: int | None = None,
        keep_float64: bool = False,
    ) -> None:
        self.stepper, self.policy, n = stepper, policy, stepper.num_envs
        fields = transition_fields(stepper.observation_leaves, stepper.action_leaves, keep_float64=keep_float64)
        self.rows = rows_for(fields, num_envs=n, frames=frames, time=time)
        self.tally = Tally(n)
        self.version = RANDOM if policy is None else 0
        self._origin, self._seed = origin, seed
        self._live(incarnation)
        self._episode, self._step = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self._suspects: list[tuple[str, Mask]] = []  # of the step in the making: which rows are not finite, and where
        self._sick = False  # was anything quarantined in the step before?
        self._streak = np.zeros(n, np.int64)  # how many steps in a row were quarantined
        self._observation: Any = None  # what to act on; None before the first step
        self._cut_off = False  # did an exception end the last step?
        self._seen = [
            _Seen(leaf, ("observation", *leaf.key), ("next", "observation", *leaf.key), leaf.dtype.kind == "f")
            for leaf in stepper.observation_leaves
        ]
        self._acts = [(leaf, ("action", *leaf.key)) for leaf in stepper.action_leaves]
        space = stepper.env.single_action_space
        self._limits = [_finite(limits(space, leaf)) if leaf.dtype.kind == "f" else None for leaf, _ in self._acts]
        self._asking = None if policy is None else Asking(policy, space, stepper.action_leaves, n)
        self.doing: Callable[[int], object] = lambda what: None
        """Is told before each call of others' code which of the five kinds it is."""
        self._at_frame: Callable[[int], object] | None = getattr(policy, "at_frame", None)

    def collect(
        self, frames: int, *, first: int = 0, random_frames: int = 0, stopped: Callable[[], bool] = lambda: False
    ) -> bool:
        """Step until ``frames`` frames can be taken. The first of them is number ``first`` of all, from 0; those before
        number ``random_frames`` get random actions.

        False: ``stopped()`` said so before, and what was collected stays for the next call.

        Raises:
            NonFinite: an environment gave nothing but NaN or infinity for 1,000 steps.
            InvalidArgument, InvalidType: the policy does not fit the environments; before any frame was collected.
        """
        try:
            return self._collect(frames, first, random_frames, stopped)
        finally:
            self.doing(NOTHING)

    def _collect(self, frames: int, first: int, random_frames: int, stopped: Callable[[], bool]) -> bool:
        if self._observation is None:
            self._begin()
        if self._cut_off:
            self._begin_anew()
        rows = self.rows
        while rows.available < frames:
            if stopped():
                return False
            frame = first + rows.held
            if self._at_frame is not None:
                self._at_frame(frame)
            self._advance(max(0, random_frames - frame))
        return True

    # ------------------------------------------------------------------ one step
    def _begin(self) -> None:
        self._seed_draws()
        self.doing(RESETTING)
        observation = self.stepper.reset(seed=self._seeds[0])
        self._check_shapes(observation)
        self._episode = self._ids.take(self.stepper.num_envs)
        self._observation, self._cut_off = observation, False

    def _begin_anew(self) -> None:
        """An exception has cut a step off, and nobody knows what the environments did in it: the open episodes end as
        truncated."""
        self.rows.truncate(np.ones(self.stepper.num_envs, bool))
        self.doing(RESETTING)
        observation = self.stepper.reset()
        self._episode = self._ids.take(self.stepper.num_envs)
        self._step[...], self.tally.returns[...], self.tally.gaps[...], self._sick = 0, 0.0, False, False
        self._observation, self._cut_off = observation, False

    def _seed_draws(self) -> None:
        _, action, policy = self._seeds
        self.stepper.env.action_space.seed(action)
        if hasattr(self.policy, "reseed"):
            self.policy.reseed(policy)

    def _advance(self, random: int) -> None:
        rows, stepper, observation = self.rows, self.stepper, self._observation
        self._suspects = []
        block = rows.open()
        for seen in self._seen:
            values = seen.leaf.of(observation)
            store(block[seen.key], values, seen.key)
            if seen.floating:
                self._look(values, seen.key, block)
        self.doing(ASKING)
        actions = self._act(block, random)
        self._cut_off = True  # until the step is whole
        self.doing(STEPPING)
        step = stepper.step(actions)
        for seen in self._seen:
            values = seen.leaf.of(step.next_observation)
            store(block[seen.next_key], values, seen.next_key)
            if seen.floating:
                self._look(values, seen.next_key, block)
        block[REWARD][...] = step.reward
        block[TERMINATED][...] = step.terminated
        block[TRUNCATED][...] = step.truncated
        np.logical_or(step.terminated, step.truncated, out=block[DONE])
        block[EPISODE][...] = self._episode
        block[STEP][...] = self._step
        if step.lost is not None:
            self._mark_lost(step.lost, block)
        self._look(step.reward, REWARD, block)
        bad = self._judge(step) if self._suspects or self._sick else None
        self.tally.count(step, self._step, bad)
        rows.close(step.stored if bad is None else ~bad if step.stored is None else step.stored & ~bad)
        self._number(step, bad)
        if step.ended is not None:
            self.doing(RESETTING)
        self._observation, self._cut_off = stepper.advance(), False

    def _act(self, block: Block, random: int) -> Any:
        """Actions for all environments, in the structure that they take, written into ``block``."""
        space, n = self.stepper.env.action_space, self.stepper.num_envs
        if self._asking is None or random >= n:
            if self._asking is not None and not self._asking.rehearsed:
                with torch.inference_mode():
                    self._asking.rehearse(self._observed(block))
            sample = space.sample()
            for leaf, key in self._acts:
                block[key][...] = leaf.of(sample)
            block[VERSION][...] = RANDOM
            return self._chosen(block)
        self._ask_policy(self._asking, block)
        block[VERSION][...] = self.version
        if random or self._suspects:  # no environment must see NaN: neither the policy's, nor an answer to NaN
            redo = _any([mask for _, mask in self._suspects], np.arange(n) < random)
            sample = space.sample()
            for leaf, key in self._acts:
                block[key][redo] = leaf.of(sample)[redo]
            block[VERSION][redo] = RANDOM
        return self._chosen(block)

    def _chosen(self, block: Block) -> Any:
        return nested({leaf.key: block[key].copy() for leaf, key in self._acts})

    def _ask_policy(self, asking: Asking, block: Block) -> None:
        if self._suspects:
            for seen in self._seen:
                if seen.floating:
                    block[seen.key][_any([mask for _, mask in self._suspects])] = 0
        with torch.inference_mode():
            actions = asking(self._observed(block))
        for (leaf, key), action, bounds in zip(self._acts, actions, self._limits, strict=True):
            block[key][...] = action
            if leaf.dtype.kind == "f":
                self._look(action, key, block)
            if bounds is not None:  # in the type of the space: so rounding cannot lead out of it
                np.clip(block[key], bounds.low, bounds.high, out=block[key])

    def _observed(self, block: Block) -> TensorDict:
        """What the policy sees: contiguous, which networks like better."""
        columns = {s.leaf.key: torch.from_numpy(np.ascontiguousarray(block[s.key])) for s in self._seen}
        return TensorDict({"observation": nested(columns)}, batch_size=[self.stepper.num_envs])

    def _mark_lost(self, lost: Mask, block: Block) -> None:
        """The final observation is unknown: nobody may bootstrap from this row, or see another episode in it."""
        block[TERMINATED][lost] = True
        for seen in self._seen:
            block[seen.next_key][lost] = block[seen.key][lost]

    def _number(self, step: Step, bad: Mask | None) -> None:
        """Number the next step of every environment.

        A gap in an episode begins a new id, so that nothing is missing between rows of one id; the step counts on.
        """
        fresh = step.ended
        self._step += 1 if step.stored is None else step.stored
        if bad is not None:
            self.rows.truncate(bad)
            fresh = bad if fresh is None else fresh | bad
        if fresh is not None:
            self._episode[fresh] = self._ids.take(int(np.count_nonzero(fresh)))
            if step.ended is not None:
                self._step[step.ended] = 0

    # ------------------------------------------------------------------ what is not finite
    def _look(self, values: Any, key: Key, block: Block) -> None:
        """``values`` are what was written into the field ``key``; their sum of squares tells whether all is well."""
        flat = np.ravel(values, order="K")
        if flat.itemsize < 4 or not np.vdot(flat, flat) < _HUGE:  # (halves overflow)
            self._look_closely(key, block)

    def _look_closely(self, key: Key, block: Block) -> None:
        values = block[key]
        bad: Mask = np.asarray(~np.isfinite(values.reshape(len(values), -1)).all(1))
        if bad.any():
            self._suspects.append(("/".join(key), bad))

    def _judge(self, step: Step) -> Mask | None:
        """Which transitions of this step are quarantined: those of the suspects that are transitions at all."""
        suspects, self._suspects = self._suspects, []
        bad = _any([mask for _, mask in suspects], np.zeros(self.stepper.num_envs, bool))
        if step.stored is not None:
            bad &= step.stored
        for name, mask in suspects:
            rows = np.flatnonzero(mask & bad)[:8]
            self.tally.recent.extend(Quarantined(name, int(i), int(self._step[i])) for i in rows)
        self.tally.quarantined += int(np.count_nonzero(bad))
        self._streak = np.where(bad, self._streak + 1, 0)
        self._sick = bool(bad.any())
        if self._streak.max() >= PATIENCE:
            worst = int(self._streak.argmax())
            last = next((q for q in reversed(self.tally.recent) if q.env == worst), self.tally.recent[-1])
            raise NonFinite(
                f"environment {worst} gave nothing but NaN or infinity for {PATIENCE} steps, last in {last.key} at "
                f"step {last.step} of its episode; the environment or the policy has diverged"
            )
        return bad if self._sick else None

    # ------------------------------------------------------------------ the rest
    def _check_shapes(self, observation: Any) -> None:
        for leaf in self.stepper.observation_leaves:
            shape, expected = np.shape(leaf.of(observation)), (self.stepper.num_envs, *leaf.shape)
            if shape != expected:
                name = "/".join(("observation", *leaf.key))
                raise SchemaMismatch(f"{name}: the environment returned shape {shape}, its space says {expected}")
        unknown = _keys(observation) - {leaf.key for leaf in self.stepper.observation_leaves}
        if unknown:
            name = "/".join(("observation", *min(unknown)))
            raise SchemaMismatch(f"{name}: the environment returned this field, its space does not know it")

    def state_dict(self) -> dict[str, Any]:
        """The frames that are collected and not taken, and the worlds with all generators, where they can be saved.

        The open episodes of those that cannot are closed as truncated in the copy: nobody could continue them. Nothing
        here changes.
        """
        worlds = None
        if self._observation is not None and not self._cut_off:
            self.doing(SAVING)
            worlds = self.stepper.state_dict()
            self.doing(NOTHING)
        state = {**self.rows.state_dict(close=worlds is None), "tally": self.tally.state_dict()}
        if worlds is not None:
            state["worlds"] = {**worlds, **{name: value.copy() for name, value in self._own().items()}}
            state["draws"] = {"ids": self._ids.next, "actions": space_state(self.stepper.env.action_space)}
            if isinstance(noise := getattr(self.policy, "generator", None), torch.Generator):
                state["draws"]["policy"] = noise.get_state().numpy()
        return state

    def _own(self) -> dict[str, npt.NDArray[Any]]:
        """What is known of each environment."""
        tally = self.tally
        own: dict[str, npt.NDArray[Any]] = {"episode": self._episode, "step": self._step, "streak": self._streak}
        return own | {"return": tally.returns, "gaps": tally.gaps}

    def load_state_dict(self, state: dict[str, Any] | None, *, incarnation: int) -> None:
        """Hold the frames that were saved, if any, and number new episodes as the life that ``incarnation`` tells.

        Saved worlds go on where they were, with the draws that would have come next; where these cannot, their open
        episodes end as truncated.

        Raises:
            InvalidArgument: they do not fit, or steps were made already.
        """
        if self._observation is not None:
            raise InvalidArgument("a collector that has begun cannot load what another one saved")
        self._live(incarnation)
        if state is None:
            return
        self.rows.load_state_dict(state)
        self.tally.load_state_dict(state["tally"])
        worlds = state.get("worlds")
        if worlds is None:
            return
        if not self.stepper.load_state_dict(worlds):
            self.rows.truncate(np.ones(self.stepper.num_envs, bool))
            return
        draws = state["draws"]
        self._seed_draws()
        load_space_state(self.stepper.env.action_space, draws["actions"])
        if "policy" in draws and isinstance(noise := getattr(self.policy, "generator", None), torch.Generator):
            noise.set_state(torch.from_numpy(np.array(draws["policy"])))
        self._ids.next = draws["ids"]
        self._observation = self.stepper.advance()
        self._check_shapes(self._observation)
        for name, mine in self._own().items():
            mine[...] = worlds[name]

    def _live(self, incarnation: int) -> None:
        """Each life has episode ids and seeds of its own."""
        self._ids = EpisodeIds(self._origin, incarnation)
        self._seeds = _seeds(self._seed, self._origin, incarnation)


def _finite(bounds: Limits) -> Limits | None:
    """None where there is nothing to exceed."""
    return bounds if np.isfinite(bounds.low).any() or np.isfinite(bounds.high).any() else None


def _keys(values: Any, key: Key = ()) -> set[Key]:
    if not isinstance(values, dict):
        return {key}
    return {inner for name, value in values.items() for inner in _keys(value, (*key, name))}


def _any(masks: list[Mask], *others: Mask) -> Mask:
    """Where any of these is set."""
    return np.logical_or.reduce([*masks, *others])  # type: ignore[no-any-return]


def _seeds(seed: int | None, origin: int, incarnation: int) -> tuple[int, int, int]:
    """Seeds of the environments, the random actions and the policy; each worker, and each life of it, has its own."""
    entropy = None if seed is None else [seed, origin, incarnation]
    environment, action, policy = np.random.SeedSequence(entropy).generate_state(3)
    return int(environment) >> 1, int(action) >> 1, int(policy) >> 1
