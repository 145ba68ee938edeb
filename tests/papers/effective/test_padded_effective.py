"""The paper's way of computing agrees without padding, and breaks its own identity with it."""

from __future__ import annotations

import torch

from attnlab.mechanisms.softmax import softmax
from attnlab.reading.effective import effective_attention
from papers.effective.padded_effective import padded_effective_attention


def test_without_padding_both_agree() -> None:
    w, v = softmax(torch.randn(2, 3, 29, 29)), torch.randn(2, 3, 29, 7)
    padded, exact = padded_effective_attention(w, v), effective_attention(w, v)
    torch.testing.assert_close(padded.weights, exact.weights, atol=1e-5, rtol=0)
    torch.testing.assert_close(padded.removed, exact.removed, atol=1e-4, rtol=0)
    assert padded.residual.max() < 1e-5


def test_padding_inside_the_values_breaks_the_identity() -> None:
    seen = (torch.arange(128) < 20)[None]
    w = softmax(torch.randn(1, 2, 128, 128).masked_fill(~seen, -torch.inf))
    v = torch.randn(1, 2, 128, 64)
    padded, exact = (f(w, v, key_visible=seen) for f in (padded_effective_attention, effective_attention))
    # 20 real tokens in 64 dimensions: nothing is invisible, and W_perp is W. The paper's way removes part of it.
    assert exact.trivial.all()
    assert torch.equal(exact.weights, w)
    assert padded.residual.min() > 0.3
    assert padded.removed.min() > 0.1
