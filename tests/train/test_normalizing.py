"""Runs with normalised observations: raw ones in replay, shared statistics, the same ones wherever the policy goes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from runs import SMALL, resume, rows, run, same, summary, weights
from tensordict import TensorDict, TensorDictBase

import millpond
from millpond.core.errors import CheckpointError, InvalidArgument
from millpond.core.spec import BoxAction, EnvSpec, ObservationField
from millpond.envs.normalize import Moments, RunningStatistics
from millpond.replay import ReplayBuffer
from millpond.train.compose import settings_from_overrides
from millpond.train.normalizing import NormalizedAlgorithm, algorithm_of
from millpond.train.run_state import Checkpoints

ON = "normalize_observations=true"
SYNC = ["execution.mode=sync", "env=Pendulum-v1", ON]


def replayed(path: Path) -> TensorDict:
    rb = ReplayBuffer(500)
    rb.loads(Checkpoints(path / "checkpoints").latest() / "replay.millpond")
    return rb[:]  # type: ignore[no-any-return]


def test_the_policy_normalises_by_what_the_environments_have_shown(tmp_path: Path) -> None:
    assert run(tmp_path / "run", *SYNC, "collectors=1").status == "completed"
    items, saved = replayed(tmp_path / "run"), weights(tmp_path / "run")
    shown = torch.cat([items["observation"][:1], items["next", "observation"]])  # raw; one episode, of 120 steps
    known = Moments.of(shown.numpy())
    assert int(saved["statistics.count"]) == known.count == 121
    assert torch.allclose(saved["statistics.mean"].float(), torch.from_numpy(known.mean).float(), atol=1e-5)
    mean, scale = saved["normalizer.0.mean"], saved["normalizer.0.scale"]
    assert torch.allclose(scale, torch.from_numpy(known.variance**-0.5).float(), rtol=0.1)

    policy = millpond.load_policy(tmp_path / "run")
    asked = TensorDict({"observation": items["observation"].clone()}, batch_size=[120])
    action = policy(asked)["action"]
    assert torch.equal(asked["observation"], items["observation"])  # it stays raw
    settings = settings_from_overrides([*SMALL, *SYNC, "normalize_observations=false"])
    spec = EnvSpec.vector(3, action=BoxAction((-2.0,), (2.0,)))
    inner = algorithm_of(settings, spec, statistics=None, device="cpu")
    inner.load_state_dict({k: v for k, v in saved.items() if not k.startswith(("statistics.", "normalizer."))})
    by_hand = TensorDict({"observation": ((items["observation"] - mean) * scale).clamp(-10, 10)}, batch_size=[120])
    assert torch.equal(action, inner.evaluation_policy()(by_hand)["action"])
    assert action.std() > 0


class Remembers:
    """An algorithm that learns nothing, and keeps the batch that it was given."""

    policy = published = torch.nn.Linear(1, 1)
    steps = 0

    def evaluation_policy(self) -> torch.nn.Module:
        return self.policy

    def advance(self, frames: int) -> None: ...

    def update(self, batch: TensorDictBase) -> dict[str, torch.Tensor]:
        self.batch = batch
        return {}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {}

    def load_state_dict(self, state: object) -> None: ...


def test_an_update_sees_both_observations_normalised_and_leaves_the_batch_alone() -> None:
    """Case ring-9; parts that are no floating numbers stay as they are."""
    fields = [ObservationField(("observation", name), (2,)) for name in ("fast", "slow")]
    fields.append(ObservationField(("observation", "id"), (1,), torch.int64))
    spec = EnvSpec(tuple(fields), BoxAction((-1.0,), (1.0,)))
    seen = {name: torch.randn(6, 2) for name in ("fast", "slow")} | {"id": torch.arange(6)[:, None]}
    batch = TensorDict({"observation": seen, "next": {"observation": {k: v + 1 for k, v in seen.items()}}}, [6])
    before, inner = batch.clone(), Remembers()
    with RunningStatistics(4) as statistics:
        shown = torch.cat([100 + torch.randn(50, 2), torch.randn(50, 2) * 3], 1).numpy()
        known = statistics.update(shown)
        algorithm = NormalizedAlgorithm(inner, spec, statistics)
        algorithm.update(batch)
    for place, plus in ((("observation",), 0), (("next", "observation"), 1)):
        got = torch.cat([inner.batch[*place, "fast"], inner.batch[*place, "slow"]], 1)
        raw = torch.cat([before["observation", "fast"], before["observation", "slow"]], 1) + plus
        wanted = ((raw.double() - torch.from_numpy(known.mean)) / torch.from_numpy(known.variance).sqrt()).clamp(
            -10, 10
        )
        assert torch.allclose(got.double(), wanted, atol=1e-3)
        assert torch.equal(inner.batch[*place, "id"], before["observation", "id"] + plus)
    assert all(torch.equal(batch[key], before[key]) for key in before.keys(True, True))


def test_a_killed_run_resumes_bitwise(tmp_path: Path) -> None:
    """Case ckpt-1."""
    words = [*SYNC, "checkpoint.interval_frames=50", "checkpoint.keep=9", "eval.interval_frames=40"]
    assert run(tmp_path / "whole", *words).status == "completed"
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    for path in Checkpoints(tmp_path / "killed" / "checkpoints").all()[1:]:
        shutil.rmtree(path)
    assert resume(tmp_path / "killed").status == "completed"
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "killed"))
    assert rows(tmp_path / "whole") == rows(tmp_path / "killed")


def test_workers_share_the_statistics(tmp_path: Path) -> None:
    words = ["execution.mode=async", "collectors=2", "envs_per_collector=3", ON, "eval.interval_frames=40"]
    assert run(tmp_path / "run", *words).status == "completed"
    assert all(check["ok"] for check in summary(tmp_path / "run")["checks"].values())
    saved = weights(tmp_path / "run")
    assert int(saved["statistics.count"]) >= 120 + 6  # of both workers, first observations included
    assert bool((saved["normalizer.0.scale"] != 1).all())


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    """Case ckpt-3."""
    assert run(tmp_path / "run", *SYNC[:2]).status == "completed"
    with pytest.raises(InvalidArgument, match="normalize_observations cannot change"):
        resume(tmp_path / "run", ON)
    settings = settings_from_overrides([*SMALL, *SYNC])
    spec = EnvSpec.vector(3, action=BoxAction((-2.0,), (2.0,)))
    with RunningStatistics(3) as statistics:
        algorithm = algorithm_of(settings, spec, statistics=statistics, device="cpu")
        before = {name: value.clone() for name, value in algorithm.state_dict().items()}
        with pytest.raises(CheckpointError, match="no statistics"):
            algorithm.load_state_dict(weights(tmp_path / "run"))
        assert same(before, algorithm.state_dict())
    with pytest.raises(InvalidArgument, match="floating"):
        run(tmp_path / "other", "env=FrozenLake-v1", "algorithm=dqn", ON)
