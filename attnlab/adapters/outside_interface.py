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
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.adapters.adopted import PREFIX
from attnlab.adapters.attend import attend, own_attention
from attnlab.adapters.masks import narrowed
from attnlab.adapters.older_families import bart, bert
from attnlab.trace import Kind

__all__ = ["FAMILIES", "Family", "family_of", "lead_through_interface", "own_attention", "restore_class"]

# The attribute of a subclass that names the class it stands for.
BASE = "attnlab_base"


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


@dataclass(frozen=True)
class _Disentangled:
    """What a DeBERTa layer attends by: q, k and v as (batch, heads, length, width), the scale and the position bias."""

    q: Tensor
    k: Tensor
    v: Tensor
    scaling: float
    bias: Tensor | None


def _deberta(parts: Callable[..., _Disentangled]) -> dict[str, Callable[..., Any]]:
    """DeBERTa of either version, whose ``parts`` are made from the layer, its inputs and its relative positions."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor,
        output_attentions: bool = False,
        query_states: Tensor | None = None,
        relative_pos: Tensor | None = None,
        rel_embeddings: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        made = parts(self, hidden_states, query_states, relative_pos, rel_embeddings)
        out, weights = attend(
            self,
            made.q,
            made.k,
            made.v,
            attention_mask.bool(),
            scaling=made.scaling,
            position_bias=made.bias,
            dropout=self.dropout,
            is_causal=False,
        )
        return out.flatten(2), weights if output_attentions else None

    return {"forward": forward}


def _of_second_version(
    layer: Any, x: Tensor, query_states: Tensor | None, relative_pos: Any, rel_embeddings: Any
) -> _Disentangled:
    heads = layer.num_attention_heads
    sources = (x if query_states is None else query_states, x, x)
    linears = (layer.query_proj, layer.key_proj, layer.value_proj)
    # The model's own shape, (batch * heads, length, width), which its position bias is made from.
    q, k, v = (layer.transpose_for_scores(linear(t), heads) for linear, t in zip(linears, sources, strict=True))
    terms = 1 + sum(kind in layer.pos_att_type for kind in ("c2p", "p2c"))
    bias: Any = None
    if layer.relative_attention:
        embeddings = layer.pos_dropout(rel_embeddings)
        bias = layer.disentangled_attention_bias(q, k, relative_pos, embeddings, terms)
    query, key, value = (t.unflatten(0, (-1, heads)) for t in (q, k, v))
    bias = bias.unflatten(0, (-1, heads)) if isinstance(bias, Tensor) else None
    return _Disentangled(query, key, value, (q.shape[-1] * terms) ** -0.5, bias)


def _of_first_version(
    layer: Any, x: Tensor, query_states: Tensor | None, relative_pos: Any, rel_embeddings: Any
) -> _Disentangled:
    if query_states is not None or layer.head_logits_proj is not None:
        raise ValueError(
            "DeBERTa's talking heads, and its enhanced mask decoder with queries of its own, cannot be said to any "
            "attnlab mechanism; swap or record another model"
        )
    split = layer.transpose_for_scores
    q, k, v = split(layer.in_proj(x)).chunk(3, dim=-1)
    q, v = q + split(layer.q_bias[None, None, :]), v + split(layer.v_bias[None, None, :])
    terms = 1 + len(layer.pos_att_type)
    scaling = (q.shape[-1] * terms) ** -0.5
    bias = None
    if layer.relative_attention and rel_embeddings is not None and relative_pos is not None:
        embeddings = layer.pos_dropout(rel_embeddings)
        # The model scales its queries first, and makes its position bias from those.
        bias = layer.disentangled_att_bias(q * scaling, k, relative_pos, embeddings, terms)
    return _Disentangled(q, k, v, scaling, bias if isinstance(bias, Tensor) else None)


def _gptj(*, divisor: str = "scale_attn", dropout: str = "attn_dropout") -> dict[str, Callable[..., Any]]:
    """GPT-J and its kin: attributes of the module are what scores are divided by, and the dropout."""

    def _attn(
        self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        scaling = 1 / getattr(self, divisor)
        out, weights = attend(self, query, key, value, attention_mask, scaling=scaling, dropout=getattr(self, dropout))
        return out.transpose(1, 2), weights

    return {"_attn": _attn}


def _openai_gpt() -> dict[str, Callable[..., Any]]:
    def _attn(
        self: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: Tensor | None = None,
        output_attentions: bool = False,
    ) -> list[Tensor | None]:
        mask = self.bias[:, :, : q.shape[2], : k.shape[3]].bool()
        if attention_mask is not None:
            mask = attention_mask.masked_fill(~mask, torch.finfo(attention_mask.dtype).min)
        scaling = v.shape[-1] ** -0.5 if self.scale else 1.0
        # Its keys come transposed.
        out, weights = attend(self, q, k.mT, v, mask, scaling=scaling, dropout=self.attn_dropout)
        return [out.transpose(1, 2), *([weights] if output_attentions else [])]

    return {"_attn": _attn}


def _gpt_neo() -> dict[str, Callable[..., Any]]:
    def _attn(
        self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        # The mask covers all tokens, the keys perhaps not: a cache may have evicted some.
        n_q, n_k = query.shape[2], key.shape[2] if attention_mask is None else attention_mask.shape[-1]
        if self.attention_type == "local" or attention_mask is None:
            mask = self.bias[:, :, n_k - n_q : n_k, :n_k]
            attention_mask = mask if attention_mask is None else narrowed(attention_mask, mask)
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


def _bloom() -> dict[str, Callable[..., Any]]:
    def forward(
        self: Any,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor,
        attention_mask: Tensor | None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = self._reshape(self.query_key_value(hidden_states))
        if layer_past is not None:
            k, v = layer_past.update(k, v, self.layer_idx)
        b, h, n_q, _ = q.shape
        out, weights = attend(
            self,
            q,
            k,
            v,
            attention_mask,
            scaling=self.inv_norm_factor,
            position_bias=alibi.view(b, h, 1, -1).expand(b, h, n_q, -1),
            dropout=self.attention_dropout,
        )
        add = getattr(self, BASE).forward.__globals__["dropout_add"]
        return add(self.dense(out.flatten(2)), residual, self.hidden_dropout, self.training), weights

    return {"forward": forward}


def _mpt() -> dict[str, Callable[..., Any]]:
    def forward(
        self: Any,
        hidden_states: Tensor,
        position_bias: Tensor | None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        shape = (*hidden_states.shape[:2], self.n_heads, self.head_dim)
        q, k, v = (t.reshape(shape).transpose(1, 2) for t in mixed.chunk(3, dim=2))
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        # The mask covers all tokens, the keys perhaps not: a cache may have evicted some.
        n_k = k.shape[2] if attention_mask is None else attention_mask.shape[-1]
        bias = None if position_bias is None else position_bias[None, :, :, -n_k:].expand(1, -1, q.shape[2], -1)
        out, weights = attend(
            self,
            q,
            k,
            v,
            # It marks what is hidden.
            None if attention_mask is None else ~attention_mask.bool(),
            scaling=self.softmax_scale,
            position_bias=bias,
            dropout=self.attn_dropout_p,
        )
        return self.out_proj(out.flatten(2)), weights

    return {"forward": forward}


@dataclass(frozen=True)
class Family:
    """How the methods of a class are led through the interface, and the kind of its sites."""

    methods: Callable[[], dict[str, Callable[..., Any]]]
    # None where it differs from module to module.
    kind: Kind | None = None


# By the model's folder in transformers and the name of the class.
FAMILIES = {
    "mpnet.MPNetSelfAttention": Family(_mpnet, "encoder"),
    "deberta.DisentangledSelfAttention": Family(partial(_deberta, _of_first_version), "encoder"),
    "deberta_v2.DisentangledSelfAttention": Family(partial(_deberta, _of_second_version), "encoder"),
    "megatron_bert.MegatronBertSelfAttention": Family(partial(bert, always_weights=True)),
    "rembert.RemBertSelfAttention": Family(partial(bert, always_weights=True)),
    "roformer.RoFormerSelfAttention": Family(partial(bert, always_weights=True)),
    "tapas.TapasSelfAttention": Family(partial(bert, always_weights=False)),
    "visual_bert.VisualBertSelfAttention": Family(partial(bert, always_weights=False)),
    "flava.FlavaSelfAttention": Family(partial(bert, always_weights=False)),
    "gptj.GPTJAttention": Family(_gptj, "decoder"),
    "codegen.CodeGenAttention": Family(_gptj, "decoder"),
    "gpt_neox_japanese.GPTNeoXJapaneseAttention": Family(
        partial(_gptj, divisor="norm_factor", dropout="attention_dropout"), "decoder"
    ),
    "gpt_neo.GPTNeoSelfAttention": Family(_gpt_neo, "decoder"),
    "openai.Attention": Family(_openai_gpt, "decoder"),
    "falcon.FalconAttention": Family(_falcon, "decoder"),
    "bloom.BloomAttention": Family(_bloom, "decoder"),
    "mpt.MptAttention": Family(_mpt, "decoder"),
    "xglm.XGLMAttention": Family(bart),
    "mvp.MvpAttention": Family(bart),
    "trocr.TrOCRAttention": Family(bart),
}


def family_of(module: nn.Module) -> Family | None:
    """The family of a module; None where it attends through the interface, or by code that is not known here."""
    return FAMILIES.get(_key(getattr(type(module), BASE, type(module))))


def _key(own: type) -> str:
    """The name of a class of transformers.models among the families."""
    folder = own.__module__.removeprefix("transformers.models.").split(".")[0]
    return f"{folder}.{own.__name__}"


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
    methods = FAMILIES[_key(own)].methods()
    return type(own.__name__, (own,), {**methods, BASE: own, "__module__": own.__module__})
