"""Distillation: a converted model learns from the model it was made from, in stages."""

from attnlab.adapters.distillation.distill import HeldOut, StageLearner, distill, run_stage, teach
from attnlab.adapters.distillation.losses import Predictions, layer_error
from attnlab.adapters.distillation.rows import TokenRows
from attnlab.adapters.distillation.settings import STAGES, Distillation, StageProgress, near_rate, row_shape

__all__ = [
    "STAGES",
    "Distillation",
    "HeldOut",
    "Predictions",
    "StageLearner",
    "StageProgress",
    "TokenRows",
    "distill",
    "layer_error",
    "near_rate",
    "row_shape",
    "run_stage",
    "teach",
]
