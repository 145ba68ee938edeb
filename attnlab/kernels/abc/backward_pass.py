"""The backward pass: the launches that take gradients of queries, sums over later queries, and gradients of keys."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attnlab.kernels.abc.key_backward import generic_key_gradients, key_gradients
from attnlab.kernels.abc.plan import (
    CallForm,
    Chunks,
    TilePlan,
    Walk,
    cut_into_chunks,
    grid_of,
    key_options,
    plan_for,
    query_options,
    sum_walks,
)
from attnlab.kernels.abc.query_backward import generic_query_gradients, query_gradients
from attnlab.kernels.abc.recorded_calls import CallRecorder, Layout, repeat
from attnlab.kernels.abc.records import (
    Inputs,
    Saved,
    State,
    StateGradients,
    call_key,
    known_buffer_layout,
    mask_stride,
    strides,
)
from attnlab.kernels.abc.state_backward import sum_back

__all__ = ["backward"]


class Shares(NamedTuple):
    """What ``query_gradients`` writes for ``sum_back`` and ``key_gradients``."""

    # g / weight and p / weight for each query and slot
    shares: Tensor
    # what is left over the chunk of share S + share dP, for each query and slot
    row_offsets: Tensor
    # the same over a whole chunk, if it is wide
    wide_offsets: Tensor


class Sums(NamedTuple):
    """What ``sum_back`` writes: sums over later queries, and what is subtracted from the gradients of logits."""

    # after each chunk, if causal
    sums: Tensor
    offsets: Tensor
    # over all queries
    first_sums: Tensor
    first_offsets: Tensor
    # over each segment, with what a segment keeps of the sums after it; empty without segments
    part_sums: Tensor
    part_offsets: Tensor
    part_fades: Tensor


@dataclass(frozen=True)
class BackwardCall:
    """A backward pass: what it is given, and how it is cut."""

    recorder: CallRecorder
    inputs: Inputs
    do: Tensor
    last: State
    saved: Saved
    plan: TilePlan
    chunks: Chunks
    form: CallForm
    scale: float

    @property
    def shares_stride(self) -> int:
        """From the shares of keys to those of values."""
        b, h, n_q, _ = self.inputs.q.shape
        return b * h * n_q * self.plan.slots

    @property
    def input_strides(self) -> dict[str, int]:
        """Strides of the inputs and the output's gradient."""
        q, k, v, control = self.inputs[:4]
        return strides(q=q, k=k, v=v, s=control, o=self.do)

    @property
    def launches(self) -> tuple[bool, ...]:
        """WIDE of the launches of a kernel that reads chunks: the second mostly finds no wide chunk."""
        return (False, True) if self.form.causal else (False,)


def backward(
    do: Tensor, d_last: StateGradients, inputs: Inputs, last: State, buffer: Tensor, causal: bool, scale: float,
    key: Hashable = None,
) -> Sequence[Tensor]:  # fmt: skip
    """Gradients of q, k, v, control, and of the first state where there is one.

    ``do`` and ``d_last`` are the gradients of the output and the last state, ``key`` is that of the forward pass.
    """
    key, tensors = (do.stride(), do.dtype, key or call_key(inputs, causal, scale, True)), (*inputs, do, buffer, *last)
    repeatable = causal and inputs.first_k is None and d_last.missing
    if repeatable:
        results = repeat(key, tensors)
        if results is not None:
            return results
    call = _prepare(do, inputs, last, buffer, causal, scale)
    walks, layout = _plan_sums(call, seeded=not d_last.missing)
    b, h, n_q, _ = inputs.q.shape
    n, full = call.plan.slots, call.plan.full_dtype
    room = call.recorder.empties(
        {
            "shares": ((2, b, h, n_q, n), call.plan.weight_dtype),
            "row_offsets": (tuple(call.saved.scores.shape), full),
            "wide_offsets": ((call.chunks.count, h, n), full),
            **layout,
        }
    )
    shares, sums = Shares(*list(room.values())[:3]), Sums(*list(room.values())[3:])
    dq = _launch_query_gradients(call, shares)
    _launch_sum_back(call, shares, sums, walks, _seeds(d_last, last))
    dk, dv, ds = _launch_key_gradients(call, shares, sums)
    if repeatable:
        call.recorder.save(key, tensors, (dq, dk, dv, ds))
    if inputs.first is None:
        return dq, dk, dv, ds
    return dq, dk, dv, ds, *_first_gradients(sums, inputs.first, None if causal else last.z)


def _prepare(do: Tensor, inputs: Inputs, last: State, buffer: Tensor, causal: bool, scale: float) -> BackwardCall:
    recorder, q, control = CallRecorder(inputs.q.device), inputs.q, inputs.control
    plan = plan_for(q.shape[3], control.shape[3], q.dtype, True)
    if do.stride(3) != 1:
        do = do.contiguous()
    chunks = cut_into_chunks(recorder, q.shape[0], q.shape[2], plan.chunk, inputs.cu_seqlens)
    layout = known_buffer_layout(q.shape, control.shape, plan, chunks.count, chunks.sequences, causal, True)
    saved = Saved(**recorder.views(buffer, layout.saved))
    form = _form(inputs, causal, q.shape[2], plan)
    return BackwardCall(recorder, inputs, do, last, saved, plan, chunks, form, scale)


def _form(inputs: Inputs, causal: bool, length: int, plan: TilePlan) -> CallForm:
    packed, groups = inputs.cu_seqlens is not None, inputs.q.shape[1] // inputs.k.shape[1]
    full_chunks = not packed and length % plan.chunk == 0
    return CallForm(causal, full_chunks, packed, inputs.key_visible is not None, groups=groups)


def _plan_sums(call: BackwardCall, *, seeded: bool) -> tuple[tuple[Walk, ...], Layout]:
    """The launches of ``sum_back``, and the fields of ``Sums``."""
    plan, chunks, form, g = call.plan, call.chunks, call.form, call.inputs.k.shape[1]
    n, d, full = plan.slots, plan.d, plan.full_dtype
    form = CallForm(form.causal, form.full_chunks, form.packed, False, seeded, form.groups)
    rows, count = chunks.sequences * g, chunks.count if form.causal else 0
    walks = sum_walks(plan, form, rows, chunks.count // max(1, chunks.sequences))
    segments = walks[0].segments if len(walks) > 1 else 0
    # Each tile of rounded sums has its part of the offsets.
    parts = 1 if plan.sums_dtype == full else 2 * -(-d // dict(walks[0].options)["BD"])
    return walks, {
        "sums": ((count, g, 2, n, d), plan.sums_dtype),
        "offsets": ((count, g, parts, n), full),
        "first_sums": ((chunks.sequences, g, 2, n, d), full),
        "first_offsets": ((chunks.sequences, g, n), full),
        "part_sums": ((rows, segments, 2, n, d), full),
        "part_offsets": ((rows, segments, n), full),
        "part_fades": ((rows, segments, n), full),
    }


def _launch_query_gradients(call: BackwardCall, shares: Shares) -> Tensor:
    """dq; and ``shares`` are written."""
    q, k, v, control, visible = call.inputs[:5]
    (_, h, n_q, d), g, plan = q.shape, k.shape[1], call.plan
    dq = call.recorder.empty_like(q)
    tensors = {
        "q": q, "k": k, "v": v, "s": control, "do": call.do, "visible": visible, **call.saved._asdict(),
        **shares._asdict(), "dq": dq, "table": call.chunks.table,
    }  # fmt: skip
    numbers = {
        **call.input_strides, **strides(d=dq), "SHARES_STRIDE": call.shares_stride, "sm": mask_stride(visible),
        "T": n_q, "NT": call.chunks.per_row, "G": g, "R": h // g, "N": plan.slots, "D": d, "scale": call.scale,
    }  # fmt: skip
    for wide in call.launches:
        options = query_options(plan, call.form, wide)
        kernel = generic_query_gradients if wide and plan.generic else query_gradients
        call.recorder.launch(kernel, grid_of(options, call.chunks.count, h), tensors, numbers, options)
    return dq


def _launch_sum_back(
    call: BackwardCall, shares: Shares, sums: Sums, walks: tuple[Walk, ...], seeds: tuple[Tensor, Tensor] | None
) -> None:  # fmt: skip
    """Write ``sums``."""
    q, saved, plan, do = call.inputs.q, call.saved, call.plan, call.do
    seed_sums, seed_offsets = seeds or (None, None)
    in_segments = len(walks) > 1
    tensors = {
        "q": q, "do": do, "states": saved.states, "z_before": saved.z_before, "z_after": saved.z_after,
        "chunk_flags": saved.chunk_flags, "last_k": call.last.k, "last_v": call.last.v, **shares._asdict(),
        "sums": sums.sums, "offsets": sums.offsets, "seeds": seed_sums, "seed_offsets": seed_offsets,
        "first_sums": sums.first_sums, "first_offsets": sums.first_offsets,
        "part_sums": sums.part_sums if in_segments else None,
        "part_offsets": sums.part_offsets if in_segments else None,
        "part_fades": sums.part_fades if in_segments else None,
        "bounds": call.chunks.bounds, "cu": call.inputs.cu_seqlens,
    }  # fmt: skip
    numbers = {
        **strides(q=q, o=do), "SHARES_STRIDE": call.shares_stride, "T": q.shape[2], "NT": call.chunks.per_row,
        "G": call.inputs.k.shape[1], "N": plan.slots, "D": plan.d,
    }  # fmt: skip
    for walk in walks:
        call.recorder.launch(
            sum_back, (walk.programs, 1, 1), tensors, {**numbers, "SEGMENTS": walk.segments}, walk.options
        )


def _launch_key_gradients(call: BackwardCall, shares: Shares, sums: Sums) -> tuple[Tensor, Tensor, Tensor]:
    """dk, dv and ds."""
    q, k, v, control, visible = call.inputs[:5]
    (b, g, n_k, d), n, plan, saved = k.shape, call.plan.slots, call.plan, call.saved
    of_keys, offsets, chunks, form = sums.sums, sums.offsets, call.chunks, call.form
    if not form.causal:
        of_keys, offsets = sums.first_sums, sums.first_offsets.unsqueeze(2)
        chunks = cut_into_chunks(call.recorder, b, n_k, plan.chunk, call.inputs.cu_seqlens)
        form = _form(call.inputs, False, n_k, plan)
    dk, dv = (call.recorder.empty((b, g, n_k, d), k.dtype) for _ in range(2))
    ds = call.recorder.empty((b, g, n_k, n), control.dtype)
    tensors = {
        "q": q, "k": k, "v": v, "s": control, "do": call.do, "visible": visible, "z_before": saved.z_before,
        "z_after": saved.z_after, "chunk_flags": saved.chunk_flags, "scores": saved.scores, "shares": shares.shares,
        "row_offsets": shares.row_offsets, "sums": of_keys, "offsets": offsets, "dk": dk, "dv": dv, "ds": ds,
        "table": chunks.table,
    }  # fmt: skip
    numbers = {
        **call.input_strides, "SHARES_STRIDE": call.shares_stride, "sm": mask_stride(visible), "T": n_k,
        "NT": chunks.per_row, "G": g, "N": n, "D": d, "PARTS": offsets.shape[2], "scale": call.scale,
    }  # fmt: skip
    for wide in call.launches:
        kernel = generic_key_gradients if wide and plan.generic else key_gradients
        call.recorder.launch(kernel, (chunks.count, g, 1), tensors, numbers, key_options(plan, form, wide))
    return dk, dv, ds


def _first_gradients(sums: Sums, first: State, last_z: Tensor | None) -> State:
    """Gradients of the first state; with ``last_z`` the sums are relative to that instead of the first z."""
    (dk, dv), offsets = sums.first_sums.unbind(2), sums.first_offsets
    if last_z is not None:
        faded = (first.z - last_z).exp()
        dk, dv, offsets = dk * faded.unsqueeze(-1), dv * faded.unsqueeze(-1), offsets * faded
    dz = (dk * first.k + dv * first.v).sum(-1) - offsets
    return State(dk.float(), dv.float(), dz.float())


def _seeds(d_last: StateGradients, last: State) -> tuple[Tensor, Tensor] | None:
    """The gradient of the last state, as sums and offsets of a query after the last token that has read it."""
    if d_last.missing:
        return None
    dk, dv, dz = (
        torch.zeros_like(t) if grad is None else grad.float() for grad, t in zip(d_last, last, strict=True)
    )  # fmt: skip
    return torch.stack([dk, dv], 2), (dk * last.k + dv * last.v).sum(-1) - dz
