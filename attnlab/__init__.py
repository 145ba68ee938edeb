"""attnlab: a laboratory for attention. Build it, approximate it, guide it, watch it being learned, and read it."""

from attnlab.attention import AttentionCall, Mechanism
from attnlab.cache_policies import KVPolicy, evicting
from attnlab.explore import Subject, explore
from attnlab.guidance import Guidance, guide, guide_trainer, pattern_audit
from attnlab.hf import Distillation, Plan, convert, distill, is_converted, load_model, record, swap, swap_plan
from attnlab.mechanisms.abc_cluster import AbcCluster
from attnlab.mechanisms.abc_compressive import AbcCompressive
from attnlab.mechanisms.abc_dilated import AbcDilated
from attnlab.mechanisms.abc_global import AbcGlobal
from attnlab.mechanisms.abc_linformer import AbcLinformer
from attnlab.mechanisms.abc_luna import AbcLuna
from attnlab.mechanisms.abc_mlp import AbcMlp
from attnlab.mechanisms.abc_random import AbcRandom
from attnlab.mechanisms.abc_window import AbcWindow
from attnlab.mechanisms.abc_workspace import AbcWorkspace
from attnlab.mechanisms.effective_softmax import EffectiveSoftmax
from attnlab.mechanisms.kernelized import Kernelized
from attnlab.mechanisms.lsh import Lsh
from attnlab.mechanisms.orf import Orf
from attnlab.mechanisms.per_head import PerHead
from attnlab.mechanisms.rfa import Rfa
from attnlab.mechanisms.softmax import Softmax
from attnlab.mechanisms.t2r import T2R
from attnlab.mechanisms.top_r import TopR
from attnlab.mechanisms.uniform import Position, Uniform
from attnlab.mechanisms.value_aware import ValueAware
from attnlab.mechanisms.window import Window
from attnlab.reading.alternative import alternative_attention
from attnlab.reading.approximation import approximation_error
from attnlab.reading.effective import (
    EffectiveAttention,
    effective_attention,
    effective_from_output,
)
from attnlab.reading.effective_layers import read_effective
from attnlab.reading.faithfulness import faithfulness
from attnlab.registry import all_mechanisms, mechanism, mechanism_names, register, spec_of
from attnlab.trace import LayerTrace, Trace

__version__ = "0.1.0"

__all__ = [
    "T2R",
    "AbcCluster",
    "AbcCompressive",
    "AbcDilated",
    "AbcGlobal",
    "AbcLinformer",
    "AbcLuna",
    "AbcMlp",
    "AbcRandom",
    "AbcWindow",
    "AbcWorkspace",
    "AttentionCall",
    "Distillation",
    "EffectiveAttention",
    "EffectiveSoftmax",
    "Guidance",
    "KVPolicy",
    "Kernelized",
    "LayerTrace",
    "Lsh",
    "Mechanism",
    "Orf",
    "PerHead",
    "Plan",
    "Position",
    "Rfa",
    "Softmax",
    "Subject",
    "TopR",
    "Trace",
    "Uniform",
    "ValueAware",
    "Window",
    "__version__",
    "all_mechanisms",
    "alternative_attention",
    "approximation_error",
    "convert",
    "distill",
    "effective_attention",
    "effective_from_output",
    "evicting",
    "explore",
    "faithfulness",
    "guide",
    "guide_trainer",
    "is_converted",
    "load_model",
    "mechanism",
    "mechanism_names",
    "pattern_audit",
    "read_effective",
    "record",
    "register",
    "spec_of",
    "swap",
    "swap_plan",
]
