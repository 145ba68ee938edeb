"""attnlab: a laboratory for attention. Build it, approximate it, guide it, watch it being learned, and read it."""

from attnlab.attention import AttentionCall, Mechanism
from attnlab.mechanisms.kernelized import Kernelized
from attnlab.mechanisms.softmax import Softmax
from attnlab.registry import all_mechanisms, mechanism, mechanism_names, register, spec_of

__version__ = "0.1.0"

__all__ = [
    "AttentionCall",
    "Kernelized",
    "Mechanism",
    "Softmax",
    "__version__",
    "all_mechanisms",
    "mechanism",
    "mechanism_names",
    "register",
    "spec_of",
]
