"""Launches of the ABC kernels along segments: causal, where a memory fits the registers."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.kernels._abc_along import back_along, mix_along, score_along, sum_along
from attnlab.kernels._abc_launch import Extras, Grads, State, empty_state, gathered, make_states, scan_sums, seeded
from attnlab.kernels._abc_plan import Plan, Units, segment_size, units_of

__all__ = ["segments_backward", "segments_forward"]


def segments_forward(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, extras: Extras, scale: float, plan: Plan
) -> tuple[Tensor, State, list[Tensor]]:
    """The output, the memory after the last key, and what the backward pass needs: states, z, scores."""
    visible, first, cu_seqlens = extras
    b, h, n_q, d = q.shape
    g, n = k.shape[1], s.shape[3]
    units = _segments(q, plan, cu_seqlens)
    alone = _alone(units)
    if alone:
        states, prefix = q.new_empty(0), q.new_empty(0)
        last = empty_state(b, g, n, d, q.device)
    else:
        states, prefix, last = make_states(k, v, s, extras, units, plan, torch.float32)
    out = torch.empty_like(q)
    scores = torch.empty(b, h, n_q, n, dtype=torch.float32, device=q.device)
    chunk_z = torch.empty(units.count, g, units.size // plan.C, n, dtype=torch.float32, device=q.device)
    first_k, first_v, first_z = _starts(states, prefix, first)
    row = 0 if visible is None else visible.stride(0)
    rest = (row, n * d if alone else 2 * n * d, n_q, units.per_row, g, h // g, n, units.size)
    tiles = _tiles(plan, d, n, n_q, units, visible) | {"STARTED": not alone or first is not None, "ENDED": alone}
    score_along[(units.count, h)](
        q, k, s, visible, first_k, first_z, scores, last[0], last[2], chunk_z, units.table,
        *q.stride()[:3], *k.stride()[:3], *s.stride()[:3], *rest, MARKED=True, **tiles,
    )  # fmt: skip
    mix_along[(units.count, h)](
        scores, scores, v, s, visible, first_v, first_z, out, last[1], units.table,
        *v.stride()[:3], *s.stride()[:3], *out.stride()[:3], *rest, scale, BACK=False, **tiles,
    )  # fmt: skip
    return out, last, [states, prefix, scores, chunk_z]


def segments_backward(
    do: Tensor,
    d_last: Grads,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    last: State,
    saved: list[Tensor],
    extras: Extras,
    scale: float,
    plan: Plan,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, s, and of the first state where there was one."""
    visible, first, cu_seqlens = extras
    q, k, v, s = inputs
    states, prefix, scores, chunk_z = saved
    b, h, n_q, d = q.shape
    g, n = k.shape[1], s.shape[3]
    units = _segments(q, plan, cu_seqlens)
    alone = _alone(units)
    first_k, first_v, first_z = _starts(states, prefix, first)
    row = 0 if visible is None else visible.stride(0)
    sizes = (n_q, units.per_row, g, h // g, n, units.size)
    rest = (row, n * d if alone else 2 * n * d, *sizes)
    tiles = _tiles(plan, d, n, n_q, units, visible)
    started = {"STARTED": not alone or first is not None, "ENDED": False}
    dq, dps = torch.empty_like(q), torch.empty_like(scores)
    score_along[(units.count, h)](
        do, v, s, visible, first_v, first_z, dps, None, None, None, units.table,
        *do.stride()[:3], *v.stride()[:3], *s.stride()[:3], *rest, MARKED=False, **tiles, **started,
    )  # fmt: skip
    mix_along[(units.count, h)](
        scores, dps, k, s, visible, first_k, first_z, dq, None, units.table,
        *k.stride()[:3], *s.stride()[:3], *dq.stride()[:3], *rest, scale, BACK=True, **tiles, **started,
    )  # fmt: skip

    seed = seeded(d_last, last, h // g)
    sums = torch.empty(units.count, h, 2, n, d, dtype=torch.float32, device=q.device)
    cs = torch.empty(units.count, h, 2, n, dtype=torch.float32, device=q.device)
    after = (None, None) if seed is None else seed
    if not alone:
        sum_along[(units.count, h, 2)](
            q, do, s, visible, scores, dps, chunk_z, sums, cs, units.table,
            *q.stride()[:3], *do.stride()[:3], *s.stride()[:3], row, *sizes, scale, **tiles,
        )  # fmt: skip
        to, to_c = scan_sums(sums, cs, prefix, last[2], seed, units, plan, decay=True)
        after = (sums, cs)
    else:
        to, to_c = sums, cs
    dk = torch.empty(b, h, n_q, d, dtype=k.dtype, device=k.device)
    dv = torch.empty_like(dk)
    ds = torch.empty(2, b, h, n_q, n, dtype=s.dtype, device=s.device)
    back_along[(units.count, h, 2)](
        q, do, k, v, s, visible, scores, dps, chunk_z, *after, to, to_c, dk, dv, ds, units.table,
        *q.stride()[:3], *do.stride()[:3], *k.stride()[:3], *v.stride()[:3], *s.stride()[:3], row, *sizes, scale,
        ds[0].numel(), STARTED=not alone or seed is not None, ENDED=alone, **tiles,
    )  # fmt: skip
    return gathered([dq, dk, dv, ds[0] + ds[1]], to, to_c, h // g, first, None)


def _segments(q: Tensor, plan: Plan, cu_seqlens: Tensor | None) -> Units:
    b, h, n_q, _ = q.shape
    return units_of(b, n_q, segment_size(b * h, n_q, plan.C), cu_seqlens)


def _alone(units: Units) -> bool:
    """Whether each sequence is one segment, so that no state needs to be made before."""
    return units.per_row == 1 and units.table is None


def _starts(states: Tensor, prefix: Tensor, first: State | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Where K~, V~ and z before each segment lie."""
    if states.numel():
        return states, states[:, :, 1], prefix
    return first or (None, None, None)


def _tiles(plan: Plan, d: int, n: int, length: int, units: Units, visible: Tensor | None) -> dict[str, object]:
    packed = units.table is not None
    return {
        "C": plan.C, "NP": plan.NP, "D": d, "BD": plan.wide, "CT": plan.CT, "PREC": plan.PREC,
        "EVEN": not packed and length % plan.C == 0, "FULL": n == plan.NP, "VARLEN": packed,
        "MASKED": visible is not None, "num_warps": plan.warps, "num_stages": plan.stages,
    }  # fmt: skip
