"""Families of transformers whose modules attend by code of their own instead of transformers' AttentionInterface.

While such a module is inside a context, or converted, its class is a subclass of its own class. The subclass makes q, k
and v as the model does and then calls ``attend``, which is what the interface is to other families. A family is one
function in ``FAMILIES``: it returns the methods that take the place of the class's own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout as drop

from attnlab.attention import repeat_groups
from attnlab.trace import Kind

__all__ = ["FAMILIES", "Family", "family_of", "lead_through_interface", "own_attention", "restore_class"]

# The attribute of a subclass that names the class it stands for.
BASE = "attnlab_base"
PREFIX = "attnlab|"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    dropout: nn.Dropout | None = None,
    implementation: str = "eager",
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """(the heads' outputs as (b, q, h, e), W or None): by contexts and conversions, or as the model itself."""
    from attnlab.adapters.attention_function import function_in_place_of

    p = dropout.p if dropout is not None and module.training else 0.0
    return function_in_place_of(implementation)(module, query, key, value, mask, dropout=p, **options)


def own_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """What the model itself computes: softmax in float32 or wider, hidden pairs at the least finite number."""
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_groups(key, groups), repeat_groups(value, groups)
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ key.to(wide).mT * scaling
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(wide).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    weights = drop(scores.softmax(-1).to(value.dtype), p=dropout)
    return (weights @ value).transpose(1, 2).contiguous(), weights


# The methods of each family


def _mpnet() -> dict[str, Callable[..., Any]]:
    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        output_attentions: bool = False,
        **_: Any,
    ) -> tuple[Tensor | None, ...]:
        shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
        q, k, v = (linear(hidden_states).view(shape).transpose(1, 2) for linear in (self.q, self.k, self.v))
        out, weights = attend(
            self,
            q,
            k,
            v,
            attention_mask,
            scaling=self.attention_head_size**-0.5,
            position_bias=position_bias,
            dropout=self.dropout,
            is_causal=False,
        )
        out = self.o(out.flatten(2))
        return (out, weights) if output_attentions else (out,)

    return {"forward": forward}


def _deberta_v2() -> dict[str, Callable[..., Any]]:
    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor,
        output_attentions: bool = False,
        query_states: Tensor | None = None,
        relative_pos: Tensor | None = None,
        rel_embeddings: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        heads = self.num_attention_heads
        sources = (hidden_states if query_states is None else query_states, hidden_states, hidden_states)
        linears = (self.query_proj, self.key_proj, self.value_proj)
        # The model's own shape, (batch * heads, length, width), which its position bias is made from.
        q, k, v = (self.transpose_for_scores(linear(t), heads) for linear, t in zip(linears, sources, strict=True))
        terms = 1 + sum(kind in self.pos_att_type for kind in ("c2p", "p2c"))
        bias: Any = None
        if self.relative_attention:
            embeddings = self.pos_dropout(rel_embeddings)
            bias = self.disentangled_attention_bias(q, k, relative_pos, embeddings, terms)
        query, key, value = (t.unflatten(0, (-1, heads)) for t in (q, k, v))
        out, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask.bool(),
            scaling=(q.shape[-1] * terms) ** -0.5,
            position_bias=bias.unflatten(0, (-1, heads)) if isinstance(bias, Tensor) else None,
            dropout=self.dropout,
            is_causal=False,
        )
        return out.flatten(2), weights if output_attentions else None

    return {"forward": forward}


def _gptj() -> dict[str, Callable[..., Any]]:
    def _attn(
        self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        out, weights = attend(
            self, query, key, value, attention_mask, scaling=1 / self.scale_attn, dropout=self.attn_dropout
        )
        return out.transpose(1, 2), weights

    return {"_attn": _attn}


def _gpt_neo() -> dict[str, Callable[..., Any]]:
    def _attn(
        self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        # The mask covers all tokens, the keys perhaps not: a cache may have evicted some.
        n_q, n_k = query.shape[2], key.shape[2] if attention_mask is None else attention_mask.shape[-1]
        if self.attention_type == "local" or attention_mask is None:
            mask = self.bias[:, :, n_k - n_q : n_k, :n_k]
            if attention_mask is not None:
                attention_mask = attention_mask.masked_fill(~mask, torch.finfo(attention_mask.dtype).min)
            else:
                attention_mask = mask
        out, weights = attend(self, query, key, value, attention_mask, scaling=1.0, dropout=self.attn_dropout)
        return out.transpose(1, 2), weights

    return {"_attn": _attn}


def _falcon() -> dict[str, Callable[..., Any]]:
    def forward(
        self: Any,
        hidden_states: Tensor,
        alibi: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None = None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = (t.transpose(1, 2) for t in self._split_heads(self.query_key_value(hidden_states)))
        if alibi is None:
            assert position_embeddings is not None
            rotate = getattr(self, BASE).forward.__globals__["apply_rotary_pos_emb"]
            q, k = rotate(q, k, *position_embeddings)
        if layer_past is not None:
            k, v = layer_past.update(k, v, self.layer_idx)
        implementation = self.config._attn_implementation.removeprefix(PREFIX)
        position_bias = None
        if alibi is not None and (implementation != "sdpa" or output_attentions):
            # The mask holds the bias already; the eager code of transformers adds it once more.
            b, h, n_q, _ = q.shape
            position_bias = alibi.view(b, h, 1, -1).expand(b, h, n_q, -1) / math.sqrt(self.head_dim)
        # Without ALiBi the model applies no dropout.
        out, weights = attend(
            self,
            q,
            k,
            v,
            attention_mask,
            scaling=self.inv_norm_factor,
            position_bias=position_bias,
            dropout=None if alibi is None else self.attention_dropout,
            implementation=implementation,
        )
        return self.dense(out.flatten(2)), weights

    return {"forward": forward}


@dataclass(frozen=True)
class Family:
    """A class of transformers by its name: how its methods are led through the interface, and the kind of its sites."""

    methods: Callable[[], dict[str, Callable[..., Any]]]
    kind: Kind
    # A module of another family may have the same class name.
    module: str


FAMILIES = {
    "MPNetSelfAttention": Family(_mpnet, "encoder", "transformers.models.mpnet"),
    "DisentangledSelfAttention": Family(_deberta_v2, "encoder", "transformers.models.deberta_v2"),
    "GPTJAttention": Family(_gptj, "decoder", "transformers.models.gptj"),
    "GPTNeoSelfAttention": Family(_gpt_neo, "decoder", "transformers.models.gpt_neo"),
    "FalconAttention": Family(_falcon, "decoder", "transformers.models.falcon"),
}


def family_of(module: nn.Module) -> Family | None:
    """The family of a module; None where it attends through the interface, or by code that is not known here."""
    own = getattr(type(module), BASE, type(module))
    family = FAMILIES.get(own.__name__)
    return family if family is not None and own.__module__.startswith(family.module) else None


def lead_through_interface(module: nn.Module) -> None:
    """Give a module of such a family the class that attends by ``attend``; others stay as they are."""
    if family_of(module) is not None and not hasattr(type(module), BASE):
        own: Any = type(module)
        module.__class__ = _subclass(own)


def restore_class(module: nn.Module) -> None:
    """Undo ``lead_through_interface``."""
    module.__class__ = getattr(type(module), BASE, type(module))


@functools.cache
def _subclass(own: Any) -> Any:
    methods = FAMILIES[own.__name__].methods()
    return type(own.__name__, (own,), {**methods, BASE: own, "__module__": own.__module__})
