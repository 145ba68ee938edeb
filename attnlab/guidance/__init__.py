"""Attention guidance: heads pulled to patterns by a loss or a bias, and heads that are patterns from the start."""

from attnlab.guidance.audit import pattern_audit
from attnlab.guidance.bias import LogitBias, bias_heads, pattern_bias
from attnlab.guidance.gaussian import GaussianHeads
from attnlab.guidance.heads import assign_heads
from attnlab.guidance.loss import guidance_by_head, guidance_loss, guided_weights, layer_targets, squared_error
from attnlab.guidance.settings import Guidance
from attnlab.guidance.term import GuidanceTerm, guide
from attnlab.guidance.trainer import guide_trainer

__all__ = [
    "GaussianHeads",
    "Guidance",
    "GuidanceTerm",
    "LogitBias",
    "assign_heads",
    "bias_heads",
    "guidance_by_head",
    "guidance_loss",
    "guide",
    "guide_trainer",
    "guided_weights",
    "layer_targets",
    "pattern_audit",
    "pattern_bias",
    "squared_error",
]
