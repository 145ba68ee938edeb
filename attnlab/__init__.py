"""attnlab: a laboratory for attention. Build it, approximate it, guide it, watch it being learned, and read it.

Public names are imported when they are asked for, so that ``import attnlab`` and ``attnlab --help`` cost nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from attnlab.hooks import register_hooks

if TYPE_CHECKING:
    from attnlab.adapters import (
        Distillation,
        LoadedModel,
        Plan,
        convert,
        distill,
        generate,
        is_converted,
        load_model,
        record,
        save_model,
        shipped_model,
        swap,
        swap_plan,
    )
    from attnlab.adapters.cache_bytes import cache_bytes, held_bytes
    from attnlab.adapters.compact import Compaction, compact
    from attnlab.adapters.evict import evicting
    from attnlab.adapters.initialise import initialise_control
    from attnlab.adapters.plan import PlannedFor
    from attnlab.adapters.watch import watch
    from attnlab.adapters.watched import AttentionStatistics, LayerStatistics
    from attnlab.attention import AttentionCall, Mechanism
    from attnlab.caches.kv_policy import KVPolicy, cache_policy
    from attnlab.caches.registry import cache_policy_names
    from attnlab.conformance.check import check
    from attnlab.evaluation.audit import audit
    from attnlab.evaluation.evaluate import EvaluateConfig, evaluate
    from attnlab.evaluation.explore import Subject, explore
    from attnlab.evaluation.judge import judge
    from attnlab.evaluation.judge_grid import JudgeConfig
    from attnlab.evaluation.plan_conversion import plan_conversion
    from attnlab.evaluation.tasks import TaskSettings
    from attnlab.guidance import Guidance, guide, guide_trainer, pattern_audit
    from attnlab.mechanisms.abc_cluster import AbcCluster
    from attnlab.mechanisms.abc_compressive import AbcCompressive
    from attnlab.mechanisms.abc_dilated import AbcDilated
    from attnlab.mechanisms.abc_global import AbcGlobal
    from attnlab.mechanisms.abc_hybrid import AbcHybrid
    from attnlab.mechanisms.abc_linformer import AbcLinformer
    from attnlab.mechanisms.abc_luna import AbcLuna
    from attnlab.mechanisms.abc_mlp import AbcMlp
    from attnlab.mechanisms.abc_random import AbcRandom
    from attnlab.mechanisms.abc_select import AbcSelect
    from attnlab.mechanisms.abc_window import AbcWindow
    from attnlab.mechanisms.abc_workspace import AbcWorkspace
    from attnlab.mechanisms.effective_softmax import EffectiveSoftmax
    from attnlab.mechanisms.kernelized import Kernelized
    from attnlab.mechanisms.lsh import Lsh
    from attnlab.mechanisms.orf import Orf
    from attnlab.mechanisms.per_group import PerGroup
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
    from attnlab.reading.effective import EffectiveAttention, effective_attention, effective_from_output
    from attnlab.reading.effective_layers import read_effective
    from attnlab.reading.faithfulness import faithfulness
    from attnlab.reading.registry import reading_names
    from attnlab.reading.table import read
    from attnlab.registry import all_mechanisms, mechanism, mechanism_names, register, spec_of
    from attnlab.trace import LayerTrace, Trace

__version__ = "0.1.0"

__all__ = [
    "T2R",
    "AbcCluster",
    "AbcCompressive",
    "AbcDilated",
    "AbcGlobal",
    "AbcHybrid",
    "AbcLinformer",
    "AbcLuna",
    "AbcMlp",
    "AbcRandom",
    "AbcSelect",
    "AbcWindow",
    "AbcWorkspace",
    "AttentionCall",
    "AttentionStatistics",
    "Compaction",
    "Distillation",
    "EffectiveAttention",
    "EffectiveSoftmax",
    "EvaluateConfig",
    "Guidance",
    "JudgeConfig",
    "KVPolicy",
    "Kernelized",
    "LayerStatistics",
    "LayerTrace",
    "LoadedModel",
    "Lsh",
    "Mechanism",
    "Orf",
    "PerGroup",
    "PerHead",
    "Plan",
    "PlannedFor",
    "Position",
    "Rfa",
    "Softmax",
    "Subject",
    "TaskSettings",
    "TopR",
    "Trace",
    "Uniform",
    "ValueAware",
    "Window",
    "__version__",
    "all_mechanisms",
    "alternative_attention",
    "approximation_error",
    "audit",
    "cache_bytes",
    "cache_policy",
    "cache_policy_names",
    "check",
    "compact",
    "convert",
    "distill",
    "effective_attention",
    "effective_from_output",
    "evaluate",
    "evicting",
    "explore",
    "faithfulness",
    "generate",
    "guide",
    "guide_trainer",
    "held_bytes",
    "initialise_control",
    "is_converted",
    "judge",
    "load_model",
    "mechanism",
    "mechanism_names",
    "pattern_audit",
    "plan_conversion",
    "read",
    "read_effective",
    "reading_names",
    "record",
    "register",
    "save_model",
    "shipped_model",
    "spec_of",
    "swap",
    "swap_plan",
    "watch",
]

# Which module offers which public names.
_OFFERED = {
    "adapters": "Plan convert generate is_converted record swap swap_plan",
    "adapters.load": "LoadedModel load_model save_model shipped_model",
    "adapters.cache_bytes": "cache_bytes held_bytes",
    "adapters.distillation": "Distillation distill",
    "adapters.compact": "Compaction compact",
    "adapters.evict": "evicting",
    "adapters.initialise": "initialise_control",
    "adapters.plan": "PlannedFor",
    "adapters.watch": "watch",
    "adapters.watched": "AttentionStatistics LayerStatistics",
    "attention": "AttentionCall Mechanism",
    "caches.kv_policy": "KVPolicy cache_policy",
    "caches.registry": "cache_policy_names",
    "conformance.check": "check",
    "evaluation.audit": "audit",
    "evaluation.evaluate": "EvaluateConfig evaluate",
    "evaluation.explore": "Subject explore",
    "evaluation.judge": "judge",
    "evaluation.judge_grid": "JudgeConfig",
    "evaluation.plan_conversion": "plan_conversion",
    "evaluation.tasks": "TaskSettings",
    "guidance": "Guidance guide guide_trainer pattern_audit",
    "mechanisms.abc_cluster": "AbcCluster",
    "mechanisms.abc_compressive": "AbcCompressive",
    "mechanisms.abc_dilated": "AbcDilated",
    "mechanisms.abc_global": "AbcGlobal",
    "mechanisms.abc_hybrid": "AbcHybrid",
    "mechanisms.abc_linformer": "AbcLinformer",
    "mechanisms.abc_luna": "AbcLuna",
    "mechanisms.abc_mlp": "AbcMlp",
    "mechanisms.abc_random": "AbcRandom",
    "mechanisms.abc_select": "AbcSelect",
    "mechanisms.abc_window": "AbcWindow",
    "mechanisms.abc_workspace": "AbcWorkspace",
    "mechanisms.effective_softmax": "EffectiveSoftmax",
    "mechanisms.kernelized": "Kernelized",
    "mechanisms.lsh": "Lsh",
    "mechanisms.orf": "Orf",
    "mechanisms.per_group": "PerGroup",
    "mechanisms.per_head": "PerHead",
    "mechanisms.rfa": "Rfa",
    "mechanisms.softmax": "Softmax",
    "mechanisms.t2r": "T2R",
    "mechanisms.top_r": "TopR",
    "mechanisms.uniform": "Position Uniform",
    "mechanisms.value_aware": "ValueAware",
    "mechanisms.window": "Window",
    "reading.alternative": "alternative_attention",
    "reading.approximation": "approximation_error",
    "reading.effective": "EffectiveAttention effective_attention effective_from_output",
    "reading.effective_layers": "read_effective",
    "reading.faithfulness": "faithfulness",
    "reading.registry": "reading_names",
    "reading.table": "read",
    "registry": "all_mechanisms mechanism mechanism_names register spec_of",
    "trace": "LayerTrace Trace",
}
_MODULE_OF = {name: module for module, names in _OFFERED.items() for name in names.split()}


register_hooks()


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'attnlab' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"attnlab.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
