"""Families of transformers whose modules still have the code of its first BERT and BART."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from attnlab.adapters.attend import attend

__all__ = ["bart", "bert"]


def bert(*, always_weights: bool) -> dict[str, Callable[..., Any]]:
    """Linear maps ``query``, ``key`` and ``value``; some modules return W always, others only when they are asked."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        output_attentions: bool = False,
        encoder_hidden_states: Tensor | None = None,
        past_key_values: Any = None,
        sinusoidal_pos: Tensor | None = None,
        **_: Any,
    ) -> tuple[Any, ...]:
        cross = encoder_hidden_states is not None
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states

        def heads(t: Tensor) -> Tensor:
            return t.unflatten(-1, (-1, self.attention_head_size)).transpose(1, 2)

        q = heads(self.query(hidden_states))

        def keys_and_values() -> tuple[Tensor, Tensor]:
            nonlocal q
            k, v = heads(self.key(source)), heads(self.value(source))
            if sinusoidal_pos is None or cross:
                return k, v
            # RoFormer turns its queries and keys, and its values if it is told to.
            q, k, *values = self.apply_rotary_position_embeddings(
                sinusoidal_pos, q, k, v if self.rotary_value else None
            )
            return k, (*values, v)[0]

        k, v = _with_past(self, past_key_values, keys_and_values, cross=cross)
        decoder = bool(getattr(self, "is_decoder", False))
        out, weights = attend(
            self,
            q,
            k,
            v,
            attention_mask,
            scaling=self.attention_head_size**-0.5,
            dropout=self.dropout,
            is_causal=decoder and not cross,
        )
        if always_weights:
            return out.flatten(2), weights
        return out.flatten(2), *((weights,) if output_attentions else ()), *((past_key_values,) if decoder else ())

    return {"forward": forward}


def bart() -> dict[str, Callable[..., Any]]:
    """XGLM, MVP and TrOCR: linear maps ``q_proj``, ``k_proj`` and ``v_proj``, over another sequence in some modules."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        attn_prompt: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if attn_prompt is not None:
            raise ValueError(
                "MVP's prompts are keys of no token, which no attnlab mechanism can honour; make the model from a "
                "config with use_prompt=False"
            )
        cross = key_value_states is not None
        source = hidden_states if key_value_states is None else key_value_states

        def heads(t: Tensor) -> Tensor:
            return t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        k, v = _with_past(
            self, past_key_values, lambda: (heads(self.k_proj(source)), heads(self.v_proj(source))), cross=cross
        )
        out, weights = attend(
            self,
            heads(self.q_proj(hidden_states)),
            k,
            v,
            attention_mask,
            scaling=self.scaling,
            dropout=self.dropout,
            is_causal=bool(self.is_decoder) and not cross,
        )
        return self.out_proj(out.flatten(2)), weights

    return {"forward": forward}


def _with_past(
    module: Any, cache: Any, make: Callable[[], tuple[Tensor, Tensor]], *, cross: bool
) -> tuple[Tensor, Tensor]:
    """Keys and values with those of the tokens before; those of another sequence are made once."""
    if cache is None:
        return make()
    both = hasattr(cache, "cross_attention_cache")
    past = (cache.cross_attention_cache if cross else cache.self_attention_cache) if both else cache
    if cross and both and cache.is_updated.get(module.layer_idx):
        layer = past.layers[module.layer_idx]
        return layer.keys, layer.values
    k, v = past.update(*make(), module.layer_idx)
    if cross and both:
        cache.is_updated[module.layer_idx] = True
    return k, v
