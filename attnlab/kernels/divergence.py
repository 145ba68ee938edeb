"""KL(teacher || student) of each token from both models' logits, in one pass over them.

With running maxima m, KL = sum_i e^(t_i - m_t) (t_i - s_i) / z_t - log z_t - m_t + log z_s + m_s needs no softmax in
memory. The gradient is written over the student's logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.kernels.divergence_triton import compare
from attnlab.loss import IGNORED
from attnlab.shapes import Float, Int

__all__ = ["compare_rows"]

BLOCK = 4096


def compare_rows(
    logits: Float[Tensor, "c v"],
    expected: Float[Tensor, "c v"],
    targets: Int[Tensor, " c"],
    *,
    hard: float,
    gradient: bool,
    block: int = BLOCK,
) -> Float[Tensor, "c 3"]:
    """Of each token KL, and the cross entropy of its target under both; with ``gradient`` ``logits`` become theirs."""
    n, v = logits.shape
    sums = torch.empty(n, 3, device=logits.device, dtype=torch.float32)
    if n:
        compare[(n,)](
            logits, expected, targets, sums, logits.stride(0), expected.stride(0), v, hard, IGNORED, gradient, block,
            num_warps=8,
        )  # fmt: skip
    return sums
