"""Gradient saliency Delta: how much less the loss would be with a little more of one input word."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attnlab.shapes import Float

__all__ = ["gradient_saliency"]


def gradient_saliency(nll: Callable[[Tensor], Tensor], embeddings: Float[Tensor, "b k m"]) -> Tensor:
    """Delta_l = -d NLL / d c_l at c = 1, where the embedding of word l is scaled by c_l (KTIW section 5.1).

    ``nll(embeddings)`` gives the negative log-likelihood of each example ``(b,)``, and Delta is ``(b, k)``; or of each
    target ``(b, q)``, and Delta is ``(b, q, k)``: one gradient a target. Examples must not depend on each other, so
    call it with the model in eval mode. Positive means that the word supports the right answer.

    >>> embeddings = torch.tensor([[[1.0], [2.0]]])
    >>> gradient_saliency(lambda e: -(3 * e[:, 0, 0] - e[:, 1, 0]), embeddings)
    tensor([[ 3., -2.]])
    """
    with torch.enable_grad():
        scale = torch.ones(embeddings.shape[:2], dtype=embeddings.dtype, device=embeddings.device, requires_grad=True)
        losses = nll(embeddings.detach() * scale.unsqueeze(2))
        if losses.ndim not in (1, 2) or len(losses) != len(embeddings):
            raise ValueError(
                f"nll must give (b,) or (b, q) losses for b = {len(embeddings)} examples, got {tuple(losses.shape)}"
            )
        if losses.ndim == 1:
            return -torch.autograd.grad(losses.sum(), scale)[0]
        columns = losses.sum(0).unbind()
        grads = [torch.autograd.grad(column, scale, retain_graph=True)[0] for column in columns]
    return -torch.stack(grads, 1) if grads else scale.detach().new_zeros(len(losses), 0, scale.shape[1])
