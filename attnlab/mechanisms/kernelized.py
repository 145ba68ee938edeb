"""Attention with another kernel than the exponential: alpha_ij = kappa(q_i, k_j) / sum_j kappa(q_i, k_j)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import elu

from attnlab.attention import (
    AttentionCall,
    Mechanism,
    grouped,
    hide_unseen,
    normalise,
    ungrouped,
    visible,
)
from attnlab.mechanisms._linear import FeatureMap, LinearCache, StepMap, linear_attention, sums_bytes
from attnlab.mechanisms.softmax import Softmax
from attnlab.registry import register
from attnlab.shapes import Bool, Float

__all__ = ["KERNELS", "Kernelized", "kernel_matrix"]

KERNELS = ("elu", "poly", "exp")


@register("kernel", examples=("kernel:elu", "kernel:poly,degree=2", "kernel:poly,degree=0", "kernel:exp"))
@dataclass(frozen=True)
class Kernelized(Mechanism):
    """Generalized attention with kappa = exp(<x, y>), <x, y>^degree or <phi(x), phi(y)>, phi = 1 + elu (OVA, Eq. 1).

    kappa is taken of sqrt(scale) q and sqrt(scale) k. With no scale given, exp uses 1/sqrt(d) and elu uses 1, as
    Katharopoulos et al. (2020) do; in a polynomial the scale cancels. Where all of a row's kappa are zero the output is
    zero. Odd degrees are computed as written: kappa may be negative there, so W is no distribution. Degree 2 over many
    keys is computed by features of pairs, whose rounding is relative to |q|^2 |k|^2 instead of <q, k>^2: where a query
    is nearly orthogonal to all the keys that it sees, float32 loses up to two digits.

    >>> Kernelized("poly", degree=2)
    Kernelized(kernel='poly', degree=2)
    """

    kernel: str = "elu"
    degree: int = 2

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS:
            raise ValueError(f"kernel must be one of {', '.join(KERNELS)}, got {self.kernel!r}")
        if isinstance(self.degree, bool) or not isinstance(self.degree, int) or self.degree < 0:
            raise ValueError(f"degree must be an int of at least 0, got {self.degree!r}")
        if self.kernel == "poly" and self.degree == 2:
            why = "features of pairs have either sign, and cancel where a query is nearly orthogonal to all of its keys"
            object.__setattr__(self, "exempt", {"cancelling sums": why})

    def cannot(self) -> dict[str, str]:
        if self.kernel == "exp":
            return {}
        return {
            "bias": f"a bias added to scores belongs to the exponential; the {self.kernel} kernel has no place for it"
        }

    def reference(self, call: AttentionCall) -> Float[Tensor, "b h q k"]:
        if self.kernel == "exp":
            return Softmax().reference(call)
        return normalise(kernel_matrix(self, call)).to(call.q.dtype)

    def forward(self, call: AttentionCall) -> Float[Tensor, "b h q e"]:
        if self.kernel == "exp":
            return Softmax().forward(call)
        if call.mask is not None:
            return super().forward(call)
        if self.kernel == "elu":
            return linear_attention(call, *_elu_maps(call))
        if self.degree == 2 and _linear_pays(call):
            return linear_attention(call, _pairs, chunk=256)
        return super().forward(call)

    def is_exact(self, call: AttentionCall) -> bool:
        return self.kernel == "exp"

    def bytes_read(self, call: AttentionCall) -> float:
        """elu: a sum over keys of phi(k) v^T and of phi(k), whatever the length."""
        n_k, width, value_width = call.k.shape[2], call.k.shape[3], call.v.shape[3]
        if self.kernel != "elu" or n_k == 0:
            return 1.0
        return min(1.0, width * (value_width + 1) / (n_k * max(1, width + value_width)))

    def make_cache(self, batch: int, capacity: int) -> LinearCache | None:
        """An empty memory of constant size for elu; the other kernels need every key."""
        if self.kernel != "elu":
            return None
        return LinearCache(batch, _elu_maps, step_map=lambda c: StepMap("elu", _root(c)))

    def cache_bytes(self, *, length: int, d: int, e: int, dtype: torch.dtype) -> int:
        if self.kernel == "elu":
            return sums_bytes(d, e, dtype)
        return super().cache_bytes(length=length, d=d, e=e, dtype=dtype)


def kernel_matrix(mech: Kernelized, call: AttentionCall) -> Float[Tensor, "b h q k"]:
    """kappa(q_i, k_j) in at least float32, zero at hidden pairs; a polynomial's rows are scaled against overflow."""
    call = hide_unseen(call)
    kind = torch.promote_types(call.q.dtype, torch.float32)
    q, k, seen = grouped(call.q, call.groups).to(kind), call.k.unsqueeze(2).to(kind), visible(call)
    if mech.kernel == "elu":
        root = _root(call)
        kappa = ungrouped((elu(root * q) + 1) @ (elu(root * k) + 1).mT)
        return kappa if seen is None else kappa.masked_fill(~seen, 0)
    return _power(ungrouped(q @ k.mT), mech.degree, seen)


def _power(s: Tensor, degree: int, seen: Bool[Tensor, "#b #h #q k"] | None) -> Tensor:
    if seen is not None:
        s = s.masked_fill(~seen, 0)
    largest = s.detach().abs().amax(-1, keepdim=True) if s.shape[-1] else s.new_ones(())
    kappa = (s / largest.masked_fill(largest == 0, 1)) ** degree
    return kappa if seen is None else kappa.masked_fill(~seen, 0)


def _elu_maps(call: AttentionCall) -> tuple[FeatureMap, FeatureMap]:
    root = _root(call)

    def features(t: Tensor) -> Tensor:
        return elu(root * t) + 1

    return features, features


def _root(call: AttentionCall) -> float:
    return 1.0 if call.scale is None else call.scale**0.5


def _linear_pays(call: AttentionCall) -> bool:
    """A (d(d+1)/2, e) state costs two products per token where the quadratic form costs one per key."""
    d = call.q.shape[-1]
    return call.k.shape[2] > d * (d + 1)


def _pairs(t: Float[Tensor, "... d"]) -> Float[Tensor, "... f"]:
    """Features whose products are <x, y>^2: every t_i t_j with i <= j, those with i < j times sqrt(2)."""
    i, j = torch.triu_indices(t.shape[-1], t.shape[-1], device=t.device)
    factor = torch.full((len(i),), 2**0.5, dtype=t.dtype, device=t.device).masked_fill(i == j, 1)
    return t[..., i] * t[..., j] * factor
