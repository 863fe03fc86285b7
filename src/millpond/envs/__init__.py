"""Worlds. The only package that imports Gymnasium."""

from __future__ import annotations

from millpond.core.extras import extra

with extra("train"):
    from millpond.envs.autoreset import Step, Stepper, declare
    from millpond.envs.catalogue import make_batched
    from millpond.envs.check import check_env
    from millpond.envs.make import make
    from millpond.envs.spaces import Leaf, env_spec, leaves

__all__ = ["Leaf", "Step", "Stepper", "check_env", "declare", "env_spec", "leaves", "make", "make_batched"]
