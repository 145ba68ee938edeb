"""The figures of docs/concepts, drawn from attnlab's own numbers: ``python -m tools.concept_figures``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import attnlab as al
from attnlab.patterns import dense, pattern_targets
from attnlab.provenance import write_atomic
from papers.common.pictures import COLOURS, Line, Matrix, Panel, line_panels, matrices

OUT = Path(__file__).resolve().parent.parent / "docs" / "images"
TEXT = "The river was frozen, so the old ferry stayed in the harbour. The captain of the ferry slept below its deck. "


def matrix(title: str, values: Tensor, rows: list[str] | None = None, columns: list[str] | None = None) -> Matrix:
    """A matrix with or without words at its sides."""
    return Matrix(title, values.tolist(), rows or [""] * values.shape[0], columns or [""] * values.shape[1])


def one_call(keys: int = 14, width: int = 4) -> al.AttentionCall:
    """A causal call of one head, in which neighbours are alike."""
    torch.manual_seed(3)
    x = torch.randn(keys, width).cumsum(0)
    q, k, v = 0.3 * x, x + 0.3 * torch.randn(keys, width), torch.randn(keys, width)
    return al.AttentionCall(q[None, None], k[None, None], v[None, None], x=x[None], causal=True)


def one_idea() -> str:
    """W of one call under five mechanisms."""
    call = one_call()
    specs = ("softmax", "top-r:r=3", "window:r=4", "kernel:elu", "abc-random:slots=4")
    return matrices([matrix(spec, al.mechanism(spec).weights(call)[0, 0]) for spec in specs], cell=11)


@torch.no_grad()
def effective() -> str:
    """W of one head of the shipped model, and what of it reaches the output."""
    model, tokenizer, _ = al.shipped_model()
    inputs = tokenizer(TEXT * 2, return_tensors="pt")
    with al.record(model) as trace:
        model(**inputs)
    kept = al.effective_attention(trace[2])
    head = int(kept.removed[0].argmax())
    standard, rest = trace[2].weights()[0, head], kept.weights[0, head]
    shown = 26
    return matrices(
        [
            matrix(f"W, layer 2 head {head}", standard[:shown, :shown].sqrt()),
            matrix("|effective attention|", rest[:shown, :shown].abs().sqrt()),
        ],
        cell=11,
    )


def bounded() -> str:
    """Bytes of a cache against the tokens read, with softmax and with a bounded memory; heads as in SmolLM2."""
    heads: dict[str, Any] = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
    model = LlamaForCausalLM(LlamaConfig(hidden_size=576, intermediate_size=8, vocab_size=8, **heads)).bfloat16().eval()
    spec = "abc-select:slots=56,window=64,sinks=4"
    lengths = [1, *range(64, 2049, 64)]
    lines = []
    for name, colour, each in (("softmax", COLOURS[0], model), (spec, COLOURS[1], al.convert(model, spec, copy=True))):
        lines.append(Line(lengths, [al.cache_bytes(each, n) / 1e6 for n in lengths], colour, name))
    return line_panels([Panel("cache of one sequence, MB", lines, x_label="tokens read", low=0)])


def patterns() -> str:
    """Targets of guidance over a short sentence."""
    words = ["[CLS]", "the", "cat", "saw", "the", "dog", ".", "[SEP]"]
    ids = torch.tensor([[1, 5, 6, 7, 5, 8, 9, 2]])
    names = ("next", "prev", "first", "same")
    targets = {name: dense(pattern_targets(name, ids), keys=len(words))[0, 0] for name in names}
    return matrices([matrix(name, target, words, words) for name, target in targets.items()], cell=14)


FIGURES = {
    "concept-one-idea.svg": one_idea,
    "concept-effective.svg": effective,
    "concept-bounded.svg": bounded,
    "concept-patterns.svg": patterns,
}


def main() -> int:
    """Writes them all."""
    for name, draw in FIGURES.items():
        write_atomic(OUT / name, draw())
        print(OUT / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
