"""The lexical probe beta of KTIW: the probability of the right word if the model attended to one position alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attnlab.shapes import Bool, Float, Int

__all__ = ["class_probe", "lexical_probe", "proxy_probe"]

# Numbers of logits held at once: on a CPU about as many as its cache holds, on a GPU enough to keep it busy.
LOGITS = {"cpu": 1 << 22, "cuda": 1 << 26}


def lexical_probe(
    network: Callable[[Tensor, Tensor], Tensor],
    h: Float[Tensor, "b k e"],
    s: Float[Tensor, "b q m"],
    y: Int[Tensor, "b q"],
    *,
    key_visible: Bool[Tensor, "b k"] | None = None,
    vocabulary: int,
    log: bool = False,
) -> Float[Tensor, "b q k"]:
    """beta[t, l] = N([h_l, s_t])_{y_t} (Eq. 4), or its logarithm, which still ranks where the probability saturates.

    ``network(h, s)`` gives the logits ``(pairs, vocabulary)`` of N for ``(pairs, e)`` and ``(pairs, m)``. Only visible
    keys and targets y >= 0 are computed, a chunk at a time, never vocabulary x q x k at once; every other entry is 0
    (log: minus infinity). Gradients are not kept.

    >>> network = lambda h, s: h + s
    >>> beta = lexical_probe(network, torch.eye(2)[None], torch.zeros(1, 1, 2), torch.tensor([[0]]), vocabulary=2)
    >>> beta.round(decimals=2)
    tensor([[[0.7300, 0.2700]]])
    """
    _check_targets(y, vocabulary)
    wanted = (y >= 0).unsqueeze(2).expand(-1, -1, h.shape[1])
    if key_visible is not None:
        wanted = wanted & key_visible.unsqueeze(1)
    out = torch.full(wanted.shape, -torch.inf, dtype=s.dtype, device=s.device)
    with torch.no_grad():
        for at in wanted.nonzero().split(_rows(vocabulary, s.device)):
            b, t, k = at.unbind(1)
            logits = network(h[b, k], s[b, t])
            if logits.shape != (len(at), vocabulary):
                raise ValueError(f"network must give (pairs, vocabulary) = {(len(at), vocabulary)}, got {logits.shape}")
            right = logits.gather(1, y[b, t].unsqueeze(1)).squeeze(1)
            out[b, t, k] = (right - logits.logsumexp(1)).to(out.dtype)
    return out if log else out.exp_()


def proxy_probe(
    weight: Float[Tensor, "v d"], embedding: Float[Tensor, "w d"], x: Int[Tensor, "b k"], y: Int[Tensor, "b q"]
) -> Float[Tensor, "b q k"]:
    """beta_px[t, l] = softmax(W e_{x_l})_{y_t} (Eq. 6), the bag-of-words proxy's; ids below 0 are padding and get 0.

    The denominator is computed once for each distinct word, in chunks.
    """
    _check_targets(y, len(weight))
    _check_targets(x, len(embedding), name="x")
    with torch.no_grad():
        words, place = x.clamp_min(0).unique(return_inverse=True)
        chunks = embedding[words].split(_rows(len(weight), weight.device))
        normaliser = torch.cat([(chunk @ weight.T).logsumexp(1) for chunk in chunks])
        right = weight[y.clamp_min(0)] @ embedding[x.clamp_min(0)].mT
        beta = (right - normaliser[place].unsqueeze(1)).exp()
        return beta * ((y >= 0).unsqueeze(2) & (x >= 0).unsqueeze(1))


def class_probe(
    weight: Float[Tensor, " e"], h: Float[Tensor, "b k e"], y: Int[Tensor, " b"], *, bias: float = 0.0
) -> Float[Tensor, "b k"]:
    """beta_l = sigmoid((2 y - 1) W^T h_l) of a binary classifier (Eq. 9).

    A two-row softmax layer has ``weight = W[1] - W[0]``. The attention's own p is sigmoid(sum_l alpha_l
    logit(beta_l)) (Eq. 12). The paper leaves the bias out; with it, Eq. 12 holds for a layer that has one.
    """
    _check_targets(y, 2)
    if (y < 0).any():
        raise ValueError(f"labels must be 0 or 1, got {int(y.min())}")
    return torch.sigmoid((2 * y - 1).unsqueeze(1) * (h @ weight + bias))


def _rows(vocabulary: int, device: torch.device) -> int:
    """How many rows of logits are made at once."""
    return max(1, LOGITS.get(device.type, LOGITS["cuda"]) // max(1, vocabulary))


def _check_targets(y: Tensor, size: int, *, name: str = "y") -> None:
    if y.numel() and int(y.max()) >= size:
        raise ValueError(f"{name} has the id {int(y.max())}, beyond the {size} of the layer")
