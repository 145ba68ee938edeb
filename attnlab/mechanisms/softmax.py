"""Softmax attention: the exact mechanism that the others approximate."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnlab.attention import AttentionCall, Mechanism, hide_unseen, scores, visible
from attnlab.mechanisms._sdpa import sdpa
from attnlab.registry import register
from attnlab.shapes import Bool, Float

__all__ = ["Softmax", "softmax"]


def softmax(s: Float[Tensor, "b h q k"]) -> Float[Tensor, "b h q k"]:
    """Softmax over keys in which minus infinity means hidden; a row with nothing visible is all zeros.

    >>> softmax(torch.tensor([[[[0.0, 0.0], [-torch.inf, -torch.inf]]]])).tolist()
    [[[[0.5, 0.5], [0.0, 0.0]]]]
    """
    if s.shape[-1] == 0:
        return s
    empty = (s == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(s.masked_fill(empty, 0), dim=-1).masked_fill(empty, 0)


@register("softmax")
@dataclass(frozen=True)
class Softmax(Mechanism):
    """alpha_ij = exp(<q_i, k_j>) / sum_j exp(<q_i, k_j>) (Vaswani et al., 2017); the output by torch's SDPA."""

    traces = True

    def is_exact(self, call: AttentionCall) -> bool:
        return True

    def reference(self, call: AttentionCall) -> Float[Tensor, "b h q k"]:
        return softmax(scores(call)).to(call.q.dtype)

    def forward(self, call: AttentionCall) -> Float[Tensor, "b h q e"]:
        call = _without_hidden_columns(hide_unseen(call))
        _, _, n_q, n_k = call.sizes
        if n_k == 0:
            return call.q.new_zeros(*call.q.shape[:3], call.v.shape[-1])
        plain_causal = call.causal and call.offset == 0 and n_q == n_k
        unmasked = call.key_visible is None and call.mask is None and call.bias is None
        is_causal = plain_causal and unmasked
        hides_pairs = call.causal or call.mask is not None or call.bias is not None
        seen = None if is_causal else visible(call)
        out = sdpa(
            call.q,
            _bounded(call.k) if hides_pairs else call.k,
            call.v,
            attn_mask=_sdpa_mask(call, seen),
            is_causal=is_causal,
            scale=call.softmax_scale,
        )
        return out if seen is None else out.masked_fill(~seen.any(-1, keepdim=True), 0)


def _without_hidden_columns(call: AttentionCall) -> AttentionCall:
    """One decoded token against its whole cache sees everything: no mask need be built."""
    if call.causal and call.offset >= call.k.shape[2] - 1:
        return replace(call, causal=False, offset=0)
    return call


def _bounded(k: Float[Tensor, "b g k d"]) -> Float[Tensor, "b g k d"]:
    """SDPA hides a pair by adding minus infinity, which is NaN where a huge hidden key made the score infinite."""
    bound = torch.finfo(k.dtype).max ** 0.4
    return k if k.dtype == torch.float16 else k.clamp(-bound, bound)


def _sdpa_mask(call: AttentionCall, seen: Bool[Tensor, "#b #h #q k"] | None) -> Tensor | None:
    if call.bias is None:
        return seen
    return call.bias if seen is None else call.bias.masked_fill(~seen, -torch.inf)
