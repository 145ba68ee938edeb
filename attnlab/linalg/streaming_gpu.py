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
# What the second pass computes.
COLUMNS = ("norm_largest", "norm_places", "received", "block_mass")


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
    row = row_statistics(
        call,
        largest=measures.largest,
        sinks=measures.sinks,
        recent=measures.recent,
        places=places(call) if text.own_keys else None,
        norms=norms,
        members=_padded_members(call, text),
        wide_output=measures.removed,
    )
    rows = row._asdict()
    output = rows.pop("output")
    del rows["lse"]
    rows["sets"] = row.sets[..., : text.members.shape[-1]]
    asked = {"recent": text.own_keys, "distance": text.own_keys, "norm": measures.norm}
    columns: dict[str, Tensor] = {}
    if measures.norm or measures.received or measures.block:
        columns = column_statistics(
            call,
            row.lse,
            largest=measures.largest,
            log_norms=None if norms is None else norms.log2(),
            received=measures.received,
            block=measures.block,
            first=text.first,
        )._asdict()
    asked |= {"norm_largest": measures.norm, "norm_places": measures.norm, "received": measures.received}
    kept = {name: columns.get(name) for name in COLUMNS} | rows
    kept |= dict.fromkeys(name for name, wanted in (asked | {"block_mass": measures.block > 0}).items() if not wanted)
    removed = removed_in(call, output, row.sum_of_squares) if measures.removed else None
    return CallStatistics(**kept, removed=removed), output  # type: ignore[arg-type]


def _padded_members(call: AttentionCall, text: Text) -> Float[Tensor, "b k m"] | None:
    """The sets as numbers, a power of two of them and at least 16, as a product needs it."""
    m = text.members.shape[-1]
    if not m:
        return None
    kind = torch.float32 if call.q.dtype == torch.float32 else torch.float16
    members = text.members.expand(call.q.shape[0], -1, -1).to(kind)
    return torch.nn.functional.pad(members, (0, max(16, 1 << (m - 1).bit_length()) - m))
