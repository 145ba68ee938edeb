"""ABC_MLP on a GPU: the memory is written, scanned and read by Triton kernels, forward and backward."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from attnlab.kernels._abc_backward import key_gradients, query_gradients
from attnlab.kernels._abc_output import read_states
from attnlab.kernels._abc_plan import Plan, Units, plan_for, units_of
from attnlab.kernels._abc_state import scan_back, scan_states, write_states

__all__ = ["abc_attention"]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    visible: Tensor | None,
    first: tuple[Tensor, Tensor, Tensor] | None,
    cu_seqlens: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output, the memory after the last key (K~, V~, z), and the states and z that the backward pass needs."""
    b, h, n_q, d = q.shape
    g, n_k, n = k.shape[1], k.shape[2], s.shape[3]
    plan = plan_for(d, n, q.dtype)
    units = units_of(b, n_k, plan.C if causal else 8 * plan.C, cu_seqlens)
    states, prefix, last = _memory(k, v, s, visible, first, units, plan)
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


def _memory(
    k: Tensor,
    v: Tensor,
    s: Tensor,
    visible: Tensor | None,
    first: tuple[Tensor, Tensor, Tensor] | None,
    units: Units,
    plan: Plan,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """The state before each unit, z before each unit, and the state after the last."""
    g, n_k, d = k.shape[1:]
    n = s.shape[3]
    states = torch.empty(units.count, g, 2, n, d, dtype=plan.state, device=k.device)
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
    first: tuple[Tensor, Tensor, Tensor] | None,
    cu_seqlens: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, s and of the first state (K~, V~, z), the last three meaningful if there was one."""
    q, k, v, s, last_k, last_v, last_z, states, prefix = saved
    b, h, n_q, d = q.shape
    g, n_k, n = k.shape[1], k.shape[2], s.shape[3]
    plan = plan_for(d, n, q.dtype)
    units = units_of(b, n_q, plan.C, cu_seqlens)
    packed, masked = units.table is not None, visible is not None
    if do.stride(3) != 1:
        do = do.contiguous()
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
    if h != g:
        dk, dv, ds = (t.unflatten(1, (g, h // g)).sum(2) for t in (dk, dv, ds))
    if first is None:
        return dq, dk, dv, ds
    d_first = [t.unflatten(1, (g, h // g)).sum(2) for t in (to[0], to[1], to_c)]
    if not causal:
        d_first = [t * (first[2] - last_z).exp().view(*t.shape[:3], *[1] * (t.dim() - 3)) for t in d_first]
    dz = (d_first[0] * first[0] + d_first[1] * first[1]).sum(-1) - d_first[2]
    return dq, dk, dv, ds, d_first[0], d_first[1], dz


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


class _Abc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, s, first_k, first_v, first_z, visible, cu_seqlens, causal, scale):  # type: ignore[no-untyped-def]
        first = None if first_k is None else (first_k, first_v, first_z)
        out, *rest = forward(q, k, v, s, visible, first, cu_seqlens, causal, scale)
        ctx.save_for_backward(q, k, v, s, *rest, visible, cu_seqlens, first_k, first_v, first_z)
        ctx.causal, ctx.scale = causal, scale
        ctx.set_materialize_grads(False)
        return out, *rest[:3]

    @staticmethod
    def backward(ctx, do, dk, dv, dz):  # type: ignore[no-untyped-def]
        *saved, visible, cu_seqlens, first_k, first_v, first_z = ctx.saved_tensors
        first = None if first_k is None else (first_k, first_v, first_z)
        if do is None:
            do = torch.zeros_like(saved[0])
        grads = backward(do, (dk, dv, dz), tuple(saved), visible, first, cu_seqlens, ctx.causal, ctx.scale)
        return *grads, *[None] * (7 - len(grads)), None, None, None, None


def abc_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    control: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    key_visible: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """out_t = V~_t^T softmax(scale K~_t q_t) (ABC, Eqs. 3-5 and Appendix B.1) and the memory (K~, V~, z) at the end."""
    first = state or (None, None, None)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, *last = _Abc.apply(q, k, v, control, *first, key_visible, cu_seqlens, causal, scale)
    return out, tuple(last)
