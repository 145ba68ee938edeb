"""Queries that all read the memory after the last key: two small products, and softmax attention over the slots.

K~ = Phi^T K and V~ = Phi^T V in the precision of the call, summed in float32; then torch's SDPA with n keys. An empty
slot is hidden by a bias that is finite, for where all are empty V~ is zero and so is the output.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from attnlab.attention import AttentionCall, repeat_groups
from attnlab.mechanisms._bounded.slot_memory import FLOOR, Control
from attnlab.mechanisms._sdpa import sdpa
from attnlab.shapes import Bool, Float

__all__ = ["Pooling", "alpha_by_place", "attend_pooled", "held", "pooling", "pooling_by_place", "pooling_of_visible"]

# Tensors that captured graphs read, by id.
_READ_BY_GRAPHS: dict[int, Tensor] = {}


class Pooling(NamedTuple):
    """What goes into each slot, and what its sum is multiplied by; None is 1.

    ``empty`` says which slots get nothing, None where all get something or none does.
    """

    phi: Float[Tensor, "#b #g n k"]
    empty: Bool[Tensor, "#b #g n"] | None = None
    share: Float[Tensor, "#b #g n"] | None = None


def pooling(c: Control, when: str, *, sparse: bool) -> Pooling:
    """Phi^T of a control without padding; ``sparse`` if one slot may be empty while another is not."""
    unwritten = c.log <= FLOOR / 2
    if when == "none":
        phi = c.log.exp() if c.value is None else c.value.to(c.log.dtype).expand_as(c.log)
    else:
        phi = c.log.softmax(2)
    return Pooling(phi.masked_fill(unwritten, 0).mT, unwritten.all(2) if sparse else None)


@functools.lru_cache(maxsize=16)
def pooling_by_place(mech: Any, n_k: int, dtype: torch.dtype, device: torch.device) -> Pooling:
    """Phi^T of the first ``n_k`` places, the same in every row and head, of a ``SlotMechanism`` without parameters.

    Worked out on the host and kept on the device; slots that stay empty are left out, so that nothing hides them.
    """
    # Not inference tensors even if the first call was made in inference mode.
    with torch.inference_mode(False):
        pool = pooling(_control_by_place(mech, n_k, dtype), mech.normalise, sparse=True)
        assert pool.empty is not None
        return Pooling(pool.phi[:, :, ~pool.empty[0, 0]].to(device, dtype))


@functools.lru_cache(maxsize=16)
def alpha_by_place(mech: Any, n_k: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "k n"]:
    """alpha of the first ``n_k`` places, kept on the device like ``pooling_by_place``."""
    with torch.inference_mode(False):
        return _control_by_place(mech, n_k, dtype).log[0, 0].exp().to(device, dtype)


def held(t: Tensor) -> Tensor:
    """The same tensor, never freed if a CUDA graph is being captured, because replays of the graph read it."""
    if t.is_cuda and torch.cuda.is_current_stream_capturing():
        _READ_BY_GRAPHS[id(t)] = t
    return t


def _control_by_place(mech: Any, n_k: int, dtype: torch.dtype) -> Control:
    with torch.device("cpu"):
        one, keys = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, n_k, 1)
        if dtype == torch.float64:
            one, keys = one.double(), keys.double()
        control: Control = mech.control(AttentionCall(one, keys, keys), torch.arange(n_k)[None])
        return control


def pooling_of_visible(
    alpha: Float[Tensor, "p n"], key_visible: Bool[Tensor, "b k"], when: str, *, sparse: bool
) -> Pooling:
    """The pooling of padded rows, where the t-th visible token has the t-th row of ``alpha``."""
    places = (key_visible.cumsum(-1) - 1).clamp(0, alpha.shape[0] - 1)
    phi = embedding(places, alpha).masked_fill(~key_visible.unsqueeze(-1), 0)
    empty = share = None
    if sparse or when != "none":
        total = phi.detach().sum(1, dtype=torch.promote_types(phi.dtype, torch.float32))[:, None]
        empty = total == 0
        share = None if when == "none" else 1 / total.masked_fill(empty, 1)
    return Pooling(phi.mT[:, None], empty if sparse else None, share)


def attend_pooled(call: AttentionCall, pool: Pooling) -> Float[Tensor, "b h q e"]:
    """The output of a call without mask, bias or causality."""
    phi, empty, hidden = pool.phi.to(call.q.dtype), pool.empty, None
    if phi.shape[1] == 1:
        phi = phi[:, 0].expand(call.k.shape[0], -1, -1)
    if empty is not None:
        least = max(FLOOR, torch.finfo(call.q.dtype).min)
        hidden = torch.zeros(empty.shape, dtype=call.q.dtype, device=empty.device).masked_fill(empty, least)
        hidden = hidden if empty.shape[1] == 1 else repeat_groups(hidden, call.groups)
        hidden = hidden.unsqueeze(2).expand(*call.q.shape[:3], -1)
    k, v = _summed(phi, call.k), _summed(phi, call.v)
    if pool.share is not None:
        share = pool.share.to(k.dtype).unsqueeze(-1)
        k, v = share * k, share * v
    return sdpa(call.q, k, v, attn_mask=hidden, scale=call.softmax_scale)


def _summed(phi: Float[Tensor, "b ... n k"], t: Float[Tensor, "b g k d"]) -> Float[Tensor, "b g n d"]:
    """Phi^T t; where heads share Phi it is one product for all of them, whose widths a projection puts side by side."""
    if phi.dim() == 4:
        return phi @ t
    rows = t.transpose(1, 2).flatten(2)
    return torch.bmm(phi, rows).unflatten(-1, (t.shape[1], -1)).transpose(1, 2)
