"""Any Hugging Face model, through its AttentionInterface: ``swap`` its attention, ``record`` it, load one safely."""

from attnlab.hf.contexts import record, swap
from attnlab.hf.load import LoadedModel, load_model
from attnlab.hf.plan import Plan, swap_plan

__all__ = ["LoadedModel", "Plan", "load_model", "record", "swap", "swap_plan"]
