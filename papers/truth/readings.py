"""Every reading of a prediction: for each head, or for the whole model, a number at each position of the input.

A head's number is the entry of its map in the row of the query, where the prediction is made. Readings of the whole
model follow the layers (rollout), all queries (gradient) or the input's embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.adapters import record, swap
from attnlab.attention import AttentionCall, visible
from attnlab.dynamics import forced_probe
from attnlab.mechanisms.softmax import Softmax
from attnlab.reading import (
    ReadingInput,
    effective_attention,
    gradient_times_attention,
    norm_based,
    rollout,
)
from attnlab.reading.effective_norm import effective_norm
from attnlab.reading.faithfulness import head_output_change
from attnlab.reading.norm_based import transformed_norms
from attnlab.registry import spec_of
from attnlab.trace import LayerTrace
from papers.truth.config import ATTENTION

__all__ = ["GRADIENTS", "MAPS", "RANDOM", "WHOLE", "Batch", "Read", "log_probability", "read_batch", "recorded_stack"]

Row = Callable[[LayerTrace], Tensor]


def value_norm(layer: LayerTrace) -> Tensor:
    """|alpha_ij v_j|: the norm-based reading before W_O."""
    return norm_based(replace(ReadingInput.of(layer), projection=None))


# Readings of a recorded layer alone, each a map; they are read in the query's row.
MAPS: dict[str, Row] = {
    ATTENTION: lambda layer: layer.weights(),
    "value norm": value_norm,
    "norm": norm_based,
    "effective": lambda layer: effective_attention(layer).weights.abs(),
    "effective norm": effective_norm,
    "leave one out": head_output_change,
}
# Readings of heads that explain the prediction: by their size, and where they speak for it.
GRADIENTS = ("gradient", "gradient, signed")
# Readings without heads.
RANDOM = "random"
WHOLE = ("rollout", "gradient, all queries", "input gradient", "lexical probe", RANDOM)


@dataclass(frozen=True, eq=False)
class Batch:
    """Inputs with one prediction each: (b, n) tokens and flags, the row and the token of the prediction."""

    inputs: dict[str, Tensor]
    query: Tensor
    answer: Tensor


@dataclass(frozen=True, eq=False)
class Read:
    """What the readings say: (b, layers, heads, n) of each head, (b, n) of the whole model; and facts (b,)."""

    heads: dict[str, Tensor]
    whole: dict[str, Tensor]
    facts: dict[str, Tensor]


def log_probability(logits: Tensor, query: Tensor, answer: Tensor) -> Tensor:
    """log p of each item's answer at its query."""
    rows = logits[torch.arange(len(query), device=logits.device), query].float()
    return rows.log_softmax(-1).gather(1, answer[:, None])[:, 0]


def read_batch(model: nn.Module, batch: Batch, *, probe: bool = False, noise: torch.Generator | None = None) -> Read:
    """All readings of a batch; the lexical probe only with ``probe``, since it takes a forward pass a position."""
    with torch.enable_grad(), _Embedded(model) as embedded, record(model, keep="all") as trace:
        logits = model(**batch.inputs).logits
        log_p = log_probability(logits, batch.query, batch.answer)
        layers = recorded_stack(trace)
        # One backward pass for the heads' outputs and the embeddings; items of a batch do not depend on each other.
        *slopes, input_slope = torch.autograd.grad(log_p.sum(), [*(layer.output for layer in layers), embedded.output])
    with torch.no_grad():
        rows = [query_row(layer, batch.query) for layer in layers]
        alone = {name: one for name, one in MAPS.items() if not name.startswith("effective")}
        heads = {name: torch.stack([one(row)[:, :, 0] for row in rows], 1) for name, one in alone.items()}
        effective, facts = _effective_rows(rows, heads[ATTENTION])
        heads |= effective
        explained = [
            gradient_times_attention(row, output_gradient=_at(slope, batch.query))[:, :, 0]
            for row, slope in zip(rows, slopes, strict=True)
        ]
        signed = torch.stack(explained, 1)
        heads |= dict(zip(GRADIENTS, (signed.abs(), signed), strict=True))
        whole = _whole_model(layers, slopes, batch)
        # The loss of the prediction, to first order, without a token's embedding.
        whole["input gradient"] = (input_slope * embedded.output).sum(-1).abs()
        whole[RANDOM] = torch.rand(input_slope.shape[:2], generator=noise).to(input_slope)
        if probe:
            whole["lexical probe"] = _lexical_probe(model, batch, layers)
        facts["log_p"] = log_p.detach()
    return Read({name: t.detach() for name, t in heads.items()}, {name: t.detach() for name, t in whole.items()}, facts)


def recorded_stack(trace: Any) -> list[LayerTrace]:
    """The layers in the order in which they ran, of an encoder-decoder those that attend from one text to the other.

    A module that ran several times is several layers.
    """
    layers = [layer for layer in trace if layer.kind == "cross"] or list(trace)
    calls = [call for layer in layers for call in trace.history((layer.kind, layer.layer))]
    return [replace(call, layer=number) for number, call in enumerate(calls)]


def query_row(layer: LayerTrace, query: Tensor) -> LayerTrace:
    """A layer with each item's query alone: every reading of it is a map with one row, at a fraction of the cost."""
    call = layer.call
    if not isinstance(layer.mechanism, Softmax):
        raise ValueError(
            f"{layer.name} attends by {spec_of(layer.mechanism)}; this benchmark reads the rows of softmax attention"
        )
    b, _, n, k = call.sizes
    seen = visible(call)
    shown = torch.ones(b, k, dtype=torch.bool, device=call.q.device)
    if seen is not None:
        of_heads = _at(seen.expand(b, -1, n, -1), query)[:, :, 0]
        shown = of_heads[:, 0]
        if bool((of_heads != shown[:, None]).any()):
            raise ValueError(f"{layer.name}: its heads see different keys, which this benchmark does not read")
    bias = None
    if call.bias is not None:
        bias = _at(call.bias.expand(b, -1, n, -1), query).masked_fill(~shown[:, None, None], 0)
    row = AttentionCall(
        _at(call.q, query), call.k, call.v, x=call.x, key_visible=shown, bias=bias, scale=call.scale
    )  # fmt: skip
    return replace(layer, call=_detached(row), output=_at(layer.output, query).detach())


def _shown(row: LayerTrace) -> Tensor:
    """The keys that the query of ``query_row`` sees."""
    assert row.call.key_visible is not None
    return row.call.key_visible


def _detached(call: AttentionCall) -> AttentionCall:
    return replace(call, q=call.q.detach(), k=call.k.detach(), v=call.v.detach())


def _at(t: Tensor, query: Tensor) -> Tensor:
    """(b, h, q, e) at each item's query: (b, h, 1, e)."""
    return t[torch.arange(len(query), device=t.device), :, query][:, :, None]


def _whole_model(layers: Sequence[LayerTrace], slopes: Sequence[Tensor], batch: Batch) -> dict[str, Tensor]:
    """Rollout of the last layer in the query's row, and gradient times attention summed over heads and queries."""
    means, summed = [], []
    for layer, slope in zip(layers, slopes, strict=True):
        means.append(layer.weights().mean(1, keepdim=True))
        summed.append(gradient_times_attention(layer, output_gradient=slope).sum((1, 2)))
    whole = {"gradient, all queries": torch.stack(summed).sum(0)}
    if layers[0].kind != "cross":
        items = torch.arange(len(batch.query), device=batch.query.device)
        whole["rollout"] = rollout(means)[-1][items, 0, batch.query]
    return whole


def _effective_rows(rows: Sequence[LayerTrace], weights: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Both effective readings, all layers decomposed at once, and facts of each item as means over heads.

    removed: the share of the squared weights that cannot reach the output; trivial: that of rows that lose nothing.
    """
    b, heads = len(weights), weights.shape[2]
    values = torch.stack([row.call.v for row in rows], 1).flatten(0, 1)
    shown = torch.stack([_shown(row) for row in rows], 1)
    made = effective_attention(weights.flatten(0, 1)[:, :, None], values, key_visible=shown.flatten(0, 1))
    effective = made.weights.view_as(weights).abs()
    norms = torch.stack([transformed_norms(row.call.v, heads, row.projection) for row in rows], 1)
    of_items = {"removed": made.removed, "trivial": made.trivial.float(), "rank": made.rank.float()}
    facts = {name: t.reshape(b, -1).mean(1) for name, t in of_items.items()}
    facts |= {"keys": shown[:, 0].sum(1).float(), "width": facts["rank"].new_full((b,), values.shape[-1])}
    return {"effective": effective, "effective norm": effective * norms.to(effective)}, facts


def _lexical_probe(model: nn.Module, batch: Batch, layers: Sequence[LayerTrace]) -> Tensor:
    """KTIW's beta: log p of the answer when the heads attend to one position alone.

    They are the heads that attend to the source, or those of the last layer of a language model.
    """
    probed: Any = "cross" if layers[0].kind == "cross" else (layers[-1].kind, layers[-1].layer)
    written = batch.inputs.get("decoder_input_ids", batch.inputs["input_ids"])
    items = torch.arange(len(written), device=written.device)
    y = torch.full_like(written, -1)
    y[items, batch.query] = batch.answer
    beta = forced_probe(
        lambda: model(**batch.inputs).logits,
        lambda spec: swap(model, spec, layers=probed),
        y,
        keys=batch.inputs["input_ids"].shape[1],
    )
    return beta[items, batch.query]


class _Embedded:
    """Inside, the first output of a model's token embedding is kept, and gradients flow to it and no further."""

    def __init__(self, model: nn.Module) -> None:
        find = getattr(model, "get_input_embeddings", None)
        self.module: nn.Module = find() if find is not None else model.tokens  # type: ignore[assignment]
        # Of an encoder-decoder it is the encoder's, which runs first.
        self.outputs: list[Tensor] = []

    @property
    def output(self) -> Tensor:
        """The embeddings of the input."""
        return self.outputs[0]

    def __enter__(self) -> _Embedded:
        def keep(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            self.outputs.append(output.detach().requires_grad_())
            return self.outputs[-1]

        self.handle = self.module.register_forward_hook(keep)
        return self

    def __exit__(self, *error: object) -> None:
        self.handle.remove()
