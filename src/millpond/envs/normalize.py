"""Observations brought to mean 0 and variance 1, by statistics that all workers of a run share.

Off-policy, keep the raw observations in replay and normalise inside the policy and the critics (``Normalizer``): what
was stored under yesterday's statistics then still means the same. ``NormalizedEnv`` is for those who want it in the
environment.

Source of the merging: T. Chan, G. Golub, R. LeVeque, "Algorithms for Computing the Sample Variance" (1983), eq. 2.1.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import Space, spaces
from gymnasium.vector import VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space
from tensordict import TensorDictBase
from torch import Tensor, nn

from millpond.core.errors import BufferClosed, InvalidArgument
from millpond.envs.autoreset import autoreset_mode
from millpond.envs.spaces import Key, Leaf, leaves, nested
from millpond.shm.locks import make_lock
from millpond.shm.mapped import allocate, make_directory, map_file, remove_directory

Floats = npt.NDArray[np.float64]
_WORDS, _RECORDS = 128, 256  # byte offsets: the lock lies before
_COMMIT, _CLOSED, _OWNER, _SIZE = 0, 1, 2, 3  # 64-bit words
_ROWS = 4096  # at once: keeps the temporary arrays small
_SHORT = 500  # NumPy keeps the GIL for arrays of at most so many elements


@dataclass(frozen=True, slots=True)
class Moments:
    """Of ``count`` vectors: their mean, and the sum of the squares of their deviations from it."""

    count: int
    mean: Floats
    squares: Floats

    @classmethod
    def of(cls, vectors: npt.ArrayLike) -> Moments:
        """Of the rows of ``[n, size]``; rows that hold NaN or infinity are left out."""
        rows = np.asarray(vectors)
        total = cls(0, np.zeros(rows.shape[1]), np.zeros(rows.shape[1]))
        for at in range(0, len(rows), _ROWS):
            part = rows[at : at + _ROWS].astype(np.float64)
            part = part[np.isfinite(part).all(axis=1)]
            if len(part):
                mean = part.mean(axis=0)
                total = total.merged(cls(len(part), mean, np.square(part - mean).sum(axis=0)))
        return total

    def merged(self, other: Moments) -> Moments:
        """Of the vectors of both."""
        count = self.count + other.count
        if count == 0:
            return self
        mean, squares = np.empty_like(self.mean), np.empty_like(self.mean)
        for at in range(0, len(mean), _SHORT):  # in parts that keep the GIL: this runs under the lock
            part = slice(at, at + _SHORT)
            apart = other.mean[part] - self.mean[part]
            mean[part] = self.mean[part] + apart * (other.count / count)
            squares[part] = self.squares[part] + other.squares[part]
            squares[part] += apart * apart * (self.count * (other.count / count))
        return Moments(count, mean, squares)

    def part(self, numbers: slice) -> Moments:
        """Of some of the numbers of each vector."""
        return Moments(self.count, self.mean[numbers], self.squares[numbers])

    @property
    def variance(self) -> Floats:
        """Ones where fewer than two vectors were seen."""
        return self.squares / self.count if self.count > 1 else np.ones_like(self.squares)


class _Block:
    """The mapped memory: a lock, a few words, and two records of which ``COMMIT`` names the one in force."""

    def __init__(self, path: Path) -> None:
        memory = map_file(path / "block")
        self.path = path
        self.mutex, _ = make_lock(memory, create=False, path=path / "lock")
        self.words = memoryview(memory)[_WORDS:_RECORDS].cast("Q")
        self.size = self.words[_SIZE]
        self.records = np.frombuffer(memory, np.float64, offset=_RECORDS).reshape(2, 1 + 2 * self.size)

    @classmethod
    def create(cls, size: int) -> _Block:
        path = make_directory("statistics")
        try:
            memory = allocate(path / "block", _RECORDS + 2 * 8 * (1 + 2 * size))
            make_lock(memory, create=True, path=path / "lock")
            words = memoryview(memory)[_WORDS:_RECORDS].cast("Q")
            words[_OWNER], words[_SIZE] = os.getpid(), size
            return cls(path)
        except BaseException:
            remove_directory(path)
            raise

    def read(self) -> Moments:
        """Under the lock, as ``write``."""
        record, size = self.records[self.words[_COMMIT] & 1], self.size
        whole = np.empty_like(record)
        for at in range(0, len(record), _SHORT):
            whole[at : at + _SHORT] = record[at : at + _SHORT]
        return Moments(int(whole[0]), whole[1 : 1 + size], whole[1 + size :])

    def write(self, moments: Moments) -> None:
        commit = self.words[_COMMIT] + 1
        record, size = self.records[commit & 1], self.size
        record[0] = moments.count
        for target, values in ((record[1 : 1 + size], moments.mean), (record[1 + size :], moments.squares)):
            for at in range(0, size, _SHORT):
                target[at : at + _SHORT] = values[at : at + _SHORT]
        self.words[_COMMIT] = commit  # one store: from here on the other record is in force


class RunningStatistics:
    """Count, mean and variance of every vector of ``size`` numbers that any process has passed to ``update``.

    Lies in shared memory. Pickling it pickles its path, and unpickling attaches to it; the process that made it
    removes it: by ``close()``, when it is collected, or at its end. Merging is exact up to rounding in float64, in
    whatever order and grouping the vectors come. A process that is killed in ``update`` leaves the statistics with its
    batch or without it, and the others go on.

    Raises:
        InvalidArgument: ``size`` is not positive.
        OutOfMemory: the shared memory is not there.
    """

    _remover: weakref.finalize[Any, Any] | None = None  # only where it was made

    def __init__(self, size: int) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidArgument(f"size must be an int of at least 1, not {size!r}")
        self._attach(_Block.create(size))
        self._remover = weakref.finalize(self, _remove, self.path, os.getpid())

    def _attach(self, block: _Block) -> None:
        self.path, self.size = block.path, block.size
        self._block: _Block | None = block

    def __reduce__(self) -> tuple[Any, ...]:
        self._open()
        return _attached, (os.fspath(self.path),)

    def update(self, vectors: npt.ArrayLike) -> Moments:
        """Take in the rows of ``[n, size]``, but those with NaN or infinity; what is known after it.

        Raises:
            InvalidArgument: another shape.
            BufferClosed: this was closed, here or by its owner.
        """
        rows = np.asarray(vectors)
        if rows.ndim != 2 or rows.shape[1] != self.size or rows.dtype.kind not in "biuf":
            raise InvalidArgument(f"vectors of shape {rows.shape} and type {rows.dtype}; [n, {self.size}] is expected")
        return self.merge(Moments.of(rows))

    def merge(self, moments: Moments) -> Moments:
        """Take in what was counted elsewhere; what is known after it. Raises like ``update``."""
        if moments.mean.shape != (self.size,) or moments.squares.shape != (self.size,):
            raise InvalidArgument(f"moments of vectors of shape {moments.mean.shape}, not ({self.size},)")
        block = self._open()
        try:
            block.mutex.lock()
            known = block.read().merged(moments)
            block.write(known)
        finally:
            block.mutex.unlock()
        return known

    def moments(self) -> Moments:
        """What is known now."""
        block = self._open()
        try:
            block.mutex.lock()
            return block.read()
        finally:
            block.mutex.unlock()

    @property
    def count(self) -> int:
        return self.moments().count

    def state_dict(self) -> dict[str, Tensor]:
        """What is known, as tensors."""
        known = self.moments()
        mean, squares = torch.from_numpy(known.mean), torch.from_numpy(known.squares)
        return {"count": torch.tensor(known.count), "mean": mean, "squares": squares}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Forget what is known, in every process, and know this instead.

        Raises:
            InvalidArgument: it is of vectors of another size, or no such state. Nothing was changed.
        """
        if set(state) != {"count", "mean", "squares"}:
            raise InvalidArgument(f"no state of running statistics: {sorted(state)}")
        mean, squares = (torch.as_tensor(state[name], dtype=torch.float64).numpy() for name in ("mean", "squares"))
        if mean.shape != (self.size,) or squares.shape != (self.size,):
            raise InvalidArgument(f"the state is of vectors of shape {mean.shape}, not ({self.size},)")
        block = self._open()
        try:
            block.mutex.lock()
            block.write(Moments(int(state["count"]), mean, squares))
        finally:
            block.mutex.unlock()

    def _open(self) -> _Block:
        if self._block is None or self._block.words[_CLOSED]:
            raise BufferClosed(f"the running statistics {self.path.name} were closed")
        return self._block

    def close(self) -> None:
        """Detach; in the process that made it also close it for everybody and remove it. Closing twice is fine."""
        block, self._block = self._block, None
        if block is not None and self._remover is not None and os.getpid() == block.words[_OWNER]:
            block.words[_CLOSED] = 1
            self._remover()

    def __enter__(self) -> RunningStatistics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RunningStatistics(size={self.size}{', closed' if self._block is None else ''})"


def _attached(path: str) -> RunningStatistics:
    statistics = RunningStatistics.__new__(RunningStatistics)
    statistics._attach(_Block(Path(path)))
    return statistics


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child, which inherits the finalizer
        remove_directory(path)


class FloatingParts:
    """Where the floating numbers of an observation lie, put end to end: ``[n, size]``.

    Raises:
        InvalidArgument: there are none.
    """

    def __init__(self, space: Space[Any]) -> None:
        self.leaves = leaves(space)
        self.parts: dict[Key, slice] = {}
        self.size = 0
        for leaf in self.leaves:
            if leaf.dtype.kind == "f":
                size = int(np.prod(leaf.shape))
                self.parts[leaf.key] = slice(self.size, self.size + size)
                self.size += size
        if not self.size:
            raise InvalidArgument(f"nothing to normalise in {space}: no floating numbers")

    def check(self, statistics: RunningStatistics) -> None:
        """Raises InvalidArgument where these are of other observations."""
        if statistics.size != self.size:
            raise InvalidArgument(f"statistics of {statistics.size} numbers, but observations have {self.size}")

    def flat(self, observation: Any, n: int) -> Floats:
        """The numbers of n observations."""
        parts = [np.asarray(leaf.of(observation)).reshape(n, -1) for leaf in self.leaves if leaf.key in self.parts]
        return np.concatenate(parts, axis=1)

    def new(self, observation: Any, n: int, mask: Any) -> Floats:
        """Those that a reset made: where ``mask`` says, or everywhere."""
        flat = self.flat(observation, n)
        return flat if mask is None else flat[mask]

    def seen(self, observation: Any, n: int, info: Mapping[str, Any]) -> Floats:
        """Those that a step showed, final ones included."""
        final = [one for one in info.get("final_obs", ()) if one is not None]
        return np.concatenate([self.flat(observation, n), *(self.flat(one, 1) for one in final)])


class Normalizer(nn.Module):
    """``(x - mean) / sqrt(variance + epsilon)``, clipped to ±``clip``, by statistics that stay as they are.

    They are buffers: they go to collectors and into checkpoints with the weights of the policy. ``refresh`` takes new
    ones. Works on ``[…, size]``, or ``[…, *size]``, of any floating type, and returns that type.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, size: int | tuple[int, ...], *, epsilon: float = 1e-8, clip: float = 10.0) -> None:
        super().__init__()
        self.epsilon, self.clip = _checked_epsilon(epsilon), _checked_clip(clip)
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("scale", torch.ones(size))

    @torch.no_grad()
    def refresh(self, moments: Moments) -> None:
        """Normalise by these from now on: ``normalizer.refresh(statistics.moments())``."""
        self.mean.copy_(torch.from_numpy(moments.mean).view_as(self.mean))
        self.scale.copy_(torch.from_numpy(1 / np.sqrt(moments.variance + self.epsilon)).view_as(self.scale))

    def forward(self, observation: Tensor) -> Tensor:
        mean, scale = self.mean.to(observation.dtype), self.scale.to(observation.dtype)
        return ((observation - mean) * scale).clamp(-self.clip, self.clip)


class NormalizedPolicy(nn.Module):
    """A policy that sees normalised observations where others see raw ones."""

    def __init__(self, policy: nn.Module, normalizer: Normalizer, *, key: str | Key = "observation") -> None:
        super().__init__()
        self.policy, self.normalizer, self.key = policy, normalizer, key

    def forward(self, data: TensorDictBase) -> TensorDictBase:
        inner = data.clone(recurse=False)
        inner.set(self.key, self.normalizer(data.get(self.key)))
        data.set("action", self.policy(inner).get("action"))
        return data

    def __getattr__(self, name: str) -> Any:
        """What collectors ask of a policy besides its answers goes to the inner one, where that has it."""
        if name in ("reseed", "at_frame", "generator"):
            return getattr(self.policy, name)
        return super().__getattr__(name)


class ObservedEnv(VectorWrapper):
    """A vector environment whose observations pass as they are, while ``statistics`` learn from the floating ones.

    Every observation counts once, final ones included, so the three autoreset modes give the same statistics. It can be
    saved if ``env`` can.

    Raises:
        InvalidArgument: no floating observation, statistics of another size, or no autoreset mode.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], statistics: RunningStatistics) -> None:
        super().__init__(env)
        autoreset_mode(env)
        self.statistics, self._floats = statistics, FloatingParts(env.single_observation_space)
        self._floats.check(statistics)
        for name in ("state_dict", "load_state_dict"):
            if hasattr(env, name):
                setattr(self, name, getattr(env, name))

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        mask = (options or {}).get("reset_mask")  # looked up first: some environments take it out of the options
        observation, info = self.env.reset(seed=seed, options=options)
        self.statistics.update(self._floats.new(observation, self.num_envs, mask))
        return observation, info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(actions)
        self.statistics.update(self._floats.seen(observation, self.num_envs, info))
        return observation, reward, terminated, truncated, info


class NormalizedEnv(VectorWrapper):
    """A vector environment whose floating observations are normalised, as float32, and clipped to ±``clip``.

    Every observation counts once, final ones included, so the three autoreset modes give the same statistics. With
    ``update = False`` nothing more is learned. Pass the same ``statistics`` to the environments of several workers;
    ``statistics=None`` makes some, which ``close()`` removes. Other observations (``uint8`` images, integers) pass
    through.

    Raises:
        InvalidArgument: no floating observation, statistics of another size, or no autoreset mode.
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        statistics: RunningStatistics | None = None,
        *,
        update: bool = True,
        epsilon: float = 1e-8,
        clip: float = 10.0,
    ) -> None:
        super().__init__(env)
        autoreset_mode(env)
        self.epsilon, self.clip, self.update = _checked_epsilon(epsilon), _checked_clip(clip), update
        self._floats = FloatingParts(env.single_observation_space)
        if statistics is not None:
            self._floats.check(statistics)
        self.single_observation_space = self._normalized_space(env.single_observation_space)
        self._owned = statistics is None
        self.statistics = RunningStatistics(self._floats.size) if statistics is None else statistics

    def _normalized_space(self, space: Space[Any]) -> Space[Any]:
        if isinstance(space, spaces.Dict):
            return spaces.Dict({name: self._normalized_space(part) for name, part in space.spaces.items()})
        if isinstance(space, spaces.Box) and np.dtype(space.dtype).kind == "f":
            return spaces.Box(-self.clip, self.clip, space.shape, np.float32)
        return space

    @property  # type: ignore[misc]  # made when somebody asks: it has bounds for every number of every environment
    def observation_space(self) -> Space[Any]:  # type: ignore[override]
        if self._observation_space is None:
            self._observation_space = batch_space(self.single_observation_space, self.num_envs)
        return self._observation_space

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        mask = (options or {}).get("reset_mask")  # looked up first: some environments take it out of the options
        observation, info = self.env.reset(seed=seed, options=options)
        known = self._count(self._floats.new(observation, self.num_envs, mask))
        return self._normalized(observation, known), info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(actions)
        known = self._count(self._floats.seen(observation, self.num_envs, info))
        final = info.get("final_obs", ())
        if any(one is not None for one in final):
            shown = np.empty(len(final), object)  # of None
            for i, one in enumerate(final):
                if one is not None:
                    shown[i] = self._normalized(one, known)
            info = {**info, "final_obs": shown}
        return self._normalized(observation, known), reward, terminated, truncated, info

    def _count(self, seen: Floats) -> Moments:
        return self.statistics.update(seen) if self.update else self.statistics.moments()

    def _normalized(self, observation: Any, known: Moments) -> Any:
        scale = 1 / np.sqrt(known.variance + self.epsilon)

        def one(leaf: Leaf) -> Any:
            value = leaf.of(observation)
            part = self._floats.parts.get(leaf.key)
            if part is None:
                return value
            apart = (np.asarray(value) - known.mean[part].reshape(leaf.shape)) * scale[part].reshape(leaf.shape)
            return np.clip(apart, -self.clip, self.clip).astype(np.float32)

        return nested({leaf.key: one(leaf) for leaf in self._floats.leaves})

    def close(self, **kwargs: Any) -> None:
        """Close the environment, and the statistics if they were made here."""
        super().close(**kwargs)
        if self._owned:
            self.statistics.close()


def _checked_epsilon(epsilon: float) -> float:
    if not epsilon > 0:
        raise InvalidArgument(f"epsilon must be positive, not {epsilon}")
    return epsilon


def _checked_clip(clip: float) -> float:
    if not clip > 0:
        raise InvalidArgument(f"clip must be positive, not {clip}")
    return clip
