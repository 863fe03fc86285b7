"""How good a policy is, and what it looks like: episodes without exploration, and a video of one environment."""

from __future__ import annotations

import math
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict
from torch import nn

from millpond.core.errors import Cancelled, InvalidArgument
from millpond.core.extras import extra
from millpond.envs import Stepper, make
from millpond.train.settings import EnvSettings


@dataclass(frozen=True, slots=True)
class Episodes:
    """What was played: the sum of rewards and the number of steps of each episode, and the time that took.

    The return of an episode with a reward or an observation that is not finite is NaN. It is in no mean, and counted.
    """

    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    wall_s: float

    def row(self) -> dict[str, float]:
        """As ``eval/…`` metrics; without returns where no episode has one."""
        whole = np.isfinite(self.returns)
        row = {"eval/wall_s": self.wall_s, "eval/quarantined_episodes": float(np.count_nonzero(~whole))}
        if whole.any():
            returns, lengths = np.asarray(self.returns)[whole], np.asarray(self.lengths)[whole]
            row |= {
                "eval/return_mean": float(returns.mean()),
                "eval/return_std": float(returns.std()),
                "eval/return_min": float(returns.min()),
                "eval/return_max": float(returns.max()),
                "eval/length_mean": float(lengths.mean()),
            }
        return row


def _never() -> bool:
    return False


def play(
    policy: nn.Module,
    env: EnvSettings,
    *,
    episodes: int,
    max_steps: int,
    seed: int,
    cancelled: Callable[[], bool] = _never,
) -> Episodes:
    """Play one episode in each of ``episodes`` environments. The same seed and weights give the same returns.

    Each environment's *first* episode counts: counting those that end first would favour short ones. An episode that is
    longer than ``max_steps`` counts with the reward it had by then. One that meets a number that is not finite ends
    there, with NaN as its return; the policy never sees that number.

    Raises:
        Cancelled: ``cancelled()`` became true.
    """
    start = time.perf_counter()
    world = make(env.id, num_envs=episodes, kwargs=env.kwargs)
    try:
        stepper = Stepper(world)
        observation = stepper.reset(seed=seed)
        playing = np.ones(episodes, bool)
        returns, lengths = np.zeros(episodes), np.zeros(episodes, np.int64)
        for _ in range(max_steps):
            if cancelled():
                raise Cancelled("the evaluation was cancelled")
            lost = playing & ~_finite(stepper, observation)
            returns[lost] = math.nan
            playing &= ~lost
            if not playing.any():
                break
            step = stepper.step(act(policy, stepper, observation))
            returns[playing] += np.asarray(step.reward, np.float64)[playing]
            lengths[playing] += 1
            playing &= np.isfinite(returns)
            if step.ended is not None:
                playing &= ~step.ended
            observation = stepper.advance()
        returns[~np.isfinite(returns)] = math.nan
    finally:
        world.close()
    return Episodes(tuple(map(float, returns)), tuple(map(int, lengths)), time.perf_counter() - start)


def _finite(stepper: Stepper, observation: Any) -> npt.NDArray[np.bool_]:
    """Of which environments every number is finite: ``[num_envs]``."""
    whole = np.ones(stepper.num_envs, bool)
    for leaf in stepper.observation_leaves:
        if leaf.dtype.kind == "f":
            whole &= np.isfinite(np.asarray(leaf.of(observation)).reshape(stepper.num_envs, -1)).all(1)
    return whole


def act(policy: nn.Module, stepper: Stepper, observation: Any) -> Any:
    """The policy's actions for what ``stepper`` observed, as its environments take them."""
    return policy(_as_tensors(stepper, observation, stepper.num_envs))["action"].numpy()


def _as_tensors(stepper: Stepper, observation: Any, count: int) -> TensorDict:
    data = TensorDict({}, batch_size=[count])
    for leaf in stepper.observation_leaves:
        values = np.asarray(leaf.of(observation))
        values = values.astype(np.float32) if values.dtype == np.float64 else values
        if values.dtype.kind == "f" and not np.isfinite(values).all():  # no environment must see what comes of NaN
            values = np.where(np.isfinite(values), values, 0).astype(values.dtype)
        data.set(("observation", *leaf.key) if leaf.key else "observation", torch.from_numpy(np.array(values)))
    return data


def allow_headless_rendering() -> None:
    """Let MuJoCo render without a display. Works only before it is imported."""
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")


def film(
    policy: nn.Module,
    env: EnvSettings,
    path: Path,
    *,
    steps: int,
    seed: int,
    cancelled: Callable[[], bool] = _never,
) -> None:
    """Write an MP4 of ``steps`` steps of one environment, which goes on when the episode is terminated.

    So the film of an early policy shows how it moves, and not many short falls. Only a time limit starts a new episode.

    Raises:
        InvalidArgument: this environment, or this machine, cannot render; the message says why. No file is left.
        Cancelled: ``cancelled()`` became true. No file is left.
    """
    beside = path.with_name(f".{path.name}")
    try:
        world = make(env.id, num_envs=1, kwargs={**env.kwargs, "render_mode": "rgb_array"})
        try:
            _film(policy, world, beside, steps, seed, cancelled)
        finally:
            world.close()
        os.replace(beside, path)
    except (Cancelled, InvalidArgument):
        raise
    except Exception as error:  # drivers, codecs and environments fail to render in their own ways
        raise InvalidArgument(f"{env.id} cannot be filmed here: {type(error).__name__}: {error}") from error
    finally:
        beside.unlink(missing_ok=True)


def _film(policy: nn.Module, world: Any, path: Path, steps: int, seed: int, cancelled: Callable[[], bool]) -> None:
    stepper = Stepper(world)
    (single,) = world.envs  # stepped directly: a vector insists on a reset after termination
    _render_fast(single)
    fps = single.metadata.get("render_fps", 30)
    observation, _ = single.reset(seed=seed)
    with (
        warnings.catch_warnings(),
        _writer(path, fps) as writer,
    ):
        warnings.simplefilter("ignore")  # Gymnasium warns of steps after termination
        for _ in range(steps):
            if cancelled():
                raise Cancelled("the film was cancelled")
            action = policy(_as_tensors(stepper, _batched(stepper, observation), 1))["action"].numpy()[0]
            observation, _, _, truncated, _ = single.step(action)
            writer.append_data(single.render())
            if truncated:
                observation, _ = single.reset()


def _writer(path: Path, fps: float) -> Any:
    with extra("train"):
        import imageio.v2 as imageio

    return imageio.get_writer(path, format="FFMPEG", fps=fps, codec="libx264", macro_block_size=2)


def _render_fast(env: Any) -> None:
    """Without a GPU, MuJoCo's shadows, reflections and antialiasing take nine tenths of the time of a frame."""
    model: Any = getattr(env.unwrapped, "model", None)
    if hasattr(model, "vis") and hasattr(model, "mat_reflectance"):
        model.vis.quality.shadowsize = 0
        model.vis.quality.offsamples = 0
        model.mat_reflectance[:] = 0


def _batched(stepper: Stepper, observation: Any) -> Any:
    from millpond.envs.spaces import nested

    return nested({leaf.key: np.asarray(leaf.of(observation))[None] for leaf in stepper.observation_leaves})
