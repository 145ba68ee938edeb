"""The layers of one cache: what they hold together, and those that share one budget and are cut together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnlab.caches.contract import Moment
from attnlab.caches.kv_policy import keep_masks
from attnlab.shapes import Int

if TYPE_CHECKING:
    from attnlab.caches.kept_keys import KeptKeys

__all__ = ["KeysOfLayers", "LayerPool"]


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


class KeysOfLayers:
    """What a cache says of the keys of all its layers."""

    def kept_keys(self) -> list[KeptKeys]:
        """Those of the layers."""
        raise NotImplementedError

    def kept(self) -> list[int]:
        """The most keys that a head of each layer holds."""
        return [kept.longest for kept in self.kept_keys()]

    def kept_by_head(self) -> list[Int[Tensor, "b g"]]:
        """For each layer that has read tokens, the keys that every head of every row holds."""
        return [kept.counts() for kept in self.kept_keys() if kept.longest]

    def nbytes(self) -> int:
        """The bytes that are held: keys, values, what finds them, and what the policy ranks them by."""
        return sum(kept.nbytes() for kept in self.kept_keys())

    def gathered_bytes(self) -> int:
        """Those of them that the policy ranks keys by."""
        return sum(kept.gathered_bytes() for kept in self.kept_keys())

    def certificates(self) -> list[Any]:
        """For each layer, how good what the policy put in the place of its keys is; None where it put nothing."""
        return [kept.certificate for kept in self.kept_keys()]

    def nominal_bytes(self) -> int:
        """The bytes of the keys and values that are kept, with what is added to their scores."""
        return sum(kept.nominal_bytes() for kept in self.kept_keys())
