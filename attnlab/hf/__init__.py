"""Any Hugging Face model, through its AttentionInterface: ``swap`` its attention, ``record`` it, load one safely."""

from attnlab.hf.contexts import record, swap
from attnlab.hf.load import LoadedModel, load_model

__all__ = ["LoadedModel", "load_model", "record", "swap"]
