from __future__ import annotations

import pytest
import torch

import attnlab as al
from tests.tolerance import assert_close


def seen(r: int, n: int, **settings: object) -> list[list[int]]:
    """Which keys each query gets weight from."""
    q, k, v = (torch.randn(1, 1, n, 3) for _ in range(3))
    W = al.mechanism(f"window:r={r}").weights(al.AttentionCall(q, k, v, **settings))
    return [row.nonzero().flatten().tolist() for row in W[0, 0]]


def test_the_own_key_counts() -> None:
    assert seen(2, 4) == [[0, 1], [0, 1, 2], [1, 2, 3], [2, 3]]
    assert seen(1, 3) == [[0], [1], [2]]
    assert seen(3, 4) == seen(2, 4)


def test_causal_windows_hold_the_last_r_keys() -> None:
    assert seen(2, 4, causal=True) == [[0], [0, 1], [1, 2], [2, 3]]
    assert seen(99, 3, causal=True) == [[0], [0, 1], [0, 1, 2]]


def test_hidden_keys_take_no_place_in_the_window() -> None:
    visible = torch.tensor([[True, False, False, True, True]])
    assert seen(2, 5, key_visible=visible)[3] == [0, 3, 4]
    assert seen(2, 5, key_visible=visible, causal=True)[3] == [0, 3]


@pytest.mark.parametrize("n", [1, 63, 100, 257])
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_equal_the_reference(n: int, causal: bool) -> None:
    q, k, v = (torch.randn(2, h, n, 5, dtype=torch.float64) for h in (4, 2, 2))
    call = al.AttentionCall(
        q, k, v, causal=causal, key_visible=torch.rand(2, n) > 0.3, mask=torch.rand(2, 1, n, n) > 0.2
    )
    mech = al.mechanism("window:r=14")
    assert_close(
        mech(call), mech.weights(call) @ v.masked_fill(~call.key_visible[:, None, :, None], 0).repeat_interleave(2, 1)
    )


def test_bad_settings_and_cross_attention_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        al.mechanism("window:r=0")
    with pytest.raises(ValueError, match="no place among the keys"):
        al.mechanism("window")(al.AttentionCall(*(torch.randn(1, 1, n, 3) for n in (5, 7, 7))))
