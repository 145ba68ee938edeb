"""The statistics of ``watch`` by their definitions, from the dense W of a recorded layer."""

from __future__ import annotations

import torch
from torch import Tensor

import attnlab as al
from attnlab.attention import hide_unseen, mask_with_bias, repeat_groups

__all__ = ["assert_same_statistics", "dense_statistics"]


@torch.no_grad()
def dense_statistics(
    layer: al.LayerTrace, *, sinks: int, recent: int, members: Tensor, block: int = 64
) -> dict[str, Tensor | None]:
    """All but the largest weights; ``members`` are sets of keys, (b or 1, n, m)."""
    call, w = layer.call, layer.weights().float()
    b, _, n_q, n_k = call.sizes
    seen = torch.ones(b, n_k, dtype=torch.bool) if call.key_visible is None else call.key_visible
    of_keys = seen.cumsum(-1) - 1
    own = of_keys[:, (torch.arange(n_q) + call.offset).clamp(max=n_k - 1)] if layer.kind != "cross" else None
    first = ((of_keys < sinks) & seen)[:, None, None]
    norms = repeat_groups(hide_unseen(call).v.float().norm(dim=-1), call.groups)[:, :, None]
    masses = torch.nn.functional.pad(w, (0, -n_k % block, 0, -n_q % block))
    masses = masses.unflatten(3, (-1, block)).unflatten(2, (-1, block)).sum((3, 5))
    sizes = [torch.tensor([min(block, n - i) for i in range(0, n, block)]) for n in (n_q, n_k)]
    distances = None if own is None else (own[:, :, None] - of_keys[:, None]).abs()[:, None]
    return {
        "entropy": torch.special.entr(w).sum(-1).masked_fill((w < 0).any(-1), torch.nan),
        "sum_of_squares": w.square().sum(-1),
        "sinks": (w * first).sum(-1),
        "recent": None if distances is None else (w * (distances < recent)).sum(-1),
        "distance": None if distances is None else (w * distances).sum(-1),
        "sets": w @ members.expand(b, -1, -1)[:, None].float(),
        "norm": (w.abs() * norms).sum(-1),
        "weighted": w.abs() * norms,
        "weights": w,
        "removed": _removed(layer),
        "received": w.sum(2),
        "blocks": masses / (sizes[0][:, None] * sizes[1]),
    }


def _removed(layer: al.LayerTrace) -> Tensor | None:
    if mask_with_bias(layer.call) is not None:
        return None
    w, effective = layer.weights().double(), al.effective_attention(layer).weights.double()
    whole = w.square().sum(-1)
    return ((w - effective).square().sum(-1) / whole.masked_fill(whole == 0, 1)).float()


def assert_same_statistics(layer: al.LayerStatistics, dense: dict[str, Tensor | None], *, atol: float = 1e-5) -> None:
    """The watched statistics are the dense ones; of equal weights any may be among the largest."""
    for name in ("entropy", "sum_of_squares", "sinks", "recent", "distance", "norm", "received", "blocks"):
        watched, expected = getattr(layer, name), dense[name]
        assert (watched is None) == (expected is None), name
        if watched is not None:
            scale = max(1.0, float(expected.nan_to_num().abs().max()))
            torch.testing.assert_close(
                watched / scale, expected / scale, rtol=0, atol=atol, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
            )
    for i, mass in enumerate(layer.sets.values()):
        torch.testing.assert_close(mass, dense["sets"][..., i], rtol=0, atol=atol)
    _assert_largest(layer.largest, layer.places, dense["weights"], atol)
    _assert_largest(layer.norm_largest, layer.norm_places, dense["weighted"], atol)
    assert (layer.removed is None) == (dense["removed"] is None)
    if layer.removed is not None:
        # From outputs in float32, whose rounding the values' condition amplifies.
        torch.testing.assert_close(layer.removed, dense["removed"], rtol=0, atol=max(1e-4, atol))


def _assert_largest(values: Tensor, places: Tensor, weights: Tensor, atol: float) -> None:
    n = min(values.shape[-1], weights.shape[-1])
    expected = weights.topk(n).values
    scale = max(1.0, float(expected.max()))
    torch.testing.assert_close(values[..., :n] / scale, expected / scale, rtol=0, atol=atol)
    at = weights.gather(-1, places.clamp(min=0).long())
    torch.testing.assert_close(at.masked_fill(places < 0, 0) / scale, values / scale, rtol=0, atol=atol)
    ordered = places.sort(-1).values
    assert not bool(((ordered.diff() == 0) & (ordered[..., 1:] >= 0)).any()), "a key stands twice among the largest"
