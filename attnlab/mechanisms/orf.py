"""Orthogonal random features (ORF, Performer): exp(<q, k>) estimated by a product of F positive features."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from attnlab.attention import (
    AttentionCall,
    grouped,
    hide_unseen,
    normalise,
    repeat_groups,
    ungrouped,
    visible,
)
from attnlab.chunks import chunk_length
from attnlab.fields import check_fields
from attnlab.mechanisms._device import host_may_read
from attnlab.mechanisms._linear import FeatureMechanism, check_features, feature_bytes
from attnlab.registry import register
from attnlab.shapes import Bool, Float

__all__ = ["Orf", "random_features"]

VARIANTS = ("as-written", "corrected")
# Tokens whose features are held at once.
CHUNK, CAUSAL_CHUNK = 512, 64


@register("orf", examples=("orf:features=64", "orf:features=16,variant=as-written"))
@dataclass(frozen=True)
class Orf(FeatureMechanism):
    """Phi(x) = F^-1/2 exp(R x - |x|^2 / 2), so that <Phi(q), Phi(k)> estimates exp(<q, k>) (OVA, A.1).

    ``corrected`` stacks orthogonal d x d blocks whose rows have the norms of Gaussian vectors, which makes the estimate
    unbiased (Choromanski et al., 2021). ``as-written`` takes R as torch's orthogonal initialisation of an F x d matrix,
    whose rows have norm 1 at most: it estimates another kernel. The same R serves every head, batch and call. The
    stabiliser max(R K) is taken over the keys a query sees, prefix by prefix when causal; it cancels in W. What is left
    is the rounding of log Phi, whose size is that of a key's |x|^2: where that is some thousand, float32 gives four
    digits of W.
    """

    features: int = 256
    variant: str = "corrected"
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        check_features(self.features)
        if self.variant not in VARIANTS:
            raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, got {self.variant!r}")

    def least_bytes(self, call: AttentionCall) -> int:
        return feature_bytes(call, self.features) + 8 * self.features * call.k.shape[3]

    def reference(self, call: AttentionCall) -> Float[Tensor, "b h q k"]:
        call = hide_unseen(call)
        log_q = self._projected(grouped(call.q, call.groups), call)
        log_k = self._log_phi(call.k, call).unsqueeze(2)
        # log <Phi(q), Phi(k)>: the definition needs no stabiliser.
        rows = [(row + log_k.unsqueeze(3)).logsumexp(-1) for row in log_q.unsqueeze(4).split(1, 3)]
        s, seen = ungrouped(torch.cat(rows, 3)), visible(call)
        if seen is not None:
            s = s.masked_fill(~seen, -torch.inf)
        top = s.amax(-1, keepdim=True) if s.shape[-1] else s
        return normalise((s - top.masked_fill(top == -torch.inf, 0)).exp()).to(call.q.dtype)

    def forward(self, call: AttentionCall) -> Float[Tensor, "b h q e"]:
        """Linear in the keys: one state of (F, e + 1) per head, and one chunk of features."""
        call = hide_unseen(call)
        q = grouped(call.q, call.groups)

        def queries(lo: int, hi: int) -> Tensor:
            log_q = self._projected(q[..., lo:hi, :], call)
            return (log_q - log_q.detach().amax(-1, keepdim=True)).exp()

        def keys(lo: int, hi: int) -> tuple[Tensor, Tensor]:
            """log Phi and (v, 1), whose last column sums up to the denominator."""
            log_k = self._log_phi(call.k[..., lo:hi, :], call).unsqueeze(2)
            if call.key_visible is not None:
                log_k = log_k.masked_fill(~call.key_visible[:, None, None, lo:hi, None], -torch.inf)
            v = call.v[..., lo:hi, :].to(log_k.dtype).unsqueeze(2)
            return log_k, torch.cat([v, v.new_ones(*v.shape[:-1], 1)], -1)

        top = _causal(queries, keys, call) if call.causal else _whole(queries, keys, call)
        total = top[..., -1:]
        # Each product of features that is too small for the dtype is lost: at most one for a key and a feature.
        kind = torch.finfo(total.dtype)
        small = total < kind.tiny / kind.eps * self.features * max(1, call.k.shape[2])
        out = ungrouped(top[..., :-1] / total.masked_fill(small, 1)).to(call.q.dtype)
        return self._with_lost_rows(call, out, ungrouped(small))

    def _with_lost_rows(
        self, call: AttentionCall, out: Float[Tensor, "b h q e"], small: Bool[Tensor, "b h q 1"]
    ) -> Float[Tensor, "b h q e"]:
        """The output with the queries whose sums were ``small`` computed from W, which needs no product of features.

        The features of a query and of a key may be largest in different places, so that all of their products are too
        small for the dtype: in float32 where logits differ by some hundred.
        """
        if not host_may_read(small) or not bool(small.any()):
            return out
        seen = visible(call)
        lost = small if seen is None else small & seen.any(-1, keepdim=True)
        rows = lost.any(1).any(0).squeeze(-1).nonzero().squeeze(1)
        if len(rows) == 0:
            return out
        mask = None if seen is None else seen.expand(-1, -1, call.q.shape[2], -1)[:, :, rows]
        W = self.reference(replace(call, q=call.q[:, :, rows], causal=False, offset=0, mask=mask))
        exact = W @ repeat_groups(call.v, call.groups)
        return out.index_copy(2, rows, torch.where(lost[:, :, rows], exact, out[:, :, rows]))

    def _log_phi(self, k: Tensor, call: AttentionCall) -> Tensor:
        """R x - |x|^2 / 2 of keys, x being sqrt(scale) times them; at least float32."""
        k = k.to(torch.promote_types(k.dtype, torch.float32))
        return self._projected(k, call) - call.softmax_scale * k.square().sum(-1, keepdim=True) / 2

    def _projected(self, t: Tensor, call: AttentionCall) -> Tensor:
        """R x; that is enough of a query, since its |x|^2 is the same for all keys and cancels in W."""
        kind = torch.promote_types(t.dtype, torch.float32)
        R = random_features(self.features, t.shape[-1], self.variant, self.seed).to(t.device, kind)
        return call.softmax_scale**0.5 * t.to(kind) @ R.mT


@functools.lru_cache(maxsize=32)
def random_features(features: int, d: int, variant: str, seed: int) -> Float[Tensor, "f d"]:
    """R of the two variants, in float64 on the CPU, the same for a seed everywhere."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        if d == 0:
            return torch.zeros(features, 0, dtype=torch.float64)
        if variant == "as-written":
            return torch.nn.init.orthogonal_(torch.empty(features, d, dtype=torch.float64))
        Q, upper = torch.linalg.qr(torch.randn(-(-features // d), d, d, dtype=torch.float64))
        # Without the signs of the triangle Q is orthogonal but not uniform, and the estimate is biased.
        Q = Q * upper.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
        norms = torch.randn(features, d, dtype=torch.float64).norm(dim=-1, keepdim=True)
        return Q.mT.flatten(0, 1)[:features] * norms


class _State(NamedTuple):
    """sum_j Phi(k_j) (v_j, 1)^T, and the maximum over the keys in it that it is divided by, as a logarithm."""

    sums: Float[Tensor, "b g 1 f a"]
    ceiling: Float[Tensor, "b g 1 1 1"]

    def with_keys(self, log_k: Float[Tensor, "b g 1 k f"], values: Float[Tensor, "b g 1 k a"]) -> _State:
        """The state with these keys too."""
        if not log_k.shape[3]:
            return self
        higher = torch.maximum(self.ceiling, log_k.detach().amax((-1, -2), keepdim=True))
        rest = self.sums * (self.ceiling - _finite(higher)).exp()
        return _State(rest + (log_k - _finite(higher)).exp().mT @ values, higher)


Queries = Callable[[int, int], Tensor]
Keys = Callable[[int, int], tuple[Tensor, Tensor]]


def _state_of(keys: Keys, n: int) -> _State:
    """The state of the first n keys."""
    chunk = chunk_length(CHUNK)
    log_k, values = keys(0, min(n, chunk))
    sums = values.new_zeros(*values.shape[:3], log_k.shape[-1], values.shape[-1])
    state = _State(sums, log_k.new_full((*log_k.shape[:3], 1, 1), -torch.inf)).with_keys(log_k, values)
    for lo in range(chunk, n, chunk):
        state = state.with_keys(*keys(lo, min(n, lo + chunk)))
    return state


def _whole(queries: Queries, keys: Keys, call: AttentionCall) -> Tensor:
    state = _state_of(keys, call.k.shape[2])
    n_q, chunk = call.q.shape[2], chunk_length(CHUNK)
    parts = [queries(lo, min(n_q, lo + chunk)) @ state.sums for lo in range(0, max(1, n_q), chunk)]
    return torch.cat(parts, 3)


def _causal(queries: Queries, keys: Keys, call: AttentionCall) -> Tensor:
    """Chunks of queries; the state carries its own stabiliser, the maximum over the keys already in it."""
    n_q, n_k, offset = call.q.shape[2], call.k.shape[2], call.offset
    lead, blind = max(0, min(offset, n_k)), max(0, min(-offset, n_q))
    state, chunk = _state_of(keys, lead), chunk_length(CAUSAL_CHUNK)
    nothing = queries(0, blind)
    parts = [nothing.new_zeros(*nothing.shape[:-1], state.sums.shape[-1])]
    for lo in range(blind, n_q, chunk):
        phi_q = queries(lo, min(n_q, lo + chunk))
        first = min(n_k, max(0, lo + offset))
        log_k, values = keys(first, min(n_k, first + phi_q.shape[3]))
        parts.append(_prefixes(phi_q, log_k, values, state.sums, state.ceiling))
        state = state.with_keys(log_k, values)
    return torch.cat(parts, 3)


def _prefixes(phi_q: Tensor, keys: Tensor, values: Tensor, state: Tensor, ceiling: Tensor) -> Tensor:
    """Rows of one chunk, row i over the state and keys 0..i, each row stabilised by the maximum over what it sees."""
    n_q, n_k = phi_q.shape[3], keys.shape[3]
    rise = torch.full_like(ceiling.expand(*ceiling.shape[:3], n_q, 1), -torch.inf)
    if n_k:
        own = keys.detach().amax(-1, keepdim=True).cummax(-2).values
        rise = own[..., torch.arange(n_q, device=own.device).clamp_max(n_k - 1), :]
    level = _finite(torch.maximum(rise, ceiling))
    seen = torch.ones(n_q, n_k, dtype=torch.bool, device=phi_q.device).tril()
    # A key's own features are bounded by its own maximum; what a row adds is the difference to the row's level. That of
    # a hidden key is minus infinity, and stays so: any number in its place may lie above the level.
    peak = keys.detach().amax(-1, keepdim=True)
    # A key that lies ahead may be above the level by any amount.
    rise_to_peak = (peak.mT - level).masked_fill(~seen, -torch.inf)
    near = ((phi_q @ (keys - _finite(peak)).exp().mT) * rise_to_peak.exp()).masked_fill(~seen, 0)
    return near @ values + (ceiling - level).exp() * (phi_q @ state)


def _finite(t: Tensor) -> Tensor:
    return t.masked_fill(t == -torch.inf, 0)
