"""Statistics of softmax attention by the kernels of ``attnlab.kernels.statistics``."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnlab.attention import AttentionCall, hide_unseen, mask_with_bias
from attnlab.linalg.places import places
from attnlab.linalg.streaming import CallStatistics, Measures, Text, removed_in
from attnlab.shapes import Float

__all__ = ["kernel_serves", "stream_by_kernel"]

# With fewer queries, as in a decoding step, a row of programs would leave most of the device idle.
FEWEST_QUERIES = 64


def kernel_serves(call: AttentionCall, measures: Measures, text: Text) -> bool:
    """Whether the kernels compute these statistics."""
    if not call.q.is_cuda or call.q.shape[2] < FEWEST_QUERIES:
        return False
    from attnlab.kernels import AVAILABLE

    if not AVAILABLE:
        return False
    from attnlab.kernels.statistics import MOST_LARGEST, SIDE, serves

    return (
        serves(call) and measures.largest <= MOST_LARGEST and not text.first_key
        and (not measures.block or text.first % SIDE == 0)
    )  # fmt: skip


def stream_by_kernel(
    call: AttentionCall, measures: Measures, text: Text
) -> tuple[CallStatistics, Float[Tensor, "b h q e"]]:
    """(statistics, output): all at once, then what keys receive and the largest lengths in a second pass."""
    from attnlab.kernels.statistics import column_statistics, row_statistics

    # What a bias hides becomes part of the mask, and what nothing sees is zero.
    call = hide_unseen(call)
    call = replace(call, mask=mask_with_bias(call))
    norms = torch.linalg.vector_norm(call.v, dim=-1, dtype=torch.float32) if measures.norm else None
    m = text.members.shape[-1]
    members = None
    if m:
        kind = torch.float32 if call.q.dtype == torch.float32 else torch.float16
        size = max(16, 1 << (m - 1).bit_length())
        members = torch.nn.functional.pad(text.members.expand(call.q.shape[0], -1, -1).to(kind), (0, size - m))
    row = row_statistics(
        call,
        largest=measures.largest,
        sinks=measures.sinks,
        recent=measures.recent,
        places=places(call) if text.own_keys else None,
        norms=norms,
        members=members,
        wide_output=measures.removed,
    )
    second = measures.norm or measures.received or measures.block > 0
    column = None
    if second:
        column = column_statistics(
            call,
            row.lse,
            largest=measures.largest,
            log_norms=None if norms is None else norms.log2(),
            received=measures.received,
            block=measures.block,
            first=text.first,
        )
    return CallStatistics(
        entropy=row.entropy,
        sum_of_squares=row.sum_of_squares,
        largest=row.largest,
        places=row.places,
        sinks=row.sinks,
        recent=row.recent if text.own_keys else None,
        distance=row.distance if text.own_keys else None,
        sets=row.sets[..., :m],
        norm=row.norm if measures.norm else None,
        norm_largest=column.norm_largest if column is not None and measures.norm else None,
        norm_places=column.norm_places if column is not None and measures.norm else None,
        removed=removed_in(call, row.output, row.sum_of_squares) if measures.removed else None,
        received=column.received if column is not None and measures.received else None,
        block_mass=column.block_mass if column is not None and measures.block else None,
    ), row.output
