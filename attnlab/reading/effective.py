"""Effective attention (Sun and Marasović, 2021): the part of W that reaches the output through the values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor, nn

from attnlab.attention import AttentionCall, Mechanism, grouped, repeat_groups, scores, ungrouped
from attnlab.hf import swap
from attnlab.hf.sites import Layers
from attnlab.mechanisms._at_once import project_at_once
from attnlab.mechanisms._effective import effective_map
from attnlab.mechanisms._prefix import Prefixes, prefix_coefficients
from attnlab.mechanisms._projection import at_once_serves, column_basis, first_visible, gathered_rows
from attnlab.mechanisms.softmax import Softmax
from attnlab.reading._given import Given, given
from attnlab.shapes import Bool, Float, Int
from attnlab.trace import LayerTrace

__all__ = [
    "EffectiveAttention",
    "EffectiveLayers",
    "EffectiveRows",
    "effective_attention",
    "effective_from_output",
    "read_effective",
]

# Elements of a chunk of the map when it is made from outputs, and of one that is made from weights on a CPU.
CHUNK, CACHED = 1 << 22, 1 << 19
# Layers that a GPU projects as one batch: many small factorisations keep it busy, one layer's do not.
LAYERS_AT_ONCE = 4


@dataclass(frozen=True, eq=False)
class EffectiveAttention:
    """W_perp and what there is to know about it.

    ``residual`` is |W_perp V - W V| / |W V| per head (0 where both are zero), ``removed`` the share of W that cannot
    reach the output, |W - W_perp|^2 / |W|^2 per head. ``rank`` counts the dimensions of the values that a query sees;
    where it sees no more keys than that, ``trivial`` is True and W_perp is W.
    """

    weights: Float[Tensor, "b h q k"]
    residual: Float[Tensor, "b h"]
    rank: Int[Tensor, "b h q"]
    removed: Float[Tensor, "b h"]
    trivial: Bool[Tensor, "b h q"]


def effective_attention(
    layer: LayerTrace | Float[Tensor, "b h q k"],
    values: Float[Tensor, "b g k e"] | None = None,
    *,
    key_visible: Bool[Tensor, "b k"] | None = None,
    causal: bool = False,
    offset: int = 0,
    mask: Bool[Tensor, "#b #h q k"] | None = None,
    rtol: float | None = None,
) -> EffectiveAttention:
    """W_perp = W V (V^T V)^+ V^T, V restricted to the keys each query may see: W less its part in LN(V) (section 2).

    From a recorded layer, or from weights and values with the masks of an ``AttentionCall``. Singular values of V below
    ``rtol`` times the largest count as zero. Linear in W, so rows need not sum to one; whatever stands at hidden keys,
    NaN included, is ignored, and W_perp is exactly zero there. NaN or infinity at a visible key is a ValueError.

    >>> v = torch.tensor([[[[1.0], [1.0], [2.0]]]])
    >>> w = torch.tensor([[[[0.5, 0.3, 0.2]]]])
    >>> e = effective_attention(w, v)
    >>> e.weights, e.rank.item()
    (tensor([[[[0.2000, 0.2000, 0.4000]]]]), 1)
    """
    return _effective(given(layer, values, key_visible=key_visible, causal=causal, offset=offset, mask=mask), rtol)


@contextmanager
def read_effective(model: nn.Module, *, layers: Layers = None) -> Iterator[EffectiveLayers]:
    """Inside the context every softmax layer of ``model`` makes its W once, attends by it, and adds its effective map.

    An evaluation with every map and residual costs little more than an eager one; the sequence grows by one item per
    layer and forward pass. With ``record`` and ``effective_attention(trace[3])`` W would be made a second time.
    """
    found = EffectiveLayers()
    with swap(model, _Reader(found), layers=layers):
        yield found


class EffectiveLayers(Sequence[EffectiveAttention]):
    """The effective attention of each layer in the order of their calls.

    On a GPU, layers whose queries all see the same keys are projected several at a time while the model goes on, and
    what that leaves in doubt is looked at when an item is asked for: until then nothing waits for the device.
    """

    def __init__(self) -> None:
        self._settled: list[EffectiveAttention] = []
        self._launched: list[_Launched] = []
        self._waiting: list[tuple[Given, Tensor]] = []

    def __len__(self) -> int:
        return len(self._settled) + sum(len(group.layers) for group in self._launched) + len(self._waiting)

    @overload
    def __getitem__(self, index: int) -> EffectiveAttention: ...
    @overload
    def __getitem__(self, index: slice) -> list[EffectiveAttention]: ...
    def __getitem__(self, index: int | slice) -> EffectiveAttention | list[EffectiveAttention]:
        self._settle()
        return self._settled[index]

    def clear(self) -> None:
        """Forget everything, before the next batch."""
        for held in (self._settled, self._launched, self._waiting):
            held.clear()

    def add(self, g: Given, output: Tensor) -> None:
        """Take one layer's weights, values and output."""
        if not g.rows.is_cuda or g.causal or g.mask is not None or not at_once_serves(g.values):
            self._settle()
            self._settled.append(_effective(g, None, output))
            return
        if self._waiting and not _alike(self._waiting[0][0], g):
            self._launch()
        self._waiting.append((g, output))
        if len(self._waiting) == LAYERS_AT_ONCE:
            self._launch()

    def _launch(self) -> None:
        if self._waiting:
            self._launched.append(_launch(self._waiting))
            self._waiting = []

    def _settle(self) -> None:
        self._launch()
        if not self._launched:
            return
        doubtful = torch.stack([group.doubtful.any() for group in self._launched]).tolist()
        for group, some in zip(self._launched, doubtful, strict=True):
            parts = zip(*(t.chunk(len(group.layers)) for t in (*group.found, group.doubtful)), strict=True)
            for (g, output), (*found, unsure) in zip(group.layers, parts, strict=True):
                again = some and bool(unsure.any())
                self._settled.append(_effective(g, None, output) if again else EffectiveAttention(*found))
        self._launched = []


@dataclass(frozen=True, eq=False)
class _Launched:
    layers: list[tuple[Given, Tensor]]
    # The fields of an EffectiveAttention for all layers, and which heads of them are in doubt.
    found: tuple[Tensor, ...]
    doubtful: Bool[Tensor, "b h"]


def _alike(a: Given, b: Given) -> bool:
    same = a.rows.shape == b.rows.shape and a.values.shape == b.values.shape and a.rows.dtype == b.rows.dtype
    return same and a.key_visible is b.key_visible and a.rows.device == b.rows.device


@torch.no_grad()
def _launch(layers: list[tuple[Given, Tensor]]) -> _Launched:
    """The projection and its residual, for several layers as one batch."""
    first = layers[0][0]
    wide = torch.promote_types(first.rows.dtype, torch.float32)
    w, v = (torch.cat([getattr(g, name) for g, _ in layers]).to(wide) for name in ("rows", "values"))
    output = torch.cat([o for _, o in layers]).to(wide)
    seen = first.key_visible
    if seen is not None:
        seen = seen.repeat(len(layers), 1)[:, None]
        v = v.masked_fill(~seen[..., None], 0)
    groups = w.shape[1] // v.shape[1]
    found, *facts = project_at_once(grouped(w, groups).flatten(2, 3), v, seen)
    found = ungrouped(found.unflatten(2, (groups, w.shape[2])))
    rank, trivial, doubtful = (repeat_groups(t, groups) for t in facts)
    lost = _norm(
        torch.baddbmm(output.flatten(0, 1), found.flatten(0, 1), repeat_groups(v, groups).flatten(0, 1), beta=-1)
    )
    residual = _ratio(lost.view_as(rank).to(wide), _norm(output))
    # A projection is orthogonal: what it takes away is what the squares lack.
    whole = _norm(w).square()
    removed = _ratio((whole - _norm(found).square()).clamp(min=0), whole)
    rank, trivial = (t[..., None].expand(*t.shape, w.shape[2]) for t in (rank, trivial))
    return _Launched(layers, (found.to(first.rows.dtype), residual, rank, removed, trivial), doubtful)


class _Reader(Mechanism):
    def __init__(self, found: EffectiveLayers) -> None:
        self.found = found

    def reference(self, call: AttentionCall) -> Tensor:
        if call.key_visible is None and not call.causal and call.mask is None and call.bias is None:
            # No row can be empty, so the careful softmax is not needed.
            return torch.softmax(scores(call), -1)
        return Softmax().reference(call)

    def forward(self, call: AttentionCall) -> Tensor:
        w = self.reference(call)
        g = Given(w, call.v, call.key_visible, call.causal, call.offset, call.mask, recorded=True)
        output = _times(w, g.clean_values())
        self.found.add(g, output)
        return output


def _effective(g: Given, rtol: float | None, output: Tensor | None = None) -> EffectiveAttention:
    step = g.rows.shape[0]
    if g.rows.device.type == "cpu" and step:
        # Item by item, what is made on the way stays in the processor's cache.
        step = max(1, CACHED // max(1, g.rows[0].numel()))
    parts = [
        _effective_items(g.items(lo, lo + step), rtol, None if output is None else output[lo : lo + step])
        for lo in range(0, max(1, g.rows.shape[0]), max(1, step))
    ]
    return EffectiveAttention(*(torch.cat(t) if len(t) > 1 else t[0] for t in zip(*parts, strict=True)))


def _effective_items(g: Given, rtol: float | None, output: Tensor | None) -> tuple[Tensor, ...]:
    w, v = g.clean_weights(), g.clean_values()
    found, rank, trivial = effective_map(
        w, v, key_visible=g.key_visible, causal=g.causal, offset=g.offset, mask=g.mask, rtol=rtol
    )
    with torch.no_grad():
        difference = w - found
        wide = torch.promote_types(v.dtype, torch.float32)
        if output is None:
            output = _times(w.to(wide), v.to(wide))
        residual = _ratio(_norm(_times(difference.to(wide), v.to(wide))), _norm(output))
        removed = _ratio(_norm(difference), _norm(w)).square()
    return found, residual, rank, removed, trivial


@dataclass(frozen=True, eq=False)
class EffectiveRows:
    """Effective attention from outputs and values: e numbers per query until rows of the map are asked for."""

    rank: Int[Tensor, "b h q"]
    trivial: Bool[Tensor, "b h q"]
    # W_perp = coefficients @ V^T over the keys a query sees.
    coefficients: Float[Tensor, "b h q e"]
    source: Given
    prefixes: Prefixes | None = None

    def rows(self, lo: int, hi: int) -> Float[Tensor, "b h c k"]:
        """W_perp of queries lo to hi."""
        g = self.source
        v, seen = g.clean_values().double(), g.seen(lo, hi)
        a = grouped(self.coefficients[:, :, lo:hi], self.coefficients.shape[1] // v.shape[1])
        found = a @ v.unsqueeze(2).mT
        if self.prefixes is not None:
            found = _with_lead(found, a, self.prefixes, lo, hi)
        found = ungrouped(found)
        if seen is not None:
            found = found.masked_fill(~seen, 0)
        return found.to(g.rows.dtype)

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
            lost += (_times(rows.to(lost.dtype), v.to(lost.dtype)) - part).square().sum((-1, -2))
        return _ratio(lost.sqrt(), _norm(output.to(lost.dtype)))


def effective_from_output(
    layer: LayerTrace | Float[Tensor, "b h q e"],
    values: Float[Tensor, "b g k e"] | None = None,
    *,
    key_visible: Bool[Tensor, "b k"] | None = None,
    causal: bool = False,
    offset: int = 0,
    mask: Bool[Tensor, "#b #h q k"] | None = None,
    rtol: float | None = None,
) -> EffectiveRows:
    """Effective attention from the head's output O alone, W_perp = O (V^T V)^+ V^T: memory linear in the length.

    The map is made in chunks of queries when asked for. Rounding in O is amplified by the condition number of V, which
    weights, where they are known, avoid.

    >>> v = torch.tensor([[[[1.0], [1.0], [2.0]]]])
    >>> effective_from_output(torch.tensor([[[[1.2]]]]), v).weights()
    tensor([[[[0.2000, 0.2000, 0.4000]]]])
    """
    g = given(layer, values, key_visible=key_visible, causal=causal, offset=offset, mask=mask, rows="output")
    o, v = g.rows, g.clean_values()
    if g.mask is not None and g.mask.shape[1] > 1:
        v = repeat_groups(v, o.shape[1] // v.shape[1])
    groups = o.shape[1] // v.shape[1]
    prefixes = None
    if g.mask is not None:
        a, rank, trivial = _row_coefficients(grouped(o, groups), v, g, rtol)
    elif g.causal and v.shape[2] and o.shape[2]:
        a, prefixes, rank, trivial = prefix_coefficients(grouped(o, groups), v, g.key_visible, g.offset, rtol)
    else:
        basis = column_basis(v, None if g.key_visible is None else g.key_visible[:, None], rtol=rtol)
        whiten = basis.whiten[:, :, None]
        a = grouped(o, groups).double() @ whiten @ whiten.mT
        rank, trivial = (t[..., None].expand(*t.shape, o.shape[2]) for t in (basis.rank, basis.trivial))
    rank, trivial = (repeat_groups(t, groups) for t in (rank, trivial))
    return EffectiveRows(rank, trivial, ungrouped(a), g, prefixes)


def _row_coefficients(o: Tensor, v: Tensor, g: Given, rtol: float | None) -> tuple[Tensor, Tensor, Tensor]:
    b, heads, _, n_q, _ = o.shape
    rank = torch.zeros(b, heads, n_q, dtype=torch.long, device=v.device)
    trivial = torch.zeros(b, heads, n_q, dtype=torch.bool, device=v.device)
    out = torch.zeros_like(o, dtype=torch.float64)
    for lo in range(0, n_q, 64):
        seen = g.seen(lo, lo + 64)
        assert seen is not None
        seen = seen.expand(b, heads, -1, -1)
        every = torch.ones_like(seen[..., 0]).nonzero(as_tuple=True)
        for (bi, gi, qi), _, exists, rows in gathered_rows(v, seen, every):
            basis = column_basis(rows[:, None], exists[:, None], rtol=rtol)
            whiten, at = basis.whiten[:, 0], qi + lo
            rank[bi, gi, at], trivial[bi, gi, at] = basis.rank[:, 0], basis.trivial[:, 0]
            out[bi, gi, :, at] = o[bi, gi, :, at].double() @ whiten @ whiten.mT
    return out, rank, trivial


def _with_lead(found: Tensor, a: Tensor, p: Prefixes, lo: int, hi: int) -> Tensor:
    """Rows that see at most rank keys hold their weights on the first visible keys instead of coefficients."""
    lead = p.lead[:, :, None, lo:hi, None]
    if not bool(lead.any()):
        return found
    _, exists, order = first_visible(p.x, p.seen[:, None], a.shape[-1])
    at = order[:, :, None, None].expand(*a.shape[:-1], order.shape[-1])
    direct = torch.zeros_like(found).scatter(-1, at, a[..., : order.shape[-1]] * exists[:, :, None, None])
    return torch.where(lead, direct, found)


def _times(w: Tensor, v: Tensor) -> Tensor:
    return ungrouped(grouped(w, w.shape[1] // v.shape[1]) @ v.unsqueeze(2))


def _norm(t: Tensor) -> Tensor:
    return torch.linalg.vector_norm(t, dim=(-1, -2), dtype=torch.promote_types(t.dtype, torch.float32))


def _ratio(top: Tensor, bottom: Tensor) -> Tensor:
    return torch.where(bottom == 0, top, top / bottom.masked_fill(bottom == 0, 1))
