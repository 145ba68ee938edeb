"""Statistics of softmax attention by the kernels of ``attnlab.kernels.statistics``."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from attnlab.attention import AttentionCall, hide_unseen, mask_with_bias
from attnlab.linalg.places import places
from attnlab.linalg.streaming import CallStatistics, Measures, Text, removed_of
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
    """(statistics, output): all at once, then what keys receive in a second pass."""
    from attnlab.kernels.statistics import column_statistics, row_statistics

    # What a bias hides becomes part of the mask, and what nothing sees is zero.
    call = hide_unseen(call)
    call = replace(call, mask=mask_with_bias(call))
    shares = removed_of(call) if measures.removed and call.mask is None else None
    row = row_statistics(
        call,
        largest=measures.largest,
        sinks=measures.sinks,
        recent=measures.recent,
        places=None if call.key_visible is None else places(call),
        near=text.own_keys,
        norm_largest=measures.norm,
        squares=True,
        members=text.members,
        wide_output=measures.removed,
    )
    kept: dict[str, Tensor | None] = row._asdict()
    del kept["output"], kept["lse"]
    if shares is not None:
        assert row.sum_of_squares is not None
        shares.start(row.output, row.sum_of_squares)
    kept |= dict.fromkeys(("received", "block_mass"))
    if measures.received or measures.block:
        kept |= column_statistics(
            call, row.lse, received=measures.received, block=measures.block, first=text.first
        )._asdict()
    asked = {"recent": text.own_keys, "distance": text.own_keys, "norm": measures.norm}
    asked |= {"received": measures.received, "block_mass": measures.block > 0}
    kept |= dict.fromkeys(name for name, wanted in asked.items() if not wanted)
    # The host waits for a flag of each head, and the device has the second pass to go on with.
    removed = None if shares is None else shares.result()
    return CallStatistics(**kept, removed=removed), row.output  # type: ignore[arg-type]
