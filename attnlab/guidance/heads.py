"""Which heads of a layer follow which pattern, in index order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["assign_heads"]


def assign_heads(
    heads: Mapping[str, int] | None = None,
    *,
    fraction: float | None = None,
    patterns: Sequence[str],
    n_heads: int,
    layer: int = 0,
    n_layers: int = 1,
) -> dict[str, range]:
    """Each pattern's heads in guided layer number ``layer`` of ``n_layers``, counted from 0; they begin with head 0.

    ``heads`` says how many heads each pattern has, the same in every layer. Or ``fraction`` (lambda) of a layer's heads
    is shared out among ``patterns``; where that is uneven, the patterns named first have one head more. Where a layer
    guides fewer heads than there are patterns, layers take turns: each continues with the pattern after the last of the
    layer before it. Too few heads in all layers together for every pattern are a ValueError.

    >>> assign_heads({"next": 1, "first": 2}, patterns=(), n_heads=4)
    {'next': range(0, 1), 'first': range(1, 3)}
    >>> [list(assign_heads(fraction=0.5, patterns=("next", "prev", "first"), n_heads=4, layer=i, n_layers=2))
    ...  for i in range(2)]
    [['next', 'prev'], ['first', 'next']]
    """
    if heads is None:
        assert fraction is not None
        heads = _share_out(fraction, patterns, n_heads=n_heads, layer=layer, n_layers=n_layers)
    total = sum(heads.values())
    if total > n_heads:
        raise ValueError(f"{total} guided heads ({_listed(heads)}), but a layer has {n_heads}; guide fewer")
    assigned, start = {}, 0
    for name, count in heads.items():
        if count:
            assigned[name] = range(start, start + count)
            start += count
    return assigned


def _share_out(fraction: float, patterns: Sequence[str], *, n_heads: int, layer: int, n_layers: int) -> dict[str, int]:
    """How many heads each pattern has in this layer, in the order of the heads."""
    guided = round(fraction * n_heads)
    if guided == 0:
        raise ValueError(
            f"fraction={fraction} of {n_heads} heads rounds to none; the least that guides one is {1 / n_heads:.3g}"
        )
    if guided >= len(patterns):
        each, more = divmod(guided, len(patterns))
        return {name: each + (i < more) for i, name in enumerate(patterns)}
    if guided * n_layers < len(patterns):
        layers = "one layer" if n_layers == 1 else f"each of {n_layers} layers"
        raise ValueError(
            f"fraction={fraction} guides {guided} of the {n_heads} heads in {layers}, too few for the {len(patterns)} "
            f"patterns {', '.join(patterns)}: raise the fraction, or name fewer patterns"
        )
    return {patterns[(layer * guided + i) % len(patterns)]: 1 for i in range(guided)}


def _listed(heads: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in heads.items())
