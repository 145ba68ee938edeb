"""Heads in two parts: values and gradients of split and cat, without copying what lies in place."""

from __future__ import annotations

import torch

from attnlab.guidance.halves import join_heads, split_heads
from tests.tolerance import assert_close

B, H, N, D, FIRST = 2, 5, 7, 3, 2


def test_split_and_join_are_each_others_inverse() -> None:
    t = torch.randn(B, N, H, D, dtype=torch.float64).transpose(1, 2).requires_grad_()
    parts = split_heads(t, FIRST)
    assert [p.shape[1] for p in parts] == [FIRST, H - FIRST]
    whole = join_heads(2 * parts[0], 3 * parts[1])
    assert_close(whole, torch.cat([2 * t[:, :FIRST], 3 * t[:, FIRST:]], 1))
    slope = torch.randn_like(whole)
    (found,) = torch.autograd.grad(whole, t, slope)
    assert_close(found, torch.cat([2 * slope[:, :FIRST], 3 * slope[:, FIRST:]], 1))


def test_a_part_in_place_is_not_copied() -> None:
    room = torch.zeros(B, N, H, D).transpose(1, 2)[:, :FIRST]
    room += 1
    whole = join_heads(room, torch.full((B, H - FIRST, N, D), 2.0))
    assert whole.data_ptr() == room.data_ptr()
    assert whole[:, :FIRST].unique().tolist() == [1]
    assert whole[:, FIRST:].unique().tolist() == [2]
    # The joined heads flatten to the model's width without a copy.
    assert whole.transpose(1, 2).flatten(2).data_ptr() == room.data_ptr()
