"""L_AG: the squared error between guided heads and their patterns, without a dense target."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlab.attention import AttentionCall, pair_mask
from attnlab.guidance.settings import Guidance
from attnlab.loss import Loss
from attnlab.mechanisms.softmax import Softmax
from attnlab.patterns import SpecialTokens, Targets, overlap, pattern_targets
from attnlab.shapes import Float, Int, Shaped
from attnlab.trace import Kind, LayerTrace

__all__ = ["guidance_by_head", "guidance_loss", "guided_weights", "layer_targets", "squared_error"]


def squared_error(W: Float[Tensor, "b h q k"], targets: Targets) -> Float[Tensor, "b h q"]:
    """sum_j (w_ij - t_ij)^2 = sum_j w_ij^2 - 2 sum_j t_ij w_ij + sum_j t_ij^2; 0 in a row without a target."""
    W = W.float() if W.dtype in (torch.float16, torch.bfloat16) else W
    error = W.square().sum(-1) - 2 * overlap(W, targets) + targets.squares.to(W)
    return error.masked_fill(~targets.rows, 0)


def guidance_loss(
    trace: Iterable[LayerTrace],
    guidance: Guidance,
    input_ids: Int[Tensor, "b k"],
    *,
    attention_mask: Shaped[Tensor, "b k"] | None = None,
    queries: Int[Tensor, "b q"] | None = None,
    query_mask: Shaped[Tensor, "b q"] | None = None,
    tokens: SpecialTokens | None = None,
) -> Loss:
    """L_AG of a recorded forward pass as (total, count): the loss without alpha is total / count.

    total sums over layers and pattern groups the mean over the group's heads of all rows' squared errors. count is the
    number of visible (query, key) cells, n x n a text ("paper"), or of visible queries ("row"). W is taken before
    dropout and of guided heads only. A batch of padding only gives (0, 0).
    """
    layers = chosen_layers(trace, guidance)
    attention_mask = layers[0].call.key_visible if attention_mask is None else attention_mask
    total = layers[0].call.q.new_zeros((), dtype=torch.float32)
    drawn: dict[tuple[object, ...], Targets] = {}
    for layer, assigned in zip(layers, assignments(layers, guidance), strict=True):
        call = layer.call
        for name, heads in assigned.items():
            # Layers with the same masks share their targets.
            key = (name, call.causal, call.offset, id(call.mask), id(call.bias))
            if key not in drawn or heads_see_differently(call):
                own = _of_heads(call, heads)
                texts = {"attention_mask": attention_mask, "queries": queries, "query_mask": query_mask}
                drawn[key] = layer_targets(name, own, input_ids, **texts, tokens=tokens)
                refuse_hidden_pattern(name, drawn[key], input_ids, **texts, tokens=tokens)
            errors = squared_error(guided_weights(layer, heads), drawn[key])
            total = total + errors.sum() / len(heads)
    return Loss(total, cells(guidance, input_ids, attention_mask, queries, query_mask))


@torch.no_grad()
def guidance_by_head(
    trace: Iterable[LayerTrace],
    guidance: Guidance,
    input_ids: Int[Tensor, "b k"],
    *,
    attention_mask: Shaped[Tensor, "b k"] | None = None,
    tokens: SpecialTokens | None = None,
) -> Float[Tensor, "l h"]:
    """Each self-attention head's mean squared error over the rows that have a target; NaN where a head has none."""
    by_layer, layers = [], chosen_layers(trace, guidance)
    for layer, assigned in zip(layers, assignments(layers, guidance), strict=True):
        errors = torch.full((layer.call.q.shape[1],), torch.nan, device=input_ids.device)
        for name, heads in assigned.items():
            own = _of_heads(layer.call, heads)
            targets = layer_targets(name, own, input_ids, attention_mask=attention_mask, tokens=tokens)
            total = squared_error(guided_weights(layer, heads), targets).sum((0, 2))
            errors[heads.start : heads.stop] = total / targets.rows.expand(-1, len(heads), -1).sum((0, 2))
        by_layer.append(errors)
    return torch.stack(by_layer)


def guided_weights(layer: LayerTrace, heads: range) -> Float[Tensor, "b s q k"]:
    """W of these heads; for softmax the others are not computed."""
    if type(layer.mechanism) is Softmax:
        return layer.mechanism.weights(_of_heads(layer.call, heads))
    return layer.weights()[:, heads.start : heads.stop]


def layer_targets(
    name: str,
    call: AttentionCall,
    input_ids: Int[Tensor, "b k"],
    *,
    attention_mask: Shaped[Tensor, "b k"] | None = None,
    queries: Int[Tensor, "b q"] | None = None,
    **texts: Any,
) -> Targets:
    """The pattern over a call's keys, cut to what the call lets each query see: by flags, a mask, or one inside a bias.

    ``texts`` are those of ``pattern_targets``: query_mask and tokens.
    """
    n_q, n_k = call.sizes[2:]
    if input_ids.shape[1] != n_k:
        raise ValueError(f"input_ids must name the {n_k} keys of this layer, got {input_ids.shape[1]} ids a text")
    if queries is None and n_q + call.offset != n_k:
        raise ValueError(f"{n_q} queries over {n_k} keys is cross-attention: pass the queries' ids as queries=")
    return pattern_targets(
        name,
        input_ids,
        attention_mask=call.key_visible if attention_mask is None else attention_mask,
        causal=call.causal,
        offset=call.offset,
        mask=pair_mask(call),
        queries=queries,
        **texts,
    )


def refuse_hidden_pattern(name: str, targets: Targets, input_ids: Int[Tensor, "b k"], **texts: Any) -> None:
    """A ValueError where the attention hides every key that the pattern names, as a causal one hides Next's.

    ``targets`` are those of ``layer_targets``; ``texts`` are those of ``pattern_targets``. A text without the pattern's
    tokens is no reason to refuse it.
    """
    if not bool(targets.followed.any()) and bool(pattern_targets(name, input_ids, **texts).followed.any()):
        raise ValueError(
            f"no head of this model can follow {name!r}: its attention hides the tokens that the pattern names, as a "
            "causal model's hides all that follow; guide it to other patterns"
        )


def heads_see_differently(call: AttentionCall) -> bool:
    """Whether heads may have masks of their own, in a mask or inside a bias."""
    return any(t is not None and t.shape[1] > 1 for t in (call.mask, call.bias))


def cells(
    guidance: Guidance,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    queries: Tensor | None,
    query_mask: Tensor | None,
) -> Tensor:
    """What L_AG is averaged over, known without running the model."""
    keys = _lengths(input_ids, attention_mask)
    rows = keys if queries is None else _lengths(queries, query_mask)
    return (rows * keys).sum() if guidance.reduction == "paper" else rows.sum()


def chosen_layers(trace: Iterable[LayerTrace], guidance: Guidance) -> list[LayerTrace]:
    """The layers that the settings guide; an error where there are none, or two kinds of self-attention."""
    layers = list(trace)
    kind = chosen_kind([layer.kind for layer in layers], guidance)
    refuse_missing([x.layer for x in layers if x.kind == kind], guidance, kind)
    return [x for x in layers if x.kind == kind and (guidance.layers is None or x.layer in guidance.layers)]


def assignments(layers: Sequence[LayerTrace], guidance: Guidance) -> list[dict[str, range]]:
    """The heads of each pattern in each of these layers, which are all that are guided."""
    numbers = sorted({x.layer for x in layers})
    assigned = [guidance.assign(x.call.q.shape[1], layer=numbers.index(x.layer), n_layers=len(numbers)) for x in layers]
    refuse_unguided(assigned, guidance)
    return assigned


def refuse_unguided(assigned: Iterable[Iterable[str]], guidance: Guidance) -> None:
    """A ValueError where a named pattern is guided in none of the layers, whose numbers of heads may differ."""
    missing = set(guidance.names).difference(*assigned)
    if missing:
        raise ValueError(
            f"no layer has a guided head left for {', '.join(sorted(missing))}: raise the fraction, or name fewer "
            "patterns"
        )


def guided_numbers(layers: Iterable[int], guidance: Guidance) -> tuple[int, ...]:
    """Those of the layers that the settings guide, in order."""
    return tuple(sorted(x for x in set(layers) if guidance.layers is None or x in guidance.layers))


def chosen_kind(kinds: Sequence[Kind], guidance: Guidance) -> Kind:
    """The kind of attention that is guided in a model that has these."""
    own = sorted(set(kinds) - {"cross"})
    if guidance.kind is None and len(own) > 1:
        raise ValueError("this model has an encoder and a decoder: give one Guidance for each, with kind=")
    return guidance.kind or (own[0] if own else "cross")


def refuse_missing(layers: Sequence[int], guidance: Guidance, kind: Kind) -> None:
    """A ValueError where the model has none of the layers that the settings name, or no layer of the kind."""
    missing = sorted(set(guidance.layers or ()) - set(layers))
    if missing or not layers:
        raise ValueError(f"this model has no {kind} layers {missing or ''}; those it has: {sorted(layers)}")


def _lengths(ids: Tensor, mask: Tensor | None) -> Tensor:
    return ids.new_full(ids.shape[:1], ids.shape[1]) if mask is None else mask.bool().sum(-1)


def _of_heads(call: AttentionCall, heads: range) -> AttentionCall:
    """The call of neighbouring query heads, each with the key/value head it reads."""

    def rows(t: Tensor | None) -> Tensor | None:
        return t if t is None or t.shape[1] == 1 else t[:, heads.start : heads.stop]

    def kv_heads(t: Tensor) -> Tensor:
        if call.groups == 1:
            return t[:, heads.start : heads.stop]
        return t.index_select(1, torch.tensor([head // call.groups for head in heads], device=t.device))

    return replace(
        call,
        q=call.q[:, heads.start : heads.stop],
        k=kv_heads(call.k),
        v=kv_heads(call.v),
        mask=rows(call.mask),
        bias=rows(call.bias),
    )
