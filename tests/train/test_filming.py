"""Films: of all kinds of environments, at the speed of their own time; refused at once where they cannot be made."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import gymnasium
import imageio_ffmpeg
import numpy as np
import pytest

from millpond.algos.sac import SAC
from millpond.cli import main
from millpond.core.errors import InvalidArgument
from millpond.envs import env_spec, make
from millpond.train.evaluation import play
from millpond.train.filming import allow_headless_rendering, check_filming, film, steps_per_s
from millpond.train.settings import EnvSettings


def strict(**kwargs: Any) -> EnvSettings:
    return EnvSettings(id="worlds:Strict-v0", kwargs=kwargs)


def policy_for(env: EnvSettings) -> Any:
    world = make(env.id, kwargs=env.kwargs)
    spec = env_spec(world)
    world.close()
    return SAC(spec, seed=0).evaluation_policy()


def pictures(path: Path, width: int = 32) -> tuple[np.ndarray[Any, Any], float]:
    """Gray ``[frames, height, width]``, and how many are shown in a second."""
    decode = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(path), "-f", "rawvideo", "-pix_fmt", "gray", "-"]
    done = subprocess.run(decode, capture_output=True, check=True)
    told = re.search(r"([0-9.]+) fps", done.stderr.decode())
    assert told
    return np.frombuffer(done.stdout, np.uint8).reshape(-1, width, width), float(told[1])


@pytest.mark.parametrize("simulation", [False, True])
def test_an_environment_that_refuses_what_is_undefined_is_filmed_to_the_last_step(tmp_path: Path, simulation: bool):
    """Its episodes have 4 steps. One that looks like a simulation is asked to go on, and refuses."""
    env = strict(simulation=simulation)
    film(policy_for(env), env, tmp_path / "a.mp4", steps=10, seed=0)
    assert [path.name for path in tmp_path.iterdir()] == ["a.mp4"]
    shown = pictures(tmp_path / "a.mp4")[0].mean((1, 2))
    assert len(shown) == 10
    assert np.allclose(np.diff(shown), 8, atol=3)  # ten steps, each a shade lighter


@pytest.mark.parametrize(
    ("kwargs", "steps", "frames", "fps"),
    [
        ({}, 20, 20, 25),  # as render_fps says
        ({"dt": 0.05}, 20, 20, 20),
        ({"dt": np.float64(0.003)}, 120, 20, 1000 / 18),  # as Humanoid with frame_skip=1: every sixth step
        ({"dt": 0.001}, 5, 1, 1000 / 17),  # shorter than a picture
        ({"dt": "a name"}, 5, 5, 25),
        ({"dt": 100.0}, 3, 3, 1),
    ],
)
def test_a_second_of_a_film_is_a_second_of_the_environment(
    tmp_path: Path, kwargs: dict[str, Any], steps: int, frames: int, fps: float
):
    env = strict(length=1000, **kwargs)
    film(policy_for(env), env, tmp_path / "a.mp4", steps=steps, seed=0)
    shown, pace = pictures(tmp_path / "a.mp4")
    assert len(shown) == frames
    assert pace == pytest.approx(fps, abs=0.01)


def test_wrappers_that_repeat_actions_and_known_environments_tell_their_pace():
    env = gymnasium.make("worlds:Strict-v0", dt=0.01)
    assert steps_per_s(env) == pytest.approx(100)
    assert steps_per_s(gymnasium.wrappers.MaxAndSkipObservation(env, skip=4)) == pytest.approx(25)
    for name, kwargs, pace in (
        ("Humanoid-v5", {"frame_skip": 1}, 1000 / 3),
        ("Hopper-v5", {}, 125),
        ("CartPole-v1", {}, 50),
        ("Pendulum-v1", {}, 20),
    ):
        made = gymnasium.make(name, **kwargs)
        assert steps_per_s(made) == pytest.approx(pace)
        made.close()


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (EnvSettings(id="worlds:Corridor-v0", kwargs={}), "render_mode"),
        (strict(how="none"), r"render\(\) gave NoneType"),
        (strict(how="text"), r"render\(\) gave str"),
        (strict(how="raise"), "no screen"),
        (EnvSettings(id="Pendulum-v1", kwargs={}), "pygame is not installed, run `pip install"),
    ],
)
def test_what_cannot_be_filmed_says_why_and_leaves_nothing(tmp_path: Path, env: EnvSettings, said: str):
    if "pygame" in said:
        missing_pygame()
    with pytest.raises(InvalidArgument, match=f"cannot be filmed here: .*{said}"):
        check_filming(env, tmp_path / "a.mp4")
    with pytest.raises(InvalidArgument, match=f"cannot be filmed here: .*{said}"):
        film(policy_for(env), env, tmp_path / "a.mp4", steps=3, seed=0)
    assert list(tmp_path.iterdir()) == []


def missing_pygame() -> None:
    try:
        import pygame  # noqa: F401
    except ModuleNotFoundError:
        return
    pytest.skip("pygame is installed")


def test_a_film_that_cannot_be_made_is_refused_before_anything_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """By a run, by a dry run, and by an evaluation, which plays nothing; a film that is only wished for is left out."""
    monkeypatch.chdir(tmp_path)
    small = ["total_frames=40", "replay.learning_starts=20", "replay.batch_size=8", "replay.capacity=100"]
    words = ["train", *small, "env=worlds:Corridor-v0", "execution.mode=sync", "algorithm.hidden=[8]", "run_dir=run"]
    words += ["eval.episodes=1", "eval.max_steps=5", "logger.tensorboard=false"]
    for more in ([], ["dry_run=true"]):
        assert main([*words, "eval.video_interval_frames=1000", *more]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("millpond train: worlds:Corridor-v0 cannot be filmed here: ")
        assert err.endswith("(eval.video_interval_frames=0 trains without films)\n")
        assert list(tmp_path.iterdir()) == []
    assert main([*words, "eval.video_interval_frames=null"]) == 0
    assert "completed" in capsys.readouterr().out
    assert not (tmp_path / "run" / "videos").exists()
    assert main(["eval", "run", "--video", "a.mp4"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "cannot be filmed here" in err

    words = [word.replace("Corridor", "Strict").replace("run_dir=run", "run_dir=filmed") for word in words]
    assert main([*words, "eval.video_interval_frames=null", "eval.video_steps=3"]) == 0
    assert [path.name for path in (tmp_path / "filmed" / "videos").iterdir()] == ["frame-000000040.mp4"]
    capsys.readouterr()
    assert main(["eval", "filmed", "--video", "nowhere/a.mp4"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["eval", "filmed", "--video", "a.mp4"]) == 0
    assert (tmp_path / "a.mp4").stat().st_size > 0
    assert not list(tmp_path.glob(".*"))


def test_a_film_goes_on_after_the_robot_has_fallen(tmp_path: Path):
    hopper = EnvSettings(id="Hopper-v5", kwargs={})
    policy = policy_for(hopper)
    steps = 100
    assert max(play(policy, hopper, episodes=1, max_steps=steps, seed=0).lengths) < steps  # it falls before
    allow_headless_rendering()
    try:
        film(policy, hopper, tmp_path / "a.mp4", steps=steps, seed=0)
    except InvalidArgument as error:
        pytest.skip(f"this machine cannot render: {error}")
    shown, _ = pictures(tmp_path / "a.mp4", width=480)
    assert len(shown) == steps // 3  # 125 steps a second
    assert shown[-1].std() > 5  # a picture of something
