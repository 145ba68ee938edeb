"""Orthogonal random features (ORF, Performer): exp(<q, k>) estimated by a product of F positive features."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab.attention import AttentionCall, Mechanism, grouped, hide_unseen, normalise, ungrouped, visible
from attnlab.registry import register
from attnlab.shapes import Float

__all__ = ["Orf", "random_features"]

VARIANTS = ("as-written", "corrected")


@register("orf", examples=("orf:features=64", "orf:features=16,variant=as-written"))
@dataclass(frozen=True)
class Orf(Mechanism):
    """Phi(x) = F^-1/2 exp(R x - |x|^2 / 2), so that <Phi(q), Phi(k)> estimates exp(<q, k>) (OVA, A.1).

    ``corrected`` stacks orthogonal d x d blocks whose rows have the norms of Gaussian vectors, which makes the estimate
    unbiased (Choromanski et al., 2021). ``as-written`` takes R as torch's orthogonal initialisation of an F x d matrix,
    whose rows have norm 1 at most: it estimates another kernel. The same R serves every head, batch and call. The
    stabiliser max(R K) is taken over the keys a query sees, prefix by prefix when causal; it cancels in W.
    """

    features: int = 256
    variant: str = "corrected"
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.features, bool) or not isinstance(self.features, int) or self.features < 1:
            raise ValueError(f"features must be an int of at least 1, got {self.features!r}")
        if self.variant not in VARIANTS:
            raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, got {self.variant!r}")

    def cannot(self) -> dict[str, str]:
        return {
            "bias": "features of q and of k alone have no place for a bias of the pair",
            "mask": "the sums over keys are shared by all queries, or by prefixes; a general mask needs one for each",
        }

    def reference(self, call: AttentionCall) -> Float[Tensor, "b h q k"]:
        call = hide_unseen(call)
        log_q, log_k = self._logs(call)
        # log <Phi(q), Phi(k)>: the definition needs no stabiliser.
        rows = [(row.unsqueeze(-2) + log_k).logsumexp(-1) for row in log_q.unbind(3)]
        s, seen = ungrouped(torch.stack(rows, 3)), visible(call)
        if seen is not None:
            s = s.masked_fill(~seen, -torch.inf)
        top = s.amax(-1, keepdim=True) if s.shape[-1] else s
        return normalise((s - top.masked_fill(top == -torch.inf, 0)).exp()).to(call.q.dtype)

    def forward(self, call: AttentionCall) -> Float[Tensor, "b h q e"]:
        """Linear in the keys: one state of (F, e + 1) per head, and one chunk of features."""
        call = hide_unseen(call)
        log_q, log_k = self._logs(call)
        v = call.v.to(log_q.dtype).unsqueeze(2)
        v = torch.cat([v, v.new_ones(*v.shape[:-1], 1)], -1)
        hidden = None if call.key_visible is None else ~call.key_visible[:, None, None, :, None]
        if hidden is not None:
            log_k = log_k.masked_fill(hidden, -torch.inf)
        top = _causal(log_q, log_k, v, call.offset) if call.causal else _whole(log_q, log_k, v)
        total = top[..., -1:]
        out = top[..., :-1] / total.masked_fill(total == 0, 1)
        return ungrouped(out).to(call.q.dtype)

    def _logs(self, call: AttentionCall) -> tuple[Float[Tensor, "b g r q f"], Float[Tensor, "b g 1 k f"]]:
        """R x - |x|^2 / 2 of queries and keys, x being sqrt(scale) times them; at least float32."""
        kind = torch.promote_types(call.q.dtype, torch.float32)
        R = random_features(self.features, call.q.shape[-1], self.variant, self.seed).to(call.q.device, kind)
        root = call.softmax_scale**0.5

        def log_phi(t: Tensor) -> Tensor:
            t = root * t.to(kind)
            return t @ R.mT - t.square().sum(-1, keepdim=True) / 2

        return log_phi(grouped(call.q, call.groups)), log_phi(call.k).unsqueeze(2)


@functools.lru_cache(maxsize=32)
def random_features(features: int, d: int, variant: str, seed: int) -> Float[Tensor, "f d"]:
    """R of the two variants, in float64 on the CPU, the same for a seed everywhere."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        if variant == "as-written":
            return torch.nn.init.orthogonal_(torch.empty(features, d, dtype=torch.float64))
        Q, upper = torch.linalg.qr(torch.randn(-(-features // d), d, d, dtype=torch.float64))
        # Without the signs of the triangle Q is orthogonal but not uniform, and the estimate is biased.
        Q = Q * upper.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
        norms = torch.randn(features, d, dtype=torch.float64).norm(dim=-1, keepdim=True)
        return Q.mT.flatten(0, 1)[:features] * norms


def _whole(log_q: Tensor, log_k: Tensor, v: Tensor) -> Tensor:
    ceiling = _finite(log_k.detach().amax((-1, -2), keepdim=True)) if log_k.shape[3] else 0.0
    state = (log_k - ceiling).exp().mT @ v
    return _features(log_q) @ state


def _causal(log_q: Tensor, log_k: Tensor, v: Tensor, offset: int, chunk: int = 64) -> Tensor:
    """Chunks of queries; the state carries its own stabiliser, the maximum over the keys already in it."""
    n_q, n_k = log_q.shape[3], log_k.shape[3]
    lead, blind = max(0, min(offset, n_k)), max(0, min(-offset, n_q))
    ceiling = log_k.new_full((*log_k.shape[:3], 1, 1), -torch.inf)
    state = v.new_zeros(*v.shape[:3], log_k.shape[-1], v.shape[-1])
    if lead:
        ceiling = log_k[..., :lead, :].detach().amax((-1, -2), keepdim=True)
        state = (log_k[..., :lead, :] - _finite(ceiling)).exp().mT @ v[..., :lead, :]
    parts = [v.new_zeros(*log_q.shape[:3], blind, v.shape[-1])]
    for lo in range(blind, n_q, chunk):
        phi_q = _features(log_q[..., lo : lo + chunk, :])
        first = min(n_k, max(0, lo + offset))
        here = slice(first, min(n_k, first + phi_q.shape[3]))
        keys, values = log_k[..., here, :], v[..., here, :]
        parts.append(_prefixes(phi_q, keys, values, state, ceiling))
        if keys.shape[3]:
            higher = torch.maximum(ceiling, keys.detach().amax((-1, -2), keepdim=True))
            state = state * (ceiling - _finite(higher)).exp() + (keys - _finite(higher)).exp().mT @ values
            ceiling = higher
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
    # A key's own features are bounded by its own maximum; what a row adds is the difference to the row's level.
    peak = _finite(keys.detach().amax(-1, keepdim=True))
    near = (phi_q @ (keys - peak).exp().mT) * (peak.mT - level).exp()
    near = near.masked_fill(~seen, 0)
    return near @ values + (ceiling - level).exp() * (phi_q @ state)


def _features(log_q: Tensor) -> Tensor:
    return (log_q - log_q.detach().amax(-1, keepdim=True)).exp()


def _finite(t: Tensor) -> Tensor:
    return t.masked_fill(t == -torch.inf, 0)
