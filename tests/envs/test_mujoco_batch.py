from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from side_by_side import MODES, agree, ours

from millpond.core.errors import InvalidArgument, InvalidType, NotReady
from millpond.envs import Stepper, check_env, make, make_batched
from millpond.envs.batched import BatchedEnv
from millpond.envs.catalogue import MUJOCO_IDS
from millpond.envs.mujoco_tasks import TASKS
from millpond.envs.physics import BatchPhysics, ContactPhysics

IDS = sorted(MUJOCO_IDS)
TERMINATING = {f"{name}-v5" for name in "Hopper Walker2d Ant Humanoid InvertedPendulum InvertedDoublePendulum".split()}
STEPS = {"Humanoid-v5": 120, "Ant-v5": 200}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gymnasium's own environments make MuJoCo write a log into the working directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def hopper() -> Iterator[BatchedEnv]:
    with contextlib.closing(ours("Hopper-v5", 4, "Disabled", threads=1)) as env:
        yield env


# ------------------------------------------------------------------------------------------- equal to Gymnasium's own


@pytest.mark.parametrize("env_id", IDS)
def test_every_bit_is_that_of_gymnasiums_own(env_id: str) -> None:
    ends = agree(env_id, steps=STEPS.get(env_id, 300), seed=7, threads=1)
    assert env_id not in TERMINATING or ends.terminated >= 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("env_id", IDS)
def test_time_limits_and_resets_are_those_of_gymnasiums_own(env_id: str, mode: str) -> None:
    """Cases end-1 to end-4: terminated and truncated apart, final observations true, masked resets."""
    ends = agree(env_id, mode=mode, steps=30, seed=100 * MODES.index(mode), max_episode_steps=6, num_envs=2)
    assert ends.truncated >= 4


VARIANTS: dict[str, list[dict[str, Any]]] = {
    "Hopper-v5": [
        {"frame_skip": 1, "forward_reward_weight": 2.5, "ctrl_cost_weight": 0.3, "reset_noise_scale": 0.1},
        {"exclude_current_positions_from_observation": False, "terminate_when_unhealthy": False},
        {"healthy_state_range": (-3, 3), "healthy_z_range": (0.5, 1.3), "healthy_angle_range": (-1, 1)},
        {"healthy_reward": 3, "healthy_angle_range": (-0.05, 0.05)},
    ],
    "HalfCheetah-v5": [
        {"frame_skip": 2, "forward_reward_weight": 0.5, "ctrl_cost_weight": 1, "reset_noise_scale": 0.5},
        {"exclude_current_positions_from_observation": False},
    ],
    "Walker2d-v5": [
        {"healthy_z_range": (1.1, 1.4), "healthy_angle_range": (-0.3, 0.3), "healthy_reward": 0.5},
        {"exclude_current_positions_from_observation": False, "terminate_when_unhealthy": False, "frame_skip": 1},
    ],
    "Swimmer-v5": [
        {"frame_skip": 1, "ctrl_cost_weight": 0.1, "exclude_current_positions_from_observation": False},
    ],
    "Ant-v5": [
        {"contact_cost_weight": 0.5, "contact_force_range": (-10, 10), "healthy_z_range": (0.4, 0.8)},
        {"include_cfrc_ext_in_observation": False, "exclude_current_positions_from_observation": False},
        {"include_cfrc_ext_in_observation": False, "contact_cost_weight": 0, "main_body": "front_left_leg"},
        {"frame_skip": 2, "terminate_when_unhealthy": False, "main_body": 5},
    ],
    "Humanoid-v5": [
        {"frame_skip": 1, "healthy_z_range": (1.35, 2.0), "forward_reward_weight": 1},
        {"include_cinert_in_observation": False, "include_qfrc_actuator_in_observation": False},
        {"include_cvel_in_observation": False, "include_cfrc_ext_in_observation": False},
        {"include_cfrc_ext_in_observation": False, "contact_cost_weight": 0.0, "frame_skip": 2},
        {"contact_cost_weight": 1e-3, "contact_cost_range": (1, 2), "terminate_when_unhealthy": False},
        {"exclude_current_positions_from_observation": False, "reset_noise_scale": 0.1},
    ],
    "InvertedPendulum-v5": [{"frame_skip": 1, "reset_noise_scale": 0.1}],
    "InvertedDoublePendulum-v5": [{"frame_skip": 1, "healthy_reward": 4, "reset_noise_scale": 0.3}],
    "Reacher-v5": [{"reward_dist_weight": 3, "reward_control_weight": 0.5, "frame_skip": 4}],
    "Pusher-v5": [{"reward_near_weight": 2, "reward_dist_weight": 0.1, "reward_control_weight": 1, "frame_skip": 1}],
}


@pytest.mark.parametrize(
    ("env_id", "kwargs"), [(env_id, kwargs) for env_id, variants in VARIANTS.items() for kwargs in variants]
)
def test_arguments_mean_what_they_mean_in_gymnasium(env_id: str, kwargs: dict[str, Any]) -> None:
    agree(env_id, steps=60, num_envs=2, seed=3, threads=1, **kwargs)


@pytest.mark.parametrize("env_id", IDS)
def test_names_and_defaults_of_arguments_are_gymnasiums(env_id: str) -> None:
    entry = gymnasium.envs.registration.load_env_creator(gymnasium.spec(env_id).entry_point)
    theirs = {name: one.default for name, one in inspect.signature(entry).parameters.items()}
    mine = {field.name: field.default for field in dataclasses.fields(TASKS[env_id])}
    not_ours = {"xml_file", "default_camera_config", "kwargs"}
    assert mine == {name: default for name, default in theirs.items() if name not in not_ours}
    assert TASKS[env_id].xml_file == theirs["xml_file"]


def test_one_seed_for_each_environment() -> None:
    agree("HalfCheetah-v5", steps=20, seed=[3, 3, 99], max_episode_steps=5)


@pytest.mark.parametrize("env_id", ["Hopper-v5", "Ant-v5"])
def test_the_number_of_threads_changes_nothing(env_id: str) -> None:
    agree(env_id, steps=40, num_envs=20, threads=3)


def test_processes_that_share_the_cores_can_be_told_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPOND_ENV_THREADS", "3")
    with contextlib.closing(ours("Hopper-v5", 5)) as env:
        assert env.dynamics.physics._batch.nthread == 3  # type: ignore[attr-defined]
    monkeypatch.setenv("MILLPOND_ENV_THREADS", "many")
    with pytest.raises(InvalidArgument, match="MILLPOND_ENV_THREADS='many'"):
        ours("Hopper-v5", 5)


# ------------------------------------------------------------------------------------------------------------ memory

MEMORY = """
import resource
from pathlib import Path
import numpy as np
from millpond.envs import make_batched

def mebibytes(line):
    return int(Path("/proc/self/status").read_text().partition(line + ":")[2].split()[0]) / 1024

make_batched("Hopper-v5", 2).reset(seed=0)
before = mebibytes("VmRSS")
env = make_batched("Hopper-v5", 100_000, frame_skip=1)
env.reset(seed=0)
env.step(np.zeros((100_000, 3), np.float32))
print(mebibytes("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_100_000_hoppers_fit_into_300_mb() -> None:
    """An MjData for each would take 75 GB."""
    run = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) * 2**20 < 0.3e9


def test_contact_forces_need_no_mjdata_for_each_environment_either() -> None:
    with contextlib.closing(ours("Humanoid-v5", 3, threads=2)) as env:
        physics = env.dynamics.physics  # type: ignore[attr-defined]
        assert isinstance(physics, ContactPhysics)
        assert physics._idle.qsize() == 2


def test_without_contact_forces_mujocos_own_threads_do_the_work() -> None:
    with contextlib.closing(
        ours("Humanoid-v5", 2, include_cfrc_ext_in_observation=False, contact_cost_weight=0)
    ) as env:
        assert isinstance(env.dynamics.physics, BatchPhysics)  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------------ health checks


def test_a_health_check_after_each_physics_step_ends_the_episode_in_the_state_of_the_fall() -> None:
    """Against single physics steps of Gymnasium's environment, under the same action, until it is unhealthy."""
    bounds = {"healthy_z_range": (1.3, 1.6), "reset_noise_scale": 0.05}
    single = gymnasium.make("Humanoid-v5", frame_skip=1, disable_env_checker=True, **bounds)
    with (
        contextlib.closing(ours("Humanoid-v5", 3, "Disabled", threads=2, health_check="physics_step", **bounds)) as env,
        contextlib.closing(single) as reference,
    ):
        physics, falls = env.dynamics.physics, 0  # type: ignore[attr-defined]
        env.reset(seed=0)
        env.action_space.seed(0)
        for _ in range(25):
            states, actions = physics.rows.copy(), env.action_space.sample()
            _, _, terminated, _, _ = env.step(actions)
            for i in range(3):
                assert terminated[i] == _falls(reference, states[i], actions[i])
                np.testing.assert_array_equal(physics.qpos[i], reference.unwrapped.data.qpos)
            falls += int(terminated.sum())
            if terminated.any():
                env.reset(options={"reset_mask": terminated})
        assert falls >= 3


def _falls(env: Any, state: Any, action: Any) -> bool:
    """Does it become unhealthy within five physics steps from ``state``? It is left where it does."""
    import mujoco

    world = env.unwrapped
    mujoco.mj_setState(world.model, world.data, state, int(mujoco.mjtState.mjSTATE_INTEGRATION))
    for _ in range(5):
        world.do_simulation(action, 1)
        if not world.is_healthy:
            return True
    return False


def test_with_frame_skip_1_both_health_checks_are_the_same() -> None:
    """The profile that looks after each physics step, as Gymnasium itself can."""
    agree("Humanoid-v5", steps=100, frame_skip=1, healthy_z_range=(1.35, 1.6), threads=1)
    kwargs: dict[str, Any] = {"frame_skip": 1, "threads": 1, "healthy_z_range": (1.35, 1.6)}
    with (
        contextlib.closing(ours("Humanoid-v5", 2, **kwargs)) as one,
        contextlib.closing(ours("Humanoid-v5", 2, health_check="physics_step", **kwargs)) as other,
    ):
        one.reset(seed=1)
        other.reset(seed=1)
        one.action_space.seed(0)
        for _ in range(60):
            actions = one.action_space.sample()
            for a, b in zip(one.step(actions)[:4], other.step(actions)[:4], strict=True):
                np.testing.assert_array_equal(a, b)


# ------------------------------------------------------------------------------------------- as a vector environment


@pytest.mark.parametrize("env_id", ["Hopper-v5", "Humanoid-v5", "Reacher-v5"])
@pytest.mark.parametrize("mode", MODES)
def test_the_environment_passes_our_own_check(env_id: str, mode: str) -> None:
    with contextlib.closing(ours(env_id, 3, mode, max_episode_steps=8, threads=1)) as env:
        assert check_env(env) == []


def test_make_opens_the_batched_version_with_the_arguments_of_gymnasiums_make() -> None:
    env = make("Hopper-v5", num_envs=3, seed=5, kwargs={"frame_skip": 2, "max_episode_steps": 9, "threads": 1})
    with contextlib.closing(env):
        assert isinstance(env, BatchedEnv)
        assert (env.num_envs, env.max_episode_steps, env.dynamics.task.frame_skip) == (3, 9, 2)  # type: ignore[attr-defined]
        assert env.spec is not None
        assert env.spec.id == "Hopper-v5"
        stepper = Stepper(env)
        stepper.reset(seed=0)
        for _ in range(10):
            step = stepper.step(np.zeros((3, 3), np.float32))
            stepper.advance()
        assert step.ended is None  # a new episode began after nine steps


@pytest.mark.parametrize("kwargs", [{"xml_file": "other.xml"}, {"camera_id": 1}, {"render_mode": "human"}])
def test_what_only_gymnasiums_own_can_do_is_left_to_it(kwargs: Any) -> None:
    assert make_batched("Hopper-v5", 2, **kwargs) is None


@pytest.mark.parametrize("env_id", ["Hopper-v5", "Ant-v5", "InvertedDoublePendulum-v5"])
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_a_saved_environment_goes_on_bit_for_bit(env_id: str, mode: str) -> None:
    """Also where an episode ended just before it was saved, and where the velocity needs the place before the step."""
    kwargs: dict[str, Any] = {"max_episode_steps": 6, "threads": 1}
    with contextlib.closing(ours(env_id, 3, mode, **kwargs)) as env:
        env.reset(seed=2)
        env.action_space.seed(0)
        actions = [env.action_space.sample() for _ in range(20)]
        for one in actions[:6]:
            env.step(one)
        saved = env.state_dict()
        expected = [env.step(one)[:4] for one in actions[6:]]
    with contextlib.closing(ours(env_id, 3, mode, **kwargs)) as again:
        again.load_state_dict(saved)
        for one, wanted in zip(actions[6:], expected, strict=True):
            for a, b in zip(again.step(one)[:4], wanted, strict=True):
                np.testing.assert_array_equal(a, b)


def test_the_state_of_other_environments_is_refused_whole(hopper: BatchedEnv) -> None:
    hopper.reset(seed=0)
    before = hopper.state_dict()
    with contextlib.closing(ours("Hopper-v5", 5)) as other:
        other.reset(seed=1)
        saved = other.state_dict()
    for wrong in (saved, {}, {**before, "elapsed": saved["elapsed"]}):
        with pytest.raises(InvalidArgument, match="of other environments"):
            hopper.load_state_dict(wrong)
    for name, value in hopper.state_dict().items():
        np.testing.assert_array_equal(value, before[name])


def test_arrays_that_were_returned_are_not_written_to_again(hopper: BatchedEnv) -> None:
    given = [hopper.reset(seed=0)[0]]
    copies = [given[0].copy()]
    for at in range(80):
        out = hopper.step(np.full((4, 3), (-1) ** at, np.float32))
        given += out[:4]
        copies += [one.copy() for one in out[:4]]
        ended = out[2] | out[3]
        if ended.any():
            given.append(hopper.reset(options={"reset_mask": ended})[0])
            copies.append(given[-1].copy())
    for now, then in zip(given, copies, strict=True):
        np.testing.assert_array_equal(now, then)


def test_pictures_show_environment_0(tmp_path: Path) -> None:
    script = (
        "import numpy as np\n"
        "from millpond.envs import make_batched\n"
        "env = make_batched('Hopper-v5', 3, render_mode='rgb_array', width=160, height=120, threads=1)\n"
        "env.reset(seed=0)\n"
        "(first,) = env.render()\n"
        "for _ in range(30): env.step(np.ones((3, 3), np.float32))\n"
        "(later,) = env.render()\n"
        "env.close()\n"
        "print(first.shape, first.dtype, first.std() > 10, (first != later).any())\n"
    )
    needed = "import mujoco; mujoco.Renderer(mujoco.MjModel.from_xml_string('<mujoco/>'), 8, 8).close()"
    environment = {**os.environ, "MUJOCO_GL": os.environ.get("MUJOCO_GL", "egl")}

    def python(code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)

    if python(needed).returncode:
        pytest.skip("this machine cannot render with MuJoCo")
    run = python(script)
    assert run.stdout.split("\n")[0] == "(120, 160, 3) uint8 True True", run.stderr


# ------------------------------------------------------------------------------------------------------------- errors


def test_an_episode_that_ended_must_be_reset_before_the_next_step(hopper: BatchedEnv) -> None:
    hopper.reset(seed=0)
    hopper._elapsed[2] = hopper.max_episode_steps or 0
    assert hopper.step(np.zeros((4, 3), np.float32))[3].tolist() == [False, False, True, False]
    with pytest.raises(NotReady, match=r"environments \[2\].*reset_mask"):
        hopper.step(np.zeros((4, 3), np.float32))


def test_reset_comes_first(hopper: BatchedEnv) -> None:
    for call in (
        lambda: hopper.step(np.zeros((4, 3), np.float32)),
        lambda: hopper.reset(options={"reset_mask": np.ones(4, bool)}),
        hopper.render,
        hopper.state_dict,
    ):
        with pytest.raises(NotReady, match="reset"):
            call()


def test_a_closed_environment_says_so(hopper: BatchedEnv) -> None:
    hopper.reset()
    hopper.close()
    hopper.close()
    with pytest.raises(NotReady, match="closed"):
        hopper.step(np.zeros((4, 3), np.float32))


@pytest.mark.parametrize(
    "actions", [np.zeros((4, 2), np.float32), np.zeros(12, np.float32), np.zeros((4, 3), int), np.full((4, 3), "x")]
)
def test_actions_that_make_no_sense_move_nothing(hopper: BatchedEnv, actions: Any) -> None:
    hopper.reset(seed=0)
    before = hopper.state_dict()
    with pytest.raises(InvalidArgument, match="actions of"):
        hopper.step(actions)
    for name, value in hopper.state_dict().items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"reset_mask": [True] * 4}, InvalidType),
        ({"reset_mask": np.ones(4, int)}, InvalidType),
        ({"reset_mask": np.ones(3, bool)}, InvalidArgument),
        ({"reset_mask": np.zeros(4, bool)}, InvalidArgument),
        ({"low": 0.1}, InvalidArgument),
    ],
)
def test_reset_options_that_make_no_sense_change_nothing(hopper: BatchedEnv, options: Any, error: Any) -> None:
    hopper.reset(seed=0)
    before = hopper.state_dict()
    with pytest.raises(error):
        hopper.reset(options=options)
    for name, value in hopper.state_dict().items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize(
    "kwargs",
    [
        {"num_envs": 0},
        {"num_envs": True},
        {"threads": 0},
        {"frame_skip": 0},
        {"frame_skip": 2.5},
        {"width": 0},
        {"health_check": "often"},
        {"autoreset_mode": "Sometimes"},
        {"max_episode_steps": 0},
    ],
)
def test_arguments_that_make_no_sense_are_refused(kwargs: dict[str, Any]) -> None:
    kwargs = {"num_envs": 2, **kwargs}
    with pytest.raises(InvalidArgument, match=next(name for name in kwargs if name != "num_envs" or len(kwargs) == 1)):
        make_batched("Hopper-v5", kwargs.pop("num_envs"), **kwargs)
