"""The lexical probe of any model with attention: its predictions when heads are forced to attend to one position.

For KTIW's models this is Eq. 4. A transformer has many heads; one may force all of them, as Eq. 4 does, or one alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from attnlab.mechanisms.per_head import per_head
from attnlab.shapes import Float, Int

__all__ = ["forced_probe", "position_spec"]


def position_spec(at: int, *, head: int | None = None, heads: int = 1) -> str:
    """The spec under which a head (None: every head) attends to key number ``at`` only; other heads attend as usual.

    >>> position_spec(3), position_spec(3, head=1, heads=2)
    ('position:at=3', 'per-head:heads=softmax/position:at=3')
    """
    if head is None:
        return f"position:at={at}"
    if not 0 <= head < heads:
        raise ValueError(f"head must lie between 0 and {heads - 1}, got {head}")
    return per_head(["softmax" if h != head else f"position:at={at}" for h in range(heads)])


@torch.no_grad()
def forced_probe(
    answer: Callable[[], Tensor],
    force: Callable[[str], AbstractContextManager[object]],
    y: Int[Tensor, "b q"],
    *,
    keys: int,
    head: int | None = None,
    heads: int = 1,
) -> Float[Tensor, "b q k"]:
    """log beta[t, l]: the logarithm of the right word's probability when attention is forced to source position l.

    ``answer()`` runs the model and gives logits ``(b, q, v)``; ``force(spec)`` is a context in which the layers to be
    probed attend by ``spec``: ``lambda spec: attnlab.swap(model, spec, layers="cross")`` for any model. One
    forward pass for each of the ``keys`` positions. Values beyond a row's length mean nothing, so pass the lengths
    to ``agreement``. Targets below 0 are padding and have minus infinity.
    """
    is_target = y >= 0
    out = torch.full((*y.shape, keys), -torch.inf, device=y.device)
    for at in range(keys):
        with force(position_spec(at, head=head, heads=heads)):
            logits = answer().float()
        right = logits.gather(2, y.clamp_min(0).unsqueeze(2)).squeeze(2) - logits.logsumexp(2)
        out[:, :, at] = right.masked_fill(~is_target, -torch.inf)
    return out
