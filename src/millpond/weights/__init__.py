"""Versioned parameters on their way from the learner to the collectors."""

from __future__ import annotations

from millpond.weights.board import WeightBoard

__all__ = ["WeightBoard"]
