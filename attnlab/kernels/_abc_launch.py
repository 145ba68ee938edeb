"""Launches of the ABC kernels, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.kernels._abc_backward import key_gradients, query_gradients
from attnlab.kernels._abc_output import read_states
from attnlab.kernels._abc_plan import Form, Plan, Units, plan_for, tiles, units_of, walks
from attnlab.kernels._abc_state import sum_back, weigh_logits, write_states
from attnlab.kernels._launcher import launch

__all__ = ["Extras", "Grads", "State", "backward", "empty_state", "forward"]

State = tuple[Tensor, Tensor, Tensor]
Grads = tuple[Tensor | None, Tensor | None, Tensor | None]
# key_visible, the first state and cu_seqlens.
Extras = tuple[Tensor | None, State | None, Tensor | None]


def empty_state(rows: int, heads: int, slots: int, d: int, device: torch.device) -> State:
    """Room for K~, V~ and z."""
    k = torch.empty((rows, heads, slots, d), dtype=torch.float32, device=device)
    return k, torch.empty_like(k), torch.empty((rows, heads, slots), dtype=torch.float32, device=device)


def _make_states(
    k: Tensor, v: Tensor, s: Tensor, extras: Extras, units: Units, plan: Plan, causal: bool
) -> tuple[Tensor, Tensor, Tensor, State]:
    """The state before each chunk if causal, z before and after each, and the state after the last."""
    visible, first, cu = extras
    _, g, n_k, d = k.shape
    n, device = plan.slots, k.device
    count = units.count if causal else 0
    states = torch.empty((count, g, 2, n, d), dtype=plan.state, device=device)
    zs = torch.empty((count, g, n), dtype=torch.float32, device=device)
    ends = torch.empty_like(zs)
    last = empty_state(units.sequences, g, n, d, device)
    even = cu is None and n_k % plan.C == 0
    weights = torch.empty((k.shape[0], g, n_k, n), dtype=plan.weight, device=device)
    tops = torch.empty((units.count, g, n), dtype=torch.float32, device=device)
    totals = torch.empty_like(tops)
    options = tiles("weigh", plan, Form(True, even, cu is not None, visible is not None), False)
    launch(
        weigh_logits,
        (units.count, g, 1),
        (s, visible, weights, tops, totals, units.table),
        (*s.stride()[:3], _row(visible), n_k, units.per_row, g, n),
        options,
    )
    form = Form(causal, even, cu is not None, visible is not None, first is not None)
    rows = units.sequences * g
    parts = part_zs = None
    for walk in walks("write", plan, form, rows, units.count // max(1, units.sequences)):
        if walk.segments > 1 and parts is None:
            parts = torch.empty((rows, walk.segments, 2, n, d), dtype=torch.float32, device=device)
            part_zs = torch.empty((rows, walk.segments, n), dtype=torch.float32, device=device)
        launch(
            write_states,
            (walk.programs, 1, 1),
            (k, v, weights, tops, totals, visible, states, zs, ends, *(first or (None, None, None)), *last,
             parts, part_zs, units.bounds, cu),
            (*k.stride()[:3], *v.stride()[:3], _row(visible), n_k, units.per_row, g, n, d, walk.segments),
            walk.options,
        )  # fmt: skip
    return states, zs, ends, last


def _row(visible: Tensor | None) -> int:
    return 0 if visible is None else visible.stride(0)


def forward(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, extras: Extras, causal: bool, scale: float, train: bool
) -> tuple[Tensor, State, list[Tensor]]:
    """The output, the memory after the last key, and for the backward pass: states, z, scores, and which are wide."""
    visible, _, cu = extras
    b, h, n_q, d = q.shape
    _, g, n_k, n = s.shape
    plan = plan_for(d, n, q.dtype)
    units = units_of(b, n_k, plan.C, cu)
    states, zs, ends, last = _make_states(k, v, s, extras, units, plan, causal)
    if not causal:
        states, zs = torch.stack(last[:2], 2).to(plan.state), last[2].clone()
        units = units_of(b, n_q, plan.C, cu)
    out = torch.empty_like(q)
    scores = torch.empty((b, h, n_q if causal and train else 0, n), dtype=torch.float32, device=q.device)
    wide = torch.empty((units.count if causal else 0, g), dtype=torch.int32, device=q.device)
    form = Form(causal, cu is None and n_q % plan.C == 0, cu is not None, visible is not None)
    tensors = (q, k, v, s, visible, states, zs, ends, scores, wide, out, units.table)
    numbers = (
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *s.stride()[:3], *out.stride()[:3],
        _row(visible), n_q, units.per_row, g, h // g, n, d, scale,
    )  # fmt: skip
    # The second launch finds nothing to do unless logits climb far within a chunk.
    for again in (False, True) if causal else (False,):
        options = tiles("read", plan, form, again, causal and train)
        launch(read_states, (units.count, h, 1), tensors, numbers, options)
    return out, last, [states, zs, ends, scores, wide]


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
    visible, first, cu = extras
    q, k, v, s = inputs
    states, zs, ends, scores, wide = saved
    b, h, n_q, d = q.shape
    _, g, n_k, n = s.shape
    plan, device = plan_for(d, n, q.dtype), q.device
    if do.stride(3) != 1:
        do = do.contiguous()
    units = units_of(b, n_q, plan.C, cu)
    form = Form(causal, cu is None and n_q % plan.C == 0, cu is not None, visible is not None, groups=h // g)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *s.stride()[:3], *do.stride()[:3])
    dq, rests = torch.empty_like(q), torch.empty_like(scores)
    shares = torch.empty((2, b, h, n_q, n), dtype=plan.weight, device=device)
    wide_cs = torch.empty((units.count, h, n), dtype=torch.float32, device=device)
    each = b * h * n_q * n
    again_too = (False, True) if causal else (False,)
    for again in again_too:
        launch(
            query_gradients,
            (units.count, h, 1),
            (q, k, v, s, do, visible, states, zs, ends, wide, dq, scores, shares, rests, wide_cs, units.table),
            (*strides, *dq.stride()[:3], each, _row(visible), n_q, units.per_row, g, h // g, n, d, scale),
            tiles("query", plan, form, again),
        )
    sums, cs, to, to_c = _sum_back(q, do, d_last, last, (shares, rests, wide, wide_cs, zs, ends), units, cu, plan, form)
    if not causal:
        sums, cs = to.to(plan.sums), to_c
        units = units_of(b, n_k, plan.C, cu)
        form = Form(causal, cu is None and n_k % plan.C == 0, cu is not None, visible is not None, groups=h // g)
    dk = torch.empty((b, g, n_k, d), dtype=k.dtype, device=device)
    dv = torch.empty_like(dk)
    ds = torch.empty((b, g, n_k, n), dtype=s.dtype, device=device)
    for again in again_too:
        launch(
            key_gradients,
            (units.count, g, 1),
            (q, k, v, s, do, visible, zs, ends, wide, scores, shares, rests, sums, cs, dk, dv, ds, units.table),
            (*strides, each, _row(visible), n_k, units.per_row, g, n, d, scale),
            tiles("key", plan, form, again),
        )
    if first is None:
        return dq, dk, dv, ds
    return dq, dk, dv, ds, *_of_first(to, to_c, first, None if causal else last[2])


def _sum_back(
    q: Tensor,
    do: Tensor,
    d_last: Grads,
    last: State,
    made: tuple[Tensor, ...],
    units: Units,
    cu: Tensor | None,
    plan: Plan,
    form: Form,
) -> tuple[Tensor, ...]:
    """Sums over the queries after each chunk, and over all: (units, g, 2, n, d) and (units, g, n), twice."""
    b, h, n_q, d = q.shape
    n, g, device = plan.slots, h // form.groups, q.device
    count = units.count if form.causal else 0
    sums = torch.empty((count, g, 2, n, d), dtype=plan.sums, device=device)
    cs = torch.empty((count, g, n), dtype=torch.float32, device=device)
    to = torch.empty((units.sequences, g, 2, n, d), dtype=torch.float32, device=device)
    to_c = torch.empty((units.sequences, g, n), dtype=torch.float32, device=device)
    seeds = _seeded(d_last, last)
    form = Form(form.causal, form.even, form.packed, False, seeds is not None, form.groups)
    rows = units.sequences * g
    parts = part_cs = fades = None
    for walk in walks("sum", plan, form, rows, units.count // max(1, units.sequences)):
        if walk.segments > 1 and parts is None:
            parts = torch.empty((rows, walk.segments, 2, n, d), dtype=torch.float32, device=device)
            part_cs = torch.empty((rows, walk.segments, n), dtype=torch.float32, device=device)
            fades = torch.empty_like(part_cs)
        launch(
            sum_back,
            (walk.programs, 1, 1),
            (q, do, *made, sums, cs, *(seeds or (None, None)), to, to_c, parts, part_cs, fades, units.bounds, cu),
            (*q.stride()[:3], *do.stride()[:3], b * h * n_q * n, n_q, units.per_row, g, n, d, walk.segments),
            walk.options,
        )
    return sums, cs, to, to_c


def _of_first(to: Tensor, to_c: Tensor, first: State, last_z: Tensor | None) -> State:
    """Gradients of the first state; the sums may be relative to ``last_z`` instead of its z."""
    dk, dv = to.unbind(2)
    if last_z is not None:
        faded = (first[2] - last_z).exp()
        dk, dv, to_c = dk * faded.unsqueeze(-1), dv * faded.unsqueeze(-1), to_c * faded
    return dk, dv, (dk * first[0] + dv * first[1]).sum(-1) - to_c


def _seeded(d_last: Grads, last: State) -> tuple[Tensor, Tensor] | None:
    """The gradient of the last state as if a query after the last token had read it."""
    if all(grad is None for grad in d_last):
        return None
    dk, dv, dz = (
        torch.zeros_like(t) if grad is None else grad.float() for grad, t in zip(d_last, last, strict=True)
    )  # fmt: skip
    return torch.stack([dk, dv], 2), (dk * last[0] + dv * last[1]).sum(-1) - dz
