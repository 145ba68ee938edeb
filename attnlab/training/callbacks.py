"""What may look on while a model is trained: recorders, probes, anything that knows the model."""

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
    # The model that was given to ``train``, in evaluation mode during on_evaluation.
    model: nn.Module
    run_dir: Path
    # The evaluation's values so far; empty in on_step.
    values: Mapping[str, float]


class Callback:
    """Override what you need. Every rank calls it; the first rank's values are recorded.

    What it does to the random generators, to gradients and to train/eval mode during ``on_evaluation`` is undone after.
    """

    def on_step(self, moment: Moment) -> None:
        """Called after each update; reading a GPU tensor here makes the GPU wait."""

    def on_evaluation(self, moment: Moment) -> Mapping[str, float] | None:
        """Called at each evaluation; what it returns joins the evaluation's values."""
        return None

    def state(self) -> dict[str, Any]:
        """What a resumed run must know, as JSON."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of ``state``."""
