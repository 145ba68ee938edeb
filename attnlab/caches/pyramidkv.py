"""PyramidKV: SnapKV's scores, with more keys in early layers than in late ones (Cai et al., 2024, arXiv 2406.02069)."""

from __future__ import annotations

from dataclasses import dataclass

from attnlab.caches.registry import policy
from attnlab.caches.snapkv import SnapKV

__all__ = ["PyramidKV"]


@policy("pyramidkv", examples=("pyramidkv:window=2,kernel=3",))
@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV's scores under budgets that fall linearly with the layer (``kv_policy.pyramid``).

    Cai et al. were the first to shape budgets so, with PyramidInfer (Yang et al., 2024). ``layers="pyramid"`` gives the
    same budgets to any other policy.
    """

    layers = "pyramid"
