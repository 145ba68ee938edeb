"""Launches of the ABC kernels: forward and backward, chunk by chunk or along segments."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from attnlab.kernels._abc_along import key_along, query_along, read_along, sum_along
from attnlab.kernels._abc_backward import key_gradients, query_gradients
from attnlab.kernels._abc_output import read_states
from attnlab.kernels._abc_plan import Plan, Units, plan_for, segment_size, units_of
from attnlab.kernels._abc_state import scan_back, scan_states, write_states

__all__ = ["backward", "forward"]

State = tuple[Tensor, Tensor, Tensor]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    visible: Tensor | None,
    first: State | None,
    cu_seqlens: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output, the memory after the last key (K~, V~, z), and the states and z that the backward pass needs."""
    b, h, n_q, d = q.shape
    g, n_k, n = k.shape[1], k.shape[2], s.shape[3]
    plan = plan_for(d, n, q.dtype)
    if causal and plan.along and n_q:
        return _forward_along(q, k, v, s, visible, first, cu_seqlens, scale, plan)
    units = units_of(b, n_k, plan.C if causal else 8 * plan.C, cu_seqlens)
    states, prefix, last = _memory(k, v, s, visible, first, units, plan, plan.state)
    out = torch.empty_like(q)
    if causal:
        at = units
    else:
        states, prefix = torch.stack(last[:2], 2).to(plan.state), last[2]
        at = units_of(b, n_q, plan.C, cu_seqlens)
    if n_q:
        read_states[(at.count, h)](
            q, k, v, s, visible, states, prefix, out, at.table,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *s.stride()[:3], *out.stride()[:3],
            0 if visible is None else visible.stride(0), n_q, at.per_row, g, h // g, n, scale,
            C=plan.C, NP=plan.NP, D=d, BD=plan.BD, CAUSAL=causal,
            VARLEN=at.table is not None, MASKED=visible is not None, CT=plan.CT, PREC=plan.PREC,
            num_warps=plan.warps, num_stages=1,
        )  # fmt: skip
    return out, *last, states, prefix


def _forward_along(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    visible: Tensor | None,
    first: State | None,
    cu_seqlens: Tensor | None,
    scale: float,
    plan: Plan,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    b, h, n_q, d = q.shape
    g, n = k.shape[1], s.shape[3]
    units = _segments(q, plan, cu_seqlens)
    alone = units.count == units.sequences and cu_seqlens is None
    if alone:
        states, prefix = q.new_empty(0), q.new_empty(0)
        ends = torch.empty(2, b, g, n, d, dtype=torch.float32, device=q.device)
        last: State = (ends[0], ends[1], torch.empty(b, g, n, dtype=torch.float32, device=q.device))
    else:
        states, prefix, last = _memory(k, v, s, visible, first, units, plan, torch.float32)
    out = torch.empty_like(q)
    read_along[(units.count, h)](
        q, k, v, s, visible, *_starts(states, prefix, first), out, *last, units.table,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *s.stride()[:3], *out.stride()[:3],
        0 if visible is None else visible.stride(0), n * d if alone else 2 * n * d,
        n_q, units.per_row, g, h // g, n, units.size, scale,
        **_tiles(plan, d, n, units, n_q), STARTED=not alone or first is not None, ENDED=alone,
        MASKED=visible is not None, num_warps=8, num_stages=1,
    )  # fmt: skip
    return out, *last, states, prefix


def _segments(q: Tensor, plan: Plan, cu_seqlens: Tensor | None) -> Units:
    b, h, n_q, _ = q.shape
    return units_of(b, n_q, segment_size(b * h, n_q, plan.C), cu_seqlens)


def _starts(states: Tensor, prefix: Tensor, first: State | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Where the state before each segment lies."""
    if states.numel():
        return states[:, :, 0], states[:, :, 1], prefix
    return first or (None, None, None)


def _tiles(plan: Plan, d: int, n: int, units: Units, length: int) -> dict[str, object]:
    packed = units.table is not None
    return {
        "C": plan.C, "NP": plan.NP, "D": d, "BD": plan.wide, "CT": plan.CT, "PREC": plan.PREC, "VARLEN": packed,
        "EVEN": not packed and length % plan.C == 0, "FULL": n == plan.NP,
    }  # fmt: skip


def _memory(
    k: Tensor,
    v: Tensor,
    s: Tensor,
    visible: Tensor | None,
    first: State | None,
    units: Units,
    plan: Plan,
    kind: torch.dtype,
) -> tuple[Tensor, Tensor, State]:
    """The state before each unit, z before each unit, and the state after the last."""
    g, n_k, d = k.shape[1:]
    n = s.shape[3]
    states = torch.empty(units.count, g, 2, n, d, dtype=kind, device=k.device)
    zs = torch.empty(2, units.count, g, n, dtype=torch.float32, device=k.device)
    packed = units.table is not None
    if units.count:
        write_states[(units.count, g, triton.cdiv(d, plan.BD))](
            k, v, s, visible, states, zs, units.table, *k.stride()[:3], *v.stride()[:3], *s.stride()[:3],
            0 if visible is None else visible.stride(0), n_k, units.per_row, g, n,
            L=units.size, C=plan.C, NP=plan.NP, D=d, BD=plan.BD,
            VARLEN=packed, MASKED=visible is not None, CT=plan.CT, PREC=plan.PREC,
            num_warps=plan.warps, num_stages=1,
        )  # fmt: skip
    last = torch.empty(2, units.sequences, g, n, d, dtype=torch.float32, device=k.device)
    last_z = torch.empty(units.sequences, g, n, dtype=torch.float32, device=k.device)
    first_k, first_v, first_z = first or (None, None, None)
    rows = _rows(units.sequences * g, n, plan)
    scan_states[(units.sequences * g, triton.cdiv(n, rows), 2)](
        states, zs, zs[1], first_k, first_v, first_z, last[0], last[1], last_z, units.bounds, units.per_row, g, n,
        D=d, BN=rows, BD=plan.wide, VARLEN=packed, STARTED=first is not None, STAGES=4, num_warps=4,
    )  # fmt: skip
    return states, zs[1], (last[0], last[1], last_z)


def _rows(programs: int, n: int, plan: Plan) -> int:
    """Slots for each program of a scan: few where there are few sequences and heads."""
    rows = min(plan.NP, 2048 // plan.wide)
    while rows > 1 and programs * triton.cdiv(n, rows) < 256:
        rows //= 2
    return rows


def backward(
    do: Tensor,
    d_last: tuple[Tensor | None, Tensor | None, Tensor | None],
    saved: tuple[Tensor, ...],
    visible: Tensor | None,
    first: State | None,
    cu_seqlens: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, s and of the first state (K~, V~, z), the last three meaningful if there was one."""
    q, k, v, s, last_k, last_v, last_z, states, prefix = saved
    b, h, n_q, d = q.shape
    g, n_k, n = k.shape[1], k.shape[2], s.shape[3]
    plan = plan_for(d, n, q.dtype)
    if do.stride(3) != 1:
        do = do.contiguous()
    if causal and plan.along and n_q:
        return _backward_along(do, d_last, saved, visible, first, cu_seqlens, scale, plan)
    units = units_of(b, n_q, plan.C, cu_seqlens)
    packed, masked = units.table is not None, visible is not None
    dq = torch.empty_like(q)
    side = [torch.empty(b, h, n_q if causal else 0, n, dtype=plan.state, device=q.device) for _ in range(3)]
    sums = torch.empty(units.count, h, 2, n, d, dtype=plan.state, device=q.device)
    cs = torch.empty(units.count, h, n, dtype=torch.float32, device=q.device)
    row = 0 if visible is None else visible.stride(0)
    strides = [*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *s.stride()[:3], *do.stride()[:3]]
    tiles = {"C": plan.C, "NP": plan.NP, "D": d, "BD": plan.BD, "CAUSAL": causal, "CT": plan.CT, "PREC": plan.PREC}
    if n_q:
        query_gradients[(units.count, h)](
            q, k, v, s, do, visible, states, prefix, dq, *side, sums, cs, units.table,
            *strides, *dq.stride()[:3], row, n_q, units.per_row, g, h // g, n, scale,
            **tiles, VARLEN=packed, MASKED=masked, num_warps=plan.warps, num_stages=1,
        )  # fmt: skip

    seeded = any(t is not None for t in d_last)
    seed: tuple[Tensor | None, ...] = (None, None, None)
    if seeded:
        seed = _seed(d_last, (last_k, last_v, last_z), h // g)
    to = torch.empty(2, units.sequences, h, n, d, dtype=torch.float32, device=q.device)
    to_c = torch.empty(units.sequences, h, n, dtype=torch.float32, device=q.device)
    rows = _rows(units.sequences * h, n, plan)
    scan_back[(units.sequences * h, triton.cdiv(n, rows), 2)](
        sums, cs, prefix, last_z, *seed, to[0], to[1], to_c, units.bounds, units.per_row, h, h // g, n,
        D=d, BN=rows, BD=plan.wide, VARLEN=packed, DECAY=causal, SEEDED=seeded, STAGES=4, num_warps=4,
    )  # fmt: skip

    zs = prefix
    if not causal:
        sums, cs, zs = to.transpose(0, 1).transpose(1, 2).to(plan.state).contiguous(), to_c, last_z
        units = units_of(b, n_k, plan.C, cu_seqlens)
    dk = torch.empty(b, h, n_k, d, dtype=k.dtype, device=k.device)
    dv = torch.empty_like(dk)
    ds = torch.empty(b, h, n_k, n, dtype=s.dtype, device=s.device)
    if n_k:
        key_gradients[(units.count, h)](
            q, k, v, s, do, visible, zs, *side, sums, cs, dk, dv, ds, units.table,
            *strides, row, n_k, units.per_row, g, h // g, n,
            **tiles, VARLEN=packed, MASKED=masked, num_warps=plan.warps, num_stages=1,
        )  # fmt: skip
    return _gathered([dq, dk, dv, ds], [*to, to_c], h // g, first, None if causal else last_z)


def _gathered(
    grads: list[Tensor], to: list[Tensor], groups: int, first: State | None, last_z: Tensor | None
) -> tuple[Tensor, ...]:
    """Gradients summed over the query heads of a key head; those of the first state may be relative to ``last_z``."""
    if groups > 1:
        grads[1:] = [t.unflatten(1, (-1, groups)).sum(2) for t in grads[1:]]
    if first is None:
        return tuple(grads)
    dk, dv, dc = (t.unflatten(1, (-1, groups)).sum(2) for t in to)
    if last_z is not None:
        faded = (first[2] - last_z).exp()
        dk, dv, dc = dk * faded.unsqueeze(-1), dv * faded.unsqueeze(-1), dc * faded
    dz = (dk * first[0] + dv * first[1]).sum(-1) - dc
    return *grads, dk, dv, dz


def _backward_along(
    do: Tensor,
    d_last: tuple[Tensor | None, Tensor | None, Tensor | None],
    saved: tuple[Tensor, ...],
    visible: Tensor | None,
    first: State | None,
    cu_seqlens: Tensor | None,
    scale: float,
    plan: Plan,
) -> tuple[Tensor, ...]:
    q, k, v, s, last_k, last_v, last_z, states, prefix = saved
    b, h, n_q, d = q.shape
    g, n = k.shape[1], s.shape[3]
    units = _segments(q, plan, cu_seqlens)
    alone = units.count == units.sequences and cu_seqlens is None
    tiles = _tiles(plan, d, n, units, n_q) | {"MASKED": visible is not None, "num_warps": 8, "num_stages": 1}
    row = 0 if visible is None else visible.stride(0)
    rest = (n_q, units.per_row, g, h // g, n, units.size)
    of_q, of_k, of_v, of_s, of_o = (t.stride()[:3] for t in (q, k, v, s, do))
    dq = torch.empty_like(q)
    side = torch.empty(3, b, h, n_q, n, dtype=plan.state, device=q.device).unbind(0)
    chunk_z = torch.empty(units.count, g, units.size // plan.C, n, dtype=torch.float32, device=q.device)
    query_along[(units.count, h)](
        q, k, v, s, do, visible, *_starts(states, prefix, first), dq, *side, chunk_z, units.table,
        *of_q, *of_k, *of_v, *of_s, *of_o, *dq.stride()[:3], row, n * d if alone else 2 * n * d, *rest, scale,
        **tiles, STARTED=not alone or first is not None,
    )  # fmt: skip

    seeded = any(t is not None for t in d_last)
    seed: tuple[Tensor | None, ...] = (None, None, None)
    if seeded:
        seed = _seed(d_last, (last_k, last_v, last_z), h // g)
    to = torch.empty(2, units.sequences, h, n, d, dtype=torch.float32, device=q.device)
    to_c = torch.empty(units.sequences, h, n, dtype=torch.float32, device=q.device)
    after = seed
    if not alone:
        sums = torch.empty(units.count, h, 2, n, d, dtype=torch.float32, device=q.device)
        cs = torch.empty(units.count, h, n, dtype=torch.float32, device=q.device)
        half = min(plan.wide, 64)
        sum_along[(units.count, h, triton.cdiv(d, half))](
            q, s, do, visible, *side, chunk_z, sums, cs, units.table, *of_q, *of_s, *of_o, row, *rest,
            **tiles | {"BD": half, "num_warps": 4},
        )  # fmt: skip
        rows = _rows(units.sequences * h, n, plan)
        scan_back[(units.sequences * h, triton.cdiv(n, rows), 2)](
            sums, cs, prefix, last_z, *seed, to[0], to[1], to_c, units.bounds, units.per_row, h, h // g, n,
            D=d, BN=rows, BD=plan.wide, VARLEN=units.table is not None, DECAY=True, SEEDED=seeded, STAGES=4,
            num_warps=4,
        )  # fmt: skip
        after = (sums[:, :, 0], sums[:, :, 1], cs)

    dk = torch.empty(b, h, n_q, d, dtype=k.dtype, device=k.device)
    dv = torch.empty_like(dk)
    ds = torch.empty(b, h, n_q, n, dtype=s.dtype, device=s.device)
    key_along[(units.count, h)](
        q, k, v, s, do, visible, *side, chunk_z, *after, dk, dv, ds, to[0], to[1], to_c, units.table,
        *of_q, *of_k, *of_v, *of_s, *of_o, row, n * d if alone else 2 * n * d, *rest,
        **tiles, STARTED=not alone or seeded, ENDED=alone,
    )  # fmt: skip
    return _gathered([dq, dk, dv, ds], [*to, to_c], h // g, first, None)


def _seed(
    d_last: tuple[Tensor | None, Tensor | None, Tensor | None], last: tuple[Tensor, Tensor, Tensor], groups: int
) -> tuple[Tensor, ...]:
    """The gradient of the last state as if a query after the last token had read it; the first of a group takes it."""
    dk, dv, dz = (
        torch.zeros_like(t) if grad is None else grad.float() for grad, t in zip(d_last, last, strict=True)
    )  # fmt: skip
    c = (dk * last[0] + dv * last[1]).sum(-1) - dz
    seeds = []
    for t in (dk, dv, c):
        wide = t.new_zeros(t.shape[0], t.shape[1], groups, *t.shape[2:])
        wide[:, :, 0] = t
        seeds.append(wide.flatten(1, 2))
    return tuple(seeds)


