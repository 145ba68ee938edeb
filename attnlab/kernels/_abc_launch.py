"""Launches of the ABC kernels, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from attnlab.kernels._abc_backward import key_gradients, query_gradients
from attnlab.kernels._abc_output import read_states
from attnlab.kernels._abc_plan import Plan, Units, launch_of, plan_for, units_of
from attnlab.kernels._abc_state import scan_back, scan_states, write_states

__all__ = ["Extras", "Grads", "State", "backward", "empty_state", "forward"]

State = tuple[Tensor, Tensor, Tensor]
Grads = tuple[Tensor | None, Tensor | None, Tensor | None]
# key_visible, the first state and cu_seqlens.
Extras = tuple[Tensor | None, State | None, Tensor | None]


def _make_states(
    k: Tensor, v: Tensor, s: Tensor, extras: Extras, units: Units, plan: Plan
) -> tuple[Tensor, Tensor, Tensor, State]:
    """The state before each unit, z before each unit and of each alone, and the state after the last."""
    visible, first, _ = extras
    g, n_k, d = k.shape[1:]
    n = s.shape[3]
    states = torch.empty(units.count, g, 2, n, d, dtype=plan.state, device=k.device)
    zs = torch.empty(units.count, g, n, dtype=torch.float32, device=k.device)
    prefix = torch.empty_like(zs)
    how = launch_of(plan, "write", False)
    if units.count:
        write_states[(units.count, g, triton.cdiv(d, how["BD"]))](
            k, v, s, visible, states, zs, units.table, *k.stride()[:3], *v.stride()[:3], *s.stride()[:3],
            0 if visible is None else visible.stride(0), n_k, units.per_row, g, n, d, units.size,
            C=plan.C, NP=plan.NP, EVEN=units.table is None and n_k % plan.C == 0,
            FULL=n == plan.NP and plan.state == torch.bfloat16, WHOLE=d % how["BD"] == 0,
            ONCE=units.size == plan.C, VARLEN=units.table is not None,
            MASKED=visible is not None, CT=plan.CT, PREC=plan.PREC, **how,
        )  # fmt: skip
    last = empty_state(units.sequences, g, n, d, k.device)
    first_k, first_v, first_z = first or (None, None, None)
    rows = _rows(units.sequences * g, n, d)
    scan_states[(units.sequences * g, triton.cdiv(n, rows), 2)](
        states, zs, prefix, first_k, first_v, first_z, *last, units.bounds, units.per_row, g, n, d,
        BN=rows, BD=triton.next_power_of_2(d), VARLEN=units.table is not None, STARTED=first is not None,
        num_warps=4,
    )  # fmt: skip
    return states, prefix, zs, last


def empty_state(rows: int, heads: int, slots: int, d: int, device: torch.device) -> State:
    """Room for K~, V~ and z."""
    k = torch.empty(rows, heads, slots, d, dtype=torch.float32, device=device)
    return k, torch.empty_like(k), torch.empty(rows, heads, slots, dtype=torch.float32, device=device)


def _scan_sums(
    sums: Tensor, cs: Tensor, prefix: Tensor, last_z: Tensor, seed: tuple[Tensor, Tensor] | None, units: Units,
    plan: Plan, *, decay: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Sums over the queries of each unit (units, h, 2, n, d) become those over all later ones; returns the totals."""
    _, h, _, n, d = sums.shape
    to = torch.empty(units.sequences, h, 2, n, d, dtype=torch.float32, device=sums.device)
    to_c = torch.empty(units.sequences, h, 2, n, dtype=torch.float32, device=sums.device)
    rows = _rows(units.sequences * h, n, d)
    seeds, seed_c = seed or (None, None)
    scan_back[(units.sequences * h, triton.cdiv(n, rows), 2)](
        sums, cs, prefix, last_z, seeds, seed_c, to, to_c, units.bounds, units.per_row, h, h // last_z.shape[1], n, d,
        BN=rows, BD=triton.next_power_of_2(d), VARLEN=units.table is not None, DECAY=decay,
        SEEDED=seed is not None, num_warps=4,
    )  # fmt: skip
    return to, to_c


def _rows(programs: int, n: int, d: int) -> int:
    """Slots for each program of a scan: few where there are few sequences and heads."""
    rows = min(triton.next_power_of_2(n), 2048 // triton.next_power_of_2(d))
    while rows > 1 and programs * triton.cdiv(n, rows) < 256:
        rows //= 2
    return rows


def forward(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, extras: Extras, causal: bool, scale: float, train: bool
) -> tuple[Tensor, State, list[Tensor]]:
    """The output, the memory after the last key, and for the backward pass: states, z, scores, and which are wide."""
    visible, _, cu_seqlens = extras
    b, h, n_q, d = q.shape
    g, n_k, n = k.shape[1], k.shape[2], s.shape[3]
    plan = plan_for(d, n, q.dtype)
    units = units_of(b, n_k, plan.C if causal else 8 * plan.C, cu_seqlens)
    states, prefix, own_zs, last = _make_states(k, v, s, extras, units, plan)
    if not causal:
        states, prefix, own_zs = torch.stack(last[:2], 2).to(plan.state), last[2].clone(), last[2].new_empty(0)
        units = units_of(b, n_q, plan.C, cu_seqlens)
    out = torch.empty_like(q)
    scores = torch.empty(b, h, n_q if causal and train else 0, n, dtype=torch.float32, device=q.device)
    wide = torch.empty(units.count if causal else 0, g, dtype=torch.int32, device=q.device)
    row = 0 if visible is None else visible.stride(0)
    # The second launch finds nothing to do unless logits climb far within a chunk.
    for again in (False, True) if causal else (False,):
        read_states[(units.count, h)](
            q, k, v, s, visible, states, prefix, own_zs, scores, wide, out, units.table,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *s.stride()[:3], *out.stride()[:3],
            row, n_q, units.per_row, g, h // g, n, d, scale, SAVED=causal and train,
            **_tiles("read", plan, d, n, n_q, causal, units, visible, again),
        )  # fmt: skip
    return out, last, [states, prefix, own_zs, scores, wide]


def _tiles(
    kernel: str, plan: Plan, d: int, n: int, length: int, causal: bool, units: Units, visible: Tensor | None, wide: bool
) -> dict[str, Any]:
    packed = units.table is not None
    even, masked = not packed and length % plan.C == 0, visible is not None
    # Kernels of their own for full tiles only where they are worth their compilation.
    full = n == plan.NP and plan.state == torch.bfloat16
    how = launch_of(plan, kernel, wide)
    return {
        "C": plan.C, "NP": plan.NP, "CT": plan.CT, "PREC": plan.PREC, "CAUSAL": causal, "EVEN": even, "FULL": full,
        "WHOLE": d % how["BD"] == 0, "SURE": causal and even and full and not masked, "WIDE": wide, "VARLEN": packed,
        "MASKED": masked, **how,
    }  # fmt: skip


def backward(
    do: Tensor,
    d_last: Grads,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    last: State,
    saved: list[Tensor],
    extras: Extras,
    causal: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, s, and of the first state where there was one."""
    visible, first, cu_seqlens = extras
    q, k, v, s = inputs
    states, prefix, own_zs, scores, wide = saved
    b, h, n_q, d = q.shape
    g, n_k, n = k.shape[1], k.shape[2], s.shape[3]
    plan = plan_for(d, n, q.dtype)
    if do.stride(3) != 1:
        do = do.contiguous()
    units = units_of(b, n_q, plan.C, cu_seqlens)
    row = 0 if visible is None else visible.stride(0)
    strides = [*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *s.stride()[:3], *do.stride()[:3]]
    dq, dps = torch.empty_like(q), torch.empty_like(scores)
    # Few slots are often filled by one key each, and then bf16 sums are too coarse for the logits' gradient.
    fine = n <= 32 or plan.state == torch.float32
    kind = torch.float32 if fine else plan.state
    sums = torch.empty(units.count, h, 2, n, d, dtype=kind, device=q.device)
    cs = torch.empty(units.count, h, 2, n, dtype=torch.float32, device=q.device)
    for again in (False, True) if causal else (False,):
        query_gradients[(units.count, h)](
            q, k, v, s, do, visible, states, prefix, own_zs, wide, dq, scores, dps, sums, cs, units.table,
            *strides, *dq.stride()[:3], row, n_q, units.per_row, g, h // g, n, d, scale,
            **_tiles("query", plan, d, n, n_q, causal, units, visible, again),
        )  # fmt: skip
    to, to_c = _scan_sums(sums, cs, prefix, last[2], _seeded(d_last, last, h // g), units, plan, decay=causal)
    if not causal:
        sums, cs = to.to(kind), to_c
        units = units_of(b, n_k, plan.C, cu_seqlens)
    dk = torch.empty(b, h, n_k, d, dtype=k.dtype, device=k.device)
    dv = torch.empty_like(dk)
    ds = torch.empty(2, b, h, n_k, n, dtype=s.dtype, device=s.device)
    for again in (False, True) if causal else (False,):
        key_gradients[(2 * units.count, h)](
            q, k, v, s, do, visible, prefix, own_zs, wide, scores, dps, sums, cs, dk, dv, ds, units.table,
            *strides, row, n_k, units.per_row, g, h // g, n, d, scale, ds[0].numel(),
            SPLIT=fine and plan.state == torch.bfloat16,
            **_tiles("key", plan, d, n, n_k, causal, units, visible, again),
        )  # fmt: skip
    return _gathered([dq, dk, dv, ds[0] + ds[1]], to, to_c, h // g, first, None if causal else last[2])


def _gathered(
    grads: list[Tensor], to: Tensor, to_c: Tensor, groups: int, first: State | None, last_z: Tensor | None
) -> tuple[Tensor, ...]:
    """Gradients summed over the query heads of a key head; those of the first state may be relative to ``last_z``."""
    if groups > 1:
        grads[1:] = [t.unflatten(1, (-1, groups)).sum(2) for t in grads[1:]]
    if first is None:
        return tuple(grads)
    dk, dv = to.unflatten(1, (-1, groups)).sum(2).unbind(2)
    dc = to_c.unflatten(1, (-1, groups)).sum((2, 3))
    if last_z is not None:
        faded = (first[2] - last_z).exp()
        dk, dv, dc = dk * faded.unsqueeze(-1), dv * faded.unsqueeze(-1), dc * faded
    dz = (dk * first[0] + dv * first[1]).sum(-1) - dc
    return *grads, dk, dv, dz


def _seeded(d_last: Grads, last: State, groups: int) -> tuple[Tensor, Tensor] | None:
    """The gradient of the last state as if a query after the last token had read it; the first of a group takes it."""
    if all(grad is None for grad in d_last):
        return None
    dk, dv, dz = (
        torch.zeros_like(t) if grad is None else grad.float() for grad, t in zip(d_last, last, strict=True)
    )  # fmt: skip
    c = torch.stack([(dk * last[0]).sum(-1) - dz, (dv * last[1]).sum(-1)], 2)
    seeds = []
    for t in (torch.stack([dk, dv], 2), c):
        wide = t.new_zeros(t.shape[0], t.shape[1], groups, *t.shape[2:])
        wide[:, :, 0] = t
        seeds.append(wide.flatten(1, 2))
    return seeds[0], seeds[1]
