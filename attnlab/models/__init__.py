"""A transformer whose attention is any mechanism, its losses, and search with caches."""

from attnlab.attention import LayerCache
from attnlab.models.attention import Attention, AttentionLayer, attentions
from attnlab.models.cache import Cache, KeyValueCache
from attnlab.models.config import TransformerConfig, config_from_dict, config_to_dict
from attnlab.models.losses import CausalLM, MaskedLM, Translation, token_loss
from attnlab.models.named import CONFIGS, named_config
from attnlab.models.saving import load_transformer, save_transformer
from attnlab.models.search import Hypothesis, LengthPenalty, beam_search, greedy_search, sample
from attnlab.models.transformer import EncoderOutput, Output, Transformer, count_parameters

__all__ = [
    "CONFIGS",
    "Attention",
    "AttentionLayer",
    "Cache",
    "CausalLM",
    "EncoderOutput",
    "Hypothesis",
    "KeyValueCache",
    "LayerCache",
    "LengthPenalty",
    "MaskedLM",
    "Output",
    "Transformer",
    "TransformerConfig",
    "Translation",
    "attentions",
    "beam_search",
    "config_from_dict",
    "config_to_dict",
    "count_parameters",
    "greedy_search",
    "load_transformer",
    "named_config",
    "sample",
    "save_transformer",
    "token_loss",
]
