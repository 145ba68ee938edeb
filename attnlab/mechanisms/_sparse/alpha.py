"""What every sparse approximation starts from: log kappa or kappa of a call."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnlab.attention import AttentionCall, Mechanism, hide_unseen, scores
from attnlab.fields import check_fields
from attnlab.mechanisms.kernelized import KERNELS, Kernelized
from attnlab.shapes import Float

__all__ = ["SparseMechanism", "exact_weights", "keys_kept", "spread_infinite", "widened"]


def check_kernel(kernel: str, degree: int) -> None:
    """Refuse kernels whose kappa may be negative: no sparse approximation of Eq. 2 exists for them."""
    if kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {', '.join(KERNELS)}, got {kernel!r}")
    if kernel == "poly" and (degree < 0 or degree % 2):
        raise ValueError(
            f"degree must be even and at least 0, got {degree}: an odd power is negative at some keys, "
            "so that alpha is no distribution to choose keys from"
        )


def check_r(r: int | str) -> None:
    """Refuse what is no number of keys."""
    if r != "d+1" and (isinstance(r, bool) or not isinstance(r, int) or r < 1):
        raise ValueError(f'r must be an int of at least 1 (the keys that each query keeps) or "d+1", got {r!r}')


@dataclass(frozen=True)
class SparseMechanism(Mechanism):
    """A mechanism that keeps r keys of the attention with a kernel (OVA, Eq. 2)."""

    r: int | str = 65
    kernel: str = "exp"
    degree: int = 2

    def __post_init__(self) -> None:
        check_fields(self)
        check_r(self.r)
        check_kernel(self.kernel, self.degree)

    def cannot(self) -> dict[str, str]:
        return Kernelized(self.kernel, self.degree).cannot()


def keys_kept(r: int | str, call: AttentionCall) -> int:
    """r as a number of keys; d + 1 is the width of a value plus one."""
    return call.v.shape[-1] + 1 if r == "d+1" else int(r)


def widened(call: AttentionCall) -> AttentionCall:
    """The call without what no query sees, in at least float32: half precision makes ties between keys that differ."""
    call = hide_unseen(call)
    kind = torch.promote_types(call.q.dtype, torch.float32)
    if kind == call.q.dtype:
        return call
    bias = None if call.bias is None else call.bias.to(kind)
    return replace(call, q=call.q.to(kind), k=call.k.to(kind), v=call.v.to(kind), bias=bias, x=None, memory=None)


def spread_infinite(s: Float[Tensor, "*rows k"]) -> Float[Tensor, "*rows k"]:
    """Scores whose softmax is the limit: where a row holds plus infinities, they share all of it equally."""
    if s.shape[-1] == 0:
        return s
    endless = s.amax(-1, keepdim=True) == math.inf
    if not endless.any():
        return s
    return torch.where(endless, torch.where(s == math.inf, 0.0, -math.inf).to(s.dtype), s)


def exact_weights(call: AttentionCall, kernel: str, degree: int) -> Float[Tensor, "b h q k"]:
    """alpha of Eq. 1; a row with nothing visible, or whose kappa are all zero, is zero."""
    if kernel == "exp":
        s = spread_infinite(scores(call))
        empty = (s == -math.inf).all(-1, keepdim=True)
        return torch.softmax(s.masked_fill(empty, 0), -1).masked_fill(empty, 0)
    return Kernelized(kernel, degree).reference(call)
