"""What the experiments train: a transformer and KTIW's LSTMs whose attention is any mechanism, losses, searches."""

from attnlab.attention import LayerCache
from attnlab.models.attention import Attention, attentions, swapped
from attnlab.models.cache import Cache, KeyValueCache
from attnlab.models.config import TransformerConfig, config_from_dict, config_to_dict
from attnlab.models.losses import CausalLM, MaskedLM, Translation, token_loss
from attnlab.models.named import CONFIGS, named_config
from attnlab.models.saving import load_model, save_model
from attnlab.models.search import Hypothesis, LengthPenalty, beam_search, greedy_search
from attnlab.models.tracing import record_model
from attnlab.models.transformer import Output, Source, Transformer, count_parameters

__all__ = [
    "CONFIGS",
    "Attention",
    "Cache",
    "CausalLM",
    "Hypothesis",
    "KeyValueCache",
    "LayerCache",
    "LengthPenalty",
    "MaskedLM",
    "Output",
    "Source",
    "Transformer",
    "TransformerConfig",
    "Translation",
    "attentions",
    "beam_search",
    "config_from_dict",
    "config_to_dict",
    "count_parameters",
    "greedy_search",
    "load_model",
    "named_config",
    "record_model",
    "save_model",
    "swapped",
    "token_loss",
]
