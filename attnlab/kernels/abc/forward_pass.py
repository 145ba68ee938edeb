"""The forward pass: the launches that write the memory and read it."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from attnlab.kernels.abc.output import generic_read_states, read_states
from attnlab.kernels.abc.plan import (
    CallForm,
    Chunks,
    TilePlan,
    cut_into_chunks,
    grid_of,
    plan_for,
    read_options,
    weigh_options,
    write_walks,
)
from attnlab.kernels.abc.recorded_calls import CallRecorder, repeat
from attnlab.kernels.abc.records import (
    Inputs,
    Saved,
    State,
    Weights,
    call_key,
    known_buffer_layout,
    mask_stride,
    strides,
)
from attnlab.kernels.abc.state import weigh_logits, write_states

__all__ = ["forward"]


def forward(
    inputs: Inputs, causal: bool, scale: float, train: bool, key: Hashable = None
) -> tuple[Tensor, State, Tensor]:  # fmt: skip
    """The output, the memory after the last key, and the buffer that holds ``Saved`` for the backward pass.

    ``key`` is ``call_key``'s, if it is known already.
    """
    key = key or call_key(inputs, causal, scale, train)
    results = repeat(key, inputs)
    if results is not None:
        out, last_k, last_v, last_z, buffer = results
        return out, State(last_k, last_v, last_z), buffer
    recorder, q, control = CallRecorder(inputs.q.device), inputs.q, inputs.control
    plan = plan_for(q.shape[3], control.shape[3], q.dtype, train)
    chunks = cut_into_chunks(recorder, q.shape[0], control.shape[2], plan.chunk, inputs.cu_seqlens)
    layout = known_buffer_layout(q.shape, control.shape, plan, chunks.count, chunks.sequences, causal, train)
    buffer = recorder.empty((layout.size,), torch.uint8)
    saved = Saved(**recorder.views(buffer, layout.saved))
    weights = Weights(**recorder.views(buffer, layout.weights, layout.weights_at))
    last = _write_memory(recorder, inputs, chunks, plan, weights, saved if causal else None)
    if not causal:
        _save_last(last, saved, plan)
        chunks = cut_into_chunks(recorder, q.shape[0], q.shape[2], plan.chunk, inputs.cu_seqlens)
    out = _read_memory(recorder, inputs, chunks, plan, saved, causal=causal, scale=scale, train=train)
    if causal:
        recorder.save(key, inputs, (out, *last, buffer))
    return out, last, buffer


def _write_memory(
    recorder: CallRecorder, inputs: Inputs, chunks: Chunks, plan: TilePlan, weights: Weights, saved: Saved | None
) -> State:  # fmt: skip
    """The state after the last chunk; into ``saved``, if there is one, the states before each chunk."""
    (_, g, n_k, d), control, visible, cu = inputs.k.shape, inputs.control, inputs.key_visible, inputs.cu_seqlens
    n = plan.slots
    full_chunks, packed, masked = cu is None and n_k % plan.chunk == 0, cu is not None, visible is not None
    form = CallForm(saved is not None, full_chunks, packed, masked, inputs.first_k is not None)
    last = State(
        recorder.empty((chunks.sequences, g, n, d), torch.float32),
        recorder.empty((chunks.sequences, g, n, d), torch.float32),
        recorder.empty((chunks.sequences, g, n), torch.float32),
    )
    sizes = {"T": n_k, "NT": chunks.per_row, "G": g, "N": n}
    recorder.launch(
        weigh_logits,
        (chunks.count, g, 1),
        {"s": control, "visible": visible, **weights._asdict(), "table": chunks.table},
        {**strides(s=control), "sm": mask_stride(visible), **sizes},
        weigh_options(plan, CallForm(True, full_chunks, packed, masked)),
    )
    rows = chunks.sequences * g
    walks = write_walks(plan, form, rows, chunks.count // max(1, chunks.sequences))
    of_chunks = (saved or Saved(*[None] * 7))._asdict()  # type: ignore[arg-type]
    tensors = {
        "k": inputs.k, "v": inputs.v, "visible": visible, **weights._asdict(),
        **{name: of_chunks[name] for name in ("states", "low_parts", "peak_logits", "z_before", "z_after")},
        "first_k": inputs.first_k, "first_v": inputs.first_v, "first_z": inputs.first_z,
        "last_k": last.k, "last_v": last.v, "last_z": last.z,
        **_segment_totals(recorder, plan, rows, walks[0].segments if len(walks) > 1 else 0),
        "bounds": chunks.bounds, "cu": cu,
    }  # fmt: skip
    numbers = {**strides(k=inputs.k, v=inputs.v), "sm": mask_stride(visible), **sizes, "D": d}
    for walk in walks:
        recorder.launch(
            write_states, (walk.programs, 1, 1), tensors, {**numbers, "SEGMENTS": walk.segments}, walk.options
        )
    return last


def _segment_totals(recorder: CallRecorder, plan: TilePlan, rows: int, segments: int) -> dict[str, Tensor | None]:
    """Memory for the totals of segments, if sequences are cut into any."""
    if not segments:
        return dict.fromkeys(("part_states", "part_z", "part_peak_logits"))
    n, full = plan.slots, plan.full_dtype
    return {
        **recorder.empties(
            {
                "part_states": ((rows, segments, 2, n, plan.d), full),
                "part_z": ((rows, segments, n), full),
                "part_peak_logits": ((rows, segments, n), full),
            }
        )
    }


def _save_last(last: State, saved: Saved, plan: TilePlan) -> None:
    """The last state as the one that all queries read."""
    exact = torch.stack(last[:2], 2)
    saved.states.copy_(exact)
    if plan.low_parts:
        saved.low_parts.copy_(exact - saved.states)
    saved.z_before.copy_(last.z)


def _read_memory(
    recorder: CallRecorder, inputs: Inputs, chunks: Chunks, plan: TilePlan, saved: Saved,
    *, causal: bool, scale: float, train: bool,
) -> Tensor:  # fmt: skip
    """The output; what reading finds out goes into ``saved``."""
    q, k, v, control, visible = inputs[:5]
    (_, h, n_q, d), g, packed = q.shape, k.shape[1], inputs.cu_seqlens is not None
    form = CallForm(
        causal, not packed and n_q % plan.chunk == 0, packed, visible is not None, groups=h // g
    )  # fmt: skip
    out = recorder.empty_like(q)
    tensors = {
        "q": q, "k": k, "v": v, "s": control, "visible": visible, **saved._asdict(), "o": out, "table": chunks.table,
    }  # fmt: skip
    numbers = {
        **strides(q=q, k=k, v=v, s=control, o=out), "sm": mask_stride(visible),
        "T": n_q, "NT": chunks.per_row, "G": g, "R": h // g, "N": plan.slots, "D": d, "scale": scale,
    }  # fmt: skip
    # The second launch is for wide chunks, and mostly finds none.
    for wide in (False, True) if causal else (False,):
        options = read_options(plan, form, wide, causal and train)
        kernel = generic_read_states if wide and plan.generic else read_states
        recorder.launch(kernel, grid_of(options, chunks.count, h), tensors, numbers, options)
    return out
