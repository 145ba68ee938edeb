"""Which heads follow which pattern: the same in every layer, in index order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["assign_heads"]


def assign_heads(
    heads: Mapping[str, int] | None = None,
    *,
    fraction: float | None = None,
    patterns: Sequence[str],
    n_heads: int,
) -> dict[str, range]:
    """Each pattern's heads, from head 0 on: as many as ``heads`` says, or ``fraction`` of them (lambda) shared evenly.

    Where the share is uneven, the patterns named first have one head more.

    >>> assign_heads({"next": 1, "first": 2}, patterns=(), n_heads=4)
    {'next': range(0, 1), 'first': range(1, 3)}
    """
    if heads is None:
        assert fraction is not None
        guided = round(fraction * n_heads)
        if guided == 0:
            raise ValueError(
                f"fraction={fraction} of {n_heads} heads rounds to none; the least that guides one is {1 / n_heads:.3g}"
            )
        each, more = divmod(guided, len(patterns))
        heads = {name: each + (i < more) for i, name in enumerate(patterns)}
    total = sum(heads.values())
    if total > n_heads:
        raise ValueError(f"{total} guided heads ({_listed(heads)}), but a layer has {n_heads}; guide fewer")
    assigned, start = {}, 0
    for name, count in heads.items():
        if count:
            assigned[name] = range(start, start + count)
            start += count
    return assigned


def _listed(heads: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in heads.items())
