"""What a policy looks like: a video of one environment, at the speed at which its time goes by."""

from __future__ import annotations

import math
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from millpond.core.errors import Cancelled, InvalidArgument
from millpond.core.extras import extra
from millpond.envs import Stepper, make
from millpond.train.evaluation import as_tensors, never
from millpond.train.settings import EnvSettings

_FASTEST = 60.0  # frames per second that screens and players show
_SLOWEST = 1.0
_USUAL = 30.0


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
    cancelled: Callable[[], bool] = never,
) -> None:
    """Write an MP4 of ``steps`` steps of one environment. A second of it is a second of the environment's time.

    That is told by ``dt``, the seconds of a step, or else by ``metadata["render_fps"]``. Above 60 steps a second not
    every step is shown; below one step a second the film is faster. A simulation of MuJoCo goes on when its episode is
    terminated, where it lets itself be stepped: so the film of an early policy shows how it moves, and not many short
    falls. Other environments, and time limits, begin a new episode.

    Raises:
        InvalidArgument: this environment, or this machine, cannot render; the message says why. No file is left.
        Cancelled: ``cancelled()`` became true. No file is left.
    """

    def act(stepper: Stepper, observation: Any) -> Any:
        return policy(as_tensors(stepper, _batched(stepper, observation), 1))["action"].numpy()[0]

    _film(act, env, path, steps, seed, cancelled)


def check_filming(env: EnvSettings, path: Path | None = None) -> None:
    """Film one step of random actions, beside ``path`` where it is given, and throw it away.

    Raises:
        InvalidArgument: as ``film``.
    """

    def act(stepper: Stepper, observation: Any) -> Any:
        return stepper.env.single_action_space.sample()

    with tempfile.TemporaryDirectory() as folder:
        beside = Path(folder, "try.mp4") if path is None else path.with_name(f".try-{path.name}")
        try:
            _film(act, env, beside, 1, 0, never)
        finally:
            beside.unlink(missing_ok=True)


_Act = Callable[[Stepper, Any], Any]


def _film(act: _Act, env: EnvSettings, path: Path, steps: int, seed: int, cancelled: Callable[[], bool]) -> None:
    beside = path.with_name(f".{path.name}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Gymnasium warns of steps after termination, and of what then fails
            world = make(env.id, num_envs=1, kwargs={**env.kwargs, "render_mode": "rgb_array"})
            try:
                _write(act, world, beside, steps, seed, cancelled)
            finally:
                world.close()
        os.replace(beside, path)
    except Cancelled:
        raise
    except Exception as error:  # drivers, codecs and environments fail to render in their own ways
        words = str(error) if isinstance(error, InvalidArgument) else f"{type(error).__name__}: {error}"
        raise InvalidArgument(f"{env.id} cannot be filmed here: {words}") from error
    finally:
        beside.unlink(missing_ok=True)


def _write(act: _Act, world: Any, path: Path, steps: int, seed: int, cancelled: Callable[[], bool]) -> None:
    stepper = Stepper(world)
    (single,) = world.envs  # stepped directly: a vector insists on a reset after termination
    _render_fast(single)
    per_s = steps_per_s(single)
    each = max(1, math.ceil(per_s / _FASTEST))
    moments = _moments(single, lambda observation: act(stepper, observation), seed)
    with _writer(path, max(_SLOWEST, per_s / each)) as writer:
        for number in range(1, steps + 1):
            if cancelled():
                raise Cancelled("the film was cancelled")
            next(moments)
            if number % each == 0 or number == steps < each:
                writer.append_data(_picture(single))


def _moments(env: Any, act: Callable[[Any], Any], seed: int) -> Any:
    """Takes a step each time it is asked, and nothing that the environment does not allow."""
    observation, _ = env.reset(seed=seed)
    goes_on = _is_simulation(env)
    fallen = False
    while True:
        try:
            observation, _, terminated, truncated, _ = env.step(act(observation))
        except Exception:
            if not fallen:
                raise
            goes_on, fallen = False, False  # it refuses, as it may
            observation, _ = env.reset()
            continue
        yield
        fallen = fallen or bool(terminated)
        if truncated or (terminated and not goes_on):
            observation, _ = env.reset()
            fallen = False


def _is_simulation(env: Any) -> bool:
    """Of MuJoCo: a state and a model, which go on whatever an episode is."""
    return hasattr(getattr(env.unwrapped, "model", None), "opt") and hasattr(env.unwrapped, "data")


def steps_per_s(env: Any) -> float:
    """How many steps an environment takes in a second of its own time."""
    repeats, metadata = 1, env.metadata
    while env is not env.unwrapped:  # wrappers that repeat an action
        skip = getattr(env, "frame_skip", None) if "frame_skip" in vars(env) else vars(env).get("_skip")
        repeats *= skip if isinstance(skip, int) and skip > 0 else 1
        env = env.env
    dt, fps = _positive(getattr(env, "dt", None)), _positive((metadata or {}).get("render_fps"))
    return (1 / dt if dt else fps or _USUAL) / repeats


def _positive(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float | np.number) and 0 < float(value) < math.inf else None


def _picture(env: Any) -> Any:
    picture = env.render()
    if not isinstance(picture, np.ndarray) or picture.ndim not in (2, 3):
        raise InvalidArgument(f"render() gave {type(picture).__name__}, not an array [height, width, 3]")
    return picture


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
