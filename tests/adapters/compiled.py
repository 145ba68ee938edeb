"""Swapped and converted models with torch.compile and without: ``python -m tests.adapters.compiled swapped``.

A program of its own, since torch.compile cannot read through the shape checks that run under pytest.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

if sys.argv[1:] == ["whole-by-kernels"] and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from attnlab.adapters import Plan, adapter_of, convert, swap
from attnlab.adapters.distillation import Distillation, teach
from attnlab.adapters.distillation.student import fast_layers
from attnlab.adapters.whole_layers import FEW
from attnlab.mechanisms import _device
from tests.adapters.zoo import DECODERS, build, inputs, padding
from tests.tolerance import RELATIVE

TOLERANCE = 1e-4
SWAPPED = ("softmax", "top-r:r=3", "window:r=4", "kernel:elu", "value-aware:r=1", "value-aware:r=d+1")
CONVERTED = ("abc-mlp:slots=3", "abc-window", "kernel:elu", "rfa", "top-r:r=3")


def logits_and_gradients(run: Callable[..., Any], model: nn.Module, given: dict[str, Tensor]) -> list[Tensor]:
    """The logits, and the gradient of the mean of their squares by every parameter that has one."""
    model.zero_grad()
    logits = run(**given).logits
    logits.square().mean().backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_compiled_equals_eager(model: nn.Module, given: dict[str, Tensor]) -> None:
    expected = logits_and_gradients(model, model, given)
    # The graphs are made and differentiated as for the compiler proper, and run without it: that would take minutes.
    actual = logits_and_gradients(torch.compile(model, backend="aot_eager"), model, given)
    torch.compiler.reset()
    assert len(actual) == len(expected) > 1
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)


def swapped() -> None:
    for name in ("llama", "bert"):
        for spec in SWAPPED:
            model = build(name, implementation="sdpa")
            with swap(model, spec):
                assert_compiled_equals_eager(model, inputs(model, padding("right")))
            print(name, spec)


def converted() -> None:
    for spec in CONVERTED:
        model = convert(build("llama", implementation="sdpa"), spec)
        assert_compiled_equals_eager(model, inputs(model, padding("right")))
        print("llama", spec)


def before_and_after() -> None:
    """Compiled code of the model's own attention is not used inside a swap, nor that of the swap after it."""
    model = build("llama", implementation="sdpa")
    other = copy.deepcopy(model)
    given = inputs(model, padding("right"))
    compiled = torch.compile(model, backend="aot_eager")
    own = other(**given).logits
    with swap(other, "window:r=1"):
        replaced = other(**given).logits
    assert (own - replaced).abs().max() > 10 * TOLERANCE
    torch.testing.assert_close(compiled(**given).logits, own, rtol=0, atol=TOLERANCE)
    with swap(model, "window:r=1"):
        torch.testing.assert_close(compiled(**given).logits, replaced, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(compiled(**given).logits, own, rtol=0, atol=TOLERANCE)


def decoded() -> None:
    """Steps of a compiled model with bounded memories are those without; after three nothing is compiled any more."""
    import decoding_step
    from torch._dynamo.utils import counters

    select = "abc-select:slots=4,window=8,sinks=1,block=4"
    for spec in (select, "abc-hybrid:slots=4,window=8,sinks=1,block=4", f"per-group:groups=softmax/{select}"):
        model = convert(decoding_step.tiny_model(), spec.replace(",", ";") if spec.startswith("per") else spec)
        run = decoding_step.compiled(model, "aot_eager")
        counters.clear()
        with torch.no_grad():
            eager, _ = decoding_step.bounded_step(model, 2, 40)
            step, _ = decoding_step.bounded_step(model, 2, 40, run)
            for i in range(8):
                torch.testing.assert_close(step(), eager(), rtol=0, atol=TOLERANCE)
                if i == decoding_step.COMPILING - 1:
                    made = counters["stats"]["unique_graphs"]
        assert counters["stats"]["unique_graphs"] == made > 0
        print("llama", spec)


def full_caches() -> None:
    """The ways in which the benchmark's softmax reads a full cache give what transformers' gives."""
    import decoding_step

    model = decoding_step.tiny_model()
    with torch.no_grad():
        cache = decoding_step.full_cache(model, 2, 40)
        expected = decoding_step.softmax_step(model, cache, masked=True)()
        for way in decoding_step.BEST:
            with decoding_step.attending(model, way):
                for run in (model, decoding_step.compiled(model, "aot_eager")):
                    out = decoding_step.softmax_step(run, cache, masked=False)()
                    torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCE)


SELECT, WINDOW = "abc-select:slots=4,window=8,sinks=1,block=4", "abc-hybrid:slots=0,window=8,sinks=1,block=4"
# Of one layer: families with two key/value heads attend by several mechanisms too.
WHOLE = (SELECT, WINDOW, f"per-group:groups=softmax/{SELECT.replace(',', ';')}")
# Of several blocks and segments, with the kernels that take them.
WIDE_HEADS = LlamaConfig(
    vocab_size=67, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=37, initializer_range=0.3,
)  # fmt: skip
BY_KERNELS = {
    "abc-select:slots=9,window=32,sinks=2,block=16": "select",
    "abc-hybrid:slots=9,window=32,sinks=2,block=16": "hybrid",
    "per-group:groups=softmax/abc-select:slots=9;window=32;sinks=2;block=16": "select",
}


def whole() -> None:
    """Layers that are compiled whole give what they give uncompiled, in every family, and are as before afterwards.

    Without padding Llama's layers are one graph without a break, whichever mechanism they attend by.
    """
    from torch._dynamo.utils import counters

    torch.compile = functools.partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    handed = set()
    for name in DECODERS:
        for spec in WHOLE if name == "llama" else (SELECT,):
            try:
                model = convert(build(name, implementation="sdpa"), spec)
            except ValueError as refusal:
                print(name, spec, "is refused:", refusal)
                continue
            for mask in (None, padding("right")):
                given = inputs(model, mask, length=11)
                expected = logits_and_gradients(model, model, given)
                torch.compiler.reset()
                counters.clear()
                with fast_layers(model, compile=True):
                    if any("forward" in site.module.__dict__ for site in adapter_of(model).sites()):
                        handed.add(name)
                    actual = logits_and_gradients(model, model, given)
                for one, other in zip(actual, expected, strict=True):
                    torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)
                if name == "llama" and mask is None:
                    assert not counters["graph_break"], counters["graph_break"]
                for one, other in zip(logits_and_gradients(model, model, given), expected, strict=True):
                    torch.testing.assert_close(one, other, rtol=0, atol=0)
            print(name, spec)
    print(len(handed), "families hand their inputs on")
    assert len(handed) > len(DECODERS) // 3


def whole_by_kernels() -> None:
    """A Llama whose layers are compiled whole attends by kernels in one graph a layer, and learns what it does eagerly.

    On a CPU the kernels are interpreted.
    """
    from torch._dynamo.utils import counters

    from attnlab.mechanisms._bounded import hybrid_kernels, selected

    for module in (selected, hybrid_kernels):
        module.kernels_take = lambda _: _device.kernels_may_run()  # type: ignore[attr-defined]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = torch.bfloat16 if device == "cuda" else torch.float32
    torch.compile = functools.partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    for spec, used in BY_KERNELS.items():
        torch.manual_seed(7)
        model = convert(LlamaForCausalLM(WIDE_HEADS).to(device), spec)
        given = {"input_ids": torch.randint(3, 60, (2, 70), device=device)}
        torch.compiler.reset()
        counters.clear()
        with torch.autocast(device, kind, enabled=device == "cuda"):
            with fast_layers(model):
                expected = logits_and_gradients(model, model, given)
            with fast_layers(model, compile=True), torch.profiler.profile() as profile:
                actual = logits_and_gradients(model, model, given)
        operators = {event.key for event in profile.key_averages()}
        assert {f"attnlab::{used}_forward", f"attnlab::{used}_backward"} <= operators, operators
        assert not counters["graph_break"], counters["graph_break"]
        for one, other in zip(actual, expected, strict=True):
            assert (one - other).norm() <= RELATIVE[kind] * other.norm()
        print(spec)


def planned() -> None:
    """Layers of few mechanisms are compiled whole, once for each; those of many share the graphs around attention."""
    from torch._dynamo.utils import counters

    torch.compile = functools.partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    graphs = {}
    for mechanisms in (1, FEW, 6, 9):
        layers = {n: f"abc-select:slots={3 + n % mechanisms},window=8,sinks=1,block=4" for n in range(9)}
        llama = LlamaForCausalLM(LlamaConfig(**{**WIDE_HEADS.to_dict(), "num_hidden_layers": len(layers)}))
        model = convert(llama, Plan(layers))
        given = {"input_ids": torch.randint(3, 60, (2, 19))}
        expected = logits_and_gradients(model, model, given)
        torch.compiler.reset()
        counters.clear()
        with fast_layers(model, compile=True):
            actual = logits_and_gradients(model, model, given)
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)
        graphs[mechanisms] = counters["stats"]["unique_graphs"]
    print(graphs)
    assert (graphs[1], graphs[FEW]) == (1, FEW)
    assert graphs[6] == graphs[9] < 6


class _Rows:
    """Rows of two lengths."""

    def batch(self, step: int) -> dict[str, Tensor]:
        length = 8 if step < 3 else 16
        return {"input_ids": torch.randint(3, 60, (2, length), generator=torch.Generator().manual_seed(step))}


def distilled() -> None:
    """The losses of every stage with compiled layers, also recomputed ones, are those without."""
    whole = torch.compile
    torch.compile = functools.partial(whole, backend="aot_eager")  # type: ignore[assignment]
    teacher = build("llama", implementation="sdpa").eval()
    for change in ({}, {"checkpointing": True}, {"lora": 2}):
        losses = []
        for compiled in (False, True):
            student = convert(copy.deepcopy(teacher), "abc-mlp:slots=3")
            steps = Distillation(heads_steps=2, hidden_steps=2, logits_steps=2, every=1, compile=compiled, **change)
            losses.append([progress.loss for progress in teach(teacher, student, _Rows(), steps)])
        torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-3, atol=TOLERANCE)
        print(change, losses[1])


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
    kinds = {"swapped": swapped, "converted": converted, "before-and-after": before_and_after, "distilled": distilled,
             "decoded": decoded, "full-caches": full_caches, "whole": whole,
             "whole-by-kernels": whole_by_kernels, "planned": planned}  # fmt: skip
    kinds[sys.argv[1]]()
    print("the same")
