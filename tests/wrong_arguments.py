"""Public names called with wrong arguments, run as a program: under pytest a type check of signatures stands before.

Prints a line for each call that ends in anything but a TypeError or a ValueError with a message.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import DynamicCache

import attnlab as al
from attnlab.models import Transformer, TransformerConfig
from attnlab.training.settings import Recipe, Schedule, Settings

WRONG: tuple[Any, ...] = (
    None,
    5,
    -1,
    1.5,
    float("nan"),
    float("inf"),
    1e30,
    True,
    "nonsense",
    b"x",
    [],
    {},
    [None],
    object(),
)
# What no number of steps, keys, slots or heads is, and what no rate is.
NO_INT: tuple[Any, ...] = (1.5, float("nan"), float("inf"), "x", [], object())
NO_FLOAT: tuple[Any, ...] = (float("nan"), float("inf"), "x", [], object())
# Plain records of results, whose fields other functions check; loading a model and training are tested with files.
RECORDS = {
    "AttentionStatistics",
    "Compaction",
    "EffectiveAttention",
    "LayerStatistics",
    "LayerTrace",
    "LoadedModel",
    "Subject",
}
WITHOUT_ARGUMENTS = {
    "all_mechanisms",
    "cache_policy_names",
    "mechanism_names",
    "Mechanism",
    "__version__",
}


def small_model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(TransformerConfig(kind="decoder", vocab=11, width=8, heads=2, layers=2)).eval()


def _trace(model: Transformer) -> al.Trace:
    with al.record(model) as trace, torch.no_grad():
        model(torch.tensor([[1, 2, 3, 4]]))
    return trace


def right_arguments() -> dict[str, dict[str, Any]]:
    """Arguments that each public function takes."""
    model = small_model()
    trace, ids = _trace(model), torch.tensor([[1, 2, 3, 4]])
    q, k, v = torch.randn(3, 1, 2, 3, 4)
    # A model that is no causal one: every right call of these is refused, too, with a message.
    nothing = al.LoadedModel(torch.nn.Linear(1, 1), None, "encoder")
    return {
        "AttentionCall": {"q": q, "k": k, "v": v},
        "KVPolicy": {"budget": 4},
        "Plan": {"layers": {0: "softmax"}},
        "PlannedFor": {"layers": 2, "key_value_heads": 2, "head_size": 4},
        "alternative_attention": {"layer": trace[0]},
        "approximation_error": {"trace": trace, "mech": "top-r:r=2"},
        "audit": {"loaded": nothing, "text": "a b"},
        "cache_bytes": {"model": model, "length": 5},
        "cache_policy": {"spec": "h2o:budget=4"},
        "check": {"mech": "uniform", "laws": ["hidden_keys_get_no_weight"]},
        "compact": {"source": trace, "keys": 2},
        "convert": {"model": small_model(), "mech": "abc-random:slots=2"},
        "distill": {"model": model, "converted": model, "texts": ["a b"]},
        "effective_attention": {"layer": trace[0]},
        "effective_from_output": {"layer": trace[0]},
        "evaluate": {"model": nothing, "config": al.EvaluateConfig(tasks=("loss",))},
        "evicting": {"model": model, "policy": al.KVPolicy(budget=4)},
        "explore": {"what": trace},
        "faithfulness": {"model": model, "texts": [{"input_ids": ids}]},
        "generate": {"loaded": nothing, "text": "a"},
        "judge": {"model": nothing, "config": al.JudgeConfig(policies=("h2o",))},
        "guide": {"model": model, "guidance": al.Guidance(fraction=0.5)},
        "guide_trainer": {"trainer": None, "guidance": al.Guidance(fraction=0.5)},
        "held_bytes": {"cache": DynamicCache()},
        "initialise_control": {
            "model": al.convert(small_model(), "abc-hybrid:slots=2,control=key"),
            "texts": ["a b"],
            "tokenizer": lambda text, **_: {"input_ids": [1, 2, 3, 4]},
        },
        "is_converted": {"model": model},
        "load_model": {"path_or_hub_name": "nowhere"},
        "mechanism": {"spec": "softmax"},
        "pattern_audit": {"trace": trace, "input_ids": ids},
        "plan_conversion": {"model": model, "texts": ["a b"], "tokenizer": None, "budget": 0.25},
        "read": {"trace": trace, "reading": "standard"},
        "read_effective": {"model": model},
        "reading_names": {},
        "record": {"model": model},
        "register": {"name": "a-name-of-a-test"},
        "save_model": {"loaded": nothing, "folder": "nowhere"},
        "shipped_model": {"name": "mlm"},
        "spec_of": {"mech": al.Softmax()},
        "swap": {"model": model, "mech": "softmax"},
        "swap_plan": {"model": model, "plan": al.Plan({0: "softmax"})},
        "watch": {"model": model},
    }


PARAMETERS = [
    (name, parameter)
    for name in al.__all__
    if name not in RECORDS | WITHOUT_ARGUMENTS
    for parameter, kind in inspect.signature(getattr(al, name)).parameters.items()
    if kind.kind is not inspect.Parameter.VAR_KEYWORD
]


def attempt(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Call it, and enter what it returns if that is a context."""
    result = function(**arguments)
    if isinstance(result, contextlib.AbstractContextManager) and not isinstance(result, torch.nn.Module):
        with result:
            pass


NUMBERS = [
    (cls, parameter, kind)
    for cls in (*(getattr(al, name) for name in al.__all__ if name not in RECORDS), Recipe, Schedule, Settings)
    if inspect.isclass(cls) and cls not in (al.AttentionCall, al.Mechanism, al.Trace)
    for parameter, declared in inspect.signature(cls).parameters.items()
    if (kind := str(declared.annotation).split(" | ")[0]) in ("int", "float")
]


def wrong_endings() -> Iterator[str]:
    """Calls that end in another error, or in one without a message."""
    right = right_arguments()
    for name, parameter in PARAMETERS:
        for wrong in WRONG:
            ending = ""
            try:
                attempt(getattr(al, name), right.get(name, {}) | {parameter: wrong})
            except (ValueError, TypeError) as error:
                ending = "" if str(error) else "no message"
            except Exception as error:
                missing_file = name == "load_model" and isinstance(error, OSError)
                ending = "" if missing_file else repr(error)
            if ending:
                yield f"{name}({parameter}={wrong!r}): {ending}"


def accepted_numbers() -> Iterator[str]:
    """Settings that take what is no number of their kind."""
    for cls, parameter, kind in NUMBERS:
        sizes = {"layers": 2, "key_value_heads": 2, "head_size": 4}
        needed = {"KVPolicy": {"budget": 4}, "Settings": {"steps": 10}, "PlannedFor": sizes}.get(cls.__name__, {})
        for wrong in NO_INT if kind == "int" else NO_FLOAT:
            with contextlib.suppress(ValueError, TypeError):
                cls(**needed | {parameter: wrong})
                yield f"{cls.__name__}({parameter}={wrong!r}) is accepted"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for line in (*wrong_endings(), *accepted_numbers()):
        print(line)
