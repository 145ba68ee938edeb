"""Effective attention (Sun and Marasović, 2021): the part of W that reaches the output through the values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from attnlab.attention import grouped, repeat_groups, ungrouped
from attnlab.linalg.prefix import Prefixes, prefix_coefficients
from attnlab.linalg.projection import column_basis, first_visible, gathered_rows
from attnlab.mechanisms._effective import effective_map
from attnlab.reading._input import Masks, ReadingInput
from attnlab.reading.registry import reading
from attnlab.shapes import Bool, Float, Int
from attnlab.summaries import notebook_view, short_repr
from attnlab.trace import LayerTrace

__all__ = [
    "EffectiveAttention",
    "EffectiveRows",
    "effective_attention",
    "effective_from_output",
    "effective_of_input",
    "effective_weights",
    "ratio",
    "removed_share",
    "weighed",
]

# Elements of a chunk of the map when it is made from outputs, and of one that is made from weights on a CPU.
CHUNK, CACHED = 1 << 22, 1 << 19
# Queries of a block of a causal map.
ROWS = 128


@dataclass(frozen=True, eq=False)
class EffectiveAttention:
    """W_perp, and the numbers that say how it differs from W.

    ``residual`` is |W_perp V - W V| / |W V| per head (0 where both are zero), ``removed`` the share of W that cannot
    reach the output, |W - W_perp|^2 / |W|^2 per head. ``rank`` counts the dimensions of the values that a query sees;
    where it sees no more keys than that, ``trivial`` is True and W_perp is W.
    """

    weights: Float[Tensor, "b h q k"]
    residual: Float[Tensor, "b h"]
    rank: Int[Tensor, "b h q"]
    removed: Float[Tensor, "b h"]
    trivial: Bool[Tensor, "b h q"]

    __repr__ = short_repr

    def _repr_html_(self) -> str:
        means = {
            "removed": self.removed.mean(0),
            "residual": self.residual.mean(0),
            "rank": self.rank.double().mean((0, 2)),
            "trivial": self.trivial.double().mean((0, 2)),
        }
        rows = [
            {"head": head, **{name: float(t[head]) for name, t in means.items()}}
            for head in range(self.weights.shape[1])
        ]
        note = "Means over inputs and queries; removed is the share of W that cannot reach the output."
        return notebook_view(f"Effective attention {tuple(self.weights.shape)}", rows, note=note)


def effective_attention(
    layer: LayerTrace | ReadingInput | Float[Tensor, "b h q k"],
    values: Float[Tensor, "b g k e"] | None = None,
    *,
    rtol: float | None = None,
    **masks: Unpack[Masks],
) -> EffectiveAttention:
    """W_perp = W V (V^T V)^+ V^T, V restricted to the keys each query may see: W less its part in LN(V) (section 2).

    From a recorded layer, or from weights and values with the masks of an ``AttentionCall`` (``effective_from_output``
    needs no weights). Singular values of V below ``rtol`` times the largest count as zero. Linear in W, so rows need
    not sum to one; numbers at hidden keys, NaN included, are ignored, and W_perp is exactly zero there. NaN or infinity
    at a visible key is a ValueError.

    >>> v = torch.tensor([[[[1.0], [1.0], [2.0]]]])
    >>> w = torch.tensor([[[[0.5, 0.3, 0.2]]]])
    >>> e = effective_attention(w, v)
    >>> e.weights, e.rank.item()
    (tensor([[[[0.2000, 0.2000, 0.4000]]]]), 1)
    """
    return effective_of_input(ReadingInput.of(layer, values, **masks), rtol=rtol)


@reading(
    "effective",
    "The part of the weight that reaches the output through the values (Sun and Marasović, 2021).",
    needs=("values",),
    cannot="read values that are NaN or infinite at a visible key",
)
def effective_weights(layer: LayerTrace | ReadingInput) -> Float[Tensor, "b h q k"]:
    """W_perp alone."""
    return effective_attention(layer).weights


def effective_of_input(
    source: ReadingInput, *, rtol: float | None = None, output: Tensor | None = None
) -> EffectiveAttention:
    """``effective_attention`` of input that was checked; ``output`` is W V where it is already known."""
    step = source.rows.shape[0]
    if source.rows.device.type == "cpu" and step:
        # Intermediate results of a few items at a time stay in the processor's cache.
        step = max(1, CACHED // max(1, source.rows[0].numel()))
    parts = [
        _effective_items(source.items(lo, lo + step), rtol, None if output is None else output[lo : lo + step])
        for lo in range(0, max(1, source.rows.shape[0]), max(1, step))
    ]
    return EffectiveAttention(*(torch.cat(t) if len(t) > 1 else t[0] for t in zip(*parts, strict=True)))


def _effective_items(source: ReadingInput, rtol: float | None, output: Tensor | None) -> tuple[Tensor, ...]:
    w, v = source.clean_weights(), source.clean_values()
    effective, rank, trivial = effective_map(
        w,
        v,
        key_visible=source.key_visible,
        causal=source.causal,
        offset=source.offset,
        mask=source.mask,
        rtol=rtol,
    )
    with torch.no_grad():
        residual, removed = _residual_and_removed(source, w, effective, v, output)
    return effective, residual, rank, removed, trivial


def removed_share(w: Float[Tensor, "b h q k"], effective: Float[Tensor, "b h q k"]) -> Float[Tensor, "b h"]:
    """|W - W_perp|^2 / |W|^2 of each head: the share of the squared weights that cannot reach the output."""
    return ratio(head_norms(w - effective), head_norms(w)).square()


def _residual_and_removed(
    source: ReadingInput, w: Tensor, effective: Tensor, v: Tensor, output: Tensor | None
) -> tuple[Float[Tensor, "b h"], Float[Tensor, "b h"]]:
    """(|W_perp V - W V| / |W V|, |W - W_perp|^2 / |W|^2) of each head."""
    (n_q, n_k), wide = w.shape[2:], torch.promote_types(v.dtype, torch.float32)
    # Lengths of W_perp V - W V, of W V and of W - W_perp, in blocks of rows.
    lengths: list[tuple[Tensor, Tensor, Tensor]] = []
    # The keys ahead of a causal block are zeros in both maps.
    size = ROWS if source.causal else max(1, n_q)
    for lo in range(0, max(1, n_q), size):
        hi = lo + size
        end = min(max(hi + source.offset, 0), n_k) if source.causal else n_k
        part, values = w[:, :, lo:hi, :end], v[:, :, :end].to(wide)
        difference = part - effective[:, :, lo:hi, :end]
        whole = weighed(part.to(wide), values) if output is None else output[:, :, lo:hi]
        lengths.append(
            (head_norms(weighed(difference.to(wide), values)), head_norms(whole), head_norms(difference))
        )  # fmt: skip
    off, whole, gone = (torch.linalg.vector_norm(torch.stack(parts), dim=0) for parts in zip(*lengths, strict=True))
    return ratio(off, whole), ratio(gone, head_norms(w)).square()


@dataclass(frozen=True, eq=False)
class EffectiveRows:
    """Effective attention from outputs and values: e numbers per query until rows of the map are asked for."""

    rank: Int[Tensor, "b h q"]
    trivial: Bool[Tensor, "b h q"]
    # W_perp = coefficients @ V^T over the keys a query sees.
    coefficients: Float[Tensor, "b h q e"]
    source: ReadingInput
    prefixes: Prefixes | None = None

    __repr__ = short_repr

    def rows(self, lo: int, hi: int) -> Float[Tensor, "b h c k"]:
        """W_perp of queries lo to hi."""
        v, visible = self.source.clean_values().double(), self.source.visible(lo, hi)
        a = grouped(self.coefficients[:, :, lo:hi], self.coefficients.shape[1] // v.shape[1])
        rows = a @ v.unsqueeze(2).mT
        if self.prefixes is not None:
            rows = _with_leading_rows(rows, a, self.prefixes, lo, hi)
        rows = ungrouped(rows)
        if visible is not None:
            rows = rows.masked_fill(~visible, 0)
        return rows.to(self.source.rows.dtype)

    def chunks(self, size: int | None = None) -> Iterator[tuple[int, Float[Tensor, "b h c k"]]]:
        """(first query, rows of W_perp), ``size`` queries at a time."""
        b, h, n_q = self.rank.shape
        size = size or max(1, CHUNK // max(1, b * h * self.source.values.shape[2]))
        for lo in range(0, n_q, size):
            yield lo, self.rows(lo, min(lo + size, n_q))

    def weights(self) -> Float[Tensor, "b h q k"]:
        """The whole map."""
        return torch.cat([rows for _, rows in self.chunks()], dim=2)

    def residual(self, size: int | None = None) -> Float[Tensor, "b h"]:
        """|W_perp V - O| / |O| per head, in chunks of queries; large if outputs are no weighting of the values."""
        output, v = self.source.rows, self.source.clean_values()
        lost = torch.zeros(output.shape[:2], device=v.device, dtype=torch.promote_types(v.dtype, torch.float32))
        for lo, rows in self.chunks(size):
            part = output[:, :, lo : lo + rows.shape[2]]
            lost += (weighed(rows.to(lost.dtype), v.to(lost.dtype)) - part).square().sum((-1, -2))
        return ratio(lost.sqrt(), head_norms(output.to(lost.dtype)))


def effective_from_output(
    layer: LayerTrace | ReadingInput | Float[Tensor, "b h q e"],
    values: Float[Tensor, "b g k e"] | None = None,
    *,
    rtol: float | None = None,
    **masks: Unpack[Masks],
) -> EffectiveRows:
    """Effective attention from the head's output O alone, W_perp = O (V^T V)^+ V^T: memory linear in the length.

    The map is made in chunks of queries when asked for. Rounding in O is amplified by the condition number of V, which
    weights, where they are known, avoid.

    >>> v = torch.tensor([[[[1.0], [1.0], [2.0]]]])
    >>> effective_from_output(torch.tensor([[[[1.2]]]]), v).weights()
    tensor([[[[0.2000, 0.2000, 0.4000]]]])
    """
    source = ReadingInput.of(layer, values, rows="output", **masks)
    o, v = source.rows, source.clean_values()
    if source.mask is not None and source.mask.shape[1] > 1:
        v = repeat_groups(v, o.shape[1] // v.shape[1])
    groups = o.shape[1] // v.shape[1]
    prefixes = None
    if source.mask is not None:
        a, rank, trivial = _row_coefficients(grouped(o, groups), v, source, rtol)
    elif source.causal and v.shape[2] and o.shape[2]:
        a, prefixes, rank, trivial = prefix_coefficients(grouped(o, groups), v, source.key_visible, source.offset, rtol)
    else:
        basis = column_basis(v, None if source.key_visible is None else source.key_visible[:, None], rtol=rtol)
        whiten = basis.whiten[:, :, None]
        a = grouped(o, groups).double() @ whiten @ whiten.mT
        rank, trivial = (t[..., None].expand(*t.shape, o.shape[2]) for t in (basis.rank, basis.trivial))
    rank, trivial = (repeat_groups(t, groups) for t in (rank, trivial))
    return EffectiveRows(rank, trivial, ungrouped(a), source, prefixes)


def _row_coefficients(o: Tensor, v: Tensor, source: ReadingInput, rtol: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients, rank and triviality where each query sees keys of its own."""
    b, heads, _, n_q, _ = o.shape
    rank = torch.zeros(b, heads, n_q, dtype=torch.long, device=v.device)
    trivial = torch.zeros(b, heads, n_q, dtype=torch.bool, device=v.device)
    out = torch.zeros_like(o, dtype=torch.float64)
    for lo in range(0, n_q, 64):
        visible = source.visible(lo, lo + 64)
        assert visible is not None
        visible = visible.expand(b, heads, -1, -1)
        every = torch.ones_like(visible[..., 0]).nonzero(as_tuple=True)
        for (bi, gi, qi), _, exists, rows in gathered_rows(v, visible, every):
            basis = column_basis(rows[:, None], exists[:, None], rtol=rtol)
            whiten, at = basis.whiten[:, 0], qi + lo
            rank[bi, gi, at], trivial[bi, gi, at] = basis.rank[:, 0], basis.trivial[:, 0]
            out[bi, gi, :, at] = o[bi, gi, :, at].double() @ whiten @ whiten.mT
    return out, rank, trivial


def _with_leading_rows(rows: Tensor, a: Tensor, p: Prefixes, lo: int, hi: int) -> Tensor:
    """Rows that see at most rank keys hold their weights on the first visible keys instead of coefficients."""
    lead = p.lead[:, :, None, lo:hi, None]
    if not bool(lead.any()):
        return rows
    _, exists, order = first_visible(p.x, p.seen[:, None], a.shape[-1])
    at = order[:, :, None, None].expand(*a.shape[:-1], order.shape[-1])
    direct = torch.zeros_like(rows).scatter(-1, at, a[..., : order.shape[-1]] * exists[:, :, None, None])
    return torch.where(lead, direct, rows)


def weighed(w: Float[Tensor, "b h q k"], v: Float[Tensor, "b g k e"]) -> Float[Tensor, "b h q e"]:
    """W V, each group of query heads with its values."""
    return ungrouped(grouped(w, w.shape[1] // v.shape[1]) @ v.unsqueeze(2))


def head_norms(t: Float[Tensor, "b h q k"]) -> Float[Tensor, "b h"]:
    """The length of each head's matrix."""
    return torch.linalg.vector_norm(t, dim=(-1, -2), dtype=torch.promote_types(t.dtype, torch.float32))


def ratio(top: Float[Tensor, "*b h"], bottom: Float[Tensor, "*b h"]) -> Float[Tensor, "*b h"]:
    """Top over bottom, and the top itself where the bottom is zero."""
    return torch.where(bottom == 0, top, top / bottom.masked_fill(bottom == 0, 1))
