"""Attention in linear time for any kernel with a feature map: sum_j phi(q) . phi(k_j) v_j / sum_j phi(q) . phi(k_j)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from attnlab.attention import AttentionCall, Mechanism, grouped, hide_unseen, ungrouped
from attnlab.chunks import chunk_length
from attnlab.mechanisms._bounded.continued import check_batch
from attnlab.mechanisms._device import kernels_may_run, no_autocast
from attnlab.shapes import Float, Int

__all__ = [
    "FEATURES_CANNOT",
    "FeatureMap",
    "FeatureMechanism",
    "Gate",
    "LinearCache",
    "StepMap",
    "check_features",
    "divided",
    "feature_bytes",
    "linear_attention",
    "sums_bytes",
]

# What attention by features refuses, and why.
FEATURES_CANNOT = {
    "bias": "features of q and of k alone have no place for a bias of the pair",
    "mask": "the sums over keys are shared by all queries, or by prefixes; a general mask needs one for each",
}

FeatureMap = Callable[[Tensor], Tensor]


class Gate(NamedTuple):
    """A past that fades: S_t = exp(``stays_t``) S_{t-1} + ``enters_t`` phi(k_t) [v_t, 1]^T."""

    stays: Float[Tensor, "b g k"]
    enters: Float[Tensor, "b g k"]


class StepMap(NamedTuple):
    """A feature map as a kernel computes it, the same for queries and keys: see ``attnlab.kernels.decoding``."""

    kind: str
    factor: float = 1.0
    weight: Tensor | None = None
    bias: Tensor | None = None


def check_features(features: int) -> None:
    """Raise a ValueError unless this is a number of features."""
    if isinstance(features, bool) or not isinstance(features, int) or features < 1:
        raise ValueError(f"features must be an int of at least 1, got {features!r}")


class FeatureMechanism(Mechanism):
    """Attention by ``features``, each of which is a product with a vector as wide as a key."""

    features: int

    def cannot(self) -> dict[str, str]:
        return dict(FEATURES_CANNOT)

    def least_bytes(self, call: AttentionCall) -> int:
        return feature_bytes(call, self.features) + 4 * self.features * call.k.shape[3]


def feature_bytes(call: AttentionCall, features: int) -> int:
    """The bytes of the sums that every key is added to: (features, values and 1) for each key/value head."""
    b, heads, _, _ = call.k.shape
    return 4 * b * heads * features * (call.v.shape[3] + 1)


def sums_bytes(features: int, e: int, dtype: torch.dtype) -> int:
    """The bytes of these sums in one key/value head of a cache."""
    return features * (e + 1) * torch.promote_types(dtype, torch.float32).itemsize


def linear_attention(
    call: AttentionCall,
    phi: FeatureMap,
    phi_k: FeatureMap | None = None,
    gate: Gate | None = None,
    *,
    chunk: int = 128,
    least: float = 0.0,
) -> Float[Tensor, "b h q e"]:
    """The kernel's attention with key padding and causality, holding features of one chunk and one (f, e) state.

    ``phi`` maps (..., d) to (..., f); keys use ``phi_k`` where it is given. Half precision is accumulated in float32.
    Sums below ``least`` count as that.
    """
    return _continued(call, phi, phi_k or phi, gate, state=None, chunk=chunk, least=least)[0]


class LinearCache:
    """The ``LayerCache`` of a kernel with a feature map: sum_j phi(k_j) [v_j, 1]^T, whose size no length changes.

    ``maps`` gives (phi of queries, phi of keys) for a call, ``gate`` its gate, and ``step_map`` phi for the kernel that
    decodes single tokens on a GPU.
    """

    def __init__(
        self,
        batch: int,
        maps: Callable[[AttentionCall], tuple[FeatureMap, FeatureMap]],
        gate: Callable[[AttentionCall], Gate | None] | None = None,
        *,
        least: float = 0.0,
        step_map: Callable[[AttentionCall], StepMap] | None = None,
    ) -> None:
        self.batch, self.maps, self.gate, self.least, self.step_map = batch, maps, gate, least, step_map
        self.state: Tensor | None = None

    def attend(
        self, mechanism: Mechanism, call: AttentionCall, *, key_visible: Tensor | None
    ) -> tuple[AttentionCall, Tensor]:
        """Take in the call's keys, all new, and answer its queries; the past needs no ``key_visible``."""
        check_batch(call, self.batch)
        mechanism.refuse(call)
        gate = None if self.gate is None else self.gate(call)
        if self.state is not None and self.step_map is not None and _in_one_launch(call, self.state):
            from attnlab.kernels.decoding import linear_step

            # The state is this cache's own.
            out = linear_step(
                call.q, call.k, call.v, self.state, gate=gate, least=self.least, key_visible=call.key_visible,
                **self.step_map(call)._asdict(),
            )  # fmt: skip
            return call, out
        out, self.state = _continued(call, *self.maps(call), gate, state=self.state, chunk=128, least=self.least)
        return call, out

    def select(self, rows: Int[Tensor, " n"]) -> None:
        """Copy rows."""
        self.batch = rows.shape[0]
        if self.state is not None:
            self.state = self.state[rows]

    def nbytes(self) -> int:
        """The bytes that are kept."""
        return 0 if self.state is None else self.state.nbytes


def _in_one_launch(call: AttentionCall, state: Tensor) -> bool:
    """Whether a kernel takes this call: one query, at most one new key, on a GPU, and no gradients are needed."""
    n_q, n_k = call.sizes[2:]
    if not call.q.is_cuda or n_q != 1 or n_k > 1 or call.offset or torch.is_grad_enabled():
        return False
    if not kernels_may_run() or torch.compiler.is_compiling():
        return False
    from attnlab.kernels.decoding import serves_step

    return serves_step(call.q, call.v, state)


def _continued(
    call: AttentionCall,
    phi: FeatureMap,
    phi_k: FeatureMap,
    gate: Gate | None,
    *,
    state: Tensor | None,
    chunk: int,
    least: float,
) -> tuple[Tensor, Tensor]:
    """The output for keys that follow those summed up in ``state``, and the sum over all of them."""
    assert call.mask is None, "a general mask has no linear form"
    assert call.bias is None, "a bias has no linear form"
    kind = torch.promote_types(call.q.dtype, torch.float32)
    call = hide_unseen(call)
    # Autocast would round the running sums to half precision at every chunk.
    with no_autocast(call.q):
        sums = _Sums(call, phi_k, gate, kind)
        queries = grouped(call.q, call.groups).to(kind)
        run = _causal if call.causal else _bidirectional
        top, state = run(queries, sums, phi, call.offset, chunk_length(chunk), state)
        out = divided(top[..., :-1], top[..., -1:], least=least)
    return ungrouped(out).to(call.q.dtype), state


def divided(values: Float[Tensor, "... e"], total: Float[Tensor, "... 1"], *, least: float) -> Float[Tensor, "... e"]:
    """Sums of values over the sum of their weights, or over ``least`` if that is more; 0 where no key is seen."""
    if least:
        return values / total.clamp(min=least)
    return (values / total.masked_fill(total == 0, 1)).masked_fill(total == 0, 0)


class _Sums:
    """Key features and values of a range of keys; hidden keys have features of zero, values end in a 1."""

    def __init__(self, call: AttentionCall, phi_k: FeatureMap, gate: Gate | None, kind: torch.dtype) -> None:
        self.k, self.v, self.phi_k, self.gate, self.kind = call.k, call.v, phi_k, gate, kind
        self.hidden = None if call.key_visible is None else ~call.key_visible[:, None, :, None]
        self.length = call.k.shape[2]

    def part(self, lo: int, hi: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Features (b, g, 1, c, f) and values with a one appended (b, g, 1, c, e + 1) of keys lo to hi.

        With a gate also the logarithm (b, g, 1, c) of what is left, after each key, of the state before ``lo``.
        """
        features = self.phi_k(self.k[:, :, lo:hi].to(self.kind))
        if self.hidden is not None:
            features = features.masked_fill(self.hidden[:, :, lo:hi], 0)
        left = None
        if self.gate is not None:
            features = features * self.gate.enters[:, :, lo:hi, None].to(self.kind)
            stays = self.gate.stays[:, :, lo:hi].to(self.kind)
            if self.hidden is not None:
                stays = stays.masked_fill(self.hidden[:, :, lo:hi, 0], 0)
            left = stays.cumsum(-1).unsqueeze(2)
        v = self.v[:, :, lo:hi].to(self.kind)
        return features.unsqueeze(2), torch.cat([v, v.new_ones(*v.shape[:-1], 1)], -1).unsqueeze(2), left

    def added(self, state: Tensor | None, lo: int, hi: int, chunk: int) -> Tensor:
        """The state after keys lo to hi; an empty range adds nothing."""
        for start in range(lo, max(hi, lo + 1), chunk):
            state = _after(state, *self.part(start, min(hi, start + chunk)))
        assert state is not None
        return state


def _after(state: Tensor | None, features: Tensor, values: Tensor, left: Tensor | None) -> Tensor:
    """sum_j phi(k_j) [v_j, 1]^T with these keys added."""
    if left is not None and left.shape[-1]:
        last = left[..., -1:]
        features = features * (last - left).exp().unsqueeze(-1)
        state = None if state is None else state * last.exp().unsqueeze(-1)
    new = features.mT @ values
    return new if state is None else state + new


def _bidirectional(
    q: Tensor, sums: _Sums, phi: FeatureMap, _offset: int, chunk: int, before: Tensor | None
) -> tuple[Tensor, Tensor]:
    state = sums.added(before, 0, sums.length, chunk)
    return torch.cat([phi(part) @ state for part in q.split(chunk, dim=3)], dim=3), state


def _causal(
    q: Tensor, sums: _Sums, phi: FeatureMap, offset: int, chunk: int, before: Tensor | None
) -> tuple[Tensor, Tensor]:
    # Keys before `lead` are seen by every query that sees anything; after them queries and keys advance together.
    lead, blind = max(0, min(offset, sums.length)), max(0, min(-offset, q.shape[3]))
    state = sums.added(before, 0, lead, chunk)
    parts = [q.new_zeros(*q.shape[:3], blind, state.shape[-1])]
    for lo in range(blind, q.shape[3], chunk):
        fq = phi(q[..., lo : lo + chunk, :])
        first = max(0, lo + offset)
        fk, values, left = sums.part(first, min(sums.length, first + fq.shape[3]))
        ahead = torch.ones(fq.shape[3], fk.shape[3], dtype=torch.bool, device=q.device).triu(1)
        kappa, of_state = (fq @ fk.mT).masked_fill(ahead, 0), fq @ state
        if left is not None and left.shape[-1]:
            # A query after the last key reads the state after that key.
            at = torch.cat([left, left[..., -1:].expand(*left.shape[:3], fq.shape[3] - left.shape[3])], -1)
            fade = (at.unsqueeze(-1) - left.unsqueeze(-2)).masked_fill(ahead, 0)
            kappa, of_state = kappa * fade.exp(), of_state * at.exp().unsqueeze(-1)
        parts.append(kappa @ values + of_state)
        state = _after(state, fk, values, left)
    return torch.cat(parts, dim=3), state
