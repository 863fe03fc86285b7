"""Versioned parameters on their way from the learner to the collectors."""

from __future__ import annotations

from millpond.weights.board import WeightBoard
from millpond.weights.snapshot import Snapshot, Weights

__all__ = ["Snapshot", "WeightBoard", "Weights"]
