"""A trained policy, read back from its run."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from millpond.train.checkpoint import ALGORITHM, load_tensors, spec_from_json
from millpond.train.compose import settings_from_file
from millpond.train.normalizing import algorithm_of
from millpond.train.run_state import Checkpoints, RunDirectory, read_checkpoint


def load_policy(run: str | os.PathLike[str], *, checkpoint: str | os.PathLike[str] | None = None) -> nn.Module:
    """The policy of a run, without exploration: a module that reads ``observation`` and sets ``action``.

    It maps a TensorDict ``[batch]`` of observations, as the environment gives them, to the same TensorDict, on the CPU,
    without gradients. With ``normalize_observations`` it normalises them by the statistics of the checkpoint.
    ``checkpoint`` is one of the run's checkpoint directories, by its name or its path; the newest by default. Neither
    the environment nor the replay is needed.

    Raises:
        InvalidArgument: ``run`` is no run directory.
        CheckpointError: it has no checkpoint, or that is damaged or of another version.
    """
    directory = RunDirectory.open(Path(run))
    settings = settings_from_file(directory.config)
    path = Checkpoints(directory.checkpoints).latest() if checkpoint is None else Path(checkpoint)
    if len(path.parts) == 1 and not path.exists():  # a name
        path = directory.checkpoints / path
    state = read_checkpoint(path)
    algorithm = algorithm_of(settings, spec_from_json(state["spec"]), statistics=None, device="cpu")
    algorithm.load_state_dict(load_tensors(path / ALGORITHM))
    return algorithm.evaluation_policy()
