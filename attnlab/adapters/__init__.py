"""Any Hugging Face model, through its AttentionInterface: ``swap`` or ``convert`` it, ``record`` it, load it."""

from attnlab.hf.contexts import record, swap
from attnlab.hf.convert import convert, is_converted
from attnlab.hf.distill import Distillation, distill
from attnlab.hf.load import LoadedModel, load_model, reconvert
from attnlab.hf.plan import Plan, swap_plan

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
    "swap",
    "swap_plan",
]
