"""Causal slots as a few batched matrix products: all chunks at once, and one scan over the chunks' memories.

Inside a chunk, with alpha_i = exp(a_i - M) for a reference M of the chunk, and (K, V, L) the sums of alpha k, alpha v
and alpha over the tokens before it in the same scale,

    cum_t = L + sum_{i <= t} alpha_i,   s_t = (sum_{i <= t} <q_t, k_i> alpha_i + K q_t) / cum_t,
    P_t = softmax(scale s_t),   out_t = sum_{i <= t} <P_t / cum_t, alpha_i> v_i + V^T (P_t / cum_t),

so nothing of size (query, key, slot) is made. M is the largest logit so far: nothing overflows, and as long as cum_t
stays above exp(-40), what underflows weighs less than exp(-47). Where it does not, ``attend_chunks`` returns None.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from attnlab.chunks import chunk_budget
from attnlab.shapes import Float

__all__ = ["Memory", "attend_chunks", "segment_length"]

CHUNK = 64
# Rows of queries, over batch and heads, whose products are held at once: on a CPU about what its cache holds.
ROWS = {"cpu": 1 << 13}
MANY_ROWS = 1 << 20
# float32 goes down to exp(-87).
LEAST = math.exp(-40)


class Memory(NamedTuple):
    """Sums over the past: of alpha k, alpha v and alpha, with alpha = exp(a - ``reference``)."""

    k: Float[Tensor, "b n d"]
    v: Float[Tensor, "b n e"]
    total: Float[Tensor, "b n"]
    reference: Float[Tensor, "b n"]


def segment_length(q: Tensor) -> int:
    """How many tokens of (..., q, d) to work on at once: a multiple of a chunk."""
    rows = chunk_budget(ROWS.get(q.device.type, MANY_ROWS) * CHUNK) // CHUNK // max(1, q.shape[:-2].numel())
    return max(CHUNK, rows // CHUNK * CHUNK)


def attend_chunks(
    q: Float[Tensor, "b r q d"],
    k: Float[Tensor, "b q d"],
    v: Float[Tensor, "b q e"],
    log: Float[Tensor, "b q n"],
    value: Float[Tensor, "b q n"] | None,
    start: Memory,
    *,
    normalise: bool,
    scale: float,
    floor: float,
) -> tuple[Float[Tensor, "b r q e"], Memory] | None:
    """Attention of token t to the first t + 1 tokens and to ``start``, and the memory after them.

    A logit at or below ``floor`` writes nothing. Without ``normalise`` alpha is exp(a), or ``value``, and cum is 1.
    None if a logit exceeds all before it by so much that earlier tokens of its chunk would be lost in this form.
    """
    length = q.shape[2]
    q, k, v, log, value = _in_chunks(q, k, v, log, value, floor)
    reference = _references(log.detach(), start, floor) if normalise else torch.zeros_like(log[:, :, 0])
    # The start's reference may be finer than a logit; any reference of a chunk is as good as another near it.
    previous = torch.cat([start.reference[:, None] if normalise else reference[:, :1], reference[:, :-1]], 1)
    decay = (previous - reference).exp().to(q.dtype)
    alpha = (log - reference.unsqueeze(2)).exp().to(q.dtype) if value is None else value.masked_fill(log <= floor, 0)
    with torch.no_grad():
        empty = _empty(log, start.total > 0, floor)
        cum = None
        if normalise:
            before, _ = _scan(alpha.sum(2).unsqueeze(-1), decay, start.total.unsqueeze(-1))
            cum = alpha.cumsum(2).add_(before.mT)
            if empty is not None:
                cum.masked_fill_(empty, 1)
            if float(cum.amin()) < LEAST:
                return None
    out, K, V, total = _Chunks.apply(q, k, v, alpha, start.k, start.v, start.total, cum, empty, decay, scale)
    out = out.unflatten(2, (-1, CHUNK)).transpose(1, 2).flatten(2, 3)[:, :, :length]
    return out, Memory(K, V, total, reference[:, -1].to(start.reference.dtype))


def _references(log: Tensor, start: Memory, floor: float) -> Tensor:
    """The largest logit up to the end of each chunk, (b, chunks, n)."""
    highest = torch.cat([start.reference[:, None].to(log.dtype), log.amax(2)], 1).cummax(1).values
    return highest[:, 1:].clamp_min(floor)


def _in_chunks(
    q: Tensor, k: Tensor, v: Tensor, log: Tensor, value: Tensor | None, floor: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """(b, chunks, rows, width): queries of all r heads, and keys; tokens that fill up the last chunk write nothing."""
    rest = -q.shape[2] % CHUNK
    if rest:
        q, k, v = (pad(t, (0, 0, 0, rest)) for t in (q, k, v))
        log = pad(log, (0, 0, 0, rest), value=2 * floor)
        value = None if value is None else pad(value, (0, 0, 0, rest))
    q = q.unflatten(2, (-1, CHUNK)).transpose(1, 2).flatten(2, 3)
    k, v, log = (t.unflatten(1, (-1, CHUNK)) for t in (k, v, log))
    return q, k, v, log, None if value is None else value.unflatten(1, (-1, CHUNK))


def _empty(log: Tensor, filled: Tensor, floor: float) -> Tensor | None:
    """Which slots are still empty at each token; None where none is."""
    if bool((log[:, 0, 0] > floor).logical_or_(filled).all()):
        return None
    writes = log > floor
    before = torch.cat([filled[:, None], writes.any(2)], 1).cummax(1).values[:, :-1]
    return ~(writes.cummax(2).values | before.unsqueeze(2))


def _scan(local: Tensor, decay: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """S_c = decay_c U_{c-1} and U_c = S_c + local_c over (b, c, n, w): every S, and the last U."""
    starts, state = torch.empty_like(local), start.clone()
    for i, (factor, new) in enumerate(zip(decay.unsqueeze(-1).unbind(1), local.unbind(1), strict=True)):
        state.mul_(factor)
        starts[:, i] = state
        state.add_(new)
    return starts, state


def _scan_back(of_starts: Tensor, of_last: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """From the gradients by every S and by the last U, those by ``local`` and by ``start``."""
    of_local, state = torch.empty_like(of_starts), of_last.clone()
    factors, starts = decay.unsqueeze(-1).unbind(1), of_starts.unbind(1)
    for i in reversed(range(len(factors))):
        of_local[:, i] = state
        state.add_(starts[i]).mul_(factors[i])
    return of_local, state


def _lower(t: Tensor) -> Tensor:
    """Pairs (query, key) of a chunk in which the key is not ahead, in place; rows are those of all r heads."""
    t.view(t.shape[0], -1, CHUNK, CHUNK).tril_()
    return t


def _over_heads(t: Tensor) -> Tensor:
    """(x, r * chunk, n) seen as (x, r, chunk, n)."""
    return t.view(t.shape[0], -1, CHUNK, t.shape[-1])


def _divided(t: Tensor, cum: Tensor | None) -> Tensor:
    return t if cum is None else (_over_heads(t) / cum.unsqueeze(1)).view_as(t)


class _Chunks(torch.autograd.Function):
    """The equations above and their gradients; the backward pass makes (query, key) products again."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        alpha: Tensor,
        start_k: Tensor,
        start_v: Tensor,
        start_total: Tensor,
        cum: Tensor | None,
        empty: Tensor | None,
        decay: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        b, chunks = q.shape[:2]
        q, k, v, alpha = (t.flatten(0, 1) for t in (q, k, v, alpha))
        cum, empty = (None if t is None else t.flatten(0, 1) for t in (cum, empty))
        local = torch.cat([torch.bmm(alpha.mT, k), torch.bmm(alpha.mT, v)], -1)
        starts, last = _scan(local.unflatten(0, (b, chunks)), decay, torch.cat([start_k, start_v], -1))
        d = k.shape[-1]
        K, V = starts.flatten(0, 1).split([d, v.shape[-1]], -1)
        s = torch.bmm(_lower(torch.bmm(q, k.mT)), alpha).baddbmm_(q, K.mT)
        s = _divided(s, cum)
        scores = s * scale
        if empty is not None:
            _over_heads(scores).masked_fill_(empty.unsqueeze(1), torch.finfo(s.dtype).min)
        P = scores.softmax(-1)
        if empty is not None:
            _over_heads(P).masked_fill_(empty.unsqueeze(1), 0)
        R = _divided(P, cum)
        out = torch.bmm(_lower(torch.bmm(R, alpha.mT)), v).baddbmm_(R, V)
        _, total = _scan(alpha.sum(1).view(b, chunks, -1, 1), decay, start_total.unsqueeze(-1))
        ctx.save_for_backward(q, k, v, alpha, K, V, s, P, cum, decay)
        ctx.scale = scale
        return out.unflatten(0, (b, chunks)), last[..., :d], last[..., d:], total.squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_out: Tensor, of_k: Tensor, of_v: Tensor, of_total: Tensor) -> Any:
        q, k, v, alpha, K, V, s, P, cum, decay = ctx.saved_tensors
        b, chunks = decay.shape[:2]
        d, G = k.shape[-1], of_out.flatten(0, 1)
        R = _divided(P, cum)
        # out = B v + R V with B = lower(R alpha^T)
        dv = torch.bmm(_lower(torch.bmm(R, alpha.mT)).mT, G)
        dB = _lower(torch.bmm(G, v.mT))
        dalpha = torch.bmm(dB.mT, R)
        dR = torch.bmm(dB, alpha).baddbmm_(G, V.mT)
        # R = softmax(scale s) / cum and s = (A alpha + q K^T) / cum with A = lower(q k^T)
        dP = _divided(dR, cum)
        ds = (dP - (P * dP).sum(-1, keepdim=True)).mul_(P).mul_(ctx.scale)
        dY = _divided(ds, cum)
        dA = _lower(torch.bmm(dY, alpha.mT))
        dalpha.baddbmm_(_lower(torch.bmm(q, k.mT)).mT, dY)
        dq = torch.bmm(dA, k).baddbmm_(dY, K)
        dk = torch.bmm(dA.mT, q)
        # The memories that the chunks started from.
        of_starts = torch.cat([torch.bmm(dY.mT, q), torch.bmm(R.mT, G)], -1).unflatten(0, (b, chunks))
        of_local, of_start = _scan_back(of_starts, torch.cat([of_k, of_v], -1), decay)
        of_K, of_V = of_local.flatten(0, 1).split([d, v.shape[-1]], -1)
        dk.baddbmm_(alpha, of_K)
        dv.baddbmm_(alpha, of_V)
        dalpha.baddbmm_(k, of_K.mT).baddbmm_(v, of_V.mT)
        of_totals = torch.zeros_like(decay)
        if cum is not None:
            dcum = _over_heads((dR * R).addcmul_(ds, s)).sum(1).div_(cum).neg_()
            # Not the total less the sum before: that would lose small gradients of late tokens in large early ones.
            later = dcum.flip(1).cumsum(1).flip(1)
            of_totals = later[:, 0].reshape(decay.shape)
            dalpha.add_(later)
        of_sums, of_start_total = _scan_back(of_totals.unsqueeze(-1), of_total.unsqueeze(-1), decay)
        dalpha.add_(of_sums.flatten(0, 1).mT)
        gradients = [t.unflatten(0, (b, chunks)) for t in (dq, dk, dv, dalpha)]
        starts = of_start[..., :d], of_start[..., d:], of_start_total.squeeze(-1)
        return *gradients, *starts, None, None, None, None
