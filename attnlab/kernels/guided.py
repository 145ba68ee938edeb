"""Softmax attention that also gives each row's squared error to a pattern, without storing the map or a dense target.

Labels define a target: t_ij = value_i where row i and key j have the same label, and 0 elsewhere. With
m_i = sum_j w_ij [labels agree] a row's error is sum_j (w_ij - t_ij)^2 = sum_j w_ij^2 - 2 value_i m_i + constant_i, so
two sums beside the output are all that the forward pass adds to flash attention (Dao, 2023). In the backward pass

    dL/ds_ij = w_ij (<do_i, v_j> + c_i (w_ij - value_i [labels agree]) - delta_i),  c_i = 2 weight_i dL/derror_i,

where delta_i is <do_i, o_i> plus c_i (sum_j w_ij^2 - value_i m_i).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn.functional import pad

from attnlab.kernels.guided_triton import backward_kv, backward_q, forward
from attnlab.shapes import Bool, Float, Int

__all__ = ["BLOCKS", "Blocks", "PackedLabels", "guided_attention", "pack_labels"]

# A tile's rows and keys are multiples of this.
SPAN = 64


class Blocks(NamedTuple):
    """Rows and keys of a tile, warps, and stages of the pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int


# For heads of up to 64, and for wider ones: the forward pass, dq, and dk with dv.
BLOCKS = {
    64: (Blocks(64, 64, 4, 3), Blocks(64, 64, 4, 3), Blocks(64, 64, 4, 3)),
    256: (Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2), Blocks(64, 64, 8, 1)),
}


class PackedLabels(NamedTuple):
    """The targets of some groups of heads, and the group of each head; the axis g counts groups.

    ``rows`` of -1 and ``keys`` of -2 agree with nothing. ``weight`` is what a row's error counts, 0 where it has no
    target. The ranges are the least and greatest label of each ``SPAN`` rows or keys: tiles without a common label
    need not be compared.
    """

    rows: Int[Tensor, "b g q"]
    keys: Int[Tensor, "b g k"]
    value: Float[Tensor, "b g q"]
    constant: Float[Tensor, "b g q"]
    weight: Float[Tensor, "b g q"]
    row_ranges: Int[Tensor, "b g i two"]
    key_ranges: Int[Tensor, "b g j two"]
    group: Int[Tensor, " h"]


def pack_labels(
    rows: Int[Tensor, "b g q"],
    keys: Int[Tensor, "b g k"],
    *,
    value: Float[Tensor, "b g q"],
    constant: Float[Tensor, "b g q"],
    weight: Float[Tensor, "b g q"],
    group: Int[Tensor, " h"],
) -> PackedLabels:
    """The labels as the kernel reads them. Layers that attend to the same texts can share one result."""
    rows, keys, group = rows.int().contiguous(), keys.int().contiguous(), group.int()
    value, constant, weight = (t.float().contiguous() for t in (value, constant, weight))
    return PackedLabels(rows, keys, value, constant, weight, _ranges(rows, -1), _ranges(keys, -2), group)


def _ranges(labels: Int[Tensor, "b g n"], outside: int) -> Int[Tensor, "b g i two"]:
    """The least and greatest label of each ``SPAN``; negative labels agree with nothing and are left out."""
    whole = pad(labels, (0, -labels.shape[-1] % SPAN), value=outside).unflatten(-1, (-1, SPAN))
    return torch.stack([whole.masked_fill(whole < 0, 1 << 30).amin(-1), whole.amax(-1)], -1).int().contiguous()


def guided_attention(
    q: Float[Tensor, "b h q d"],
    k: Float[Tensor, "b h k d"],
    v: Float[Tensor, "b h k d"],
    labels: PackedLabels,
    *,
    key_visible: Bool[Tensor, "b k"] | None = None,
    causal: bool = False,
    offset: int = 0,
    scale: float,
    heads: int = 0,
) -> tuple[Float[Tensor, "b h q d"], Float[Tensor, "b h q"]]:
    """(softmax(scale q k^T) v, weight_i times the squared error of each row); both have gradients by q, k and v.

    The output and the gradients are views of tensors with ``heads`` heads, if that is more than q has.
    """
    return _Guided.apply(q, k, v, labels, key_visible, causal, offset, scale, heads)


class _Guided(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        labels: PackedLabels,
        key_visible: Tensor | None,
        causal: bool,
        offset: int,
        scale: float,
        heads: int,
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        b, h, n_q, _ = q.shape
        out = _empty_like(q, heads)
        lse, error, slope = (q.new_empty(b, h, n_q, dtype=torch.float32) for _ in range(3))
        common = _common(q, k, labels, causal, offset, scale)
        rows, keys, value, constant, weight, _, ranges, group = labels
        tile, _, _ = _blocks(q)
        forward[(triton.cdiv(n_q, tile.rows), b * h)](
            q, k, v, out, lse, error, slope, rows, keys, value, constant, weight, ranges, group, key_visible,
            *_strides(q, k, v, out), **common, **_options(tile, q, k, key_visible),
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, lse, slope, key_visible)
        ctx.labels, ctx.settings, ctx.heads = labels, (causal, offset, scale), heads
        return out, error

    @staticmethod
    def backward(ctx: Any, grad: Tensor, error_grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, slope, key_visible = ctx.saved_tensors
        rows, keys, value, _, weight, row_ranges, key_ranges, group = labels = ctx.labels
        b, h, n_q, _ = q.shape
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        common = _common(q, k, labels, *ctx.settings)
        _, by_rows, by_keys = _blocks(q)
        delta, pull = torch.empty_like(lse), torch.empty_like(lse)
        dq, dk, dv = (_empty_like(t, ctx.heads) for t in (q, k, v))
        backward_q[(triton.cdiv(n_q, by_rows.rows), b * h)](
            q, k, v, out, grad, error_grad, slope, lse, delta, pull, rows, keys, value, weight, key_ranges, group,
            key_visible, dq, *_strides(q, k, v, out, grad, error_grad, dq),
            **common, **_options(by_rows, q, k, key_visible),
        )  # fmt: skip
        backward_kv[(triton.cdiv(k.shape[2], by_keys.keys), b * h)](
            q, k, v, grad, lse, delta, pull, rows, keys, value, row_ranges, group, key_visible, dk, dv,
            *_strides(q, k, v, grad, dk, dv), **common, **_options(by_keys, q, k, key_visible),
        )  # fmt: skip
        return dq, dk, dv, None, None, None, None, None, None


def _empty_like(t: Tensor, heads: int) -> Tensor:
    """Laid out as (b, n, h, d), as linear maps before and after attention read it."""
    b, h, n, d = t.shape
    return t.new_empty(b, n, max(h, heads), d).transpose(1, 2)[:, :h]


def _strides(*tensors: Tensor) -> list[int]:
    """Strides of batch, head and row, one tensor after the other."""
    return [t.stride(axis) for t in tensors for axis in range(3)]


def _blocks(q: Tensor) -> tuple[Blocks, Blocks, Blocks]:
    """The blocks for this head size: forward, dq, and dk with dv."""
    return next(blocks for width, blocks in BLOCKS.items() if q.shape[-1] <= width)


@functools.cache
def _width(d: int) -> int:
    """A matrix product on the tensor cores is at least 16 wide, and a tile's width a power of two."""
    return max(16, triton.next_power_of_2(d))


def _common(q: Tensor, k: Tensor, labels: PackedLabels, causal: bool, offset: int, scale: float) -> dict[str, Any]:
    """Arguments that the three kernels have in common, by name."""
    _, h, n_q, d = q.shape
    ranges = {"n_key_ranges": labels.key_ranges.shape[2], "n_row_ranges": labels.row_ranges.shape[2]}
    sizes = {"H": h, "G": labels.rows.shape[1], "n_q": n_q, "n_k": k.shape[2], "offset": offset, "scale": scale}
    return {**sizes, **ranges, "CAUSAL": causal, "EXACT": q.dtype == torch.float32, "D": d, "BD": _width(d)}


def _options(blocks: Blocks, q: Tensor, k: Tensor, key_visible: Tensor | None) -> dict[str, Any]:
    """Constants of a kernel: CUT hides some keys of some tiles, WHOLE says that every tile is inside."""
    padded, ragged = key_visible is not None, k.shape[2] % blocks.keys != 0
    whole = not padded and not ragged and q.shape[2] % blocks.rows == 0 and q.shape[3] == _width(q.shape[3])
    flags = {"PADDED": padded, "CUT": padded or ragged, "WHOLE": whole, "SPAN": SPAN}
    return {**flags, "BM": blocks.rows, "BN": blocks.keys, "num_warps": blocks.warps, "num_stages": blocks.stages}
