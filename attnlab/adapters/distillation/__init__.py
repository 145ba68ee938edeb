"""Distillation: a converted model learns from the model it was made from."""

from attnlab.adapters.distillation.distill import Distillation, Progress, StageLearner, distill, layer_error, run_stage

__all__ = ["Distillation", "Progress", "StageLearner", "distill", "layer_error", "run_stage"]
