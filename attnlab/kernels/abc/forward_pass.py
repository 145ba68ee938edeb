"""Launches of the ABC kernels, forward and backward."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from attnlab.kernels.abc.backward import (
    key_gradients,
    loose_key_gradients,
    loose_query_gradients,
    query_gradients,
)
from attnlab.kernels.abc.output import loose_read_states, read_states
from attnlab.kernels.abc.plan import Form, Plan, Units, Walk, grid_of, plan_for, tiles, units_of, walks
from attnlab.kernels.abc.recipes import Calls, Kinds, bytes_of, recall
from attnlab.kernels.abc.state import sum_back, weigh_logits, write_states

__all__ = ["Inputs", "State", "backward", "buffer_bytes", "empty_state", "forward", "key_of"]

State = tuple[Tensor, Tensor, Tensor]
Grads = tuple[Tensor | None, Tensor | None, Tensor | None]
# q, k, v, control, key_visible, the first state and cu_seqlens.
Inputs = tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None
]


def empty_state(rows: int, heads: int, slots: int, d: int, device: torch.device) -> State:
    """Room for K~, V~ and z."""
    k = torch.empty((rows, heads, slots, d), dtype=torch.float32, device=device)
    return k, torch.empty_like(k), torch.empty((rows, heads, slots), dtype=torch.float32, device=device)


def _saved_kinds(q: Tensor, s: Tensor, plan: Plan, units: int, sequences: int, causal: bool, train: bool) -> Kinds:
    """What reading needs and the backward pass again: states, z before and after each chunk, what kind it is, scores.

    After states comes what rounding takes of them, where that is kept, with each slot's largest logit. Without
    ``causal`` there is one state for each sequence, and its z.
    """
    (b, h, n_q, d), (g, n) = q.shape, (s.shape[1], s.shape[3])
    count, own = (units, units) if causal else (sequences, 0)
    return (
        ((count, g, 2, n, d), plan.state),
        ((count if plan.fine else 0, g, 2, n, d), plan.state),
        ((own if plan.fine else 0, g, n), torch.float32),
        ((count, g, n), plan.full),
        ((own, g, n), plan.full),
        ((own, g), torch.int32),
        ((b, h, n_q if causal and train else 0, n), plan.full),
    )


def _weight_kinds(s: Tensor, plan: Plan, units: int) -> Kinds:
    """What writing the states needs: weights of the logits, the largest of each chunk and the weights' sums."""
    b, g, n_k, n = s.shape
    return ((b, g, n_k, n), plan.weight), ((units, g, n), torch.float32), ((units, g, n), plan.full)


def buffer_bytes(q: Tensor, s: Tensor, plan: Plan, units: int, sequences: int, causal: bool, train: bool) -> int:
    """The size of a buffer for both: scores come when weights are not needed any more, and take their place."""
    kinds = _saved_kinds(q, s, plan, units, sequences, causal, train)
    return max(bytes_of(kinds), bytes_of(_weight_kinds(s, plan, units), bytes_of(kinds[:-1])))


def key_of(inputs: Inputs, causal: bool, scale: float, train: bool) -> Hashable:
    """What the launches of a call depend on."""
    q, k, v, s, *extras = inputs
    return (
        causal, scale, train, q.device, q.shape, k.shape, v.shape, s.shape, q.stride(), k.stride(), v.stride(),
        s.stride(), q.dtype, k.dtype, v.dtype, s.dtype,
        *[None if t is None else (t.shape, t.stride(), t.dtype) for t in extras],
    )  # fmt: skip


def forward(
    inputs: Inputs, causal: bool, scale: float, train: bool, key: Hashable = None
) -> tuple[Tensor, State, Tensor]:
    """The output, the memory after the last key, and for the backward pass a buffer of what it needs.

    ``key`` is that of the call, if it is known already.
    """
    key = key or key_of(inputs, causal, scale, train)
    found = recall(key, inputs)
    if found is not None:
        out, last_k, last_v, last_z, buffer = found
        return out, (last_k, last_v, last_z), buffer
    q, k, v, s, visible, *_, cu = inputs
    calls = Calls(q.device)
    b, h, n_q, d = q.shape
    _, g, n_k, n = s.shape
    plan = plan_for(d, n, q.dtype, train)
    units = units_of(calls, b, n_k, plan.C, cu)
    sizes = (q, s, plan, units.count, units.sequences, causal, train)
    kinds = _saved_kinds(*sizes)
    buffer = calls.empty((buffer_bytes(*sizes),), torch.uint8)
    saved = calls.parts(buffer, kinds)
    weights = calls.parts(buffer, _weight_kinds(s, plan, units.count), bytes_of(kinds[:-1]))
    last = _make_states(calls, inputs, units, plan, weights, saved if causal else None)
    states, lows, peaks, zs, ends, wide, scores = saved
    if not causal:
        exact = torch.stack(last[:2], 2)
        states.copy_(exact)
        if plan.fine:
            lows.copy_(exact - states)
        zs.copy_(last[2])
        units = units_of(calls, b, n_q, plan.C, cu)
    out = calls.like(q)
    form = Form(causal, cu is None and n_q % plan.C == 0, cu is not None, visible is not None, groups=h // g)
    tensors = (q, k, v, s, visible, states, lows, peaks, zs, ends, scores, wide, out, units.table)
    numbers = (
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *s.stride()[:3], *out.stride()[:3],
        _row(visible), n_q, units.per_row, g, h // g, n, d, scale,
    )  # fmt: skip
    # The second launch finds nothing to do unless logits climb far within a chunk.
    for again in (False, True) if causal else (False,):
        options = tiles("read", plan, form, again, causal and train)
        kernel = loose_read_states if again and plan.loose else read_states
        calls.launch(kernel, grid_of(options, units.count, h), tensors, numbers, options)
    if causal:
        calls.keep(key, inputs, (out, *last, buffer))
    return out, last, buffer


def _make_states(
    calls: Calls, inputs: Inputs, units: Units, plan: Plan, weights: list[Tensor], saved: list[Tensor] | None
) -> State:  # fmt: skip
    """The state after the last chunk; into ``saved``, if causal, what there is before each and z after it."""
    _, k, v, s, visible, *first, cu = inputs
    _, g, n_k, d = k.shape
    n, rows = plan.slots, units.sequences * g
    even, packed, masked = cu is None and n_k % plan.C == 0, cu is not None, visible is not None
    last = (
        calls.empty((units.sequences, g, n, d), torch.float32),
        calls.empty((units.sequences, g, n, d), torch.float32),
        calls.empty((units.sequences, g, n), torch.float32),
    )
    calls.launch(
        weigh_logits,
        (units.count, g, 1),
        (s, visible, *weights, units.table),
        (*s.stride()[:3], _row(visible), n_k, units.per_row, g, n),
        tiles("weigh", plan, Form(True, even, packed, masked), False),
    )
    form = Form(saved is not None, even, packed, masked, first[0] is not None)
    passes = walks("write", plan, form, rows, units.count // max(1, units.sequences))
    parts: list[Tensor] | list[None] = [None] * 3
    if len(passes) > 1:
        segments = passes[0].segments
        each = (rows, segments, n), plan.full
        _, parts = calls.several((((rows, segments, 2, n, d), plan.full), each, each))
    kept: Sequence[Tensor | None] = saved[:5] if saved else [None] * 5
    for walk in passes:
        calls.launch(
            write_states,
            (walk.programs, 1, 1),
            (k, v, *weights, visible, *kept, *first, *last, *parts, units.bounds, cu),
            (*k.stride()[:3], *v.stride()[:3], _row(visible), n_k, units.per_row, g, n, d, walk.segments),
            walk.options,
        )
    return last


def _row(visible: Tensor | None) -> int:
    return 0 if visible is None else visible.stride(0)


def backward(
    do: Tensor,
    d_last: Grads,
    inputs: Inputs,
    last: State,
    buffer: Tensor,
    causal: bool,
    scale: float,
    key: Hashable = None,
) -> Sequence[Tensor]:
    """Gradients of q, k, v, s, and of the first state where there was one; ``key`` is that of the forward pass."""
    q, k, v, s, visible, *first, cu = inputs
    key, given = (do.stride(), do.dtype, key or key_of(inputs, causal, scale, True)), (*inputs, do, buffer, *last)
    plain = causal and first[0] is None and all(grad is None for grad in d_last)
    if plain:
        found = recall(key, given)
        if found is not None:
            return found
    calls = Calls(q.device)
    b, h, n_q, d = q.shape
    _, g, n_k, n = s.shape
    plan = plan_for(d, n, q.dtype, True)
    if do.stride(3) != 1:
        do = do.contiguous()
    units = units_of(calls, b, n_q, plan.C, cu)
    states, lows, peaks, zs, ends, wide, scores = calls.parts(
        buffer, _saved_kinds(q, s, plan, units.count, units.sequences, causal, True)
    )
    form = Form(causal, cu is None and n_q % plan.C == 0, cu is not None, visible is not None, groups=h // g)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *s.stride()[:3], *do.stride()[:3])
    passes, kinds = _sums(plan, form, units, g, not all(grad is None for grad in d_last))
    _, (shares, rests, wide_cs, *room) = calls.several(
        (
            ((2, b, h, n_q, n), plan.weight),
            (tuple(scores.shape), plan.full),
            ((units.count, h, n), plan.full),
            *kinds,
        )
    )
    dq, each = calls.like(q), b * h * n_q * n
    again_too = (False, True) if causal else (False,)
    tensors: tuple[Tensor | None, ...] = (
        q, k, v, s, do, visible, states, lows, peaks, zs, ends, wide, dq, scores, shares, rests, wide_cs, units.table,
    )  # fmt: skip
    for again in again_too:
        options = tiles("query", plan, form, again)
        calls.launch(
            loose_query_gradients if again and plan.loose else query_gradients,
            grid_of(options, units.count, h),
            tensors,
            (*strides, *dq.stride()[:3], each, _row(visible), n_q, units.per_row, g, h // g, n, d, scale),
            options,
        )
    seeds = _seeded(d_last, last) or (None, None)
    sums, cs, to, to_c, *rest = room
    parts = rest if len(passes) > 1 else [None] * 3
    tensors = (
        q, do, shares, rests, wide, wide_cs, states, *last[:2], zs, ends, sums, cs, *seeds, to, to_c, *parts,
        units.bounds, cu,
    )  # fmt: skip
    for walk in passes:
        calls.launch(
            sum_back,
            (walk.programs, 1, 1),
            tensors,
            (*q.stride()[:3], *do.stride()[:3], each, n_q, units.per_row, g, n, d, walk.segments),
            walk.options,
        )
    if not causal:
        sums, cs = to, to_c.unsqueeze(2)
        units = units_of(calls, b, n_k, plan.C, cu)
        form = Form(causal, cu is None and n_k % plan.C == 0, cu is not None, visible is not None, groups=h // g)
    dk, dv = (calls.empty((b, g, n_k, d), k.dtype) for _ in range(2))
    ds = calls.empty((b, g, n_k, n), s.dtype)
    for again in again_too:
        calls.launch(
            loose_key_gradients if again and plan.loose else key_gradients,
            (units.count, g, 1),
            (q, k, v, s, do, visible, zs, ends, wide, scores, shares, rests, sums, cs, dk, dv, ds, units.table),
            (*strides, each, _row(visible), n_k, units.per_row, g, n, d, cs.shape[2], scale),
            tiles("key", plan, form, again),
        )
    if plain:
        calls.keep(key, given, (dq, dk, dv, ds))
    if first[0] is None or first[1] is None or first[2] is None:
        return dq, dk, dv, ds
    return dq, dk, dv, ds, *_of_first(to, to_c, (first[0], first[1], first[2]), None if causal else last[2])


def _sums(plan: Plan, form: Form, units: Units, g: int, seeded: bool) -> tuple[tuple[Walk, ...], Kinds]:
    """How sums over queries are taken, and their room: after each chunk and over all, with what is added to logits.

    Then come the same of each segment, if there are several, and what is left over it.
    """
    n, d = plan.slots, plan.d
    form = Form(form.causal, form.even, form.packed, False, seeded, form.groups)
    rows, count = units.sequences * g, units.count if form.causal else 0
    passes = walks("sum", plan, form, rows, units.count // max(1, units.sequences))
    segments = passes[0].segments if len(passes) > 1 else 0
    # Each tile of rounded sums has its part of what is added to logits.
    c_parts = 1 if plan.sums == plan.full else 2 * -(-d // dict(passes[0].options)["BD"])
    return passes, (
        ((count, g, 2, n, d), plan.sums),
        ((count, g, c_parts, n), plan.full),
        ((units.sequences, g, 2, n, d), plan.full),
        ((units.sequences, g, n), plan.full),
        ((rows, segments, 2, n, d), plan.full),
        ((rows, segments, n), plan.full),
        ((rows, segments, n), plan.full),
    )


def _of_first(to: Tensor, to_c: Tensor, first: State, last_z: Tensor | None) -> State:
    """Gradients of the first state; the sums may be relative to ``last_z`` instead of its z."""
    dk, dv = to.unbind(2)
    if last_z is not None:
        faded = (first[2] - last_z).exp()
        dk, dv, to_c = dk * faded.unsqueeze(-1), dv * faded.unsqueeze(-1), to_c * faded
    dz = (dk * first[0] + dv * first[1]).sum(-1) - to_c
    return dk.float(), dv.float(), dz.float()


def _seeded(d_last: Grads, last: State) -> tuple[Tensor, Tensor] | None:
    """The gradient of the last state as if a query after the last token had read it."""
    if all(grad is None for grad in d_last):
        return None
    dk, dv, dz = (
        torch.zeros_like(t) if grad is None else grad.float() for grad, t in zip(d_last, last, strict=True)
    )  # fmt: skip
    return torch.stack([dk, dv], 2), (dk * last[0] + dv * last[1]).sum(-1) - dz
