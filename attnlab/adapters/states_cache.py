"""The past of a swapped layer whose mechanism reads hidden states: keys, values, and what the keys were made from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from attnlab.adapters.memory_cache import cache_layers
from attnlab.shapes import Float
from attnlab.trace import Kind

__all__ = ["HiddenStatesLayer", "with_past_states"]


class HiddenStatesLayer(DynamicLayer):
    """A transformers cache layer with the hidden states of its keys, whose rows and tokens follow those of the keys."""

    x: Tensor | None = None

    def add_states(self, x: Float[Tensor, "b n m"]) -> Float[Tensor, "b k m"] | None:
        """The states of all tokens, the new ones last; None if some tokens came while no states were kept."""
        past = self.get_seq_length()
        if past == 0:
            self.x = x
        elif self.x is not None and self.x.shape[1] >= past:
            # The states of a forward pass that failed, or that another hook has added, are replaced.
            self.x = torch.cat([self.x[:, :past], x], 1)
        else:
            return None
        return self.x

    def reorder_cache(self, beam_idx: Any) -> None:
        super().reorder_cache(beam_idx)
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.x is not None:
            self.x = self.x.repeat_interleave(repeats, 0)

    def crop(self, *args: Any, **kwargs: Any) -> None:
        super().crop(*args, **kwargs)
        if self.x is not None:
            self.x = self.x[:, : self.get_seq_length()]

    def _select(self, rows: Tensor) -> None:
        if self.x is not None:
            self.x = self.x[rows.to(self.x.device)]


def with_past_states(
    x: Float[Tensor, "b n m"], cache: Any, index: int | None, kind: Kind, name: str
) -> Float[Tensor, "b k m"]:
    """The hidden states of all tokens in the cache and of the new ones, which the cache keeps from now on."""
    layers = cache_layers(cache, kind)
    if index is None or layers is None:
        return x
    while len(layers) <= index:
        layers.append(DynamicLayer())
    layer = layers[index]
    if type(layer) is DynamicLayer and layer.get_seq_length() == 0:
        layer = layers[index] = HiddenStatesLayer()
    states = layer.add_states(x) if isinstance(layer, HiddenStatesLayer) else None
    if states is not None:
        return states
    if layer.get_seq_length() > 0:
        raise ValueError(
            f"{name} attends by a mechanism that reads the hidden states of all tokens, and this cache "
            f"({type(layer).__name__}) has not kept them; begin with an empty DynamicCache inside the swap, or "
            "generate with use_cache=False"
        )
    return x
