"""Attention that is not learned, by hand."""

from __future__ import annotations

import pytest
import torch

import attnlab as al


def call(**changes: object) -> al.AttentionCall:
    q, k, v = torch.randn(1, 2, 3, 5), torch.randn(1, 1, 4, 5), torch.randn(1, 1, 4, 7)
    return al.AttentionCall(q, k, v, **changes)  # type: ignore[arg-type]


def test_uniform_shares_among_what_is_seen() -> None:
    seen = torch.tensor([[False, True, True, True]])
    weights = al.mechanism("uniform").weights(call(key_visible=seen))
    assert weights[0, 1, 2].tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3])
    causal = al.mechanism("uniform").weights(call(causal=True, offset=1))
    assert causal[0, 0].tolist() == [[0.5, 0.5, 0, 0], pytest.approx([1 / 3] * 3 + [0]), [0.25] * 4]


def test_position_counts_what_is_seen() -> None:
    seen = torch.tensor([[False, True, True, True]])
    weights = al.mechanism("position:at=1").weights(call(key_visible=seen))
    assert weights[0, 0].tolist() == [[0, 0, 1, 0]] * 3
    assert al.mechanism("position:at=3").weights(call(key_visible=seen)).eq(0).all()
    one = call()
    torch.testing.assert_close(al.mechanism("position:at=2")(one)[0, 1, 0], one.v[0, 0, 2])
    with pytest.raises(ValueError, match="at must be a position counted from 0, got -1"):
        al.mechanism("position:at=-1")
