"""Heads in two parts: values and gradients of split and cat, without copying what lies in place."""

from __future__ import annotations

import torch

from attnlab.guidance.split_heads import join_heads, split_heads
from tests.tolerance import assert_close

B, H, N, D, FIRST = 2, 5, 7, 3, 2


def test_split_and_join_are_each_others_inverse() -> None:
    for width, dtype in ((3, torch.float64), (3, torch.bfloat16), (16, torch.bfloat16)):
        t, u = (torch.randn(B, N, H, width, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(2))
        (t0, u0), (t1, u1) = split_heads(FIRST, t, u)
        assert [p.shape[1] for p in (t0, t1, u0, u1)] == [FIRST, H - FIRST] * 2
        whole = join_heads(2 * t0 + u0, 4 * t1 + u1)
        assert_close(whole, torch.cat([2 * t[:, :FIRST], 4 * t[:, FIRST:]], 1) + u)
        slope = torch.randn_like(whole)
        slopes = torch.autograd.grad(whole, (t, u), slope)
        assert_close(slopes[0], torch.cat([2 * slope[:, :FIRST], 4 * slope[:, FIRST:]], 1))
        assert_close(slopes[1], slope)


def test_a_part_in_place_is_not_copied() -> None:
    room = torch.zeros(B, N, H, D).transpose(1, 2)[:, :FIRST]
    room += 1
    whole = join_heads(room, torch.full((B, H - FIRST, N, D), 2.0))
    assert whole.data_ptr() == room.data_ptr()
    assert whole[:, :FIRST].unique().tolist() == [1]
    assert whole[:, FIRST:].unique().tolist() == [2]
    # The joined heads flatten to the model's width without a copy.
    assert whole.transpose(1, 2).flatten(2).data_ptr() == room.data_ptr()


def test_a_part_of_which_nothing_is_made_has_the_gradient_zero() -> None:
    t, u = (torch.randn(B, H, N, D, requires_grad=True) for _ in range(2))
    (t0, _), (_, u1) = split_heads(FIRST, t, u)
    for part, leaf, other in ((t0, t, u), (u1, u, t)):
        slopes, none = torch.autograd.grad(part.sum(), (leaf, other), allow_unused=True, retain_graph=True)
        assert none is None
        assert slopes[:, :FIRST].unique().tolist() == [1 if leaf is t else 0]
        assert slopes[:, FIRST:].unique().tolist() == [0 if leaf is t else 1]
