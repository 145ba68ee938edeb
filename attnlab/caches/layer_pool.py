"""Layers that share one budget, and therefore lose their keys together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnlab.caches.contract import Moment
from attnlab.caches.kv_policy import keep_masks

if TYPE_CHECKING:
    from attnlab.caches.kept_keys import KeptKeys

__all__ = ["LayerPool"]


class LayerPool:
    """The layers of a model that share their budgets: each waits until all have read the prompt, then all are cut."""

    def __init__(self) -> None:
        # What each layer that waits was asked, and how its policy ranks its keys.
        self.waiting: dict[KeptKeys, tuple[Moment, Tensor]] = {}

    def cut(self) -> None:
        """Cut the layers that wait."""
        waiting, self.waiting = self.waiting, {}
        if not waiting:
            return
        moments, scores = zip(*waiting.values(), strict=True)
        policy = next(iter(waiting)).policy
        with torch.no_grad():
            keep = keep_masks(policy, moments, scores)
        for kept, moment, own in zip(waiting, moments, keep, strict=True):
            kept.cut_with_pool(moment, own)
