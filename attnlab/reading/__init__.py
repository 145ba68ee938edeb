"""Readings of a recorded attention: what reaches the output, and how far an approximation of it is off."""

from attnlab.reading._input import ReadingInput
from attnlab.reading.alternative import AlternativeAttention, alternative_attention
from attnlab.reading.approximation import ApproximationError, approximation_error
from attnlab.reading.effective import (
    EffectiveAttention,
    EffectiveRows,
    effective_attention,
    effective_from_output,
)
from attnlab.reading.effective_layers import EffectiveLayers, read_effective
from attnlab.reading.faithfulness import Faithfulness, compared_readings, faithfulness
from attnlab.reading.gradient import gradient_times_attention, output_gradients
from attnlab.reading.heads import attention_distance, attention_entropy
from attnlab.reading.norm_based import norm_based
from attnlab.reading.pattern_classifier import classify, pattern_shares, pattern_table
from attnlab.reading.registry import Reading, named_reading, reading, reading_names
from attnlab.reading.rollout import rollout
from attnlab.reading.segments import segment_contrast
from attnlab.reading.similarity import head_similarity
from attnlab.reading.table import ReadingTable, read
from attnlab.reading.token_types import TOKEN_TYPES, attention_to, token_type_weights, token_types

__all__ = [
    "TOKEN_TYPES",
    "AlternativeAttention",
    "ApproximationError",
    "EffectiveAttention",
    "EffectiveLayers",
    "EffectiveRows",
    "Faithfulness",
    "Reading",
    "ReadingInput",
    "ReadingTable",
    "alternative_attention",
    "approximation_error",
    "attention_distance",
    "attention_entropy",
    "attention_to",
    "classify",
    "compared_readings",
    "effective_attention",
    "effective_from_output",
    "faithfulness",
    "gradient_times_attention",
    "head_similarity",
    "named_reading",
    "norm_based",
    "output_gradients",
    "pattern_shares",
    "pattern_table",
    "read",
    "read_effective",
    "reading",
    "reading_names",
    "rollout",
    "segment_contrast",
    "token_type_weights",
    "token_types",
]
