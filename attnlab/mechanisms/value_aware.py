"""Optimal value-aware sparse attention (OVA): r keys, weighted to come closest to the exact output."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab.attention import AttentionCall, grouped, query_chunks, repeat_groups, visible
from attnlab.linalg.caratheodory import caratheodory
from attnlab.linalg.sparse_simplex import sparse_simplex
from attnlab.mechanisms._sparse.alpha import SparseMechanism, exact_weights, keys_kept, widened
from attnlab.mechanisms.softmax import Softmax
from attnlab.registry import register
from attnlab.shapes import Bool, Float, Int

__all__ = ["ValueAware", "value_aware_distance"]

CPU_CHUNK = 1 << 20
GPU_CHUNK = 1 << 24
# The search holds some 300 bytes for every key of a query.
CPU_SEARCH = 1 << 17
GPU_SEARCH = 1 << 25


# Seconds that a call may take before a warning.
SLOW = 10.0
# Not empty once the warning was given.
_warned: list[int] = []


@register("value-aware", examples=("value-aware:r=1", "value-aware:r=2", "value-aware:r=d+1"))
@dataclass(frozen=True)
class ValueAware(SparseMechanism):
    """argmin |o - sum_i beta_i v_i|^2, o the exact output, over beta >= 0, sum 1, on at most r keys (OVA, section 3).

    r = 1 is Eq. 3. From r = d + 1 on (d the width of a value) the output is exact by Caratheodory's theorem, so that
    ``forward`` computes it as such; the at most d + 1 keys that carry it are computed by ``weights`` only, and without
    a gradient to q and k: differentiate the output. Between the two, which the paper leaves open, a search finds the
    support (``linalg.sparse_simplex``): its error never grows with r and is never above that of r = 1 or of the top r
    keys weighted best. Only visible keys are chosen; fewer than r of them: all are used. Between equally near values
    the lowest index wins.

    >>> ValueAware(r=1)
    ValueAware(r=1, kernel='exp', degree=2)
    """

    r: int | str = "d+1"

    def is_exact(self, call: AttentionCall) -> bool:
        return self.kernel == "exp" and self._exact(call)

    def search_steps(self, call: AttentionCall) -> int:
        return 0 if self.r == 1 else (call.v.shape[-1] + 1) ** 3

    def reference(self, call: AttentionCall) -> Float[Tensor, "b h q k"]:
        wide = widened(call)
        parts = self._chunks(wide)
        return torch.cat([self._weights(part, of=len(parts)) for part in parts], dim=2).to(call.q.dtype)

    def forward(self, call: AttentionCall) -> Float[Tensor, "b h q e"]:
        wide = widened(call)
        v = repeat_groups(wide.v, call.groups)
        parts = self._chunks(wide)
        if self.r != 1 and not self._exact(wide):
            return torch.cat([self._weights(part, of=len(parts)) @ v for part in parts], dim=2).to(call.q.dtype)
        o = _in_one_pass(self, wide)
        if o is not None and self._exact(wide):
            return o.to(call.q.dtype)
        known = [None] * len(parts) if o is None else o.split([part.q.shape[2] for part in parts], dim=2)
        out = []
        for part, o_part in zip(parts, known, strict=True):
            o, some = _output(self, part) if o_part is None else (o_part, _sees_some(part))
            if not self._exact(wide):
                # A choice has no derivative: 0 o gives queries and keys a gradient of zero, where they would have none.
                nearest = _pick(v, _nearest(o, part)).masked_fill(~some, 0) + (0 * o if o.requires_grad else 0)
                o = torch.where(o.isnan(), o, nearest)
            out.append(o)
        return torch.cat(out, dim=2).to(call.q.dtype)

    def _exact(self, call: AttentionCall) -> bool:
        r = keys_kept(self.r, call)
        return r > call.v.shape[-1] or r >= call.k.shape[2]

    def _chunks(self, call: AttentionCall) -> list[AttentionCall]:
        searched = self.r != 1 and not self._exact(call)
        budgets = (CPU_SEARCH, GPU_SEARCH) if searched else (CPU_CHUNK, GPU_CHUNK)
        return query_chunks(call, budgets[call.q.device.type != "cpu"])

    def _weights(self, part: AttentionCall, *, of: int) -> Float[Tensor, "b h q k"]:
        """W of a part of the queries, one of ``of`` alike."""
        if self._exact(part):
            return _exact_support(exact_weights(part, self.kernel, self.degree), part)
        if self.r != 1:
            return _best_support(exact_weights(part, self.kernel, self.degree), part, int(self.r), parts=of)
        o, some = _output(self, part)
        W = torch.zeros(part.sizes, dtype=o.dtype, device=o.device)
        W = W.scatter_(3, _nearest(o, part).unsqueeze(-1), 1).masked_fill(~some, 0)
        return W.masked_fill(o.isnan().any(-1, keepdim=True), torch.nan)


def value_aware_distance(o: Float[Tensor, "b h q e"], v: Float[Tensor, "b g k e"]) -> Float[Tensor, "b h q k"]:
    """|v_i|^2 - 2 <v_i, o>: the squared distance of each value to the output, less |o|^2 (OVA, Eq. 3)."""
    groups = o.shape[1] // v.shape[1]
    return torch.baddbmm(
        v.square().sum(-1).flatten(0, 1).unsqueeze(1),
        grouped(o, groups).flatten(2, 3).flatten(0, 1),
        v.flatten(0, 1).mT,
        alpha=-2,
    ).view(*o.shape[:3], v.shape[2])


def _in_one_pass(mech: ValueAware, call: AttentionCall) -> Float[Tensor, "b h q e"] | None:
    """The exact output from softmax's own fast path; None for other kernels, or where a score is infinite."""
    if mech.kernel != "exp":
        return None
    o = Softmax().forward(call)
    return None if o.isnan().any() else o


def _sees_some(call: AttentionCall) -> Bool[Tensor, "#b #h #q 1"]:
    seen = visible(call)
    if seen is None:
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=call.q.device)
    return seen.any(-1, keepdim=True)


def _output(mech: ValueAware, call: AttentionCall) -> tuple[Float[Tensor, "b h q e"], Bool[Tensor, "#b #h #q 1"]]:
    """The exact output, and which queries attend to anything at all."""
    o = _in_one_pass(mech, call)
    if o is not None:
        return o, _sees_some(call)
    alpha = exact_weights(call, mech.kernel, mech.degree)
    # A row of NaN attends to something, and its output says so.
    return alpha @ repeat_groups(call.v, call.groups), alpha.sum(-1, keepdim=True) != 0


@torch.no_grad()
def _nearest(o: Float[Tensor, "b h q e"], call: AttentionCall) -> Int[Tensor, "b h q"]:
    far, seen = value_aware_distance(o, call.v), visible(call)
    return (far if seen is None else far.masked_fill(~seen, torch.inf)).argmin(-1)


def _pick(v: Float[Tensor, "b h k e"], keys: Int[Tensor, "b h q"]) -> Float[Tensor, "b h q e"]:
    return v.gather(2, keys.unsqueeze(-1).expand(*keys.shape, v.shape[-1]))


@torch.no_grad()
def _exact_support(alpha: Float[Tensor, "b h q k"], call: AttentionCall) -> Float[Tensor, "b h q k"]:
    W = caratheodory(_by_values(alpha, call), call.v.flatten(0, 1))
    return W.view(alpha.shape).to(alpha.dtype)


def _best_support(
    alpha: Float[Tensor, "b h q k"], call: AttentionCall, r: int, *, parts: int
) -> Float[Tensor, "b h q k"]:
    """W on at most r keys; rows that see no more than r, or that hold NaN, keep alpha."""

    def estimated(seconds: float) -> None:
        if seconds * parts > SLOW:
            _warn_of_search(r, seconds * parts)

    v, w = call.v.flatten(0, 1), _by_values(alpha, call)
    seen = visible(call)
    open_ = _by_values((alpha > -1) if seen is None else seen.expand(alpha.shape), call)
    o = w.double() @ v.double()
    some = open_ & (w.sum(-1, keepdim=True) > 0)
    keys, beta = sparse_simplex(o.detach(), v.detach(), some, w.detach(), r, on_estimate=estimated)
    if torch.is_grad_enabled() and o.requires_grad:
        beta = _with_gradient(beta, o, v.double(), keys)
    W = torch.zeros_like(w, dtype=torch.float64).scatter_add(-1, keys, beta)
    W = torch.where((open_.sum(-1, keepdim=True) <= r) | w.isnan().any(-1, keepdim=True), w, W.to(w.dtype))
    return W.view(alpha.shape)


def _warn_of_search(r: int, seconds: float) -> None:
    """Say, once in a process, that a call will take long, and what would not."""
    if not _warned:
        _warned.append(r)
        warnings.warn(
            f"value-aware:r={r} searches for the best {r} keys of every query, about {seconds:.0f} s for this call; "
            "r=1 and r=d+1 need no search",
            stacklevel=2,
        )


def _with_gradient(
    beta: Float[Tensor, "g n r"], o: Float[Tensor, "g n e"], v: Float[Tensor, "g k e"], keys: Int[Tensor, "g n r"]
) -> Float[Tensor, "g n r"]:
    """beta with its derivative: one Newton step on its own support, which moves nothing at the minimum.

    P V (V^T beta - o) = 0 with P the projection on sum zero, so d beta = (P V V^T P)^+ P d[V (o - V^T beta)].
    """
    chosen = v[torch.arange(v.shape[0], device=v.device)[:, None, None], keys]
    on = (beta > 0).to(beta.dtype)
    P = torch.diag_embed(on) - on.unsqueeze(-1) * on.unsqueeze(-2) / on.sum(-1).clamp_min(1)[..., None, None]
    fixed = chosen.detach()
    inverse = torch.linalg.pinv(P @ fixed @ fixed.mT @ P, hermitian=True, rtol=1e-10) @ P
    left = o - (beta.unsqueeze(-2) @ chosen).squeeze(-2)
    step = (inverse @ (chosen @ left.unsqueeze(-1))).squeeze(-1)
    return beta + step - step.detach()


def _by_values(t: Tensor, call: AttentionCall) -> Tensor:
    """(b, h, q, k) as (b g, queries that read one set of values, k)."""
    return grouped(t, call.groups).flatten(2, 3).flatten(0, 1)
