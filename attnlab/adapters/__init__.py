"""Any Hugging Face model, through its AttentionInterface: ``swap`` or ``convert`` it, ``record`` it, load it."""

from attnlab.adapters.contexts import record, swap
from attnlab.adapters.convert import convert, is_converted
from attnlab.adapters.distill import Distillation, distill
from attnlab.adapters.load import LoadedModel, load_model, reconvert, shipped_model
from attnlab.adapters.plan import Plan, swap_plan

__all__ = [
    "Distillation",
    "LoadedModel",
    "Plan",
    "convert",
    "distill",
    "is_converted",
    "load_model",
    "reconvert",
    "record",
    "shipped_model",
    "swap",
    "swap_plan",
]
