"""Callbacks: recorders, probes and other code that reads a model while it is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

__all__ = ["Callback", "Moment"]


@dataclass(frozen=True)
class Moment:
    """A point of a run: the state after ``step`` updates."""

    step: int
    # The model passed to ``train``, in evaluation mode during on_evaluation.
    model: nn.Module
    run_dir: Path
    # The evaluation's values so far; empty in on_step.
    values: Mapping[str, float]


class Callback:
    """Override the methods you need. Every rank calls them; the first rank's values are recorded.

    Changes to random generators, gradients and train/eval mode during ``on_evaluation`` are undone afterwards.
    """

    def on_step(self, moment: Moment) -> None:
        """Called after each update; reading the value of a GPU tensor would make the GPU wait."""

    def on_evaluation(self, moment: Moment) -> Mapping[str, float] | None:
        """Called at each evaluation; the values it returns join the evaluation's."""
        return None

    def state(self) -> dict[str, Any]:
        """What must be restored in a resumed run, as JSON."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of ``state``."""
