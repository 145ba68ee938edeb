from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import attnlab as al
from attnlab.attention import scores
from tests.tolerance import assert_close


def call_with_alpha(alpha: list[float], values: list[list[float]], **settings: object) -> al.AttentionCall:
    """One query whose softmax weights are ``alpha``."""
    k = torch.tensor(alpha, dtype=torch.float64).log().view(1, 1, -1, 1)
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    return al.AttentionCall(q, k, torch.tensor(values, dtype=torch.float64)[None, None], scale=1.0, **settings)


def test_top_two_of_four_renormalised() -> None:
    call = call_with_alpha([0.1, 0.4, 0.2, 0.3], [[1.0], [2.0], [3.0], [4.0]])
    assert_close(al.mechanism("top-r:r=2").weights(call), torch.tensor([[[[0, 4 / 7, 0, 3 / 7]]]], dtype=torch.float64))


def test_by_alpha_norm_ranks_by_weight_times_norm_and_keeps_alpha() -> None:
    call = call_with_alpha([0.1, 0.4, 0.2, 0.3], [[10.0], [1.0], [4.0], [1.0]])
    weights = al.mechanism("top-r:r=2,by=alpha-norm").weights(call)
    assert_close(weights, torch.tensor([[[[1 / 3, 0, 2 / 3, 0]]]], dtype=torch.float64))


@pytest.mark.parametrize("kernel", ["exp", "elu", "poly"])
def test_ties_go_to_the_lowest_index(kernel: str) -> None:
    k = torch.tensor([1.0, 2.0, 2.0, 1.0, 2.0]).view(1, 1, 5, 1)
    call = al.AttentionCall(torch.ones(1, 1, 1, 1), k, torch.randn(1, 1, 5, 3))
    weights = al.mechanism(f"top-r:r=2,kernel={kernel}").weights(call)
    assert_close(weights, torch.tensor([[[[0.0, 0.5, 0.5, 0.0, 0.0]]]]))
    weights = al.mechanism(f"top-r:r=4,kernel={kernel}").weights(call)
    assert (weights[0, 0, 0] > 0).tolist() == [True, True, True, False, True]


@pytest.mark.parametrize("kernel", ["exp", "elu", "poly"])
def test_all_visible_keys_make_it_exact(kernel: str) -> None:
    q, k, v = (torch.randn(2, 3, n, 11, dtype=torch.float64) for n in (5, 7, 7))
    call = al.AttentionCall(q, k, v, key_visible=torch.tensor([[True] * 7, [True, False] * 3 + [True]]))
    exact = al.Kernelized(kernel)(call)
    for r in (7, 1000):
        assert_close(al.mechanism(f"top-r:r={r},kernel={kernel}")(call), exact)


def test_infinite_scores_share_all_weight_and_minus_infinity_hides() -> None:
    # Products of 1e60 are infinite in float32.
    k = torch.tensor([0.0, 1e30, 1e30, 1e30, 5e-30]).view(1, 1, 5, 1)
    bias = torch.tensor([[[[0.0, 0.0, -math.inf, 0.0, 0.0]]]])
    call = al.AttentionCall(torch.full((1, 1, 1, 1), 1e30), k, torch.randn(1, 1, 5, 3), bias=bias)
    assert al.mechanism("top-r:r=3").weights(call).tolist() == [[[[0.0, 0.5, 0.0, 0.5, 0.0]]]]
    assert al.mechanism("top-r:r=1").weights(call).tolist() == [[[[0.0, 1.0, 0.0, 0.0, 0.0]]]]
    nothing = replace(call, bias=torch.full((1, 1, 1, 5), -math.inf))
    assert (al.mechanism("top-r:r=3")(nothing) == 0).all()


def test_long_input_in_chunks_equals_the_reference() -> None:
    q, k, v = (torch.randn(1, 2, 1031, 5) for _ in range(3))
    call = al.AttentionCall(q, k, v, causal=True)
    mech = al.mechanism("top-r:r=17")
    assert_close(mech(call), mech.weights(call) @ v)
    assert ((mech.weights(call) > 0).sum(-1) <= 17).all()


def test_gradient_flows_through_the_kept_scores_only() -> None:
    k = torch.randn(1, 1, 7, 11, dtype=torch.float64, requires_grad=True)
    call = al.AttentionCall(torch.randn(1, 1, 1, 11, dtype=torch.float64), k, torch.randn(1, 1, 7, 13).double())
    al.mechanism("top-r:r=3")(call).sum().backward()
    kept = scores(call).topk(3).indices.flatten()
    assert k.grad is not None
    touched = k.grad[0, 0].abs().sum(-1) > 0
    assert touched.nonzero().flatten().tolist() == sorted(kept.tolist())


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("top-r:r=0", "at least 1"),
        ("top-r:by=mass", "alpha-norm"),
        ("top-r:kernel=cosine", "kernel must be one of"),
        ("top-r:kernel=poly,degree=3", "no distribution"),
    ],
)
def test_bad_settings_say_what_to_do(spec: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        al.mechanism(spec)


def test_r_may_be_one_more_than_the_width_of_a_value() -> None:
    q, k, v = torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 2)
    call = al.AttentionCall(q, k, v)
    W = al.mechanism("top-r:r=d+1").weights(call)
    assert ((W > 0).sum(-1) == 3).all()
    assert torch.equal(W, al.mechanism("top-r:r=3").weights(call))
    with pytest.raises(ValueError, match="or \"d\\+1\", got 'd-1'"):
        al.mechanism("top-r:r=d-1")
