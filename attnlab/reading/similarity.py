"""What fine-tuning changed: cosine similarity of a head's maps in two checkpoints (section 3.3 of Effective)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnlab.shapes import Bool, Float

__all__ = ["head_similarity"]


def head_similarity(
    first: Sequence[Float[Tensor, "b h n n"]],
    second: Sequence[Float[Tensor, "b h n n"]],
    *,
    key_visible: Bool[Tensor, "b n"] | None = None,
) -> Float[Tensor, "l h"]:
    """Per layer and head, the cosine of the two flattened maps, averaged over inputs; padding counts on neither axis.

    The maps are any reading's: standard, effective, or others, of two models on the same batch. An input whose map is
    zero in either model has no angle and is left out; a head with no other input is NaN.

    >>> a, b = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]]), torch.tensor([[[[1.0, 0.0], [1.0, 0.0]]]])
    >>> head_similarity([a], [b])
    tensor([[0.5000]])
    """
    if len(first) != len(second):
        raise ValueError(f"two models of one architecture have as many layers: got {len(first)} and {len(second)}")
    rows = []
    for layer, (a, b) in enumerate(zip(first, second, strict=True)):
        if a.shape != b.shape:
            raise ValueError(
                f"layer {layer}: maps of one shape are expected, got {tuple(a.shape)} and {tuple(b.shape)}"
            )
        a, b = (_flat(t, key_visible) for t in (a, b))
        lengths = torch.linalg.vector_norm(a, dim=-1) * torch.linalg.vector_norm(b, dim=-1)
        known = lengths > 0
        cosines = (a * b).sum(-1) / lengths.masked_fill(~known, 1)
        rows.append((cosines * known).sum(0) / known.sum(0))
    return torch.stack(rows)


def _flat(t: Tensor, key_visible: Tensor | None) -> Tensor:
    if key_visible is not None:
        both = key_visible[:, None, :, None] & key_visible[:, None, None, :]
        t = t.masked_fill(~both, 0)
    return t.flatten(2)
