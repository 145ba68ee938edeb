"""How the bag-of-words proxy begins to learn: its derivatives at initialisation, from the count table (KTIW, A.2)."""

from __future__ import annotations

from torch import Tensor

from attnlab.shapes import Float

__all__ = ["logit_derivative", "theta_derivative"]


def logit_derivative(counts: Float[Tensor, "i o"]) -> Float[Tensor, "i o"]:
    """d(W e)_{i,o} / d tau at tau = 0 as d grows: 2 (C[i, o] - mean over o' of C[i, o']) (Eqs. 53, 54)."""
    return 2 * (counts - counts.mean(1, keepdim=True))


def theta_derivative(counts: Float[Tensor, "i o"]) -> Float[Tensor, "i o"]:
    """d theta_{i,o} / d tau at tau = 0, theta = softmax(W e_i)_o: the logits' divided by |O|, a factor Eq. 15 drops."""
    return logit_derivative(counts) / counts.shape[1]
