# mypy: allow-untyped-defs
"""The kernel of ``divergence``: one program reads the logits of one token, of both models."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["compare"]


@triton.jit
def compare(
    # inputs; the student's logits become their gradient
    Student, Teacher, Targets,
    # output
    Sums,
    # sizes
    stride_s, stride_t, v, hard, ignored,
    # constants
    GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """KL, and the cross entropy of the target under both models, in one pass; a second one writes the gradient."""
    row = tl.program_id(0).to(tl.int64)
    s_row, t_row = Student + row * stride_s, Teacher + row * stride_t
    lanes = tl.arange(0, BLOCK)
    top_s, top_t, sum_s, sum_t, mixed = -float("inf"), -float("inf"), 0.0, 0.0, 0.0
    for lo in range(0, v, BLOCK):
        inside = lo + lanes < v
        s = tl.load(s_row + lo + lanes, mask=inside, other=-float("inf")).to(tl.float32)
        t = tl.load(t_row + lo + lanes, mask=inside, other=-float("inf")).to(tl.float32)
        new_s, new_t = tl.maximum(top_s, tl.max(s, 0)), tl.maximum(top_t, tl.max(t, 0))
        sum_s = sum_s * tl.exp(top_s - new_s) + tl.sum(tl.exp(s - new_s), 0)
        share = tl.exp(t - new_t)
        fade = tl.exp(top_t - new_t)
        sum_t = sum_t * fade + tl.sum(share, 0)
        # Where the teacher's share is zero both logits may be minus infinity.
        mixed = mixed * fade + tl.sum(tl.where(share > 0, share * (t - s), 0.0), 0)
        top_s, top_t = new_s, new_t
    log_s, log_t = top_s + tl.log(sum_s), top_t + tl.log(sum_t)
    target = tl.load(Targets + row)
    labelled = target != ignored
    at = tl.where(labelled, target, 0)
    own = log_s - tl.load(s_row + at).to(tl.float32)
    other = log_t - tl.load(t_row + at).to(tl.float32)
    tl.store(Sums + 3 * row, mixed / sum_t - log_t + log_s)
    tl.store(Sums + 3 * row + 1, tl.where(labelled, own, 0.0))
    tl.store(Sums + 3 * row + 2, tl.where(labelled, other, 0.0))
    if GRADIENT:
        soft = 1 - hard
        hard_here = tl.where(labelled, hard, 0.0)
        # The target's logit was read above, and is overwritten below by another thread.
        tl.debug_barrier()
        for lo in range(0, v, BLOCK):
            inside = lo + lanes < v
            s = tl.load(s_row + lo + lanes, mask=inside, other=0.0).to(tl.float32)
            t = tl.load(t_row + lo + lanes, mask=inside, other=0.0).to(tl.float32)
            d = (soft + hard_here) * tl.exp(s - log_s) - soft * tl.exp(t - log_t)
            d = tl.where(lo + lanes == at, d - hard_here, d)
            tl.store(s_row + lo + lanes, d.to(Student.dtype.element_ty), mask=inside)
